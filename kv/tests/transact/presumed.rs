//! Transactions that take keys to be absent without looking.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kv::wrap::{Counting, Fault, Faulty};
use kv::{Committed, Error, Key, Operation, Store, StoreExt, transact};

use super::{number, options, shared, value_of};

/// Adds one to the number, and notes the new one where mostly nothing is: `log/` and the number.
async fn increment_noting(store: &Arc<dyn Store>) -> Result<Committed<u64>, Error> {
    let key = Key::from("n");
    transact!(Arc::clone(store), options(), |tx| {
        let next = number(tx.get(&key).await?) + 1;
        tx.put(&key, next.to_string())?;
        let log = Key::from(format!("log/{next}"));
        tx.presume_absent(&log);
        let before = tx.get(&log).await?.map_or(0, |value| value.len());
        tx.put(&log, "x".repeat(before + 1))?;
        Ok(next)
    })
}

#[tokio::test]
async fn what_is_taken_to_be_absent_is_not_asked_for() {
    let counting = Counting::new(kv_mvcc::memory());
    let store = shared(&counting);
    for expected in 1..=3 {
        counting.take();
        let committed = increment_noting(&store).await.unwrap();
        assert_eq!((committed.value, committed.attempts), (expected, 1));
        assert_eq!(counting.take().round_trips(), 2);
    }
    // What is there after all costs an attempt, which asks for it.
    counting.put("log/4", "xx").await.unwrap();
    counting.take();
    let committed = increment_noting(&store).await.unwrap();
    assert_eq!((committed.value, committed.attempts), (4, 2));
    assert_eq!(counting.take().round_trips(), 5);
    assert_eq!(counting.get("log/4").await.unwrap().unwrap().value, "xxx".into());
}

#[tokio::test]
async fn before_the_first_read_it_is_read_along() {
    let counting = Counting::new(kv_mvcc::memory());
    counting.put("log", "old").await.unwrap();
    counting.take();
    let (log, other) = (Key::from("log"), Key::from("other"));
    let committed = transact!(shared(&counting), options(), |tx| {
        tx.presume_absent(&log);
        tx.prefetch(vec![log.clone(), other.clone()], Vec::new()).await?;
        // Known by now.
        tx.presume_absent(&log);
        tx.get(&log).await
    });
    assert_eq!(committed.unwrap().value, Some("old".into()));
    assert_eq!(counting.take().round_trips(), 1);
}

#[tokio::test]
async fn what_is_only_guessed_is_no_answer() {
    let store = kv_mvcc::memory();
    store.put("n", "1").await.unwrap();
    store.put("log", "old").await.unwrap();
    let (number, log) = (Key::from("n"), Key::from("log"));
    // A body that writes nothing, one that ends with an error, and one that deletes.
    let read = transact!(shared(&store), options(), |tx| {
        tx.get(&number).await?;
        tx.presume_absent(&log);
        tx.get(&log).await
    });
    assert_eq!(read.unwrap().value, Some("old".into()));
    type Refused = Box<dyn std::error::Error>;
    let refused: Result<Committed<()>, Refused> = transact!(shared(&store), options(), |tx| {
        tx.get(&number).await?;
        tx.presume_absent(&log);
        Err(format!("it is {:?}", tx.snapshot_get(&log).await?.map(|value| value.len())).into())
    });
    assert_eq!(refused.unwrap_err().to_string(), "it is Some(3)");
    // Without a guard of its own.
    transact!(shared(&store), options(), |tx| {
        tx.get(&number).await?;
        tx.presume_absent(&log);
        let seen = tx.snapshot_get(&log).await?;
        tx.put(&number, if seen.is_some() { "2" } else { "wrong" })
    })
    .unwrap();
    assert_eq!(value_of(&store, "n").await, 2);
    transact!(shared(&store), options(), |tx| {
        tx.get(&number).await?;
        tx.presume_absent(&log);
        tx.get(&log).await?;
        tx.delete(&log)
    })
    .unwrap();
    assert!(store.get("log").await.unwrap().is_none());
}

#[tokio::test]
async fn a_lost_reply_to_a_wrong_guess_is_settled_at_once() {
    for fault in [Fault::ReplyLost, Fault::RequestLost] {
        let inner = kv_mvcc::memory();
        inner.put("log/1", "x").await.unwrap();
        let committing = Arc::new(AtomicBool::new(false));
        let once = Arc::clone(&committing);
        let faulty = Faulty::new(inner.clone(), move |operation| {
            (operation == Operation::Txn && once.swap(false, SeqCst)).then_some(fault)
        });
        let (store, begun) = (shared(&faulty), Instant::now());
        let (number, log) = (Key::from("n"), Key::from("log/1"));
        let committed = transact!(Arc::clone(&store), options(), |tx| {
            tx.prefetch(vec![number.clone()], Vec::new()).await?;
            tx.presume_absent(&log);
            let there = tx.get(&log).await?.is_some();
            tx.put(&log, "y")?;
            committing.store(!there, SeqCst);
            Ok::<_, Error>(there)
        })
        .unwrap();
        assert!(committed.value, "{fault:?}");
        assert_eq!(inner.get("log/1").await.unwrap().unwrap().version, 2);
        assert!(begun.elapsed() < Duration::from_secs(10), "not when the time is over");
    }
}
