//! Defines the requests to a store and the store's answers.

use std::time::SystemTime;

use crate::key::{Key, LeaseId, Range, Revision, Value};

/// Says which parts of each key an answer contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Content {
    /// The answer contains keys, values and metadata.
    #[default]
    Full,
    /// The answer contains keys and metadata; all values are empty.
    KeysOnly,
    /// The answer contains only the number of keys.
    CountOnly,
}

/// Says whether a write's answer, or a watch event, contains the previous state of the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Prev {
    /// The answer or event lacks the key's previous state.
    #[default]
    Omit,
    /// The answer or event contains the key's previous state.
    Return,
}

/// Says whether a watch sends progress reports even while the keys in its range do not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Progress {
    /// The watch sends no progress reports.
    #[default]
    Omit,
    /// The watch sends progress reports: batches without events.
    Report,
}

/// A read request: a key range at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RangeRequest {
    /// The range of keys that the request reads.
    pub range: Range,
    /// The revision at which the request reads; a revision below 1 means the latest.
    pub at: Revision,
    /// Maximum number of keys in the answer; 0 or less means all.
    pub limit: i64,
    /// Says which parts of each key the answer contains.
    pub content: Content,
}

impl RangeRequest {
    /// Creates a request to read all keys of the range, with values, at the latest revision.
    pub fn new(range: Range) -> Self {
        Self { range, at: Revision::UNSET, limit: 0, content: Content::Full }
    }

    /// Sets the revision at which the request reads.
    #[must_use]
    pub fn with_at(mut self, at: Revision) -> Self {
        self.at = at;
        self
    }

    /// Limits the answer to `limit` keys; 0 or less means all keys.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> Self {
        self.limit = limit;
        self
    }

    /// Sets which parts of each key the answer contains.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self
    }
}

/// The operator of a [`Compare`]: the left operand is a stored property of a key, the right operand the given value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum CompareOp {
    /// The stored property equals the given value.
    Equal,
    /// The stored property differs from the given value.
    NotEqual,
    /// The stored property is less than the given value.
    Less,
    /// The stored property is greater than the given value.
    Greater,
}

impl CompareOp {
    /// Returns true if the operator holds for the stored property and the given value.
    pub fn holds<T: Ord + ?Sized>(self, stored: &T, given: &T) -> bool {
        match self {
            Self::Equal => stored == given,
            Self::NotEqual => stored != given,
            Self::Less => stored < given,
            Self::Greater => stored > given,
        }
    }
}

/// The property of a key that a compare checks, and the value to compare it with. For an absent key, version, create
/// revision, mod revision and lease are 0, and compares of the value fail.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Target {
    /// The number of writes to the key since its creation.
    Version(i64),
    /// The revision at which the key was created.
    CreateRevision(Revision),
    /// The revision at which the key was last written.
    ModRevision(Revision),
    /// The value of the key; values are compared as unsigned bytes.
    Value(Value),
    /// The id of the lease that the key is attached to; 0 for none.
    Lease(i64),
}

/// A condition of a [`Txn`] that must hold for every key in a range. In a `Compare`, a range without keys counts as one
/// absent key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Compare {
    /// The range of keys whose property the compare checks.
    pub range: Range,
    /// The operator of the compare: equal, not equal, less or greater.
    pub op: CompareOp,
    /// The property of the keys that the compare checks, and the value to compare it with.
    pub target: Target,
}

impl Compare {
    /// Creates a condition on the property `target` of every key in `range`.
    pub fn new(range: Range, op: CompareOp, target: Target) -> Self {
        Self { range, op, target }
    }

    /// Returns true if the condition holds for one key of the range; `None` means an absent key.
    pub fn holds(&self, kv: Option<&Kv>) -> bool {
        let number = |stored: fn(&Kv) -> i64, given: i64| self.op.holds(&kv.map_or(0, stored), &given);
        match &self.target {
            Target::Version(given) => number(|kv| kv.version, *given),
            Target::CreateRevision(given) => number(|kv| kv.create_revision.get(), given.get()),
            Target::ModRevision(given) => number(|kv| kv.mod_revision.get(), given.get()),
            Target::Value(given) => kv.is_some_and(|kv| self.op.holds(&kv.value, given)),
            Target::Lease(given) => number(|kv| LeaseId::number(kv.lease), *given),
        }
    }

    /// Returns true if the condition holds for all keys in `found`, which must be all keys of the range.
    pub fn holds_for<'k>(&self, found: impl IntoIterator<Item = &'k Kv>) -> bool {
        let mut found = found.into_iter().peekable();
        if found.peek().is_none() { self.holds(None) } else { found.all(|kv| self.holds(Some(kv))) }
    }

    /// Creates a compare that holds if the key was last written at this revision; [`Revision::UNSET`] means that the
    /// key must be absent.
    pub fn unchanged(key: impl Into<Key>, mod_revision: Revision) -> Self {
        Self::new(Range::Key(key.into()), CompareOp::Equal, Target::ModRevision(mod_revision))
    }

    /// Creates a compare that holds if the key is absent.
    pub fn absent(key: impl Into<Key>) -> Self {
        Self::all_absent(Range::Key(key.into()))
    }

    /// Creates a compare that holds if the range contains no key.
    pub fn all_absent(range: Range) -> Self {
        Self::new(range, CompareOp::Equal, Target::ModRevision(Revision::UNSET))
    }

    /// Creates a compare that holds if no key of the range was written after this revision. A compare made by
    /// `nothing_newer` still holds after a key of the range was deleted.
    pub fn nothing_newer(range: Range, revision: Revision) -> Self {
        Self::new(range, CompareOp::Less, Target::ModRevision(revision.next()))
    }

    /// Creates a compare that holds if no key of the range was created after this revision. A compare made by
    /// `none_created_after` still holds after deletions, and after writes to keys that existed at this revision.
    pub fn none_created_after(range: Range, revision: Revision) -> Self {
        Self::new(range, CompareOp::Less, Target::CreateRevision(revision.next()))
    }
}

/// A read operation in a [`Txn`], which sees the writes of earlier operations in its branch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TxnRange {
    /// The range of keys that the operation reads.
    pub range: Range,
    /// Maximum number of keys in the answer; 0 or less means all.
    pub limit: i64,
    /// Says which parts of each key the answer contains.
    pub content: Content,
}

impl TxnRange {
    /// Creates a read of all keys in the range, with their values.
    pub fn new(range: Range) -> Self {
        Self { range, limit: 0, content: Content::Full }
    }

    /// Creates a read of all keys in the range, without their values.
    pub fn keys_of(range: Range) -> Self {
        Self::new(range).with_content(Content::KeysOnly)
    }

    /// Limits the answer to `limit` keys; 0 or less means all keys.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> Self {
        self.limit = limit;
        self
    }

    /// Sets which parts of each key the answer contains.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self
    }
}

impl From<Range> for TxnRange {
    fn from(range: Range) -> Self {
        Self::new(range)
    }
}

/// One operation of a [`Txn`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Op {
    /// The operation writes a key.
    Put {
        /// The key that the operation writes.
        key: Key,
        /// The new value of the key.
        value: Value,
        /// Says whether the answer contains the previous state of the key.
        prev: Prev,
        /// The lease to attach the key to; `None` detaches the key from its lease.
        lease: Option<LeaseId>,
    },
    /// The operation deletes every key of a range, which may contain no keys.
    Delete {
        /// The range of keys that the operation deletes.
        range: Range,
        /// Says whether the answer contains the previous state of the deleted keys.
        prev: Prev,
    },
    /// The operation reads the keys of a range.
    Range(TxnRange),
}

impl Op {
    /// Writes `key`; the answer lacks the key's previous state.
    pub fn put(key: impl Into<Key>, value: impl Into<Value>) -> Self {
        Self::Put { key: key.into(), value: value.into(), prev: Prev::Omit, lease: None }
    }

    /// Deletes one key; the answer lacks the key's previous state.
    pub fn delete(key: impl Into<Key>) -> Self {
        Self::Delete { range: Range::Key(key.into()), prev: Prev::Omit }
    }

    /// Deletes the keys of a range; the answer lacks their previous states.
    pub fn delete_range(range: Range) -> Self {
        Self::Delete { range, prev: Prev::Omit }
    }

    /// Reads the keys of a range, with their values.
    pub fn range(range: Range) -> Self {
        Self::Range(TxnRange::new(range))
    }

    /// Makes the answer of a put or a deletion contain the previous state of its keys. On a read operation, `with_prev`
    /// has no effect.
    #[must_use]
    pub fn with_prev(mut self) -> Self {
        match &mut self {
            Self::Put { prev, .. } | Self::Delete { prev, .. } => *prev = Prev::Return,
            Self::Range(_) => {}
        }
        self
    }

    /// Attaches the key of a put to a lease; if the lease does not exist, the put fails. On an operation other than a
    /// put, `with_lease` has no effect.
    #[must_use]
    pub fn with_lease(mut self, to: LeaseId) -> Self {
        if let Self::Put { lease, .. } = &mut self {
            *lease = Some(to);
        }
        self
    }

    /// Returns true if the operation can change the store.
    pub fn is_write(&self) -> bool {
        !matches!(self, Self::Range(_))
    }
}

/// An atomic transaction: compares, the operations that run if all compares hold, and the operations that run
/// otherwise. All writes of a transaction have the same revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Txn {
    /// The conditions on the store's state before the transaction; the `success` operations run if all conditions hold,
    /// or if there are none.
    pub compares: Vec<Compare>,
    /// The operations that run, in order, if all compares hold.
    pub success: Vec<Op>,
    /// The operations that run, in order, if at least one compare does not hold.
    pub failure: Vec<Op>,
}

impl Txn {
    /// Creates a transaction that has no compares and no operations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a transaction that changes nothing, but fails if the caller has no permission to write one of `keys`. To
    /// check the permissions without changing the store, the transaction deletes the keys behind a compare that never
    /// holds: etcd checks the permissions before the compare. Deletions need no disk space, so this permission check
    /// cannot trigger etcd's space alarm.
    pub fn trial(keys: impl IntoIterator<Item = Key>) -> Self {
        let deletes: Vec<Op> = keys.into_iter().map(Op::delete).collect();
        let first =
            deletes.iter().find_map(|op| if let Op::Delete { range, .. } = op { Some(range.clone()) } else { None });
        let never = first.map(|range| Compare::new(range, CompareOp::Less, Target::Version(0)));
        Self::new().with_compares(never).with_success(deletes)
    }

    /// Adds compares.
    #[must_use]
    pub fn with_compares(mut self, compares: impl IntoIterator<Item = Compare>) -> Self {
        self.compares.extend(compares);
        self
    }

    /// Adds operations to the branch that runs if all compares hold.
    #[must_use]
    pub fn with_success(mut self, ops: impl IntoIterator<Item = Op>) -> Self {
        self.success.extend(ops);
        self
    }

    /// Adds operations to the branch that runs if at least one compare does not hold.
    #[must_use]
    pub fn with_failure(mut self, ops: impl IntoIterator<Item = Op>) -> Self {
        self.failure.extend(ops);
        self
    }

    /// Returns true if neither branch of the transaction contains a write.
    pub fn is_read_only(&self) -> bool {
        !self.success.iter().chain(&self.failure).any(Op::is_write)
    }
}

/// A request to watch all events in a key range from a given revision on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct WatchRequest {
    /// The range of keys to watch, which must not be empty.
    pub range: Range,
    /// The first revision whose events the watch delivers; at least 1. A watch cannot start at "now": to see all later
    /// changes, read the range, and start the watch at the revision of the answer plus 1.
    pub start: Revision,
    /// Says whether watch events contain the previous state of their keys.
    pub prev: Prev,
    /// Says whether the watch reports its progress.
    pub progress: Progress,
}

impl WatchRequest {
    /// Creates a request to watch the key range from revision `start` (inclusive).
    pub fn new(range: Range, start: Revision) -> Self {
        Self { range, start, prev: Prev::Omit, progress: Progress::Omit }
    }

    /// Sets whether watch events contain the previous state of their keys.
    #[must_use]
    pub fn with_prev(mut self, prev: Prev) -> Self {
        self.prev = prev;
        self
    }

    /// Sets whether the watch sends progress reports.
    #[must_use]
    pub fn with_progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }
}

/// A stored key with its value and its revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Kv {
    /// The key.
    pub key: Key,
    /// The value of the key; empty if the read requested only keys.
    pub value: Value,
    /// The revision at which the key was created.
    pub create_revision: Revision,
    /// The revision at which the key was last written.
    pub mod_revision: Revision,
    /// The number of writes to the key since its creation: 1 for a new key.
    pub version: i64,
    /// The lease to which the last put attached the key.
    pub lease: Option<LeaseId>,
}

impl Kv {
    /// The number of bytes in the key and its value together.
    pub fn size(&self) -> usize {
        self.key.as_bytes().len() + self.value.len()
    }
}

/// The answer to a read request or to a read in a transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RangeResponse {
    /// The store's current revision, even if the read was of an older revision; in a transaction, the transaction's
    /// revision.
    pub revision: Revision,
    /// The first keys of the range in ascending order, up to the limit; empty if the request asked only for the count.
    pub kvs: Vec<Kv>,
    /// The number of keys in the range, whatever the limit.
    pub count: u64,
    /// True if the limit cut the answer: the range contains further keys.
    pub more: bool,
}

/// The answer to one operation of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum OpResult {
    /// The answer to a put in a transaction.
    Put {
        /// The previous state of the key, if the put requested it and the key existed.
        prev: Option<Kv>,
    },
    /// The answer to a deletion in a transaction.
    Delete {
        /// The number of keys that were deleted.
        count: u64,
        /// The previous states of the deleted keys in ascending order, if the deletion requested them.
        prevs: Vec<Kv>,
    },
    /// The answer to a read in a transaction.
    Range(RangeResponse),
}

/// The answer to a transaction; if a compare does not hold, `succeeded` is false, and no error is returned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TxnResponse {
    /// The store's revision after the transaction.
    pub revision: Revision,
    /// True if all compares of the transaction held, so the success branch ran.
    pub succeeded: bool,
    /// One result for each operation of the branch (success or failure) that ran, in order.
    pub results: Vec<OpResult>,
}

/// The kind of a change to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum EventKind {
    /// The event reports that the key was written.
    Put,
    /// The event reports that the key was deleted.
    Delete,
}

/// A watch event: the change of one key at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Event {
    /// The kind of change that the event reports.
    pub kind: EventKind,
    /// The state of the key after the change that the event reports. In the event of a deletion, only the key itself
    /// and `mod_revision`, the revision of the deletion, are set.
    pub kv: Kv,
    /// The state of the key before the change that the event reports, if the watch requested previous states. The
    /// event's previous state is `None` if the key was created, and may be `None` if the previous state was compacted.
    pub prev: Option<Kv>,
}

/// All events of one revision in the range of a watch, in order, or a progress report
/// ([`is_progress`](Self::is_progress)).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Batch {
    /// The revision at which the events happened, or up to which progress is reported.
    pub revision: Revision,
    /// The time at which the revision was committed, if the store recorded it. Commit times of batches never decrease
    /// from one revision to the next.
    pub time: Option<SystemTime>,
    /// The events of the batch's revision: at least one event, except in a progress report.
    pub events: Vec<Event>,
}

impl Batch {
    /// Creates a progress report: the watch has delivered all events up to this revision.
    pub fn progress(revision: Revision) -> Self {
        Self { revision, time: None, events: Vec::new() }
    }

    /// Returns true if this batch is a progress report. Only a watch with [`Progress::Report`](crate::Progress::Report)
    /// sends progress reports.
    pub fn is_progress(&self) -> bool {
        self.events.is_empty()
    }
}
