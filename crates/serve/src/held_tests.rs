//! Futures of the held store that are polled no more. Their owner may be a task that waits for a client which does not read.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::held::{Announced, Held, Holding};
use datastore::{Create, OpenStore, care};
use etcd_api::Backing;
use futures::StreamExt;
use kv::{Error, Lease, LeaseId, Range, RangeRequest, Revision, Store, StoreExt, Txn, WatchRequest, WatchStream};
use tokio::time::sleep;

use crate::api::Served;

/// No call takes this long unless it waits for a future that is not polled.
const STUCK: Duration = Duration::from_secs(20);
/// How long the lock is waited for.
const WAIT: Duration = Duration::from_secs(60);
/// How often a future is polled before its owner stops.
const POLLS: [usize; 4] = [1, 2, 3, 5];

type Stopped = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Remembers that a future wants to be polled.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Polls a future up to `most` times, each time after it was woken. Returns it, if it has not ended.
async fn polled(mut future: Stopped, most: usize) -> Option<Stopped> {
    let woken = Arc::new(Woken::default());
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

/// All futures that others get from the held store, but for those that close it for good.
fn futures(held: &Held) -> Vec<(&'static str, Stopped)> {
    let served = Arc::new(Served::new(held.clone(), Vec::new()));
    let generation = held.generation();
    macro_rules! list {
        ($(|$store:ident| $call:expr,)*) => {
            vec![$((stringify!($call), {
                let ($store, served) = (held.clone(), Arc::clone(&served));
                Box::pin(async move { let _ = ($call.await, served); }) as Stopped
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
        |store| store.until_open(),
        |store| store.hand_over(Announced::No),
        |store| store.hand_over(Announced::Yes),
        |store| store.put_down(),
        |store| store.has_bounds_of_its_own(),
        |store| store.check_room(),
        |store| store.defragment(),
    ];
    macro_rules! backing {
        ($(|$served:ident| $call:expr,)*) => {
            vec![$((stringify!($call), {
                let $served = Arc::clone(&served);
                Box::pin(async move { let _ = $call.await; }) as Stopped
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

/// A store of format 2 that is held, with something in it.
async fn hold(engine: &str) -> (Held, tempfile::TempDir) {
    hold_as(engine, Holding::new(Create::Never.with_wait(WAIT))).await
}

async fn hold_as(engine: &str, holding: Holding) -> (Held, tempfile::TempDir) {
    let root = tempfile::tempdir().unwrap();
    let location = stores::of_engine(engine, root.path().join("store")).unwrap();
    care::create(&location, care::FORMAT_WITH_LEASES, WAIT).await.unwrap();
    let held = Held::new(location, holding);
    held.put("a", "0").await.unwrap();
    (held, root)
}

/// Lets another process have the store until what is returned is dropped.
async fn lent(held: &Held) -> OpenStore {
    let location = held.location().clone();
    let other = tokio::spawn(async move { datastore::open(&location, &Create::Never.with_wait(WAIT)).await.unwrap() });
    while !held.is_wanted() {
        sleep(Duration::from_millis(1)).await;
    }
    let held = held.clone();
    tokio::spawn(async move { held.hand_over(Announced::No).await });
    other.await.unwrap()
}

/// Hands the store over, and reads and writes.
async fn goes_on(held: &Held, what: &str) {
    for _ in 0..2 {
        let steps = async {
            held.hand_over(Announced::No).await;
            held.range(read()).await.unwrap();
            held.put("b", "2").await.unwrap();
        };
        assert!(tokio::time::timeout(patient(STUCK), steps).await.is_ok(), "it stands still beside a stopped {what}");
    }
}

async fn stops_while_open(engine: &str) {
    let options = Create::Never.with_wait(WAIT);
    let in_turns = Holding { yields_after: Some(Duration::ZERO), ..Holding::new(options.clone()) };
    for holding in [Holding::new(options), in_turns] {
        stops_while_held(engine, holding).await;
    }
}

async fn stops_while_held(engine: &str, holding: Holding) {
    let (held, _root) = hold_as(engine, holding).await;
    for most in POLLS {
        for (what, future) in futures(&held) {
            let stopped = polled(future, most).await;
            goes_on(&held, what).await;
            drop(stopped);
        }
    }
}

async fn stops_while_lent(engine: &str) {
    let (held, _root) = hold(engine).await;
    for most in [1, 3] {
        for (what, future) in futures(&held) {
            let other = lent(&held).await;
            let stopped = polled(future, most).await;
            other.close().await.unwrap();
            goes_on(&held, what).await;
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

/// A watch waits for the end of a hand-over, is then polled no more, and goes on later without a gap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_watch_in_hand_over_loses_nothing() {
    for engine in ["redb", "sled"] {
        let (held, _root) = hold(engine).await;
        let mut stream = held.watch(all()).await.unwrap();
        let first = stream.next().await.unwrap().unwrap();
        let other = lent(&held).await;
        assert!(futures::poll!(stream.next()).is_pending());
        other.close().await.unwrap();
        goes_on(&held, "watch").await;
        let next = stream.next().await.unwrap().unwrap();
        assert_eq!(next.revision, first.revision.next());
    }
}
