//! What an assignment asks for where there are many blocks, counted.

use std::sync::Arc;

use ipam_core::assign::{AssignRequest, Wanted};
use ipam_core::model::{Attribute, Block, IpamConfig, NewPool, Owner, keys};
use ipam_core::{Error, Ipam, Nodes};
use ipnet::{IpNet, Ipv4Subnets};
use kv::wrap::{Counting, Counts};
use time::OffsetDateTime;

use crate::world::{World, attachment, soon};

/// A pool of 2048 blocks of 16 addresses, of which `claimed` are other nodes', with so many addresses in use in each.
async fn world(claimed: usize, in_use: usize) -> World {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/17".parse().unwrap()).with_block_size(28)).await;
    let (first, last) = ("10.0.0.0".parse().unwrap(), "10.0.127.255".parse().unwrap());
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap();
    // Spread over the pool, as hosts spread them.
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

/// What the first ADD of node `a` asks for.
async fn first_add(world: &World) -> (ipam_core::Result<IpNet>, Counts) {
    let counting = Counting::new(Arc::clone(&world.store));
    let ipam = Ipam::new(Arc::new(counting.clone()), Nodes::Registered);
    let request = AssignRequest::new(attachment("a", "c1"), Wanted::any(1, 0));
    let assigned = ipam.assign(&request, soon()).await;
    (assigned.map(|assigned| assigned[0].block), counting.take())
}

#[tokio::test]
async fn a_claim_costs_the_same_until_the_pool_is_nearly_claimed() {
    let (assigned, empty) = first_add(&world(0, 0).await).await;
    assigned.unwrap();
    for claimed in [200, 1_024, 1_843] {
        let (assigned, counts) = first_add(&world(claimed, 16).await).await;
        assigned.unwrap();
        assert_eq!(counts.round_trips(), empty.round_trips(), "{claimed}");
        // No block's value is read, only some keys besides.
        assert!(counts.bytes_received < empty.bytes_received + 64 * 80, "{counts:?}, {empty:?}");
    }
}

#[tokio::test]
async fn who_has_to_borrow_does_not_read_the_whole_pool() {
    let world = world(2_048, 8).await;
    let block = world.block("10.0.0.0/28").await.unwrap();
    let (assigned, counts) = first_add(&world).await;
    assert!(world.block(&assigned.unwrap().to_string()).await.unwrap().owner().is_some());
    let bytes = kv_bytes(&block);
    assert!(counts.bytes_received < 100 * bytes + 2_048 * 80, "{counts:?}; a block has {bytes}");
}

#[tokio::test]
async fn an_empty_block_is_found_wherever_it_is_if_nothing_can_be_borrowed() {
    let world = world(2_048, 16).await;
    let free: IpNet = "10.0.99.96/28".parse().unwrap();
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap();
    world.put(keys::block(free), &Block::new(free, Some(&Owner::host("b")), at, None).unwrap()).await;
    for strict in [false, true] {
        world.configure(IpamConfig::default().with_strict_affinity(strict)).await;
        assert_eq!(first_add(&world).await.0.unwrap(), free);
    }
}

#[tokio::test]
async fn a_full_pool_says_so() {
    let world = world(2_048, 16).await;
    let error = first_add(&world).await.0.unwrap_err();
    assert!(matches!(error, Error::Exhausted { .. }), "{error}");
}

fn kv_bytes(block: &Block) -> u64 {
    use ipam_core::model::Document;
    block.encode().unwrap().len() as u64
}
