//! Tests concurrent callers: no address is assigned twice or lost, and every revision of the store is consistent.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use ipam_core::Nodes;
use ipam_core::model::{Block, Document, keys};
use kv::wrap::{Fault, FaultyStore};
use kv::{Event, EventKind, Kv, Operation, Range, RangeResponse, StoreExt, WatchRequest};

use crate::world::{World, consistent};

/// Runs callers on three nodes that assign and release addresses of a small pool, so that the nodes claim, borrow and
/// take over blocks.
async fn churn(world: &World, callers: usize, rounds: usize) {
    let held: Arc<Mutex<BTreeMap<std::net::IpAddr, String>>> = Arc::default();
    let tasks = (0..callers).map(|caller| {
        let (world, held) = (world.clone(), Arc::clone(&held));
        tokio::spawn(async move {
            let node = ["a", "b", "c"][caller % 3];
            for round in 0..rounds {
                let container = format!("c{caller}-{round}");
                match world.one(node, &container).await {
                    Ok(ip) => {
                        let other = held.lock().unwrap().insert(ip, container.clone());
                        assert_eq!(other, None, "{ip} was given to {container} too");
                        for _ in 0..round {
                            tokio::task::yield_now().await;
                        }
                        held.lock().unwrap().remove(&ip);
                    }
                    Err(ipam_core::Error::Exhausted { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                world.pass(10);
                world.release(node, &container).await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_calls_give_no_address_twice_and_lose_none() {
    let quiet = World::new().await;
    quiet.add_pool("v4", "10.0.0.0/27").await;
    let start = quiet.store.list(Range::All).await.unwrap();
    churn(&faulty(&quiet), 12, 15).await;
    nothing_is_left(&every_revision_is_consistent(&quiet, start).await);
}

/// Wraps the store of a test `World` so that every tenth transaction fails in some way.
pub(crate) fn faulty(quiet: &World) -> World {
    let calls = AtomicU32::new(0);
    let faulty = FaultyStore::new(Arc::clone(&quiet.store), move |operation| {
        let call = calls.fetch_add(1, SeqCst);
        let faults = [Fault::ReplyLost, Fault::RequestLost, Fault::NotSent];
        (operation == Operation::Txn && call % 10 == 9).then(|| faults[call as usize / 10 % 3])
    });
    World::on(Arc::new(faulty), Nodes::Registered)
}

/// Replays every revision since `start`, checks that the documents of each revision are consistent, and returns the
/// final rows of the store.
pub(crate) async fn every_revision_is_consistent(quiet: &World, start: RangeResponse) -> Vec<Kv> {
    let end = quiet.store.list(Range::All).await.unwrap();
    let mut state: BTreeMap<kv::Key, Kv> = start.kvs.into_iter().map(|kv| (kv.key.clone(), kv)).collect();
    let mut changes = quiet.store.watch(WatchRequest::new(Range::All, start.revision.next())).await.unwrap();
    let mut revision = start.revision;
    while revision < end.revision {
        let batch = changes.next().await.unwrap().unwrap();
        revision = batch.revision;
        for Event { kind, kv, .. } in batch.events {
            match kind {
                EventKind::Put => drop(state.insert(kv.key.clone(), kv)),
                EventKind::Delete => drop(state.remove(&kv.key)),
            }
        }
        consistent(&state.values().cloned().collect::<Vec<_>>());
    }
    end.kvs
}

/// Fails if the store still contains a held address or a handle.
fn nothing_is_left(kvs: &[Kv]) {
    let left: usize = kvs
        .iter()
        .filter(|kv| keys::parse_block(&kv.key).is_some())
        .map(|kv| Block::decode(&kv.key, kv.value.as_bytes()).unwrap().allocated().count())
        .sum();
    assert_eq!(left, 0);
    assert!(kvs.iter().all(|kv| keys::parse_handle(&kv.key).is_none()));
}
