//! Tests how the etcd store handles members that are down, hang, or restart with another identity. This file tests only
//! what is special about etcd clusters; the conformance cases test what every store on servers must do.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options};
use conformance::patient;
use futures::StreamExt;
use kv::{
    Compare, ErrorKind, Op, OpResult, Outcome, Range, RangeRequest, Revision, Store, StoreExt, Txn, WatchRequest,
};
use nix::sys::signal::Signal;
use support::{Etcd, dead_address};

/// Time limit for one wait in a test on a fast machine; [`patient`] extends it on a slow one.
const LONG: Duration = Duration::from_secs(30);

fn quick(endpoints: Vec<String>) -> EtcdStore {
    let options = Options::new(endpoints)
        .with_call_timeout(Duration::from_secs(2))
        .with_connect_timeout(Duration::from_millis(500))
        .with_keepalive(Duration::from_secs(1), Duration::from_secs(1));
    EtcdStore::open(&options).unwrap()
}

fn store(etcd: &Etcd) -> EtcdStore {
    quick(vec![etcd.url()])
}

fn dead_url() -> String {
    format!("http://{}", dead_address().unwrap())
}

async fn heals(store: &EtcdStore) {
    let until = Instant::now() + patient(LONG);
    while let Err(error) = store.get("k").await {
        assert!(Instant::now() < until, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn outcome_is_certain_when_no_server_listens() {
    let store = quick(vec![dead_url(), dead_url()]);
    let error = store.put("k", "v").await.unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied), "{error}");
    assert!(error.to_string().contains("onnection refused") && !error.to_string().contains("TLS"), "{error}");
    let error = store.watch(WatchRequest::new(Range::All, Revision::new(1))).await.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::NotSent);
}

#[tokio::test]
async fn frozen_member_times_out_and_heals() {
    let etcd = Etcd::start().unwrap();
    let store = store(&etcd);
    store.put("k", "before").await.unwrap();
    etcd.signal(Signal::SIGSTOP).unwrap();
    let begun = Instant::now();
    let error = store.put("k", "meanwhile").await.unwrap_err();
    assert!(begun.elapsed() < patient(Duration::from_secs(4)), "{:?}", begun.elapsed());
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Disconnected { .. }), "{error}");
    assert!(store.get("k").await.is_err());
    etcd.signal(Signal::SIGCONT).unwrap();
    heals(&store).await;
    store.put("k", "after").await.unwrap();
}

#[tokio::test]
async fn frozen_member_times_out_on_first_call() {
    let etcd = Etcd::start().unwrap();
    etcd.signal(Signal::SIGSTOP).unwrap();
    let store = store(&etcd);
    let begun = Instant::now();
    let error = store.put("k", "v").await.unwrap_err();
    assert!(begun.elapsed() < patient(Duration::from_secs(4)), "{:?}", begun.elapsed());
    assert_eq!(error.kind(), &ErrorKind::Timeout, "{error}");
    etcd.signal(Signal::SIGCONT).unwrap();
    heals(&store).await;
}

#[tokio::test]
async fn frozen_member_loses_reads_to_others() {
    let (frozen, etcd) = (Etcd::start().unwrap(), Etcd::start().unwrap());
    frozen.signal(Signal::SIGSTOP).unwrap();
    let store = quick(vec![frozen.url(), etcd.url()]);
    assert!(store.get("k").await.unwrap().is_none());
    let begun = Instant::now();
    store.put("k", "v").await.unwrap();
    assert!(begun.elapsed() < patient(Duration::from_secs(1)), "the next call knows better");
}

#[tokio::test]
async fn cluster_change_is_noticed_under_same_name() {
    let (first, second) = (Etcd::start().unwrap(), Etcd::start().unwrap());
    let store = quick(vec![first.url(), second.url()]);
    for _ in 0..3 {
        store.put("k", "v").await.unwrap();
    }
    drop(first);
    let read = store.range(RangeRequest::new(Range::key("k"))).await.unwrap_err();
    assert_eq!((read.kind(), read.outcome()), (&ErrorKind::RevisionRegressed, Outcome::NotApplied), "{read}");
    let write = store.put("k", "v").await.unwrap_err();
    assert_eq!((write.kind(), write.outcome()), (&ErrorKind::RevisionRegressed, Outcome::Unknown), "{write}");
}

#[tokio::test]
async fn watch_is_refused_when_cluster_went_back() {
    let mut etcd = Etcd::start().unwrap();
    let store = store(&etcd);
    let newest = store.put("k", "v").await.unwrap();
    etcd.stop();
    // Remove the data of the server but keep its cluster id, as a restore from an etcd snapshot does.
    std::fs::remove_dir_all(etcd.data()).unwrap();
    etcd.run().unwrap();
    let watch = async {
        match store.watch(WatchRequest::new(Range::All, newest.next())).await {
            Ok(mut events) => events.next().await.unwrap().map(|_| ()),
            Err(error) => Err(error),
        }
    };
    let error = tokio::time::timeout(patient(LONG), watch).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::RevisionRegressed, "{error}");
}

#[tokio::test]
async fn watch_resumes_when_reader_was_slow() {
    const WRITES: i64 = 40;
    let etcd = Etcd::start().unwrap();
    let store = store(&etcd);
    let first = store.put("p/0", "v").await.unwrap();
    let mut stalled = store.watch(WatchRequest::new(Range::prefix("p/"), first)).await.unwrap();
    // Write several times as many bytes as a watcher's queue can hold.
    for _ in 0..WRITES {
        store.put("p/k", vec![7; 1 << 20]).await.unwrap();
    }
    let mut next = first;
    while next.get() <= first.get() + WRITES {
        let batch = tokio::time::timeout(patient(LONG), stalled.next()).await.unwrap().unwrap().unwrap();
        assert_eq!(batch.revision, next);
        next = next.next();
    }
}

#[tokio::test]
async fn leased_key_is_not_written() {
    let etcd = Etcd::start().unwrap();
    let store = store(&etcd);
    let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
    let lease = client.lease_grant(600, None).await.unwrap().id();
    let options = etcd_client::PutOptions::new().with_lease(lease);
    client.put("leased", "theirs", Some(options)).await.unwrap();
    let at = store.get("leased").await.unwrap().unwrap().mod_revision;

    let free = || Op::put("free", "v");
    let write = || Op::put("leased", "ours");
    let unchanged = || Compare::unchanged("leased", at);
    let many = (0..127).map(|i| Op::put(format!("{i}"), "v"));
    for txn in [
        Txn::new().with_success([free(), write()]),
        Txn::new().with_compares([unchanged()]).with_success([write(), free()]),
        Txn::new().with_compares([unchanged()]).with_success([write()]).with_failure([Op::range(Range::All)]),
        Txn::new().with_compares([unchanged()]).with_success([write()]).with_failure([free()]),
        Txn::new().with_compares([unchanged()]).with_success(many.chain([write()])),
    ] {
        let error = store.txn(txn).await.unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (&ErrorKind::Unsupported, Outcome::NotApplied), "{error}");
        assert!(error.to_string().contains("key leased has a lease"), "{error}");
    }
    assert!(store.get("free").await.unwrap().is_none());

    // If a compare fails, the answer must contain only the results of the caller's reads, not those of the reads that
    // the store adds.
    let failing = Txn::new().with_compares([Compare::absent("leased")]).with_success([free()]);
    let answer = store.txn(failing.with_failure([Op::range(Range::key("leased"))])).await.unwrap();
    assert!(!answer.succeeded && answer.results.len() == 1, "{answer:?}");
    assert!(matches!(&answer.results[0], OpResult::Range(found) if found.count == 1));
    // A deletion of a key with a lease is allowed.
    assert_eq!(store.delete(Range::key("leased")).await.unwrap(), 1);
}
