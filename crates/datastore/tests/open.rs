//! Tests the opening of real stores by their location.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use datastore::{Create, Location, open};
use kv::{ErrorKind, StoreExt};

const WAIT: Duration = Duration::from_secs(5);
const NO_WAIT: Duration = Duration::from_millis(50);

fn embedded(dir: &Path) -> [Location; 2] {
    let folder = dir.join("deep/down");
    ["sled", "redb"].map(|engine| stores::of_engine(engine, folder.join(engine)).unwrap())
}

#[tokio::test]
async fn open_makes_missing_store_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    for location in embedded(dir.path()) {
        let error = open(&location, &Create::Never.with_wait(WAIT)).await.unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Missing, "{error}");
        let command = format!("; `margay --store {location} pool create NAME CIDR` makes it");
        assert!(error.to_string().ends_with(&command), "{error}");
        assert!(!dir.path().join("deep").exists() || !location.path().unwrap().exists(), "reading made {location}");

        let made = open(&location, &Create::IfMissing.with_wait(WAIT)).await.unwrap();
        made.store().put("a", "1").await.unwrap();
        made.close().await.unwrap();

        let again = open(&location, &Create::Never.with_wait(WAIT)).await.unwrap();
        assert_eq!(again.store().get("a").await.unwrap().unwrap().value.as_bytes(), b"1");
        again.close().await.unwrap();
    }
}

#[tokio::test]
async fn open_is_exclusive_until_close() {
    let dir = tempfile::tempdir().unwrap();
    for location in embedded(dir.path()) {
        let first = open(&location, &Create::IfMissing.with_wait(WAIT)).await.unwrap();
        let error = open(&location, &Create::Never.with_wait(NO_WAIT)).await.unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Locked, "{error}");

        let straggler = first.store();
        first.close().await.unwrap();
        assert_eq!(*straggler.get("a").await.unwrap_err().kind(), ErrorKind::Closed);
        open(&location, &Create::Never.with_wait(WAIT)).await.unwrap().close().await.unwrap();
    }
}

#[tokio::test]
async fn open_names_other_engine_of_store() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let [sled, redb] = ["sled", "redb"].map(|engine| stores::of_engine(engine, &path).unwrap());
    open(&sled, &Create::IfMissing.with_wait(WAIT)).await.unwrap().close().await.unwrap();
    let error = open(&redb, &Create::IfMissing.with_wait(WAIT)).await.unwrap_err();
    assert!(error.to_string().contains("sled"), "{error}");
}

#[tokio::test]
async fn open_of_memory_is_new_each_time() {
    let one = open(&stores::at("memory:").unwrap(), &Create::IfMissing.with_wait(WAIT)).await.unwrap();
    one.store().put("a", "1").await.unwrap();
    let two = open(&stores::at("memory:").unwrap(), &Create::IfMissing.with_wait(WAIT)).await.unwrap();
    assert!(two.store().get("a").await.unwrap().is_none());
    one.close().await.unwrap();
    two.close().await.unwrap();
}
