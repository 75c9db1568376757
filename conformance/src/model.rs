//! What a store has to answer, worked out in the plainest way: every version of every key is kept for ever.

use std::collections::BTreeMap;

use kv::{
    Batch, Compare, CompareOp, Content, ErrorKind, Event, EventKind, InvalidArgument, Key, Kv, Op, OpResult, Prev,
    Range, RangeRequest, RangeResponse, Revision, Target, Txn, TxnRange, TxnResponse, Value, WatchRequest,
};

/// All that ever happened to a store since it was at its first revision, when it was empty.
#[derive(Debug)]
pub(crate) struct Model {
    /// For each key what it was from a revision on; `None` for absent.
    versions: BTreeMap<Key, Vec<(Revision, Option<Kv>)>>,
    /// The events of each revision.
    log: BTreeMap<Revision, Vec<Event>>,
    revision: Revision,
    mark: Revision,
}

impl Model {
    /// An empty store at this revision.
    pub(crate) fn new(revision: Revision) -> Self {
        Self { versions: BTreeMap::new(), log: BTreeMap::new(), revision, mark: Revision::UNSET }
    }

    /// The store's revision.
    pub(crate) fn revision(&self) -> Revision {
        self.revision
    }

    /// The revision to which the history is compacted.
    pub(crate) fn mark(&self) -> Revision {
        self.mark
    }

    /// The keys of a range as of a revision.
    fn state(&self, range: &Range, at: Revision) -> Vec<Kv> {
        let within = self.versions.iter().filter(|(key, _)| range.contains(key.as_bytes()));
        within
            .filter_map(|(_, versions)| versions.iter().rev().find(|(from, _)| *from <= at))
            .filter_map(|(_, kv)| kv.clone())
            .collect()
    }

    /// What a read has to answer.
    pub(crate) fn range(&self, request: &RangeRequest) -> Result<RangeResponse, ErrorKind> {
        let at = if request.at.is_set() { request.at } else { self.revision };
        if at > self.revision {
            return Err(ErrorKind::FutureRevision);
        }
        if at < self.mark {
            return Err(ErrorKind::Compacted { compact_revision: self.mark });
        }
        let kvs = self.state(&request.range, at);
        Ok(cut(kvs, request.limit, request.content, self.revision))
    }

    /// What a compaction has to answer.
    pub(crate) fn compact(&mut self, to: Revision) -> Result<(), ErrorKind> {
        if !to.is_set() {
            return Err(InvalidArgument::RevisionNotSet.into());
        }
        if to <= self.mark {
            return Err(ErrorKind::Compacted { compact_revision: self.mark });
        }
        if to > self.revision {
            return Err(ErrorKind::FutureRevision);
        }
        self.mark = to;
        Ok(())
    }

    /// What a transaction that passes its check has to answer.
    pub(crate) fn txn(&mut self, txn: &Txn) -> TxnResponse {
        let succeeded = txn.compares.iter().all(|compare| self.holds(compare));
        let branch = if succeeded { &txn.success } else { &txn.failure };
        let next = self.revision.next();
        let mut events = Vec::new();
        let mut results: Vec<OpResult> = branch.iter().map(|op| self.apply(op, next, &mut events)).collect();
        if !events.is_empty() {
            self.revision = next;
            self.log.insert(next, events);
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
            Op::Put { key, value, prev } => {
                let old = self.state(&Range::Key(key.clone()), next).pop();
                let kv = Kv {
                    key: key.clone(),
                    value: value.clone(),
                    create_revision: old.as_ref().map_or(next, |old| old.create_revision),
                    mod_revision: next,
                    version: old.as_ref().map_or(0, |old| old.version) + 1,
                };
                self.versions.entry(key.clone()).or_default().push((next, Some(kv.clone())));
                events.push(Event { kind: EventKind::Put, kv, prev: old.clone() });
                OpResult::Put { prev: old.filter(|_| *prev == Prev::Return) }
            }
            Op::Delete { range, prev } => {
                let gone = self.state(range, next);
                for old in &gone {
                    self.versions.entry(old.key.clone()).or_default().push((next, None));
                    events.push(deletion(old, next));
                }
                let count = gone.len() as u64;
                OpResult::Delete { count, prevs: if *prev == Prev::Return { gone } else { Vec::new() } }
            }
            Op::Range(TxnRange { range, limit, content, .. }) => {
                OpResult::Range(cut(self.state(range, next), *limit, *content, next))
            }
            other => unreachable!("an operation that this model does not know: {other:?}"),
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        let kvs = self.state(&compare.range, self.revision);
        if kvs.is_empty() {
            return holds_for(compare, None);
        }
        kvs.iter().all(|kv| holds_for(compare, Some(kv)))
    }

    /// The next batch of a watch that has come to `from`: `Ok(None)` if there is none yet.
    pub(crate) fn next_batch(&self, request: &WatchRequest, from: Revision) -> Result<Option<Batch>, ErrorKind> {
        if from < self.mark {
            return Err(ErrorKind::Compacted { compact_revision: self.mark });
        }
        let found = self.log.range(from..).find_map(|(revision, events)| {
            let events: Vec<Event> = events
                .iter()
                .filter(|event| request.range.contains(event.kv.key.as_bytes()))
                .map(|event| Event {
                    prev: event.prev.clone().filter(|_| request.prev == Prev::Return && *revision > self.mark),
                    ..event.clone()
                })
                .collect();
            (!events.is_empty()).then_some(Batch { revision: *revision, time: None, events })
        });
        Ok(found)
    }
}

fn deletion(old: &Kv, at: Revision) -> Event {
    let kv = Kv {
        key: old.key.clone(),
        value: Value::default(),
        create_revision: Revision::UNSET,
        mod_revision: at,
        version: 0,
    };
    Event { kind: EventKind::Delete, kv, prev: Some(old.clone()) }
}

fn cut(mut kvs: Vec<Kv>, limit: i64, content: Content, revision: Revision) -> RangeResponse {
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
    RangeResponse { revision, kvs, count, more }
}

fn holds_for(compare: &Compare, kv: Option<&Kv>) -> bool {
    let number = |stored: fn(&Kv) -> i64, given: i64| compare_numbers(compare.op, kv.map_or(0, stored), given);
    match &compare.target {
        Target::Version(given) => number(|kv| kv.version, *given),
        Target::CreateRevision(given) => number(|kv| kv.create_revision.get(), given.get()),
        Target::ModRevision(given) => number(|kv| kv.mod_revision.get(), given.get()),
        Target::Value(given) => kv.is_some_and(|kv| compare.op.holds(kv.value.as_bytes(), given.as_bytes())),
        other => unreachable!("a target that this model does not know: {other:?}"),
    }
}

fn compare_numbers(op: CompareOp, stored: i64, given: i64) -> bool {
    op.holds(&stored, &given)
}
