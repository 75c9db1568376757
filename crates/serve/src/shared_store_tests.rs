//! Tests of shared-store futures that are no longer polled. A caller may stop polling a future, for example while its
//! task waits for a client that does not read.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::shared_store::{SharedStore, SharedStoreOptions, YieldAnnouncement};
use datastore::{Create, OpenStore, maintenance};
use etcd_api::Backing;
use futures::StreamExt;
use kv::{Error, Lease, LeaseId, Range, RangeRequest, Revision, Store, StoreExt, Txn, WatchRequest, WatchStream};
use tokio::time::sleep;

use crate::api::ServedStore;

/// Time limit within which all other calls must finish while one future is no longer polled.
const STUCK: Duration = Duration::from_secs(20);
/// Time limit for taking the store lock in a test.
const WAIT: Duration = Duration::from_secs(60);
/// Numbers of polls after which a test stops polling a future.
const POLLS: [usize; 4] = [1, 2, 3, 5];

type StoppedFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Records that a future was woken.
#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Polls a future up to `most` times, and waits for a wake-up or 20 ms before each further poll. Returns the future if
/// it is still pending after `most` polls.
async fn polled(mut future: StoppedFuture, most: usize) -> Option<StoppedFuture> {
    let woken = Arc::new(WakeFlag::default());
    for _ in 0..most {
        woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(&woken));
        if let Poll::Ready(()) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return None;
        }
        for _ in 0..20 {
            if woken.0.load(Ordering::SeqCst) {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
    }
    Some(future)
}

fn read() -> RangeRequest {
    RangeRequest::new(Range::key("a"))
}

fn all() -> WatchRequest {
    WatchRequest::new(Range::All, Revision::new(1))
}

async fn drain(mut stream: WatchStream) {
    while let Some(Ok(_)) = stream.next().await {}
}

/// Returns every kind of future that callers get from the shared store, except those that close the store permanently.
fn futures(shared_store: &SharedStore) -> Vec<(&'static str, StoppedFuture)> {
    let served = Arc::new(ServedStore::new(shared_store.clone(), Vec::new()));
    let generation = shared_store.generation();
    macro_rules! list {
        ($(|$store:ident| $call:expr,)*) => {
            vec![$((stringify!($call), {
                let ($store, served) = (shared_store.clone(), Arc::clone(&served));
                Box::pin(async move { let _ = ($call.await, served); }) as StoppedFuture
            }),)*]
        };
    }
    let mut futures = list![
        |store| store.range(read()),
        |store| store.put("a", "1"),
        |store| store.txn(Txn::new()),
        |store| store.compact(Revision::new(1)),
        |store| async {
            drain(store.watch(all()).await?).await;
            Ok::<_, Error>(())
        },
        |store| async {
            drain(store.watch_of(generation, all()).await?).await;
            Ok::<_, Error>(())
        },
        |store| store.keep_open(Instant::now() + WAIT),
        |store| store.identity(),
        |store| store.wait_until_open(),
        |store| store.hand_over(YieldAnnouncement::No),
        |store| store.hand_over(YieldAnnouncement::Yes),
        |store| store.release_store(),
        |store| store.has_bounds_of_its_own(),
        |store| store.check_room(),
        |store| store.defragment(),
    ];
    macro_rules! backing {
        ($(|$served:ident| $call:expr,)*) => {
            vec![$((stringify!($call), {
                let $served = Arc::clone(&served);
                Box::pin(async move { let _ = $call.await; }) as StoppedFuture
            }),)*]
        };
    }
    let lease = Lease { id: LeaseId::new(7).unwrap(), ttl: Duration::from_secs(60) };
    futures.extend(backing![
        |served| served.sizes(),
        |served| served.check_room(),
        |served| served.compact(Revision::new(1)),
        |served| served.grant(lease),
        |served| served.revoke(lease.id, served.place()),
        |served| served.leases(),
        |served| served.leased(lease.id),
        |served| served.defragment(),
    ]);
    futures
}

/// Opens a new shared store of format 2 that has one key.
async fn hold(engine: &str) -> (SharedStore, tempfile::TempDir) {
    hold_as(engine, SharedStoreOptions::new(Create::Never.with_wait(WAIT))).await
}

async fn hold_as(engine: &str, holding: SharedStoreOptions) -> (SharedStore, tempfile::TempDir) {
    let root = tempfile::tempdir().unwrap();
    let location = stores::of_engine(engine, root.path().join("store")).unwrap();
    maintenance::create(&location, maintenance::FORMAT_WITH_LEASES, WAIT).await.unwrap();
    let shared_store = SharedStore::new(location, holding);
    shared_store.put("a", "0").await.unwrap();
    (shared_store, root)
}

/// Hands the store over to another owner, which keeps the store until the returned [`OpenStore`] is closed.
async fn take_over_store(shared_store: &SharedStore) -> OpenStore {
    let location = shared_store.location().clone();
    let other = tokio::spawn(async move { datastore::open(&location, &Create::Never.with_wait(WAIT)).await.unwrap() });
    while !shared_store.is_wanted() {
        sleep(Duration::from_millis(1)).await;
    }
    let shared_store = shared_store.clone();
    tokio::spawn(async move { shared_store.hand_over(YieldAnnouncement::No).await });
    other.await.unwrap()
}

/// Checks that the store can still be handed over, read and written.
async fn still_works(shared_store: &SharedStore, what: &str) {
    for _ in 0..2 {
        let steps = async {
            shared_store.hand_over(YieldAnnouncement::No).await;
            shared_store.range(read()).await.unwrap();
            shared_store.put("b", "2").await.unwrap();
        };
        assert!(tokio::time::timeout(patient(STUCK), steps).await.is_ok(), "it stands still beside a stopped {what}");
    }
}

async fn stops_while_open(engine: &str) {
    let options = Create::Never.with_wait(WAIT);
    let in_turns =
        SharedStoreOptions { yields_after: Some(Duration::ZERO), ..SharedStoreOptions::new(options.clone()) };
    for holding in [SharedStoreOptions::new(options), in_turns] {
        stops_while_held(engine, holding).await;
    }
}

async fn stops_while_held(engine: &str, holding: SharedStoreOptions) {
    let (shared_store, _root) = hold_as(engine, holding).await;
    for most in POLLS {
        for (what, future) in futures(&shared_store) {
            let stopped = polled(future, most).await;
            still_works(&shared_store, what).await;
            drop(stopped);
        }
    }
}

async fn stops_while_lent(engine: &str) {
    let (shared_store, _root) = hold(engine).await;
    for most in [1, 3] {
        for (what, future) in futures(&shared_store) {
            let other = take_over_store(&shared_store).await;
            let stopped = polled(future, most).await;
            other.close().await.unwrap();
            still_works(&shared_store, what).await;
            drop(stopped);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_future_keeps_no_redb_store_open() {
    stops_while_open("redb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_future_keeps_no_sled_store_open() {
    stops_while_open("sled").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_future_in_hand_over_of_redb_blocks_nothing() {
    stops_while_lent("redb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_future_in_hand_over_of_sled_blocks_nothing() {
    stops_while_lent("sled").await;
}

/// A watch that is not polled during a hand-over loses no event and continues when it is polled again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_watch_in_hand_over_loses_nothing() {
    for engine in ["redb", "sled"] {
        let (shared_store, _root) = hold(engine).await;
        let mut stream = shared_store.watch(all()).await.unwrap();
        let first = stream.next().await.unwrap().unwrap();
        let other = take_over_store(&shared_store).await;
        assert!(futures::poll!(stream.next()).is_pending());
        other.close().await.unwrap();
        still_works(&shared_store, "watch").await;
        let next = stream.next().await.unwrap().unwrap();
        assert_eq!(next.revision, first.revision.next());
    }
}
