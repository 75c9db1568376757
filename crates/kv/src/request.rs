//! Requests to a store and its answers.

use std::time::SystemTime;

use crate::key::{Key, LeaseId, Range, Revision, Value};

/// How much of what was found comes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Content {
    /// Keys, values and metadata.
    #[default]
    Full,
    /// Keys and metadata; values are empty.
    KeysOnly,
    /// Only the number of keys.
    CountOnly,
}

/// Whether a write or an event brings along what was there before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Prev {
    /// It does not.
    #[default]
    Omit,
    /// It does.
    Return,
}

/// Whether a watch reports how far it has come while nothing happens in its range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Progress {
    /// It does not.
    #[default]
    Omit,
    /// It does, by batches without events.
    Report,
}

/// A read: a range of keys at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RangeRequest {
    /// Which keys.
    pub range: Range,
    /// The state of which revision; below 1 means the latest.
    pub at: Revision,
    /// How many keys come back at the most; 0 or less means all.
    pub limit: i64,
    /// How much of each key comes back.
    pub content: Content,
}

impl RangeRequest {
    /// All of the range, in full, at the latest revision.
    pub fn new(range: Range) -> Self {
        Self { range, at: Revision::UNSET, limit: 0, content: Content::Full }
    }

    /// As it was at this revision.
    #[must_use]
    pub fn with_at(mut self, at: Revision) -> Self {
        self.at = at;
        self
    }

    /// No more than this many keys; 0 or less means all.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> Self {
        self.limit = limit;
        self
    }

    /// How much of each key comes back.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self
    }
}

/// How a [`Target`] is compared: the stored thing on the left, the given one on the right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum CompareOp {
    /// Stored = given.
    Equal,
    /// Stored != given.
    NotEqual,
    /// Stored < given.
    Less,
    /// Stored > given.
    Greater,
}

impl CompareOp {
    /// Applies the operator.
    pub fn holds<T: Ord + ?Sized>(self, stored: &T, given: &T) -> bool {
        match self {
            Self::Equal => stored == given,
            Self::NotEqual => stored != given,
            Self::Less => stored < given,
            Self::Greater => stored > given,
        }
    }
}

/// The property that a compare looks at. An absent key has version, create and mod revision and lease 0, and fails every value compare.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Target {
    /// How often the key was written since it was created.
    Version(i64),
    /// The revision that created the key.
    CreateRevision(Revision),
    /// The revision that last wrote the key.
    ModRevision(Revision),
    /// The value, compared as unsigned bytes.
    Value(Value),
    /// The number of the lease that the key is attached to; 0 for none.
    Lease(i64),
}

/// A condition of a [`Txn`]: it holds if it holds for every key in the range; an empty range counts as one absent key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Compare {
    /// Which keys.
    pub range: Range,
    /// The operator.
    pub op: CompareOp,
    /// The compared property, with the given value.
    pub target: Target,
}

impl Compare {
    /// `target` of every key in `range` against the given value.
    pub fn new(range: Range, op: CompareOp, target: Target) -> Self {
        Self { range, op, target }
    }

    /// True if the condition holds for one key of the range; `None` is a key that is absent.
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

    /// True if the condition holds for these keys, which are all that the range has.
    pub fn holds_for<'k>(&self, found: impl IntoIterator<Item = &'k Kv>) -> bool {
        let mut found = found.into_iter().peekable();
        if found.peek().is_none() { self.holds(None) } else { found.all(|kv| self.holds(Some(kv))) }
    }

    /// The key was last written at exactly this revision; [`Revision::UNSET`] means that it is absent.
    pub fn unchanged(key: impl Into<Key>, mod_revision: Revision) -> Self {
        Self::new(Range::Key(key.into()), CompareOp::Equal, Target::ModRevision(mod_revision))
    }

    /// The key is absent.
    pub fn absent(key: impl Into<Key>) -> Self {
        Self::all_absent(Range::Key(key.into()))
    }

    /// There is no key in the range.
    pub fn all_absent(range: Range) -> Self {
        Self::new(range, CompareOp::Equal, Target::ModRevision(Revision::UNSET))
    }

    /// Nothing in the range was written after this revision. Deletions leave no trace that this would see.
    pub fn nothing_newer(range: Range, revision: Revision) -> Self {
        Self::new(range, CompareOp::Less, Target::ModRevision(revision.next()))
    }

    /// No key of the range was created after this revision. Writes to older keys and deletions do not matter.
    pub fn none_created_after(range: Range, revision: Revision) -> Self {
        Self::new(range, CompareOp::Less, Target::CreateRevision(revision.next()))
    }
}

/// A read inside a [`Txn`]. It has no revision: it sees the state that the operations before it have made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TxnRange {
    /// Which keys.
    pub range: Range,
    /// How many keys come back at the most; 0 or less means all.
    pub limit: i64,
    /// How much of each key comes back.
    pub content: Content,
}

impl TxnRange {
    /// All of the range, in full.
    pub fn new(range: Range) -> Self {
        Self { range, limit: 0, content: Content::Full }
    }

    /// All of the range, without values.
    pub fn keys_of(range: Range) -> Self {
        Self::new(range).with_content(Content::KeysOnly)
    }

    /// No more than this many keys; 0 or less means all.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> Self {
        self.limit = limit;
        self
    }

    /// How much of each key comes back.
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
    /// Write a key.
    Put {
        /// Which key.
        key: Key,
        /// Its new value.
        value: Value,
        /// Whether the old value comes back.
        prev: Prev,
        /// The lease that the key is attached to from now on; without one the key leaves the lease that it had.
        lease: Option<LeaseId>,
    },
    /// Delete every key of a range; deleting nothing succeeds.
    Delete {
        /// Which keys.
        range: Range,
        /// Whether what was deleted comes back.
        prev: Prev,
    },
    /// Read.
    Range(TxnRange),
}

impl Op {
    /// Write `key`, without asking for what was there.
    pub fn put(key: impl Into<Key>, value: impl Into<Value>) -> Self {
        Self::Put { key: key.into(), value: value.into(), prev: Prev::Omit, lease: None }
    }

    /// Delete one key, without asking for what was there.
    pub fn delete(key: impl Into<Key>) -> Self {
        Self::Delete { range: Range::Key(key.into()), prev: Prev::Omit }
    }

    /// Delete a range, without asking for what was there.
    pub fn delete_range(range: Range) -> Self {
        Self::Delete { range, prev: Prev::Omit }
    }

    /// Read a range in full.
    pub fn range(range: Range) -> Self {
        Self::Range(TxnRange::new(range))
    }

    /// The same operation, bringing along what was there before. Reads stay as they are.
    #[must_use]
    pub fn with_prev(mut self) -> Self {
        match &mut self {
            Self::Put { prev, .. } | Self::Delete { prev, .. } => *prev = Prev::Return,
            Self::Range(_) => {}
        }
        self
    }

    /// The same put, attached to a lease, which must exist. Other operations stay as they are.
    #[must_use]
    pub fn with_lease(mut self, to: LeaseId) -> Self {
        if let Self::Put { lease, .. } = &mut self {
            *lease = Some(to);
        }
        self
    }

    /// True for operations that can change the store.
    pub fn is_write(&self) -> bool {
        !matches!(self, Self::Range(_))
    }
}

/// Compares, what to do if all of them hold, and what to do otherwise; atomic, at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Txn {
    /// All must hold, on the state before the transaction, for `success` to run; none means that it runs.
    pub compares: Vec<Compare>,
    /// Runs in order if the compares hold.
    pub success: Vec<Op>,
    /// Runs in order if one of them does not.
    pub failure: Vec<Op>,
}

impl Txn {
    /// A transaction that does nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A transaction that changes nothing, and fails if its sender may not write one of `keys`: it deletes them under a
    /// condition that never holds. etcd judges rights before conditions. A deletion needs no room, so this raises no alarm.
    pub fn trial(keys: impl IntoIterator<Item = Key>) -> Self {
        let deletes: Vec<Op> = keys.into_iter().map(Op::delete).collect();
        let first =
            deletes.iter().find_map(|op| if let Op::Delete { range, .. } = op { Some(range.clone()) } else { None });
        let never = first.map(|range| Compare::new(range, CompareOp::Less, Target::Version(0)));
        Self::new().with_compares(never).with_success(deletes)
    }

    /// With these compares added.
    #[must_use]
    pub fn with_compares(mut self, compares: impl IntoIterator<Item = Compare>) -> Self {
        self.compares.extend(compares);
        self
    }

    /// With these operations added to the branch that runs if the compares hold.
    #[must_use]
    pub fn with_success(mut self, ops: impl IntoIterator<Item = Op>) -> Self {
        self.success.extend(ops);
        self
    }

    /// With these operations added to the branch that runs if a compare does not hold.
    #[must_use]
    pub fn with_failure(mut self, ops: impl IntoIterator<Item = Op>) -> Self {
        self.failure.extend(ops);
        self
    }

    /// True if neither branch can change the store.
    pub fn is_read_only(&self) -> bool {
        !self.success.iter().chain(&self.failure).any(Op::is_write)
    }
}

/// A watch: every event in a range from a revision on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct WatchRequest {
    /// Which keys; it must not be empty.
    pub range: Range,
    /// The first revision of which events come; at least 1. There is no "now": read at R, then watch from R + 1.
    pub start: Revision,
    /// Whether events bring along what was there before.
    pub prev: Prev,
    /// Whether the watch reports its progress.
    pub progress: Progress,
}

impl WatchRequest {
    /// Events of `range` from `start` on, inclusive.
    pub fn new(range: Range, start: Revision) -> Self {
        Self { range, start, prev: Prev::Omit, progress: Progress::Omit }
    }

    /// Whether events bring along what was there before.
    #[must_use]
    pub fn with_prev(mut self, prev: Prev) -> Self {
        self.prev = prev;
        self
    }

    /// Whether the watch reports its progress.
    #[must_use]
    pub fn with_progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }
}

/// A stored key: its value and where it stands in the order of writes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Kv {
    /// The key.
    pub key: Key,
    /// Its value; empty in a keys-only answer.
    pub value: Value,
    /// The revision that created the key.
    pub create_revision: Revision,
    /// The revision that last wrote it.
    pub mod_revision: Revision,
    /// How often it was written since it was created; 1 at creation.
    pub version: i64,
    /// The lease that the last put attached it to.
    pub lease: Option<LeaseId>,
}

impl Kv {
    /// How many bytes the key and its value have.
    pub fn size(&self) -> usize {
        self.key.as_bytes().len() + self.value.len()
    }
}

/// The answer to a range, alone or inside a transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RangeResponse {
    /// The store's revision when the answer was made, also for a read of the past. For a range inside a transaction
    /// it is the transaction's revision.
    pub revision: Revision,
    /// The keys that were found, ascending; cut at the limit, and empty when only the count was asked for.
    pub kvs: Vec<Kv>,
    /// How many keys match, whatever the limit.
    pub count: u64,
    /// True if the limit cut something off.
    pub more: bool,
}

/// The answer to one operation of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum OpResult {
    /// Of a put.
    Put {
        /// The old value, if it was requested and there was one.
        prev: Option<Kv>,
    },
    /// Of a delete.
    Delete {
        /// How many keys were deleted.
        count: u64,
        /// The deleted keys, ascending, if they were requested.
        prevs: Vec<Kv>,
    },
    /// Of a read.
    Range(RangeResponse),
}

/// The answer to a transaction. A compare that fails is an answer, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TxnResponse {
    /// The store's revision after the transaction.
    pub revision: Revision,
    /// True if the compares held.
    pub succeeded: bool,
    /// One result for each operation of the branch that ran, in order.
    pub results: Vec<OpResult>,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum EventKind {
    /// It was written.
    Put,
    /// It was deleted.
    Delete,
}

/// One change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Event {
    /// The kind of the change.
    pub kind: EventKind,
    /// The key after it; for a deletion only the key and, as `mod_revision`, the revision of the deletion.
    pub kv: Kv,
    /// The key before it, if it was asked for. Absent for a creation, and possibly at or below the compaction mark.
    pub prev: Option<Kv>,
}

/// All events of one revision that a watch is about, in the order in which they happened; or the progress of a watch that has no
/// event for a while ([`is_progress`](Self::is_progress)).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Batch {
    /// The revision.
    pub revision: Revision,
    /// When it was committed, as far as the store knows. It never goes back from one revision to the next.
    pub time: Option<SystemTime>,
    /// The events; at least one, save in a report of progress.
    pub events: Vec<Event>,
}

impl Batch {
    /// A report that a watch has delivered all events of its range up to this revision.
    pub fn progress(revision: Revision) -> Self {
        Self { revision, time: None, events: Vec::new() }
    }

    /// True for a report of progress, which only a watch with [`Progress::Report`](crate::Progress::Report) gives.
    pub fn is_progress(&self) -> bool {
        self.events.is_empty()
    }
}
