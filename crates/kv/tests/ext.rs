//! Tests `StoreExt` and the wrappers on the in-memory store.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use futures::StreamExt;
use kv::wrap::{CallCounts, CountingStore, Fault, FaultyStore, TracedStore};
use kv::{
    ConditionalOutcome, Content, ErrorKind, Event, EventKind, Key, Operation, Outcome, Pages, Range, RangeRequest,
    Revision, Store, StoreExt, Txn, Value, WatchRequest,
};

#[tokio::test]
async fn create_update_and_delete_are_conditional() {
    let store = kv_mvcc::memory();
    let done = |outcome| match outcome {
        ConditionalOutcome::Done(revision) => revision,
        ConditionalOutcome::Found(found) => panic!("{found:?}"),
    };
    let found = |outcome| match outcome {
        ConditionalOutcome::Found(found) => found,
        ConditionalOutcome::Done(revision) => panic!("written at {revision}"),
    };
    let created = done(store.create("k", "1").await.unwrap());
    let there = found(store.create("k", "2").await.unwrap()).unwrap();
    assert_eq!((there.value, there.mod_revision), (Value::from("1"), created));
    let updated = done(store.update_if("k", "2", created).await.unwrap());
    assert_eq!(found(store.update_if("k", "3", created).await.unwrap()).unwrap().value, "2".into());
    assert!(found(store.delete_if("k", created).await.unwrap()).is_some());
    assert_eq!(done(store.delete_if("k", updated).await.unwrap()), updated.next());
    assert_eq!(found(store.update_if("k", "4", updated).await.unwrap()), None);
    assert!(store.get("k").await.unwrap().is_none());
}

#[tokio::test]
async fn pages_are_of_one_revision_and_no_larger_than_needed() {
    let store = CountingStore::new(kv_mvcc::memory());
    for number in 0..300 {
        let bytes = if number < 20 { 200_000 } else { 10 };
        store.put(format!("p/{number:03}"), vec![b'x'; bytes]).await.unwrap();
    }
    store.put("q", "outside").await.unwrap();
    let mut pages = Pages::new(Range::prefix("p/"), Revision::UNSET);
    assert!(!pages.is_over());
    let (mut keys, mut largest) = (Vec::new(), 0);
    while let Some(page) = pages.next(&store).await.unwrap() {
        // Writes that happen between two pages of a listing must not appear in the later pages.
        store.put("p/299", "changed").await.unwrap();
        store.delete(Range::key("p/150")).await.unwrap();
        largest = largest.max(page.iter().map(|kv| kv.value.len()).sum());
        assert!(page.iter().all(|kv| kv.mod_revision <= pages.revision()));
        keys.extend(page.into_iter().map(|kv| kv.key));
    }
    let expected: Vec<Key> = (0..300).map(|number| Key::from(format!("p/{number:03}"))).collect();
    assert_eq!(keys, expected);
    assert!(largest <= 16 * 200_000, "{largest}");
    assert!(pages.is_over());
    assert!(pages.next(&store).await.unwrap().is_none());
    let mut nothing = Pages::new(Range::prefix("none/"), Revision::UNSET);
    assert_eq!(nothing.next(&store).await.unwrap(), Some(Vec::new()));
    assert!(nothing.next(&store).await.unwrap().is_none());
    store.compact(store.list(Range::All).await.unwrap().revision).await.unwrap();
    let mut gone = Pages::new(Range::All, Revision::new(5));
    assert!(matches!(gone.next(&store).await.unwrap_err().kind(), ErrorKind::Compacted { .. }));
}

#[tokio::test]
async fn listing_of_many_pages_is_of_one_revision() {
    let store = CountingStore::new(kv_mvcc::memory());
    for number in 0..1203 {
        store.put(format!("p/{number:04}"), number.to_string()).await.unwrap();
    }
    store.put("q", "outside").await.unwrap();
    store.take();
    let listing = store.list(Range::prefix("p/")).await.unwrap();
    // The listing's first page has few keys, because the size of the values is not known yet.
    assert_eq!(store.take().ranges, 5);
    assert_eq!((listing.kvs.len(), listing.count, listing.more), (1203, 1203, false));
    assert!(listing.kvs.is_sorted_by(|a, b| a.key < b.key));

    let at = listing.revision;
    store.delete(Range::prefix("p/01")).await.unwrap();
    store.take();
    let old = store.list_at(Range::prefix("p/"), at, Content::KeysOnly).await.unwrap();
    assert_eq!(store.take().ranges, 3);
    assert_eq!(old.kvs.len(), 1203);
    assert!(old.kvs.iter().all(|kv| kv.value.is_empty()));
    assert_eq!(store.count(Range::prefix("p/")).await.unwrap(), 1103);
}

#[derive(Clone, Debug)]
struct Largest {
    inner: kv_mvcc::MvccStore,
    bytes: Arc<AtomicUsize>,
}

#[async_trait::async_trait]
impl Store for Largest {
    async fn range(&self, request: RangeRequest) -> kv::Result<kv::RangeResponse> {
        let answer = self.inner.range(request).await?;
        self.bytes.fetch_max(answer.kvs.iter().map(kv::Kv::size).sum(), SeqCst);
        Ok(answer)
    }

    async fn txn(&self, txn: Txn) -> kv::Result<kv::TxnResponse> {
        self.inner.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<kv::WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

#[tokio::test]
async fn listing_of_large_values_has_no_large_answer() {
    const BYTES: usize = 1_000_000;
    let store = Largest { inner: kv_mvcc::memory(), bytes: Arc::default() };
    for number in 0..60 {
        store.put(format!("p/{number:02}"), vec![number; BYTES]).await.unwrap();
    }
    let listing = store.list(Range::prefix("p/")).await.unwrap();
    assert_eq!((listing.kvs.len(), listing.count, listing.more), (60, 60, false));
    assert!(listing.kvs.iter().zip(0..60).all(|(kv, number)| kv.value.as_bytes() == vec![number; BYTES]));
    let largest = store.bytes.load(SeqCst);
    assert!(largest <= 17 * BYTES, "{largest} bytes in one answer");
}

#[tokio::test]
async fn pages_go_on_after_longest_keys() {
    let store = kv_mvcc::memory();
    for number in 0..600_u16 {
        let key = [vec![b'k'; kv::MAX_KEY_BYTES - 2], number.to_be_bytes().to_vec()].concat();
        store.put(key, "v").await.unwrap();
    }
    assert_eq!(store.list(Range::prefix("k")).await.unwrap().kvs.len(), 600);
    assert_eq!(store.list(Range::All).await.unwrap().kvs.len(), 600);
}

#[tokio::test]
async fn snapshot_and_watch_after_it_leave_no_gap() {
    let store = kv_mvcc::memory();
    store.put("p/1", "a").await.unwrap();
    let mut snapshot = store.snapshot_then_watch(Range::prefix("p/")).await.unwrap();
    assert_eq!(snapshot.kvs.len(), 1);
    store.put("q", "elsewhere").await.unwrap();
    store.delete(Range::key("p/1")).await.unwrap();
    let batch = snapshot.changes.next().await.unwrap().unwrap();
    assert_eq!(batch.revision, snapshot.revision.next().next());
    assert!(matches!(&batch.events[..], [Event { kind: EventKind::Delete, .. }]));
}

#[tokio::test]
async fn counting_counts_calls_and_bytes() {
    let store = CountingStore::new(kv_mvcc::memory());
    store.put("key", "value").await.unwrap();
    store.get("key").await.unwrap();
    let _watch = store.watch(WatchRequest::new(Range::All, Revision::new(2))).await.unwrap();
    store.compact(Revision::new(2)).await.unwrap();
    let sent = Txn::new().with_success([kv::Op::put("key", "value")]).size() as u64;
    let expected = CallCounts { ranges: 1, txns: 1, watches: 1, compactions: 1, bytes_sent: sent, bytes_received: 8 };
    assert_eq!(expected.round_trips(), 2);
    assert_eq!(store.take(), expected);
    assert_eq!(store.take(), CallCounts::default());
}

#[tokio::test(start_paused = true)]
async fn faults_fail_as_they_are_named() {
    let inner = kv_mvcc::memory();
    let put = |store: FaultyStore<kv_mvcc::MvccStore>| async move { store.put("k", "v").await };
    for (fault, kind, outcome, applied) in [
        (Fault::NotSent, ErrorKind::NotSent, Outcome::NotApplied, false),
        (Fault::RequestLost, ErrorKind::Timeout, Outcome::Unknown, false),
        (Fault::ReplyLost, ErrorKind::Disconnected { resume_from: Revision::UNSET }, Outcome::Unknown, true),
        (Fault::Held, ErrorKind::Timeout, Outcome::Unknown, false),
        (Fault::Disconnect, ErrorKind::NotSent, Outcome::NotApplied, false),
    ] {
        let before = inner.count(Range::All).await.unwrap();
        let faulty = FaultyStore::script(inner.clone(), [Some(fault)]);
        let error = put(faulty.clone()).await.unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (&kind, outcome), "{fault:?}");
        assert_eq!(inner.count(Range::All).await.unwrap() > before, applied, "{fault:?}");
        assert_eq!(faulty.deliver_held().await.unwrap().len(), usize::from(fault == Fault::Held));
        inner.delete(Range::All).await.unwrap();
    }
    let slow = FaultyStore::script(inner, [Some(Fault::Delay(Duration::from_secs(60)))]);
    let start = tokio::time::Instant::now();
    put(slow).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(60));
}

#[tokio::test]
async fn watch_says_where_to_go_on_when_cut() {
    let inner = kv_mvcc::memory();
    for value in ["a", "b"] {
        inner.put("k", value).await.unwrap();
    }
    let store = FaultyStore::new(inner, |operation| (operation == Operation::Watch).then_some(Fault::Disconnect));
    let mut watch = store.watch(WatchRequest::new(Range::All, Revision::new(2))).await.unwrap();
    assert_eq!(watch.next().await.unwrap().unwrap().revision, Revision::new(2));
    let end = watch.next().await.unwrap().unwrap_err();
    assert_eq!(*end.kind(), ErrorKind::Disconnected { resume_from: Revision::new(3) });
}

#[tokio::test]
async fn tracing_changes_nothing() {
    let store = TracedStore::new(kv_mvcc::memory());
    store.put("k", "v").await.unwrap();
    assert_eq!(store.get("k").await.unwrap().unwrap().value, "v".into());
    let mut watch = store.watch(WatchRequest::new(Range::All, Revision::new(2))).await.unwrap();
    assert!(watch.next().await.unwrap().is_ok());
    let future = store.range(RangeRequest::new(Range::All).with_at(Revision::new(9))).await.unwrap_err();
    assert_eq!(*future.kind(), ErrorKind::FutureRevision);
    assert_eq!(*store.compact(Revision::new(9)).await.unwrap_err().kind(), ErrorKind::FutureRevision);
}
