//! Tests claims in pools whose blocks are mostly claimed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use async_trait::async_trait;
use ipam_core::Nodes;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::{Attribute, Block, NewPool, Owner, Pool, keys};
use ipam_core::pools::{blocks_from, start_of};
use ipam_core::reservations::Reservations;
use ipnet::IpNet;
use kv::wrap::CountingStore;
use kv::{Op, RangeRequest, RangeResponse, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};
use time::OffsetDateTime;

use crate::world::{World, attachment, soon};

/// Adds a pool, and returns the pool's blocks in the order in which host `a` tries to claim the blocks.
async fn pool_and_walk(world: &World, cidr: &str) -> Vec<IpNet> {
    world.add_pool("v4", cidr).await;
    let new = NewPool::new("v4", cidr.parse().unwrap()).with_block_size(30);
    let pool = Pool::new(&new, "uid", OffsetDateTime::UNIX_EPOCH).unwrap();
    blocks_from(&pool, start_of("a")).collect()
}

/// Creates a request for one address for a container on host `a`.
fn one(container: &str) -> AssignRequest {
    AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0))
}

/// Claims empty blocks for node `c`.
async fn claim(world: &World, blocks: &[IpNet]) {
    let owner = Owner::host("c");
    for cidr in blocks {
        let block = Block::new(*cidr, Some(&owner), OffsetDateTime::UNIX_EPOCH, None).unwrap();
        world.put(keys::block(*cidr), &block).await;
    }
}

/// A store wrapper that lets node `c` create the same block just before the first commit that creates a block.
#[derive(Debug)]
struct Overtaken {
    world: World,
    is_over: AtomicBool,
}

#[async_trait]
impl Store for Overtaken {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.world.store.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        let mut written = txn.success.iter().filter_map(|op| match op {
            Op::Put { key, .. } => keys::parse_block(key),
            _ => None,
        });
        if let Some(cidr) = written.next().filter(|_| !self.is_over.swap(true, SeqCst)) {
            claim(&self.world, &[cidr]).await;
        }
        self.world.store.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.world.store.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.world.store.compact(revision).await
    }
}

#[tokio::test]
async fn overtaken_hosts_try_different_blocks() {
    // In a pool of 1,024 blocks, the search of each of these hosts starts at the same block.
    let names = (0..).map(|number| format!("node-{number}")).filter(|name| start_of(name) % 1_024 == 7).take(16);
    let mut found = BTreeSet::new();
    for name in names {
        let world = World::of_one_caller().await;
        let walk = pool_and_walk(&world, "10.0.0.0/20").await;
        world.add_node(&name, &[]).await;
        let counting =
            CountingStore::new(Arc::new(Overtaken { world: world.clone(), is_over: AtomicBool::new(false) }));
        let request = AssignRequest::new(attachment(&name, "c1"), RequestedAddresses::any(1, 0));
        let assigned = world.through(Arc::new(counting.clone())).assign(&request, soon()).await.unwrap();
        assert!(walk.contains(&assigned[0].block));
        assert!(counting.take().round_trips() <= 7, "two attempts of three requests, and one for overlapping blocks");
        found.insert(assigned[0].block);
    }
    assert!(found.len() >= 12, "16 hosts whose first commit failed try {found:?}");
}

#[tokio::test]
async fn crowded_host_finds_block_with_one_more_request() {
    let world = World::of_one_caller().await;
    let walk = pool_and_walk(&world, "10.0.0.0/16").await;
    let counting = CountingStore::new(Arc::clone(&world.store));
    let counted = World::on(Arc::new(counting.clone()), Nodes::Registered);
    let requests = async |container: &str| {
        counting.take();
        let assigned = counted.assign(&one(container)).await.unwrap();
        let requests = counting.take().round_trips();
        (assigned[0].block, requests)
    };
    let (first, alone) = requests("c1").await;
    assert_eq!(first, walk[0], "the first block is the one at the host's own start");
    counted.ipam.release_by_container("c1", soon()).await.unwrap();
    let owner = Owner::host("a");
    counted.ipam.remove_owner(&owner, soon()).await.unwrap();
    claim(&world, &walk[..8_000]).await;
    let (found, crowded) = requests("c2").await;
    assert!(!walk[..8_000].contains(&found));
    assert!(crowded <= alone + 1, "{crowded} requests instead of {alone}");
}

#[tokio::test]
async fn crowded_pool_gives_last_free_block_wherever_it_is() {
    for place in [70, 400, 1_023] {
        let world = World::of_one_caller().await;
        let walk = pool_and_walk(&world, "10.0.0.0/20").await;
        let free = walk[place];
        let others: BTreeSet<IpNet> = walk.into_iter().filter(|cidr| *cidr != free).collect();
        claim(&world, &others.into_iter().collect::<Vec<_>>()).await;
        assert_eq!(world.assign(&one("c1")).await.unwrap()[0].block, free, "{place}");
    }
}

/// Claims blocks for node `c`, and puts an address in use into each block.
async fn occupy(world: &World, blocks: impl IntoIterator<Item = IpNet>) {
    let (owner, reservations) = (Owner::host("c"), Reservations::default());
    for cidr in blocks {
        let mut block = Block::new(cidr, Some(&owner), OffsetDateTime::UNIX_EPOCH, None).unwrap();
        block.assign_auto(1, &Attribute::new(Some("other"), BTreeMap::new()), &reservations);
        world.put(keys::block(cidr), &block).await;
    }
}

#[tokio::test]
async fn crowded_pool_takes_empty_block_over_before_borrowing() {
    for place in [3, 40] {
        let world = World::of_one_caller().await;
        let walk = pool_and_walk(&world, "10.0.0.0/24").await;
        let empty = walk[place];
        claim(&world, &[empty]).await;
        occupy(&world, walk.into_iter().filter(|cidr| *cidr != empty)).await;
        assert_eq!(world.assign(&one("c1")).await.unwrap()[0].block, empty, "{place}");
        assert_eq!(world.block(&empty.to_string()).await.unwrap().owner(), Some(Owner::host("a")));
    }
}

/// In this test, an interrupted foreign writer has left an empty block without an owner.
#[tokio::test]
async fn crowded_pool_takes_over_empty_block_without_owner() {
    let world = World::of_one_caller().await;
    let walk = pool_and_walk(&world, "10.0.0.0/28").await;
    let unowned = Block::new(walk[2], None, OffsetDateTime::UNIX_EPOCH, None).unwrap();
    world.put(keys::block(walk[2]), &unowned).await;
    occupy(&world, walk.iter().copied().filter(|cidr| *cidr != walk[2])).await;
    assert_eq!(world.assign(&one("c1")).await.unwrap()[0].block, walk[2]);
    assert_eq!(world.block(&walk[2].to_string()).await.unwrap().owner(), Some(Owner::host("a")));
}
