//! Converts keys, ranges, operations and answers between the types of the crate `kv` and those of etcd.

use etcd_client::{
    CompareOp as WireOp, DeleteOptions, GetOptions, GetResponse, KeyValue, PutOptions, TxnOp, TxnOpResponse,
};
use kv::{
    Compare, CompareOp, Content, Key, Kv, LeaseId, Op, OpResult, Prev, Range, RangeRequest, RangeResponse, Revision,
    Target, TxnRange, Value,
};

/// The smallest key that etcd accepts: one zero byte.
const FIRST: &[u8] = &[0];
/// The `range_end` that means "no upper bound" in etcd's protocol.
const NO_END: &[u8] = &[0];

/// A key range in etcd's protocol: a first key, and an exclusive end with two special values. If `end` is empty, the
/// key range consists of `key` only. If `end` is one zero byte, the key range consists of `key` and all greater keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeySpan {
    pub(crate) key: Vec<u8>,
    pub(crate) end: Vec<u8>,
}

impl KeySpan {
    pub(crate) fn of(range: &Range) -> Self {
        if let Range::Key(key) = range {
            return Self { key: key.as_bytes().to_vec(), end: Vec::new() };
        }
        let (from, to) = range.bounds();
        let key = if from.is_empty() { FIRST.to_vec() } else { from.as_bytes().to_vec() };
        match to {
            None => Self { key, end: NO_END.to_vec() },
            Some(to) if to.as_bytes() > &key[..] => Self { key, end: to.as_bytes().to_vec() },
            Some(_) => Self::nothing(&from),
        }
    }

    /// Returns a range without keys: its start and end are equal, and its end is not the marker `NO_END`.
    fn nothing(from: &Key) -> Self {
        let key = from.successor().successor().as_bytes().to_vec();
        Self { end: key.clone(), key }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.key == self.end && self.end != NO_END
    }
}

pub(crate) fn get_options(request: &RangeRequest) -> (Vec<u8>, GetOptions) {
    let (key, options) =
        txn_get_options(&TxnRange::new(request.range.clone()).with_limit(request.limit).with_content(request.content));
    (key, options.with_revision(request.at.get().max(0)))
}

fn txn_get_options(request: &TxnRange) -> (Vec<u8>, GetOptions) {
    let span = KeySpan::of(&request.range);
    let options = GetOptions::new().with_range(span.end).with_limit(request.limit.max(0));
    let options = match request.content {
        Content::Full => options,
        Content::KeysOnly => options.with_keys_only(),
        Content::CountOnly => options.with_count_only(),
    };
    (span.key, options)
}

/// Creates an etcd operation that reads one key without its value.
pub(crate) fn read_op(key: &[u8]) -> TxnOp {
    TxnOp::get(key, Some(GetOptions::new().with_keys_only()))
}

pub(crate) fn compare(compare: &Compare) -> etcd_client::Compare {
    let op = match compare.op {
        CompareOp::Equal => WireOp::Equal,
        CompareOp::NotEqual => WireOp::NotEqual,
        CompareOp::Less => WireOp::Less,
        CompareOp::Greater => WireOp::Greater,
    };
    let KeySpan { key, end } = KeySpan::of(&compare.range);
    let made = match &compare.target {
        Target::Version(version) => etcd_client::Compare::version(key, op, *version),
        Target::CreateRevision(revision) => etcd_client::Compare::create_revision(key, op, revision.get()),
        Target::ModRevision(revision) => etcd_client::Compare::mod_revision(key, op, revision.get()),
        Target::Value(value) => etcd_client::Compare::value(key, op, value.as_bytes()),
        Target::Lease(lease) => etcd_client::Compare::lease(key, op, *lease),
    };
    if end.is_empty() { made } else { made.with_range(end) }
}

pub(crate) fn op(op: &Op) -> TxnOp {
    match op {
        Op::Put { key, value, prev, lease } => {
            let options = PutOptions::new().with_lease(LeaseId::number(*lease));
            let options = match prev {
                Prev::Omit => options,
                Prev::Return => options.with_prev_key(),
            };
            TxnOp::put(key.as_bytes(), value.as_bytes(), Some(options))
        }
        Op::Delete { range, prev } => {
            let KeySpan { key, end } = KeySpan::of(range);
            let options = DeleteOptions::new().with_range(end);
            let options = match prev {
                Prev::Omit => options,
                Prev::Return => options.with_prev_key(),
            };
            TxnOp::delete(key, Some(options))
        }
        Op::Range(read) => {
            let (key, options) = txn_get_options(read);
            TxnOp::get(key, Some(options))
        }
    }
}

pub(crate) fn kv(found: KeyValue) -> Kv {
    let (create, modified, version) = (found.create_revision(), found.mod_revision(), found.version());
    let lease = LeaseId::new(found.lease());
    let (key, value) = found.into_key_value();
    Kv {
        key: Key::new(key),
        value: Value::new(value),
        create_revision: Revision::new(create),
        mod_revision: Revision::new(modified),
        version,
        lease,
    }
}

pub(crate) fn range_response(mut answer: GetResponse, revision: Revision) -> RangeResponse {
    RangeResponse {
        revision,
        more: answer.more(),
        count: count(answer.count()),
        kvs: answer.take_kvs().into_iter().map(kv).collect(),
    }
}

/// Converts the result of one operation of a transaction; `None` for the result of a nested transaction, which the
/// store never sends.
pub(crate) fn result(answer: TxnOpResponse, revision: Revision) -> Option<OpResult> {
    Some(match answer {
        TxnOpResponse::Put(mut put) => OpResult::Put { prev: put.take_prev_key().map(kv) },
        TxnOpResponse::Get(get) => OpResult::Range(range_response(get, revision)),
        TxnOpResponse::Delete(mut delete) => OpResult::Delete {
            count: count(delete.deleted()),
            prevs: delete.take_prev_kvs().into_iter().map(kv).collect(),
        },
        TxnOpResponse::Txn(_) => return None,
    })
}

fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(key: &[u8], end: &[u8]) -> KeySpan {
        KeySpan { key: key.to_vec(), end: end.to_vec() }
    }

    #[test]
    fn ranges_have_their_wire_form() {
        let from_to = |from: &[u8], to: &[u8]| Range::FromTo(Key::from(from), Key::from(to));
        for (range, expected) in [
            (Range::key("k"), span(b"k", b"")),
            (Range::prefix("k"), span(b"k", b"l")),
            (Range::prefix(vec![b'k', 0xff]), span(b"k\xff", b"l")),
            (Range::prefix(vec![0xff, 0xff]), span(b"\xff\xff", b"\0")),
            (Range::prefix(""), span(b"\0", b"\0")),
            (Range::All, span(b"\0", b"\0")),
            (Range::From("k".into()), span(b"k", b"\0")),
            (Range::From("".into()), span(b"\0", b"\0")),
            (from_to(b"a", b"b"), span(b"a", b"b")),
            (from_to(b"", b"b"), span(b"\0", b"b")),
            (from_to(b"\0", b"\0\0"), span(b"\0", b"\0\0")),
        ] {
            assert_eq!(KeySpan::of(&range), expected, "{range}");
            assert!(!KeySpan::of(&range).is_empty(), "{range}");
        }
    }

    #[test]
    fn empty_range_is_never_everything() {
        for (from, to) in [("b", "a"), ("a", "a"), ("a", ""), ("", ""), ("", "\0"), ("\0", "\0"), ("a", "\0")] {
            let span = KeySpan::of(&Range::FromTo(from.into(), to.into()));
            assert!(span.is_empty() && span.key == span.end, "{from:?} to {to:?}: {span:?}");
            assert!(span.end.len() > 1, "{from:?} to {to:?}: {span:?}");
        }
    }
}
