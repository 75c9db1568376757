//! Pending commits of assignments, as files: see [`ipam_core::pending_commits`] for their purpose.
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
//!
//! # The bytes of a file
//!
//! A file has a fixed beginning, the version of its form, a CRC-32 over its content, and the content. This version writes version 3:
//! store, attachment and transaction as the daemon's socket has them ([`wire::encode`]), under a checksum that covers the version, too.
//! The types of `kv` may grow: each addition to those of a transaction takes a new version here, which a test with the bytes of this one
//! tells.
//!
//! Earlier versions wrote two other forms, which are only read. Version 1 is an encoding of the `Form` types. Version 2 is for several
//! attachments: before its checksum stands the length of the content, which ends with the other attachments, and behind the content
//! come its steps: bytes that processes add to the file. Of two steps that exclude each other the first one counts. They are there because
//! an attachment may have been released before such a transaction was first sent, and would get an address that nobody releases.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bincode::Decode;
use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use datastore::ClusterStore;
use ipam_core::attachment::Attachment;
use ipam_core::pending_commits::{PendingCommit, PendingCommitId, PendingCommits};
use kv::{Compare, CompareOp, Content, Key, Op, Prev, Range, Revision, Target, Txn, TxnRange, Value};
use uuid::Uuid;

use crate::whole_file::{self, CRC_32};

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
    id: PendingCommitId,
    note: Note,
    /// Where the steps of one for several attachments begin.
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
    async fn is_here(&self, id: &PendingCommitId, store: &str) -> io::Result<bool> {
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
    /// Those of [`PendingCommits::pending`].
    pub fn noted(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
        let found = self.search(attachment)?.into_iter();
        let here = found.filter(|found| address_and_cluster(&found.note.store).0 == self.store);
        Ok(here.map(|Found { id, note, .. }| PendingCommit { id, txn: note.txn }).collect())
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
            found.push(Found { id: PendingCommitId(name), note, steps });
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
impl PendingCommits for FileIntents {
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<PendingCommitId> {
        let bytes = Note::new(&self.name_of_store(), attachment, txn).encode().map_err(io::Error::other)?;
        let name = format!("{}{}{SUFFIX}", prefix(attachment), Uuid::new_v4().simple());
        whole_file::create(&self.folder, &name, &bytes)?;
        Ok(PendingCommitId(name))
    }

    fn forget(&self, id: &PendingCommitId) {
        match fs::remove_file(self.folder.join(&id.0)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(%error, id = id.0, "a note stays that is not needed any more");
            }
            _ => {}
        }
    }

    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
        let mut pending = Vec::new();
        for Found { id, note, steps } in self.search(attachment)? {
            if !self.is_here(&id, &note.store).await? {
                continue;
            }
            match steps.map_or(Ok(true), |steps| is_pending(&self.folder.join(&id.0), steps)) {
                Ok(true) => pending.push(PendingCommit { id, txn: note.txn }),
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

/// The writer sends the transaction from now on; or a finder came before that, and nobody ever sends it.
const CLOSED: u8 = b'c';
const VOID: u8 = b'v';
/// The writer knows the outcome, and removes the file for all; or a finder came before that, and each attachment
/// settles it.
const DONE: u8 = b'd';
const FOUND: u8 = b'f';

/// True if the transaction in a file whose steps begin there was sent, and nobody knows its outcome. Otherwise there is
/// nothing to settle, and there will be nothing: a writer that still lives does nothing that the steps of this finder
/// exclude.
fn is_pending(path: &Path, steps: usize) -> io::Result<bool> {
    OpenOptions::new().append(true).open(path)?.write_all(&[VOID, FOUND])?;
    let note = whole_file::read(path, MAX_BYTES)?;
    let taken = note.get(steps..).unwrap_or_default();
    let first = |these: [u8; 2]| taken.iter().copied().find(|step| these.contains(step));
    Ok(first([CLOSED, VOID]) == Some(CLOSED) && first([DONE, FOUND]) == Some(FOUND))
}

/// The bytes at the beginning of every pending commit.
const MAGIC: &[u8] = b"margay-intent";
/// The form of a pending commit.
const CURRENT: u8 = 3;
/// The first form, and the one for several attachments.
const FIRST: u8 = 1;
const FOR_SEVERAL: u8 = 2;
/// More bytes than any pending commit of these two has.
const DECODE_LIMIT: usize = 4 * 1024 * 1024;
const BINCODE: Configuration<LittleEndian, Varint, Limit<DECODE_LIMIT>> =
    bincode::config::standard().with_limit::<DECODE_LIMIT>();

/// A transaction on its way, with its store and its attachments. Earlier versions wrote some for several.
#[derive(Clone, Debug, PartialEq)]
struct Note {
    store: String,
    attachments: Vec<Names>,
    txn: Txn,
}

/// Network, container, interface and node of an attachment.
type Names = (String, String, String, String);

/// The reason why bytes are no pending commit, or why a transaction cannot be recorded as one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum NoNote {
    /// It is something else, or was cut off.
    #[error("it is no note, or is cut off")]
    Foreign,
    /// It is in a form that this version does not know.
    #[error("it has form {0}, which this version does not know")]
    OtherVersion(u8),
    /// Its checksum is wrong, or its content cannot be decoded.
    #[error("it is damaged")]
    Damaged,
    /// It is for several attachments, or too long.
    #[error("the transaction cannot be noted")]
    Inexpressible,
}

impl Note {
    fn new(store: &str, attachment: &Attachment, txn: &Txn) -> Self {
        Self { store: store.to_owned(), attachments: vec![names(attachment)], txn: txn.clone() }
    }

    /// True if it is about this attachment.
    fn is_of(&self, attachment: &Attachment) -> bool {
        self.attachments.contains(&names(attachment))
    }

    fn encode(&self) -> Result<Vec<u8>, NoNote> {
        let [attachment] = &self.attachments[..] else { return Err(NoNote::Inexpressible) };
        let content = wire::encode(&(&self.store, attachment, &self.txn)).map_err(|_| NoNote::Inexpressible)?;
        let mut bytes = MAGIC.to_vec();
        bytes.push(CURRENT);
        bytes.extend(checksum_with(CURRENT, &content).to_le_bytes());
        bytes.extend(content);
        Ok(bytes)
    }

    /// The pending commit, and where in these bytes its steps begin if it is for several attachments.
    fn decode(bytes: &[u8]) -> Result<(Self, Option<usize>), NoNote> {
        let (version, mut rest) = bytes.strip_prefix(MAGIC).and_then(<[u8]>::split_first).ok_or(NoNote::Foreign)?;
        let mut steps = None;
        match *version {
            CURRENT | FIRST => {}
            FOR_SEVERAL => {
                let (length, behind) = rest.split_first_chunk().ok_or(NoNote::Foreign)?;
                let length = u32::from_le_bytes(*length) as usize;
                rest = behind.get(..size_of::<u32>() + length).ok_or(NoNote::Foreign)?;
                steps = Some(bytes.len() - behind.len() + rest.len());
            }
            other => return Err(NoNote::OtherVersion(other)),
        }
        let (sum, rest) = rest.split_first_chunk().ok_or(NoNote::Foreign)?;
        let found = if *version == CURRENT { checksum_with(CURRENT, rest) } else { CRC_32.checksum(rest) };
        if found != u32::from_le_bytes(*sum) {
            return Err(NoNote::Damaged);
        }
        if *version == CURRENT {
            let (store, attachment, txn) = wire::decode(rest).map_err(|_| NoNote::Damaged)?;
            return Ok((Self { store, attachments: vec![attachment], txn }, None));
        }
        let (form, mut read): (Form, usize) = bincode::decode_from_slice(rest, BINCODE).map_err(|_| NoNote::Damaged)?;
        let Form { store, attachment, compares, success, failure } = form;
        let mut attachments = vec![attachment];
        if steps.is_some() {
            let (others, more): (Vec<Names>, usize) =
                bincode::decode_from_slice(&rest[read..], BINCODE).map_err(|_| NoNote::Damaged)?;
            attachments.extend(others);
            read += more;
        }
        if read != rest.len() {
            return Err(NoNote::Damaged);
        }
        let txn = Txn::new()
            .with_compares(compares.into_iter().map(Compare::from))
            .with_success(success.into_iter().map(Op::from))
            .with_failure(failure.into_iter().map(Op::from));
        Ok((Self { store, attachments, txn }, steps))
    }
}

/// The checksum of a content and of the version before it: one version's content may read as another one's.
fn checksum_with(version: u8, content: &[u8]) -> u32 {
    let mut digest = CRC_32.digest();
    digest.update(&[version]);
    digest.update(content);
    digest.finalize()
}

fn names(attachment: &Attachment) -> Names {
    let Attachment { network, container, interface, node, .. } = attachment.clone();
    (network, container, interface, node)
}

#[derive(Decode)]
struct Form {
    store: String,
    attachment: Names,
    compares: Vec<FormCompare>,
    success: Vec<FormOp>,
    failure: Vec<FormOp>,
}

#[derive(Decode)]
struct FormCompare {
    range: FormRange,
    op: FormCompareOp,
    target: FormTarget,
}

#[derive(Decode)]
enum FormRange {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
    FromTo(Vec<u8>, Vec<u8>),
    From(Vec<u8>),
    All,
}

#[derive(Decode)]
enum FormCompareOp {
    Equal,
    NotEqual,
    Less,
    Greater,
}

#[derive(Decode)]
enum FormTarget {
    Version(i64),
    CreateRevision(i64),
    ModRevision(i64),
    Value(Vec<u8>),
}

#[derive(Decode)]
enum FormOp {
    Put { key: Vec<u8>, value: Vec<u8>, prev: FormPrev },
    Delete { range: FormRange, prev: FormPrev },
    Range { range: FormRange, limit: i64, content: FormContent },
}

#[derive(Decode)]
enum FormPrev {
    Omit,
    Return,
}

#[derive(Decode)]
enum FormContent {
    Full,
    KeysOnly,
    CountOnly,
}

impl From<FormCompare> for Compare {
    fn from(form: FormCompare) -> Self {
        let op = match form.op {
            FormCompareOp::Equal => CompareOp::Equal,
            FormCompareOp::NotEqual => CompareOp::NotEqual,
            FormCompareOp::Less => CompareOp::Less,
            FormCompareOp::Greater => CompareOp::Greater,
        };
        let target = match form.target {
            FormTarget::Version(version) => Target::Version(version),
            FormTarget::CreateRevision(revision) => Target::CreateRevision(Revision::new(revision)),
            FormTarget::ModRevision(revision) => Target::ModRevision(Revision::new(revision)),
            FormTarget::Value(value) => Target::Value(Value::new(value)),
        };
        Self::new(form.range.into(), op, target)
    }
}

impl From<FormRange> for Range {
    fn from(form: FormRange) -> Self {
        match form {
            FormRange::Key(key) => Self::Key(Key::new(key)),
            FormRange::Prefix(key) => Self::Prefix(Key::new(key)),
            FormRange::FromTo(from, to) => Self::FromTo(Key::new(from), Key::new(to)),
            FormRange::From(key) => Self::From(Key::new(key)),
            FormRange::All => Self::All,
        }
    }
}

impl From<FormOp> for Op {
    fn from(form: FormOp) -> Self {
        match form {
            FormOp::Put { key, value, prev } => {
                Self::Put { key: Key::new(key), value: Value::new(value), prev: prev.into(), lease: None }
            }
            FormOp::Delete { range, prev } => Self::Delete { range: range.into(), prev: prev.into() },
            FormOp::Range { range, limit, content } => {
                let content = match content {
                    FormContent::Full => Content::Full,
                    FormContent::KeysOnly => Content::KeysOnly,
                    FormContent::CountOnly => Content::CountOnly,
                };
                Self::Range(TxnRange::new(range.into()).with_limit(limit).with_content(content))
            }
        }
    }
}

impl From<FormPrev> for Prev {
    fn from(form: FormPrev) -> Self {
        match form {
            FormPrev::Omit => Self::Omit,
            FormPrev::Return => Self::Return,
        }
    }
}

#[cfg(test)]
mod tests;
