//! The commit of an attempt: one guarded transaction.

use std::collections::BTreeMap;

use super::{Commit, Transaction, out_of_time};
use crate::error::{ErrorKind, Outcome, Result};
use crate::key::{Range, Revision};
use crate::request::{Compare, Op, Txn};

/// The most guards of one commit: below the 128 compares of a transaction, with room to spare.
const MAX_GUARDS: usize = 120;

impl Transaction {
    /// Commits what was written.
    pub(super) async fn commit(&mut self) -> Result<Commit> {
        // Deleting what is not there is nothing to do.
        self.writes.retain(|key, value| value.is_some() || self.guards.get(key).is_some_and(|guard| guard.is_set()));
        if self.writes.is_empty() {
            // A peek is newer than the attempt's revision: only a commit proves what it found.
            return Ok(if self.relied_on_peek { Commit::Overtaken } else { Commit::Done(self.at) });
        }
        if self.is_older_than_a_peek() {
            return Ok(Commit::Overtaken);
        }
        let others = self.guards.len() + self.guarded_ranges.len();
        let created = merged(&self.creation_guards, MAX_GUARDS.saturating_sub(others));
        let guards = others + created.len();
        if guards > MAX_GUARDS {
            return Err(self.error(ErrorKind::ReadSetTooLarge { guards }));
        }
        let txn = self.guarded_txn(&created);
        if self.deadline.work_is_over() {
            return Err(out_of_time());
        }
        match self.store.txn(txn.clone()).await {
            Ok(answer) if answer.succeeded => Ok(Commit::Done(answer.revision)),
            Ok(_) => Ok(Commit::Overtaken),
            Err(error) if error.outcome() == Outcome::Unknown => self.settle(txn, error).await,
            Err(error) if error.kind().is_transient() => Ok(Commit::Refused(error)),
            Err(error) => Err(error),
        }
    }

    fn guarded_txn(&self, created: &BTreeMap<Range, Revision>) -> Txn {
        let keys = self.guards.iter().map(|(key, revision)| Compare::unchanged(key.clone(), *revision));
        let ranges = self.guarded_ranges.iter().map(|range| Compare::nothing_newer(range.clone(), self.at));
        let created = created.iter().map(|(range, revision)| Compare::none_created_after(range.clone(), *revision));
        let writes = self.writes.iter().map(|(key, value)| match value {
            Some(value) => Op::put(key.clone(), value.clone()),
            None => Op::delete(key.clone()),
        });
        Txn::new().with_compares(keys).with_compares(ranges).with_compares(created).with_success(writes)
    }
}

/// Guards against creation, at most this many where there are some: neighbours become one that spans both, those first
/// whose keys have most in common. A wider guard may fail for a key that does no harm, and never misses one.
fn merged(guards: &BTreeMap<Range, Revision>, most: usize) -> BTreeMap<Range, Revision> {
    if guards.len() <= most {
        return guards.clone();
    }
    let mut spans: Vec<_> = guards.iter().map(|(range, at)| (range.bounds(), *at)).collect();
    spans.sort();
    let common = |one: &[u8], other: &[u8]| one.iter().zip(other).take_while(|(a, b)| a == b).count();
    while spans.len() > most.max(1) {
        let closeness = |place: &usize| common(spans[*place].0.0.as_bytes(), spans[*place + 1].0.0.as_bytes());
        let Some(place) = (0..spans.len() - 1).max_by_key(closeness) else { break };
        let ((_, other_to), other_at) = spans.remove(place + 1);
        let ((_, to), at) = &mut spans[place];
        *to = to.take().and_then(|to| other_to.map(|other| to.max(other)));
        *at = (*at).min(other_at);
    }
    let range = |(from, to)| match to {
        Some(to) => Range::FromTo(from, to),
        None => Range::From(from),
    };
    spans.into_iter().map(|(bounds, at)| (range(bounds), at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_that_are_too_many_span_their_neighbours() {
        let guards: BTreeMap<Range, Revision> = [("a1", 5), ("a3", 4), ("a31", 7), ("b", 9)]
            .map(|(key, at)| (Range::prefix(key), Revision::new(at)))
            .into();
        assert_eq!(merged(&guards, 4), guards);
        let three = merged(&guards, 3);
        let at = |range: Range| three.get(&range).copied();
        assert_eq!(three.len(), 3);
        assert_eq!(at(Range::FromTo("a3".into(), "a4".into())), Some(Revision::new(4)));
        let one = merged(&guards, 0);
        assert_eq!(one, [(Range::FromTo("a1".into(), "c".into()), Revision::new(4))].into());
    }
}
