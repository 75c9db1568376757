//! Measures how many requests to the store, and how many bytes, a scan of one node's addresses in a large cluster
//! costs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ipam_core::gc::{ReadScope, ScanScope};
use ipam_core::model::{Affinity, AffinityState, Attribute, Block, Document, NewPool, Owner, keys};
use ipnet::{IpNet, Ipv4Subnets};
use kv::wrap::{CallCounts, CountingStore};
use kv::{Deadline, Op, Store, Txn};
use time::OffsetDateTime;

use crate::world::{World, soon};

/// Maximum number of store requests of a scan that reads only the node's own blocks and the blocks that the read scope
/// names.
const MOST_REQUESTS: u64 = 20;
const MOST_BYTES: u64 = 200_000;

/// Creates a cluster of `nodes` nodes, each with a fully used block of 64 addresses. Node `a` has two more blocks (one
/// of them for secondary networks), and an address in a block of another node. Returns the CIDR of the other node's
/// block in which node `a` has an address.
async fn cluster(nodes: usize) -> (World, IpNet) {
    let world = World::of_one_caller().await;
    world.add(NewPool::new("v4", "10.0.0.0/12".parse().unwrap()).with_block_size(26)).await;
    let (first, last) = ("10.0.0.0".parse().unwrap(), "10.15.255.255".parse().unwrap());
    let mut places = Ipv4Subnets::new(first, last, 26).map(IpNet::from);
    let template = block(places.next().unwrap(), &Owner::host("node-0000"), "node-0000");
    let text = String::from_utf8(template.encode().unwrap().as_bytes().to_vec()).unwrap();
    let others: Vec<IpNet> = places.by_ref().take(nodes).collect();
    for some in others.chunks(40) {
        let puts = some.iter().flat_map(|cidr| {
            let owner = Owner::host(format!("node-{cidr}"));
            let text = text.replace(&template.cidr().to_string(), &cidr.to_string());
            [Op::put(keys::block(*cidr), text), confirmed(&owner, *cidr)]
        });
        world.store.txn(Txn::new().with_success(puts)).await.unwrap();
    }
    let borrowed = others[nodes / 2];
    let mine = [(places.next().unwrap(), Owner::host("a")), (places.next().unwrap(), Owner::secondary("a"))];
    let puts = mine.iter().flat_map(|(cidr, owner)| {
        [Op::put(keys::block(*cidr), block(*cidr, owner, "a").encode().unwrap()), confirmed(owner, *cidr)]
    });
    let lent = block(borrowed, &Owner::host(format!("node-{borrowed}")), "a");
    let puts = puts.chain([Op::put(keys::block(borrowed), lent.encode().unwrap())]);
    world.store.txn(Txn::new().with_success(puts)).await.unwrap();
    (world, borrowed)
}

fn confirmed(owner: &Owner, cidr: IpNet) -> Op {
    let affinity = Affinity::new(AffinityState::Confirmed);
    Op::put(keys::affinity(owner, cidr).unwrap(), affinity.encode().unwrap())
}

/// Creates a block whose addresses are all used by pods of a node, with the attributes that the CNI plugin records.
fn block(cidr: IpNet, owner: &Owner, node: &str) -> Block {
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap();
    let mut block = Block::new(cidr, Some(owner), at, None).unwrap();
    for number in 0..64 {
        let container = format!("{number:064x}");
        let pod = format!("web-frontend-7c5ddbdf54-{number:05}");
        let attributes = [
            ("node", node),
            ("namespace", "production"),
            ("pod", &pod),
            ("timestamp", "2026-11-21 02:41:03.956790656 +0000 UTC"),
            ("margay.io/net", "net"),
            ("margay.io/ifname", "eth0"),
            ("margay.io/boot", "boot0001"),
            ("margay.io/netns", "4:4026532201"),
        ];
        let attributes = attributes.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let holder = Attribute::new(Some(&format!("net.{container}")), attributes.into());
        block.assign_auto(1, &holder, &Default::default());
    }
    block
}

struct Look {
    blocks: BTreeSet<IpNet>,
    passed: Option<kv::Revision>,
    counts: CallCounts,
}

async fn look(world: &World, reach: &ReadScope) -> Look {
    let counting = CountingStore::new(Arc::clone(&world.store));
    let ipam = world.through(Arc::new(counting.clone()));
    let (holdings, passed) = ipam.holdings_within("a", reach, long()).await.unwrap();
    let blocks = holdings.allocations.iter().map(|one| one.block).collect();
    Look { blocks, passed, counts: counting.take() }
}

fn long() -> Deadline {
    Deadline::after(Duration::from_secs(120))
}

fn is_steady(counts: &CallCounts) -> bool {
    counts.round_trips() <= MOST_REQUESTS && counts.bytes_received <= MOST_BYTES
}

#[tokio::test]
async fn node_scan_costs_same_in_cluster_of_any_size() {
    let mut costs = Vec::new();
    for nodes in [1_000, 5_000] {
        let (world, borrowed) = cluster(nodes).await;
        let near = ReadScope::near([borrowed]);
        let steady = look(&world, &near).await;
        println!("{nodes} nodes, a look: {:?}", steady.counts);
        assert!(is_steady(&steady.counts), "{:?}", steady.counts);
        assert_eq!((steady.blocks.len(), steady.passed), (3, None));
        costs.push((steady.counts.round_trips(), steady.counts.bytes_received));

        let counting = CountingStore::new(Arc::clone(&world.store));
        world.through(Arc::new(counting.clone())).holdings("a", long()).await.unwrap();
        let everything = counting.take();
        println!("{nodes} nodes, a look at all blocks: {everything:?}");
        assert!(everything.round_trips() > MOST_REQUESTS && everything.bytes_received > MOST_BYTES, "{everything:?}");

        let share = world.through(Arc::new(counting.clone())).share_of("a", &near, soon()).await.unwrap();
        let counts = counting.take();
        println!("{nodes} nodes, metrics of a node: {counts:?}");
        assert!(is_steady(&counts), "{counts:?}");
        let (_, of_pool) = &share.pools["v4"];
        assert_eq!((of_pool.blocks, of_pool.used, of_pool.borrowed), (2, 192, 64), "{share:?}");
        assert_eq!((share.boots["boot0001"], share.orphaned), (192, 0));

        // A scan of all blocks also finds blocks that are missing from the node's list of blocks to read. The next scan
        // of all blocks reads only the blocks that were written since the first scan.
        let all =
            look(&world, &ReadScope { scan: ScanScope::Since(kv::Revision::UNSET), ..ReadScope::default() }).await;
        println!("{nodes} nodes, the first pass: {:?}", all.counts);
        assert!(!is_steady(&all.counts));
        assert_eq!(all.blocks, steady.blocks);
        let since = ReadScope { scan: ScanScope::Since(all.passed.unwrap()), ..near.clone() };
        let again = look(&world, &since).await;
        println!("{nodes} nodes, a pass after that: {:?}", again.counts);
        assert_eq!(again.blocks, steady.blocks);
        assert!(again.counts.bytes_received < 100 * nodes as u64 + MOST_BYTES, "{:?}", again.counts);
        let one_more: IpNet = "10.0.1.0/26".parse().unwrap();
        let lent = block(one_more, &Owner::host("b"), "a");
        world.put(keys::block(one_more), &lent).await;
        let found = look(&world, &since).await;
        assert!(found.blocks.contains(&one_more), "written since");
        assert!(found.counts.bytes_received < again.counts.bytes_received + 40_000, "{:?}", found.counts);
        // After a restore of the store to an older state, the revision of the last scan is in the future.
        let ahead = ReadScope { scan: ScanScope::Since(kv::Revision::new(1 << 40)), ..ReadScope::default() };
        assert_eq!(look(&world, &ahead).await.blocks.len(), 4);
    }
    assert_eq!(costs[0], costs[1]);
}

/// A scan of one node reads another node's block only if the block is on the node's list of blocks to read
/// ([`ReadScope`]). A block that the read scope names but the store lacks does no harm.
#[tokio::test]
async fn node_scan_sees_only_remembered_blocks() {
    let (world, borrowed) = cluster(3).await;
    assert_eq!(look(&world, &ReadScope::default()).await.blocks.len(), 2);
    let absent: IpNet = "10.15.255.192/26".parse().unwrap();
    let seen = look(&world, &ReadScope::near([borrowed, absent])).await;
    assert_eq!(seen.blocks.len(), 3);
}
