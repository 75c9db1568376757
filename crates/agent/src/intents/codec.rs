//! The bytes of a pending commit: a fixed beginning, the version of its form, a CRC-32 over its content, and the
//! content.
//!
//! A pending commit has version 3: store, attachment and transaction as the daemon's socket has them ([`wire::encode`]), under a checksum
//! that covers the version, too. The types of
//! `kv` may grow: each addition to those of a transaction takes a new version here, which a test with the bytes of this one tells.
//!
//! Earlier versions wrote two other forms, which are only read. Version 1 is an encoding of the types below. Version 2 is for several
//! attachments: before its checksum stands the length of the content, which ends with the other attachments, and behind the content come
//! its [steps](super::several).

use bincode::Decode;
use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use ipam_core::attachment::Attachment;
use kv::{Compare, CompareOp, Content, Key, Op, Prev, Range, Revision, Target, Txn, TxnRange, Value};

use crate::whole_file::CRC_32;

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
pub(super) struct Note {
    pub(super) store: String,
    attachments: Vec<Names>,
    pub(super) txn: Txn,
}

/// Network, container, interface and node of an attachment.
type Names = (String, String, String, String);

/// The reason why bytes are no pending commit, or why a transaction cannot be recorded as one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoNote {
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
    pub(super) fn new(store: &str, attachment: &Attachment, txn: &Txn) -> Self {
        Self { store: store.to_owned(), attachments: vec![names(attachment)], txn: txn.clone() }
    }

    /// True if it is about this attachment.
    pub(super) fn is_of(&self, attachment: &Attachment) -> bool {
        self.attachments.contains(&names(attachment))
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, NoNote> {
        let [attachment] = &self.attachments[..] else { return Err(NoNote::Inexpressible) };
        let content = wire::encode(&(&self.store, attachment, &self.txn)).map_err(|_| NoNote::Inexpressible)?;
        let mut bytes = MAGIC.to_vec();
        bytes.push(CURRENT);
        bytes.extend(checksum_with(CURRENT, &content).to_le_bytes());
        bytes.extend(content);
        Ok(bytes)
    }

    /// The pending commit, and where in these bytes its steps begin if it is for several attachments.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, Option<usize>), NoNote> {
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
