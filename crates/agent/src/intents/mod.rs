//! Pending commits of assignments, as files: see [`ipam_core::intents`] for their purpose.
//!
//! A folder in memory (`/run`), readable by its owner alone, with one file for each transaction whose outcome is not
//! known. A file's name begins with a checksum of its attachment, so that those of one are found without opening the
//! others. It is whole before the transaction is sent, and its checksum tells that it is whole. Nothing is synced: a
//! pending commit must outlive the process, and after a crash of the machine its containers are gone too.
//!
//! | What is found | What is done |
//! |---|---|
//! | a pending commit of another attachment, or on another store | it stays, unread if its name shows that |
//! | a pending commit on this cluster, of a call with other endpoints | it is found: it has the cluster's id |
//! | a file that was not finished | it stays, and the log says so: its transaction was never sent |
//! | an earlier version's, for several attachments | it is settled for the caller's attachment, if it was sent |
//! | a file that is damaged or in another version's form | it stays, and the log says so |
//! | no folder | there are no pending commits |

mod codec;
mod several;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use datastore::ClusterStore;
use ipam_core::attachment::Attachment;
use ipam_core::intents::{IntentId, Intents, Pending};
use kv::Txn;
use uuid::Uuid;

use crate::whole_file;
use codec::Note;

/// The folder of the plugin's pending commits.
pub const INTENTS_FOLDER: &str = "/run/margay/intents";

/// The end of the names of finished files.
const SUFFIX: &str = ".intent";
/// A file that is made and removed to see whether there can be others.
const TRIAL: &str = "trial";
/// A pending commit has a transaction, of which the size is limited, and some names.
const MAX_BYTES: u64 = 2 * 1024 * 1024;

/// The text between a store's address and the id of its cluster, in hexadecimal digits, in the name of a store. A
/// pending commit has no id if the cluster had not answered its writer, or if an earlier version wrote it.
const CLUSTER: &str = " cluster ";

/// The address and the cluster's id in the name of a store.
fn address_and_cluster(store: &str) -> (&str, Option<u64>) {
    match store.rsplit_once(CLUSTER).map(|(address, id)| (address, u64::from_str_radix(id, 16))) {
        Some((address, Ok(id))) => (address, Some(id)),
        _ => (store, None),
    }
}

/// Pending commits in the files of a folder.
#[derive(Clone, Debug)]
pub struct FileIntents {
    folder: PathBuf,
    store: String,
    cluster: Option<Arc<dyn ClusterStore>>,
}

/// A pending commit that was found.
struct Found {
    id: IntentId,
    note: Note,
    /// Where the [steps](several) of one for several attachments begin.
    steps: Option<usize>,
}

impl FileIntents {
    /// Pending commits in this folder, on the store at this address. They are never sent to another store. The folder
    /// is made when the first one is recorded.
    pub fn new(folder: impl Into<PathBuf>, store: impl Into<String>) -> Self {
        Self { folder: folder.into(), store: store.into(), cluster: None }
    }

    /// The same about a cluster, whatever the address at which it is reached.
    pub(crate) fn on(mut self, cluster: Option<Arc<dyn ClusterStore>>) -> Self {
        self.cluster = cluster;
        self
    }

    /// Checks that a pending commit can be recorded.
    ///
    /// # Errors
    /// The error that stops the write.
    pub(crate) fn check(&self) -> io::Result<()> {
        whole_file::replace(&self.folder, TRIAL, &[0; 4096])?;
        match fs::remove_file(self.folder.join(TRIAL)) {
            // Another process did the same.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// The name of the store in a pending commit: its address, and the id of the cluster if it has answered.
    fn name_of_store(&self) -> String {
        match self.cluster.as_ref().and_then(|cluster| cluster.cluster_id()) {
            Some(id) => format!("{}{CLUSTER}{id:x}", self.store),
            None => self.store.clone(),
        }
    }

    /// True if a pending commit is on this store. A cluster that has not answered yet is queried for its id if the
    /// pending commit has another address.
    async fn is_here(&self, id: &IntentId, store: &str) -> io::Result<bool> {
        let (address, noted) = address_and_cluster(store);
        let is_here = match (noted, &self.cluster) {
            (Some(noted), Some(cluster)) => match cluster.cluster_id() {
                Some(id) => noted == id,
                None if address == self.store => true,
                None => noted == cluster.about().await.map_err(io::Error::other)?.cluster,
            },
            _ => address == self.store,
        };
        if !is_here {
            tracing::warn!(id = id.0, store, "passing over a note about another store");
        }
        Ok(is_here)
    }

    /// The pending commits for an attachment at this very address. Reading them changes nothing.
    ///
    /// # Errors
    /// Those of [`Intents::pending`].
    pub fn noted(&self, attachment: &Attachment) -> io::Result<Vec<Pending>> {
        let found = self.search(attachment)?.into_iter();
        let here = found.filter(|found| address_and_cluster(&found.note.store).0 == self.store);
        Ok(here.map(|Found { id, note, .. }| Pending { id, txn: note.txn }).collect())
    }

    /// The pending commits for an attachment, on any store.
    fn search(&self, attachment: &Attachment) -> io::Result<Vec<Found>> {
        let entries = match self.folder.read_dir() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let prefix = prefix(attachment);
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if !name.starts_with(&prefix) || !name.ends_with(SUFFIX) {
                continue;
            }
            let Some((note, steps)) = read(&entry.path(), attachment) else { continue };
            found.push(Found { id: IntentId(name), note, steps });
        }
        Ok(found)
    }
}

/// The pending commit in a file, if it is whole and for this attachment, and where its steps begin.
fn read(path: &Path, attachment: &Attachment) -> Option<(Note, Option<usize>)> {
    match whole_file::read(path, MAX_BYTES).and_then(|bytes| Note::decode(&bytes).map_err(io::Error::other)) {
        Ok((note, steps)) => note.is_of(attachment).then_some((note, steps)),
        // Its writer has just learned the outcome.
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "passing over a note that cannot be read");
            None
        }
    }
}

#[async_trait]
impl Intents for FileIntents {
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<IntentId> {
        let bytes = Note::new(&self.name_of_store(), attachment, txn).encode().map_err(io::Error::other)?;
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

    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<Pending>> {
        let mut pending = Vec::new();
        for Found { id, note, steps } in self.search(attachment)? {
            if !self.is_here(&id, &note.store).await? {
                continue;
            }
            match steps.map_or(Ok(true), |steps| several::is_pending(&self.folder.join(&id.0), steps)) {
                Ok(true) => pending.push(Pending { id, txn: note.txn }),
                Ok(false) => self.forget(&id),
                // Its writer has just removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(pending)
    }
}

/// The beginning of the names of an attachment's files. Another attachment's may begin alike: the content says whose it
/// is.
fn prefix(attachment: &Attachment) -> String {
    let Attachment { network, container, interface, node, .. } = attachment;
    whole_file::name_of(&[network, container, interface, node]) + "-"
}
