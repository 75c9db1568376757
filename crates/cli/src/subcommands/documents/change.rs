//! Reads documents from files, and writes these documents to a store or deletes them, for the commands `create`,
//! `apply`, `replace` and `delete`. The commands report their outcome in calicoctl's wording.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use datastore::text_fault;
use ipam_core::Error;
use ipam_operator::Operator;
use ipam_operator::documents::{DocumentError, DocumentKind, Manifest, WriteMode, WriteOutcome};
use kv::Deadline;
use serde::Serialize;
use serde_json::{Value, json};

use super::{DOCUMENTS_TIMEOUT, Delete, WriteArgs, folder_depth};
use crate::command::{CommandAnswer, OpenStoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;
use crate::store::{StoreAccess, StoreUse};
use crate::subcommands::pool;

/// A command that writes documents from files to a store.
pub(super) struct WriteDocuments {
    mode: WriteMode,
    manifests: Vec<Manifest>,
    /// True if existing documents are skipped, and count as successfully written.
    skips_existing: bool,
    dry_run: bool,
    /// True if the store is embedded, and so has the documents of only one machine.
    is_of_one_machine: bool,
}

impl WriteDocuments {
    pub(super) fn of(mode: WriteMode, change: &WriteArgs, at: StoreAccess<'_>) -> CommandResult<Self> {
        Ok(Self {
            mode,
            manifests: read_documents(&change.source.filename, folder_depth(change.source.recursive))?,
            skips_existing: false,
            dry_run: change.dry_run,
            is_of_one_machine: !at.location.is_shared(),
        })
    }

    pub(super) fn skipping(self, skips_existing: bool) -> Self {
        Self { skips_existing, ..self }
    }

    fn verb(&self) -> VerbForms {
        match self.mode {
            WriteMode::Create => VerbForms { base: "create", past: "created" },
            WriteMode::Apply => VerbForms { base: "apply", past: "applied" },
            WriteMode::Replace => VerbForms { base: "replace", past: "replaced" },
        }
    }
}

#[async_trait(?Send)]
impl OpenStoreCommand for WriteDocuments {
    /// The store may be created only if one of the documents is a valid pool, as with `pool create`.
    fn store_use(&self) -> StoreUse {
        let makes = |manifest: &Manifest| manifest.kind() == DocumentKind::Pool && manifest.check().is_ok();
        match self.mode != WriteMode::Replace && self.manifests.iter().any(makes) {
            true => StoreUse::Make,
            false => StoreUse::Write,
        }
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    fn timeout_after_open(&self) -> Duration {
        DOCUMENTS_TIMEOUT
    }

    fn changes_pools(&self) -> bool {
        has_pool(&self.manifests)
    }

    /// Writes the documents in the order of the files. After a failed document the following documents are still
    /// written, as in calicoctl.
    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let mut report = WriteReport::new(self.verb(), &self.manifests, self.dry_run);
        let mut first_node = false;
        for manifest in &self.manifests {
            match operator.write_document(manifest, self.mode, deadline).await {
                Ok(written) => {
                    first_node |= written == WriteOutcome::Created && manifest.kind() == DocumentKind::Node;
                    report.add_done(manifest);
                }
                Err(Error::Document(DocumentError::Exists(..))) if self.skips_existing => report.add_done(manifest),
                Err(error) => report.add_failed(manifest, &error, advice(&error)),
            }
        }
        let note = "from now on this store gives addresses to registered nodes only; see them with: margay get nodes";
        Ok(report.answer()?.notes((first_node && self.is_of_one_machine).then(|| note.to_owned())))
    }
}

/// A command that deletes documents that are named on the command line or in files.
pub(super) struct DeleteDocuments<'a> {
    pub(super) args: &'a Delete,
    pub(super) manifests: Vec<Manifest>,
}

#[async_trait(?Send)]
impl OpenStoreCommand for DeleteDocuments<'_> {
    fn store_use(&self) -> StoreUse {
        StoreUse::Release
    }

    fn dry_run(&self) -> bool {
        self.args.dry_run
    }

    fn timeout_after_open(&self) -> Duration {
        DOCUMENTS_TIMEOUT
    }

    fn changes_pools(&self) -> bool {
        has_pool(&self.manifests)
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let Self { args, manifests } = self;
        let verb = VerbForms { base: "delete", past: "deleted" };
        let mut report = WriteReport::new(verb, manifests, args.dry_run);
        for manifest in manifests {
            let in_use = pool::in_use(&args.bridged, manifest.name());
            match operator.delete_document(manifest, in_use, deadline).await {
                Ok(()) => report.add_done(manifest),
                Err(Error::Document(DocumentError::NotFound(..))) if args.skip_not_exists => report.add_done(manifest),
                Err(error) => report.add_failed(manifest, &error, advice(&error)),
            }
        }
        report.answer()
    }
}

fn has_pool(manifests: &[Manifest]) -> bool {
    manifests.iter().any(|manifest| manifest.kind() == DocumentKind::Pool)
}

/// Returns advice for the user about a document that the store refused.
fn advice(error: &Error) -> Option<String> {
    match error {
        Error::Document(DocumentError::Exists(..)) => {
            Some("change the existing resource with: margay apply -f FILE".to_owned())
        }
        Error::Document(DocumentError::NotFound(kind, _)) => {
            Some(format!("list the existing resources with: margay get {}", super::get::short(*kind)))
        }
        Error::Document(DocumentError::Conflict(..)) => Some(
            "read the resource again with margay get, or leave out metadata.resourceVersion: the resource has \
             changed"
                .to_owned(),
        ),
        Error::Document(DocumentError::NotSupported(..)) => Some(
            "use only margay get on endpoints and profiles: they are created and deleted with their containers"
                .to_owned(),
        ),
        Error::PoolInUse { pool, gateway, .. } => Some(pool::advice_in_use(pool, gateway.is_some())),
        _ => None,
    }
}

/// Maximum size of a file with documents, in bytes.
const MAX_INPUT_BYTES: u64 = 16 << 20;

/// Reads all documents in the given files and folders, in the order of `paths`. The files in a folder are read in the
/// order of their names. Fails if none of the files has a document.
pub(super) fn read_documents(paths: &[PathBuf], depth: FolderDepth) -> CommandResult<Vec<Manifest>> {
    let manifests = read_any_documents(paths, depth)?;
    if manifests.is_empty() {
        return Err(CommandFailure::new("No resources specified")
            .hint("name a file that contains a resource, for example of kind IPPool"));
    }
    Ok(manifests)
}

/// Reads documents like [`read_documents`], but returns an empty list if there are none.
pub(super) fn read_any_documents(paths: &[PathBuf], depth: FolderDepth) -> CommandResult<Vec<Manifest>> {
    let mut manifests = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            let text = read_limited(io::stdin().lock()).map_err(|error| cannot_read("standard input", &error))?;
            manifests.extend(parse_documents("standard input", &text)?);
            continue;
        }
        for file in list_files(path, depth).map_err(|error| cannot_read(&path.display().to_string(), &error))? {
            let name = file.display().to_string();
            let text = fs::File::open(&file).and_then(read_limited).map_err(|error| cannot_read(&name, &error))?;
            manifests.extend(parse_documents(&name, &text)?);
        }
    }
    Ok(manifests)
}

/// How deep a folder is searched for files with documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FolderDepth {
    /// Only the files directly in the folder are searched.
    Files,
    /// The files in the folder and in all its subfolders are searched.
    All,
}

fn read_limited(input: impl Read) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    input.take(MAX_INPUT_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_INPUT_BYTES {
        return Err(io::Error::other(format!("more than {} MiB", MAX_INPUT_BYTES >> 20)));
    }
    Ok(text)
}

/// Returns `path` itself if it is not a folder. If `path` is a folder, returns those files in it that can have
/// documents.
fn list_files(path: &Path, depth: FolderDepth) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut entries: Vec<PathBuf> = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    entries.sort();
    let mut found = Vec::new();
    for entry in entries {
        if entry.is_dir() {
            if depth == FolderDepth::All {
                found.extend(list_files(&entry, depth)?);
            }
        } else if entry.extension().is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json") {
            found.push(entry);
        }
    }
    Ok(found)
}

/// Parses a file's content as several YAML documents or as one JSON document.
///
/// # Errors
/// The text is neither YAML nor JSON. The error message names the faulty line.
pub(crate) fn parse_values(name: &str, text: &[u8], hint: &str) -> CommandResult<Vec<Value>> {
    // Of YAML's booleans, only `true` and `false` are read as booleans, because a node may have the name `n`, and a
    // label may have the value `off`.
    let options = serde_saphyr::options! { strict_booleans: true };
    match serde_json::from_slice(text) {
        Ok(value) => Ok(vec![value]),
        Err(_) => serde_saphyr::from_slice_multiple_with_options::<Value>(text, options).map_err(|error| {
            if let Some(fault) = text_fault(text) {
                return CommandFailure::new(format!("cannot understand {name}: {fault}")).hint(hint);
            }
            let line = error.location().map(|at| format!(" in line {}", at.line())).unwrap_or_default();
            let reason = error.without_snippet().to_string();
            let reason = printable(reason.lines().next().unwrap_or_default());
            CommandFailure::new(format!("cannot understand {name}{line}: {reason}")).hint(hint)
        }),
    }
}

fn parse_documents(name: &str, text: &[u8]) -> CommandResult<Vec<Manifest>> {
    let mut manifests = Vec::new();
    let hint = "write the resources as YAML or JSON, in the form that `margay get ippool -o yaml` prints";
    for value in parse_values(name, text, hint)? {
        let read = Manifest::read(value).map_err(|error| {
            CommandFailure::new(format!("{name}: {}", printable(&error.to_string())))
                .hint("write the resource in the form that `margay get ippool -o yaml` prints")
        })?;
        manifests.extend(read);
    }
    Ok(manifests)
}

fn cannot_read(name: &str, error: &io::Error) -> CommandFailure {
    CommandFailure::new(format!("cannot read {name}: {error}"))
        .hint("name a file of resources, a folder of such files, or - for stdin")
}

/// The forms of a subcommand's verb that messages contain.
#[derive(Clone, Copy, Debug)]
struct VerbForms {
    /// The base form of the verb, as in "failed to create".
    base: &'static str,
    /// The past participle of the verb, as in "Successfully created".
    past: &'static str,
}

/// A document in the command's JSON output, with its error if the command failed for this document.
#[derive(Debug, Serialize)]
struct DocumentEntry {
    kind: &'static str,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The outcome of a command for each of its documents.
#[derive(Debug)]
struct WriteReport {
    verb: VerbForms,
    /// The kind of the documents, if all documents have the same kind.
    kind: Option<&'static str>,
    dry_run: bool,
    done: Vec<DocumentEntry>,
    failed: Vec<DocumentEntry>,
    advice: Option<String>,
}

impl WriteReport {
    fn new(verb: VerbForms, manifests: &[Manifest], dry_run: bool) -> Self {
        let kind = manifests.first().map(Manifest::kind);
        let kind = kind.filter(|kind| manifests.iter().all(|other| other.kind() == *kind));
        let kind = kind.map(|kind| kind.as_str());
        Self { verb, kind, dry_run, done: Vec::new(), failed: Vec::new(), advice: None }
    }

    fn add_done(&mut self, manifest: &Manifest) {
        self.done.push(entry(manifest, None));
    }

    /// Counts a document as failed. If several failed documents have advice, only the first advice is kept.
    fn add_failed(&mut self, manifest: &Manifest, error: &Error, advice: Option<String>) {
        self.failed.push(entry(manifest, Some(printable(&error.to_string()))));
        self.advice = self.advice.take().or(advice);
    }

    /// Returns the command's answer, which is a failure if no document succeeded, and is marked as incomplete if only
    /// some documents succeeded.
    fn answer(self) -> CommandResult<CommandAnswer> {
        let (done, all) = (self.done.len(), self.done.len() + self.failed.len());
        let of_kind = self.kind.map(|kind| format!("'{kind}' ")).unwrap_or_default();
        let past = self.verb.past;
        let text = match (self.dry_run, self.failed.len()) {
            (false, 0) => format!("Successfully {past} {done} {of_kind}resource(s)"),
            (true, 0) => format!("Dry run: would have {past} {done} {of_kind}resource(s)"),
            (false, _) => format!("Partial success: {past} {done} out of {all} {of_kind}resources:"),
            (true, _) => format!("Dry run: would have {past} {done} out of {all} {of_kind}resources:"),
        };
        let json = json!({ past: self.done, "failed": self.failed, "dry_run": self.dry_run });
        match self.failure() {
            Some(failure) if self.done.is_empty() => Err(failure),
            Some(failure) => Ok(CommandAnswer::new(text, &json)?.incomplete(failure)),
            None => CommandAnswer::new(text, &json),
        }
    }

    fn failure(&self) -> Option<CommandFailure> {
        let errors: Vec<&str> = self.failed.iter().filter_map(|entry| entry.error.as_deref()).collect();
        if errors.is_empty() {
            return None;
        }
        let (base, errors) = (self.verb.base, errors.join(" "));
        let what = match (self.done.is_empty(), self.kind, self.failed.len()) {
            (true, Some(kind), 1) => format!("failed to {base} '{kind}' resource"),
            (true, Some(kind), _) => format!("failed to {base} any '{kind}' resources"),
            (true, None, _) => format!("failed to {base} any resources"),
            (false, ..) => "hit error".to_owned(),
        };
        let failure = CommandFailure::new(format!("{what}: [{errors}]"));
        Some(match &self.advice {
            Some(advice) => failure.hint(advice),
            None => failure,
        })
    }
}

fn entry(manifest: &Manifest, error: Option<String>) -> DocumentEntry {
    DocumentEntry { kind: manifest.kind().as_str(), name: manifest.name().to_owned(), error }
}

#[cfg(test)]
mod tests {
    use ipam_operator::documents::{DocumentError, DocumentKind};

    use super::*;
    use crate::command::Format;

    const CREATE: VerbForms = VerbForms { base: "create", past: "created" };

    fn pool(name: &str) -> Manifest {
        Manifest::named(DocumentKind::Pool, name)
    }

    /// Returns the stdout and stderr of a command that writes the documents in `manifests`. The first `done` documents
    /// succeed and the other documents fail.
    fn said(manifests: &[Manifest], done: usize, dry_run: bool) -> (String, String) {
        let mut report = WriteReport::new(CREATE, manifests, dry_run);
        for (at, manifest) in manifests.iter().enumerate() {
            let error = Error::from(DocumentError::Exists(manifest.kind(), manifest.name().to_owned()));
            if at < done { report.add_done(manifest) } else { report.add_failed(manifest, &error, Some("do".into())) }
        }
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let printed = report.answer().and_then(|answer| answer.print(Format::Table, &mut out, &mut err));
        if let Err(failure) = printed {
            failure.print(&mut err);
        }
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn change_words_match_calicoctl() {
        let two = [pool("a"), pool("b")];
        let mixed = [pool("a"), Manifest::named(DocumentKind::Node, "n")];
        let exists = |name: &str| format!("resource already exists: IPPool({name})");
        for (manifests, done, dry_run, out, err) in [
            (&two[..1], 1, false, "Successfully created 1 'IPPool' resource(s)\n", String::new()),
            (&mixed, 2, false, "Successfully created 2 resource(s)\n", String::new()),
            (&two, 2, true, "Dry run: would have created 2 'IPPool' resource(s)\n", String::new()),
            (
                &two[..1],
                0,
                false,
                "",
                format!("error: failed to create 'IPPool' resource: [{}]\nhint: do\n", exists("a")),
            ),
            (
                &two,
                0,
                false,
                "",
                format!(
                    "error: failed to create any 'IPPool' resources: [{} {}]\nhint: do\n",
                    exists("a"),
                    exists("b")
                ),
            ),
            (
                &two,
                1,
                false,
                "Partial success: created 1 out of 2 'IPPool' resources:\n",
                format!("error: hit error: [{}]\nhint: do\n", exists("b")),
            ),
        ] {
            assert_eq!(said(manifests, done, dry_run), (out.to_owned(), err));
        }
        assert!(
            said(&mixed, 0, false).1.starts_with("error: failed to create any resources: [resource already exists")
        );
    }
}
