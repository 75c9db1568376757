//! Tests `peek`, which reads at the latest revision, in attempts that read at an older revision.

use kv::wrap::{CountingStore, Fault, FaultyStore};
use kv::{Committed, Content, Error, Key, Range, Revision, Store, StoreExt, Value, transact};

use super::{options, shared};

#[tokio::test]
async fn peek_guards_absent_key_without_reading_it() {
    let store = CountingStore::new(kv_mvcc::memory());
    let (there, new) = (Key::from("there"), Key::from("new"));
    store.put("there", "1").await.unwrap();
    store.take();
    let mut attempts = 0;
    let committed = transact!(shared(&store), options(), |tx| {
        attempts += 1;
        tx.snapshot_get(&there).await?;
        let found = tx.peek(std::slice::from_ref(&new), Content::KeysOnly).await?;
        if attempts == 1 {
            assert_eq!(found, [None]);
            store.put("new", "another's").await?;
        }
        let read = tx.get(&new).await?;
        tx.put(&new, "ours")?;
        Ok::<_, Error>(read)
    })
    .unwrap();
    assert_eq!((committed.value, committed.attempts), (Some("another's".into()), 2));
    let counts = store.take();
    // The test makes seven transactions: a first read and a peek in each of two attempts, a failed and a successful
    // commit, and the other writer's put. The only range request is made by `get` in the second attempt, whose peek
    // found the key.
    assert_eq!((counts.txns, counts.ranges), (7, 1));
}

#[tokio::test]
async fn peek_alone_is_no_answer_without_commit() {
    /// What the body of a read-only transaction read: the value, and the revision of the attempt.
    type Answer = (Option<Value>, Revision);
    let (other, key) = (Key::from("other"), Key::from("k"));
    for ending in ["a value", "an error", "a deletion of nothing"] {
        let store = kv_mvcc::memory();
        store.put("k", "old").await.unwrap();
        let saw: Result<Committed<Answer>, Box<dyn std::error::Error>> = transact!(shared(&store), options(), |tx| {
            tx.snapshot_get(&other).await?;
            // In the first attempt, the key `k` exists at the attempt's revision, but is already deleted when the
            // attempt peeks.
            store.delete(Range::key("k")).await?;
            tx.peek(std::slice::from_ref(&key), Content::KeysOnly).await?;
            let seen = (tx.get(&key).await?, tx.revision());
            match ending {
                "an error" => return Err(format!("{:?} at {}", seen.0.map(|value| value.len()), seen.1).into()),
                "a deletion of nothing" => tx.delete(&key)?,
                _ => {}
            }
            Ok(seen)
        });
        match saw {
            Ok(Committed { value: (seen, at), revision, attempts }) => {
                let then = store.range(kv::RangeRequest::new(Range::key("k")).with_at(at)).await.unwrap();
                assert_eq!(then.kvs.first().map(|kv| kv.value.clone()), seen, "{ending}");
                assert_eq!((revision, attempts), (at, 2), "{ending}");
            }
            Err(error) => assert_eq!(error.to_string(), "None at 3", "{ending}"),
        }
    }
}

#[tokio::test]
async fn peek_alone_makes_no_key_again() {
    let (other, key) = (Key::from("other"), Key::from("k"));
    for peeks_first in [false, true] {
        let store = kv_mvcc::memory();
        let mut attempts = 0;
        let committed = transact!(shared(&store), options(), |tx| {
            attempts += 1;
            tx.snapshot_get(&other).await?;
            if peeks_first {
                tx.peek(std::slice::from_ref(&key), Content::KeysOnly).await?;
            }
            if attempts == 1 {
                store.put("k", "another's").await?;
            }
            let peeked = tx.peek(std::slice::from_ref(&key), Content::Full).await?;
            let was_there = peeked[0].is_some();
            if attempts == 1 {
                // The key `k` is absent at the attempt's revision and at the commit, but exists in between.
                store.delete(Range::key("k")).await?;
            }
            tx.get(&key).await?;
            tx.put(&key, if was_there { "another's and ours" } else { "ours" })?;
            Ok::<_, Error>(())
        })
        .unwrap();
        assert_eq!(committed.attempts, 2, "peeks first: {peeks_first}");
        assert_eq!(store.get("k").await.unwrap().unwrap().value, "ours".into(), "peeks first: {peeks_first}");
    }
}

#[tokio::test(start_paused = true)]
async fn peek_settles_lost_reply_for_earlier_keys() {
    let inner = kv_mvcc::memory();
    inner.put("k", "old").await.unwrap();
    // One entry for each of the three transactions (first read, peek and commit): the fault to inject, or `None`.
    let store = FaultyStore::script(inner.clone(), [None, None, Some(Fault::ReplyLost)]);
    let key = Key::from("k");
    let committed = transact!(shared(&store), options(), |tx| {
        tx.snapshot_get(&"other".into()).await?;
        inner.delete(Range::key("k")).await?;
        assert_eq!(tx.peek(std::slice::from_ref(&key), Content::KeysOnly).await?, [None]);
        assert_eq!(tx.get(&key).await?, None);
        tx.put(&key, "ours")
    })
    .unwrap();
    assert_eq!((committed.revision, committed.attempts), (Revision::new(4), 1));
}

#[tokio::test]
async fn creation_guard_fails_for_new_keys_only() {
    // Each tuple has the write that another client makes between the transaction's read and its commit, and the number
    // of attempts that the transaction then takes.
    for (key, is_new, is_deletion, expected) in
        [("p/1", true, false, 2), ("p/0", false, false, 1), ("p/0", false, true, 1), ("q", true, false, 1)]
    {
        let store = kv_mvcc::memory();
        store.put("p/0", "old").await.unwrap();
        let (range, ours) = (Range::prefix("p/"), Key::from("ours"));
        let mut attempts = 0;
        let mut seen = Vec::new();
        let committed = transact!(shared(&store), options(), |tx| {
            attempts += 1;
            tx.get(&ours).await?;
            seen = tx.guard_creation(&range).await?;
            if attempts == 1 {
                match is_deletion {
                    true => drop(store.delete(Range::key(key)).await?),
                    false => drop(store.put(key, "another's").await?),
                }
            }
            tx.put(&ours, "made")?;
            Ok::<_, Error>(())
        })
        .unwrap();
        assert_eq!(committed.attempts, expected, "{key}, new: {is_new}, deleted: {is_deletion}");
        assert_eq!(seen.len(), usize::try_from(expected).unwrap(), "{key}");
    }
}

#[tokio::test]
async fn creation_guard_knows_what_was_read_along() {
    let store = CountingStore::new(kv_mvcc::memory());
    for key in ["p/1", "p/2", "q/1"] {
        store.put(key, "1").await.unwrap();
    }
    let ours = Key::from("ours");
    store.take();
    transact!(shared(&store), options(), |tx| {
        tx.prefetch(vec![ours.clone()], vec![kv::TxnRange::keys_of(Range::prefix("p/"))]).await?;
        tx.peek_with(&[Key::from("x")], Content::KeysOnly, &[Range::prefix("q/")]).await?;
        assert_eq!(tx.guard_creation(&Range::prefix("p/2")).await?, [Key::from("p/2")]);
        assert_eq!(tx.guard_creation(&Range::prefix("q/")).await?, [Key::from("q/1")]);
        tx.get(&ours).await?;
        tx.put(&ours, "made")?;
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(store.take().round_trips(), 3, "two reads and the commit");
}

#[tokio::test]
async fn creation_guard_takes_4096_keys_at_most() {
    let store = kv_mvcc::memory();
    for number in 0..=kv::MAX_CREATION_GUARDED_KEYS {
        store.put(format!("p/{number}"), "1").await.unwrap();
    }
    let done = transact!(shared(&store), options(), |tx| tx.guard_creation(&Range::prefix("p/")).await);
    let kind = done.map(|_: Committed<Vec<Key>>| ()).unwrap_err().kind().clone();
    assert!(matches!(kind, kv::ErrorKind::ReadSetTooLarge { guards: 4097 }), "{kind:?}");
}
