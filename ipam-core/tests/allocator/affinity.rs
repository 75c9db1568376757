//! Tests that nodes claim and release blocks, with one caller, with store faults, and with concurrent callers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use ipam_core::affinity::{MAX_BLOCKS_CLAIMED, ReleaseIf};
use ipam_core::model::keys;
use ipam_core::model::{Affinity, AffinityState, Block, Owner};
use ipam_core::{Error, Nodes};
use ipnet::IpNet;
use kv::wrap::{Fault, FaultyStore};
use kv::{Operation, Range, StoreExt};
use time::OffsetDateTime;

use crate::world::{World, soon};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/26").await;
    world
}

/// Shorthands for claiming and releasing blocks by node name and CIDR.
trait Claiming {
    async fn claim(&self, node: &str, cidr: &str) -> (usize, usize);

    async fn give_back(&self, node: &str, cidr: &str, which: ReleaseIf) -> (usize, usize);

    async fn blocks(&self) -> usize;
}

impl Claiming for World {
    async fn claim(&self, node: &str, cidr: &str) -> (usize, usize) {
        let done = self.ipam.claim_affinity(&Owner::host(node), net(cidr), soon()).await.unwrap();
        (done.claimed.len(), done.failed.len())
    }

    async fn give_back(&self, node: &str, cidr: &str, which: ReleaseIf) -> (usize, usize) {
        let done = self.ipam.release_affinity(&Owner::host(node), net(cidr), which, soon()).await.unwrap();
        (done.released.len(), done.in_use.len())
    }

    async fn blocks(&self) -> usize {
        self.dump().await.iter().filter(|kv| keys::parse_block(&kv.key).is_some()).count()
    }
}

#[tokio::test]
async fn affinity_claims_part_of_pool_for_one_node() {
    let world = world().await;
    assert_eq!(world.claim("a", "10.0.0.0/28").await, (4, 0));
    world.check().await;
    let before = world.dump().await;
    assert_eq!(world.claim("a", "10.0.0.0/28").await, (4, 0));
    assert_eq!(world.dump().await, before, "a claimed block costs no write");
    assert_eq!(world.claim("b", "10.0.0.8/29").await, (0, 2));
    assert_eq!(world.claim("b", "10.0.0.8/28").await, (0, 4), "the network is that of the address");
    assert_eq!(world.claim("b", "10.0.0.0/27").await, (4, 4));
    world.check().await;
    // An assignment takes addresses from the node's claimed blocks first.
    let given = world.one("a", "c1").await.unwrap();
    assert!(net("10.0.0.0/28").contains(&given), "{given}");
}

#[tokio::test]
async fn affinity_claims_each_block_in_one_commit() {
    let world = world().await;
    let before = world.store.list(Range::All).await.unwrap().revision.get();
    world.claim("a", "10.0.0.0/28").await;
    assert_eq!(world.store.list(Range::All).await.unwrap().revision.get(), before + 4);
    world.give_back("a", "10.0.0.0/28", ReleaseIf::Empty).await;
    assert_eq!(world.store.list(Range::All).await.unwrap().revision.get(), before + 8);
    assert_eq!(world.blocks().await, 0);
}

#[tokio::test]
async fn affinity_claim_errors_match_calico() {
    let world = world().await;
    let claim =
        async |cidr| world.ipam.claim_affinity(&Owner::host("a"), net(cidr), soon()).await.unwrap_err().to_string();
    assert_eq!(claim("10.1.0.0/28").await, "The requested CIDR (10.1.0.0/28) is not within any configured pools.");
    assert_eq!(claim("10.0.0.0/25").await, "The requested CIDR (10.0.0.0/25) is not within any configured pools.");
    assert_eq!(claim("10.0.0.4/31").await, "The requested CIDR (10.0.0.4/31) is smaller than the minimum.");
    world.add_pool("v6", "fd00::/64").await;
    let error = claim("fd00::/64").await;
    assert!(error.contains(&format!("more than {MAX_BLOCKS_CLAIMED} blocks")), "{error}");
    let error = world.ipam.claim_affinity(&Owner::host("nosuch"), net("10.0.0.0/28"), soon()).await.unwrap_err();
    assert!(matches!(error, Error::UnknownNode(_)), "{error}");
    let error =
        world.ipam.release_affinity(&Owner::host("a"), net("10.0.0.4/31"), ReleaseIf::Any, soon()).await.unwrap_err();
    assert!(matches!(error, Error::SmallerThanBlock(_)), "{error}");
    assert_eq!(world.blocks().await, 0);
}

#[tokio::test]
async fn affinity_release_keeps_used_block_or_leaves_it_unowned() {
    let world = world().await;
    world.claim("a", "10.0.0.0/30").await;
    let given = world.one("a", "c1").await.unwrap();
    let before = world.dump().await;
    assert_eq!(world.give_back("a", "10.0.0.0/26", ReleaseIf::Empty).await, (0, 1));
    assert_eq!(world.give_back("b", "10.0.0.0/26", ReleaseIf::Any).await, (0, 0));
    assert_eq!(world.dump().await, before);

    assert_eq!(world.give_back("a", "10.0.0.0/26", ReleaseIf::Any).await, (1, 0));
    let block = world.block("10.0.0.0/30").await.unwrap();
    assert_eq!((block.owner(), block.ips_by_handle("net.c1")), (None, vec![given]));
    world.check().await;
    // As in Calico, a block without an owner cannot be claimed while addresses in the block are in use.
    assert_eq!(world.claim("b", "10.0.0.0/30").await, (0, 1));
    assert_eq!(world.release("a", "c1").await, [given]);
    assert_eq!(world.blocks().await, 0);
    world.check().await;
}

#[tokio::test]
async fn affinity_release_covers_all_blocks_of_one_node() {
    let world = world().await;
    world.add_pool("v6", "fd00::/112").await;
    world.claim("a", "10.0.0.0/28").await;
    world.claim("a", "fd00::/124").await;
    world.claim("b", "10.0.0.16/28").await;
    world.one("a", "c1").await.unwrap();
    let done = world.ipam.release_all_affinities(&Owner::host("a"), ReleaseIf::Empty, soon()).await.unwrap();
    assert_eq!((done.released.len(), done.in_use.len()), (7, 1));
    let done = world.ipam.release_all_affinities(&Owner::host("a"), ReleaseIf::Any, soon()).await.unwrap();
    assert_eq!((done.released.len(), done.in_use.len()), (1, 0));
    assert_eq!(world.claim("b", "10.0.0.16/28").await, (4, 0));
    world.check().await;
}

#[tokio::test]
async fn affinity_left_half_done_by_others_is_completed() {
    let world = world().await;
    let (first, second, third) = (net("10.0.0.0/30"), net("10.0.0.4/30"), net("10.0.0.8/30"));
    let owner = Owner::Host("a".into());
    let affinity = |cidr| keys::affinity(&owner, cidr).unwrap();
    let block =
        |cidr, name: &str| Block::new(cidr, Some(&Owner::Host(name.into())), OffsetDateTime::UNIX_EPOCH, None).unwrap();
    let foreign = async || {
        // In this test the store contains an affinity without a block, a block without an affinity, and an affinity to
        // a block of another owner.
        world.put(affinity(first), &Affinity::new(AffinityState::Confirmed)).await;
        world.put(keys::block(second), &block(second, "a")).await;
        world.put(affinity(third), &Affinity::new(AffinityState::Pending)).await;
        world.put(keys::block(third), &block(third, "b")).await;
    };
    foreign().await;
    assert_eq!(world.claim("a", "10.0.0.0/29").await, (2, 0));
    world.give_back("a", "10.0.0.8/30", ReleaseIf::Any).await;
    world.claim("b", "10.0.0.8/30").await;
    world.check().await;

    foreign().await;
    assert_eq!(world.give_back("a", "10.0.0.0/30", ReleaseIf::Any).await, (1, 0));
    foreign().await;
    world.store.delete(Range::Key(keys::block(first))).await.unwrap();
    assert_eq!(world.give_back("a", "10.0.0.0/30", ReleaseIf::Any).await, (0, 0), "there was no block");
    assert_eq!(world.affinity("a", "10.0.0.0/30").await, None);
}

#[tokio::test]
async fn affinity_release_goes_on_when_block_is_damaged() {
    let world = world().await;
    world.claim("a", "10.0.0.0/28").await;
    world.store.put(keys::block(net("10.0.0.4/30")), "{").await.unwrap();
    let error = world.ipam.release_all_affinities(&Owner::host("a"), ReleaseIf::Any, soon()).await.unwrap_err();
    assert!(matches!(error, Error::Malformed(_)), "{error}");
    assert_eq!(world.blocks().await, 1);
}

#[tokio::test(start_paused = true)]
async fn affinity_loses_no_block_with_lost_requests_and_replies() {
    for fault in [Fault::ReplyLost, Fault::RequestLost, Fault::Held, Fault::NotSent] {
        let quiet = world().await;
        let calls = AtomicU32::new(0);
        let faulty = FaultyStore::new(Arc::clone(&quiet.store), move |operation| {
            (operation == Operation::Txn && calls.fetch_add(1, SeqCst) % 3 == 2).then_some(fault)
        });
        let world = World::on(Arc::new(faulty.clone()), Nodes::Registered);
        assert_eq!(world.claim("a", "10.0.0.0/28").await, (4, 0), "{fault:?}");
        faulty.deliver_held().await.unwrap();
        quiet.check().await;
        assert_eq!(world.give_back("a", "10.0.0.0/28", ReleaseIf::Empty).await, (4, 0), "{fault:?}");
        quiet.check().await;
        assert_eq!(quiet.blocks().await, 0, "{fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn affinity_claims_and_releases_at_once_leave_one_owner() {
    let world = world().await;
    let tasks: Vec<_> = ["a", "b", "c"]
        .into_iter()
        .map(|node| {
            let world = world.clone();
            tokio::spawn(async move {
                for round in 0..8 {
                    world.claim(node, "10.0.0.0/27").await;
                    let container = format!("{node}{round}");
                    world.one(node, &container).await.unwrap();
                    world.give_back(node, "10.0.0.0/26", [ReleaseIf::Empty, ReleaseIf::Any][round % 2]).await;
                    world.check().await;
                    world.release(node, &container).await;
                }
                world.ipam.release_all_affinities(&Owner::host(node), ReleaseIf::Any, soon()).await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    world.check().await;
    assert_eq!(world.blocks().await, 0);
    let left: BTreeSet<_> = world.dump().await.iter().map(|kv| kv.key.to_string()).collect();
    assert!(left.iter().all(|key| !key.contains("/host/") && !key.contains("/handle/")), "{left:?}");
}
