//! Tests that reading the log in parts returns the same events as a watch.

use futures::StreamExt;
use kv::{Batch, ErrorKind, Op, Prev, Range, Revision, Store, StoreExt, Txn, WatchRequest};
use kv_mvcc::{MvccStore, memory};

/// Returns the batches that a watch delivers up to the newest revision. Never returns if the newest revision did not
/// change the watched range.
async fn watched(store: &MvccStore, request: WatchRequest) -> Vec<Batch> {
    let newest = store.status().revision;
    let mut stream = store.watch(request).await.unwrap();
    let mut batches = Vec::new();
    while batches.last().is_none_or(|batch: &Batch| batch.revision < newest) {
        batches.push(stream.next().await.unwrap().unwrap());
    }
    batches
}

/// Reads all changes of a watch request in parts; also returns the number of parts.
async fn in_parts(store: &MvccStore, mut request: WatchRequest) -> (Vec<Batch>, usize) {
    let (mut batches, mut parts) = (Vec::new(), 0);
    loop {
        let part = store.changes(request.clone()).await.unwrap();
        assert_eq!(part.newest, store.status().revision);
        if part.next > part.newest {
            batches.extend(part.batches);
            return (batches, parts + 1);
        }
        assert!(part.next > request.start, "each part goes on");
        batches.extend(part.batches);
        request.start = part.next;
        parts += 1;
    }
}

#[tokio::test]
async fn changes_in_parts_match_watch() {
    let store = memory();
    // One revision is larger than a part, and there are more small revisions than fit into one part.
    let large = "x".repeat(30_000);
    let ops = (0..40).map(|number| Op::put(format!("a/{number:02}"), large.clone()));
    store.txn(Txn::new().with_success(ops)).await.unwrap();
    for number in 0..40 {
        store.put(format!("a/{number:02}"), large.clone()).await.unwrap();
        store.put("b", number.to_string()).await.unwrap();
    }
    store.delete(Range::prefix("a/")).await.unwrap();
    for (prefix, prev) in [("a/", Prev::Return), ("a/", Prev::Omit), ("", Prev::Return)] {
        let request = WatchRequest::new(Range::prefix(prefix), Revision::new(1)).with_prev(prev);
        let (found, parts) = in_parts(&store, request.clone()).await;
        assert_eq!(found, watched(&store, request).await);
        assert!(parts > 1, "{parts} parts");
    }
    let nothing = store.changes(WatchRequest::new(Range::key("c"), Revision::new(1))).await.unwrap();
    assert!(nothing.batches.is_empty() && nothing.next == nothing.newest.next(), "{nothing:?}");
}

#[tokio::test]
async fn changes_are_empty_when_none_and_error_when_compacted() {
    let store = memory();
    let newest = store.put("a", "1").await.unwrap();
    for start in [newest.next(), Revision::new(newest.get() + 10)] {
        let none = store.changes(WatchRequest::new(Range::All, start)).await.unwrap();
        assert_eq!((none.batches.len(), none.next, none.newest), (0, start, newest));
    }
    let mark = store.put("a", "2").await.unwrap();
    store.compact(mark).await.unwrap();
    let at_the_mark = store.changes(WatchRequest::new(Range::All, mark)).await.unwrap();
    assert_eq!(at_the_mark.batches.len(), 1);
    let error = store.changes(WatchRequest::new(Range::All, newest)).await.unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Compacted { compact_revision: mark });
    assert!(store.changes(WatchRequest::new(Range::All, Revision::UNSET)).await.is_err());
}
