//! Tests that long reads let commits run in between, and still return the state of a single revision.

use std::time::Duration;

use futures::StreamExt;
use kv::{
    Compare, Content, ErrorKind, Op, OpResult, Range, RangeRequest, Revision, Store, StoreExt, Txn, WatchRequest,
};
use kv_mvcc::{MvccStore, Options, Retention};
use tokio::sync::oneshot::error::TryRecvError;

use crate::wrapped::Wrapped;

const KEYS: usize = 1000;

/// Creates a store with the keys `k000` to `k999`, in which a complete scan takes 50 ms.
async fn slow() -> (Wrapped, MvccStore) {
    let table = Wrapped::default();
    let store = table.store(Options { retention: Retention::UNBOUNDED, ..Options::default() });
    for chunk in (0..KEYS).collect::<Vec<_>>().chunks(100) {
        let ops = chunk.iter().map(|i| Op::put(format!("k{i:03}"), "old"));
        store.txn(Txn::new().with_success(ops)).await.unwrap();
    }
    // Compaction shortens the log, so that the test's writes scan fewer rows of the slow table.
    let newest = store.put("k-last", "old").await.unwrap();
    store.compact(newest).await.unwrap();
    table.set_row_micros(50);
    (table, store)
}

/// Spawns a task that changes keys all over the store until the test stops it, and then returns the number of its
/// changes.
fn disturb(store: &MvccStore) -> (tokio::task::JoinHandle<u32>, tokio::sync::oneshot::Sender<()>) {
    let store = store.clone();
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let task = tokio::spawn(async move {
        let mut writes = 0;
        while stopped.try_recv() == Err(TryRecvError::Empty) {
            let at = (writes * 389) as usize % KEYS;
            let ops = [
                Op::put(format!("k{at:03}"), format!("new{writes}")),
                Op::delete(format!("k{:03}", (at + 7) % KEYS)),
                Op::put(format!("k{:03}+", (at + 3) % KEYS), "more"),
            ];
            store.txn(Txn::new().with_success(ops)).await.unwrap();
            writes += 1;
        }
        writes
    });
    (task, stop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_of_many_slices_is_one_state_and_lets_commits_by() {
    let (table, store) = slow().await;
    let (task, stop) = disturb(&store);
    for content in [Content::Full, Content::KeysOnly] {
        let read = RangeRequest::new(Range::All).with_content(content).with_limit(900);
        // On a busy machine, some reads may end before any write has run.
        let mut overlapped = false;
        for _ in 0..200 {
            let (views, before) = (table.views(), store.status().revision);
            let found = store.range(read.clone()).await.unwrap();
            overlapped = table.views() - views > 3 && store.status().revision > before;
            let past = store.range(read.clone().with_at(found.revision)).await.unwrap();
            assert!(past.revision >= found.revision && past.kvs == found.kvs, "the past at {}", found.revision);
            table.set_row_micros(0);
            let again = store.range(read.clone().with_at(found.revision)).await.unwrap();
            table.set_row_micros(50);
            assert_eq!((found.kvs.len(), found.count, found.more), (again.kvs.len(), again.count, again.more));
            assert!(found.kvs == again.kvs, "the state at {}", found.revision);
            if overlapped {
                break;
            }
        }
        assert!(overlapped, "reads go in slices, and commits get through in between");
    }
    drop(stop);
    assert!(task.await.unwrap() > 0);
    table.set_row_micros(0);
    store.verify().await.unwrap();
}

/// The table is so slow that, per view, a read processes fewer log rows than the next commit adds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_ends_when_log_grows_faster() {
    let (table, store) = slow().await;
    let at = store.status().revision;
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let writer = tokio::spawn({
        let store = store.clone();
        async move {
            let mut writes = 0;
            while stopped.try_recv() == Err(TryRecvError::Empty) {
                let ops = (0..120).map(|i| Op::put(format!("k{i:03}"), format!("new{writes}")));
                store.txn(Txn::new().with_success(ops)).await.unwrap();
                writes += 1;
            }
            writes
        }
    });
    while store.status().revision.get() < at.get() + 5 {
        tokio::task::yield_now().await;
    }
    table.set_row_micros(100);
    let read = store.range(RangeRequest::new(Range::All).with_at(at));
    let past = tokio::time::timeout(Duration::from_secs(60), read).await.expect("the read does not end").unwrap();
    assert_eq!(past.kvs.len(), KEYS + 1);
    assert!(past.kvs.iter().all(|kv| kv.value.as_bytes() == b"old"));
    drop(stop);
    assert!(writer.await.unwrap() > 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_transaction_is_one_state() {
    let (_table, store) = slow().await;
    let (task, stop) = disturb(&store);
    let txn = Txn::new().with_compares([Compare::absent("none")]).with_success([
        Op::range(Range::prefix("k")),
        Op::range(Range::key("k500")),
        Op::range(Range::All),
    ]);
    let answer = store.txn(txn).await.unwrap();
    drop(stop);
    task.await.unwrap();
    let [OpResult::Range(first), OpResult::Range(one), OpResult::Range(second)] = &answer.results[..] else {
        panic!("three reads")
    };
    assert!(first == second, "both are the state at {}", answer.revision);
    assert_eq!(one.kvs.first(), first.kvs.iter().find(|kv| kv.key == "k500".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_of_past_is_overtaken_by_compaction() {
    let (_table, store) = slow().await;
    let at = store.status().revision;
    let past = tokio::spawn({
        let store = store.clone();
        async move { store.range(RangeRequest::new(Range::All).with_at(at)).await }
    });
    let latest = tokio::spawn({
        let store = store.clone();
        async move { store.range(RangeRequest::new(Range::All)).await }
    });
    let (task, stop) = disturb(&store);
    while !past.is_finished() || !latest.is_finished() {
        let newest = store.status().revision;
        match store.compact(newest).await {
            Ok(()) => {}
            Err(error) => assert!(matches!(error.kind(), ErrorKind::Compacted { .. }), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stop);
    task.await.unwrap();
    let error = past.await.unwrap().map(|answer| answer.count).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Compacted { compact_revision } if *compact_revision > at));
    let latest = latest.await.unwrap().unwrap();
    assert!(latest.kvs.iter().all(|kv| kv.mod_revision <= latest.revision));
}

#[tokio::test]
async fn watch_gets_large_revision_in_one_batch() {
    let (table, store) = slow().await;
    table.set_row_micros(0);
    let backlog = store.status().revision;
    let value = vec![b'x'; 200_000];
    let ops = (0..7).map(|i| Op::put(format!("large{i}"), value.clone()));
    store.txn(Txn::new().with_success(ops)).await.unwrap();
    assert_eq!(store.delete(Range::All).await.unwrap(), KEYS as u64 + 8);
    table.set_row_micros(100);
    let request = WatchRequest::new(Range::All, backlog.next()).with_prev(kv::Prev::Return);
    let mut stream = store.watch(request).await.unwrap();
    let large = stream.next().await.unwrap().unwrap();
    assert_eq!(large.events.len(), 7);
    let gone = stream.next().await.unwrap().unwrap();
    assert_eq!((gone.revision, gone.events.len()), (large.revision.next(), KEYS + 8));
    assert!(gone.events.iter().all(|event| event.prev.as_ref().is_some_and(|prev| prev.key == event.kv.key)));
    assert!(gone.events.windows(2).all(|two| two[0].kv.key < two[1].kv.key));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_loses_no_event_and_delays_no_writer() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    let mut watchers = Vec::new();
    let stalled = store.watch(WatchRequest::new(Range::All, Revision::new(2))).await.unwrap();
    for _ in 0..20 {
        let mut stream = store.watch(WatchRequest::new(Range::prefix("k"), Revision::new(2))).await.unwrap();
        watchers.push(tokio::spawn(async move {
            let mut revisions = Vec::new();
            while revisions.len() < 500 {
                revisions.push(stream.next().await.unwrap().unwrap().revision.get());
            }
            revisions
        }));
    }
    for i in 0..500 {
        store.put(format!("k{}", i % 10), format!("{i}")).await.unwrap();
        store.put("other", "x").await.unwrap();
    }
    for watcher in watchers {
        let revisions = tokio::time::timeout(Duration::from_secs(60), watcher).await.unwrap().unwrap();
        assert_eq!(revisions, (0..500).map(|i| 2 + 2 * i).collect::<Vec<_>>());
    }
    let all: Vec<i64> = stalled.take(1000).map(|batch| batch.unwrap().revision.get()).collect().await;
    assert_eq!(all, (2..1002).collect::<Vec<_>>());
}
