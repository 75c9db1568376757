//! A cluster of three members, some of which hang or die.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options};
use futures::StreamExt;
use kv::{Compare, Range, Revision, Store, StoreExt, Txn, WatchRequest};
use nix::sys::signal::Signal;
use support::Etcd;

/// Longer than anything here may take.
const LONG: Duration = Duration::from_secs(60);

fn store(etcds: &[&Etcd]) -> EtcdStore {
    let options = Options::new(etcds.iter().map(|etcd| etcd.url()))
        .with_call_timeout(Duration::from_secs(3))
        .with_connect_timeout(Duration::from_millis(500))
        .with_keepalive(Duration::from_secs(1), Duration::from_secs(1));
    EtcdStore::open(&options).unwrap()
}

/// Writes until it works.
async fn written(store: &EtcdStore, value: &str) -> Revision {
    let until = Instant::now() + LONG;
    loop {
        match store.put("k", value).await {
            Ok(revision) => return revision,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn one_member_after_the_other_dies_and_nothing_is_lost() {
    let mut etcds = Etcd::start_three().unwrap();
    let store = store(&etcds.each_ref());
    let mut last = written(&store, "first").await;
    let mut watch = store.watch(WatchRequest::new(Range::key("k"), last)).await.unwrap();
    assert_eq!(watch.next().await.unwrap().unwrap().revision, last);
    for (member, etcd) in etcds.iter_mut().enumerate() {
        etcd.stop();
        // The first write may find no leader, or end in the dark: then it comes twice, but never wrongly.
        let revision = written(&store, &format!("without {member}")).await;
        let mut seen = last;
        while seen < revision {
            let batch = tokio::time::timeout(LONG, watch.next()).await.unwrap().unwrap().unwrap();
            assert_eq!(batch.revision, seen.next(), "without gap or repeat");
            seen = batch.revision;
        }
        assert_eq!(store.get("k").await.unwrap().unwrap().mod_revision, revision);
        last = revision;
        etcd.run().unwrap();
        // The next one may die only when this one has caught up.
        written(&self::store(&[etcd]), "back").await;
        last = Revision::new(last.get().max(store.get("k").await.unwrap().unwrap().mod_revision.get()));
        let mut seen = revision;
        while seen < last {
            seen = tokio::time::timeout(LONG, watch.next()).await.unwrap().unwrap().unwrap().revision;
        }
    }
}

#[tokio::test]
async fn a_member_without_a_quorum_answers_nothing() {
    let [one, two, three] = Etcd::start_three().unwrap();
    let lonely = store(&[&three]);
    let at = written(&lonely, "before").await;
    let mut watch = lonely.watch(WatchRequest::new(Range::key("k"), at.next())).await.unwrap();
    for etcd in [&one, &two] {
        etcd.signal(Signal::SIGSTOP).unwrap();
    }
    // etcd by itself would answer this one from what the member knows.
    let compare = Txn::new().with_compares([Compare::unchanged("k", at)]);
    let begun = Instant::now();
    assert!(lonely.txn(compare.clone()).await.is_err());
    assert!(lonely.get("k").await.is_err());
    assert!(lonely.put("k", "meanwhile").await.is_err());
    assert!(begun.elapsed() < Duration::from_secs(12), "{:?}", begun.elapsed());
    for etcd in [&one, &two] {
        etcd.signal(Signal::SIGCONT).unwrap();
    }
    let after = written(&lonely, "after").await;
    assert!(!lonely.txn(compare).await.unwrap().succeeded);
    let mut seen = at;
    while seen < after {
        let batch = tokio::time::timeout(LONG, watch.next()).await.unwrap().unwrap().unwrap();
        assert_eq!(batch.revision, seen.next(), "without gap or repeat");
        seen = batch.revision;
    }
}

#[tokio::test]
async fn calls_leave_a_frozen_leader() {
    let etcds = Etcd::start_three().unwrap();
    let store = store(&etcds.each_ref());
    let at = written(&store, "before").await;
    for frozen in &etcds {
        frozen.signal(Signal::SIGSTOP).unwrap();
        written(&store, "meanwhile").await;
        let found = store.get("k").await.unwrap().unwrap();
        assert!(found.mod_revision > at && found.value == "meanwhile".into());
        frozen.signal(Signal::SIGCONT).unwrap();
        written(&self::store(&[frozen]), "back").await;
    }
}
