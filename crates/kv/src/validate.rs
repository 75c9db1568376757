//! Checks requests by the rules that all stores have in common. The limits on requests to a store are in
//! `SEMANTICS.md`, section X.

use std::collections::BTreeSet;

use crate::error::{Error, ErrorKind, InvalidArgument, Operation, Result};
use crate::key::{Key, Range, Revision};
use crate::request::{Compare, Op, RangeRequest, Target, Txn, WatchRequest};

/// Maximum length of a key in bytes.
pub const MAX_KEY_BYTES: usize = 4096;
/// Maximum length of a value in bytes.
pub const MAX_VALUE_BYTES: usize = 1_500_000;
/// Maximum size of a transaction: the bytes of all its keys and values, plus 32 bytes for each compare and operation.
/// The size limit of a transaction is above the size of the largest value, and below the 1,572,864 bytes that etcd
/// accepts.
pub const MAX_REQUEST_BYTES: usize = 1_550_000;
/// Maximum number of compares in a transaction, and of operations in each of its branches.
pub const MAX_TXN_OPS: usize = 128;
/// The number of bytes that a compare or an operation adds to a request on the wire, rounded up.
const OP_OVERHEAD_BYTES: usize = 32;

fn refuse<T>(kind: ErrorKind, operation: Operation, store: &'static str) -> Result<T> {
    Err(Error::new(kind, operation, store))
}

impl RangeRequest {
    /// Checks the read request by the rules that all stores share. Every implementation of
    /// [`Store::range`](crate::Store::range) calls `check` first.
    ///
    /// # Errors
    /// An error of the kind `InvalidArgument`, with `store` as the store's name.
    pub fn check(&self, store: &'static str) -> Result<()> {
        check_range(&self.range).or_else(|kind| refuse(kind, Operation::Range, store))
    }
}

impl WatchRequest {
    /// Checks the watch request by the rules that all stores share. Every implementation of
    /// [`Store::watch`](crate::Store::watch) calls `check` first.
    ///
    /// # Errors
    /// An error of the kind `InvalidArgument`, with `store` as the store's name.
    pub fn check(&self, store: &'static str) -> Result<()> {
        let checked = if self.range.is_empty() {
            Err(InvalidArgument::EmptyWatchRange.into())
        } else if !self.start.is_set() {
            Err(InvalidArgument::RevisionNotSet.into())
        } else {
            check_range(&self.range)
        };
        checked.or_else(|kind| refuse(kind, Operation::Watch, store))
    }
}

impl Revision {
    /// Checks that the revision for a compaction is 1 or more. Every implementation of
    /// [`Store::compact`](crate::Store::compact) calls `check` first.
    ///
    /// # Errors
    /// An error of the kind `InvalidArgument` if the revision is below 1, with `store` as the store's name.
    pub fn check(self, store: &'static str) -> Result<()> {
        if self.is_set() {
            return Ok(());
        }
        refuse(InvalidArgument::RevisionNotSet.into(), Operation::Compact, store)
    }
}

impl Txn {
    /// Checks the transaction by the rules that all stores share. Every implementation of
    /// [`Store::txn`](crate::Store::txn) calls `check` first.
    ///
    /// # Errors
    /// An error of the kind `InvalidArgument` or `TooLarge`, with `store` as the store's name. If `check` fails,
    /// nothing has been sent, so the transaction wrote nothing.
    pub fn check(&self, store: &'static str) -> Result<()> {
        self.find_fault().or_else(|kind| refuse(kind, Operation::Txn, store))
    }

    /// Rejects a transaction that puts a key with a lease; stores that do not support leases call it after
    /// [`check`](Self::check).
    ///
    /// # Errors
    /// An error of the kind `LeaseNotFound` if a put names a lease, with `store` as the store's name.
    pub fn refuse_leases(&self, store: &'static str) -> Result<()> {
        let names_one = |op: &Op| matches!(op, Op::Put { lease: Some(_), .. });
        if self.success.iter().chain(&self.failure).any(names_one) {
            return refuse(ErrorKind::LeaseNotFound, Operation::Txn, store);
        }
        Ok(())
    }

    /// The size of the transaction in bytes, which must not exceed [`MAX_REQUEST_BYTES`].
    pub fn size(&self) -> usize {
        let compares: usize = self.compares.iter().map(compare_bytes).sum();
        let ops: usize = self.success.iter().chain(&self.failure).map(op_bytes).sum();
        compares + ops
    }

    fn find_fault(&self) -> Result<(), ErrorKind> {
        for count in [self.compares.len(), self.success.len(), self.failure.len()] {
            if count > MAX_TXN_OPS {
                return Err(InvalidArgument::TooManyOps { count }.into());
            }
        }
        for compare in &self.compares {
            check_range(&compare.range)?;
        }
        for branch in [&self.success, &self.failure] {
            check_branch(branch)?;
        }
        match self.size() {
            bytes if bytes > MAX_REQUEST_BYTES => Err(ErrorKind::TooLarge { bytes }),
            _ => Ok(()),
        }
    }
}

/// Checks the keys and values of one branch of a transaction, and that the branch writes no key twice.
fn check_branch(ops: &[Op]) -> Result<(), ErrorKind> {
    let mut puts = BTreeSet::new();
    for op in ops {
        match op {
            Op::Put { key, value, .. } => {
                check_key(key)?;
                if value.len() > MAX_VALUE_BYTES {
                    return Err(ErrorKind::TooLarge { bytes: value.len() });
                }
                if !puts.insert(key) {
                    return Err(InvalidArgument::DuplicateKey(key.clone()).into());
                }
            }
            Op::Delete { range, .. } => check_range(range)?,
            Op::Range(read) => check_range(&read.range)?,
        }
    }
    for op in ops {
        if let Op::Delete { range, .. } = op
            && let Some(key) = puts.iter().find(|key| range.contains(key.as_bytes()))
        {
            return Err(InvalidArgument::DuplicateKey((*key).clone()).into());
        }
    }
    Ok(())
}

fn check_key(key: &Key) -> Result<(), ErrorKind> {
    if key.is_empty() {
        return Err(InvalidArgument::EmptyKey.into());
    }
    check_length(key)
}

fn check_length(key: &Key) -> Result<(), ErrorKind> {
    at_most(MAX_KEY_BYTES, key)
}

/// Checks a range bound. A range bound may be one byte longer than a key, because a page may start at the
/// [successor](Key::successor) of the longest key.
fn check_bound(key: &Key) -> Result<(), ErrorKind> {
    at_most(MAX_KEY_BYTES + 1, key)
}

fn at_most(most: usize, key: &Key) -> Result<(), ErrorKind> {
    match key.as_bytes().len() {
        bytes if bytes > most => Err(InvalidArgument::KeyTooLong { bytes }.into()),
        _ => Ok(()),
    }
}

/// Checks the keys with which a range begins and ends. The key of a [`Range::Key`] must not be empty, but a prefix or a
/// lower bound may be empty.
fn check_range(range: &Range) -> Result<(), ErrorKind> {
    match range {
        Range::Key(key) => check_key(key),
        Range::Prefix(prefix) => check_length(prefix),
        Range::From(from) => check_bound(from),
        Range::FromTo(from, to) => check_bound(from).and_then(|()| check_bound(to)),
        Range::All => Ok(()),
    }
}

fn range_bytes(range: &Range) -> usize {
    match range {
        Range::Key(key) => key.as_bytes().len(),
        Range::Prefix(key) | Range::From(key) => 2 * key.as_bytes().len(),
        Range::FromTo(from, to) => from.as_bytes().len() + to.as_bytes().len(),
        Range::All => 2,
    }
}

fn compare_bytes(compare: &Compare) -> usize {
    let given = match &compare.target {
        Target::Value(value) => value.len(),
        _ => 0,
    };
    OP_OVERHEAD_BYTES + range_bytes(&compare.range) + given
}

fn op_bytes(op: &Op) -> usize {
    OP_OVERHEAD_BYTES
        + match op {
            Op::Put { key, value, .. } => key.as_bytes().len() + value.len(),
            Op::Delete { range, .. } => range_bytes(range),
            Op::Range(read) => range_bytes(&read.range),
        }
}

impl From<InvalidArgument> for ErrorKind {
    fn from(what: InvalidArgument) -> Self {
        Self::InvalidArgument(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::CompareOp;

    fn kind(txn: &Txn) -> Option<ErrorKind> {
        txn.check("test").err().map(|error| error.kind().clone())
    }

    fn duplicate(key: &str) -> Option<ErrorKind> {
        Some(InvalidArgument::DuplicateKey(key.into()).into())
    }

    #[test]
    fn branch_writes_key_once() {
        let put = || Op::put("k", "v");
        assert_eq!(kind(&Txn::new().with_success([put(), put()])), duplicate("k"));
        assert_eq!(kind(&Txn::new().with_success([put(), Op::delete("k")])), duplicate("k"));
        assert_eq!(kind(&Txn::new().with_failure([Op::delete_range(Range::All), put()])), duplicate("k"));
        assert_eq!(kind(&Txn::new().with_success([put()]).with_failure([put()])), None);
        assert_eq!(kind(&Txn::new().with_success([Op::delete("k"), Op::delete_range(Range::prefix("k"))])), None);
        let apart = [Op::delete_range(Range::FromTo("c".into(), "d".into())), Op::put("d", "v")];
        assert_eq!(kind(&Txn::new().with_success(apart)), None);
    }

    #[test]
    fn counts_and_sizes_are_limited() {
        let puts = |count: usize| (0..count).map(|i| Op::put(format!("k{i}"), "v"));
        assert_eq!(kind(&Txn::new().with_success(puts(128)).with_failure(puts(128))), None);
        assert_eq!(kind(&Txn::new().with_success(puts(129))), Some(InvalidArgument::TooManyOps { count: 129 }.into()));
        let large = vec![0; MAX_VALUE_BYTES + 1];
        assert_eq!(
            kind(&Txn::new().with_success([Op::put("k", large.clone())])),
            Some(ErrorKind::TooLarge { bytes: large.len() })
        );
        let quarter = || vec![0; 400_000];
        let four = ["a", "b", "c", "d"].map(|key| Op::put(key, quarter()));
        assert!(matches!(kind(&Txn::new().with_success(four)), Some(ErrorKind::TooLarge { .. })));
        // `of(MAX_REQUEST_BYTES)` has exactly the maximum size; in the second transaction, each value is one byte
        // longer.
        let of = |bytes: usize| {
            let two = ["a", "b"].map(|key| Op::put(key, vec![0; (bytes - 2 * OP_OVERHEAD_BYTES - 2) / 2]));
            Txn::new().with_success(two)
        };
        assert_eq!((of(MAX_REQUEST_BYTES).size(), kind(&of(MAX_REQUEST_BYTES))), (MAX_REQUEST_BYTES, None));
        let bytes = MAX_REQUEST_BYTES + 2;
        assert_eq!(kind(&of(bytes)), Some(ErrorKind::TooLarge { bytes }));
    }

    #[test]
    fn limits_count_bytes_of_each_part() {
        let size = |range: Range| Txn::new().with_success([Op::range(range)]).size() - OP_OVERHEAD_BYTES;
        assert_eq!(size(Range::key("key")), 3);
        assert_eq!((size(Range::prefix("key")), size(Range::From("key".into()))), (6, 6));
        assert_eq!((size(Range::FromTo("key".into(), "last".into())), size(Range::All)), (7, 2));
        let compare = |target| {
            Txn::new().with_compares([Compare::new(Range::key("key"), CompareOp::Equal, target)]).size()
                - OP_OVERHEAD_BYTES
        };
        assert_eq!((compare(Target::Version(1)), compare(Target::Value("value".into()))), (3, 8));
    }

    #[test]
    fn keys_are_neither_empty_nor_long() {
        let empty = Some(ErrorKind::from(InvalidArgument::EmptyKey));
        assert_eq!(kind(&Txn::new().with_success([Op::put("", "v")])), empty);
        assert_eq!(kind(&Txn::new().with_success([Op::delete("")])), empty);
        assert_eq!(kind(&Txn::new().with_failure([Op::range(Range::key(""))])), empty);
        let compare = Compare::new(Range::key(""), CompareOp::Equal, Target::Version(0));
        assert_eq!(kind(&Txn::new().with_compares([compare])), empty);
        assert!(RangeRequest::new(Range::prefix("")).check("test").is_ok());
        let key = |bytes: usize| vec![b'k'; bytes];
        assert_eq!(kind(&Txn::new().with_success([Op::put(key(4096), "v")])), None);
        assert_eq!(
            kind(&Txn::new().with_success([Op::put(key(4097), "v")])),
            Some(InvalidArgument::KeyTooLong { bytes: 4097 }.into())
        );
        let read = |range: Range| RangeRequest::new(range).check("test").is_ok();
        assert!(read(Range::From(key(4097).into())) && !read(Range::From(key(4098).into())));
        let span = |from: usize, to: usize| Range::FromTo(key(from).into(), key(to).into());
        assert!(read(span(4097, 4097)) && !read(span(4098, 1)) && !read(span(1, 4098)));
        assert!(!read(Range::prefix(key(4097))) && !read(Range::key(key(4097))));
    }

    #[test]
    fn watches_need_range_and_start() {
        let start = Revision::new(1);
        assert!(WatchRequest::new(Range::All, start).check("test").is_ok());
        let none = WatchRequest::new(Range::FromTo("b".into(), "a".into()), start);
        assert!(none.check("test").is_err());
        assert!(WatchRequest::new(Range::All, Revision::UNSET).check("test").is_err());
        assert!(Revision::UNSET.check("test").is_err());
    }
}
