//! Notes of assignments on their way, as files: see [`ipam_core::intents`] for what they are for.
//!
//! A folder in memory (`/run`), readable by its owner alone, with one file for each transaction whose outcome is not known.
//! A file's name begins with a checksum of its attachment, so that those of one are found without opening the others. It is
//! whole before the transaction is sent, and its checksum tells that it is whole. Nothing is synced: the note has to outlive the
//! process, and after a crash of the machine its containers are gone too.
//!
//! A note for several attachments is one file with a name for each. Its steps are bytes that are added to it: who adds to a file
//! does so at one moment, so of two that exclude each other the first one counts, and nobody waits for anybody.
//!
//! | What is found | What is done |
//! |---|---|
//! | a note of another attachment, or on another store | it stays, unread where the name tells, for whom it concerns |
//! | a note on this cluster, of a call with other endpoints | it is found: a note has the cluster's id |
//! | a note that was not finished | it stays, and the log says so: what it was to note was never sent |
//! | a note that is damaged or in another version's form | it stays, and the log says so |
//! | no folder | there are no notes |

mod codec;
#[cfg(test)]
pub(crate) mod tests;

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use datastore::EtcdStore;
use ipam_core::attachment::Attachment;
use ipam_core::intents::{IntentId, Intents, Pending, StillAsked};
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

/// The steps of a note for several: it is closed, before it is sent; or somebody found it before that, and it is void.
const CLOSED: u8 = b'c';
const VOID: u8 = b'v';
/// Its outcome is known; or somebody found it before that, and sends it again.
const DONE: u8 = b'd';
const FOUND: u8 = b'f';
/// In the id that the writer of a note for several has of it: between where its steps begin and its names.
const AND: &str = "/";

/// The text between a store's address and the id of its cluster, in hexadecimal digits, in the name of a store. A note has
/// no id if the cluster had not answered its writer, or if an earlier version wrote the note.
const CLUSTER: &str = " cluster ";

/// The address and the cluster's id in the name of a store.
fn address_and_cluster(store: &str) -> (&str, Option<u64>) {
    match store.rsplit_once(CLUSTER).map(|(address, id)| (address, u64::from_str_radix(id, 16))) {
        Some((address, Ok(id))) => (address, Some(id)),
        _ => (store, None),
    }
}

/// Takes a step of a note whose steps begin there, unless another one was taken that excludes it. True if it is taken, now
/// or before.
fn step(path: &Path, steps: usize, step: u8, unless: u8) -> io::Result<bool> {
    OpenOptions::new().append(true).open(path)?.write_all(&[step])?;
    match first_step(path, steps, [step, unless])? {
        Some(first) => Ok(first == step),
        None => Err(io::Error::other("a note was found by more than can be")),
    }
}

/// Which of two steps counts, if one was taken.
fn first_step(path: &Path, steps: usize, these: [u8; 2]) -> io::Result<Option<u8>> {
    // Each who finds it takes two, and what counts is among the first.
    let mut taken = [0; 256];
    let count = File::open(path)?.read_at(&mut taken, steps as u64)?;
    Ok(taken[..count].iter().copied().find(|one| these.contains(one)))
}

/// Intents in the files of a folder.
#[derive(Clone, Debug)]
pub struct FileIntents {
    folder: PathBuf,
    store: String,
    etcd: Option<EtcdStore>,
}

/// A note that was found.
struct Found {
    name: String,
    note: Note,
    /// Where the steps of a note for several begin.
    steps: Option<usize>,
}

impl FileIntents {
    /// Notes in this folder, about the store at this address. Notes of one store are never sent to another. The folder is made
    /// when something is noted.
    pub fn new(folder: impl Into<PathBuf>, store: impl Into<String>) -> Self {
        Self { folder: folder.into(), store: store.into(), etcd: None }
    }

    /// The same about a cluster, whatever the address at which it is reached.
    pub(crate) fn on(mut self, etcd: Option<EtcdStore>) -> Self {
        self.etcd = etcd;
        self
    }

    /// The name of the store in a note: its address, and the id of the cluster if it has answered.
    fn name_of_store(&self) -> String {
        match self.etcd.as_ref().and_then(EtcdStore::cluster_id) {
            Some(id) => format!("{}{CLUSTER}{id:x}", self.store),
            None => self.store.clone(),
        }
    }

    /// True if a note is about this store. A cluster that has not answered yet is asked for its id if the note has another
    /// address.
    async fn is_here(&self, found: &Found) -> io::Result<bool> {
        let store = &found.note.store;
        let (address, cluster) = address_and_cluster(store);
        let is_here = match (cluster, &self.etcd) {
            (Some(noted), Some(etcd)) => match etcd.cluster_id() {
                Some(id) => noted == id,
                None if address == self.store => true,
                None => noted == etcd.about().await.map_err(io::Error::other)?.cluster,
            },
            _ => address == self.store,
        };
        if !is_here {
            tracing::warn!(name = found.name, store, "passing over a note about another store");
        }
        Ok(is_here)
    }

    /// The notes for an attachment at this very address that were sent and are not known to be done. Reading them changes
    /// nothing.
    ///
    /// # Errors
    /// Those of [`Intents::pending`].
    pub fn noted(&self, attachment: &Attachment) -> io::Result<Vec<Pending>> {
        let found = self.search(attachment)?.into_iter();
        let here = found.filter(|found| address_and_cluster(&found.note.store).0 == self.store);
        still_pending(here, |name, steps| {
            let path = &self.folder.join(name);
            let is_closed = first_step(path, steps, [CLOSED, VOID])? == Some(CLOSED);
            Ok(is_closed && first_step(path, steps, [FOUND, DONE])? != Some(DONE))
        })
    }

    /// The notes for an attachment, on whatever store.
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
            found.push(Found { name, note, steps });
        }
        Ok(found)
    }

    fn remove(&self, name: &str) {
        match fs::remove_file(self.folder.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(%error, name, "a note stays that is not needed any more");
            }
            _ => {}
        }
    }
}

/// The note in a file, if it is whole and about this attachment, and where its steps begin.
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

/// Those of the notes that are pending: each that is for one, and of those for several the ones that `is_pending` says.
fn still_pending(
    found: impl Iterator<Item = Found>,
    is_pending: impl Fn(&str, usize) -> io::Result<bool>,
) -> io::Result<Vec<Pending>> {
    let mut pending = Vec::new();
    for Found { name, note, steps } in found {
        match steps.map_or(Ok(true), |steps| is_pending(&name, steps)) {
            Ok(true) => pending.push(Pending { id: IntentId(name), txn: note.txn }),
            Ok(false) => {}
            // It was void, or its outcome has just become known.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(pending)
}

#[async_trait]
impl Intents for FileIntents {
    fn record(&self, attachments: &[Attachment], txn: &Txn, still_asked: &StillAsked) -> io::Result<Option<IntentId>> {
        let bytes = Note::new(&self.name_of_store(), attachments, txn).encode().map_err(io::Error::other)?;
        let unique = Uuid::new_v4().simple().to_string();
        let name = |attachment| format!("{}{unique}{SUFFIX}", prefix(attachment));
        let names: Vec<String> = attachments.iter().map(name).collect();
        let [first, others @ ..] = &names[..] else { return Ok(None) };
        whole_file::create(&self.folder, first, &bytes)?;
        if others.is_empty() {
            return Ok(Some(IntentId(first.clone())));
        }
        let path = self.folder.join(first);
        let named = others.iter().try_for_each(|other| fs::hard_link(&path, self.folder.join(other)));
        // Who has found it open may have removed it.
        let close = || match step(&path, bytes.len(), CLOSED, VOID) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            closed => closed,
        };
        if named.is_ok() && still_asked() && close()? {
            return Ok(Some(IntentId(format!("{}{AND}{}", bytes.len(), names.join(AND)))));
        }
        names.iter().for_each(|name| self.remove(name));
        named.map(|()| None)
    }

    fn forget(&self, id: &IntentId) {
        let Some((steps, names)) = id.0.split_once(AND) else { return self.remove(&id.0) };
        let path = self.folder.join(names.split(AND).next().unwrap_or_default());
        let is_done = steps.parse().is_ok_and(|steps| step(&path, steps, DONE, FOUND).unwrap_or(false));
        if is_done {
            names.split(AND).for_each(|name| self.remove(name));
        }
    }

    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<Pending>> {
        let mut here = Vec::new();
        for found in self.search(attachment)? {
            if self.is_here(&found).await? {
                here.push(found);
            }
        }
        still_pending(here.into_iter(), |name, steps| {
            let path = &self.folder.join(name);
            let is_pending = !step(path, steps, VOID, CLOSED)? && step(path, steps, FOUND, DONE)?;
            if !is_pending {
                self.remove(name);
            }
            Ok(is_pending)
        })
    }
}

/// How the names of an attachment's notes begin. That of another one may begin alike: the note itself says whose it is.
fn prefix(attachment: &Attachment) -> String {
    let Attachment { network, container, interface, node, .. } = attachment;
    whole_file::name_of(&[network, container, interface, node]) + "-"
}
