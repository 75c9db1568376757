//! What was known when a transaction was committed, for the next one to begin with.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Transaction;
use crate::key::{Key, Range, Revision};
use crate::response::Kv;

/// More keys than this are not remembered.
const MOST_KEYS: usize = 256;

/// What the last transaction knew when it was committed.
///
/// The first attempt of the next one answers its reads from here, without asking the store. Everything that it reads by key
/// or by range guards its commit then, also what is read without a guard otherwise: so what it commits is as good as if it
/// had been read just now. If it needs something that is not remembered, is an error, writes nothing, or is overtaken, it
/// counts for nothing, and an attempt that asks the store follows.
///
/// For one caller that does the same kind of thing again and again: who shares a memory with others that write other keys
/// remembers little of use.
#[derive(Debug)]
pub struct Memory {
    longest: Duration,
    kept: Mutex<Option<Kept>>,
}

/// A remembered state.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// When the store was last asked.
    since: Instant,
    /// The revision at which the ranges were as they are here, but for keys that have gone.
    pub(super) at: Revision,
    /// Keys, present or absent, each with the revision at which it was so.
    pub(super) seen: BTreeMap<Key, (Option<Kv>, Revision)>,
    /// Ranges of which `seen` has every key.
    pub(super) listed: Vec<Range>,
    /// The keys of ranges of which no values were read.
    pub(super) keys: BTreeMap<Range, Vec<Key>>,
}

impl Memory {
    /// Nothing yet; what will be remembered is used for so long. That bounds for how long it goes unnoticed that a key has
    /// gone from a range that was read with [`list_none_newer`](Transaction::list_none_newer).
    pub fn new(longest: Duration) -> Self {
        Self { longest, kept: Mutex::default() }
    }

    /// Forgets all, for who knows that it has changed.
    pub fn forget(&self) {
        self.take();
    }

    /// Takes what is remembered, unless it is too old. Nothing is remembered then, until the next commit.
    pub(super) fn take(&self) -> Option<Kept> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        kept.filter(|kept| kept.since.elapsed() < self.longest)
    }

    /// Remembers what a transaction knows that was committed at a revision.
    pub(super) fn keep(&self, transaction: Transaction, committed: Revision) {
        let kept = Some(Kept::of(transaction, committed)).filter(|kept| kept.seen.len() <= MOST_KEYS);
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }
}

impl Kept {
    fn of(transaction: Transaction, committed: Revision) -> Self {
        let Transaction { at, seen, listed, mut keys, presumed, guards, guarded_ranges, writes, recalled, .. } =
            transaction;
        let looked_at = |key: &Key| match guards.contains_key(key) {
            true => committed,
            false => presumed.get(key).copied().unwrap_or(at),
        };
        let mut seen: BTreeMap<Key, (Option<Kv>, Revision)> =
            seen.into_iter().map(|(key, kv)| (key.clone(), (kv, looked_at(&key)))).collect();
        for (key, value) in writes {
            for (range, names) in &mut keys {
                names.retain(|name| *name != key);
                if value.is_some() && range.contains(key.as_bytes()) {
                    names.push(key.clone());
                    names.sort();
                }
            }
            let before = seen.get(&key).and_then(|(kv, _)| kv.as_ref());
            let (created, version) = before.map_or((committed, 1), |kv| (kv.create_revision, kv.version + 1));
            let kv = value.map(|value| Kv {
                key: key.clone(),
                value,
                create_revision: created,
                mod_revision: committed,
                version,
            });
            seen.insert(key, (kv, committed));
        }
        let listed = listed.into_iter().filter(|range| guarded_ranges.contains(range)).collect();
        let since = recalled.unwrap_or_else(Instant::now);
        Self { since, at: committed, seen, listed, keys }
    }

    /// When the store was last asked.
    pub(super) fn since(&self) -> Instant {
        self.since
    }
}
