//! Tests how much history a store keeps, and that the rows of removed history are deleted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use kv::{ErrorKind, Range, RangeRequest, Revision, Store, StoreExt};
use kv_mvcc::{Clock, FORMAT, FORMAT_WITH_LEASES, MAX_ROW_BYTES, MemoryTable, MvccStore, Options, Retention, Table};

use crate::wrapped::count;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

fn open(table: &MemoryTable, retention: Retention) -> MvccStore {
    MvccStore::open(Box::new(table.clone()), Options { retention, ..Options::default() }).unwrap()
}

/// Creates a clock that the test sets, in seconds since 2026.
fn clock() -> (Arc<AtomicU64>, Clock) {
    let seconds = Arc::new(AtomicU64::new(0));
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
    let clock = Clock::new({
        let seconds = Arc::clone(&seconds);
        move || start + Duration::from_secs(seconds.load(Ordering::SeqCst))
    });
    (seconds, clock)
}

async fn oldest(store: &MvccStore) -> i64 {
    let newest = store.status().revision.get();
    for revision in 1..=newest {
        let read = RangeRequest::new(Range::All).with_at(Revision::new(revision));
        match store.range(read).await {
            Ok(_) => return revision,
            Err(error) => assert!(matches!(error.kind(), ErrorKind::Compacted { .. })),
        }
    }
    panic!("the newest revision can always be read")
}

#[tokio::test]
async fn retention_by_revisions() {
    let table = MemoryTable::new();
    let store = open(&table, Retention { revisions: Some(5), ..Retention::UNBOUNDED });
    for i in 0..50 {
        store.put(format!("k{}", i % 3), vec![b'x'; 2 * MAX_ROW_BYTES]).await.unwrap();
    }
    assert_eq!(oldest(&store).await, 47);
    assert_eq!(store.status().compacted, Revision::new(47));
    assert_eq!(count(&table, b'l'), 5);
    // The table has three live values, and five superseded values for log rows; each value has three chunks.
    assert_eq!(count(&table, b'v'), 3 * (3 + 5));
    assert_eq!(store.verify().await.unwrap().log_rows, 5);
}

#[tokio::test]
async fn retention_by_revisions_with_minimum_age() {
    let (seconds, clock) = clock();
    let retention = Retention {
        revisions: Some(5),
        min_age: Some(Duration::from_secs(300)),
        bytes: Some(20_000),
        ..Retention::UNBOUNDED
    };
    let store =
        MvccStore::open(Box::new(MemoryTable::new()), Options { retention, clock, ..Options::default() }).unwrap();
    for second in 0..100 {
        seconds.store(second, Ordering::SeqCst);
        store.put("k", "v").await.unwrap();
    }
    assert_eq!(oldest(&store).await, 1, "a burst ends no history");
    seconds.store(320, Ordering::SeqCst);
    for _ in 0..2 {
        store.put("k", "v").await.unwrap();
    }
    // Revision 22 was made at second 20; all earlier revisions are now more than 300 s old.
    assert_eq!(oldest(&store).await, 22);
    // At second 320, revision 22 is exactly 300 s old and kept. At second 700, all revisions before the next ten writes
    // are more than 300 s old, so these ten writes remove them.
    seconds.store(700, Ordering::SeqCst);
    for _ in 0..10 {
        store.put("k", "v").await.unwrap();
    }
    assert_eq!(oldest(&store).await, store.status().revision.get() - 9, "the ten that are younger stay");
    // The limit on bytes also removes revisions that are younger than the minimum age.
    for _ in 0..50 {
        store.put("k", vec![b'x'; 900]).await.unwrap();
    }
    assert!(store.status().log_bytes <= 20_000);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn retention_bounds_are_kept_in_store() {
    let table = MemoryTable::new();
    let options = |format| Options { format, retention: Retention::UNBOUNDED, ..Options::default() };
    let store = MvccStore::open(Box::new(table.clone()), options(FORMAT_WITH_LEASES)).unwrap();
    assert_eq!(store.retention(), Retention::UNBOUNDED);
    let own = Retention { revisions: Some(7), min_age: None, ..Retention::WITH_CLIENTS };
    store.set_retention(own).await.unwrap();
    assert_eq!((store.retention(), store.status().revision), (own, Revision::new(1)), "it takes no revision");
    store.close().await.unwrap();

    let store = MvccStore::open(Box::new(table), options(FORMAT_WITH_LEASES)).unwrap();
    assert_eq!(store.retention(), own, "also for a program that would keep more");
    for _ in 0..20 {
        store.put("k", "v").await.unwrap();
    }
    assert_eq!(store.status().compacted, Revision::new(21 - 7 + 1));
    store.verify().await.unwrap();

    let older = MvccStore::open(Box::new(MemoryTable::new()), options(FORMAT)).unwrap();
    assert_eq!(*older.set_retention(own).await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(older.retention(), Retention::UNBOUNDED);
}

#[tokio::test]
async fn retention_shares_history_among_key_groups() {
    let store = open(&MemoryTable::new(), Retention::UNBOUNDED);
    for number in 0..10 {
        store.put(format!("a/{number}"), "v").await.unwrap();
        store.put(format!("b/{}", number % 2), vec![b'x'; 100]).await.unwrap();
    }
    let shares = store.history_shares(|key| key[..1].to_vec()).await.unwrap();
    let [(a, few), (b, many)] = shares.iter().collect::<Vec<_>>()[..] else { panic!("{shares:?}") };
    assert_eq!((&a[..], &b[..]), (&b"a"[..], &b"b"[..]));
    assert_eq!((few.changes, many.changes), (10, 10));
    assert!(many.bytes >= few.bytes + 8 * 100, "eight values were superseded: {shares:?}");
    assert_eq!(few.bytes + many.bytes, store.status().log_bytes);
}

#[tokio::test]
async fn retention_groups_beyond_thousand_share_unnamed_one() {
    let store = open(&MemoryTable::new(), Retention::UNBOUNDED);
    for number in 0..1026 {
        store.put(format!("{number:04}"), "v").await.unwrap();
    }
    store.put("0000", "w").await.unwrap();
    let shares = store.history_shares(<[u8]>::to_vec).await.unwrap();
    assert_eq!((shares.len(), shares[b"".as_slice()].changes), (1025, 2));
    assert_eq!(shares[b"0000".as_slice()].changes, 2, "a group that has its name keeps it");
}

#[tokio::test]
async fn retention_of_newest_only() {
    let table = MemoryTable::new();
    for revisions in [0, 1] {
        let store = open(&table, Retention { revisions: Some(revisions), ..Retention::UNBOUNDED });
        for _ in 0..3 {
            let revision = store.put("k", "v").await.unwrap();
            assert_eq!(oldest(&store).await, revision.get());
        }
        store.verify().await.unwrap();
        store.close().await.unwrap();
    }
}

#[tokio::test]
async fn retention_by_bytes() {
    let table = MemoryTable::new();
    let store = open(&table, Retention { bytes: Some(10_000), ..Retention::UNBOUNDED });
    for _ in 0..100 {
        store.put("k", vec![b'x'; 900]).await.unwrap();
        assert!(store.status().log_bytes <= 10_000);
    }
    let kept = 101 - oldest(&store).await + 1;
    assert!((8..=11).contains(&kept), "{kept} revisions of about 1,000 bytes");
    // A single revision that exceeds the limit on bytes is kept until there is a newer revision.
    store.put("k", vec![b'x'; 50_000]).await.unwrap();
    store.put("k", "small").await.unwrap();
    assert_eq!(oldest(&store).await, store.status().revision.get());
    store.verify().await.unwrap();
}

#[tokio::test]
async fn retention_by_age() {
    let (seconds, clock) = clock();
    let table = MemoryTable::new();
    let retention = Retention { age: Some(Duration::from_secs(2 * DAY)), ..Retention::UNBOUNDED };
    let store = MvccStore::open(Box::new(table), Options { retention, clock, ..Options::default() }).unwrap();
    for hour in 0..100 {
        seconds.store(hour * HOUR, Ordering::SeqCst);
        store.put("k", "v").await.unwrap();
    }
    // Revision 101 was made in hour 99; revision 53 was made exactly two days earlier, in hour 51.
    assert_eq!(oldest(&store).await, 53);
    // The store does not trust a clock that jumped by years.
    seconds.store(1000 * DAY, Ordering::SeqCst);
    store.put("k", "v").await.unwrap();
    assert_eq!(oldest(&store).await, 53);
    seconds.store(100 * HOUR, Ordering::SeqCst);
    let before = store.status().time;
    store.put("k", "v").await.unwrap();
    assert_eq!(oldest(&store).await, 53);
    assert_eq!(store.status().time, before, "time does not go back");
    store.verify().await.unwrap();
}

#[tokio::test]
async fn retention_reaches_lower_bound_step_by_step() {
    let table = MemoryTable::new();
    let store = open(&table, Retention::UNBOUNDED);
    for i in 0..500 {
        store.put(format!("k{i}"), "v").await.unwrap();
    }
    store.close().await.unwrap();
    let store = open(&table, Retention { revisions: Some(10), ..Retention::UNBOUNDED });
    assert_eq!(count(&table, b'l'), 500);
    store.put("k", "v").await.unwrap();
    assert_eq!(oldest(&store).await, 493, "the mark is there at once");
    let left = count(&table, b'l');
    assert!((400..500).contains(&left), "{left} rows are left");
    store.verify().await.unwrap();
    for _ in 0..20 {
        store.put("k", "v").await.unwrap();
    }
    assert_eq!(count(&table, b'l'), 10);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn retention_compaction_takes_everything() {
    let table = MemoryTable::new();
    let store = open(&table, Retention::UNBOUNDED);
    for i in 0..3000 {
        store.put(format!("k{}", i % 7), "v").await.unwrap();
    }
    store.compact(Revision::new(3001)).await.unwrap();
    assert_eq!(count(&table, b'l'), 1);
    assert_eq!(count(&table, b'v'), 8, "seven live values and the value before the last change");
    assert_eq!(store.verify().await.unwrap().live, 7);
    assert_eq!(store.list(Range::All).await.unwrap().kvs.len(), 7);
}

#[tokio::test]
async fn retention_bounds_store_under_endless_writes() {
    let table = MemoryTable::new();
    let store = open(&table, Retention { revisions: Some(100), ..Retention::UNBOUNDED });
    let mut most = 0;
    for i in 0..3000 {
        store.put(format!("k{}", i % 5), format!("{i}")).await.unwrap();
        if i % 5 == 4 {
            store.delete(Range::prefix("k")).await.unwrap();
        }
        most = most.max(crate::wrapped::rows(&table as &dyn Table).len());
    }
    // The table has at most five rows for each readable revision: the log row, the value, and the log rows of that
    // revision's deletions.
    assert!(most < 600, "{most} rows");
    store.verify().await.unwrap();
}
