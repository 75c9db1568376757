//! Random calls by several clients at once, and whether any order explains what they saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use kv::{Compare, CompareOp, Kv, Op, Range, RangeRequest, Target, Txn, Value};
use tokio::task::{spawn_blocking, yield_now};

use crate::expect::{Checked, Failure, holds};
use crate::groups::random::{SEED, seed};
use crate::linear::{Action, Call, KEYS, Seen, revisions_explain, some_order_explains};
use crate::subject::{Handle, Subject, read_result};

const CLIENTS: u32 = 8;
const CALLS: u32 = 30;

pub(crate) async fn random_clients(t: Subject) -> Checked {
    let seed = seed()?;
    judge(&t, seed).await.map_err(|failure| failure.with_note(&format!("{SEED}={seed} makes the same calls")))
}

async fn judge(t: &Subject, seed: u64) -> Checked {
    let base = t.revision().await?;
    let clock = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for client in 0..CLIENTS {
        let handle = t.another().await?;
        let random = Rng::with_seed(seed.wrapping_add(client.into()));
        tasks.push(tokio::spawn(Client { handle, random, number: client, clock: clock.clone() }.run()));
    }
    let mut calls = Vec::new();
    for task in tasks {
        calls.extend(task.await??);
    }
    let claimed = revisions_explain(&calls, base.get());
    holds("an order of revisions that explains what every client saw", claimed.is_ok(), &claimed)?;
    let explained = spawn_blocking(move || some_order_explains(&calls)).await?;
    holds("some order that explains what every client saw", explained, &"none")
}

struct Client {
    handle: Handle,
    random: Rng,
    number: u32,
    clock: Arc<AtomicU64>,
}

impl Client {
    async fn run(mut self) -> Checked<Vec<Call>> {
        let mut calls = Vec::new();
        // What this client last saw at each key, so that some of its swaps succeed.
        let mut known = [0; KEYS];
        for round in 0..CALLS {
            let action = self.choose(&known, self.number * 1000 + round + 1);
            let start = self.clock.fetch_add(1, Ordering::SeqCst);
            let (seen, revision) = self.perform(action).await?;
            let end = self.clock.fetch_add(1, Ordering::SeqCst);
            match (action, seen) {
                (Action::Get(key), Seen::Value(Some(number))) => known[key] = number,
                (Action::Put(key, number) | Action::Swap(key, _, number) | Action::Move(_, key, number), _) => {
                    known[key] = number;
                }
                _ => {}
            }
            calls.push(Call { start, end, action, seen, revision });
            yield_now().await;
        }
        Ok(calls)
    }

    fn choose(&mut self, known: &[u32; KEYS], new: u32) -> Action {
        let key = self.random.usize(..KEYS);
        let other = (key + self.random.usize(1..KEYS)) % KEYS;
        match self.random.u8(..10) {
            0..=3 => Action::Get(key),
            4 | 5 => Action::Put(key, new),
            6 | 7 => Action::Swap(key, known[key], new),
            8 => Action::Delete(key),
            _ => Action::Move(key, other, new),
        }
    }

    /// Carries the action out: what was seen, and at which revision.
    async fn perform(&self, action: Action) -> Checked<(Seen, i64)> {
        let name = |key: usize| format!("k/{key}");
        let text = |number: u32| number.to_string();
        let txn = match action {
            Action::Get(key) => {
                let found = self.handle.range(RangeRequest::new(Range::key(name(key)))).await?;
                return Ok((Seen::Value(number(found.kvs.first())?), found.revision.get()));
            }
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
        let answer = self.handle.txn(txn).await?;
        if matches!(action, Action::Delete(_)) && !answer.succeeded {
            let found = &read_result(&answer, 0)?.kvs;
            holds("nothing in the else-branch of a delete of an absent key", found.is_empty(), found)?;
        }
        Ok((Seen::Effect(answer.succeeded.into()), answer.revision.get()))
    }
}

fn is_there(key: &str) -> Compare {
    Compare::new(Range::key(key), CompareOp::Greater, Target::Version(0))
}

fn holds_number(key: &str, number: u32) -> Compare {
    Compare::new(Range::key(key), CompareOp::Equal, Target::Value(Value::from(number.to_string())))
}

/// The number that an entry holds.
fn number(kv: Option<&Kv>) -> Checked<Option<u32>> {
    let Some(kv) = kv else { return Ok(None) };
    let text = crate::subject::text(&kv.value);
    text.parse().map(Some).map_err(|_| Failure::new("a value that a client wrote", "a number", text))
}
