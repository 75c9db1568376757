//! A simple implementation of reads and transactions on the entries of a store at one revision.

use std::collections::BTreeMap;
use std::ops::Bound;

use kv::{
    Content, Event, EventKind, Key, Kv, Op, OpResult, Prev, Range, RangeResponse, Revision, Txn, TxnRange, Value,
};

/// The entries of a store as of one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State(BTreeMap<Key, Kv>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TxnEffect {
    pub(crate) succeeded: bool,
    /// The result of each operation in the branch (success or failure) of the transaction that ran. The caller of `run`
    /// sets the revision in the results of reads.
    pub(crate) results: Vec<OpResult>,
    /// The changes that the transaction made, in order, each with the key's previous state.
    pub(crate) events: Vec<Event>,
}

impl FromIterator<Kv> for State {
    fn from_iter<I: IntoIterator<Item = Kv>>(kvs: I) -> Self {
        Self(kvs.into_iter().map(|kv| (kv.key.clone(), kv)).collect())
    }
}

impl State {
    pub(crate) fn get(&self, key: &Key) -> Option<&Kv> {
        self.0.get(key)
    }

    /// The entries in a key range, in ascending order of keys.
    pub(crate) fn within(&self, range: &Range) -> impl Iterator<Item = &Kv> {
        let (from, to) = range.bounds();
        let found = (!range.is_empty()).then(|| {
            let to = to.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            self.0.range::<Key, _>((Bound::Included(&from), to))
        });
        found.into_iter().flatten().map(|(_, kv)| kv)
    }

    /// Creates the answer to a read of this state; the answer's `revision` is a placeholder that the caller must
    /// replace.
    pub(crate) fn read(&self, range: &Range, limit: i64, content: Content) -> RangeResponse {
        cut(self.within(range).cloned().collect(), limit, content)
    }

    /// Runs a transaction that is known to be valid. The keys that the transaction writes get the mod revision `next`,
    /// the revision of the transaction.
    pub(crate) fn run(&mut self, txn: &Txn, next: Revision) -> TxnEffect {
        let succeeded = txn.compares.iter().all(|compare| compare.holds_for(self.within(&compare.range)));
        let branch = if succeeded { &txn.success } else { &txn.failure };
        let mut events = Vec::new();
        let results = branch.iter().map(|op| self.apply(op, next, &mut events)).collect();
        TxnEffect { succeeded, results, events }
    }

    /// Applies the change of one key to the entries.
    pub(crate) fn happen(&mut self, event: &Event) {
        match event.kind {
            EventKind::Put => self.0.insert(event.kv.key.clone(), event.kv.clone()),
            EventKind::Delete => self.0.remove(&event.kv.key),
        };
    }

    /// Reverts the changes of the last [`run`](Self::run).
    pub(crate) fn undo(&mut self, events: &[Event]) {
        for event in events.iter().rev() {
            match &event.prev {
                Some(old) => self.0.insert(old.key.clone(), old.clone()),
                None => self.0.remove(&event.kv.key),
            };
        }
    }

    fn apply(&mut self, op: &Op, next: Revision, events: &mut Vec<Event>) -> OpResult {
        match op {
            Op::Put { key, value, prev, .. } => {
                let event = self.put(key, value, next);
                let old = event.prev.clone().filter(|_| *prev == Prev::Return);
                self.happen(&event);
                events.push(event);
                OpResult::Put { prev: old }
            }
            Op::Delete { range, prev } => {
                let gone: Vec<Kv> = self.within(range).cloned().collect();
                for old in &gone {
                    let event = deletion(old, next);
                    self.happen(&event);
                    events.push(event);
                }
                let count = gone.len() as u64;
                OpResult::Delete { count, prevs: if *prev == Prev::Return { gone } else { Vec::new() } }
            }
            Op::Range(TxnRange { range, limit, content, .. }) => OpResult::Range(self.read(range, *limit, *content)),
        }
    }

    /// The watch event of a put at the revision `next`.
    fn put(&self, key: &Key, value: &Value, next: Revision) -> Event {
        let old = self.get(key).cloned();
        let kv = Kv {
            key: key.clone(),
            value: value.clone(),
            create_revision: old.as_ref().map_or(next, |old| old.create_revision),
            mod_revision: next,
            version: old.as_ref().map_or(0, |old| old.version) + 1,
            lease: None,
        };
        Event { kind: EventKind::Put, kv, prev: old }
    }
}

/// Creates the watch event that reports that an entry was deleted.
pub(crate) fn deletion(old: &Kv, at: Revision) -> Event {
    let kv = Kv {
        key: old.key.clone(),
        value: Value::default(),
        create_revision: Revision::UNSET,
        mod_revision: at,
        version: 0,
        lease: None,
    };
    Event { kind: EventKind::Delete, kv, prev: Some(old.clone()) }
}

/// Creates the answer to a read of the entries `kvs`, cut to at most `limit` keys.
pub(crate) fn cut(mut kvs: Vec<Kv>, limit: i64, content: Content) -> RangeResponse {
    let count = kvs.len() as u64;
    let limit = usize::try_from(limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let mut more = kvs.len() > limit;
    kvs.truncate(limit);
    match content {
        Content::Full => {}
        Content::KeysOnly => kvs.iter_mut().for_each(|kv| kv.value = Value::default()),
        Content::CountOnly => {
            kvs.clear();
            more = false;
        }
    }
    RangeResponse { revision: Revision::UNSET, kvs, count, more }
}
