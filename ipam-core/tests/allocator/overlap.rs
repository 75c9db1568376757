//! Tests that no new block overlaps with a stored block. The tested stores have pools that were recreated with another
//! block size, affinities without their blocks, or blocks that Calico wrote.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Affinity, AffinityState, Block, NewPool, Owner, Pool};
use ipam_core::{Error, OverlapError, Result};
use ipnet::IpNet;
use kv::wrap::{CountingStore, Fault, FaultyStore};
use kv::{Operation, Range, StoreExt};
use time::OffsetDateTime;

use crate::world::{World, attachment, ip, soon};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// Replaces the document of a pool directly in the store, without the allocator.
async fn replace_pool(world: &World, cidr: &str, block_size: u8) {
    let new = NewPool::new("p", net(cidr)).with_block_size(block_size);
    let pool = Pool::new(&new, "uid", OffsetDateTime::UNIX_EPOCH).unwrap();
    world.put(keys::resource(ResourceKind::IpPool, "p"), &pool).await;
}

async fn put_affinity(world: &World, node: &str, cidr: &str, state: AffinityState) {
    let key = keys::affinity(&Owner::host(node), net(cidr)).unwrap();
    world.put(key, &Affinity::new(state)).await;
}

/// Writes a block without checking for overlapping blocks, as Calico does.
async fn put_block(world: &World, node: &str, cidr: &str) {
    let block = Block::new(net(cidr), Some(&Owner::host(node)), OffsetDateTime::UNIX_EPOCH, None).unwrap();
    world.put(keys::block(net(cidr)), &block).await;
    put_affinity(world, node, cidr, AffinityState::Confirmed).await;
}

fn this(node: &str, container: &str, address: &str) -> AssignRequest {
    AssignRequest::new(attachment(node, container), RequestedAddresses::these(vec![ip(address)]))
}

async fn add(world: &World, node: &str, container: &str, v6: bool) -> Result<(IpAddr, IpNet)> {
    let wanted = if v6 { RequestedAddresses::any(0, 1) } else { RequestedAddresses::any(1, 0) };
    let assigned = world.assign(&AssignRequest::new(attachment(node, container), wanted)).await?.remove(0);
    Ok((assigned.ip, assigned.block))
}

async fn blocks(world: &World) -> Vec<IpNet> {
    let stored = world.store.list(Range::Prefix(keys::blocks_prefix(None))).await.unwrap().kvs;
    stored.iter().filter_map(|kv| keys::parse_block(&kv.key)).collect()
}

/// Asserts that no two stored blocks overlap.
async fn are_apart(world: &World) {
    let blocks = blocks(world).await;
    for (place, block) in blocks.iter().enumerate() {
        let other = blocks[..place].iter().find(|other| other.contains(block) || block.contains(*other));
        assert_eq!(other, None, "overlaps with {block}");
    }
}

/// A test case: a pool with its block size, and affinities of node `a` to deleted blocks of another size.
struct Left {
    pool: (&'static str, u8),
    affinities: &'static [&'static str],
}

const LEFT: [Left; 6] = [
    Left { pool: ("100.64.0.0/24", 25), affinities: &["100.64.0.0/26", "100.64.0.128/26"] },
    Left { pool: ("100.64.0.0/24", 27), affinities: &["100.64.0.0/26", "100.64.0.64/26", "100.64.0.128/26"] },
    Left {
        pool: ("100.64.0.0/20", 26),
        affinities: &["100.64.0.0/22", "100.64.4.0/22", "100.64.8.0/22", "100.64.12.0/22"],
    },
    Left { pool: ("100.64.0.0/20", 20), affinities: &["100.64.8.0/26"] },
    Left { pool: ("fd00::/118", 120), affinities: &["fd00::/122", "fd00::140/122", "fd00::300/122"] },
    Left { pool: ("fd00::/118", 124), affinities: &["fd00::/122", "fd00::40/122", "fd00::100/122"] },
];

#[tokio::test]
async fn overlap_by_affinity_of_another_size_is_not_made() {
    for state in [AffinityState::Confirmed, AffinityState::Pending, AffinityState::PendingDeletion] {
        for Left { pool: (cidr, size), affinities } in &LEFT {
            let world = World::new().await;
            replace_pool(&world, cidr, *size).await;
            for affinity in *affinities {
                put_affinity(&world, "a", affinity, state).await;
            }
            for (number, node) in ["b", "c", "a", "b", "a", "c", "a"].iter().enumerate() {
                let added = add(&world, node, &format!("c{number}"), cidr.contains(':')).await;
                assert_eq!(added.unwrap().1.prefix_len(), *size, "{cidr}");
                are_apart(&world).await;
            }
            for affinity in *affinities {
                assert_eq!(world.affinity("a", affinity).await, None, "{affinity} of {cidr}");
            }
            world.check().await;
        }
    }
}

#[tokio::test]
async fn overlap_with_address_requested_elsewhere_is_not_made() {
    let world = World::new().await;
    replace_pool(&world, "100.64.0.0/24", 25).await;
    put_affinity(&world, "a", "100.64.0.0/26", AffinityState::Confirmed).await;
    world.assign(&this("b", "b1", "100.64.0.1")).await.unwrap();
    let (assigned, _) = add(&world, "a", "a1", false).await.unwrap();
    assert_ne!(assigned, ip("100.64.0.1"));
    are_apart(&world).await;
}

/// In this test, a pool is replaced while addresses in blocks of the old size are in use.
#[tokio::test]
async fn overlap_with_block_in_use_is_refused() {
    for (old, new) in [(26, 25), (26, 27), (24, 26), (28, 26)] {
        let world = World::new().await;
        replace_pool(&world, "100.64.0.0/24", old).await;
        let (first, in_use) = add(&world, "b", "b1", false).await.unwrap();
        replace_pool(&world, "100.64.0.0/24", new).await;

        let near = ipam_core::net::nth(in_use, 5).unwrap().to_string();
        let refused = world.assign(&this("a", "a1", &near)).await;
        let is_named = matches!(&refused, Err(Error::Overlap(OverlapError::Block { other, .. })) if *other == in_use);
        assert!(is_named, "{old} {new}: {refused:?}");
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("margay ipam check"), "{text}");

        let claimed = world.ipam.claim_affinity(&Owner::host("a"), net("100.64.0.0/24"), soon()).await.unwrap();
        assert!(!claimed.failed.is_empty(), "{claimed:?}");
        are_apart(&world).await;
        let (mut assigned, borrowed) = (vec![first], claimed.claimed.is_empty());
        for number in 0..3 {
            match add(&world, "a", &format!("c{number}"), false).await {
                // A node that cannot claim its own block borrows addresses from the block that was made for the
                // replaced pool.
                Ok((ip, block)) => {
                    assert!(borrowed || block.prefix_len() == new, "{old} {new}: {block}");
                    assert!(!assigned.contains(&ip));
                    assigned.push(ip);
                }
                Err(error) => assert!(matches!(error, Error::Exhausted { .. }), "{error}"),
            }
        }
        are_apart(&world).await;
        world.check().await;
    }
}

#[tokio::test]
async fn overlap_by_quicker_writer_fails_commit() {
    for quicker in ["100.64.0.0/26", "100.64.0.0/24", "100.64.0.77/32"] {
        let world = World::new().await;
        replace_pool(&world, "100.64.0.0/25", 25).await;
        let calls = AtomicU32::new(0);
        let late = FaultyStore::new(Arc::clone(&world.store), move |operation| {
            let is_commit = operation == Operation::Txn && calls.fetch_add(1, SeqCst) == 2;
            is_commit.then_some(Fault::Delay(Duration::from_millis(300)))
        });
        let ipam = world.through(Arc::new(late));
        let request = AssignRequest::new(attachment("a", "a1"), RequestedAddresses::any(1, 0));
        let other = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            put_block(&world, "b", quicker).await;
        };
        let (assigned, ()) = tokio::join!(ipam.assign(&request, soon()), other);
        assert!(!assigned.is_ok_and(|all| all.iter().any(|one| one.block != net(quicker))), "{quicker}");
        assert_eq!(blocks(&world).await, [net(quicker)]);
    }
}

/// Calico can create a block that overlaps with a block of Margay, and Margay's first version could create overlapping
/// blocks, too.
#[tokio::test]
async fn overlap_made_by_others_is_never_assigned_from() {
    for foreign in ["100.64.0.0/24", "100.64.0.64/27", "100.64.0.65/32"] {
        let world = World::new().await;
        replace_pool(&world, "100.64.0.0/24", 26).await;
        world.assign(&this("a", "a1", "100.64.0.66")).await.unwrap();
        put_block(&world, "b", foreign).await;
        for node in ["a", "b", "c"] {
            let refused = world.assign(&this(node, "near", "100.64.0.67")).await;
            assert!(matches!(refused, Err(Error::Overlap(_))), "{foreign}: {refused:?}");
            match add(&world, node, &format!("{node}-any"), false).await {
                Ok((_, block)) => {
                    assert!(block != net("100.64.0.64/26") && !net(foreign).contains(&block), "{foreign}: {block}");
                }
                Err(error) => assert!(matches!(error, Error::Exhausted { .. }), "{foreign}: {error}"),
            }
        }
        world.release("a", "a1").await;
        assert_eq!(world.block("100.64.0.64/26").await.unwrap().allocated().count(), 0);
    }
}

/// Assignments of other nodes in neighbouring blocks do not conflict with the creation of a block.
#[tokio::test]
async fn overlap_guards_ignore_writes_to_neighbours() {
    let world = World::new().await;
    replace_pool(&world, "100.64.0.0/24", 26).await;
    for (node, cidr) in [("b", "100.64.0.0/26"), ("c", "100.64.0.64/26"), ("b", "100.64.0.192/26")] {
        put_block(&world, node, cidr).await;
    }
    let calls = AtomicU32::new(0);
    let late = FaultyStore::new(Arc::clone(&world.store), move |operation| {
        let is_commit = operation == Operation::Txn && calls.fetch_add(1, SeqCst) == 2;
        is_commit.then_some(Fault::Delay(Duration::from_millis(300)))
    });
    let counting = CountingStore::new(Arc::new(late) as Arc<dyn kv::Store>);
    let ipam = world.through(Arc::new(counting.clone()));
    let request = AssignRequest::new(attachment("a", "a1"), RequestedAddresses::any(1, 0));
    let others = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        for node in ["b", "c"] {
            add(&world, node, "beside", false).await.unwrap();
        }
    };
    let (assigned, ()) = tokio::join!(ipam.assign(&request, soon()), others);
    assert_eq!(assigned.unwrap()[0].block, net("100.64.0.128/26"));
    assert_eq!(counting.take().txns, 3, "one attempt: two reads, a commit");
}

/// Block keys do not sort by address, so many other keys can lie between the keys of blocks that overlap with a large
/// block.
#[tokio::test]
async fn overlap_is_ruled_out_among_many_small_blocks() {
    let world = World::new().await;
    for number in 128..256 {
        put_block(&world, "b", &format!("100.64.0.{number}/32")).await;
    }
    replace_pool(&world, "100.64.0.0/25", 25).await;
    let assigned = world.assign(&this("a", "a1", "100.64.0.5")).await.unwrap();
    assert_eq!(assigned[0].block, net("100.64.0.0/25"));
    are_apart(&world).await;
}

/// Creating a large block between thousands of other blocks needs more guards than fit into one commit. The error
/// message for a block that cannot be guarded tells the operator how to proceed.
#[tokio::test]
async fn overlap_that_cannot_be_guarded_is_refused() {
    let world = World::new().await;
    for number in 0x1000..=0x1000 + kv::MAX_CREATION_GUARDED_KEYS {
        put_block(&world, "b", &format!("fd00::{number:x}/128")).await;
    }
    replace_pool(&world, "fd00::/116", 116).await;
    let request = this("a", "a1", "fd00::5");
    let refused = world.assign(&request).await.unwrap_err();
    assert!(matches!(refused, Error::Overlap(OverlapError::TooManyAround { .. })), "{refused:?}");
    assert!(refused.to_string().contains("blocks of /122 or smaller"), "{refused}");
    // The creation of a block of up to 64 addresses can be guarded even between thousands of other blocks.
    replace_pool(&world, "fd00::/116", 122).await;
    let assigned = world.assign(&request).await.unwrap();
    assert_eq!(assigned[0].block, net("fd00::/122"));
    are_apart(&world).await;
}

/// Creating a pool deletes each affinity that overlaps the pool, has no block, and is for another block size. A stored
/// block of another size in the new pool's range prevents the pool's creation.
#[tokio::test]
async fn overlap_of_affinities_with_new_pool_ends_when_made() {
    let world = World::new().await;
    for cidr in ["100.64.0.0/26", "100.64.0.128/25", "100.64.0.0/22", "100.64.8.0/26"] {
        put_affinity(&world, "a", cidr, AffinityState::Confirmed).await;
    }
    let new = NewPool::new("p", net("100.64.0.0/24")).with_block_size(25);
    put_block(&world, "b", "100.64.0.64/26").await;
    let refused = world.ipam.create_pool(&new, None, soon()).await.unwrap_err().to_string();
    assert!(refused.contains("block 100.64.0.64/26 of another size"), "{refused}");
    assert_eq!(world.affinity("b", "100.64.0.64/26").await, Some(AffinityState::Confirmed));
    world.store.delete(Range::Key(keys::block(net("100.64.0.64/26")))).await.unwrap();
    world.ipam.create_pool(&new, None, soon()).await.unwrap();
    for (node, cidr, is_left) in [
        ("a", "100.64.0.0/26", false),
        ("a", "100.64.0.128/25", true),
        ("a", "100.64.0.0/22", false),
        ("a", "100.64.8.0/26", true),
        ("b", "100.64.0.64/26", false),
    ] {
        assert_eq!(world.affinity(node, cidr).await.is_some(), is_left, "{node} {cidr}");
    }
}
