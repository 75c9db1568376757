//! Tests handles with different purposes on a store with a full disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kv::{ErrorKind, Purpose, StoreExt};
use kv_mvcc::{Options, SpaceReserve};

use crate::wrapped::{Fault, Wrapped};

/// Reserved disk space for tests: parts can always be freed, but are allocated again only while the disk has space.
#[derive(Debug, Default)]
struct TestReserve {
    given_up: AtomicUsize,
    is_full: AtomicBool,
}

impl SpaceReserve for TestReserve {
    fn restore(&self) -> Result<(), String> {
        if self.is_full.load(Ordering::SeqCst) { Err("the disk is full".to_owned()) } else { Ok(()) }
    }

    fn check_room(&self) -> Result<(), (ErrorKind, String)> {
        self.restore().map_err(|full| (ErrorKind::NoSpace, full))
    }

    fn is_short(&self) -> bool {
        self.is_full.load(Ordering::SeqCst) && self.given_up.load(Ordering::SeqCst) > 0
    }

    fn release_part(&self) -> bool {
        self.given_up.fetch_add(1, Ordering::SeqCst) == 0
    }
}

#[tokio::test]
async fn reserve_is_used_by_release_and_waited_for_by_others() {
    let (table, reserve) = (Wrapped::default(), Arc::new(TestReserve::default()));
    let store = table.store(Options { reserve: Some(Arc::clone(&reserve) as _), ..Options::default() });
    let release = store.with_purpose(Purpose::Release);
    reserve.is_full.store(true, Ordering::SeqCst);
    table.fail_next(Fault::Refused(&ErrorKind::NoSpace));
    release.put("a", "1").await.unwrap();
    assert_eq!(reserve.given_up.load(Ordering::SeqCst), 1);
    assert_eq!(*store.put("b", "1").await.unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(*store.check_room().await.unwrap_err().kind(), ErrorKind::NoSpace);
    release.put("a", "2").await.unwrap();
    reserve.is_full.store(false, Ordering::SeqCst);
    store.put("b", "1").await.unwrap();
    assert_eq!(release.status().revision, store.status().revision, "they are one store");
}

#[tokio::test]
async fn reserve_is_left_alone_by_other_writes() {
    let (table, reserve) = (Wrapped::default(), Arc::new(TestReserve::default()));
    let store = table.store(Options { reserve: Some(Arc::clone(&reserve) as _), ..Options::default() });
    table.fail_next(Fault::Refused(&ErrorKind::NoSpace));
    assert_eq!(*store.put("a", "1").await.unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(reserve.given_up.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn reserve_that_is_short_makes_releases_drop_history() {
    let (table, reserve) = (Wrapped::default(), Arc::new(TestReserve::default()));
    let store = table.store(Options { reserve: Some(Arc::clone(&reserve) as _), ..Options::default() });
    let release = store.with_purpose(Purpose::Release);
    for value in ["1", "2", "3"] {
        release.put("a", value).await.unwrap();
    }
    let kept = || store.status().revision.get() - store.status().compacted.get();
    assert_eq!(kept(), 4, "the disk has room");
    reserve.is_full.store(true, Ordering::SeqCst);
    reserve.given_up.store(1, Ordering::SeqCst);
    for value in ["4", "5"] {
        release.put("a", value).await.unwrap();
        assert_eq!(kept(), 1);
    }
    reserve.is_full.store(false, Ordering::SeqCst);
    release.put("a", "6").await.unwrap();
    assert_eq!(kept(), 2, "the disk has room again");
    store.verify().await.unwrap();
}
