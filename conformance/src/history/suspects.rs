//! Groups recorded calls by the changes to the store that they may have made.

use std::collections::{BTreeMap, HashMap};

use kv::{Batch, Event, EventKind, Key, Op, OpResult, RangeResponse, Revision, Txn, Value};

use super::matching::assign;
use super::order::{Floor, WriteEffect};
use super::recorder::{Call, RecordedAnswer, RecordedRequest};
use super::replay::{Summary, answer_of, same_events};
use super::violation::Violation;
use crate::state::State;

/// A recorded call, and what the judge knows about when it happened.
#[derive(Clone, Debug)]
pub(super) struct PendingCall {
    pub(super) call: Call,
    pub(super) floor: Floor,
    /// The revision of the log at which an unanswered call happened, once it is known.
    pub(super) found_at: Option<Revision>,
}

impl PendingCall {
    fn txn(&self) -> Option<&Txn> {
        match &self.call.request {
            RecordedRequest::Txn(txn) => Some(txn),
            _ => None,
        }
    }
}

/// A part of a recorded history while it is being judged.
pub(super) struct JudgedPart {
    calls: Vec<PendingCall>,
    /// The acknowledged writes whose revisions the replay has not reached yet.
    acknowledged: BTreeMap<Revision, usize>,
    /// The answered calls that wrote nothing, in descending order of the revision that they saw, so the last element is
    /// judged next.
    observers: Vec<(Revision, usize)>,
    /// The writes with unknown outcome, indexed by the entries that they may put.
    putters: HashMap<(Key, Value), Vec<usize>>,
    /// The writes with unknown outcome that can only delete keys.
    deleters: Vec<usize>,
    /// The revisions of deletions that no acknowledged call explains, each with the calls that may have made the
    /// deletion.
    deletions: Vec<(Revision, Vec<usize>)>,
}

impl JudgedPart {
    pub(super) fn new(
        open: Vec<PendingCall>,
        calls: impl Iterator<Item = PendingCall>,
        base: Revision,
        summary: &mut Summary,
    ) -> Result<Self, Violation> {
        let mut part = Self {
            calls: open.into_iter().chain(calls).collect(),
            acknowledged: BTreeMap::new(),
            observers: Vec::new(),
            putters: HashMap::new(),
            deleters: Vec::new(),
            deletions: Vec::new(),
        };
        for i in 0..part.calls.len() {
            part.arrange(i, base, summary)?;
        }
        part.observers.sort_unstable_by(|a, b| b.cmp(a));
        Ok(part)
    }

    fn arrange(&mut self, i: usize, base: Revision, summary: &mut Summary) -> Result<(), Violation> {
        let PendingCall { call, floor, .. } = &self.calls[i];
        match (&call.answered, call.revision()) {
            (_, Some(revision)) if wrote(call) == WriteEffect::Something => {
                floor.check(call, revision, WriteEffect::Something)?;
                summary.acknowledged += 1;
                if let Some(other) = self.acknowledged.insert(revision, i) {
                    let what = format!("two writes were told that they are revision {revision}");
                    return Err(Violation::new("R2", what)
                        .showing("one", &self.calls[other].call)
                        .showing("the other", &self.calls[i].call));
                }
            }
            (_, Some(revision)) => {
                floor.check(call, revision, WriteEffect::Nothing)?;
                summary.observed += 1;
                let at = match &call.request {
                    RecordedRequest::Range(request) if request.at.is_set() => request.at,
                    _ => revision,
                };
                if at >= base {
                    self.observers.push((at, i));
                }
            }
            (RecordedAnswer::Compacted, None) => {}
            (_, None) if call.is_unknown() => self.index(i),
            _ => summary.refused += 1,
        }
        Ok(())
    }

    fn index(&mut self, i: usize) {
        let Some(txn) = self.calls[i].txn().filter(|txn| !txn.is_read_only() && txn.check("history").is_ok()) else {
            return;
        };
        for branch in [&txn.success, &txn.failure] {
            for (key, value) in branch.iter().filter_map(put_of) {
                let may_put = self.putters.entry((key.clone(), value.clone())).or_default();
                if may_put.last() != Some(&i) {
                    may_put.push(i);
                }
            }
        }
        let only_deletes = |branch: &Vec<Op>| branch.iter().any(Op::is_write) && !branch.iter().any(is_put);
        if only_deletes(&txn.success) || only_deletes(&txn.failure) {
            self.deleters.push(i);
        }
    }

    /// Checks each call that saw the state at a revision below `until`: its answer must match `state`. Every write that
    /// was acknowledged at a revision below `until` must be in the log.
    pub(super) fn observe(&mut self, until: Revision, state: &mut State) -> Result<(), Violation> {
        if let Some((revision, i)) = self.acknowledged.first_key_value().filter(|(revision, _)| **revision < until) {
            let what = format!("a write was acknowledged at {revision}, where the log has nothing");
            return Err(Violation::new("S1", what).showing("call", &self.calls[*i].call));
        }
        while let Some((_, i)) = self.observers.pop_if(|(at, _)| *at < until) {
            saw(&self.calls[i].call, state)?;
        }
        Ok(())
    }

    /// Removes and returns the write that was acknowledged at the given revision.
    pub(super) fn acknowledged_at(&mut self, revision: Revision) -> Option<&Call> {
        self.acknowledged.remove(&revision).map(|i| &self.calls[i].call)
    }

    /// Finds a write with unknown outcome that matches this revision of the log, applies it to the state, and returns
    /// its events; `None` if no such write matches.
    pub(super) fn unknown_of(&mut self, batch: &Batch, state: &mut State) -> Option<Vec<Event>> {
        let candidates = match first_put(batch) {
            Some(put) => self.putters.get(&put),
            None => Some(&self.deleters),
        };
        let fitting: Vec<usize> = candidates?.iter().copied().filter(|i| self.fits(*i, batch, state)).collect();
        let first = *fitting.first()?;
        let events = state.run(self.calls[first].txn()?, batch.revision).events;
        if first_put(batch).is_some() {
            self.calls[first].found_at = Some(batch.revision);
        } else {
            // More than one call with unknown outcome may have made the deletion in this batch of the log.
            // `match_deletions` matches the deletion to one of these calls later, when every deletion that no
            // acknowledged call made has been found.
            self.deletions.push((batch.revision, fitting));
        }
        Some(events)
    }

    /// Returns true if a call with unknown outcome can have made the change in this batch.
    fn fits(&self, i: usize, batch: &Batch, state: &mut State) -> bool {
        let PendingCall { floor, found_at, .. } = &self.calls[i];
        found_at.is_none() && floor.is_below(batch.revision) && self.does(i, batch, state)
    }

    fn does(&self, i: usize, batch: &Batch, state: &mut State) -> bool {
        let Some(txn) = self.calls[i].txn().filter(|txn| txn.check("history").is_ok()) else { return false };
        let applied = state.run(txn, batch.revision);
        state.undo(&applied.events);
        same_events(&batch.events, &applied.events)
    }

    /// For a revision of the log that matches no recorded call, returns the unanswered calls that would have made the
    /// same put or deletion.
    pub(super) fn suspects(&self, batch: &Batch, state: &mut State) -> Vec<&Call> {
        let put = first_put(batch);
        let suspect = |i: &usize| match &put {
            Some((key, value)) => self.calls[*i].txn().is_some_and(|txn| {
                txn.success.iter().chain(&txn.failure).filter_map(put_of).any(|put| put == (key, value))
            }),
            None => self.does(*i, batch, state),
        };
        (0..self.calls.len()).filter(suspect).map(|i| &self.calls[i].call).collect()
    }

    /// Assigns to each deletion one of the calls that can have made it; each call is assigned to at most one deletion.
    ///
    /// # Errors
    /// If no call can have made a deletion, returns the error from `unexplained` for this deletion.
    pub(super) fn match_deletions(
        &mut self,
        unexplained: impl Fn(Revision, &[&Call]) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let free = |i: &usize| self.calls[*i].found_at.is_none();
        let candidates: Vec<Vec<usize>> =
            self.deletions.iter().map(|(_, fitting)| fitting.iter().copied().filter(free).collect()).collect();
        let found = assign(&candidates, self.calls.len());
        for (n, i) in found.into_iter().enumerate() {
            let (revision, fitting) = &self.deletions[n];
            match i {
                Some(i) => self.calls[i].found_at = Some(*revision),
                None => unexplained(*revision, &fitting.iter().map(|i| &self.calls[*i].call).collect::<Vec<_>>())?,
            }
        }
        Ok(())
    }

    /// The writes with unknown outcome that may still appear in a later part of the log.
    pub(super) fn unknown_left(self, summary: &mut Summary) -> Vec<PendingCall> {
        let (found, left): (Vec<PendingCall>, Vec<PendingCall>) =
            self.calls.into_iter().filter(|one| one.call.is_unknown()).partition(|one| one.found_at.is_some());
        summary.happened = found.len();
        summary.vanished = left.len();
        left.into_iter().filter(|one| one.txn().is_some_and(|txn| !txn.is_read_only())).collect()
    }
}

/// Says whether the answer to a call reports a change of the store.
fn wrote(call: &Call) -> WriteEffect {
    let effect = |result: &OpResult| match result {
        OpResult::Put { .. } => true,
        OpResult::Delete { count, .. } => *count > 0,
        OpResult::Range(_) => false,
    };
    match &call.answered {
        RecordedAnswer::Txn(answer) if answer.results.iter().any(effect) => WriteEffect::Something,
        _ => WriteEffect::Nothing,
    }
}

/// Checks that the answer to a call that wrote nothing matches the contents of `state`.
fn saw(call: &Call, state: &mut State) -> Result<(), Violation> {
    let differs = |expected: String| {
        let what = "a call was told what the state at its revision does not have";
        Err(Violation::new("S1", what).showing("call", call).showing("expected", &expected))
    };
    match (&call.request, &call.answered) {
        (RecordedRequest::Range(request), RecordedAnswer::Range(answer)) => {
            let found = state.read(&request.range, request.limit, request.content);
            let expected = RangeResponse { revision: answer.revision, ..found };
            if *answer == expected { Ok(()) } else { differs(format!("{expected:?}")) }
        }
        (RecordedRequest::Txn(txn), RecordedAnswer::Txn(answer)) => {
            let applied = state.run(txn, answer.revision.next());
            state.undo(&applied.events);
            let expected = answer_of(answer.revision, applied.succeeded, applied.results);
            let same = *answer == expected && applied.events.is_empty();
            if same { Ok(()) } else { differs(format!("{expected:?} and {:?}", applied.events)) }
        }
        _ => Err(Violation::new("T9", "an answer of another kind than the call").showing("call", call)),
    }
}

fn is_put(op: &Op) -> bool {
    matches!(op, Op::Put { .. })
}

fn put_of(op: &Op) -> Option<(&Key, &Value)> {
    match op {
        Op::Put { key, value, .. } => Some((key, value)),
        _ => None,
    }
}

fn first_put(batch: &Batch) -> Option<(Key, Value)> {
    let put = batch.events.iter().find(|event| event.kind == EventKind::Put)?;
    Some((put.kv.key.clone(), put.kv.value.clone()))
}
