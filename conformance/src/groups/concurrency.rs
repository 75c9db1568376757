//! Tests several clients that use a store at the same time.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use kv::{Compare, CompareOp, ConditionalOutcome, Key, Kv, Op, Range, Revision, StoreExt, Target, Txn, Value};
use tokio::task::{JoinHandle, yield_now};

use crate::expect::{Checked, Failure, JudgedByRule, holds, same, some};
use crate::subject::{BoundedHandle, Branch, Subject, after, text, took};

/// Runs one client task for each number below `count`, and returns all results; every second client has its own store
/// handle.
async fn clients<T, F>(t: &Subject, count: usize, client: impl Fn(BoundedHandle, usize) -> F) -> Checked<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = Checked<T>> + Send + 'static,
{
    let mut tasks: Vec<JoinHandle<Checked<T>>> = Vec::with_capacity(count);
    for i in 0..count {
        let handle = if i % 2 == 0 { t.handle() } else { t.another().await? };
        tasks.push(tokio::spawn(client(handle, i)));
    }
    let mut results = Vec::with_capacity(count);
    for task in tasks {
        results.push(task.await??);
    }
    Ok(results)
}

fn number(kv: &Kv) -> Checked<i64> {
    let text = text(&kv.value);
    text.parse().map_err(|_| Failure::new("a counter's value", "a number", text))
}

/// Maximum number of attempts of an update that conflicts with other clients' updates.
const MAX_ATTEMPTS: usize = 2000;

fn attempts_exhausted<T>(what: &str) -> Checked<T> {
    Err(Failure::new(what, "success at last", format!("{MAX_ATTEMPTS} attempts that all failed")))
}

async fn increment(t: &BoundedHandle, key: &str) -> Checked<Revision> {
    for _ in 0..MAX_ATTEMPTS {
        let now = some("the counter", t.get(key).await?)?;
        let next = number(&now)? + 1;
        if let Some(at) = t.update_if(key, next.to_string(), now.mod_revision).await?.done() {
            return Ok(at);
        }
        yield_now().await;
    }
    attempts_exhausted("an increment")
}

pub(crate) async fn counter(t: Subject) -> Checked {
    const CLIENTS: usize = 8;
    const EACH: usize = 40;
    let base = t.put("counter", "0").await?;
    let revisions = clients(&t, CLIENTS, |t, _| async move {
        let mut revisions = Vec::with_capacity(EACH);
        for _ in 0..EACH {
            revisions.push(increment(&t, "counter").await?);
        }
        Ok(revisions)
    })
    .await?;
    let total = CLIENTS * EACH;
    same("the counter", t.value("counter").await?, Some(total.to_string()))?;
    let each_sorted = revisions.iter().all(|of_one| of_one.is_sorted());
    holds("ascending revisions for each client", each_sorted, &revisions)?;
    let different: BTreeSet<Revision> = revisions.into_iter().flatten().collect();
    same("how many different revisions there were", different.len(), total).of("R2")?;
    t.revision_is("the store's revision", t.revision().await?, after(base, total as i64)).of("R2")
}

pub(crate) async fn one_creator(t: Subject) -> Checked {
    const CLIENTS: usize = 16;
    for round in 0..10 {
        let key = format!("k/{round}");
        let made = clients(&t, CLIENTS, |t, i| {
            let key = key.clone();
            async move { Ok((i, t.create(key, format!("{i}")).await?)) }
        })
        .await?;
        let winners: Vec<(usize, Revision)> =
            made.iter().filter_map(|(i, outcome)| Some((*i, outcome.done()?))).collect();
        same("how many clients created the key", winners.len(), 1)?;
        let now = some("the key", t.get(key).await?)?;
        same(
            "value and revision of the key",
            (text(&now.value), now.mod_revision),
            (winners[0].0.to_string(), winners[0].1),
        )?;
        let answered = made.iter().all(|(_, outcome)| match outcome {
            ConditionalOutcome::Done(_) => true,
            ConditionalOutcome::Found(found) => found.as_ref() == Some(&now),
        });
        holds("what the others were told is there", answered, &now)?;
    }
    Ok(())
}

pub(crate) async fn write_skew(t: Subject) -> Checked {
    for round in 0..30 {
        let (left, right) = (format!("{round}/left"), format!("{round}/right"));
        let base = t.run([Op::put(left.as_str(), "on"), Op::put(right.as_str(), "on")]).await?.revision;
        // At the start, both keys have the value `on`. Each of the two clients sets a different key to `off` if neither
        // key has changed, so a correct store leaves one key `on`.
        let off = clients(&t, 2, |t, i| {
            let keys = [left.clone(), right.clone()];
            async move {
                let compares = keys.each_ref().map(|key| Compare::unchanged(key.as_str(), base));
                let op = Op::put(keys[i].as_str(), "off");
                Ok(t.txn(Txn::new().with_compares(compares).with_success([op])).await?.succeeded)
            }
        })
        .await?;
        same("how many of two transactions succeed", off.iter().filter(|succeeded| **succeeded).count(), 1)?;
        let on = t.read(Range::prefix(format!("{round}/"))).await?;
        same("how many are on", on.kvs.iter().filter(|kv| text(&kv.value) == "on").count(), 1)?;
    }
    Ok(())
}

pub(crate) async fn bank(t: Subject) -> Checked {
    const ACCOUNTS: usize = 10;
    const EACH: usize = 30;
    let account = |i: usize| format!("account/{i}");
    t.run((0..ACCOUNTS).map(|i| Op::put(account(i), "100"))).await?;
    let movers = clients(&t, 4, |t, i| async move {
        let mut random = Rng::with_seed(i as u64);
        for _ in 0..EACH {
            let from = random.usize(..ACCOUNTS);
            let to = (from + random.usize(1..ACCOUNTS)) % ACCOUNTS;
            transfer(&t, &account(from), &account(to), random.i64(1..20)).await?;
        }
        Ok(())
    });
    let reader = t.another().await?;
    let auditor = async {
        for _ in 0..60 {
            let found = reader.read(Range::prefix("account/")).await?;
            let sum: i64 = found.kvs.iter().map(number).sum::<Checked<i64>>()?;
            same("the sum of all accounts", sum, 100 * ACCOUNTS as i64)?;
        }
        Ok(())
    };
    let (moved, audited): (Checked<Vec<()>>, Checked) = futures::join!(movers, auditor);
    moved?;
    audited
}

async fn transfer(t: &BoundedHandle, from: &str, to: &str, amount: i64) -> Checked {
    for _ in 0..MAX_ATTEMPTS {
        let source = some("an account", t.get(from).await?)?;
        let target = some("an account", t.get(to).await?)?;
        let txn = Txn::new()
            .with_compares([&source, &target].map(|kv| Compare::unchanged(kv.key.clone(), kv.mod_revision)))
            .with_success([
                Op::put(from, (number(&source)? - amount).to_string()),
                Op::put(to, (number(&target)? + amount).to_string()),
            ]);
        if t.txn(txn).await?.succeeded {
            return Ok(());
        }
        yield_now().await;
    }
    attempts_exhausted("a transfer")
}

pub(crate) async fn reader_after_writer(t: Subject) -> Checked {
    let other = t.another().await?;
    for i in 0..60 {
        let at = t.put("k", format!("{i}")).await?;
        let reader = other.clone();
        let found = tokio::spawn(async move { reader.read(Range::key("k")).await }).await??;
        same("the write that was acknowledged before", found.kvs.first().map(|kv| kv.mod_revision), Some(at))?;
    }
    Ok(())
}

pub(crate) async fn revisions_never_go_back(t: Subject) -> Checked {
    let (writer, other) = (t.another().await?, t.another().await?);
    let writes = tokio::spawn(async move { writer.write_all(150, |i| Op::put(format!("k/{}", i % 5), "v")).await });
    let mut last = Revision::UNSET;
    while !writes.is_finished() {
        for reader in [&*t, &other] {
            let found = reader.read(Range::prefix("k/")).await?;
            holds("a revision not before the last one", found.revision >= last, &(last, found.revision))?;
            last = found.revision;
        }
        yield_now().await;
    }
    writes.await?
}

pub(crate) async fn dropped_calls(t: Subject) -> Checked {
    const CALLS: usize = 300;
    let base = t.revision().await?;
    let mut random = Rng::with_seed(9);
    for i in 0..CALLS {
        let txn = Txn::new().with_success([Op::put(format!("a/{i:03}"), "v"), Op::put(format!("b/{i:03}"), "v")]);
        let mut call = Box::pin(t.txn(txn));
        // The future of the store call is polled a random number of times, and then dropped.
        for _ in 0..random.usize(..4) {
            if futures::poll!(&mut call).is_ready() {
                break;
            }
            yield_now().await;
        }
    }
    // An abandoned write may still happen later, so the test reads all keys at a single revision.
    t.put("end", "v").await?;
    let kvs = t.list(Range::All).await?.kvs;
    let last = some("a write", kvs.iter().map(|kv| kv.mod_revision).max())?;
    let of = |name: &str| -> BTreeMap<String, Revision> {
        let named = kvs.iter().filter(|kv| kv.key.as_bytes().starts_with(name.as_bytes()));
        named.map(|kv| (kv.key.to_string().replace(name, ""), kv.mod_revision)).collect()
    };
    let (a, b) = (of("a/"), of("b/"));
    same("both keys of each call, at one revision", &a, &b).of("T2")?;
    let once = kvs.iter().all(|kv| kv.version == 1);
    holds("each call once or not at all", once, &kvs.len())?;
    let batches = t.watcher(Range::All, base.next()).await?.until(last).await?;
    same("as many revisions as calls that happened", batches.len(), a.len() + 1)
}

pub(crate) async fn block_of_addresses(t: Subject) -> Checked {
    const OWNERS: &[u8; 16] = b"abcdefghijklmnop";
    const TASKS: usize = OWNERS.len();
    const ADDRESSES: usize = 64;
    t.put("block", vec![b'.'; ADDRESSES]).await?;
    let taken = clients(&t, TASKS, |t, i| async move {
        let mut taken = Vec::new();
        for _ in 0..ADDRESSES / TASKS {
            taken.push(take_address(&t, OWNERS[i]).await?);
        }
        Ok(taken)
    })
    .await?;
    let different: BTreeSet<usize> = taken.iter().flatten().copied().collect();
    same("how many different addresses were given", different.len(), ADDRESSES)?;
    let block = some("the block", t.get("block").await?)?;
    for (i, taken) in taken.iter().enumerate() {
        let mine = taken.iter().all(|address| block.value.as_bytes().get(*address) == Some(&OWNERS[i]));
        holds("the block says who has which address", mine, &(i, taken, &block.value))?;
    }
    same("the version of the block", block.version, ADDRESSES as i64 + 1).of("R5")
}

/// Reserves the first free address in the test's address block (one byte of the key `block` per address), while other
/// clients do the same.
async fn take_address(t: &BoundedHandle, owner: u8) -> Checked<usize> {
    for _ in 0..MAX_ATTEMPTS {
        let block = some("the block", t.get("block").await?)?;
        let mut bytes = block.value.as_bytes().to_vec();
        let free = some("a free address", bytes.iter().position(|byte| *byte == b'.'))?;
        bytes[free] = owner;
        if t.update_if("block", bytes, block.mod_revision).await?.done().is_some() {
            return Ok(free);
        }
        yield_now().await;
    }
    attempts_exhausted("taking an address")
}

/// Creates a compare that holds if the key has this value.
fn holds_value(key: &str, value: &str) -> Compare {
    Compare::new(Range::Key(Key::from(key)), CompareOp::Equal, Target::Value(Value::from(value)))
}

pub(crate) async fn hand_over(t: Subject) -> Checked {
    const ROUNDS: usize = 40;
    t.put("turn", "0").await?;
    let counts = clients(&t, 2, |t, i| async move {
        let (mine, next) = (i.to_string(), (1 - i).to_string());
        let turn =
            || Txn::new().with_compares([holds_value("turn", &mine)]).with_success([Op::put("turn", next.as_str())]);
        let mut turns = 0;
        while turns < ROUNDS {
            // Retries are limited by time and not by number, because one client may retry many times before the task of
            // the competing client runs.
            let waiting = async {
                while !t.txn(turn()).await?.succeeded {
                    yield_now().await;
                }
                Checked::Ok(())
            };
            t.within("waiting for a turn", waiting).await??;
            turns += 1;
        }
        Ok(turns)
    })
    .await?;
    same("how many turns each had", counts, vec![ROUNDS, ROUNDS])?;
    let now = t.txn(Txn::new().with_compares([holds_value("turn", "0")])).await?;
    took("the turn goes back to the first", &now, Branch::Success)
}
