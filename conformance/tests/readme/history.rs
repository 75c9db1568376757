//! The history of the example store: every version of every key, and every event.

use std::collections::BTreeMap;
use std::ops::Bound;

use kv::{
    Batch, Content, ErrorKind, Event, EventKind, Key, Kv, Op, OpResult, Prev, Range, RangeRequest, RangeResponse,
    Revision, Txn, TxnRange, TxnResponse, Value, WatchRequest,
};

type Refused<T> = Result<T, ErrorKind>;

#[derive(Debug)]
pub(crate) struct CallHistory {
    /// The versions of each key in the example store, with their revisions; `None` for a deletion.
    versions: BTreeMap<Key, Vec<(Revision, Option<Kv>)>>,
    events: BTreeMap<Revision, Vec<Event>>,
    revision: Revision,
    mark: Revision,
}

impl Default for CallHistory {
    fn default() -> Self {
        let (revision, mark) = (Revision::new(1), Revision::UNSET);
        Self { versions: BTreeMap::new(), events: BTreeMap::new(), revision, mark }
    }
}

impl CallHistory {
    fn above_the_mark(&self, at: Revision) -> Refused<()> {
        if at < self.mark { Err(ErrorKind::Compacted { compact_revision: self.mark }) } else { Ok(()) }
    }

    pub(crate) fn range(&self, request: &RangeRequest) -> Refused<RangeResponse> {
        let at = if request.at.is_set() { request.at } else { self.revision };
        if at > self.revision {
            return Err(ErrorKind::FutureRevision);
        }
        self.above_the_mark(at)?;
        let read = TxnRange::new(request.range.clone()).with_limit(request.limit).with_content(request.content);
        Ok(self.read(&read, at))
    }

    fn state(&self, range: &Range, at: Revision) -> Vec<Kv> {
        if range.is_empty() {
            return Vec::new();
        }
        let (from, to) = range.bounds();
        let keys = self.versions.range((Bound::Included(from), to.map_or(Bound::Unbounded, Bound::Excluded)));
        keys.filter_map(|(_, versions)| versions.iter().rfind(|(from, _)| *from <= at)?.1.clone()).collect()
    }

    fn read(&self, read: &TxnRange, at: Revision) -> RangeResponse {
        let mut kvs = self.state(&read.range, at);
        let count = kvs.len();
        let limit = usize::try_from(read.limit).ok().filter(|limit| *limit > 0).unwrap_or(count);
        kvs.truncate(if read.content == Content::CountOnly { 0 } else { limit });
        if read.content == Content::KeysOnly {
            kvs.iter_mut().for_each(|kv| kv.value = Value::default());
        }
        let more = count > limit && read.content != Content::CountOnly;
        RangeResponse { revision: self.revision, kvs, count: count as u64, more }
    }

    pub(crate) fn txn(&mut self, txn: &Txn) -> TxnResponse {
        let succeeded =
            txn.compares.iter().all(|compare| compare.holds_for(&self.state(&compare.range, self.revision)));
        let branch = if succeeded { &txn.success } else { &txn.failure };
        let (next, mut events) = (self.revision.next(), Vec::new());
        let mut results: Vec<OpResult> = branch.iter().map(|op| self.apply(op, next, &mut events)).collect();
        if !events.is_empty() {
            self.revision = next;
            self.events.insert(next, events);
        }
        for result in &mut results {
            if let OpResult::Range(found) = result {
                found.revision = self.revision;
            }
        }
        TxnResponse { revision: self.revision, succeeded, results }
    }

    fn apply(&mut self, op: &Op, next: Revision, events: &mut Vec<Event>) -> OpResult {
        match op {
            Op::Put { key, value, prev, .. } => {
                let old = self.state(&Range::Key(key.clone()), next).pop();
                let (create_revision, version) =
                    old.as_ref().map_or((next, 0), |old| (old.create_revision, old.version));
                let (key, value, version) = (key.clone(), value.clone(), version + 1);
                let kv = Kv { key, value, create_revision, mod_revision: next, version, lease: None };
                self.versions.entry(kv.key.clone()).or_default().push((next, Some(kv.clone())));
                events.push(Event { kind: EventKind::Put, kv, prev: old.clone() });
                OpResult::Put { prev: old.filter(|_| *prev == Prev::Return) }
            }
            Op::Delete { range, prev } => {
                let gone = self.state(range, next);
                for old in &gone {
                    self.versions.entry(old.key.clone()).or_default().push((next, None));
                    let (create_revision, value) = (Revision::UNSET, Value::default());
                    let kv = Kv {
                        key: old.key.clone(),
                        value,
                        create_revision,
                        mod_revision: next,
                        version: 0,
                        lease: None,
                    };
                    events.push(Event { kind: EventKind::Delete, kv, prev: Some(old.clone()) });
                }
                let count = gone.len() as u64;
                OpResult::Delete { count, prevs: if *prev == Prev::Return { gone } else { Vec::new() } }
            }
            Op::Range(read) => OpResult::Range(self.read(read, next)),
        }
    }

    /// The first batch of a watch at or after this revision; `None` if there are no events yet.
    pub(crate) fn events(&self, request: &WatchRequest, from: Revision) -> Refused<Option<Batch>> {
        self.above_the_mark(from)?;
        let answered = |event: &Event, revision| Event {
            prev: event.prev.clone().filter(|_| request.prev == Prev::Return && revision > self.mark),
            ..event.clone()
        };
        Ok(self.events.range(from..).find_map(|(&revision, events)| {
            let about = events.iter().filter(|event| request.range.contains(event.kv.key.as_bytes()));
            let events: Vec<Event> = about.map(|event| answered(event, revision)).collect();
            (!events.is_empty()).then_some(Batch { revision, time: None, events })
        }))
    }

    pub(crate) fn compact(&mut self, to: Revision) -> Refused<()> {
        self.above_the_mark(to.get().checked_sub(1).map_or(to, Revision::new))?;
        if to > self.revision {
            return Err(ErrorKind::FutureRevision);
        }
        self.mark = to;
        Ok(())
    }
}
