//! Keeps the pending commits of ADDs in files. [`ipam_core::pending_commits`] explains the purpose of pending commits.
//!
//! Pending commits are files in a private folder (mode 0700) in memory (below `/run`). There is one file for each
//! pending commit, which is a transaction whose outcome is unknown. The name of a pending commit's file begins with a
//! checksum of the attachment, so finding an attachment's files does not require opening all files. The allocator
//! writes the whole file of a pending commit before it sends the transaction. A checksum in the file of a pending
//! commit shows whether the file is complete. The files of pending commits are not synced to a disk. A pending commit
//! must outlive the plugin's process, but not a crash of the machine, which also ends all containers.
//!
//! | Found | Done |
//! |---|---|
//! | a pending commit of another attachment, or on another store | kept, and unread if its name shows that |
//! | a pending commit on this cluster, of a call with other endpoints | found by the cluster's id |
//! | an incomplete file | kept, with a line in the log: its transaction was never sent |
//! | a file of an earlier version, for several attachments | settled for the caller's attachment, if it was sent |
//! | a file that is damaged or in another version's form | kept, with a line in the log |
//! | no folder | there are no pending commits |
//!
//! # The bytes of a file
//!
//! The file of a pending commit consists of fixed magic bytes, the number of the file's format, a CRC-32 of the
//! content, and the content. This version of Margay writes pending-commit files in format 3. Format 3 of the
//! pending-commit file holds the store, the attachment and the transaction, encoded by [`wire::encode`]. The checksum
//! of format 3 also covers the format number. The encoding of a pending commit changes whenever a later version extends
//! the types in `kv::Txn`; the file then needs a new format number. A test fails if the bytes of a pending-commit file
//! in format 3 differ from those of earlier versions.
//!
//! Formats 1 and 2 were written by earlier versions of Margay; this version only reads these formats. Format 1 of the
//! pending-commit file is the bincode encoding of the `LegacyRecord` types. Format 2, for several attachments, is
//! format 1 plus the content's length before the checksum, the further attachments at the end of the content, and state
//! bytes after the content. In format 2 of the pending-commit file, a process records a change of the transaction's
//! state by appending one byte, the state byte. If two state bytes of a pending-commit file contradict each other, the
//! earlier one counts. Format 2 has state bytes because one of a file's attachments may be released before the file's
//! transaction is first sent. The state bytes of a pending-commit file prevent a late transaction from assigning an
//! address to an attachment that was released meanwhile.

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

/// The folder of the pending commits that plugins record.
pub const PENDING_COMMITS_FOLDER: &str = "/run/margay/intents";

/// Suffix of the file name of every pending commit.
const FILE_SUFFIX: &str = ".intent";
/// The name of a trial file, which is created and removed to check whether pending commits can be written.
const TRIAL_FILE: &str = "trial";
/// Maximum size of the file of a pending commit, in bytes. The file of a pending commit contains a few names, and a
/// transaction whose size is limited.
const MAX_RECORD_BYTES: u64 = 2 * 1024 * 1024;

/// Separates the two parts of a store's recorded name: the store's address, and the cluster's id in hexadecimal digits.
/// A recorded store name lacks the cluster's id if the cluster had not answered yet, or if an earlier version of Margay
/// wrote the file.
const CLUSTER_SEPARATOR: &str = " cluster ";

/// Splits a store's recorded name into the store's address and the cluster's id.
fn address_and_cluster(store: &str) -> (&str, Option<u64>) {
    match store.rsplit_once(CLUSTER_SEPARATOR).map(|(address, id)| (address, u64::from_str_radix(id, 16))) {
        Some((address, Ok(id))) => (address, Some(id)),
        _ => (store, None),
    }
}

/// The files of one store's pending commits in a folder.
#[derive(Clone, Debug)]
pub struct PendingCommitFolder {
    folder: PathBuf,
    store: String,
    cluster: Option<Arc<dyn ClusterStore>>,
}

struct PendingCommitFile {
    id: PendingCommitId,
    record: CommitRecord,
    /// Byte offset of the state bytes in a pending-commit file of format 2; `None` for the other formats.
    steps: Option<usize>,
}

impl PendingCommitFolder {
    /// Creates a handle for the pending commits of the store with the address `store`, kept in the folder `folder`.
    /// Pending commits of this store are never sent to another store. The folder for pending commits is created when
    /// the first pending commit is recorded.
    pub fn new(folder: impl Into<PathBuf>, store: impl Into<String>) -> Self {
        Self { folder: folder.into(), store: store.into(), cluster: None }
    }

    /// Makes this handle also find pending commits that were recorded for the same cluster under another address.
    pub(crate) fn with_cluster(mut self, cluster: Option<Arc<dyn ClusterStore>>) -> Self {
        self.cluster = cluster;
        self
    }

    /// Checks that a pending commit could be recorded now, by writing and removing a trial file.
    ///
    /// # Errors
    /// Any error of writing or removing the trial file.
    pub(crate) fn check(&self) -> io::Result<()> {
        whole_file::replace(&self.folder, TRIAL_FILE, &[0; 4096])?;
        match fs::remove_file(self.folder.join(TRIAL_FILE)) {
            // Another process that checked the folder at the same time has already removed the trial file.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Returns the store's name in a pending commit's file: the store's address and, if the cluster has already
    /// answered, the cluster's id.
    fn name_of_store(&self) -> String {
        match self.cluster.as_ref().and_then(|cluster| cluster.cluster_id()) {
            Some(id) => format!("{}{CLUSTER_SEPARATOR}{id:x}", self.store),
            None => self.store.clone(),
        }
    }

    /// Returns whether a pending commit was recorded for the store of this handle. If the recorded store address
    /// differs from the address of this handle's store and the cluster's id is not known yet, this function queries the
    /// cluster for its id.
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
            tracing::warn!(
                id = id.0,
                store,
                "skipping the record of an unanswered commit: the commit was sent to another store"
            );
        }
        Ok(is_here)
    }

    /// Returns the attachment's pending commits whose recorded store address equals this store's address. Read-only.
    ///
    /// # Errors
    /// Any error of [`PendingCommits::pending`].
    pub fn recorded_here(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
        let found = self.search(attachment)?.into_iter();
        let here = found.filter(|found| address_and_cluster(&found.record.store).0 == self.store);
        Ok(here.map(|PendingCommitFile { id, record, .. }| PendingCommit { id, txn: record.txn }).collect())
    }

    /// Finds the pending commits of an attachment, for any store.
    fn search(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommitFile>> {
        let entries = match self.folder.read_dir() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let prefix = prefix(attachment);
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if !name.starts_with(&prefix) || !name.ends_with(FILE_SUFFIX) {
                continue;
            }
            let Some((record, steps)) = read(&entry.path(), attachment) else { continue };
            found.push(PendingCommitFile { id: PendingCommitId(name), record, steps });
        }
        Ok(found)
    }
}

/// Reads a pending commit from its file, and the byte offset at which the file's state bytes begin (only in format 2).
/// Returns `None` if the file is damaged or belongs to another attachment.
fn read(path: &Path, attachment: &Attachment) -> Option<(CommitRecord, Option<usize>)> {
    match whole_file::read(path, MAX_RECORD_BYTES)
        .and_then(|bytes| CommitRecord::decode(&bytes).map_err(io::Error::other))
    {
        Ok((record, steps)) => record.is_of(attachment).then_some((record, steps)),
        // Ignore a missing file: the process that recorded the pending commit has just learned its outcome and removed
        // the file.
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(
                path = %path.display(),
                %error,
                "skipping the record of an unanswered commit: the record cannot be read"
            );
            None
        }
    }
}

#[async_trait]
impl PendingCommits for PendingCommitFolder {
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<PendingCommitId> {
        let bytes = CommitRecord::new(&self.name_of_store(), attachment, txn).encode().map_err(io::Error::other)?;
        let name = format!("{}{}{FILE_SUFFIX}", prefix(attachment), Uuid::new_v4().simple());
        whole_file::create(&self.folder, &name, &bytes)?;
        Ok(PendingCommitId(name))
    }

    fn forget(&self, id: &PendingCommitId) {
        match fs::remove_file(self.folder.join(&id.0)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(
                    %error,
                    id = id.0,
                    "the outcome of a commit is known now, but the file that records the commit cannot be deleted; the \
                     container's next ADD or DEL tries to delete the file again"
                );
            }
            _ => {}
        }
    }

    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
        let mut pending = Vec::new();
        for PendingCommitFile { id, record, steps } in self.search(attachment)? {
            if !self.is_here(&id, &record.store).await? {
                continue;
            }
            match steps.map_or(Ok(true), |steps| is_pending(&self.folder.join(&id.0), steps)) {
                Ok(true) => pending.push(PendingCommit { id, txn: record.txn }),
                Ok(false) => self.forget(&id),
                // Ignore a missing file: the process that recorded the pending commit has just removed the file.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(pending)
    }
}

/// Returns the file name prefix of an attachment's pending commits. The prefix of the file name is a checksum, which
/// can collide, so the content of each file also names its attachment.
fn prefix(attachment: &Attachment) -> String {
    let Attachment { network, container, interface, node, .. } = attachment;
    whole_file::name_of(&[network, container, interface, node]) + "-"
}

/// State byte "closed": the file's writer is about to send the transaction, so no other process may void the
/// transaction. State byte "void": another process found the file first, so the writer must not send the transaction.
const STEP_CLOSED: u8 = b'c';
const STEP_VOID: u8 = b'v';
/// State byte "done": the file's writer knows the transaction's outcome and will remove the file. State byte "found":
/// another process saw the file first, so each attachment in the file settles the transaction itself.
const STEP_DONE: u8 = b'd';
const STEP_FOUND: u8 = b'f';

/// Appends the state bytes "void" and "found" to a pending-commit file of format 2 that another process wrote. Returns
/// whether the transaction in the file was sent and its outcome is unknown. Returns false if there is nothing to
/// settle: the transaction will never be sent, or the file's writer knows the outcome.
fn is_pending(path: &Path, steps: usize) -> io::Result<bool> {
    OpenOptions::new().append(true).open(path)?.write_all(&[STEP_VOID, STEP_FOUND])?;
    let record = whole_file::read(path, MAX_RECORD_BYTES)?;
    let taken = record.get(steps..).unwrap_or_default();
    let first = |these: [u8; 2]| taken.iter().copied().find(|step| these.contains(step));
    Ok(first([STEP_CLOSED, STEP_VOID]) == Some(STEP_CLOSED) && first([STEP_DONE, STEP_FOUND]) == Some(STEP_FOUND))
}

/// Magic bytes at the start of the file of every pending commit.
const MAGIC: &[u8] = b"margay-intent";
/// The form number of the pending commit files that this version of Margay writes.
const CURRENT_FORM: u8 = 3;
/// The form numbers of the pending commit files that earlier versions of Margay wrote: form 1 for one attachment, and
/// form 2 for several attachments.
const FIRST_FORM: u8 = 1;
const SEVERAL_FORM: u8 = 2;
/// Maximum number of bytes decoded from a pending-commit file of format 1 or 2; such files are always smaller.
const MAX_DECODED_BYTES: usize = 4 * 1024 * 1024;
const LEGACY_BINCODE: Configuration<LittleEndian, Varint, Limit<MAX_DECODED_BYTES>> =
    bincode::config::standard().with_limit::<MAX_DECODED_BYTES>();

/// The content of the file of a pending commit: the transaction, the name of the store, and the attachments. Only
/// earlier versions of Margay recorded several attachments in one file.
#[derive(Clone, Debug, PartialEq)]
struct CommitRecord {
    store: String,
    attachments: Vec<AttachmentNames>,
    txn: Txn,
}

/// The network, container, interface and node of an attachment.
type AttachmentNames = (String, String, String, String);

/// Why the pending commit in a file cannot be read, or why a transaction cannot be recorded as a pending commit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum RecordError {
    /// The file does not contain a pending commit, or is truncated.
    #[error("it is no note, or is cut off")]
    Foreign,
    /// The file has a form that this version of Margay cannot read.
    #[error("it has form {0}, which this version does not know")]
    OtherVersion(u8),
    /// The checksum in the file is wrong, or the file's content cannot be decoded.
    #[error("it is damaged")]
    Damaged,
    /// The pending commit concerns several attachments, or is too long to be encoded.
    #[error("the transaction cannot be noted")]
    Inexpressible,
}

impl CommitRecord {
    fn new(store: &str, attachment: &Attachment, txn: &Txn) -> Self {
        Self { store: store.to_owned(), attachments: vec![names(attachment)], txn: txn.clone() }
    }

    fn is_of(&self, attachment: &Attachment) -> bool {
        self.attachments.contains(&names(attachment))
    }

    fn encode(&self) -> Result<Vec<u8>, RecordError> {
        let [attachment] = &self.attachments[..] else { return Err(RecordError::Inexpressible) };
        let content = wire::encode(&(&self.store, attachment, &self.txn)).map_err(|_| RecordError::Inexpressible)?;
        let mut bytes = MAGIC.to_vec();
        bytes.push(CURRENT_FORM);
        bytes.extend(checksum_with(CURRENT_FORM, &content).to_le_bytes());
        bytes.extend(content);
        Ok(bytes)
    }

    /// Decodes a pending commit from the bytes of its file. If the pending-commit file has format 2, also returns the
    /// byte offset of its state bytes.
    fn decode(bytes: &[u8]) -> Result<(Self, Option<usize>), RecordError> {
        let (version, mut rest) =
            bytes.strip_prefix(MAGIC).and_then(<[u8]>::split_first).ok_or(RecordError::Foreign)?;
        let mut steps = None;
        match *version {
            CURRENT_FORM | FIRST_FORM => {}
            SEVERAL_FORM => {
                let (length, behind) = rest.split_first_chunk().ok_or(RecordError::Foreign)?;
                let length = u32::from_le_bytes(*length) as usize;
                rest = behind.get(..size_of::<u32>() + length).ok_or(RecordError::Foreign)?;
                steps = Some(bytes.len() - behind.len() + rest.len());
            }
            other => return Err(RecordError::OtherVersion(other)),
        }
        let (sum, rest) = rest.split_first_chunk().ok_or(RecordError::Foreign)?;
        let found = if *version == CURRENT_FORM { checksum_with(CURRENT_FORM, rest) } else { CRC_32.checksum(rest) };
        if found != u32::from_le_bytes(*sum) {
            return Err(RecordError::Damaged);
        }
        if *version == CURRENT_FORM {
            let (store, attachment, txn) = wire::decode(rest).map_err(|_| RecordError::Damaged)?;
            return Ok((Self { store, attachments: vec![attachment], txn }, None));
        }
        let (form, mut read): (LegacyRecord, usize) =
            bincode::decode_from_slice(rest, LEGACY_BINCODE).map_err(|_| RecordError::Damaged)?;
        let LegacyRecord { store, attachment, compares, success, failure } = form;
        let mut attachments = vec![attachment];
        if steps.is_some() {
            let (others, more): (Vec<AttachmentNames>, usize) =
                bincode::decode_from_slice(&rest[read..], LEGACY_BINCODE).map_err(|_| RecordError::Damaged)?;
            attachments.extend(others);
            read += more;
        }
        if read != rest.len() {
            return Err(RecordError::Damaged);
        }
        let txn = Txn::new()
            .with_compares(compares.into_iter().map(Compare::from))
            .with_success(success.into_iter().map(Op::from))
            .with_failure(failure.into_iter().map(Op::from));
        Ok((Self { store, attachments, txn }, steps))
    }
}

/// Returns the checksum of a file's format number and content. The checksum covers the format number, because bytes of
/// one format might also be decodable in another format.
fn checksum_with(version: u8, content: &[u8]) -> u32 {
    let mut digest = CRC_32.digest();
    digest.update(&[version]);
    digest.update(content);
    digest.finalize()
}

fn names(attachment: &Attachment) -> AttachmentNames {
    let Attachment { network, container, interface, node, .. } = attachment.clone();
    (network, container, interface, node)
}

#[derive(Decode)]
struct LegacyRecord {
    store: String,
    attachment: AttachmentNames,
    compares: Vec<LegacyCompare>,
    success: Vec<LegacyOp>,
    failure: Vec<LegacyOp>,
}

#[derive(Decode)]
struct LegacyCompare {
    range: LegacyRange,
    op: LegacyCompareOp,
    target: LegacyTarget,
}

#[derive(Decode)]
enum LegacyRange {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
    FromTo(Vec<u8>, Vec<u8>),
    From(Vec<u8>),
    All,
}

#[derive(Decode)]
enum LegacyCompareOp {
    Equal,
    NotEqual,
    Less,
    Greater,
}

#[derive(Decode)]
enum LegacyTarget {
    Version(i64),
    CreateRevision(i64),
    ModRevision(i64),
    Value(Vec<u8>),
}

#[derive(Decode)]
enum LegacyOp {
    Put { key: Vec<u8>, value: Vec<u8>, prev: LegacyPrev },
    Delete { range: LegacyRange, prev: LegacyPrev },
    Range { range: LegacyRange, limit: i64, content: LegacyContent },
}

#[derive(Decode)]
enum LegacyPrev {
    Omit,
    Return,
}

#[derive(Decode)]
enum LegacyContent {
    Full,
    KeysOnly,
    CountOnly,
}

impl From<LegacyCompare> for Compare {
    fn from(form: LegacyCompare) -> Self {
        let op = match form.op {
            LegacyCompareOp::Equal => CompareOp::Equal,
            LegacyCompareOp::NotEqual => CompareOp::NotEqual,
            LegacyCompareOp::Less => CompareOp::Less,
            LegacyCompareOp::Greater => CompareOp::Greater,
        };
        let target = match form.target {
            LegacyTarget::Version(version) => Target::Version(version),
            LegacyTarget::CreateRevision(revision) => Target::CreateRevision(Revision::new(revision)),
            LegacyTarget::ModRevision(revision) => Target::ModRevision(Revision::new(revision)),
            LegacyTarget::Value(value) => Target::Value(Value::new(value)),
        };
        Self::new(form.range.into(), op, target)
    }
}

impl From<LegacyRange> for Range {
    fn from(form: LegacyRange) -> Self {
        match form {
            LegacyRange::Key(key) => Self::Key(Key::new(key)),
            LegacyRange::Prefix(key) => Self::Prefix(Key::new(key)),
            LegacyRange::FromTo(from, to) => Self::FromTo(Key::new(from), Key::new(to)),
            LegacyRange::From(key) => Self::From(Key::new(key)),
            LegacyRange::All => Self::All,
        }
    }
}

impl From<LegacyOp> for Op {
    fn from(form: LegacyOp) -> Self {
        match form {
            LegacyOp::Put { key, value, prev } => {
                Self::Put { key: Key::new(key), value: Value::new(value), prev: prev.into(), lease: None }
            }
            LegacyOp::Delete { range, prev } => Self::Delete { range: range.into(), prev: prev.into() },
            LegacyOp::Range { range, limit, content } => {
                let content = match content {
                    LegacyContent::Full => Content::Full,
                    LegacyContent::KeysOnly => Content::KeysOnly,
                    LegacyContent::CountOnly => Content::CountOnly,
                };
                Self::Range(TxnRange::new(range.into()).with_limit(limit).with_content(content))
            }
        }
    }
}

impl From<LegacyPrev> for Prev {
    fn from(form: LegacyPrev) -> Self {
        match form {
            LegacyPrev::Omit => Self::Omit,
            LegacyPrev::Return => Self::Return,
        }
    }
}

#[cfg(test)]
mod tests;
