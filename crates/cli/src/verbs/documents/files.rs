//! Documents in files.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use datastore::text_fault;
use ipam_operator::documents::Manifest;
use serde_json::Value;

use crate::error::{Failure, Result};
use crate::output::printable;

/// The size of the largest file.
const MOST_BYTES: u64 = 16 << 20;

/// Reads all documents of these files and folders, in their order; the files of a folder by name. It is an error if
/// there is none.
pub(super) fn read(paths: &[PathBuf], depth: Depth) -> Result<Vec<Manifest>> {
    let manifests = read_any(paths, depth)?;
    if manifests.is_empty() {
        return Err(
            Failure::new("No resources specified").hint("name a file with a document in it, of kind IPPool, say")
        );
    }
    Ok(manifests)
}

/// The same, but it is no error if there is none.
pub(super) fn read_any(paths: &[PathBuf], depth: Depth) -> Result<Vec<Manifest>> {
    let mut manifests = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            let text = limited(io::stdin().lock()).map_err(|error| cannot_read("standard input", &error))?;
            manifests.extend(documents("standard input", &text)?);
            continue;
        }
        for file in files(path, depth).map_err(|error| cannot_read(&path.display().to_string(), &error))? {
            let name = file.display().to_string();
            let text = fs::File::open(&file).and_then(limited).map_err(|error| cannot_read(&name, &error))?;
            manifests.extend(documents(&name, &text)?);
        }
    }
    Ok(manifests)
}

/// The depth to which a folder is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// The folder's own files.
    Files,
    /// All files below it.
    All,
}

fn limited(input: impl Read) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    input.take(MOST_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(io::Error::other(format!("more than {} MiB", MOST_BYTES >> 20)));
    }
    Ok(text)
}

/// The file itself, or the files of a folder that can have documents.
fn files(path: &Path, depth: Depth) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut entries: Vec<PathBuf> = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    entries.sort();
    let mut found = Vec::new();
    for entry in entries {
        if entry.is_dir() {
            if depth == Depth::All {
                found.extend(files(&entry, depth)?);
            }
        } else if entry.extension().is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json") {
            found.push(entry);
        }
    }
    Ok(found)
}

/// The YAML documents or the JSON document of a text.
///
/// # Errors
/// The text is neither; the failure names the line.
pub(crate) fn values(name: &str, text: &[u8], hint: &str) -> Result<Vec<Value>> {
    // A node may be named n, and a label may have the value off: only true and false are booleans.
    let options = serde_saphyr::options! { strict_booleans: true };
    match serde_json::from_slice(text) {
        Ok(value) => Ok(vec![value]),
        Err(_) => serde_saphyr::from_slice_multiple_with_options::<Value>(text, options).map_err(|error| {
            if let Some(fault) = text_fault(text) {
                return Failure::new(format!("cannot understand {name}: {fault}")).hint(hint);
            }
            let line = error.location().map(|at| format!(" in line {}", at.line())).unwrap_or_default();
            let reason = error.without_snippet().to_string();
            let reason = printable(reason.lines().next().unwrap_or_default());
            Failure::new(format!("cannot understand {name}{line}: {reason}")).hint(hint)
        }),
    }
}

fn documents(name: &str, text: &[u8]) -> Result<Vec<Manifest>> {
    let mut manifests = Vec::new();
    for value in values(name, text, "a document is YAML or JSON, as `margay get ippool -o yaml` prints it")? {
        let read = Manifest::read(value).map_err(|error| {
            Failure::new(format!("{name}: {}", printable(&error.to_string())))
                .hint("a document has the form that `margay get ippool -o yaml` prints")
        })?;
        manifests.extend(read);
    }
    Ok(manifests)
}

fn cannot_read(name: &str, error: &io::Error) -> Failure {
    Failure::new(format!("cannot read {name}: {error}")).hint("give a file of documents, a folder of such files, or -")
}
