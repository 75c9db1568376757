//! Tests assignments of arbitrary and of requested addresses on routed networks.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    Affinity, AffinityState, AssignmentMode, Block, HostReserved, IpamConfig, NewPool, Owner, PoolUse,
    WINDOWS_RESERVED_HANDLE,
};
use ipam_core::{Error, Nodes};
use kv::StoreExt;
use kv::wrap::{CountingStore, Fault, FaultyStore};
use time::OffsetDateTime;

use crate::given::these;
use crate::world::{World, attachment, ip, soon};

fn any(node: &str, container: &str, v4: usize, v6: usize) -> AssignRequest {
    AssignRequest::new(attachment(node, container), RequestedAddresses::any(v4, v6))
}

#[tokio::test]
async fn assign_of_both_families_is_one_commit() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world.add_pool("v6", "fd00::/112").await;
    let before = world.store.list(kv::Range::All).await.unwrap().revision;
    let assigned = world.assign(&any("a", "c1", 1, 1)).await.unwrap();
    assert!(assigned[0].ip.is_ipv4() && assigned[1].ip.is_ipv6());
    assert_eq!(assigned[0].pool.to_string(), "10.0.0.0/24");
    assert_eq!(assigned[1].block.prefix_len(), 126);
    let after = world.store.list(kv::Range::All).await.unwrap();
    assert_eq!(after.revision, before.next());
    // The assignment of an IPv4 and an IPv6 address writes two blocks, two affinities and one handle.
    assert_eq!(after.kvs.iter().filter(|kv| kv.mod_revision == after.revision).count(), 5);
    world.check().await;
}

#[tokio::test]
async fn assign_leaves_nothing_when_family_runs_short() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let before = world.dump().await;
    let error = world.assign(&any("a", "c1", 1, 1)).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot find a qualified ippool");
    assert_eq!(world.dump().await, before);
}

#[tokio::test]
async fn assign_tries_last_written_block_first_and_no_full_ones() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let mut all = Vec::new();
    for number in 0..24 {
        all.push(world.one("a", &format!("c{number}")).await.unwrap());
    }
    // Node `a` has six full blocks, and releases addresses first in its second block and then in its first block.
    world.release("a", "c5").await;
    world.release("a", "c2").await;
    let counting = Arc::new(CountingStore::new(Arc::clone(&world.store)));
    let ipam = ipam_core::Ipam::new(counting.clone(), Nodes::Registered);
    let latest = ipam.assign(&any("a", "new1", 1, 0), soon()).await.unwrap();
    let read = counting.take().bytes_received;
    let before = ipam.assign(&any("a", "new2", 1, 0), soon()).await.unwrap();
    let read_then = counting.take().bytes_received;
    assert_eq!((latest[0].ip, before[0].ip), (all[2], all[5]), "the latest room, and the room before that");
    // For the second assignment, the most recently written block is full, so the node's other blocks are read as well.
    let block = world.store.get(keys::block(latest[0].block)).await.unwrap().unwrap().value.len() as u64;
    assert!(read_then > read + 3 * block / 2, "{read} bytes were read, then {read_then}; a block has {block}");
    world.check().await;
}

#[tokio::test]
async fn assign_fills_block_before_claiming_another() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let mut blocks = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for number in 0..9 {
        let assigned = world.assign(&any("a", &format!("c{number}"), 1, 0)).await.unwrap();
        assert!(seen.insert(assigned[0].ip));
        blocks.insert(assigned[0].block);
    }
    assert_eq!(blocks.len(), 3);
    world.check().await;
}

#[tokio::test]
async fn assign_of_several_may_span_blocks() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let assigned = world.assign(&any("a", "c1", 10, 0)).await.unwrap();
    assert_eq!(assigned.iter().map(|one| one.ip).collect::<BTreeSet<_>>().len(), 10);
    world.check().await;
    let error = world.assign(&any("b", "c2", 7, 0)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to request IPv4 addresses: Assigned 6 out of 7 requested IPv4 addresses; \
         No IPs available in pools: [10.0.0.0/28]"
    );
}

#[tokio::test]
async fn assign_repeats_answer_for_same_attachment() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    world.add_pool("v6", "fd00::/112").await;
    let first = world.assign(&any("a", "c1", 1, 0)).await.unwrap();
    let before = world.dump().await;
    assert_eq!(world.assign(&any("a", "c1", 1, 0)).await.unwrap(), first);
    assert_eq!(world.dump().await, before, "a repeated call writes nothing");

    let both = world.assign(&any("a", "c1", 1, 1)).await.unwrap();
    assert_eq!(both[0], first[0]);
    let mut other = any("a", "c1", 1, 0);
    other.attachment.interface = "eth1".into();
    assert_ne!(world.assign(&other).await.unwrap()[0].ip, first[0].ip);
    let elsewhere = world.assign(&any("b", "c1", 1, 0)).await.unwrap();
    assert_ne!(elsewhere[0].ip, first[0].ip);
    world.check().await;
}

#[tokio::test]
async fn assign_notes_new_boot_on_same_address() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let first = world.assign(&any("a", "c1", 1, 0)).await.unwrap();
    let mut again = any("a", "c1", 1, 0);
    again.attachment.boot = Some("boot0002".into());
    assert_eq!(world.assign(&again).await.unwrap(), first);
    let block = world.block(&first[0].block.to_string()).await.unwrap();
    assert_eq!(block.attributes_of(first[0].ip).unwrap().get("margay.io/boot"), Some("boot0002"));
    world.check().await;
}

#[tokio::test]
async fn assign_borrows_on_full_host_unless_affinity_is_strict() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.one("a", "c1").await.unwrap();
    for number in 0..4 {
        world.one("b", &format!("b{number}")).await.unwrap();
    }
    let borrowed = world.one("b", "b4").await.unwrap();
    let block = world.block("10.0.0.0/30").await.unwrap();
    let lender = if block.cidr().contains(&borrowed) { block } else { world.block("10.0.0.4/30").await.unwrap() };
    assert_eq!(lender.owner(), Some(Owner::Host("a".into())));
    world.check().await;

    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    let error = world.one("b", "b5").await.unwrap_err();
    assert!(error.to_string().ends_with("; No more free affine blocks and strict affinity enabled"), "{error}");
}

#[tokio::test]
async fn assign_borrows_when_block_limit_is_reached() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.configure(IpamConfig::default().with_max_blocks_per_host(1)).await;
    for number in 0..4 {
        world.one("a", &format!("a{number}")).await.unwrap();
    }
    let error = world.one("a", "a4").await.unwrap_err();
    assert_eq!(error.to_string(), "cannot allocate new block due to per host block limit");
    world.one("b", "b0").await.unwrap();
    world.one("a", "a4").await.unwrap();
    world.check().await;
}

#[tokio::test]
async fn assign_claims_nothing_without_auto_allocation() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.configure(IpamConfig::default().with_auto_allocate_blocks(false)).await;
    let error = world.one("a", "a0").await.unwrap_err();
    assert_eq!(error.to_string(), "failed to find or claim a block");
}

#[tokio::test]
async fn assign_takes_empty_block_of_other_host_after_minute() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    world.one("a", "c1").await.unwrap();
    world.release("a", "c1").await;
    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    world.pass(59);
    assert!(matches!(world.one("b", "c2").await, Err(Error::Exhausted { .. })));
    world.pass(1);
    world.one("b", "c2").await.unwrap();
    assert_eq!(world.affinity("a", "10.0.0.0/30").await, None);
    assert_eq!(world.affinity("b", "10.0.0.0/30").await, Some(AffinityState::Confirmed));
    world.check().await;
}

#[tokio::test]
async fn assign_treats_claim_in_future_as_young() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    world.one("a", "c1").await.unwrap();
    world.release("a", "c1").await;
    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    world.pass(-1000);
    assert!(world.one("b", "c2").await.is_err());
}

#[tokio::test]
async fn assign_completes_what_others_left_half_done() {
    let owner = Owner::Host("a".into());
    for state in [AffinityState::Pending, AffinityState::PendingDeletion] {
        // First case: the store contains an affinity without its block.
        let world = World::new().await;
        world.add_pool("v4", "10.0.0.0/30").await;
        let key = keys::affinity(&owner, "10.0.0.0/30".parse().unwrap()).unwrap();
        world.put(key, &Affinity::new(state)).await;
        world.one("a", "c1").await.unwrap();
        world.check().await;

        // Second case: the store contains a block and an unconfirmed affinity to the block.
        let world = World::new().await;
        world.add_pool("v4", "10.0.0.0/30").await;
        world.one("a", "c1").await.unwrap();
        let key = keys::affinity(&owner, "10.0.0.0/30".parse().unwrap()).unwrap();
        world.put(key, &Affinity::new(state)).await;
        world.one("a", "c2").await.unwrap();
        world.check().await;
    }
    // Third case: the store contains a block without an affinity, and an affinity to a block of another owner.
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    let cidr = "10.0.0.0/30".parse().unwrap();
    let block = Block::new(cidr, Some(&Owner::Host("b".into())), OffsetDateTime::UNIX_EPOCH, None).unwrap();
    world.put(keys::block(cidr), &block).await;
    world.put(keys::affinity(&owner, cidr).unwrap(), &Affinity::new(AffinityState::Pending)).await;
    world.one("a", "c1").await.unwrap();
    assert_eq!(world.affinity("a", "10.0.0.0/30").await, None);
    for number in 0..4 {
        world.one("b", &format!("b{number}")).await.unwrap();
    }
    world.check().await;
}

#[tokio::test]
async fn assign_skips_and_keeps_damaged_block() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    let key = keys::block("10.0.0.0/30".parse().unwrap());
    world.store.put(key.clone(), "{").await.unwrap();
    let assigned = world.one("a", "c1").await.unwrap();
    assert!(assigned >= ip("10.0.0.4"));
    assert_eq!(world.store.get(key).await.unwrap().unwrap().value, "{".into());
}

#[tokio::test]
async fn assign_never_chooses_reserved_addresses() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/29").await;
    world.reserve(&["10.0.0.0/30", "10.0.0.5/32"]).await;
    let mut given = BTreeSet::new();
    for number in 0..3 {
        given.insert(world.one("a", &format!("c{number}")).await.unwrap());
    }
    assert_eq!(given, [ip("10.0.0.4"), ip("10.0.0.6"), ip("10.0.0.7")].into());
    assert!(world.one("a", "c3").await.is_err());
    assert_eq!(world.block("10.0.0.0/30").await, None, "a block that is wholly reserved is never claimed");
    // A request that names a reserved address gets the address, as in Calico.
    world.assign(&these("a", "c4", &["10.0.0.5"])).await.unwrap();
    world.check().await;
}

#[tokio::test]
async fn assign_lets_released_addresses_cool_down() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    for number in 0..4 {
        world.one("a", &format!("c{number}")).await.unwrap();
    }
    world.release("a", "c1").await;
    world.check().await;
    assert!(world.one("a", "d").await.is_err());
    world.pass(61);
    world.one("a", "d").await.unwrap();
    world.check().await;
}

#[tokio::test]
async fn assign_ends_cooldown_when_release_is_far_ahead() {
    let world = World::full_but_for_a_release_dated_ahead().await;
    assert!(world.one("a", "d").await.is_err());
    world.pass(61);
    world.one("a", "d").await.unwrap();
    world.check().await;
}

#[tokio::test]
async fn assign_chooses_pools_by_node_mode_and_use() {
    let world = World::new().await;
    world.add_node("z", &[("zone", "b")]).await;
    world.add(NewPool::new("zone-b", "10.1.0.0/24".parse().unwrap()).with_node_selector("zone == 'b'")).await;
    world.add(NewPool::new("other", "10.2.0.0/24".parse().unwrap()).with_node_selector("zone != 'b'")).await;
    let manual = NewPool::new("manual", "10.3.0.0/24".parse().unwrap());
    world.add(manual.with_assignment_mode(AssignmentMode::Manual)).await;
    let tunnels = NewPool::new("tunnels", "10.4.0.0/24".parse().unwrap());
    world.add(tunnels.with_allowed_uses([PoolUse::Tunnel])).await;
    assert!(world.one("z", "c1").await.unwrap().to_string().starts_with("10.1."));
    assert!(world.one("a", "c2").await.unwrap().to_string().starts_with("10.2."));
    let mut named = any("a", "c3", 1, 0);
    named.v4_pools = vec!["manual".into()];
    assert_eq!(world.assign(&named).await.unwrap()[0].pool.to_string(), "10.3.0.0/24");
    named.v4_pools = vec!["10.4.0.0/24".into()];
    named.attachment.container = "c4".into();
    let error = world.assign(&named).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot find a qualified ippool, no pools match the required use (Workload)");
    let error = world.assign(&these("a", "c5", &["10.4.0.1"])).await.unwrap_err();
    assert!(error.to_string().contains("not allowed for use \"Workload\" (allowedUses: [Tunnel])"), "{error}");
}

#[tokio::test]
async fn assign_gives_back_blocks_when_pool_deselects_node() {
    let world = World::new().await;
    world.add_pool("first", "10.1.0.0/24").await;
    world.one("a", "c1").await.unwrap();
    world.release("a", "c1").await;
    world.add_pool("second", "10.2.0.0/24").await;
    let key = keys::resource(ResourceKind::IpPool, "first");
    let stored = world.store.get(key.clone()).await.unwrap().unwrap();
    let text = String::from_utf8(stored.value.as_bytes().to_vec()).unwrap().replace("all()", "zone == 'x'");
    world.store.put(key, text).await.unwrap();
    world.one("a", "c2").await.unwrap();
    let left: Vec<_> = world.dump().await.iter().filter_map(|kv| keys::parse_block(&kv.key)).collect();
    assert_eq!(left.len(), 1);
    world.check().await;
}

#[tokio::test]
async fn assign_keeps_host_reserved_addresses_of_each_block() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/28".parse().unwrap()).with_block_size(29)).await;
    let mut request = any("a", "c1", 4, 0);
    request.host_reserved =
        Some(HostReserved { start: 3, end: 1, handle: WINDOWS_RESERVED_HANDLE.into(), ..HostReserved::default() });
    let assigned = world.assign(&request).await.unwrap();
    let block = assigned[0].block;
    assert!(assigned.iter().all(|one| one.block == block));
    let ordinals: Vec<u32> = assigned
        .iter()
        .map(|one| match one.ip {
            std::net::IpAddr::V4(ip) => ip.to_bits() % 8,
            std::net::IpAddr::V6(_) => unreachable!(),
        })
        .collect();
    assert_eq!(ordinals, [3, 4, 5, 6]);
}

#[tokio::test]
async fn assign_is_error_when_node_is_not_registered() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let error = world.one("nosuch", "c1").await.unwrap_err();
    assert_eq!(error.to_string(), "resource does not exist: Node(nosuch) with error: <nil>");
}

#[tokio::test]
async fn assign_keeps_first_node_name_on_single_machine() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add_pool("v4", "10.0.0.0/22").await;
    world.one("oldname", "c1").await.unwrap();
    for number in 0..100 {
        world.one("newname", &format!("d{number}")).await.unwrap();
    }
    world.check().await;
    assert!(world.dump().await.iter().all(|kv| !kv.key.to_string().contains("host/newname/")));
    assert_eq!(world.release("newname", "c1").await.len(), 1);
    world.add_node("registered", &[]).await;
    assert!(matches!(world.one("newname", "c2").await, Err(Error::UnknownNode(_))));
}

#[tokio::test(start_paused = true)]
async fn assign_loses_no_address_with_lost_reply() {
    for fault in [Fault::ReplyLost, Fault::RequestLost, Fault::Held] {
        let quiet = World::new().await;
        quiet.add_pool("v4", "10.0.0.0/30").await;
        let faulty = FaultyStore::new(Arc::clone(&quiet.store), {
            let calls = std::sync::atomic::AtomicU32::new(0);
            move |operation| {
                let is_commit =
                    operation == kv::Operation::Txn && calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 2;
                is_commit.then_some(fault)
            }
        });
        let world = World::on(Arc::new(faulty.clone()), Nodes::Registered);
        let assigned = world.one("a", "c1").await.unwrap();
        faulty.deliver_held().await.unwrap();
        let block = quiet.block("10.0.0.0/30").await.unwrap();
        assert_eq!(block.ips_by_handle("net.c1"), [assigned], "{fault:?}");
        assert_eq!(block.allocated().count(), 1, "{fault:?}");
        quiet.check().await;
    }
}

#[tokio::test]
async fn assign_takes_few_round_trips_when_steady() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/16").await;
    world.add_pool("v6", "fd00::/112").await;
    let counting = CountingStore::new(Arc::clone(&world.store));
    let counted = World::on(Arc::new(counting.clone()), Nodes::Registered);
    counted.assign(&any("a", "c1", 1, 1)).await.unwrap();
    counting.take();
    counted.assign(&any("a", "c2", 1, 1)).await.unwrap();
    let counts = counting.take();
    // The first transaction reads the pools and other documents for the assignment, all at one revision. For each
    // family, the first transaction also reads a block, the block's affinity and the keys of neighbouring blocks. The
    // second transaction commits the assignment.
    assert_eq!((counts.txns, counts.ranges), (2, 8));
    counted.ipam.release_attachment(&attachment("a", "c2"), &["c2".into()], soon()).await.unwrap();
    let counts = counting.take();
    assert_eq!((counts.txns, counts.ranges), (2, 2));
}

#[tokio::test]
async fn assign_ignores_address_of_pool_not_requested() {
    let world = World::new().await;
    world.add_pool("first", "10.0.0.0/28").await;
    world.add_pool("second", "10.1.0.0/28").await;
    let of = |pool: &str| {
        let mut request = any("a", "c1", 1, 0);
        request.v4_pools = vec![pool.to_owned()];
        request
    };
    let first = world.assign(&of("first")).await.unwrap();
    let second = world.assign(&of("second")).await.unwrap();
    assert!(second[0].ip.to_string().starts_with("10.1.0."), "{second:?}");
    assert_eq!(world.assign(&of("first")).await.unwrap(), first);
    assert_eq!(world.assign(&of("second")).await.unwrap(), second);
}
