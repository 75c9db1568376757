//! The source of the documents.

use datastore::Location;
use ipam_operator::moving::{mark_key, ranges};
use kv::{Key, Revision, Value};

use super::file::FileRows;
use crate::backup::{Snapshot, Stop};
use crate::error::Failure;

/// The reader of a store at one revision, or of a file, from its first key to its last.
pub(crate) enum Source<'l> {
    /// A store.
    Store(Box<Snapshot<'l>>),
    /// A file.
    File(Box<FileRows>),
}

impl<'l> Source<'l> {
    /// A store, at a revision or, if that is unset, at the newest one.
    pub(crate) fn store(location: &'l Location, at: Revision) -> Self {
        Self::Store(Box::new(Snapshot::of(location, ranges()).at(at)))
    }

    /// The next documents, ascending, and whether they were the last.
    pub(super) async fn next(&mut self) -> Result<(Vec<(Key, Value)>, bool), Stop> {
        match self {
            Self::Store(snapshot) => {
                let rows = snapshot.batch().await?.unwrap_or_default();
                let mark = mark_key();
                if rows.iter().any(|kv| kv.key == mark) {
                    return Err(marked("the source").into());
                }
                Ok((rows.into_iter().map(|kv| (kv.key, kv.value)).collect(), snapshot.is_over()))
            }
            Self::File(rows) => Ok(rows.next().await?),
        }
    }

    /// The revision of a store; unset before the first documents.
    pub(crate) fn revision(&self) -> Revision {
        match self {
            Self::Store(snapshot) => snapshot.revision(),
            Self::File(_) => Revision::UNSET,
        }
    }
}

/// The refusal of a source that is itself being filled.
pub(crate) fn marked(what: &str) -> Failure {
    Failure::new(format!("{what} is itself the target of a migration or an import that is not finished"))
        .hint("finish that first, or end it with --abort; nothing was changed")
}
