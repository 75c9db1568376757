//! Tests the release of all blocks of a pool or node that is going to be deleted.

use ipam_core::affinity::ReleaseIf;
use ipam_core::model::{Affinity, AffinityState, NewPool, Owner, PoolUse, keys};
use ipnet::IpNet;
use kv::StoreExt;

use crate::world::{World, attachment, held, soon};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A test world with two pools. The first pool has one block each of node `a` (with a held address), node `b` and the
/// load balancer; the second pool has a block of node `a`.
async fn world() -> World {
    let world = World::new().await;
    let both = [PoolUse::Workload];
    world.add(NewPool::new("v4", net("10.0.0.0/28")).with_block_size(30).with_allowed_uses(both)).await;
    world.add_pool("other", "10.2.0.0/28").await;
    for (owner, cidr) in [
        (Owner::host("a"), "10.0.0.0/30"),
        (Owner::host("b"), "10.0.0.4/30"),
        (Owner::load_balancer(), "10.0.0.8/30"),
        (Owner::host("a"), "10.2.0.0/30"),
    ] {
        assert_eq!(world.ipam.claim_affinity(&owner, net(cidr), soon()).await.unwrap().claimed.len(), 1);
    }
    let wanted = ipam_core::assign::RequestedAddresses::these(["10.0.0.1".parse().unwrap()]);
    world.assign(&ipam_core::assign::AssignRequest::new(attachment("a", "c1"), wanted)).await.unwrap();
    world
}

#[tokio::test]
async fn retired_pool_loses_blocks_of_all_owners() {
    let world = world().await;
    let done = world.ipam.release_pool_affinities(net("10.0.0.0/28"), ReleaseIf::Empty, soon()).await.unwrap();
    assert_eq!((done.released.len(), done.in_use), (2, vec![net("10.0.0.0/30")]));
    world.check().await;
    let done = world.ipam.release_pool_affinities(net("10.0.0.0/28"), ReleaseIf::Any, soon()).await.unwrap();
    assert_eq!((done.released, done.in_use.len()), (vec![net("10.0.0.0/30")], 0));
    world.check().await;
    assert_eq!(held(&world.ipam, &attachment("a", "c1")).await.len(), 1, "no address is released");
    assert_eq!(world.affinity("a", "10.2.0.0/30").await, Some(AffinityState::Confirmed));
    let before = world.dump().await;
    let again = world.ipam.release_pool_affinities(net("10.0.0.0/28"), ReleaseIf::Any, soon()).await.unwrap();
    assert_eq!((again, world.dump().await), (ipam_core::affinity::ReleasedBlocks::default(), before));
}

#[tokio::test]
async fn retired_pool_loses_stale_affinity_and_block_of_owner() {
    let world = world().await;
    // Node `c` has a stale affinity to the block that node `b` owns now.
    let stale = keys::affinity(&Owner::host("c"), net("10.0.0.4/30")).unwrap();
    world.put(stale, &Affinity::new(AffinityState::PendingDeletion)).await;
    let done = world.ipam.release_pool_affinities(net("10.0.0.0/28"), ReleaseIf::Any, soon()).await.unwrap();
    assert_eq!(done.released.len(), 3);
    world.check().await;
}

#[tokio::test]
async fn retired_pool_tells_damaged_block_after_all_others() {
    let world = world().await;
    world.store.put(keys::block(net("10.0.0.4/30")), "nonsense").await.unwrap();
    let error = world.ipam.release_pool_affinities(net("10.0.0.0/28"), ReleaseIf::Any, soon()).await.unwrap_err();
    assert!(matches!(error, ipam_core::Error::Malformed(_)), "{error}");
    assert_eq!(world.affinity("a", "10.0.0.0/30").await, None);
    assert!(world.block("10.0.0.8/30").await.is_none());
}

#[tokio::test]
async fn removed_node_keeps_container_addresses_but_no_blocks() {
    let world = world().await;
    let legacy = keys::legacy_host("a");
    world.store.put(legacy.clone(), "").await.unwrap();
    // Another program maintains the Node document, and may have deleted it before the node's blocks are released.
    let node = keys::resource(keys::ResourceKind::Node, "a");
    world.store.delete(kv::Range::Key(node)).await.unwrap();
    let done = world.ipam.remove_owner(&Owner::host("a"), soon()).await.unwrap();
    assert_eq!(done.released.len(), 2);
    assert!(world.store.get(legacy).await.unwrap().is_none());
    world.check().await;
    assert_eq!(world.ipam.addresses_of_handle("net.c1", soon()).await.unwrap().len(), 1);
    assert_eq!(world.affinity("b", "10.0.0.4/30").await, Some(AffinityState::Confirmed));
    let before = world.dump().await;
    assert_eq!(world.ipam.remove_owner(&Owner::host("a"), soon()).await.unwrap(), Default::default());
    assert_eq!(world.dump().await, before);
    assert_eq!(world.ipam.remove_owner(&Owner::load_balancer(), soon()).await.unwrap().released.len(), 1);
    world.check().await;
}
