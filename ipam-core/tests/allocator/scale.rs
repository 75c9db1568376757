//! Counts the requests of an assignment in pools with many blocks.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipam_core::Error;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::hints::{FullBlocks, Hints};
use ipam_core::model::{Attribute, Block, IpamConfig, NewPool, Owner, ReleaseRequest, keys};
use ipam_core::sticky::{STICKY, STICKY_UNTIL, WaitEnd};
use ipnet::{IpNet, Ipv4Subnets};
use kv::wrap::{CallCounts, CountingStore};
use time::OffsetDateTime;

use crate::world::{World, attachment, ip, soon};

/// A test world with a pool of 2048 blocks of 16 addresses. Other nodes own `claimed` of the 2048 blocks, and each
/// claimed block has `in_use` addresses in use.
async fn world(claimed: usize, in_use: usize) -> World {
    let world = World::of_one_caller().await;
    world.add(NewPool::new("v4", "10.0.0.0/17".parse().unwrap()).with_block_size(28)).await;
    let (first, last) = ("10.0.0.0".parse().unwrap(), "10.0.127.255".parse().unwrap());
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap();
    // The claimed blocks are spread over the pool, like the claims of real hosts.
    let blocks: Vec<_> = Ipv4Subnets::new(first, last, 28).map(IpNet::from).collect();
    for (number, cidr) in blocks.iter().cycle().step_by(1_009).take(claimed).enumerate() {
        let owner = Owner::host(["b", "c"][number % 2]);
        let mut block = Block::new(*cidr, Some(&owner), at, None).unwrap();
        let holder = Attribute::new(Some("others"), [("node".to_owned(), "b".to_owned())].into());
        block.assign_auto(in_use, &holder, &Default::default());
        world.put(keys::block(*cidr), &block).await;
    }
    world
}

/// Runs the first ADD of node `a`, and returns the block of the assigned address and the number of requests.
async fn first_add(world: &World) -> (ipam_core::Result<IpNet>, CallCounts) {
    first_add_with(world, None).await
}

async fn first_add_with(world: &World, hints: Option<Arc<dyn Hints>>) -> (ipam_core::Result<IpNet>, CallCounts) {
    let counting = CountingStore::new(Arc::clone(&world.store));
    let mut ipam = world.through(Arc::new(counting.clone()));
    if let Some(hints) = hints {
        ipam = ipam.with_hints(hints);
    }
    let container = format!("c{}", fastrand::u32(..));
    let request = AssignRequest::new(attachment("a", &container), RequestedAddresses::any(1, 0));
    let assigned = ipam.assign(&request, soon()).await;
    (assigned.map(|assigned| assigned[0].block), counting.take())
}

#[tokio::test]
async fn claim_costs_same_until_pool_is_nearly_claimed() {
    let (assigned, empty) = first_add(&world(0, 0).await).await;
    assigned.unwrap();
    for claimed in [200, 1_024, 1_843] {
        let (assigned, counts) = first_add(&world(claimed, 16).await).await;
        assigned.unwrap();
        assert_eq!(counts.round_trips(), empty.round_trips(), "{claimed}");
        // In a pool with claimed blocks, the ADD reads only a few more keys than in an empty pool, and no value of a
        // block.
        assert!(counts.bytes_received < empty.bytes_received + 64 * 80, "{counts:?}, {empty:?}");
    }
}

#[tokio::test]
async fn borrowing_does_not_read_whole_pool() {
    let world = world(2_048, 8).await;
    let block = world.block("10.0.0.0/28").await.unwrap();
    let (assigned, counts) = first_add(&world).await;
    assert!(world.block(&assigned.unwrap().to_string()).await.unwrap().owner().is_some());
    let bytes = kv_bytes(&block);
    assert!(counts.bytes_received < 100 * bytes + 2_048 * 80, "{counts:?}; a block has {bytes}");
}

#[tokio::test]
async fn empty_block_is_found_when_nothing_can_be_borrowed() {
    let world = world(2_048, 16).await;
    let free: IpNet = "10.0.99.96/28".parse().unwrap();
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap();
    world.put(keys::block(free), &Block::new(free, Some(&Owner::host("b")), at, None).unwrap()).await;
    for strict in [false, true] {
        world.configure(IpamConfig::default().with_strict_affinity(strict)).await;
        assert_eq!(first_add(&world).await.0.unwrap(), free);
    }
}

/// A [`Hints`] implementation that remembers full blocks until the test clears it.
#[derive(Debug, Default)]
struct Memory(Mutex<FullBlocks>);

impl Hints for Memory {
    fn recall(&self, _: &Attachment) -> Vec<IpNet> {
        Vec::new()
    }

    fn remember(&self, _: &Attachment, _: &[IpNet]) {}

    fn recall_full(&self, _: &Attachment) -> FullBlocks {
        self.0.lock().unwrap().clone()
    }

    fn remember_full(&self, _: &Attachment, blocks: &FullBlocks) {
        self.0.lock().unwrap().extend(blocks);
    }
}

#[tokio::test]
async fn full_pool_is_told_without_reading_blocks_again() {
    let world = world(2_048, 16).await;
    let block = kv_bytes(&world.block("10.0.0.0/28").await.unwrap());
    let memory = Arc::new(Memory::default());
    let add = async || first_add_with(&world, Some(Arc::clone(&memory) as Arc<dyn Hints>)).await;
    let is_exhausted = |assigned: ipam_core::Result<IpNet>| matches!(assigned, Err(Error::Exhausted { .. }));
    let (assigned, first) = add().await;
    assert!(is_exhausted(assigned) && first.bytes_received > 2_000 * block, "{first:?}");
    let (assigned, again) = add().await;
    assert!(is_exhausted(assigned) && again.bytes_received < 2_048 * 80, "{again:?}; a block has {block}");

    // An assignment can use a released address at once, and an address in cooldown as soon as its cooldown ends.
    let free = |text: &str, seconds| {
        let (ip, world) = (ip(text), &world);
        async move {
            world.configure(IpamConfig::default().with_cooldown_seconds(seconds)).await;
            let released = world.ipam.release_ips(&[ReleaseRequest::new(ip)], soon()).await.unwrap();
            assert_eq!(released.released, [ip]);
        }
    };
    free("10.0.55.5", 0).await;
    assert_eq!(add().await.0.unwrap().to_string(), "10.0.55.0/28");
    assert!(is_exhausted(add().await.0));
    free("10.0.66.6", 30).await;
    assert!(is_exhausted(add().await.0));
    assert!(is_exhausted(add().await.0));
    world.pass(31);
    assert_eq!(add().await.0.unwrap().to_string(), "10.0.66.0/28");

    // Once a sticky address no longer waits for its workload, assignments for other workloads can use it.
    let mut kept = world.block("10.0.77.0/28").await.unwrap();
    let until = WaitEnd::At(world.ipam.now() + Duration::from_secs(30)).text();
    let waits = [(STICKY.to_owned(), "shop/web-0".to_owned()), (STICKY_UNTIL.to_owned(), until)];
    assert!(kept.keep(ip("10.0.77.7"), &Attribute::new(None, waits.into())));
    kept.bump();
    world.put(keys::block(kept.cidr()), &kept).await;
    assert!(is_exhausted(add().await.0));
    assert!(is_exhausted(add().await.0));
    world.pass(31);
    assert_eq!(add().await.0.unwrap().to_string(), "10.0.77.0/28");
}

fn kv_bytes(block: &Block) -> u64 {
    use ipam_core::model::Document;
    block.encode().unwrap().len() as u64
}
