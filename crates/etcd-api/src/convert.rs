//! Converts requests, answers and errors between etcd's messages and this project's types.
//!
//! A store neither filters by revision nor sorts, so this module does both after a read, and then applies the limit.
//! The table of [`Refusal`] has the code and text of each error of etcd that this crate uses. Go clients compare the
//! texts (`rpctypes`), so the texts must equal etcd's.

use std::cmp::Ordering;

use etcd_client::proto::{
    PbCompare, PbDeleteRequest, PbKeyValue, PbPutRequest, PbRangeRequest, PbRangeResponse, PbResponseHeader,
    PbTargetUnion, PbTxnOpRequest, PbTxnRequest, PbTxnRequestOp,
};
use kv::{
    Auth, Compare, CompareOp, Content, Error, ErrorKind, InvalidArgument, Key, Kv, LeaseId, Op, Outcome, Prev, Range,
    RangeResponse, Revision, Target, Txn, Value,
};
use tonic::{Code, Status};

/// Converts a key and a range end into a range. An empty end selects only the key; an end of one zero byte selects all
/// keys from the key on.
///
/// # Errors
/// `EmptyKey` if the key of the request has no bytes.
pub(crate) fn range(key: Vec<u8>, end: Vec<u8>) -> Result<Range, Refusal> {
    match (&key[..], &end[..]) {
        ([], _) => Err(Refusal::EmptyKey),
        (_, []) => Ok(Range::Key(Key::new(key))),
        ([0], [0]) => Ok(Range::All),
        (_, [0]) => Ok(Range::From(Key::new(key))),
        _ => Ok(Range::FromTo(Key::new(key), Key::new(end))),
    }
}

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

/// A transaction for the store, and a description of how to build the answer to each read in the transaction. The lists
/// `success` and `failure` have one item per operation of their branch, in order: the `ReadShape` of a read operation,
/// or `None` for a write operation.
pub(crate) struct TranslatedTxn {
    pub(crate) txn: Txn,
    pub(crate) success: Vec<Option<ReadShape>>,
    pub(crate) failure: Vec<Option<ReadShape>>,
}

/// Converts etcd's transaction request into a transaction for the store.
///
/// # Errors
/// etcd's error for a malformed request; an [`unsupported`] error for an operation that the store does not offer, such
/// as a nested transaction.
pub(crate) fn txn(request: PbTxnRequest) -> Result<TranslatedTxn, Status> {
    let compares = request.compare.into_iter().map(compare).collect::<Result<Vec<_>, _>>()?;
    let (success, of_success) = branch(request.success)?;
    let (failure, of_failure) = branch(request.failure)?;
    let txn = Txn::new().with_compares(compares).with_success(success).with_failure(failure);
    Ok(TranslatedTxn { txn, success: of_success, failure: of_failure })
}

fn branch(ops: Vec<PbTxnRequestOp>) -> Result<(Vec<Op>, Vec<Option<ReadShape>>), Status> {
    let translated = ops.into_iter().map(|op| match op.request {
        Some(PbTxnOpRequest::RequestPut(put)) => Ok((put_op(put)?, None)),
        Some(PbTxnOpRequest::RequestDeleteRange(delete)) => Ok((delete_op(delete)?, None)),
        Some(PbTxnOpRequest::RequestRange(read)) => {
            let shape = ReadShape::of(&read);
            Ok((range_op(read, &shape)?, Some(shape)))
        }
        Some(PbTxnOpRequest::RequestTxn(_)) => Err(unsupported("a transaction within a transaction")),
        None => Err(Refusal::KeyNotFound.status()),
    });
    let translated = translated.collect::<Result<Vec<_>, Status>>()?;
    Ok(translated.into_iter().unzip())
}

/// Converts a put within a transaction. `ignore_value` and `ignore_lease` are refused, because they would require
/// reading the key before the transaction.
fn put_op(put: PbPutRequest) -> Result<Op, Status> {
    if put.ignore_value || put.ignore_lease {
        return Err(unsupported("ignore_value and ignore_lease within a transaction"));
    }
    put_of(put)
}

/// Converts a put request into an operation of the store.
///
/// # Errors
/// `EmptyKey` if the key of the request has no bytes.
pub(crate) fn put_of(put: PbPutRequest) -> Result<Op, Status> {
    if put.key.is_empty() {
        return Err(Refusal::EmptyKey.into());
    }
    let prev = if put.prev_kv { Prev::Return } else { Prev::Omit };
    Ok(Op::Put { key: Key::new(put.key), value: Value::new(put.value), prev, lease: LeaseId::new(put.lease) })
}

/// Converts a deletion request into an operation of the store.
///
/// # Errors
/// `EmptyKey` if the key of the request has no bytes.
pub(crate) fn delete_op(delete: PbDeleteRequest) -> Result<Op, Status> {
    let prev = if delete.prev_kv { Prev::Return } else { Prev::Omit };
    Ok(Op::Delete { range: range(delete.key, delete.range_end)?, prev })
}

fn range_op(read: PbRangeRequest, shape: &ReadShape) -> Result<Op, Status> {
    if read.revision > 0 {
        return Err(unsupported("a read of the past within a transaction"));
    }
    let request = kv::TxnRange::new(range(read.key, read.range_end)?)
        .with_limit(shape.limit_of_store())
        .with_content(shape.content_of_store());
    Ok(Op::Range(request))
}

fn compare(compare: PbCompare) -> Result<Compare, Status> {
    /// The values of `CompareResult` in etcd's protocol, in order, and the value `VALUE` of `CompareTarget`.
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
        // A compare message without a number compares with zero.
        (0, None) => Target::Version(0),
        (1, None) => Target::CreateRevision(Revision::UNSET),
        (2, None) => Target::ModRevision(Revision::UNSET),
        (4, None) => Target::Lease(0),
        _ => return Err(unknown()),
    };
    Ok(Compare::new(range(compare.key, compare.range_end)?, *op, target))
}

/// The values of `SortOrder` in etcd's protocol, without `NONE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SortDirection {
    Ascending,
    Descending,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SortField {
    Key,
    Version,
    Create,
    Mod,
    Value,
}

/// How to filter, sort and limit the keys of a read, and which fields to return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadShape {
    limit: i64,
    keys_only: bool,
    count_only: bool,
    sort: Option<(SortField, SortDirection)>,
    mod_revisions: (i64, i64),
    create_revisions: (i64, i64),
}

impl ReadShape {
    /// Returns the filters, order, limit and content that a range request asks for.
    pub(crate) fn of(request: &PbRangeRequest) -> Self {
        let by = match request.sort_target {
            1 => SortField::Version,
            2 => SortField::Create,
            3 => SortField::Mod,
            4 => SortField::Value,
            _ => SortField::Key,
        };
        let sort = match (request.sort_order, by) {
            // No sorting is needed, because a store returns keys in ascending order.
            (0 | 1, SortField::Key) => None,
            (2, by) => Some((by, SortDirection::Descending)),
            // If a request names a sort target other than the key but no sort order, the order is ascending.
            (_, by) => Some((by, SortDirection::Ascending)),
        };
        Self {
            limit: request.limit,
            keys_only: request.keys_only,
            count_only: request.count_only,
            sort,
            mod_revisions: (request.min_mod_revision, request.max_mod_revision),
            create_revisions: (request.min_create_revision, request.max_create_revision),
        }
    }

    /// Returns whether the store's answer needs neither filtering nor sorting.
    fn is_plain(&self) -> bool {
        self.sort.is_none() && self.mod_revisions == (0, 0) && self.create_revisions == (0, 0)
    }

    /// Returns the limit for the store's read: 0 (no limit) if the answer is filtered or sorted after the read.
    pub(crate) fn limit_of_store(&self) -> i64 {
        if self.is_plain() { self.limit } else { 0 }
    }

    /// Returns the content that the store must return for each key.
    pub(crate) fn content_of_store(&self) -> Content {
        let sorts_by_value = matches!(self.sort, Some((SortField::Value, _)));
        match (self.count_only, self.keys_only) {
            (true, _) => Content::CountOnly,
            (_, true) if !sorts_by_value => Content::KeysOnly,
            _ => Content::Full,
        }
    }

    /// Builds the answer to a read. As in etcd, `count` is the number of keys in the range before any filter.
    pub(crate) fn answer(&self, found: RangeResponse, header: Option<PbResponseHeader>) -> PbRangeResponse {
        let RangeResponse { mut kvs, count, mut more, .. } = found;
        if !self.is_plain() {
            kvs.retain(|kv| self.wants(kv));
            if let Some((by, order)) = self.sort {
                kvs.sort_by(|one, other| ordered(by, order, one, other));
            }
            let limit = usize::try_from(self.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
            more = kvs.len() > limit;
            kvs.truncate(limit);
        }
        let bare = |mut kv: PbKeyValue| {
            if self.keys_only {
                kv.value = Vec::new();
            }
            kv
        };
        PbRangeResponse {
            header,
            kvs: kvs.into_iter().map(|kv| bare(key_value(kv))).collect(),
            more,
            count: i64::try_from(count).unwrap_or(i64::MAX),
        }
    }

    fn wants(&self, kv: &Kv) -> bool {
        // A minimum or maximum revision of 0 stands for no bound.
        let within =
            |revision: i64, (from, to): (i64, i64)| (from == 0 || revision >= from) && (to == 0 || revision <= to);
        within(kv.mod_revision.get(), self.mod_revisions) && within(kv.create_revision.get(), self.create_revisions)
    }
}

fn ordered(by: SortField, order: SortDirection, one: &Kv, other: &Kv) -> Ordering {
    let ascending = match by {
        SortField::Key => one.key.cmp(&other.key),
        SortField::Version => one.version.cmp(&other.version),
        SortField::Create => one.create_revision.cmp(&other.create_revision),
        SortField::Mod => one.mod_revision.cmp(&other.mod_revision),
        SortField::Value => one.value.cmp(&other.value),
    };
    match order {
        SortDirection::Ascending => ascending,
        SortDirection::Descending => ascending.reverse(),
    }
}

/// A refusal of a request, with etcd's gRPC code and error text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    EmptyKey,
    KeyNotFound,
    ValueProvided,
    LeaseProvided,
    TooManyOps,
    DuplicateKey,
    Compacted,
    FutureRevision,
    NoSpace,
    RequestTooLarge,
    TooManyRequests,
    LeaseNotFound,
    LeaseExists,
    LeaseTooLong,
    NoLeader,
    Timeout,
    Stopped,
    PermissionDenied,
    NotSupportedHere,
}

impl Refusal {
    /// Returns the gRPC code and the error text with which etcd 3.4 refuses a request for this reason.
    pub(crate) const fn parts(self) -> (Code, &'static str) {
        match self {
            Self::EmptyKey => (Code::InvalidArgument, "etcdserver: key is not provided"),
            Self::KeyNotFound => (Code::InvalidArgument, "etcdserver: key not found"),
            Self::ValueProvided => (Code::InvalidArgument, "etcdserver: value is provided"),
            Self::LeaseProvided => (Code::InvalidArgument, "etcdserver: lease is provided"),
            Self::TooManyOps => (Code::InvalidArgument, "etcdserver: too many operations in txn request"),
            Self::DuplicateKey => (Code::InvalidArgument, "etcdserver: duplicate key given in txn request"),
            Self::Compacted => (Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted"),
            Self::FutureRevision => (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision"),
            Self::NoSpace => (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            Self::RequestTooLarge => (Code::InvalidArgument, "etcdserver: request is too large"),
            Self::TooManyRequests => (Code::ResourceExhausted, "etcdserver: too many requests"),
            Self::LeaseNotFound => (Code::NotFound, "etcdserver: requested lease not found"),
            Self::LeaseExists => (Code::FailedPrecondition, "etcdserver: lease already exists"),
            Self::LeaseTooLong => (Code::OutOfRange, "etcdserver: too large lease TTL"),
            Self::NoLeader => (Code::Unavailable, "etcdserver: no leader"),
            Self::Timeout => (Code::Unavailable, "etcdserver: request timed out"),
            Self::Stopped => (Code::Unavailable, "etcdserver: server stopped"),
            Self::PermissionDenied => (Code::PermissionDenied, "etcdserver: permission denied"),
            Self::NotSupportedHere => (Code::Unimplemented, "margay serve does not offer this"),
        }
    }

    pub(crate) fn status(self) -> Status {
        let (code, text) = self.parts();
        Status::new(code, text)
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        refusal.status()
    }
}

/// Returns the error for a method or option that this API does not offer. `what` names the refused method or option,
/// and may name an alternative.
pub(crate) fn unsupported(what: &str) -> Status {
    let (code, text) = Refusal::NotSupportedHere.parts();
    Status::new(code, format!("{text}: {what}"))
}

/// Converts a store error into a status. For a write with an unknown outcome, the status has a code that clients treat
/// as an unknown outcome. For a definite failure, the status never has a code that makes clients retry.
pub(crate) fn status(error: &Error) -> Status {
    let refusal = match error.kind() {
        ErrorKind::InvalidArgument(InvalidArgument::EmptyKey) => Refusal::EmptyKey,
        ErrorKind::InvalidArgument(InvalidArgument::DuplicateKey(_)) => Refusal::DuplicateKey,
        ErrorKind::InvalidArgument(InvalidArgument::TooManyOps { .. }) => Refusal::TooManyOps,
        ErrorKind::TooLarge { .. } => Refusal::RequestTooLarge,
        ErrorKind::Compacted { .. } => Refusal::Compacted,
        ErrorKind::FutureRevision => Refusal::FutureRevision,
        ErrorKind::NoSpace => Refusal::NoSpace,
        ErrorKind::LeaseNotFound => Refusal::LeaseNotFound,
        ErrorKind::Throttled => Refusal::TooManyRequests,
        ErrorKind::NoLeader => Refusal::NoLeader,
        ErrorKind::Auth(Auth::Denied) => Refusal::PermissionDenied,
        ErrorKind::Timeout | ErrorKind::Disconnected { .. } => Refusal::Timeout,
        ErrorKind::Closed => Refusal::Stopped,
        ErrorKind::InvalidArgument(_) => return Status::invalid_argument(error.to_string()),
        ErrorKind::Unsupported => return unsupported(&error.to_string()),
        ErrorKind::Locked => return Status::unavailable(error.to_string()),
        _ if error.outcome() == Outcome::Unknown => return Status::unavailable(error.to_string()),
        _ => return Status::internal(error.to_string()),
    };
    refusal.status()
}
