//! Searches for an order of recorded calls that explains all their answers. The search for an order uses the values in
//! the answers, not the revisions (Wing and Gong's search with Lowe's cache of visited states).

use std::collections::HashMap;
use std::fmt;

/// Number of keys that the recorded calls use.
pub(crate) const KEYS: usize = 5;

/// Maximum number of clients in one search for an order of calls. Each client may make 65,535 calls, and all clients
/// together may have 128 calls of unknown outcome.
pub(crate) const MAX_CLIENTS: usize = 16;

/// Maximum number of steps after which the search for an order gives up. A search with `MAX_SEARCH_STEPS` steps takes a
/// few seconds and about 100 MiB of memory.
const MAX_SEARCH_STEPS: usize = 1_000_000;

/// The state of the store: the number at each key, or `None` for an absent key.
pub(crate) type KeyStates = [Option<u32>; KEYS];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Get(usize),
    Put(usize, u32),
    /// Compare-and-swap: writes the second number to a key if the key has the first number.
    Swap(usize, u32, u32),
    Delete(usize),
    /// Move: deletes the first key, if it exists, and writes the given number to the second key.
    Move(usize, usize, u32),
}

/// The answer that the caller of a recorded call saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObservedAnswer {
    /// The value of the key that the call read; `None` if the key was absent.
    Value(Option<u32>),
    Effect(Effect),
    /// The call got no answer, so it may have taken effect at any time after its start, or never.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Some,
    None,
}

impl From<bool> for Effect {
    fn from(effective: bool) -> Self {
        if effective { Self::Some } else { Self::None }
    }
}

/// A recorded call. The start and end of a call are ticks of a clock that all clients share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) client: usize,
    pub(crate) start: u64,
    /// The tick at which the answer arrived; it has no meaning for a call without an answer.
    pub(crate) end: u64,
    pub(crate) action: Action,
    pub(crate) seen: ObservedAnswer,
}

/// The result of a search that found no order that explains the calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SearchFailure {
    /// Says whether the search tried all orders of the calls.
    pub(crate) tried: SearchExtent,
    /// The number of answered calls in the longest order that the search found.
    pub(crate) explained: usize,
    /// The state of the store after the longest sequence of calls that the search could put in an order.
    pub(crate) state: KeyStates,
    /// The candidates for the next place in the order; each was rejected because its answer does not fit the state.
    pub(crate) stuck: Vec<Call>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchExtent {
    /// The search tried all orders, so there is no order that explains the calls.
    All,
    /// The search gave up, so there may still be an order that explains the calls.
    Some,
}

impl fmt::Display for SearchFailure {
    /// Formats the failed search: the state in which it got stuck, and the calls that were candidates for the next
    /// place in the order.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tried {
            SearchExtent::All => write!(f, "no order explains more than {} calls", self.explained)?,
            SearchExtent::Some => write!(f, "no order found that explains more than {} calls", self.explained)?,
        }
        write!(f, "; then {:?} is stored, and none of these can be next:", self.state)?;
        self.stuck.iter().try_for_each(|call| write!(f, "\n    {call:?}"))
    }
}

/// The answer that a correct store returns for an action, and the store's state after the action.
fn apply(mut state: KeyStates, action: Action) -> (ObservedAnswer, KeyStates) {
    let effective = match action {
        Action::Get(key) => return (ObservedAnswer::Value(state[key]), state),
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
    (ObservedAnswer::Effect(effective.into()), state)
}

/// Searches for an order of the recorded calls that explains every answer. A call that ended before another call began
/// must come before the other call in the order. The order may leave out calls that got no answer.
///
/// # Errors
/// The error contains the longest order that the search found, and why no call continues it.
pub(crate) fn explain(first: KeyStates, calls: &[Call]) -> Result<(), SearchFailure> {
    let mut search = Search::new(first, calls);
    if search.from(first) { Ok(()) } else { Err(search.best) }
}

/// For each client, the number of its calls that the search has put into the order.
type PlacedCalls = [u16; MAX_CLIENTS];

struct Search {
    /// The answered calls of each client, oldest first; a client has at most one call in flight.
    clients: Vec<Vec<Call>>,
    /// The calls that got no answer.
    unknown: Vec<Call>,
    placed: PlacedCalls,
    /// The calls without an answer that are already in the order, one bit for each call.
    used: u128,
    /// Dead ends of the search: for each visited state, the sets of unanswered calls (in the order so far) with which
    /// the search failed to continue. The search does not continue from a state that it has already reached with a
    /// subset of the unanswered calls that the order contains now.
    tried: HashMap<(PlacedCalls, KeyStates), Vec<u128>>,
    steps: usize,
    best: SearchFailure,
}

#[derive(Clone, Copy)]
enum NextCall {
    OfClient(usize),
    Unknown(usize),
}

impl Search {
    fn new(first: KeyStates, calls: &[Call]) -> Self {
        let mut clients = vec![Vec::new(); MAX_CLIENTS];
        let mut unknown = Vec::new();
        for call in calls {
            if call.seen == ObservedAnswer::Nothing { unknown.push(*call) } else { clients[call.client].push(*call) }
        }
        clients.iter_mut().for_each(|calls| calls.sort_by_key(|call| call.start));
        let best = SearchFailure { tried: SearchExtent::All, explained: 0, state: first, stuck: Vec::new() };
        let (placed, tried) = (PlacedCalls::default(), HashMap::new());
        let mut search = Self { clients, unknown, placed, used: 0, tried, steps: 0, best };
        search.best.stuck = search.stuck();
        search
    }

    fn from(&mut self, state: KeyStates) -> bool {
        let candidates = self.candidates();
        if !candidates.iter().any(|next| matches!(next, NextCall::OfClient(_))) {
            return true;
        }
        self.steps += 1;
        if self.steps > MAX_SEARCH_STEPS {
            self.best.tried = SearchExtent::Some;
            return false;
        }
        let tried = self.tried.entry((self.placed, state)).or_default();
        if tried.iter().any(|used| used & !self.used == 0) {
            return false;
        }
        tried.push(self.used);
        let explained = self.placed.iter().map(|calls| usize::from(*calls)).sum();
        if explained > self.best.explained {
            self.best = SearchFailure { explained, state, stuck: self.stuck(), tried: self.best.tried };
        }
        // A call that changes nothing and whose answer matches the current state is appended to the order at once,
        // because a later position cannot help any other call.
        if let Some(next) = candidates.iter().copied().find(|next| self.fits_and_changes_nothing(*next, state)) {
            return self.with(next, state);
        }
        candidates.into_iter().any(|next| self.with(next, state))
    }

    fn fits_and_changes_nothing(&self, next: NextCall, state: KeyStates) -> bool {
        match next {
            NextCall::OfClient(client) => {
                self.next_of(client).is_some_and(|call| apply(state, call.action) == (call.seen, state))
            }
            NextCall::Unknown(_) => false,
        }
    }

    fn next_of(&self, client: usize) -> Option<&Call> {
        self.clients[client].get(usize::from(self.placed[client]))
    }

    /// The calls that may come next in the order: a call may come next if it began before every other remaining call
    /// ended. The calls are sorted by their end, because calls mostly happened in that order. Calls without an answer
    /// come last in the returned list.
    fn candidates(&self) -> Vec<NextCall> {
        let mut known: Vec<(u64, u64, usize)> = (0..MAX_CLIENTS)
            .filter_map(|client| self.next_of(client).map(|call| (call.end, call.start, client)))
            .collect();
        known.sort_unstable();
        let first_end = known.first().map_or(u64::MAX, |(end, ..)| *end);
        let known = known.into_iter().filter(|(_, start, _)| *start < first_end);
        let unknown = self.unknown.iter().enumerate();
        let unknown = unknown.filter(|(i, call)| self.used >> i & 1 == 0 && call.start < first_end);
        known.map(|(.., client)| NextCall::OfClient(client)).chain(unknown.map(|(i, _)| NextCall::Unknown(i))).collect()
    }

    /// For the failure report: the answered calls that may come next in the order.
    fn stuck(&self) -> Vec<Call> {
        let of = |next: &NextCall| match next {
            NextCall::OfClient(client) => self.next_of(*client).copied(),
            NextCall::Unknown(_) => None,
        };
        self.candidates().iter().filter_map(of).collect()
    }

    /// Appends the call `next` to the order and continues the search; returns true if the search completes an order.
    fn with(&mut self, next: NextCall, state: KeyStates) -> bool {
        match next {
            NextCall::OfClient(client) => {
                let Some(call) = self.next_of(client).copied() else { return false };
                let (seen, after) = apply(state, call.action);
                if seen != call.seen {
                    return false;
                }
                self.placed[client] += 1;
                let explained = self.from(after);
                self.placed[client] -= 1;
                explained
            }
            NextCall::Unknown(i) => {
                let (_, after) = apply(state, self.unknown[i].action);
                if after == state {
                    // Leave an unanswered call out of the order if it changes nothing, because such a call has no
                    // effect on the other calls.
                    return false;
                }
                self.used ^= 1 << i;
                let explained = self.from(after);
                self.used ^= 1 << i;
                explained
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(times: (u64, u64), action: Action, seen: ObservedAnswer) -> Call {
        // Each call is treated as the only call of a separate client, so only start and end times restrict the order.
        let client = usize::try_from(times.0).unwrap();
        Call { client, start: times.0, end: times.1, action, seen }
    }

    fn unknown(start: u64, action: Action) -> Call {
        call((start, 0), action, ObservedAnswer::Nothing)
    }

    fn get(times: (u64, u64), key: usize, value: Option<u32>) -> Call {
        call(times, Action::Get(key), ObservedAnswer::Value(value))
    }

    const DONE: ObservedAnswer = ObservedAnswer::Effect(Effect::Some);

    fn is_explained(calls: &[Call]) -> bool {
        explain(KeyStates::default(), calls).is_ok()
    }

    #[test]
    fn search_allows_either_order_when_calls_overlap() {
        let put = call((1, 6), Action::Put(0, 7), DONE);
        let (old, new) = (get((2, 3), 0, None), get((4, 5), 0, Some(7)));
        assert!(is_explained(&[put, old, new]));
        let moved = call((7, 8), Action::Move(0, 1, 9), DONE);
        let swapped = call((9, 10), Action::Swap(1, 9, 4), DONE);
        let gone = call((11, 12), Action::Delete(0), ObservedAnswer::Effect(Effect::None));
        assert!(is_explained(&[put, old, new, moved, swapped, gone]));
    }

    #[test]
    fn search_catches_stale_read() {
        let put = call((1, 2), Action::Put(0, 7), DONE);
        let stale = get((3, 4), 0, None);
        let found = explain(KeyStates::default(), &[put, stale]).unwrap_err();
        let expected = SearchFailure {
            tried: SearchExtent::All,
            explained: 1,
            state: [Some(7), None, None, None, None],
            stuck: vec![stale],
        };
        assert_eq!(found, expected);
        assert!(found.to_string().contains("no order explains more than 1 calls"), "{found}");
    }

    #[test]
    fn search_catches_reads_that_go_back() {
        let put = call((1, 9), Action::Put(0, 7), DONE);
        assert!(!is_explained(&[put, get((2, 3), 0, Some(7)), get((4, 5), 0, None)]));
    }

    #[test]
    fn search_catches_lost_update() {
        let put = call((1, 2), Action::Put(0, 7), DONE);
        let one = call((3, 6), Action::Swap(0, 7, 8), DONE);
        let two = call((4, 5), Action::Swap(0, 7, 9), DONE);
        assert!(!is_explained(&[put, one, two]));
    }

    #[test]
    fn search_catches_torn_move() {
        let put = call((1, 2), Action::Put(0, 7), DONE);
        let moved = call((3, 8), Action::Move(0, 1, 8), DONE);
        assert!(!is_explained(&[put, moved, get((4, 5), 0, None), get((6, 7), 1, None)]));
    }

    #[test]
    fn search_allows_unknown_call_late_or_never() {
        let put = unknown(1, Action::Put(0, 7));
        let (absent, there) = (get((2, 3), 0, None), get((4, 5), 0, Some(7)));
        assert!(is_explained(&[put, absent]));
        assert!(is_explained(&[put, absent, there]));
        assert!(!is_explained(&[put, there, get((6, 7), 0, None)]), "it does not go away again");
        assert!(!is_explained(&[unknown(6, Action::Put(0, 7)), there]), "it had not begun");
    }

    #[test]
    fn search_allows_unknown_call_only_once() {
        let put = unknown(1, Action::Put(0, 7));
        let seen = |start| get((start, start + 1), 0, Some(7));
        let deleted = call((4, 5), Action::Delete(0), DONE);
        assert!(is_explained(&[put, seen(2), deleted]));
        assert!(!is_explained(&[put, seen(2), deleted, seen(6)]));
    }

    /// Simulates clients of a correct store: each call takes effect at one moment between its start and its end. On
    /// average, one of `lost_one_in` writes gets no answer; it takes effect later or never.
    fn simulated(seed: u64, clients: usize, calls: usize, lost_one_in: usize) -> Vec<Call> {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut state, mut clock) = (KeyStates::default(), 0);
        let mut made = Vec::new();
        let mut left = vec![calls; clients];
        // For each client, the call in progress: its start, its action, and its answer once it has taken effect.
        let mut under_way: Vec<Option<(u64, Action, Option<ObservedAnswer>)>> = vec![None; clients];
        let mut late: Vec<Action> = Vec::new();
        while left.iter().any(|left| *left > 0) || under_way.iter().any(Option::is_some) {
            clock += 1;
            if !late.is_empty() && random.u8(..20) == 0 {
                state = apply(state, late.swap_remove(random.usize(..late.len()))).1;
            }
            let client = random.usize(..clients);
            match under_way[client] {
                None if left[client] == 0 => {}
                None => {
                    left[client] -= 1;
                    let (key, new) = (random.usize(..KEYS), u32::try_from(clock).unwrap());
                    let stored = state[key].unwrap_or(0);
                    let action = match random.u8(..10) {
                        0..=3 => Action::Get(key),
                        4 | 5 => Action::Put(key, new),
                        6 | 7 => Action::Swap(key, stored, new),
                        8 => Action::Delete(key),
                        _ => Action::Move(key, (key + 1) % KEYS, new),
                    };
                    under_way[client] = Some((clock, action, None));
                }
                Some((start, action, None))
                    if random.usize(..lost_one_in) == 0 && !matches!(action, Action::Get(_)) =>
                {
                    made.push(Call { client, start, end: 0, action, seen: ObservedAnswer::Nothing });
                    late.extend(random.bool().then_some(action));
                    under_way[client] = None;
                }
                Some((start, action, None)) => {
                    let seen;
                    (seen, state) = apply(state, action);
                    under_way[client] = Some((start, action, Some(seen)));
                }
                Some((start, action, Some(seen))) => {
                    made.push(Call { client, start, end: clock, action, seen });
                    under_way[client] = None;
                }
            }
        }
        made
    }

    /// Falsifies a simulated history: changes the answer of one read near its end to a number that no client wrote.
    fn spoiled(mut calls: Vec<Call>) -> Vec<Call> {
        let read = |call: &&mut Call| matches!(call.seen, ObservedAnswer::Value(Some(_)));
        let late = calls.iter_mut().rev().filter(read).nth(5).unwrap();
        late.seen = ObservedAnswer::Value(Some(u32::MAX));
        calls
    }

    #[test]
    fn search_is_quick_in_long_and_wide_histories() {
        for (clients, calls, lost) in [(4, 250, usize::MAX), (8, 38, usize::MAX), (8, 10, 10)] {
            for seed in 0..40 {
                let good = simulated(seed, clients, calls, lost);
                let mut search = Search::new(KeyStates::default(), &good);
                assert!(search.from(KeyStates::default()), "{clients} clients, seed {seed}: {}", search.best);
                assert!(
                    search.steps * 10 < MAX_SEARCH_STEPS,
                    "{} steps for {clients} clients, seed {seed}",
                    search.steps
                );
            }
        }
    }

    #[test]
    fn search_gives_up_wrong_history_in_time() {
        for (clients, calls, lost, tried) in [
            (4, 250, usize::MAX, SearchExtent::All),
            (8, 38, usize::MAX, SearchExtent::All),
            (8, 38, 12, SearchExtent::Some),
        ] {
            let mut search = Search::new(KeyStates::default(), &spoiled(simulated(1, clients, calls, lost)));
            assert!(!search.from(KeyStates::default()));
            assert_eq!(search.best.tried, tried, "{clients} clients");
        }
    }
}
