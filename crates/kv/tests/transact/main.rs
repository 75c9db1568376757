//! Tests `transact!` on the in-memory store, with and without injected faults.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hints;
mod settling;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use kv::wrap::{CountingStore, Fault, FaultyStore};
use kv::{
    Committed, Content, Deadline, Error, ErrorKind, InvalidArgument, Key, Op, Operation, Outcome, Range, Revision,
    Store, StoreExt, TransactOptions, Transaction, Txn, TxnRange, Value, transact,
};

fn options() -> TransactOptions {
    TransactOptions::new(Deadline::after(Duration::from_secs(20)))
}

fn number(value: Option<Value>) -> u64 {
    value.map_or(0, |value| std::str::from_utf8(value.as_bytes()).unwrap().parse().unwrap())
}

fn shared(store: &(impl Store + Clone)) -> Arc<dyn Store> {
    Arc::new(store.clone())
}

async fn increment(store: &Arc<dyn Store>, key: &str) -> Result<Committed<u64>, Error> {
    let key = Key::from(key);
    transact!(Arc::clone(store), options(), |tx| {
        let next = number(tx.get(&key).await?) + 1;
        tx.put(&key, next.to_string())?;
        Ok(next)
    })
}

async fn value_of(store: &impl Store, key: &str) -> u64 {
    number(store.get(key).await.unwrap().map(|kv| kv.value))
}

#[tokio::test(flavor = "multi_thread")]
async fn transact_counts_concurrent_increments() {
    let store: Arc<dyn Store> = Arc::new(kv_mvcc::memory());
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                for _ in 0..50 {
                    increment(&store, "n").await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(value_of(&store, "n").await, 400);
}

#[tokio::test]
async fn transact_reads_one_revision_and_prefetches_in_one_trip() {
    let store = CountingStore::new(kv_mvcc::memory());
    store.put("a", "1").await.unwrap();
    store.put("p/1", "x").await.unwrap();
    store.take();
    let committed = transact!(shared(&store), options(), |tx| {
        tx.prefetch(vec![Key::from("a"), Key::from("b")], vec![Range::prefix("p/").into()]).await?;
        store.put("a", "2").await?;
        let a = number(tx.snapshot_get(&"a".into()).await?);
        assert!(tx.get(&"b".into()).await?.is_none());
        assert_eq!(tx.list(&Range::prefix("p/")).await?.len(), 1);
        // `prefetch` did not read `Range::All`, so `snapshot_list` reads it now, at the revision that `prefetch` fixed.
        let all = tx.snapshot_list(&Range::All).await?;
        assert_eq!(all[0], (Key::from("a"), Value::from("1")));
        Ok::<_, Error>(a)
    })
    .unwrap();
    assert_eq!((committed.value, committed.revision), (1, Revision::new(3)));
    let counts = store.take();
    assert_eq!((counts.txns, counts.ranges), (2, 1), "one prefetch, the write in between, and one read");
}

#[tokio::test]
async fn transact_counts_only_attempts_that_were_overtaken() {
    let inner = kv_mvcc::memory();
    // The first commit is never sent; before the second and the third, another writer is quicker.
    let store = FaultyStore::script(inner.clone(), [None, Some(Fault::NotSent)]);
    let mut counts = Vec::new();
    transact!(shared(&store), options(), |tx| {
        let key = Key::from("k");
        tx.get(&key).await?;
        if [1, 2].contains(&counts.len()) {
            inner.put("k", "theirs").await?;
        }
        counts.push(tx.times_overtaken());
        tx.put(&key, "ours")?;
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(counts, [0, 0, 1, 2]);
}

#[tokio::test]
async fn transact_sees_its_own_writes() {
    let store = kv_mvcc::memory();
    store.put("p/old", "1").await.unwrap();
    transact!(shared(&store), options(), |tx| {
        let (old, new) = (Key::from("p/old"), Key::from("p/new"));
        tx.get(&old).await?;
        tx.get(&new).await?;
        tx.delete(&old)?;
        tx.put(&new, "2")?;
        assert_eq!(tx.get(&old).await?, None);
        assert_eq!(tx.get(&new).await?, Some("2".into()));
        assert_eq!(tx.list(&Range::prefix("p/")).await?, [(new.clone(), Value::from("2"))]);
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(store.list(Range::All).await.unwrap().kvs.len(), 1);
}

/// Runs a transaction body that reads with `read` while another writer interferes once, and returns the number of
/// attempts.
async fn attempts_with(
    read: impl AsyncFn(&mut Transaction) -> Result<(), Error>,
    interfere: impl AsyncFn(&kv_mvcc::MvccStore),
) -> u32 {
    let store = kv_mvcc::memory();
    for key in ["p/1", "p/2"] {
        store.put(key, "x").await.unwrap();
    }
    let first = AtomicU32::new(0);
    let target = Key::from("target");
    transact!(shared(&store), options(), |tx| {
        read(tx).await?;
        tx.get(&target).await?;
        if first.fetch_add(1, SeqCst) == 0 {
            interfere(&store).await;
        }
        tx.put(&target, "done")
    })
    .unwrap()
    .attempts
}

#[tokio::test]
async fn transact_guards_notice_conflicts() {
    let prefix = Range::prefix("p/");
    let list = async |tx: &mut Transaction| tx.list(&prefix).await.map(drop);
    let snapshot = async |tx: &mut Transaction| tx.snapshot_list(&prefix).await.map(drop);
    let change = async |store: &kv_mvcc::MvccStore| {
        store.put("p/1", "y").await.unwrap();
    };
    let add = async |store: &kv_mvcc::MvccStore| {
        store.put("p/3", "y").await.unwrap();
    };
    let remove = async |store: &kv_mvcc::MvccStore| {
        store.delete(Range::key("p/2")).await.unwrap();
    };
    let elsewhere = async |store: &kv_mvcc::MvccStore| {
        store.put("q", "y").await.unwrap();
    };
    assert_eq!(attempts_with(list, change).await, 2);
    assert_eq!(attempts_with(list, add).await, 2);
    assert_eq!(attempts_with(list, remove).await, 1, "a key less does no harm");
    assert_eq!(attempts_with(list, elsewhere).await, 1);
    assert_eq!(attempts_with(snapshot, change).await, 1);
}

#[tokio::test]
async fn transact_is_error_when_guards_are_too_many() {
    let store = kv_mvcc::memory();
    for i in 0..65 {
        store.put(format!("p/{i}"), "x").await.unwrap();
    }
    let result = transact!(shared(&store), options(), |tx| tx.list(&Range::prefix("p/")).await);
    assert_eq!(*result.unwrap_err().kind(), ErrorKind::ReadSetTooLarge { guards: 65 });
    let guarding = async |count: usize| {
        transact!(shared(&store), options(), |tx| {
            for i in 0..count {
                let key = Key::from(format!("q/{i}"));
                tx.get(&key).await?;
                tx.put(&key, "x")?;
            }
            Ok::<_, Error>(())
        })
    };
    assert_eq!(*guarding(121).await.unwrap_err().kind(), ErrorKind::ReadSetTooLarge { guards: 121 });
    guarding(120).await.unwrap();
}

#[tokio::test]
async fn transact_keys_and_emptiness_are_of_attempt() {
    let store = kv_mvcc::memory();
    store.put("p/1", "x").await.unwrap();
    transact!(shared(&store), options(), |tx| {
        let (some, none) = (Range::prefix("p/"), Range::prefix("q/"));
        assert_eq!(tx.snapshot_keys(&some).await?, [Key::from("p/1")]);
        store.delete(Range::key("p/1")).await?;
        store.put("q/1", "x").await?;
        assert!(!tx.snapshot_is_empty(&some).await?);
        assert!(tx.snapshot_is_empty(&none).await?);
        assert_eq!(tx.snapshot_keys(&none).await?, []);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[tokio::test]
async fn transact_refuses_blind_write() {
    let store = kv_mvcc::memory();
    let result = transact!(shared(&store), options(), |tx| tx.put(&Key::from("k"), "v")).unwrap_err();
    assert_eq!(*result.kind(), ErrorKind::InvalidArgument(InvalidArgument::UnguardedWrite("k".into())));
}

#[tokio::test]
async fn transact_writes_nothing_when_body_fails() {
    let store = kv_mvcc::memory();
    let result: Result<Committed<()>, Error> = transact!(shared(&store), options(), |tx| {
        tx.get(&"k".into()).await?;
        tx.put(&"k".into(), "v")?;
        Err(Error::new(ErrorKind::Unsupported, Operation::Transact, "test"))
    });
    assert_eq!(*result.unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(store.get("k").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn transact_settles_lost_replies_and_requests() {
    // The faults of each attempt are for its transactions in order: the first reads, and the second commits.
    for faults in [
        vec![None, Some(Fault::ReplyLost)],
        vec![None, Some(Fault::RequestLost)],
        vec![None, Some(Fault::ReplyLost), Some(Fault::ReplyLost), Some(Fault::RequestLost)],
        vec![None, Some(Fault::RequestLost), Some(Fault::ReplyLost), Some(Fault::NotSent)],
        vec![Some(Fault::ReplyLost), Some(Fault::NotSent), None, Some(Fault::NotSent)],
    ] {
        let inner = kv_mvcc::memory();
        let store = FaultyStore::script(inner.clone(), faults.clone());
        let committed = increment(&shared(&store), "n").await.unwrap();
        assert_eq!(value_of(&inner, "n").await, 1, "{faults:?}");
        let kv = inner.get("n").await.unwrap().unwrap();
        assert_eq!(committed.revision, kv.mod_revision, "{faults:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn transact_writes_once_when_write_lands_late() {
    let inner = kv_mvcc::memory();
    inner.put("n", "5").await.unwrap();
    let store = FaultyStore::script(inner.clone(), [None, Some(Fault::Held)]);
    assert_eq!(increment(&shared(&store), "n").await.unwrap().value, 6);
    let late = store.deliver_held().await.unwrap();
    assert_eq!(late.iter().map(|answer| answer.succeeded).collect::<Vec<_>>(), [false]);
    assert_eq!(value_of(&inner, "n").await, 6);
}

#[tokio::test(start_paused = true)]
async fn transact_tells_other_writer_from_lost_reply() {
    // The commit under test is lost on its way to the store, and another writer changes the key before the commit is
    // sent again.
    let inner = kv_mvcc::memory();
    inner.put("n", "5").await.unwrap();
    let other = inner.clone();
    let calls = AtomicU32::new(0);
    let lost = FaultyStore::new(inner.clone(), move |operation| {
        (operation == Operation::Txn && calls.fetch_add(1, SeqCst) == 1).then_some(Fault::RequestLost)
    });
    let store = Meddler { inner: lost, other, at: 1, calls: Arc::default() };
    let committed = increment(&shared(&store), "n").await.unwrap();
    assert_eq!((committed.value, committed.attempts), (101, 2));
    assert_eq!(value_of(&inner, "n").await, 101);
}

#[tokio::test(start_paused = true)]
async fn transact_settles_lost_deletion_either_way() {
    let inner = kv_mvcc::memory();
    inner.put("k", "v").await.unwrap();
    let store = FaultyStore::script(inner.clone(), [None, Some(Fault::ReplyLost)]);
    let key = Key::from("k");
    let committed = transact!(shared(&store), options(), |tx| {
        tx.get(&key).await?;
        tx.delete(&key)
    })
    .unwrap();
    assert_eq!((committed.revision, committed.attempts), (Revision::new(3), 1));
}

#[tokio::test(start_paused = true)]
async fn transact_stays_unknown_when_unsettled() {
    let inner = kv_mvcc::memory();
    let calls = AtomicU32::new(0);
    let store = FaultyStore::new(inner, move |operation| {
        (operation == Operation::Txn && calls.fetch_add(1, SeqCst) > 0).then_some(Fault::RequestLost)
    });
    let options = TransactOptions::new(Deadline::after(Duration::from_millis(200)));
    let key = Key::from("k");
    let error = transact!(shared(&store), options, |tx| {
        tx.get(&key).await?;
        tx.put(&key, "v")
    })
    .unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
}

#[tokio::test(start_paused = true)]
async fn transact_names_last_refusal_when_giving_up() {
    let store =
        FaultyStore::new(kv_mvcc::memory(), |operation| (operation == Operation::Txn).then_some(Fault::NotSent));
    let options = TransactOptions::new(Deadline::after(Duration::from_millis(100)));
    let error = transact!(shared(&store), options, |tx| tx.get(&"k".into()).await).unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied));
}

#[tokio::test]
async fn transact_starts_anew_when_history_moves_on() {
    let store = kv_mvcc::memory();
    let revision = store.put("a", "1").await.unwrap();
    let first = AtomicU32::new(0);
    let committed = transact!(shared(&store), options(), |tx| {
        tx.snapshot_get(&"a".into()).await?;
        if first.fetch_add(1, SeqCst) == 0 {
            let newer = store.put("a", "2").await?;
            store.compact(newer).await?;
            assert!(newer > revision);
        }
        tx.snapshot_get(&"b".into()).await
    })
    .unwrap();
    assert_eq!(committed.attempts, 2);
}

#[tokio::test]
async fn transact_lists_keys_after_prefetch_of_their_count() {
    let store = kv_mvcc::memory();
    store.put("p/1", "x").await.unwrap();
    transact!(shared(&store), options(), |tx| {
        let range = Range::prefix("p/");
        tx.prefetch(Vec::new(), vec![TxnRange::new(range.clone()).with_content(Content::CountOnly)]).await?;
        assert_eq!(tx.snapshot_list(&range).await?.len(), 1);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[tokio::test]
async fn transact_knows_absent_keys_from_listing() {
    let store = CountingStore::new(kv_mvcc::memory());
    store.put("p/1", "x").await.unwrap();
    store.take();
    transact!(shared(&store), options(), |tx| {
        tx.prefetch(Vec::new(), vec![TxnRange::keys_of(Range::prefix("p/"))]).await?;
        let absent = Key::from("p/2");
        assert_eq!(tx.get(&absent).await?, None);
        assert_eq!(store.take().round_trips(), 1);
        assert_eq!(tx.get(&"p/1".into()).await?, Some("x".into()));
        assert_eq!(store.take().round_trips(), 1);
        tx.put(&absent, "new")
    })
    .unwrap();
    assert_eq!(store.take().round_trips(), 1);
}

/// A store wrapper in which another writer adds 100 to the number in a key after a given transaction.
#[derive(Clone, Debug)]
struct Meddler<S> {
    inner: S,
    other: kv_mvcc::MvccStore,
    at: u32,
    calls: Arc<AtomicU32>,
}

#[async_trait::async_trait]
impl<S: Store> Store for Meddler<S> {
    async fn range(&self, request: kv::RangeRequest) -> kv::Result<kv::RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<kv::TxnResponse> {
        let answer = self.inner.txn(txn).await;
        if self.calls.fetch_add(1, SeqCst) == self.at {
            self.other.txn(Txn::new().with_success([Op::put("n", "100")])).await?;
        }
        answer
    }

    async fn watch(&self, request: kv::WatchRequest) -> kv::Result<kv::WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}
