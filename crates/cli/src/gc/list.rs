//! Reading lists that other programs make: from a file, a folder or standard input.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use datastore::{TextFault, text_fault};

use crate::error::{Failure, Result};
use crate::output::printable;

/// A size that no list exceeds.
const MAX_BYTES: u64 = 64 << 20;

/// A list as it was read.
pub(super) struct List {
    /// Its name in messages.
    pub(super) name: String,
    /// Its contents.
    pub(super) text: String,
    /// A time that is not after the making of the list.
    pub(super) made: SystemTime,
}

impl List {
    /// Reads a file, or standard input for `-`.
    ///
    /// # Errors
    /// A file cannot be read, is no text, or is too long.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let now = SystemTime::now();
        if path.as_os_str() == "-" {
            let text = text(io::stdin().lock()).map_err(|error| cannot_read("standard input", &error))?;
            return Ok(Self { name: "the list on standard input".to_owned(), text, made: now });
        }
        let read = || {
            let file = File::open(path)?;
            // A time in the future counts as now.
            let made = file.metadata()?.modified()?.min(now);
            Ok((text(file)?, made))
        };
        let (text, made) = read().map_err(|error| cannot_read(&path.display().to_string(), &error))?;
        Ok(Self { name: printable(&path.display().to_string()), text, made })
    }

    /// The error for a fault in the list.
    pub(super) fn wrong(&self, what: &str, expected: &str) -> Failure {
        Failure::new(format!("nothing was freed: {}: {what}", self.name)).hint(expected)
    }

    /// Refuses an empty list, unless `is_meant` says that this is right.
    ///
    /// # Errors
    /// The list is empty.
    pub(super) fn unless_empty(&self, is_empty: bool, is_meant: bool) -> Result<()> {
        match is_empty && !is_meant {
            true => Err(self.wrong("it is empty", "if there really is nothing, say so with --empty")),
            false => Ok(()),
        }
    }
}

/// The contents of the files of a folder, with their names. A file that is deleted meanwhile is left out.
///
/// # Errors
/// A path cannot be read, or is no file.
pub(super) fn folder(path: &Path) -> Result<Vec<List>> {
    let failed = |path: &Path, error: &io::Error| cannot_read(&path.display().to_string(), error);
    let entries = fs::read_dir(path)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<PathBuf>>>());
    let mut paths = entries.map_err(|error| failed(path, &error))?;
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        match File::open(&path).and_then(text) {
            Ok(text) => {
                files.push(List { name: printable(&path.display().to_string()), text, made: SystemTime::now() });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&path, &error)),
        }
    }
    Ok(files)
}

fn cannot_read(name: &str, error: &io::Error) -> Failure {
    Failure::new(format!("nothing was freed: cannot read {}: {error}", printable(name)))
}

fn text(from: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other("it is longer than any list"));
    }
    // An empty list has a message of its own. With a mark the first name in it would be another one, and that container's
    // addresses would be freed.
    match text_fault(&bytes).filter(|fault| *fault != TextFault::Empty) {
        None => String::from_utf8(bytes).map_err(io::Error::other),
        Some(fault) => Err(io::Error::other(fault.to_string())),
    }
}
