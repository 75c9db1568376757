//! Tests leases and the compaction mark for clients in a store of format 2.

use std::time::Duration;

use kv::{
    Compare, CompareOp, ErrorKind, EventKind, GrantOutcome, Key, Lease, LeaseId, Op, Purpose, Range, RangeRequest,
    Revision, Store, StoreExt, Target, Txn, WatchRequest,
};
use kv_mvcc::{FORMAT, FORMAT_WITH_LEASES, MemoryTable, MvccStore, Options, Retention, SpaceReserve};

use crate::wrapped::{Fault, Wrapped};

fn options() -> Options {
    Options { format: FORMAT_WITH_LEASES, ..Options::default() }
}

fn id(number: i64) -> LeaseId {
    LeaseId::new(number).unwrap()
}

fn lease(number: i64) -> Lease {
    Lease { id: id(number), ttl: Duration::from_secs(60) }
}

async fn put(store: &MvccStore, key: &str, to: Option<LeaseId>) -> kv::Result<Revision> {
    let put = Op::put(key, "v");
    let put = to.map_or(put.clone(), |to| put.with_lease(to));
    Ok(store.txn(Txn::new().with_success([put])).await?.revision)
}

async fn attached(store: &MvccStore, number: i64) -> Vec<Key> {
    store.leased(id(number)).await.unwrap()
}

#[tokio::test]
async fn lease_ends_with_all_keys_at_one_revision() {
    let store = MvccStore::open(Box::new(MemoryTable::new()), options()).unwrap();
    let before = store.status().revision;
    assert_eq!(store.grant(lease(7)).await.unwrap(), GrantOutcome::New);
    assert_eq!(store.grant(lease(7)).await.unwrap(), GrantOutcome::Taken);
    assert_eq!(store.status().revision, before, "a grant is no write of keys");
    for key in ["b", "a", "c"] {
        put(&store, key, Some(id(7))).await.unwrap();
    }
    put(&store, "other", None).await.unwrap();
    assert_eq!(attached(&store, 7).await, ["a", "b", "c"].map(Key::from));
    assert_eq!(store.get("a").await.unwrap().unwrap().lease, Some(id(7)));
    let end = store.revoke(id(7)).await.unwrap();
    assert_eq!(end, store.status().revision);
    let changes = store.changes(WatchRequest::new(Range::All, end)).await.unwrap();
    let events: Vec<_> = changes.batches[0].events.iter().map(|event| (event.kind, event.kv.key.clone())).collect();
    assert_eq!(events, ["a", "b", "c"].map(|key| (EventKind::Delete, Key::from(key))));
    assert_eq!(store.leases().await.unwrap(), []);
    assert_eq!(*store.revoke(id(7)).await.unwrap_err().kind(), ErrorKind::LeaseNotFound);
    assert_eq!(*put(&store, "a", Some(id(7))).await.unwrap_err().kind(), ErrorKind::LeaseNotFound);
    assert!(store.get("other").await.unwrap().is_some());
    store.verify().await.unwrap();
}

#[tokio::test]
async fn lease_of_key_is_set_by_last_put() {
    let table = MemoryTable::new();
    let store = MvccStore::open(Box::new(table.clone()), options()).unwrap();
    for number in [1, 2, -3, i64::MAX, i64::MIN] {
        store.grant(lease(number)).await.unwrap();
    }
    let first = put(&store, "k", Some(id(1))).await.unwrap();
    put(&store, "k", Some(id(2))).await.unwrap();
    assert_eq!((attached(&store, 1).await, attached(&store, 2).await), (vec![], vec![Key::from("k")]));
    put(&store, "k", None).await.unwrap();
    assert_eq!(attached(&store, 2).await, []);
    put(&store, "k", Some(id(-3))).await.unwrap();
    put(&store, "l", Some(id(-3))).await.unwrap();
    store.delete(Range::key("k")).await.unwrap();
    assert_eq!(attached(&store, -3).await, [Key::from("l")]);
    for number in [i64::MAX, i64::MIN] {
        put(&store, "m", Some(id(number))).await.unwrap();
        assert_eq!(attached(&store, number).await, [Key::from("m")]);
    }
    // A read at an old revision returns the lease that the key had at that revision.
    let past = store.range(RangeRequest::new(Range::key("k")).with_at(first)).await.unwrap();
    assert_eq!(past.kvs[0].lease, Some(id(1)));
    let changes = store.changes(WatchRequest::new(Range::key("k"), first)).await.unwrap();
    let leases: Vec<_> = changes.batches.iter().map(|batch| batch.events[0].kv.lease).collect();
    assert_eq!(leases, [Some(id(1)), Some(id(2)), None, Some(id(-3)), None]);
    store.verify().await.unwrap();
    drop(store);
    let store = MvccStore::open(Box::new(table), options()).unwrap();
    assert_eq!(store.leases().await.unwrap().len(), 5);
    assert_eq!(attached(&store, -3).await, [Key::from("l")]);
}

#[tokio::test]
async fn lease_is_not_attached_by_failed_transaction() {
    let store = MvccStore::open(Box::new(MemoryTable::new()), options()).unwrap();
    store.grant(lease(1)).await.unwrap();
    let both = Txn::new().with_success([Op::put("a", "v").with_lease(id(1)), Op::put("b", "v").with_lease(id(9))]);
    let error = store.txn(both).await.unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::LeaseNotFound, kv::Outcome::NotApplied));
    assert_eq!(attached(&store, 1).await, []);
    assert!(store.get("a").await.unwrap().is_none());
    // A transaction may name a missing lease in the branch that does not run.
    let other = Txn::new().with_success([Op::put("a", "v")]).with_failure([Op::put("b", "v").with_lease(id(9))]);
    assert!(store.txn(other).await.unwrap().succeeded);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn lease_can_be_compared() {
    let store = MvccStore::open(Box::new(MemoryTable::new()), options()).unwrap();
    store.grant(lease(5)).await.unwrap();
    put(&store, "k", Some(id(5))).await.unwrap();
    for (key, op, given, holds) in [
        ("k", CompareOp::Equal, 5, true),
        ("k", CompareOp::NotEqual, 0, true),
        ("k", CompareOp::Less, 5, false),
        ("none", CompareOp::Equal, 0, true),
        ("none", CompareOp::Greater, 0, false),
    ] {
        let compare = Compare::new(Range::key(key), op, Target::Lease(given));
        let read = Txn::new().with_compares([compare.clone()]);
        assert_eq!(store.txn(read).await.unwrap().succeeded, holds, "{compare:?}");
        let write = Txn::new().with_compares([compare.clone()]).with_success([Op::put("written", "v")]);
        assert_eq!(store.txn(write).await.unwrap().succeeded, holds, "{compare:?}");
    }
}

#[tokio::test]
async fn lease_needs_upgraded_format() {
    let table = MemoryTable::new();
    let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
    assert_eq!(store.status().format, FORMAT);
    assert_eq!(*store.grant(lease(1)).await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(*put(&store, "k", Some(id(1))).await.unwrap_err().kind(), ErrorKind::LeaseNotFound);
    let revision = put(&store, "k", None).await.unwrap();
    // Format 1 has a single compaction mark, so a compaction that a client requests really removes history.
    store.compact_for_clients(revision).await.unwrap();
    assert_eq!(store.status().compacted, revision);
}

#[tokio::test]
async fn lease_mark_of_client_leaves_history() {
    let store = MvccStore::open(Box::new(MemoryTable::new()), options()).unwrap();
    let first = put(&store, "k", None).await.unwrap();
    let last = put(&store, "k", None).await.unwrap();
    store.compact_for_clients(last).await.unwrap();
    let status = store.status();
    assert_eq!((status.oldest_for_clients, status.compacted), (last, Revision::UNSET));
    assert!(store.range(RangeRequest::new(Range::key("k")).with_at(first)).await.is_ok());
    for at in [first, last] {
        let error = store.compact_for_clients(at).await.unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Compacted { compact_revision: last });
    }
    let future = store.compact_for_clients(last.next()).await.unwrap_err();
    assert_eq!(*future.kind(), ErrorKind::FutureRevision);
    // An ordinary compaction also raises the clients' compaction mark.
    let newest = put(&store, "k", None).await.unwrap();
    store.compact(newest).await.unwrap();
    assert_eq!(store.status().oldest_for_clients, newest);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn lease_of_many_keys_ends_under_tight_retention() {
    let retention = Retention { revisions: Some(3), ..Retention::default() };
    let store = MvccStore::open(Box::new(MemoryTable::new()), Options { retention, ..options() }).unwrap();
    store.grant(lease(1)).await.unwrap();
    for number in 0..500 {
        put(&store, &format!("k{number}"), Some(id(1))).await.unwrap();
    }
    store.revoke(id(1)).await.unwrap();
    assert_eq!(store.status().live, 0);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn lease_is_whole_or_ended_when_table_fails() {
    for fault in [Fault::Refused(&ErrorKind::CommitIo), Fault::Applied] {
        let table = Wrapped::default();
        let store = table.store(options());
        table.fail_next(fault);
        let granted = store.grant(lease(1)).await;
        assert_eq!(granted.is_ok(), store.leases().await.unwrap().len() == 1, "{fault:?}: {granted:?}");
        let _ = store.grant(lease(1)).await.unwrap();
        put(&store, "k", Some(id(1))).await.unwrap();
        table.fail_next(fault);
        let revoked = store.revoke(id(1)).await;
        assert_eq!(revoked.is_ok(), store.leases().await.unwrap().is_empty(), "{fault:?}: {revoked:?}");
        assert_eq!(revoked.is_ok(), store.get("k").await.unwrap().is_none());
        store.verify().await.unwrap();
    }
}

#[derive(Debug)]
struct Full;

impl SpaceReserve for Full {
    fn restore(&self) -> Result<(), String> {
        Ok(())
    }

    fn check_room(&self) -> Result<(), (ErrorKind, String)> {
        Err((ErrorKind::NoSpace, "the disk is full".to_owned()))
    }

    fn is_short(&self) -> bool {
        false
    }

    fn release_part(&self) -> bool {
        true
    }
}

#[tokio::test]
async fn lease_ends_on_full_disk() {
    let table = Wrapped::default();
    let store = table.store(Options { reserve: Some(std::sync::Arc::new(Full)), ..options() });
    store.grant(lease(1)).await.unwrap();
    put(&store, "k", Some(id(1))).await.unwrap();
    table.fail_next(Fault::Refused(&ErrorKind::NoSpace));
    store.with_purpose(Purpose::Any).revoke(id(1)).await.unwrap();
    assert!(store.get("k").await.unwrap().is_none());
}
