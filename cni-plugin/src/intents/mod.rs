//! Notes of assignments on their way, as files: see [`ipam_core::intents`] for what they are for.
//!
//! A folder in memory (`/run`), readable by its owner alone, with one file for each transaction whose outcome is not known.
//! A file's name begins with a checksum of its attachment, so that those of one are found without opening the others. It is
//! whole before the transaction is sent, and its checksum tells that it is whole. Nothing is synced: the note has to outlive the
//! process, and after a crash of the machine its containers are gone too.
//!
//! | What is found | What is done |
//! |---|---|
//! | a note of another attachment, or on another store | it stays, unread where the name tells, for whom it concerns |
//! | a note that was not finished | it stays, and the log says so: what it was to note was never sent |
//! | a note that is damaged or in another version's form | it stays, and the log says so |
//! | no folder | there are no notes |

mod codec;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use ipam_core::attachment::Attachment;
use ipam_core::intents::{IntentId, Intents, Pending};
use kv::Txn;
use uuid::Uuid;

use crate::whole_file;
use codec::Note;

/// Where the plugin notes its intents.
pub const INTENTS_FOLDER: &str = "/run/margay/intents";

/// How the names of finished notes end.
const SUFFIX: &str = ".intent";
/// A note has a transaction, of which the size is limited, and some names.
const MAX_BYTES: u64 = 2 * 1024 * 1024;

/// Intents in the files of a folder.
#[derive(Clone, Debug)]
pub struct FileIntents {
    folder: PathBuf,
    store: String,
}

impl FileIntents {
    /// Notes in this folder, about the store of this name. Notes of one store are never sent to another. The folder is made
    /// when something is noted.
    pub fn new(folder: impl Into<PathBuf>, store: impl Into<String>) -> Self {
        Self { folder: folder.into(), store: store.into() }
    }

    /// The note in a file, if it is whole and about this attachment on this store.
    fn read(&self, path: &Path, attachment: &Attachment) -> Option<Txn> {
        let note =
            match whole_file::read(path, MAX_BYTES).and_then(|bytes| Note::decode(&bytes).map_err(io::Error::other)) {
                Ok(note) => note,
                // Its writer has just learned the outcome.
                Err(error) if error.kind() == ErrorKind::NotFound => return None,
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "passing over a note that cannot be read");
                    return None;
                }
            };
        if !note.is_of(attachment) {
            return None;
        }
        if note.store != self.store {
            tracing::warn!(path = %path.display(), store = note.store, "passing over a note about another store");
            return None;
        }
        Some(note.txn)
    }
}

impl Intents for FileIntents {
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<IntentId> {
        let bytes = Note::new(&self.store, attachment, txn).encode().map_err(io::Error::other)?;
        let name = format!("{}{}{SUFFIX}", prefix(attachment), Uuid::new_v4().simple());
        whole_file::create(&self.folder, &name, &bytes)?;
        Ok(IntentId(name))
    }

    fn forget(&self, id: &IntentId) {
        match fs::remove_file(self.folder.join(&id.0)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(%error, id = id.0, "a note stays that is not needed any more");
            }
            _ => {}
        }
    }

    fn pending(&self, attachment: &Attachment) -> io::Result<Vec<Pending>> {
        let entries = match self.folder.read_dir() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let prefix = prefix(attachment);
        let mut pending = Vec::new();
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(&prefix)
                && name.ends_with(SUFFIX)
                && let Some(txn) = self.read(&entry.path(), attachment)
            {
                pending.push(Pending { id: IntentId(name), txn });
            }
        }
        Ok(pending)
    }
}

/// How the names of an attachment's notes begin. That of another one may begin alike: the note itself says whose it is.
fn prefix(attachment: &Attachment) -> String {
    let Attachment { network, container, interface, node, .. } = attachment;
    whole_file::name_of(&[network, container, interface, node]) + "-"
}
