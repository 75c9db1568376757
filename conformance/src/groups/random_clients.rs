//! Several clients make random calls on a few keys, in rounds with a pause after each round. Two independent checkers
//! judge the store's answers. The first checker (`Replay`) replays the recorded calls in the order of their revisions.
//! The second checker ignores revisions: for each round, it searches for an order of the calls that explains the values
//! in the answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use kv::wrap::FaultyStore;
use kv::{Compare, CompareOp, Error, Kv, Op, Outcome, Range, RangeRequest, Store, Target, Txn, Value};
use tokio::task::{spawn_blocking, yield_now};

use crate::expect::{Checked, Failure, holds};
use crate::groups::network::{NetworkQuality, is_injected, left_doubts};
use crate::history::wgl::{Action, Call, Effect, KEYS, KeyStates, ObservedAnswer, explain};
use crate::history::{CallHistory, Recorder, Replay, Summary, read_log};
use crate::seed::{seed, seeded};
use crate::subject::{BoundedHandle, Subject, read_result};

const CLIENTS: usize = 8;

/// The number of rounds, and the number of calls that each client makes per round. Each call of unknown outcome doubles
/// the work of the search for an order, so a round must not contain many calls of unknown outcome.
fn rounds(network: NetworkQuality) -> (usize, usize) {
    match network {
        NetworkQuality::Good => (12, 30),
        NetworkQuality::Bad => (30, 10),
    }
}

pub(crate) async fn random_clients(t: Subject) -> Checked {
    seeded(judge(&t, NetworkQuality::Good, seed())).await.map(drop)
}

pub(crate) async fn lost_replies(t: Subject) -> Checked {
    left_doubts(&seeded(judge(&t, NetworkQuality::Bad, seed())).await?)
}

async fn judge(t: &Subject, network: NetworkQuality, seed: u64) -> Checked<Summary> {
    let base = t.revision().await?;
    let history = Arc::new(CallHistory::new());
    let clock = Arc::new(AtomicU64::new(0));
    let mut clients = Vec::with_capacity(CLIENTS);
    for number in 0..CLIENTS {
        let random = seed.wrapping_add(number as u64);
        let store = network.between(t.another().await?.store(), random);
        let handle = t.over(Recorder::new(store.clone(), history.clone()));
        let random = Rng::with_seed(random);
        clients.push(RandomClient {
            store,
            handle,
            random,
            clock: clock.clone(),
            known: [0; KEYS],
            number,
            written: 0,
        });
    }
    let reader = t.over(Recorder::new(t.store(), history.clone()));
    let mut before = KeyStates::default();
    let (rounds, each) = rounds(network);
    for _ in 0..rounds {
        let calls;
        (clients, calls) = round(clients, each).await?;
        let (calls, after) = pause(&reader, &clock, calls).await?;
        let explained = spawn_blocking(move || explain(before, &calls)).await?;
        explained
            .map_err(|why| Failure::new("values that clients saw", "an order that explains them", why.to_string()))?;
        before = after;
    }
    let last = reader.run([Op::put("k/0", "0")]).await?.revision;
    let log = t.within("the log of all keys", read_log(&***t, Range::All, base.next(), last)).await??;
    Ok(Replay::new(base, []).judge(history.take(), &log)?)
}

/// Runs all clients concurrently. After a client's last call, the requests of this client that are still held in the
/// simulated network are delivered.
async fn round(clients: Vec<RandomClient>, each: usize) -> Checked<(Vec<RandomClient>, Vec<Call>)> {
    let running: Vec<_> = clients.into_iter().map(|client| tokio::spawn(client.run(each))).collect();
    let (mut clients, mut calls) = (Vec::with_capacity(CLIENTS), Vec::new());
    for client in running {
        let (client, made) = client.await??;
        client.store.deliver_held().await?;
        clients.push(client);
        calls.extend(made);
    }
    Ok((clients, calls))
}

/// Reads all keys while no client is writing. Both checkers (`Replay` and the search for an order) judge these reads,
/// too.
async fn pause(reader: &BoundedHandle, clock: &AtomicU64, mut calls: Vec<Call>) -> Checked<(Vec<Call>, KeyStates)> {
    let mut state = KeyStates::default();
    for (key, value) in state.iter_mut().enumerate() {
        let start = clock.fetch_add(1, Ordering::SeqCst);
        let found = reader.read(Range::key(name(key))).await?;
        let end = clock.fetch_add(1, Ordering::SeqCst);
        *value = number(found.kvs.first())?;
        calls.push(Call { client: CLIENTS, start, end, action: Action::Get(key), seen: ObservedAnswer::Value(*value) });
    }
    Ok((calls, state))
}

struct RandomClient {
    store: FaultyStore<Arc<dyn Store>>,
    handle: BoundedHandle,
    random: Rng,
    clock: Arc<AtomicU64>,
    /// For each key, the value that this client last saw. The client uses these values in its compare-and-swaps, so
    /// that some of them succeed.
    known: [u32; KEYS],
    number: usize,
    written: usize,
}

impl RandomClient {
    async fn run(mut self, each: usize) -> Checked<(Self, Vec<Call>)> {
        let mut calls = Vec::with_capacity(each);
        for _ in 0..each {
            let action = self.choose();
            let start = self.clock.fetch_add(1, Ordering::SeqCst);
            let answered = self.perform(action).await?;
            let end = self.clock.fetch_add(1, Ordering::SeqCst);
            // A call that certainly did not happen is not given to the search for an order.
            if let Some(seen) = answered {
                self.learn(action, seen);
                calls.push(Call { client: self.number, start, end, action, seen });
            }
            yield_now().await;
        }
        Ok((self, calls))
    }

    fn learn(&mut self, action: Action, seen: ObservedAnswer) {
        match (action, seen) {
            (Action::Get(key), ObservedAnswer::Value(Some(number))) => self.known[key] = number,
            (Action::Put(key, number) | Action::Swap(key, _, number) | Action::Move(_, key, number), _) => {
                self.known[key] = number;
            }
            _ => {}
        }
    }

    fn choose(&mut self) -> Action {
        self.written += 1;
        let new = u32::try_from(self.number * 1000 + self.written).unwrap_or(u32::MAX);
        let key = self.random.usize(..KEYS);
        let other = (key + self.random.usize(1..KEYS)) % KEYS;
        match self.random.u8(..10) {
            0..=3 => Action::Get(key),
            4 | 5 => Action::Put(key, new),
            6 | 7 => Action::Swap(key, self.known[key], new),
            8 => Action::Delete(key),
            _ => Action::Move(key, other, new),
        }
    }

    /// Performs one random action of a client. Returns the answer that the client saw, or `None` if the action
    /// certainly did not happen.
    async fn perform(&self, action: Action) -> Checked<Option<ObservedAnswer>> {
        let text = |number: u32| number.to_string();
        let txn = match action {
            Action::Get(key) => match self.handle.range(RangeRequest::new(Range::key(name(key)))).await {
                Ok(found) => return Ok(Some(ObservedAnswer::Value(number(found.kvs.first())?))),
                Err(error) => return unseen(error),
            },
            Action::Put(key, new) => Txn::new().with_success([Op::put(name(key), text(new))]),
            Action::Swap(key, old, new) => {
                Txn::new().with_compares([holds_number(&name(key), old)]).with_success([Op::put(name(key), text(new))])
            }
            Action::Delete(key) => Txn::new()
                .with_compares([is_there(&name(key))])
                .with_success([Op::delete(name(key))])
                .with_failure([Op::range(Range::key(name(key)))]),
            Action::Move(from, to, new) => Txn::new()
                .with_compares([is_there(&name(from))])
                .with_success([Op::delete(name(from)), Op::put(name(to), text(new))]),
        };
        let answer = match self.handle.txn(txn).await {
            Ok(answer) => answer,
            Err(error) => return unseen(error),
        };
        if matches!(action, Action::Delete(_)) && !answer.succeeded {
            let found = &read_result(&answer, 0)?.kvs;
            holds("nothing in the else-branch of a delete of an absent key", found.is_empty(), found)?;
        }
        Ok(Some(ObservedAnswer::Effect(Effect::from(answer.succeeded))))
    }
}

/// Converts the error of a call that failed because of the network: returns `None` if the call certainly did not
/// happen.
fn unseen(error: Error) -> Checked<Option<ObservedAnswer>> {
    match error.outcome() {
        _ if !is_injected(&error) => Err(error.into()),
        Outcome::NotApplied => Ok(None),
        Outcome::Unknown => Ok(Some(ObservedAnswer::Nothing)),
    }
}

fn name(key: usize) -> String {
    format!("k/{key}")
}

fn is_there(key: &str) -> Compare {
    Compare::new(Range::key(key), CompareOp::Greater, Target::Version(0))
}

fn holds_number(key: &str, number: u32) -> Compare {
    Compare::new(Range::key(key), CompareOp::Equal, Target::Value(Value::from(number.to_string())))
}

/// Parses the value of an entry, which clients write as a number.
fn number(kv: Option<&Kv>) -> Checked<Option<u32>> {
    let Some(kv) = kv else { return Ok(None) };
    let text = crate::subject::text(&kv.value);
    text.parse().map(Some).map_err(|_| Failure::new("a value that a client wrote", "a number", text))
}
