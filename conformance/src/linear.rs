//! Is there an order of these calls that explains all that they saw? Two judges that know nothing of each other: one
//! searches for any order and does not look at revisions, the other takes the order that the revisions claim.

use std::collections::{BTreeMap, HashSet};

/// How many keys the calls are about.
pub(crate) const KEYS: usize = 5;

/// What is stored: a number at some of the keys.
type State = [Option<u32>; KEYS];

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Reads a key.
    Get(usize),
    /// Writes a key.
    Put(usize, u32),
    /// Writes a key if it holds the first number.
    Swap(usize, u32, u32),
    /// Deletes a key.
    Delete(usize),
    /// Deletes the first key and writes the other, if the first one is there.
    Move(usize, usize, u32),
}

/// What the caller was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// What a key holds.
    Value(Option<u32>),
    /// Whether there was an effect.
    Effect(Effect),
}

/// Whether a write did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It changed the store.
    Some,
    /// It changed nothing.
    None,
}

impl From<bool> for Effect {
    fn from(effective: bool) -> Self {
        if effective { Self::Some } else { Self::None }
    }
}

/// A call as it was recorded. Times are ticks of one clock that all clients share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) action: Action,
    pub(crate) seen: Seen,
    pub(crate) revision: i64,
}

/// What the caller of an action has to be told, and what is stored afterwards.
fn apply(mut state: State, action: Action) -> (Seen, State) {
    let effective = match action {
        Action::Get(key) => return (Seen::Value(state[key]), state),
        Action::Put(..) => true,
        Action::Swap(key, old, _) => state[key] == Some(old),
        Action::Delete(key) => state[key].is_some(),
        Action::Move(from, ..) => state[from].is_some(),
    };
    if effective {
        match action {
            Action::Get(_) => {}
            Action::Put(key, new) | Action::Swap(key, _, new) => state[key] = Some(new),
            Action::Delete(key) => state[key] = None,
            Action::Move(from, to, new) => {
                state[from] = None;
                state[to] = Some(new);
            }
        }
    }
    (Seen::Effect(effective.into()), state)
}

/// Looks for an order in which every call saw what it had to see and none comes before one that had ended when it began
/// (Wing and Gong's search, with a memory of what was tried).
pub(crate) fn some_order_explains(calls: &[Call]) -> bool {
    let mut search = Search { calls, tried: HashSet::new(), done: vec![false; calls.len()], left: calls.len() };
    search.from(State::default())
}

struct Search<'c> {
    calls: &'c [Call],
    tried: HashSet<(Vec<bool>, State)>,
    done: Vec<bool>,
    left: usize,
}

impl Search<'_> {
    fn from(&mut self, state: State) -> bool {
        if self.left == 0 {
            return true;
        }
        if !self.tried.insert((self.done.clone(), state)) {
            return false;
        }
        let waiting = || self.calls.iter().enumerate().filter(|(i, _)| !self.done[*i]);
        let first_end = waiting().map(|(_, call)| call.end).min().unwrap_or(u64::MAX);
        let candidates: Vec<usize> = waiting().filter(|(_, call)| call.start < first_end).map(|(i, _)| i).collect();
        candidates.into_iter().any(|i| self.with(i, state))
    }

    /// Whether it works out with this call next.
    fn with(&mut self, i: usize, state: State) -> bool {
        let call = &self.calls[i];
        let (seen, next) = apply(state, call.action);
        if seen != call.seen {
            return false;
        }
        self.done[i] = true;
        self.left -= 1;
        let explained = self.from(next);
        self.done[i] = false;
        self.left += 1;
        explained
    }
}

/// Whether the order of revisions explains all calls: every write has its own revision, everybody saw the state at the
/// revision of the answer, and no answer is older than one that was given before the call began.
///
/// # Errors
/// The first call that it does not explain, and why.
pub(crate) fn revisions_explain(calls: &[Call], base: i64) -> Result<(), String> {
    let mut writes: BTreeMap<i64, &Call> = BTreeMap::new();
    for call in calls.iter().filter(|call| call.seen == Seen::Effect(Effect::Some)) {
        if let Some(other) = writes.insert(call.revision, call) {
            return Err(format!("two writes at one revision: {other:?} and {call:?}"));
        }
    }
    let mut states = BTreeMap::from([(base, State::default())]);
    let mut state = State::default();
    for (revision, call) in &writes {
        let (seen, next) = apply(state, call.action);
        if seen != call.seen {
            return Err(format!("{call:?} on the state {state:?}"));
        }
        state = next;
        states.insert(*revision, state);
    }
    for call in calls {
        let wrote = call.seen == Seen::Effect(Effect::Some);
        let at = states.range(..=call.revision).next_back().map(|(_, state)| *state).unwrap_or_default();
        if !wrote && apply(at, call.action).0 != call.seen {
            return Err(format!("{call:?} on the state {at:?}"));
        }
        let before =
            calls.iter().filter(|other| other.end < call.start).map(|other| other.revision).max().unwrap_or(base);
        if call.revision < before || (wrote && call.revision == before) {
            return Err(format!("{call:?} after an answer at {before}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(times: (u64, u64), action: Action, seen: Seen, revision: i64) -> Call {
        Call { start: times.0, end: times.1, action, seen, revision }
    }

    const DONE: Seen = Seen::Effect(Effect::Some);

    fn verdicts(calls: &[Call]) -> (bool, bool) {
        (some_order_explains(calls), revisions_explain(calls, 1).is_ok())
    }

    #[test]
    fn overlapping_calls_may_take_either_order() {
        let put = call((1, 6), Action::Put(0, 7), DONE, 2);
        let old = call((2, 3), Action::Get(0), Seen::Value(None), 1);
        let new = call((4, 5), Action::Get(0), Seen::Value(Some(7)), 2);
        assert_eq!(verdicts(&[put, old, new]), (true, true));
        let moved = call((7, 8), Action::Move(0, 1, 9), DONE, 3);
        let swapped = call((9, 10), Action::Swap(1, 9, 4), DONE, 4);
        let gone = call((11, 12), Action::Delete(0), Seen::Effect(Effect::None), 4);
        assert_eq!(verdicts(&[put, old, new, moved, swapped, gone]), (true, true));
    }

    #[test]
    fn a_stale_read_is_caught() {
        let put = call((1, 2), Action::Put(0, 7), DONE, 2);
        let stale = call((3, 4), Action::Get(0), Seen::Value(None), 1);
        assert_eq!(verdicts(&[put, stale]), (false, false));
    }

    #[test]
    fn reads_that_go_back_are_caught() {
        let put = call((1, 9), Action::Put(0, 7), DONE, 2);
        let new = call((2, 3), Action::Get(0), Seen::Value(Some(7)), 2);
        let old = call((4, 5), Action::Get(0), Seen::Value(None), 1);
        assert_eq!(verdicts(&[put, new, old]), (false, false));
    }

    #[test]
    fn a_lost_update_is_caught() {
        let put = call((1, 2), Action::Put(0, 7), DONE, 2);
        let one = call((3, 6), Action::Swap(0, 7, 8), DONE, 3);
        let two = call((4, 5), Action::Swap(0, 7, 9), DONE, 4);
        assert_eq!(verdicts(&[put, one, two]), (false, false));
    }

    #[test]
    fn a_torn_move_is_caught() {
        let put = call((1, 2), Action::Put(0, 7), DONE, 2);
        let moved = call((3, 8), Action::Move(0, 1, 8), DONE, 3);
        let gone = call((4, 5), Action::Get(0), Seen::Value(None), 3);
        let not_yet = call((6, 7), Action::Get(1), Seen::Value(None), 3);
        assert_eq!(verdicts(&[put, moved, gone, not_yet]), (false, false));
    }

    #[test]
    fn one_revision_for_two_writes_is_caught() {
        let one = call((1, 2), Action::Put(0, 7), DONE, 2);
        let two = call((3, 4), Action::Put(1, 8), DONE, 2);
        assert_eq!(verdicts(&[one, two]), (true, false));
    }
}
