//! The answers of a store.

use std::time::SystemTime;

use crate::key::{Key, Revision, Value};
use crate::lease::LeaseId;

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
