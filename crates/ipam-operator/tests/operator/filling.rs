//! Tests that a store with an import lock refuses all writes, even of operations that began before the lock was set.

use ipam_core::Error;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::{ReleaseRequest, keys};
use ipam_operator::moving::{ImportLock, ImportState, MoveKind, import_lock_key};
use kv::{Range, StoreExt, TransactOptions};

use crate::Operated;
use crate::world::{World, attachment, ip, soon};

fn mark() -> ImportLock {
    ImportLock {
        way: MoveKind::Migrate,
        from: "sled:///a".into(),
        to: "redb:///b".into(),
        source: "id".into(),
        state: ImportState::Copying,
        revision: 0,
    }
}

fn is_refused<T>(done: Result<T, Error>) {
    match done.map(drop) {
        Err(Error::ImportLocked(filling)) => {
            assert!(filling.to_string().ends_with("margay migrate sled:///a redb:///b"), "{filling}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn unfinished_import_gives_and_takes_nothing() {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/28").await;
    world.add_pool("other", "10.1.0.0/28").await;
    let held = world.one("a", "c1").await.unwrap();
    world.store.put(import_lock_key(), mark().encode()).await.unwrap();
    let before = world.store.list(Range::All).await.unwrap();
    let (one, other) = (attachment("a", "c1"), attachment("a", "c2"));
    let ipam = &world.ipam;
    is_refused(world.one("a", "c2").await);
    // The import lock's error replaces the `NotFound` error, because the missing pool may not have been copied yet.
    let outside = AssignRequest::new(other, RequestedAddresses::these(vec![ip("192.0.2.1")]));
    is_refused(ipam.assign(&outside, soon()).await);
    is_refused(ipam.would_assign(&outside, soon()).await);
    is_refused(ipam.release_attachment(&one, &[], soon()).await);
    is_refused(ipam.release_by_handle(&one.handle(), soon()).await);
    is_refused(ipam.release_ips(&[ReleaseRequest::new(held)], soon()).await);
    is_refused(ipam.compare(&one, &[], &[held], soon()).await);
    is_refused(world.operator().delete_pool("other", soon()).await);
    is_refused(ipam.create_reservation("r", &["10.0.0.0/30".parse().unwrap()], soon()).await);
    assert_eq!(world.store.list(Range::All).await.unwrap().kvs, before.kvs);
    // Reads are allowed while the store has an import lock.
    assert_eq!(ipam.addresses_of_handle(&one.handle(), soon()).await.unwrap(), [held]);
    assert_eq!(ipam.inventory(soon()).await.unwrap().pools.len(), 2);
    world.store.delete(Range::Key(import_lock_key())).await.unwrap();
    assert_eq!(ipam.release_attachment(&one, &[], soon()).await.unwrap(), [held]);
}

#[tokio::test]
async fn unfinished_import_refuses_commits_begun_before_mark() {
    let world = World::new().await;
    let key = keys::handle("h");
    let options = TransactOptions::new(soon()).with_extra_reads([import_lock_key()]);
    let mut attempts = kv::Attempts::new(world.store.clone(), options);
    let mut early = attempts.begin().await.unwrap();
    early.get(&key).await.unwrap();
    assert!(early.get(&import_lock_key()).await.unwrap().is_none());
    early.put(&key, "{}").unwrap();
    world.store.put(import_lock_key(), mark().encode()).await.unwrap();
    assert!(attempts.end(early, Ok::<_, kv::Error>(())).await.unwrap().is_none(), "it was committed");
    assert!(world.store.get(key).await.unwrap().is_none());
}
