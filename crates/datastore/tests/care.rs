//! Tests the replacement of an embedded store by a new store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use datastore::maintenance::{LockHolder, StoreStaging, peek, waiting};
use datastore::{Create, Location, open};
use kv::{ErrorKind, StoreExt};

const WAIT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn locations(folder: &std::path::Path) -> [Location; 2] {
    ["sled", "redb"].map(|engine| stores::of_engine(engine, folder.join(engine).join("store")).unwrap())
}

async fn make(location: &Location, key: &str) {
    let made = open(location, &Create::IfMissing.with_wait(WAIT)).await.unwrap();
    made.store().put(key, "1").await.unwrap();
    made.close().await.unwrap();
}

async fn has(location: &Location, key: &str) -> bool {
    let opened = open(location, &Create::Never.with_wait(WAIT)).await.unwrap();
    let found = opened.store().get(key).await.unwrap().is_some();
    opened.close().await.unwrap();
    found
}

#[tokio::test]
async fn replacement_keeps_store_made_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    for location in locations(folder.path()) {
        let staging = StoreStaging::begin(&location).await.unwrap();
        make(&staging.location(), "new").await;
        let (staging, held) = staging.hold(SHORT).await.unwrap();
        assert!(held.is_none());
        make(&location, "made").await;
        let error = staging.finish(held).await.unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("a store was made there meanwhile"), "{error}");
        assert!(has(&location, "made").await);
        assert_eq!(fs::read_dir(location.path().unwrap().parent().unwrap()).unwrap().count(), 1, "nothing is left");
    }
}

#[tokio::test]
async fn replacement_runs_alone_and_clears_up_after_kills() {
    let folder = tempfile::tempdir().unwrap();
    for location in locations(folder.path()) {
        let left = location.path().unwrap().with_extension("restoring").join("store");
        fs::create_dir_all(&left).unwrap();
        fs::write(left.join("half"), "a store").unwrap();
        let staging = StoreStaging::begin(&location).await.unwrap();
        assert!(!left.exists());
        let error = StoreStaging::begin(&location).await.unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Locked);
        assert!(error.to_string().contains("another restore is at work there"), "{error}");
        drop(staging);
        assert!(!left.parent().unwrap().exists());
    }
}

#[tokio::test]
async fn replacement_is_what_waiting_opener_gets() {
    let folder = tempfile::tempdir().unwrap();
    for location in locations(folder.path()) {
        make(&location, "old").await;
        let staging = StoreStaging::begin(&location).await.unwrap();
        make(&staging.location(), "new").await;
        let (staging, held) = staging.hold(SHORT).await.unwrap();
        assert_eq!(held.as_ref().unwrap().newest_revision().unwrap(), 2);
        assert_eq!(*open(&location, &Create::Never.with_wait(SHORT)).await.unwrap_err().kind(), ErrorKind::Locked);
        let there = location.clone();
        let waiter = tokio::spawn(async move { has(&there, "new").await });
        while waiting(&location).await.unwrap() == 0 {
            tokio::task::yield_now().await;
        }
        let aside = staging.finish(held).await.unwrap().unwrap();
        assert!(waiter.await.unwrap());
        assert!(has(&location.moved_to(aside), "old").await);
        assert_eq!(peek(&location).await.unwrap().holder, LockHolder::None);
    }
}
