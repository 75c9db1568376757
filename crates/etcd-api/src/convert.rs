//! Requests and answers in the two spellings: etcd's messages, and this project's types.

use etcd_client::proto::{
    PbCompare, PbDeleteRequest, PbKeyValue, PbPutRequest, PbRangeRequest, PbTargetUnion, PbTxnOpRequest, PbTxnRequest,
    PbTxnRequestOp,
};
use kv::{Compare, CompareOp, Key, Kv, LeaseId, Op, Prev, Range, Revision, Target, Txn, Value};
use tonic::Status;

use crate::refusals::{Refusal, unsupported};
use crate::sorting::Shape;

/// The range of a key and an end: no end for the key alone, one zero byte for no upper bound.
///
/// # Errors
/// A key without bytes.
pub(crate) fn range(key: Vec<u8>, end: Vec<u8>) -> Result<Range, Refusal> {
    match (&key[..], &end[..]) {
        ([], _) => Err(Refusal::EmptyKey),
        (_, []) => Ok(Range::Key(Key::new(key))),
        ([0], [0]) => Ok(Range::All),
        (_, [0]) => Ok(Range::From(Key::new(key))),
        _ => Ok(Range::FromTo(Key::new(key), Key::new(end))),
    }
}

/// An entry, without its value if only keys are wanted.
pub(crate) fn key_value(kv: Kv) -> PbKeyValue {
    PbKeyValue {
        key: kv.key.as_bytes().to_vec(),
        value: kv.value.as_bytes().to_vec(),
        create_revision: kv.create_revision.get(),
        mod_revision: kv.mod_revision.get(),
        version: kv.version,
        lease: LeaseId::number(kv.lease),
    }
}

/// A transaction, and how the answers of its reads are shaped: one for each operation of each branch, in order.
pub(crate) struct Translated {
    pub(crate) txn: Txn,
    pub(crate) success: Vec<Option<Shape>>,
    pub(crate) failure: Vec<Option<Shape>>,
}

/// Translates a transaction.
///
/// # Errors
/// etcd's for a request of the wrong shape; transactions within transactions are not offered.
pub(crate) fn txn(request: PbTxnRequest) -> Result<Translated, Status> {
    let compares = request.compare.into_iter().map(compare).collect::<Result<Vec<_>, _>>()?;
    let (success, of_success) = branch(request.success)?;
    let (failure, of_failure) = branch(request.failure)?;
    let txn = Txn::new().with_compares(compares).with_success(success).with_failure(failure);
    Ok(Translated { txn, success: of_success, failure: of_failure })
}

fn branch(ops: Vec<PbTxnRequestOp>) -> Result<(Vec<Op>, Vec<Option<Shape>>), Status> {
    let translated = ops.into_iter().map(|op| match op.request {
        Some(PbTxnOpRequest::RequestPut(put)) => Ok((put_op(put)?, None)),
        Some(PbTxnOpRequest::RequestDeleteRange(delete)) => Ok((delete_op(delete)?, None)),
        Some(PbTxnOpRequest::RequestRange(read)) => {
            let shape = Shape::of(&read);
            Ok((range_op(read, &shape)?, Some(shape)))
        }
        Some(PbTxnOpRequest::RequestTxn(_)) => Err(unsupported("a transaction within a transaction")),
        None => Err(Refusal::KeyNotFound.status()),
    });
    let translated = translated.collect::<Result<Vec<_>, Status>>()?;
    Ok(translated.into_iter().unzip())
}

/// A put within a transaction, where nothing can be read first.
fn put_op(put: PbPutRequest) -> Result<Op, Status> {
    if put.ignore_value || put.ignore_lease {
        return Err(unsupported("ignore_value and ignore_lease within a transaction"));
    }
    put_of(put)
}

/// A put.
///
/// # Errors
/// A key without bytes.
pub(crate) fn put_of(put: PbPutRequest) -> Result<Op, Status> {
    if put.key.is_empty() {
        return Err(Refusal::EmptyKey.into());
    }
    let prev = if put.prev_kv { Prev::Return } else { Prev::Omit };
    Ok(Op::Put { key: Key::new(put.key), value: Value::new(put.value), prev, lease: LeaseId::new(put.lease) })
}

/// A deletion.
///
/// # Errors
/// A key without bytes.
pub(crate) fn delete_op(delete: PbDeleteRequest) -> Result<Op, Status> {
    let prev = if delete.prev_kv { Prev::Return } else { Prev::Omit };
    Ok(Op::Delete { range: range(delete.key, delete.range_end)?, prev })
}

fn range_op(read: PbRangeRequest, shape: &Shape) -> Result<Op, Status> {
    if read.revision > 0 {
        return Err(unsupported("a read of the past within a transaction"));
    }
    let request = kv::TxnRange::new(range(read.key, read.range_end)?)
        .with_limit(shape.limit_of_store())
        .with_content(shape.content_of_store());
    Ok(Op::Range(request))
}

fn compare(compare: PbCompare) -> Result<Compare, Status> {
    /// `CompareResult` and `CompareTarget` of etcd's protocol.
    const OPS: [CompareOp; 4] = [CompareOp::Equal, CompareOp::Greater, CompareOp::Less, CompareOp::NotEqual];
    const VALUE: i32 = 3;
    let unknown = || Status::invalid_argument("etcdserver: unknown compare");
    let op = usize::try_from(compare.result).ok().and_then(|result| OPS.get(result)).ok_or_else(unknown)?;
    let target = match (compare.target, compare.target_union) {
        (0, Some(PbTargetUnion::Version(version))) => Target::Version(version),
        (1, Some(PbTargetUnion::CreateRevision(revision))) => Target::CreateRevision(Revision::new(revision)),
        (2, Some(PbTargetUnion::ModRevision(revision))) => Target::ModRevision(Revision::new(revision)),
        (VALUE, Some(PbTargetUnion::Value(value))) => Target::Value(Value::new(value)),
        (4, Some(PbTargetUnion::Lease(lease))) => Target::Lease(lease),
        // A message without the number has zero.
        (0, None) => Target::Version(0),
        (1, None) => Target::CreateRevision(Revision::UNSET),
        (2, None) => Target::ModRevision(Revision::UNSET),
        (4, None) => Target::Lease(0),
        _ => return Err(unknown()),
    };
    Ok(Compare::new(range(compare.key, compare.range_end)?, *op, target))
}
