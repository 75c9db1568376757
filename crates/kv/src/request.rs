//! Defines the requests to a store and the store's answers.

use std::time::SystemTime;

use crate::key::{Key, LeaseId, Range, Revision, Value};

/// The part of each key that an answer contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Content {
    /// Keys, values and metadata.
    #[default]
    Full,
    /// Keys and metadata, with empty values.
    KeysOnly,
    /// Only the number of keys.
    CountOnly,
}

/// Says whether the answer to a write, or an event, contains the previous state of the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Prev {
    /// The answer or event omits the previous state.
    #[default]
    Omit,
    /// The answer or event contains the previous state.
    Return,
}

/// Says whether a watch reports its revision while the keys in its range do not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Progress {
    /// The watch sends no progress reports.
    #[default]
    Omit,
    /// The watch sends progress reports: batches without events.
    Report,
}

/// A read: a range of keys at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RangeRequest {
    /// The keys to read.
    pub range: Range,
    /// The revision to read; a revision below 1 means the latest.
    pub at: Revision,
    /// Maximum number of keys in the answer; 0 or less means all.
    pub limit: i64,
    /// The part of each key in the answer.
    pub content: Content,
}

impl RangeRequest {
    /// Creates a read of the whole range, with values, at the latest revision.
    pub fn new(range: Range) -> Self {
        Self { range, at: Revision::UNSET, limit: 0, content: Content::Full }
    }

    /// Sets the revision to read.
    #[must_use]
    pub fn with_at(mut self, at: Revision) -> Self {
        self.at = at;
        self
    }

    /// Limits the answer to `limit` keys; 0 or less means all.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> Self {
        self.limit = limit;
        self
    }

    /// Restricts the answer to the part `content` of each key.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self
    }
}

/// The operator of a [`Compare`], with the stored property as its left operand and the given value as its right
/// operand.
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
    /// True if the operator holds for these values.
    pub fn holds<T: Ord + ?Sized>(self, stored: &T, given: &T) -> bool {
        match self {
            Self::Equal => stored == given,
            Self::NotEqual => stored != given,
            Self::Less => stored < given,
            Self::Greater => stored > given,
        }
    }
}

/// The property that a compare checks, and the value to compare it with. An absent key has version, create revision,
/// mod revision and lease 0, and fails every value compare.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Target {
    /// The number of writes to the key since it was created.
    Version(i64),
    /// The revision that created the key.
    CreateRevision(Revision),
    /// The revision that last wrote the key.
    ModRevision(Revision),
    /// The value of the key, compared as unsigned bytes.
    Value(Value),
    /// The id of the lease that the key is attached to; 0 for none.
    Lease(i64),
}

/// A condition of a [`Txn`], which must hold for every key in the range. A range without keys counts as one absent
/// key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Compare {
    /// The keys to check.
    pub range: Range,
    /// The operator of the compare.
    pub op: CompareOp,
    /// The property to check, and the value to compare it with.
    pub target: Target,
}

impl Compare {
    /// Creates a compare of `target` for every key in `range`.
    pub fn new(range: Range, op: CompareOp, target: Target) -> Self {
        Self { range, op, target }
    }

    /// True if the condition holds for one key of the range; `None` stands for an absent key.
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

    /// True if the condition holds for `found`, which must be all keys of the range.
    pub fn holds_for<'k>(&self, found: impl IntoIterator<Item = &'k Kv>) -> bool {
        let mut found = found.into_iter().peekable();
        if found.peek().is_none() { self.holds(None) } else { found.all(|kv| self.holds(Some(kv))) }
    }

    /// Creates a compare that holds if the key was last written at exactly this revision; [`Revision::UNSET`] means
    /// that the key is absent.
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

    /// Creates a compare that holds if no key of the range was written after this revision. The compare does not
    /// detect deletions.
    pub fn nothing_newer(range: Range, revision: Revision) -> Self {
        Self::new(range, CompareOp::Less, Target::ModRevision(revision.next()))
    }

    /// Creates a compare that holds if no key of the range was created after this revision. The compare does not
    /// detect deletions, or later writes to keys that already existed.
    pub fn none_created_after(range: Range, revision: Revision) -> Self {
        Self::new(range, CompareOp::Less, Target::CreateRevision(revision.next()))
    }
}

/// A read inside a [`Txn`]. The read sees the effects of the earlier operations of its branch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TxnRange {
    /// The keys to read.
    pub range: Range,
    /// Maximum number of keys in the answer; 0 or less means all.
    pub limit: i64,
    /// The part of each key in the answer.
    pub content: Content,
}

impl TxnRange {
    /// Creates a read of the whole range, with values.
    pub fn new(range: Range) -> Self {
        Self { range, limit: 0, content: Content::Full }
    }

    /// Creates a read of the whole range, without values.
    pub fn keys_of(range: Range) -> Self {
        Self::new(range).with_content(Content::KeysOnly)
    }

    /// Limits the answer to `limit` keys; 0 or less means all.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> Self {
        self.limit = limit;
        self
    }

    /// Restricts the answer to the part `content` of each key.
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
    /// Writes a key.
    Put {
        /// The key to write.
        key: Key,
        /// The new value.
        value: Value,
        /// Says whether the answer contains the previous state of the key.
        prev: Prev,
        /// The lease to attach the key to; `None` detaches the key from its lease.
        lease: Option<LeaseId>,
    },
    /// Deletes every key of a range. A range without keys is not an error.
    Delete {
        /// The keys to delete.
        range: Range,
        /// Says whether the answer contains the deleted keys.
        prev: Prev,
    },
    /// Reads a range.
    Range(TxnRange),
}

impl Op {
    /// Writes `key`. The answer does not contain the previous state.
    pub fn put(key: impl Into<Key>, value: impl Into<Value>) -> Self {
        Self::Put { key: key.into(), value: value.into(), prev: Prev::Omit, lease: None }
    }

    /// Deletes one key. The answer does not contain the previous state.
    pub fn delete(key: impl Into<Key>) -> Self {
        Self::Delete { range: Range::Key(key.into()), prev: Prev::Omit }
    }

    /// Deletes a range. The answer does not contain the deleted keys.
    pub fn delete_range(range: Range) -> Self {
        Self::Delete { range, prev: Prev::Omit }
    }

    /// Reads a range, with values.
    pub fn range(range: Range) -> Self {
        Self::Range(TxnRange::new(range))
    }

    /// Requests the previous state of the written keys in the answer. A read stays unchanged.
    #[must_use]
    pub fn with_prev(mut self) -> Self {
        match &mut self {
            Self::Put { prev, .. } | Self::Delete { prev, .. } => *prev = Prev::Return,
            Self::Range(_) => {}
        }
        self
    }

    /// Attaches the key of a put to a lease, which must exist. Other operations stay unchanged.
    #[must_use]
    pub fn with_lease(mut self, to: LeaseId) -> Self {
        if let Self::Put { lease, .. } = &mut self {
            *lease = Some(to);
        }
        self
    }

    /// True if the operation can change the store.
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
    /// The conditions on the state before the transaction. The branch `success` runs if all conditions hold, or if
    /// there are no conditions.
    pub compares: Vec<Compare>,
    /// The operations that run, in order, if all compares hold.
    pub success: Vec<Op>,
    /// The operations that run, in order, if a compare does not hold.
    pub failure: Vec<Op>,
}

impl Txn {
    /// Creates a transaction without compares and operations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a transaction that changes nothing and fails if its sender has no permission to write one of `keys`.
    /// The transaction deletes the keys under a condition that never holds, because etcd checks permissions before
    /// conditions. A deletion needs no disk space and thus triggers no alarm in etcd.
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

    /// Adds operations to the branch that runs if a compare does not hold.
    #[must_use]
    pub fn with_failure(mut self, ops: impl IntoIterator<Item = Op>) -> Self {
        self.failure.extend(ops);
        self
    }

    /// True if neither branch contains a write.
    pub fn is_read_only(&self) -> bool {
        !self.success.iter().chain(&self.failure).any(Op::is_write)
    }
}

/// A request to watch every event in a range from a revision on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct WatchRequest {
    /// The keys to watch; the range must not be empty.
    pub range: Range,
    /// The first revision whose events are delivered; at least 1. A watch cannot start at "now": read at revision R,
    /// then watch from R + 1.
    pub start: Revision,
    /// Says whether events contain the previous state of their keys.
    pub prev: Prev,
    /// Says whether the watch reports its progress.
    pub progress: Progress,
}

impl WatchRequest {
    /// Creates a request to watch `range` from `start` on, inclusive.
    pub fn new(range: Range, start: Revision) -> Self {
        Self { range, start, prev: Prev::Omit, progress: Progress::Omit }
    }

    /// Sets whether events contain the previous state of their keys.
    #[must_use]
    pub fn with_prev(mut self, prev: Prev) -> Self {
        self.prev = prev;
        self
    }

    /// Sets whether the watch reports its progress.
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
    /// The value; empty in a keys-only answer.
    pub value: Value,
    /// The revision that created the key.
    pub create_revision: Revision,
    /// The revision that last wrote the key.
    pub mod_revision: Revision,
    /// The number of writes to the key since it was created; 1 after its creation.
    pub version: i64,
    /// The lease that the last put attached the key to.
    pub lease: Option<LeaseId>,
}

impl Kv {
    /// The bytes of the key and its value together.
    pub fn size(&self) -> usize {
        self.key.as_bytes().len() + self.value.len()
    }
}

/// The answer to a read, alone or inside a transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RangeResponse {
    /// The store's revision at the time of the answer, also for a read of the past; inside a transaction, the
    /// transaction's revision.
    pub revision: Revision,
    /// The first keys of the range in ascending order, up to the limit; empty if only the count was requested.
    pub kvs: Vec<Kv>,
    /// The number of keys in the range, regardless of the limit.
    pub count: u64,
    /// True if the range contains more keys than the limit.
    pub more: bool,
}

/// The answer to one operation of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum OpResult {
    /// The answer to a put.
    Put {
        /// The previous state of the key, if it was requested and the key existed.
        prev: Option<Kv>,
    },
    /// The answer to a deletion.
    Delete {
        /// The number of keys that the operation deleted.
        count: u64,
        /// The deleted keys in ascending order, if they were requested.
        prevs: Vec<Kv>,
    },
    /// The answer to a read.
    Range(RangeResponse),
}

/// The answer to a transaction. A compare that does not hold is an answer and not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TxnResponse {
    /// The store's revision after the transaction.
    pub revision: Revision,
    /// True if all compares held.
    pub succeeded: bool,
    /// One result for each operation of the branch that ran, in order.
    pub results: Vec<OpResult>,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum EventKind {
    /// The key was written.
    Put,
    /// The key was deleted.
    Delete,
}

/// A change of one key at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Event {
    /// The kind of the change.
    pub kind: EventKind,
    /// The key after the change. A deletion fills in only the key and, as `mod_revision`, the revision of the deletion.
    pub kv: Kv,
    /// The key before the change, if the watch requested it. `None` for a creation, and possibly if that state was
    /// compacted.
    pub prev: Option<Kv>,
}

/// All events of one revision in the range of a watch, in the order in which they happened; or a progress report
/// ([`is_progress`](Self::is_progress)).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Batch {
    /// The revision of the events, or of the progress report.
    pub revision: Revision,
    /// The time of the commit, if the store recorded it. Commit times never decrease from one revision to the next.
    pub time: Option<SystemTime>,
    /// The events of the batch: at least one, except in a progress report.
    pub events: Vec<Event>,
}

impl Batch {
    /// Creates a report that a watch has delivered all events up to this revision.
    pub fn progress(revision: Revision) -> Self {
        Self { revision, time: None, events: Vec::new() }
    }

    /// True for a progress report. Only a watch with [`Progress::Report`](crate::Progress::Report) sends progress
    /// reports.
    pub fn is_progress(&self) -> bool {
        self.events.is_empty()
    }
}
