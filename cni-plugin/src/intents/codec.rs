//! The bytes of a pending commit: a fixed beginning, the version of its form, a CRC-32 over its content, and the
//! content.
//!
//! The content is an encoding by bincode of the types below: the order of fields and variants is part of the form. They
//! repeat the request types of `kv`, which may grow; each addition there must be added here under a new version.
//!
//! A pending commit has version 1. Version 2 is only read: it is for several attachments, and earlier versions wrote
//! it. Before its checksum stands the length of the content, which ends with the other attachments, and behind the
//! content come its [steps](super::several).

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::{Decode, Encode};
use ipam_core::attachment::Attachment;
use kv::{Compare, CompareOp, Content, Key, Op, Prev, Range, Revision, Target, Txn, TxnRange, Value};

use crate::whole_file::CRC_32;

/// The bytes at the beginning of every pending commit.
const MAGIC: &[u8] = b"margay-intent";
/// The form of a pending commit for one attachment, and the form for several, which is only read.
const FOR_ONE: u8 = 1;
const FOR_SEVERAL: u8 = 2;
/// More bytes than any pending commit has.
const DECODE_LIMIT: usize = 4 * 1024 * 1024;
const BINCODE: Configuration<LittleEndian, Varint, Limit<DECODE_LIMIT>> =
    bincode::config::standard().with_limit::<DECODE_LIMIT>();

/// A transaction on its way, with its store and its attachments. Earlier versions wrote some for several.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Note {
    pub(super) store: String,
    attachments: Vec<Form4>,
    pub(super) txn: Txn,
}

/// Network, container, interface and node of an attachment.
type Form4 = (String, String, String, String);

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
    /// The transaction has something that this form has no place for.
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
        let form = Form {
            store: self.store.clone(),
            attachment: attachment.clone(),
            compares: self
                .txn
                .compares
                .iter()
                .map(FormCompare::of)
                .collect::<Option<_>>()
                .ok_or(NoNote::Inexpressible)?,
            success: ops_of(&self.txn.success)?,
            failure: ops_of(&self.txn.failure)?,
        };
        let rest = bincode::encode_to_vec(form, BINCODE).map_err(|_| NoNote::Inexpressible)?;
        let mut bytes = MAGIC.to_vec();
        bytes.push(FOR_ONE);
        bytes.extend(CRC_32.checksum(&rest).to_le_bytes());
        bytes.extend(rest);
        Ok(bytes)
    }

    /// The pending commit, and where in these bytes its steps begin if it is for several attachments.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, Option<usize>), NoNote> {
        let (version, mut rest) = bytes.strip_prefix(MAGIC).and_then(<[u8]>::split_first).ok_or(NoNote::Foreign)?;
        let mut steps = None;
        match *version {
            FOR_ONE => {}
            FOR_SEVERAL => {
                let (length, behind) = rest.split_first_chunk().ok_or(NoNote::Foreign)?;
                let length = u32::from_le_bytes(*length) as usize;
                rest = behind.get(..size_of::<u32>() + length).ok_or(NoNote::Foreign)?;
                steps = Some(bytes.len() - behind.len() + rest.len());
            }
            other => return Err(NoNote::OtherVersion(other)),
        }
        let (sum, rest) = rest.split_first_chunk().ok_or(NoNote::Foreign)?;
        if CRC_32.checksum(rest) != u32::from_le_bytes(*sum) {
            return Err(NoNote::Damaged);
        }
        let (form, mut read): (Form, usize) = bincode::decode_from_slice(rest, BINCODE).map_err(|_| NoNote::Damaged)?;
        let Form { store, attachment, compares, success, failure } = form;
        let mut attachments = vec![attachment];
        if steps.is_some() {
            let (others, more): (Vec<Form4>, usize) =
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

fn names(attachment: &Attachment) -> Form4 {
    let Attachment { network, container, interface, node, .. } = attachment.clone();
    (network, container, interface, node)
}

fn ops_of(ops: &[Op]) -> Result<Vec<FormOp>, NoNote> {
    ops.iter().map(FormOp::of).collect::<Option<_>>().ok_or(NoNote::Inexpressible)
}

#[derive(Encode, Decode)]
struct Form {
    store: String,
    attachment: Form4,
    compares: Vec<FormCompare>,
    success: Vec<FormOp>,
    failure: Vec<FormOp>,
}

#[derive(Encode, Decode)]
struct FormCompare {
    range: FormRange,
    op: FormCompareOp,
    target: FormTarget,
}

#[derive(Encode, Decode)]
enum FormRange {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
    FromTo(Vec<u8>, Vec<u8>),
    From(Vec<u8>),
    All,
}

#[derive(Encode, Decode)]
enum FormCompareOp {
    Equal,
    NotEqual,
    Less,
    Greater,
}

#[derive(Encode, Decode)]
enum FormTarget {
    Version(i64),
    CreateRevision(i64),
    ModRevision(i64),
    Value(Vec<u8>),
}

#[derive(Encode, Decode)]
enum FormOp {
    Put { key: Vec<u8>, value: Vec<u8>, prev: FormPrev },
    Delete { range: FormRange, prev: FormPrev },
    Range { range: FormRange, limit: i64, content: FormContent },
}

#[derive(Encode, Decode)]
enum FormPrev {
    Omit,
    Return,
}

#[derive(Encode, Decode)]
enum FormContent {
    Full,
    KeysOnly,
    CountOnly,
}

impl FormCompare {
    fn of(compare: &Compare) -> Option<Self> {
        let op = match compare.op {
            CompareOp::Equal => FormCompareOp::Equal,
            CompareOp::NotEqual => FormCompareOp::NotEqual,
            CompareOp::Less => FormCompareOp::Less,
            CompareOp::Greater => FormCompareOp::Greater,
        };
        let target = match &compare.target {
            Target::Version(version) => FormTarget::Version(*version),
            Target::CreateRevision(revision) => FormTarget::CreateRevision(revision.get()),
            Target::ModRevision(revision) => FormTarget::ModRevision(revision.get()),
            Target::Value(value) => FormTarget::Value(value.as_bytes().to_vec()),
            _ => return None,
        };
        Some(Self { range: FormRange::of(&compare.range), op, target })
    }
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

impl FormRange {
    fn of(range: &Range) -> Self {
        let bytes = |key: &Key| key.as_bytes().to_vec();
        match range {
            Range::Key(key) => Self::Key(bytes(key)),
            Range::Prefix(key) => Self::Prefix(bytes(key)),
            Range::FromTo(from, to) => Self::FromTo(bytes(from), bytes(to)),
            Range::From(key) => Self::From(bytes(key)),
            Range::All => Self::All,
        }
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

impl FormOp {
    fn of(op: &Op) -> Option<Self> {
        Some(match op {
            // The allocator attaches nothing to a lease.
            Op::Put { key, value, prev, lease: None } => {
                Self::Put { key: key.as_bytes().to_vec(), value: value.as_bytes().to_vec(), prev: FormPrev::of(*prev) }
            }
            Op::Delete { range, prev } => Self::Delete { range: FormRange::of(range), prev: FormPrev::of(*prev) },
            Op::Range(read) => {
                let content = match read.content {
                    Content::Full => FormContent::Full,
                    Content::KeysOnly => FormContent::KeysOnly,
                    Content::CountOnly => FormContent::CountOnly,
                };
                Self::Range { range: FormRange::of(&read.range), limit: read.limit, content }
            }
            _ => return None,
        })
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

impl FormPrev {
    fn of(prev: Prev) -> Self {
        match prev {
            Prev::Omit => Self::Omit,
            Prev::Return => Self::Return,
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
