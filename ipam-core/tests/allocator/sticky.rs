//! Tests sticky addresses: a named workload keeps its address.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::{Document, IpamConfig, NewPool, Owner, ReleaseRequest, StickyRecord, keys};
use ipam_core::sticky::{STICKY, Sticky, WaitEnd, waits_until};
use ipam_core::{Error, Holding, Nodes, Result, Standing};
use kv::{Range, StoreExt};

use crate::concurrent::{every_revision_is_consistent, faulty};
use crate::hints::{Memory, counted};
use crate::world::{World, attachment, held, ip, soon};

const WAIT: u64 = 3600;

/// A test world with a pool of the four addresses 10.0.0.0 to 10.0.0.3, which are assigned in ascending order.
async fn four() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/30").await;
    world
}

fn request(node: &str, container: &str, name: &str) -> AssignRequest {
    let mut request = AssignRequest::new(attachment(node, container), RequestedAddresses::any(1, 0));
    request.sticky = Some(Sticky { name: name.to_owned(), wait: Some(Duration::from_secs(WAIT)) });
    request
}

/// Assigns an address to a container of the workload `name`.
async fn sticky(world: &World, node: &str, container: &str, name: &str) -> Result<IpAddr> {
    Ok(world.assign(&request(node, container, name)).await?[0].ip)
}

async fn record(world: &World, name: &str) -> Vec<IpAddr> {
    let key = keys::sticky(name);
    let Some(kv) = world.store.get(key.clone()).await.unwrap() else { return Vec::new() };
    let record = StickyRecord::decode(&key, kv.value.as_bytes()).unwrap();
    record.addresses.iter().map(|one| one.address).collect()
}

#[tokio::test]
async fn sticky_address_returns_to_workload_alone() {
    let world = four().await;
    let own = sticky(&world, "a", "c1", "shop/web-0").await.unwrap();
    assert_eq!(sticky(&world, "a", "c1", "shop/web-0").await.unwrap(), own, "repeated");
    assert_eq!(world.release("a", "c1").await, [own]);
    assert_eq!(world.release("a", "c1").await, Vec::<IpAddr>::new());
    for number in 0..3 {
        assert_ne!(world.one("a", &format!("o{number}")).await.unwrap(), own);
    }
    assert!(matches!(world.one("a", "o3").await.unwrap_err(), Error::Exhausted { .. }));
    world.check().await;
    for round in 2..5 {
        let container = format!("c{round}");
        assert_eq!(sticky(&world, "a", &container, "shop/web-0").await.unwrap(), own);
        assert_eq!(held(&world.ipam, &attachment("a", &container)).await, [own]);
        world.check().await;
        world.release("a", &container).await;
        assert!(held(&world.ipam, &attachment("a", &container)).await.is_empty());
    }
    assert_eq!(record(&world, "shop/web-0").await, [own]);
}

#[tokio::test]
async fn sticky_overdue_longest_goes_first_in_any_block() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let mut own = Vec::new();
    for number in 0..16 {
        let name = format!("w{number}");
        own.push((sticky(&world, "a", &name, &name).await.unwrap(), name));
    }
    own.sort();
    // Addresses are released in descending order, so the addresses of the last block wait longest for their workloads.
    own.reverse();
    for (_, name) in &own {
        world.release("a", name).await;
        world.pass(60);
    }
    world.pass(WAIT as i64);
    for (number, (ip, _)) in own[..6].iter().enumerate() {
        assert_eq!(world.one("b", &format!("o{number}")).await.unwrap(), *ip);
    }
    world.check().await;
}

#[tokio::test]
async fn sticky_overdue_counts_as_free() {
    let world = four().await;
    sticky(&world, "a", "c0", "w0").await.unwrap();
    world.release("a", "c0").await;
    let free = async || {
        let census = world.ipam.census(soon()).await.unwrap();
        let shown = world.ipam.utilization(soon()).await.unwrap();
        (census.pools[0].usage.available.to_f64(), shown.pools[0].usage.available.to_f64())
    };
    assert_eq!(free().await, (3.0, 3.0));
    world.pass(WAIT as i64 + 1);
    assert_eq!(free().await, (4.0, 4.0));
}

#[tokio::test]
async fn sticky_address_that_waits_is_lost_to_container() {
    let world = four().await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    let standing = async || {
        let compared = world.ipam.compare(&attachment("a", "c1"), &[], &[own], soon()).await.unwrap();
        compared.standings
    };
    assert_eq!(standing().await, [(own, Standing::Own)]);
    world.ipam.release_ips(&[ReleaseRequest::new(own).with_handle("net.c1")], soon()).await.unwrap();
    assert_eq!(record(&world, "w").await, [own], "released as by its holder, so the workload keeps it");
    assert_eq!(standing().await, [(own, Standing::Free)]);
    assert_eq!(sticky(&world, "a", "c2", "w").await.unwrap(), own);
    world.ipam.release_ips(&[ReleaseRequest::new(own)], soon()).await.unwrap();
    assert!(record(&world, "w").await.is_empty());
    world.check().await;
}

/// A sticky address that is not pinned is released when its workload can no longer use it, even if it waits without a
/// time limit.
#[tokio::test]
async fn sticky_address_is_given_up_when_network_changed() {
    for wait in [None, Some(Duration::from_secs(WAIT))] {
        let world = four().await;
        world.add_pool("other", "10.1.0.0/30").await;
        let ask = async |container: &str, pool: &str| {
            let mut request = request("a", container, "w");
            request.sticky = Some(Sticky { name: "w".into(), wait });
            request.v4_pools = vec![pool.to_owned()];
            world.assign(&request).await.unwrap()[0].ip
        };
        let before = ask("c1", "v4").await;
        world.release("a", "c1").await;
        let after = ask("c2", "other").await;
        assert_eq!(record(&world, "w").await, [after], "{wait:?}");
        assert_eq!(world.ipam.holding(before, soon()).await.unwrap(), Holding::Free);
        world.release("a", "c2").await;
        assert_eq!(ask("c3", "other").await, after);
        world.check().await;
    }
}

/// In this test the block has no owner, and strict affinity forbids borrowing.
#[tokio::test]
async fn sticky_overdue_block_without_owner_serves_again() {
    let world = four().await;
    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    for number in 0..4 {
        let name = format!("w{number}");
        sticky(&world, "a", &name, &name).await.unwrap();
        world.release("a", &name).await;
    }
    let mut block = world.block("10.0.0.0/30").await.unwrap();
    block.clear_owner();
    block.bump();
    world.put(keys::block(block.cidr()), &block).await;
    world.store.delete(Range::Prefix(keys::affinities_prefix(&Owner::host("a"), None).unwrap())).await.unwrap();
    assert!(world.one("b", "o0").await.unwrap_err().is_exhaustion());
    world.pass(WAIT as i64 + 1);
    for number in 0..4 {
        world.one("b", &format!("o{number}")).await.unwrap();
    }
    world.check().await;
}

#[tokio::test]
async fn sticky_wait_ends_when_wrong_clock_recorded_it() {
    let world = four().await;
    world.pass(10 * 365 * 24 * 3600);
    let own = sticky(&world, "a", "c0", "w0").await.unwrap();
    world.release("a", "c0").await;
    world.pass(-10 * 365 * 24 * 3600);
    for number in 0..3 {
        world.one("a", &format!("o{number}")).await.unwrap();
    }
    assert!(world.one("a", "o3").await.unwrap_err().is_exhaustion());
    world.pass(WAIT as i64 + 1);
    assert_eq!(world.one("a", "o3").await.unwrap(), own);
    world.check().await;
}

#[tokio::test]
async fn sticky_overdue_longest_goes_to_others_when_pool_is_full() {
    let world = four().await;
    let mut own = Vec::new();
    for name in ["w0", "w1"] {
        own.push(sticky(&world, "a", name, name).await.unwrap());
        world.release("a", name).await;
        world.pass(60);
    }
    world.pass(WAIT as i64);
    // The pool has other free addresses, so the two sticky addresses whose wait is over are not reassigned yet.
    for number in 0..2 {
        assert!(!own.contains(&world.one("a", &format!("o{number}")).await.unwrap()));
    }
    assert_eq!(world.one("b", "o2").await.unwrap(), own[0], "also by a node that borrows");
    assert_eq!(record(&world, "w0").await, Vec::<IpAddr>::new());
    assert_eq!(sticky(&world, "a", "again", "w1").await.unwrap(), own[1], "late, and still there");
    assert!(matches!(sticky(&world, "a", "c0", "w0").await.unwrap_err(), Error::Exhausted { .. }));
    world.check().await;
    world.release("b", "o2").await;
    assert_eq!(sticky(&world, "a", "c0", "w0").await.unwrap(), own[0]);
    world.check().await;
}

#[tokio::test]
async fn sticky_pins_are_never_given_to_others() {
    let world = four().await;
    let mut pinned = request("a", "c1", "w");
    pinned.sticky.as_mut().unwrap().wait = None;
    let own = world.assign(&pinned).await.unwrap()[0].ip;
    world.release("a", "c1").await;
    world.pass(1_000_000_000);
    for number in 0..3 {
        world.one("a", &format!("o{number}")).await.unwrap();
    }
    assert!(matches!(world.one("a", "o3").await.unwrap_err(), Error::Exhausted { .. }));
    assert_eq!(sticky(&world, "a", "c2", "w").await.unwrap(), own);
}

#[tokio::test]
async fn sticky_name_of_two_containers_keeps_one_of_two_addresses() {
    let world = four().await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    let other = sticky(&world, "a", "c2", "w").await.unwrap();
    assert_ne!(own, other);
    world.check().await;
    world.release("a", "c2").await;
    world.release("a", "c1").await;
    let block = world.block("10.0.0.0/30").await.unwrap();
    assert_eq!(block.allocated().map(|(ip, _)| ip).collect::<Vec<_>>(), [own], "the other one is free");
    assert_eq!(sticky(&world, "a", "c3", "w").await.unwrap(), own);
    assert_eq!(record(&world, "w").await, [own]);
}

#[tokio::test]
async fn sticky_addresses_differ_by_network_interface_and_family() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.add_pool("v6", "fd00::/124").await;
    let of = |network: &str, interface: &str, container: &str| {
        let mut request = request("a", container, "w");
        request.attachment =
            Attachment { network: network.into(), interface: interface.into(), ..attachment("a", container) };
        request.wanted = RequestedAddresses::any(1, 1);
        request
    };
    let ends = [("net", "eth0"), ("net", "eth1"), ("lan", "eth0")];
    let mut before = Vec::new();
    for (network, interface) in ends {
        let request = of(network, interface, "c1");
        before.push(world.assign(&request).await.unwrap());
        assert_eq!(before.last().unwrap().len(), 2);
    }
    for (network, interface) in ends {
        world.ipam.release_attachment(&of(network, interface, "c1").attachment, &[], soon()).await.unwrap();
    }
    world.check().await;
    for ((network, interface), before) in ends.iter().zip(before).rev() {
        assert_eq!(world.assign(&of(network, interface, "c2")).await.unwrap(), before, "{network} {interface}");
    }
    world.check().await;
}

#[tokio::test]
async fn sticky_address_is_borrowed_unless_affinity_is_strict() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    world.release("a", "c1").await;
    world.configure(IpamConfig::default().with_strict_affinity(true)).await;
    assert_ne!(sticky(&world, "b", "c2", "w").await.unwrap(), own);
    world.release("b", "c2").await;
    assert_eq!(sticky(&world, "a", "c3", "w").await.unwrap(), own, "the workload is back on its node");
    world.release("a", "c3").await;
    world.configure(IpamConfig::default()).await;
    assert_eq!(sticky(&world, "b", "c4", "w").await.unwrap(), own);
    world.check().await;
}

#[tokio::test]
async fn sticky_address_is_lost_when_reserved_or_released() {
    let world = four().await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    world.release("a", "c1").await;
    world.reserve(&[&format!("{own}/32")]).await;
    let second = sticky(&world, "a", "c2", "w").await.unwrap();
    assert_ne!(second, own);
    assert_eq!(record(&world, "w").await, [second]);
    world.check().await;
    let released = world.ipam.release_ips(&[ReleaseRequest::new(second)], soon()).await.unwrap();
    assert_eq!(released.released, [second]);
    assert_eq!(record(&world, "w").await, Vec::<IpAddr>::new());
    world.check().await;
    assert_eq!(world.block("10.0.0.0/30").await.unwrap().allocated().count(), 0);
}

#[tokio::test]
async fn sticky_address_of_dead_container_is_taken_after_reboot() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add_pool("v4", "10.0.0.0/29").await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    let mut again = request("a", "c2", "w");
    again.attachment.boot = Some("boot0002".into());
    assert_eq!(world.assign(&again).await.unwrap()[0].ip, own);
    world.check().await;
    assert_eq!(world.release("a", "c1").await, Vec::<IpAddr>::new(), "the late DEL of the dead container");
    assert_eq!(held(&world.ipam, &again.attachment).await, [own]);
}

#[tokio::test]
async fn sticky_requested_address_is_taken_when_it_waits() {
    let world = four().await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    world.release("a", "c1").await;
    let mut these = AssignRequest::new(attachment("a", "c2"), RequestedAddresses::these([own]));
    assert!(matches!(world.assign(&these).await.unwrap_err(), Error::AlreadyAssigned(ip) if ip == own));
    these.sticky = Some(Sticky { name: "w".into(), wait: None });
    assert_eq!(world.assign(&these).await.unwrap()[0].ip, own);
    world.check().await;
    // If a workload has a sticky address and a request names a second address for the workload, the second address does
    // not become sticky.
    let mut other = AssignRequest::new(attachment("a", "c3"), RequestedAddresses::these([ip("10.0.0.3")]));
    other.sticky = Some(Sticky { name: "w".into(), wait: None });
    world.assign(&other).await.unwrap();
    let block = world.block("10.0.0.0/30").await.unwrap();
    assert_eq!(block.attributes_of(ip("10.0.0.3")).unwrap().get(STICKY), None);
}

#[tokio::test]
async fn sticky_cooldown_is_waited_for_too() {
    let world = four().await;
    world.configure(IpamConfig::default().with_cooldown_seconds(7200)).await;
    let own = sticky(&world, "a", "c1", "w").await.unwrap();
    world.release("a", "c1").await;
    let block = world.block("10.0.0.0/30").await.unwrap();
    let until = world.ipam.now() + Duration::from_secs(2 * WAIT);
    assert_eq!(waits_until(block.attributes_of(own).unwrap()), Some(WaitEnd::At(until)));
    assert_eq!(sticky(&world, "a", "c2", "w").await.unwrap(), own, "its own workload need not wait");
}

#[tokio::test]
async fn sticky_address_costs_no_round_trip() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/16".parse().unwrap())).await;
    let hints = Arc::<Memory>::default();
    let (ipam, counting) = counted(&world, &hints);
    let add = |container: &str| request("a", container, "w");
    // After 70 further assignments by the node, its most recently used block is no longer the block that contains the
    // sticky workload's address.
    let own = ipam.assign(&add("c1"), soon()).await.unwrap();
    for number in 0..70 {
        let other = AssignRequest::new(attachment("a", &format!("o{number}")), RequestedAddresses::any(1, 0));
        ipam.assign(&other, soon()).await.unwrap();
    }
    counting.take();
    for round in 1..4 {
        let ends = attachment("a", &format!("c{round}"));
        ipam.release_attachment_of(&ends, &[], &[own[0].ip], None, None, soon()).await.unwrap();
        assert_eq!(counting.take().round_trips(), 2, "DEL");
        assert_eq!(ipam.assign(&add(&format!("c{}", round + 1)), soon()).await.unwrap(), own);
        assert_eq!(counting.take().round_trips(), 2, "ADD");
        let other = AssignRequest::new(attachment("a", &format!("n{round}")), RequestedAddresses::any(1, 0));
        ipam.assign(&other, soon()).await.unwrap();
        assert_eq!(counting.take().round_trips(), 2, "the next container");
    }
    world.check().await;
}

/// In this test, containers of workloads start and stop on three nodes, sometimes two containers of one workload at a
/// time. The pool is too small for all workloads, and every tenth transaction fails in some way.
#[tokio::test(flavor = "multi_thread")]
async fn sticky_workloads_come_and_go_and_lose_no_address() {
    let quiet = World::new().await;
    quiet.add_pool("v4", "10.0.0.0/28").await;
    let start = quiet.store.list(Range::All).await.unwrap();
    let world = faulty(&quiet);
    let tasks = (0..12).map(|caller| {
        let world = world.clone();
        tokio::spawn(async move {
            let (node, name) = (["a", "b", "c"][caller % 3], format!("w{}", caller % 8));
            for round in 0..15 {
                let container = format!("c{caller}-{round}");
                let given = if caller % 4 == 3 {
                    world.one(node, &container).await
                } else {
                    sticky(&world, node, &container, &name).await
                };
                match given {
                    Ok(ip) => assert_eq!(held(&world.ipam, &attachment(node, &container)).await, [ip]),
                    Err(Error::Exhausted { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                world.pass(if round % 5 == 4 { WAIT as i64 } else { 10 });
                world.release(node, &container).await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let end = every_revision_is_consistent(&quiet, start).await;
    assert!(end.iter().all(|kv| keys::parse_handle(&kv.key).is_none()), "a handle is left");
    // At the end, every address that is not free waits for its workload, and becomes free when the wait is over.
    quiet.pass(1_000_000);
    for number in 0..16 {
        quiet.one("a", &format!("last{number}")).await.unwrap();
    }
    quiet.check().await;
    let left = quiet.store.list(Range::Prefix(keys::sticky_prefix())).await.unwrap().kvs;
    assert!(left.is_empty(), "no record outlives its address: {left:?}");
}
