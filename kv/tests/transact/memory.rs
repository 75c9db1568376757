//! Transactions that begin from what was known at the last commit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv::wrap::{Counting, Fault, Faulty};
use kv::{Committed, Error, Key, Memory, Operation, Range, Store, StoreExt, TransactOptions, transact};

use super::{number, options, shared, value_of};

fn remembering(memory: &Arc<Memory>) -> TransactOptions {
    options().with_memory(Arc::clone(memory))
}

fn memory() -> Arc<Memory> {
    Arc::new(Memory::new(Duration::from_secs(60)))
}

/// Adds one to the number under a key, and notes in a key that is mostly new who has.
async fn increment_with(store: &Arc<dyn Store>, memory: &Arc<Memory>, key: &str) -> Result<Committed<u64>, Error> {
    increment_as(0, store, memory, key).await
}

async fn increment_as(
    who: usize,
    store: &Arc<dyn Store>,
    memory: &Arc<Memory>,
    key: &str,
) -> Result<Committed<u64>, Error> {
    let (key, range) = (Key::from(key), Range::prefix("around/"));
    transact!(Arc::clone(store), remembering(memory), |tx| {
        tx.prefetch(vec![key.clone()], vec![range.clone()]).await?;
        let around = tx.list_none_newer(&range).await?.len();
        let next = number(tx.snapshot_get(&key).await?) + 1;
        tx.get(&key).await?;
        tx.put(&key, next.to_string())?;
        let log = Key::from(format!("log/{next}"));
        tx.presume_absent(&log);
        tx.get(&log).await?;
        tx.put(&log, format!("{around} around, by {who}"))?;
        Ok(next)
    })
}

#[tokio::test]
async fn who_remembers_the_last_commit_asks_nothing_before_the_next() {
    let counting = Counting::new(kv_mvcc::memory());
    let (store, memory) = (shared(&counting), memory());
    for expected in 1..=3 {
        counting.take();
        assert_eq!(increment_with(&store, &memory, "n").await.unwrap().value, expected);
        // The first knows nothing: around and the number at once, the new key, the commit.
        assert_eq!(counting.take().round_trips(), if expected == 1 { 3 } else { 1 });
    }
    // Another writer, of the key or in the range: the commit fails, and all is read anew.
    counting.put("n", "10").await.unwrap();
    counting.take();
    let committed = increment_with(&store, &memory, "n").await.unwrap();
    assert_eq!((committed.value, counting.take().round_trips()), (11, 4));
    counting.put("around/new", "x").await.unwrap();
    assert_eq!(increment_with(&store, &memory, "n").await.unwrap().value, 12);
    assert_eq!(counting.get("log/12").await.unwrap().unwrap().value, "1 around, by 0".into());
    // What was thought to be absent is there.
    counting.put("log/13", "another's").await.unwrap();
    assert_eq!(increment_with(&store, &memory, "n").await.unwrap().value, 13);
    assert_eq!(counting.get("log/13").await.unwrap().unwrap().version, 2);
}

#[tokio::test]
async fn what_is_only_remembered_is_no_answer() {
    let inner = kv_mvcc::memory();
    let (store, memory) = (shared(&inner), memory());
    increment_with(&store, &memory, "n").await.unwrap();
    inner.put("n", "7").await.unwrap();
    let key = Key::from("n");
    // A body that writes nothing, and one that ends with an error, are about what is there now.
    let read = transact!(Arc::clone(&store), remembering(&memory), |tx| tx.get(&key).await);
    assert_eq!(read.unwrap().value, Some("7".into()));
    increment_with(&store, &memory, "n").await.unwrap();
    inner.put("n", "20").await.unwrap();
    type Refused = Box<dyn std::error::Error>;
    let refused: Result<Committed<()>, Refused> = transact!(Arc::clone(&store), remembering(&memory), |tx| {
        let now = number(tx.get(&key).await?);
        tx.put(&key, "0")?;
        Err(format!("it is {now}").into())
    });
    assert_eq!(refused.unwrap_err().to_string(), "it is 20");
    // Deleting what is remembered to be absent is no proof that it is.
    increment_with(&store, &memory, "n").await.unwrap();
    inner.put("log/100", "x").await.unwrap();
    let log = Key::from("log/100");
    transact!(Arc::clone(&store), remembering(&memory), |tx| {
        tx.presume_absent(&log);
        tx.get(&log).await?;
        tx.delete(&log)
    })
    .unwrap();
    assert!(inner.get("log/100").await.unwrap().is_none());
}

#[tokio::test]
async fn what_is_too_old_is_not_used() {
    let counting = Counting::new(kv_mvcc::memory());
    let (store, memory) = (shared(&counting), Arc::new(Memory::new(Duration::ZERO)));
    for _ in 0..2 {
        counting.take();
        increment_with(&store, &memory, "n").await.unwrap();
        assert_eq!(counting.take().round_trips(), 3);
    }
}

#[tokio::test]
async fn a_lost_reply_to_a_wrong_guess_is_settled_at_once() {
    for fault in [Fault::ReplyLost, Fault::RequestLost] {
        let (inner, memory) = (kv_mvcc::memory(), memory());
        let store = shared(&Faulty::script(inner.clone(), [None, None, Some(fault)]));
        increment_with(&store, &memory, "n").await.unwrap();
        inner.put("log/2", "another's").await.unwrap();
        let begun = Instant::now();
        assert_eq!(increment_with(&store, &memory, "n").await.unwrap().value, 2, "{fault:?}");
        assert_eq!(inner.get("log/2").await.unwrap().unwrap().version, 2);
        assert!(begun.elapsed() < Duration::from_secs(10), "not when the time is over");
    }
}

#[tokio::test(start_paused = true)]
async fn with_memories_too_lost_replies_are_settled_and_everybody_is_counted() {
    let inner = kv_mvcc::memory();
    let faults = [Fault::ReplyLost, Fault::RequestLost, Fault::NotSent];
    let random = std::sync::Mutex::new(fastrand::Rng::with_seed(7));
    let faulty = Faulty::new(inner.clone(), move |operation| {
        let mut random = random.lock().unwrap();
        (operation == Operation::Txn && random.u8(0..4) == 0).then(|| faults[random.usize(0..3)])
    });
    let store = shared(&faulty);
    let tasks: Vec<_> = (0..6)
        .map(|who| {
            let (store, memory) = (Arc::clone(&store), memory());
            tokio::spawn(async move {
                for _ in 0..40 {
                    increment_as(who, &store, &memory, "n").await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(value_of(&inner, "n").await, 240);
    assert_eq!(inner.list(Range::prefix("log/")).await.unwrap().kvs.len(), 240);
}
