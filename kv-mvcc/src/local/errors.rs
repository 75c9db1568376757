//! The errors of a store's folder: what is wrong, where, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv::{Error, ErrorKind, Operation, Revision};

use super::holder;

/// Which store it is, in errors.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Its URL, such as `redb:///var/lib/margay/ipam.redb`.
    pub(super) store: String,
    /// Its folder, absolute.
    pub(super) folder: PathBuf,
}

impl Place {
    /// An error of the operating system at `path`.
    pub(super) fn io(&self, path: &Path, error: io::Error) -> Error {
        use io::ErrorKind as Io;
        let path = path.display();
        let (kind, detail) = match error.kind() {
            Io::PermissionDenied => (
                ErrorKind::Io,
                format!("no permission for {path}: run this as root or as the owner of the store's files"),
            ),
            Io::ReadOnlyFilesystem => (
                ErrorKind::Io,
                format!("{path} is on a read-only file system, and a store must be able to write even to be read"),
            ),
            Io::NotADirectory | Io::AlreadyExists => (
                ErrorKind::Io,
                format!("{path} is in the way: a store is a folder; give another path or move that file away"),
            ),
            Io::StorageFull | Io::QuotaExceeded => {
                (ErrorKind::NoSpace, format!("no room for {path}: free some space and try again"))
            }
            _ => (ErrorKind::Io, format!("at {path}")),
        };
        self.error(kind, detail).with_source(error)
    }

    /// There is no store, and nobody asked to make one.
    pub(super) fn missing(&self) -> Error {
        let detail = format!(
            "nothing in {}; `margay --store {} pool create NAME CIDR` makes it",
            self.folder.display(),
            self.store
        );
        self.error(ErrorKind::Missing, detail)
    }

    /// The store is damaged.
    pub(super) fn damaged(&self, what: &str) -> Error {
        self.error(ErrorKind::Corrupt, self.advice(what))
    }

    /// The store has lost its newest revisions.
    pub(super) fn regressed(&self, newest: Revision, seen: u64) -> Error {
        let folder = self.folder.display();
        let detail = format!(
            "it is at revision {newest} and was at {seen}, so its newest changes are gone; restore {folder} from a \
             backup, or, if an older state was put back on purpose, remove {folder}/head"
        );
        self.error(ErrorKind::RevisionRegressed, detail)
    }

    /// The same error, with advice if it tells of damage and has none yet.
    pub(super) fn advise(&self, error: Error) -> Error {
        if *error.kind() == ErrorKind::Corrupt && error.detail().is_none() {
            return error.with_detail(self.advice("its content cannot be read"));
        }
        error
    }

    fn advice(&self, what: &str) -> String {
        let folder = self.folder.display();
        format!("{what}; restore {folder} from a backup, or move it away to start with an empty store")
    }

    /// The folder holds the store of another engine.
    pub(super) fn other_engine(&self, engine: &str) -> Error {
        let detail = format!("{} holds a {engine} store: set datastore_type to {engine}", self.folder.display());
        self.error(ErrorKind::Unsupported, detail)
    }

    /// The folder holds something else.
    pub(super) fn foreign_folder(&self, found: &str) -> Error {
        let detail = format!(
            "{} holds {found} and no store: give a folder that does not exist yet, or an empty one",
            self.folder.display()
        );
        self.error(ErrorKind::Unsupported, detail)
    }

    /// The turn did not come in time.
    pub(super) fn late(&self, queue: &Path, wait: Duration) -> Error {
        let who = match holder::find(queue) {
            Some(process) => format!("process {process} has it"),
            None => format!("`fuser -v {}` as root shows who has it", queue.display()),
        };
        let detail = format!("waited {wait:?} for its turn; {who}; try again, and end that process if it hangs");
        self.error(ErrorKind::Locked, detail)
    }

    /// An error on opening.
    pub(super) fn error(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        Error::new(kind, Operation::Open, self.store.clone()).with_detail(detail)
    }
}
