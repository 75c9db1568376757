//! Tests the four methods of the trait `Store` in cases that are clearer here than in the conformance suite.

use std::time::Duration;

use futures::StreamExt;
use kv::{
    Batch, Compare, CompareOp, Content, ErrorKind, EventKind, Op, OpResult, Operation, Outcome, Prev, Range,
    RangeRequest, Revision, Store, StoreExt, Target, Txn, TxnRange, WatchRequest, WatchStream,
};
use kv_mvcc::{MemoryTable, MvccStore, Options, memory};

async fn next(stream: &mut WatchStream) -> Batch {
    tokio::time::timeout(Duration::from_secs(10), stream.next()).await.unwrap().unwrap().unwrap()
}

async fn end(stream: &mut WatchStream) -> ErrorKind {
    let item = tokio::time::timeout(Duration::from_secs(10), stream.next()).await.unwrap();
    let kind = item.unwrap().unwrap_err().kind().clone();
    assert!(stream.next().await.is_none(), "an error ends the stream");
    kind
}

fn watch_all(start: i64) -> WatchRequest {
    WatchRequest::new(Range::All, Revision::new(start)).with_prev(Prev::Return)
}

#[tokio::test]
async fn writes_count_revisions_and_versions() {
    let store = memory();
    assert_eq!(store.status().revision, Revision::new(1));
    assert_eq!(store.put("k", "a").await.unwrap(), Revision::new(2));
    assert_eq!(store.put("k", "a").await.unwrap(), Revision::new(3));
    let kv = store.get("k").await.unwrap().unwrap();
    assert_eq!((kv.create_revision.get(), kv.mod_revision.get(), kv.version), (2, 3, 2));
    assert_eq!(store.delete(Range::key("missing")).await.unwrap(), 0);
    assert_eq!(store.status().revision, Revision::new(3));
    assert_eq!(store.delete(Range::key("k")).await.unwrap(), 1);
    store.put("k", "").await.unwrap();
    let kv = store.get("k").await.unwrap().unwrap();
    assert_eq!((kv.create_revision.get(), kv.mod_revision.get(), kv.version), (5, 5, 1));
    assert!(kv.value.is_empty());
    assert_eq!(store.status().live, 1);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn operations_see_earlier_ones_but_compares_do_not() {
    let store = memory();
    store.put("a", "1").await.unwrap();
    let txn = Txn::new()
        .with_compares([Compare::new(Range::key("a"), CompareOp::Equal, Target::Value("1".into()))])
        .with_success([
            Op::range(Range::All),
            Op::put("b", "2").with_prev(),
            Op::delete("a").with_prev(),
            Op::Range(TxnRange::new(Range::All).with_limit(1).with_content(Content::KeysOnly)),
            Op::delete("a"),
        ]);
    let answer = store.txn(txn).await.unwrap();
    assert!(answer.succeeded);
    assert_eq!(answer.revision, Revision::new(3));
    let [OpResult::Range(first), OpResult::Put { prev: None }, OpResult::Delete { count: 1, prevs }, rest @ ..] =
        &answer.results[..]
    else {
        panic!("{answer:?}")
    };
    assert_eq!((first.count, first.revision), (1, Revision::new(3)));
    assert_eq!(prevs[0].value, "1".into());
    let [OpResult::Range(second), OpResult::Delete { count: 0, prevs: none }] = rest else { panic!("{answer:?}") };
    assert!(none.is_empty());
    assert_eq!((second.count, second.more, second.kvs[0].key.clone()), (1, false, "b".into()));
    assert_eq!(second.kvs[0].mod_revision, Revision::new(3));
    assert!(second.kvs[0].value.is_empty());
}

#[tokio::test]
async fn past_is_readable_until_compacted() {
    let store = memory();
    for value in ["1", "2", "3"] {
        store.put("k", value).await.unwrap();
    }
    store.delete(Range::key("k")).await.unwrap();
    store.put("other", "x").await.unwrap();
    let at = |revision| RangeRequest::new(Range::key("k")).with_at(Revision::new(revision));
    for (revision, value) in [(1, None), (2, Some("1")), (3, Some("2")), (4, Some("3")), (5, None), (6, None)] {
        let answer = store.range(at(revision)).await.unwrap();
        assert_eq!(answer.revision, Revision::new(6));
        assert_eq!(answer.kvs.first().map(|kv| kv.value.clone()), value.map(Into::into), "at {revision}");
    }
    assert_eq!(*store.range(at(7)).await.unwrap_err().kind(), ErrorKind::FutureRevision);
    store.compact(Revision::new(4)).await.unwrap();
    let error = store.range(at(3)).await.unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::Compacted { compact_revision: Revision::new(4) });
    assert_eq!(store.range(at(4)).await.unwrap().count, 1);
    let error = store.compact(Revision::new(4)).await.unwrap_err();
    assert_eq!((error.operation(), error.outcome()), (Operation::Compact, Outcome::NotApplied));
    assert_eq!(*store.compact(Revision::new(7)).await.unwrap_err().kind(), ErrorKind::FutureRevision);
    assert!(matches!(*store.compact(Revision::UNSET).await.unwrap_err().kind(), ErrorKind::InvalidArgument(_)));
    assert_eq!(store.verify().await.unwrap().log_rows, 3);
    assert_eq!(store.status().compacted, Revision::new(4));
}

#[tokio::test]
async fn watch_replays_and_goes_on() {
    let store = memory();
    store.put("k", "1").await.unwrap();
    let mut stream = store.watch(watch_all(1)).await.unwrap();
    let first = next(&mut stream).await;
    assert_eq!((first.revision.get(), first.events.len()), (2, 1));
    assert!(first.time.is_some());
    assert!(first.events[0].prev.is_none());
    let pending = tokio::time::timeout(Duration::from_millis(50), stream.next()).await;
    assert!(pending.is_err(), "nothing happened: {pending:?}");
    store.txn(Txn::new().with_success([Op::put("q3", "a"), Op::put("q1", "b"), Op::delete("k")])).await.unwrap();
    let second = next(&mut stream).await;
    let keys: Vec<_> = second.events.iter().map(|event| event.kv.key.to_string()).collect();
    assert_eq!(keys, ["q3", "q1", "k"]);
    let gone = &second.events[2];
    assert_eq!((gone.kind, gone.kv.mod_revision.get(), gone.kv.version), (EventKind::Delete, 3, 0));
    assert_eq!(gone.prev.as_ref().unwrap().value, "1".into());
}

#[tokio::test]
async fn watch_below_mark_ends() {
    let store = memory();
    for value in ["1", "2", "3"] {
        store.put("k", value).await.unwrap();
    }
    let mut behind = store.watch(watch_all(2)).await.unwrap();
    store.compact(Revision::new(3)).await.unwrap();
    assert_eq!(end(&mut behind).await, ErrorKind::Compacted { compact_revision: Revision::new(3) });
    let mut there = store.watch(watch_all(3)).await.unwrap();
    assert_eq!(next(&mut there).await.revision, Revision::new(3));
    assert_eq!(next(&mut there).await.events[0].prev.as_ref().unwrap().value, "2".into());
}

#[tokio::test]
async fn watch_of_future_revision_waits() {
    let store = memory();
    let mut stream = store.watch(watch_all(4)).await.unwrap();
    for value in ["1", "2", "3"] {
        store.put("k", value).await.unwrap();
    }
    assert_eq!(next(&mut stream).await.revision, Revision::new(4));
}

#[tokio::test]
async fn closing_ends_everything() {
    let store = memory();
    store.put("k", "1").await.unwrap();
    let mut stream = store.watch(watch_all(2)).await.unwrap();
    next(&mut stream).await;
    let other = store.clone();
    store.close().await.unwrap();
    store.close().await.unwrap();
    assert_eq!(end(&mut stream).await, ErrorKind::Closed);
    assert_eq!(*other.get("k").await.unwrap_err().kind(), ErrorKind::Closed);
    let error = other.put("k", "2").await.unwrap_err();
    assert_eq!((error.kind().clone(), error.outcome()), (ErrorKind::Closed, Outcome::NotApplied));
    assert_eq!(*other.compact(Revision::new(2)).await.unwrap_err().kind(), ErrorKind::Closed);
    assert!(matches!(other.watch(watch_all(2)).await.map(drop).unwrap_err().kind(), ErrorKind::Closed));
    let empty = RangeRequest::new(Range::key(""));
    assert!(matches!(other.range(empty).await.unwrap_err().kind(), ErrorKind::InvalidArgument(_)));
}

#[tokio::test]
async fn store_is_same_after_reopening() {
    let table = MemoryTable::new();
    let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
    store.put("k", "1").await.unwrap();
    store.put("k", "2").await.unwrap();
    store.compact(Revision::new(2)).await.unwrap();
    let (id, status) = (store.id(), store.status());
    store.close().await.unwrap();
    let options = Options { expected_id: Some(id), ..Options::default() };
    let store = MvccStore::open(Box::new(table), options).unwrap();
    assert_eq!((store.id(), store.status()), (id, status));
    assert_eq!(store.put("k", "3").await.unwrap(), Revision::new(4));
    let mut stream = store.watch(watch_all(2)).await.unwrap();
    for revision in 2..=4 {
        assert_eq!(next(&mut stream).await.revision, Revision::new(revision));
    }
}
