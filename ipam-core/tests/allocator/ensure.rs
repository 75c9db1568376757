//! Tests that `ensure_blocks` gives an owner a block unless the owner has a block already.

use ipam_core::Error;
use ipam_core::assign::BlockRequest;
use ipam_core::model::{AffinityState, Block, Document, IpamConfig, NewPool, Owner, PoolUse, keys};
use ipam_core::net::Family;
use ipnet::IpNet;
use kv::StoreExt;

use crate::world::{World, soon};

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.add_pool("v6", "fd00::/124").await;
    world
}

/// Shorthands for the tests of `ensure_blocks`.
trait Ensuring {
    async fn ensure(&self, node: &str, families: &[Family]) -> ipam_core::Result<Vec<IpNet>>;

    async fn revision(&self) -> kv::Revision;
}

impl Ensuring for World {
    async fn ensure(&self, node: &str, families: &[Family]) -> ipam_core::Result<Vec<IpNet>> {
        self.ipam.ensure_blocks(&BlockRequest::new(Owner::host(node), families), soon()).await
    }

    async fn revision(&self) -> kv::Revision {
        self.store.list(kv::Range::All).await.unwrap().revision
    }
}

#[tokio::test]
async fn ensure_claims_blocks_of_both_families_in_one_commit() {
    let world = world().await;
    let before = world.revision().await;
    let blocks = world.ensure("a", &[Family::V6, Family::V4]).await.unwrap();
    assert_eq!(blocks.iter().map(|block| Family::of_net(*block)).collect::<Vec<_>>(), [Family::V4, Family::V6]);
    assert_eq!(world.revision().await, before.next());
    world.check().await;
    assert_eq!(world.ensure("a", &[Family::V4, Family::V6]).await.unwrap(), blocks);
    assert_eq!(world.ensure("a", &[Family::V6]).await.unwrap(), blocks[1..]);
    assert_eq!(world.revision().await, before.next(), "existing blocks cost no write");
    let given = world.one("a", "c1").await.unwrap();
    assert!(blocks[0].contains(&given), "{given}");
}

#[tokio::test]
async fn ensure_counts_full_block_and_takes_no_foreign_ones() {
    let world = world().await;
    for container in ["c1", "c2", "c3", "c4"] {
        world.one("a", container).await.unwrap();
    }
    let own = world.ensure("a", &[Family::V4]).await.unwrap();
    assert_eq!(world.block(&own[0].to_string()).await.unwrap().free_addresses().count(), 0);
    let other = world.ensure("b", &[Family::V4]).await.unwrap();
    assert_ne!(own, other);
    // The pool of this test has only two blocks, which nodes `a` and `b` own, so node `c` gets none. An empty block
    // that was claimed long ago can be taken over.
    assert!(matches!(world.ensure("c", &[Family::V4]).await, Err(Error::NoNewBlocks)));
    world.pass(61);
    assert_eq!(world.ensure("c", &[Family::V4]).await.unwrap(), other);
    assert_eq!(world.affinity("b", &other[0].to_string()).await, None);
    world.check().await;
}

#[tokio::test]
async fn ensure_without_new_blocks_takes_only_existing() {
    let world = world().await;
    let own = world.ensure("a", &[Family::V4]).await.unwrap();
    world.configure(IpamConfig::default().with_strict_affinity(true).with_auto_allocate_blocks(false)).await;
    assert_eq!(world.ensure("a", &[Family::V4]).await.unwrap(), own);
    let before = world.dump().await;
    assert!(matches!(world.ensure("b", &[Family::V4]).await, Err(Error::NoNewBlocks)));
    assert!(matches!(world.ensure("a", &[Family::V4, Family::V6]).await, Err(Error::NoNewBlocks)), "all or none");
    assert_eq!(world.dump().await, before);
}

#[tokio::test]
async fn ensure_completes_what_others_left_half_done() {
    let world = world().await;
    let cidr = world.ensure("a", &[Family::V4]).await.unwrap()[0];
    for state in [AffinityState::Pending, AffinityState::PendingDeletion] {
        let key = keys::affinity(&Owner::host("a"), cidr).unwrap();
        world.put(key, &ipam_core::model::Affinity::new(state)).await;
        assert_eq!(world.ensure("a", &[Family::V4]).await.unwrap(), [cidr]);
        world.check().await;
    }
    // In this test the store first contains an affinity without its block, and later an affinity to a block of another
    // owner.
    world.store.delete(kv::Range::Key(keys::block(cidr))).await.unwrap();
    assert_eq!(world.ensure("a", &[Family::V4]).await.unwrap(), [cidr]);
    world.check().await;
    let mut block = world.block(&cidr.to_string()).await.unwrap();
    block.set_owner(&Owner::host("b"), time::OffsetDateTime::UNIX_EPOCH);
    world.store.put(keys::block(cidr), Block::encode(&block).unwrap()).await.unwrap();
    assert_ne!(world.ensure("a", &[Family::V4]).await.unwrap(), [cidr]);
    assert_eq!(world.affinity("a", &cidr.to_string()).await, None);
}

#[tokio::test]
async fn ensure_uses_named_pools_or_those_of_owner() {
    let world = world().await;
    world.add_pool("other", "10.2.0.0/29").await;
    let named = BlockRequest::new(Owner::host("a"), &[Family::V4]).with_pools(Family::V4, ["other"]);
    let block = world.ipam.ensure_blocks(&named, soon()).await.unwrap()[0];
    assert!("10.2.0.0/29".parse::<IpNet>().unwrap().contains(&block), "{block}");
    let balancer = BlockRequest::new(Owner::load_balancer(), &[Family::V4]);
    let error = world.ipam.ensure_blocks(&balancer, soon()).await.unwrap_err();
    assert!(matches!(error, Error::Pool(_)), "{error}");
    let services = NewPool::new("services", "10.3.0.0/29".parse().unwrap()).with_block_size(30);
    world.add(services.with_allowed_uses([PoolUse::LoadBalancer])).await;
    let block = world.ipam.ensure_blocks(&balancer, soon()).await.unwrap()[0];
    assert!("10.3.0.0/29".parse::<IpNet>().unwrap().contains(&block), "{block}");
    assert!(matches!(world.ensure("nosuch", &[Family::V4]).await, Err(Error::UnknownNode(_))));
    world.check().await;
}

#[tokio::test]
async fn ensure_skips_block_when_all_reserved() {
    let world = world().await;
    let first = world.ensure("a", &[Family::V4]).await.unwrap()[0];
    world.reserve(&[&first.to_string()]).await;
    let second = world.ensure("a", &[Family::V4]).await.unwrap()[0];
    assert_ne!(first, second);
    world.check().await;
}

#[tokio::test]
async fn ensure_counts_secondary_blocks_towards_node_limit() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.configure(IpamConfig::default().with_max_blocks_per_host(1)).await;
    world.ipam.claim_affinity(&Owner::secondary("a"), "10.0.0.0/30".parse().unwrap(), soon()).await.unwrap();
    assert!(matches!(world.ensure("a", &[Family::V4]).await, Err(Error::BlockLimit)));
    world.configure(IpamConfig::default().with_max_blocks_per_host(2)).await;
    world.ensure("a", &[Family::V4]).await.unwrap();
    world.check().await;
}
