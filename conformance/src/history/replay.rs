//! Replays a store's log revision by revision, and checks that the log and the recorded answers agree.

use std::mem;

use futures::StreamExt;
use kv::{
    Batch, Error, ErrorKind, Event, EventKind, Kv, OpResult, Operation, Prev, Range, Result, Revision, Store,
    TxnResponse, WatchRequest,
};

use super::order::floors;
use super::recorder::{Call, RecordedAnswer, RecordedPart, RecordedRequest};
use super::streams::{self, TrueEvents};
use super::suspects::{JudgedPart, PendingCall};
use super::violation::Violation;
use crate::state::State;

/// How many revisions, calls and events the [`Replay`] has judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The number of revisions in the store's log.
    pub revisions: usize,
    /// The number of judged writes that the store acknowledged.
    pub acknowledged: usize,
    /// The number of judged reads, and of transactions that wrote nothing.
    pub observed: usize,
    /// The number of calls that failed and certainly did not happen.
    pub refused: usize,
    /// The number of writes with unknown outcome that are in the store's log.
    pub happened: usize,
    /// The number of calls with unknown outcome that left no trace in the store's log.
    pub vanished: usize,
    /// The number of watches that were judged.
    pub watches: usize,
}

/// Says whether clients that are not recorded may have written to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PossibleWriters {
    Recorded,
    Any,
}

/// A judge that replays a recorded history, and keeps the store's state as of the last revision that it judged.
#[derive(Clone, Debug)]
pub struct Replay {
    state: State,
    revision: Revision,
    writers: PossibleWriters,
    /// The newest revision in any answer that was judged so far.
    answered: Revision,
    /// Writes with unknown outcome from parts of the history that are already judged; they may still appear in a later
    /// part of the log.
    open: Vec<PendingCall>,
    /// The time and the revision of each recorded compaction request.
    compactions: Vec<(u64, Revision)>,
}

impl Replay {
    /// Creates a `Replay` that starts at `revision`, at which the store contained `kvs`.
    pub fn new(revision: Revision, kvs: impl IntoIterator<Item = Kv>) -> Self {
        Self {
            state: kvs.into_iter().collect(),
            revision,
            writers: PossibleWriters::Recorded,
            answered: revision,
            open: Vec::new(),
            compactions: Vec::new(),
        }
    }

    /// Makes the judge accept changes that no recorded call explains, because unrecorded clients may write to the
    /// store.
    #[must_use]
    pub fn among_others(mut self) -> Self {
        self.writers = PossibleWriters::Any;
        self
    }

    /// Judges the next part of a recorded history. `log` must contain every revision of the store since the previous
    /// part, and must end at a moment when no call was running. A write with unknown outcome that is missing from this
    /// part of the log is kept, because it may appear in a later part.
    ///
    /// The log must contain all events of the keys that recorded calls use; [`read_log`] reads such a log.
    ///
    /// # Errors
    /// The first violation of a rule that the judge finds in the history.
    pub fn judge(&mut self, recorded: RecordedPart, log: &[Batch]) -> Result<Summary, Violation> {
        let RecordedPart { calls, streams } = recorded;
        let base = self.revision;
        in_order(base, log)?;
        let floors = floors(&calls, &streams, self.answered);
        self.compactions.extend(calls.iter().filter_map(|call| match call.request {
            RecordedRequest::Compact(to) => Some((call.start, to)),
            _ => None,
        }));
        self.answered = calls.iter().filter_map(Call::revision).fold(self.answered, Revision::max);
        let mut summary = Summary { revisions: log.len(), watches: streams.len(), ..Summary::default() };
        let pending = calls.into_iter().zip(floors).map(|(call, floor)| PendingCall { call, floor, found_at: None });
        let mut part = JudgedPart::new(mem::take(&mut self.open), pending, base, &mut summary)?;
        let mut truth = TrueEvents::after(base);
        for batch in log {
            part.observe(batch.revision, &mut self.state)?;
            truth.push(batch, self.step(batch, &mut part)?);
        }
        part.observe(Revision::new(i64::MAX), &mut self.state)?;
        part.match_deletions(|revision, suspects| check_unexplained(self.writers, revision, suspects))?;
        streams::judge(&streams, &truth, &self.compactions)?;
        self.answered = self.answered.max(self.revision);
        self.open = part.unknown_left(&mut summary);
        Ok(summary)
    }

    /// Replays one revision of the log, and returns its events with the previous states of their keys.
    fn step(&mut self, batch: &Batch, part: &mut JudgedPart) -> Result<Vec<Event>, Violation> {
        self.revision = batch.revision;
        if let Some(call) = part.acknowledged_at(batch.revision) {
            return self.acknowledged(batch, call);
        }
        if let Some(events) = part.unknown_of(batch, &mut self.state) {
            return Ok(events);
        }
        if self.writers == PossibleWriters::Recorded {
            check_unexplained(self.writers, batch.revision, &part.suspects(batch, &mut self.state))?;
        }
        self.follow(batch)
    }

    /// Replays a write that the store acknowledged. Both the store's log and its answer must show the complete effect
    /// of the acknowledged write.
    fn acknowledged(&mut self, batch: &Batch, call: &Call) -> Result<Vec<Event>, Violation> {
        let (RecordedRequest::Txn(txn), RecordedAnswer::Txn(answer)) = (&call.request, &call.answered) else {
            return Err(Violation::new("T9", "an answer of another kind than the call").showing("call", call));
        };
        let applied = self.state.run(txn, batch.revision);
        let expected = answer_of(batch.revision, applied.succeeded, applied.results);
        if *answer != expected {
            let what = format!("a write at {} was told what the state before it does not give", batch.revision);
            return Err(Violation::new("S1", what).showing("call", call).showing("expected", &expected));
        }
        if !same_events(&batch.events, &applied.events) {
            let what = format!("the log has another effect at {} than the write that was acknowledged", batch.revision);
            return Err(Violation::new("T2", what)
                .showing("call", call)
                .showing("expected", &applied.events)
                .showing("log", &batch.events));
        }
        Ok(applied.events)
    }

    /// Applies the events of a client that is not recorded. The events of unrecorded clients must fit the store's
    /// current state: for example, an absent key cannot be deleted.
    fn follow(&mut self, batch: &Batch) -> Result<Vec<Event>, Violation> {
        let mut events = Vec::with_capacity(batch.events.len());
        for event in &batch.events {
            let prev = self.state.get(&event.kv.key).cloned();
            let (create, version) = match (event.kind, &prev) {
                (EventKind::Put, Some(old)) => (old.create_revision, old.version + 1),
                (EventKind::Put, None) => (batch.revision, 1),
                (EventKind::Delete, _) => (Revision::UNSET, 0),
            };
            let follows = event.kv.mod_revision == batch.revision
                && (event.kv.create_revision, event.kv.version) == (create, version)
                && (event.kind == EventKind::Put || prev.is_some());
            if !follows {
                let what = format!("an event at {} does not follow from what was there", batch.revision);
                return Err(Violation::new("W2", what).showing("event", event).showing("before", &prev));
            }
            let event = Event { prev, ..event.clone() };
            self.state.happen(&event);
            events.push(event);
        }
        Ok(events)
    }
}

/// Checks that the store's log has each revision once, in ascending order, and with at least one event.
fn in_order(base: Revision, log: &[Batch]) -> Result<(), Violation> {
    let mut before = base;
    for batch in log {
        if batch.revision <= before {
            return Err(Violation::new("W2", format!("the log goes from {before} to {}", batch.revision)));
        }
        if batch.events.is_empty() {
            return Err(Violation::new("W3", format!("the log has nothing at {}", batch.revision)));
        }
        before = batch.revision;
    }
    Ok(())
}

/// Returns the violation for a revision of the log that no recorded call explains, or `Ok` if unrecorded clients may
/// write.
fn check_unexplained(writers: PossibleWriters, revision: Revision, suspects: &[&Call]) -> Result<(), Violation> {
    if writers == PossibleWriters::Any {
        return Ok(());
    }
    let of = |wanted: fn(&Call) -> bool| suspects.iter().find(|call| wanted(call));
    let refused = of(|call| matches!(call.answered, RecordedAnswer::Failed(..)) && !call.is_unknown());
    let (rule, what, call) = match (refused, suspects.first()) {
        (Some(refused), _) => ("E2", "a write that was refused for certain", Some(refused)),
        (None, Some(again)) => ("E3", "a write once more, or at another time than it can have been", Some(again)),
        (None, None) => ("S1", "a change that no client made", None),
    };
    let violation = Violation::new(rule, format!("revision {revision} is {what}"));
    Err(call.into_iter().fold(violation, |violation, call| violation.showing("call", call)))
}

/// Reads the store's log of a key range from revision `first` to `last`; a write at `last` must exist. The key range of
/// the log must contain all keys that the clients use. `last` must be the revision of a write to a key in `range`, made
/// after all clients have ended.
///
/// # Errors
/// Any error of the watch that reads the log. If the event at `last` never arrives, `read_log` waits for ever, so the
/// caller must set a time limit.
pub async fn read_log(store: &dyn Store, range: Range, first: Revision, last: Revision) -> Result<Vec<Batch>> {
    let mut stream = store.watch(WatchRequest::new(range, first).with_prev(Prev::Return)).await?;
    let mut log: Vec<Batch> = Vec::new();
    while log.last().is_none_or(|batch| batch.revision < last) {
        match stream.next().await {
            Some(batch) => log.push(batch?),
            None => {
                let resume_from = log.last().map_or(first, |batch| batch.revision.next());
                return Err(Error::new(ErrorKind::Disconnected { resume_from }, Operation::Watch, "history")
                    .with_detail("the stream ended"));
            }
        }
    }
    Ok(log)
}

pub(super) fn answer_of(revision: Revision, succeeded: bool, mut results: Vec<OpResult>) -> TxnResponse {
    for result in &mut results {
        if let OpResult::Range(found) = result {
            found.revision = revision;
        }
    }
    TxnResponse { revision, succeeded, results }
}

/// Returns true if the events in `log` and `expected` make the same changes; the log may lack the keys' previous
/// states.
pub(super) fn same_events(log: &[Event], expected: &[Event]) -> bool {
    let same = |(got, want): (&Event, &Event)| {
        got.kind == want.kind && got.kv == want.kv && (got.prev.is_none() || got.prev == want.prev)
    };
    log.len() == expected.len() && log.iter().zip(expected).all(same)
}
