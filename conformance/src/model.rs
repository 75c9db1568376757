//! A simple model that computes the answers that a correct store must return. The model keeps every version of every
//! key.

use std::collections::BTreeMap;

use kv::{
    Batch, ErrorKind, Event, EventKind, InvalidArgument, Key, Kv, OpResult, Prev, Range, RangeRequest, RangeResponse,
    Revision, Txn, TxnResponse, WatchRequest,
};

use crate::state::{State, cut};

/// The complete history of a store since its first revision, at which the store was empty.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    now: State,
    /// All versions of each key, with the revision of each version; `None` for a deletion.
    versions: BTreeMap<Key, Vec<(Revision, Option<Kv>)>>,
    log: BTreeMap<Revision, Vec<Event>>,
    revision: Revision,
    mark: Revision,
}

impl Model {
    pub(crate) fn new(revision: Revision) -> Self {
        let (versions, log) = (BTreeMap::new(), BTreeMap::new());
        Self { now: State::default(), versions, log, revision, mark: Revision::UNSET }
    }

    /// Creates the model of an empty store at the given revision, with all earlier history compacted.
    pub(crate) fn compacted_at(revision: Revision) -> Self {
        Self { mark: revision, ..Self::new(revision) }
    }

    pub(crate) fn revision(&self) -> Revision {
        self.revision
    }

    /// Returns the compaction mark of the modelled store.
    pub(crate) fn mark(&self) -> Revision {
        self.mark
    }

    /// The entries that a key range contains at a revision.
    fn state(&self, range: &Range, at: Revision) -> Vec<Kv> {
        if at == self.revision {
            return self.now.within(range).cloned().collect();
        }
        let within = self.versions.iter().filter(|(key, _)| range.contains(key.as_bytes()));
        within
            .filter_map(|(_, versions)| versions.iter().rev().find(|(from, _)| *from <= at))
            .filter_map(|(_, kv)| kv.clone())
            .collect()
    }

    /// The answer that a correct store returns for this read.
    pub(crate) fn range(&self, request: &RangeRequest) -> Result<RangeResponse, ErrorKind> {
        let at = if request.at.is_set() { request.at } else { self.revision };
        if at > self.revision {
            return Err(ErrorKind::FutureRevision);
        }
        if at < self.mark {
            return Err(ErrorKind::Compacted { compact_revision: self.mark });
        }
        let answer = cut(self.state(&request.range, at), request.limit, request.content);
        Ok(RangeResponse { revision: self.revision, ..answer })
    }

    /// The answer that a correct store returns for a compaction.
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

    /// The answer that a correct store returns for a valid transaction.
    pub(crate) fn txn(&mut self, txn: &Txn) -> TxnResponse {
        let next = self.revision.next();
        let mut applied = self.now.run(txn, next);
        if !applied.events.is_empty() {
            self.revision = next;
            for event in &applied.events {
                let kv = (event.kind == EventKind::Put).then(|| event.kv.clone());
                self.versions.entry(event.kv.key.clone()).or_default().push((next, kv));
            }
            self.log.insert(next, applied.events);
        }
        for result in &mut applied.results {
            if let OpResult::Range(found) = result {
                found.revision = self.revision;
            }
        }
        TxnResponse { revision: self.revision, succeeded: applied.succeeded, results: applied.results }
    }

    /// The next batch of events of a watch whose next revision is `from`; `Ok(None)` if there are no such events yet.
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
