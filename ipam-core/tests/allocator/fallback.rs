//! Tests bridged networks with several pools of one address family, and with sets of ranges.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipam_core::assign::{AssignRequest, Bridge, Gateway, PoolDefinition, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::hints::Hints;
use ipam_core::model::{Pool, keys};
use ipam_core::sticky::Sticky;
use ipam_core::{BridgeError, Error, Nodes};
use ipnet::IpNet;
use kv::wrap::CountingStore;

use crate::world::{World, attachment, ip, soon};

fn bridged(container: &str, pools: &[&str]) -> AssignRequest {
    let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0));
    request.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::First });
    request.v4_pools = pools.iter().map(|pool| (*pool).to_owned()).collect();
    request
}

/// A test world with two pools of five addresses each, and a large pool.
async fn world() -> World {
    let world = World::new().await;
    for (name, cidr) in [("one", "10.1.0.0/29"), ("two", "10.2.0.0/29"), ("big", "10.3.0.0/24")] {
        world.add_pool(name, cidr).await;
    }
    world
}

#[tokio::test]
async fn fallback_serves_first_pool_with_room_with_its_gateway() {
    let world = world().await;
    let mut given: Vec<IpAddr> = Vec::new();
    for number in 0..10 {
        let assigned = world.assign(&bridged(&format!("c{number}"), &["two", "10.1.0.0/29"])).await.unwrap();
        let (net, gateway) = if number < 5 { ("10.2.0.0/29", "10.2.0.1") } else { ("10.1.0.0/29", "10.1.0.1") };
        assert_eq!((assigned[0].pool.to_string().as_str(), assigned[0].gateway), (net, Some(ip(gateway))));
        assert!(!given.contains(&assigned[0].ip));
        given.push(assigned[0].ip);
    }
    let error = world.assign(&bridged("c10", &["two", "one"])).await.unwrap_err();
    assert!(error.is_exhaustion() && error.to_string().contains("[10.2.0.0/29 10.1.0.0/29]"), "{error}");
    // A container gets its former address again from any of its pools, even if an earlier pool in the list has free
    // addresses.
    world.release("a", "c3").await;
    assert_eq!(world.assign(&bridged("c7", &["two", "one"])).await.unwrap()[0].ip, given[7]);
    assert_eq!(world.assign(&bridged("c10", &["two", "one"])).await.unwrap()[0].ip, given[3]);
    world.check().await;
}

#[tokio::test]
async fn fallback_skips_disabled_pool() {
    let world = world().await;
    let ask = async |container: &str| {
        let mut request = bridged(container, &["one", "two"]);
        request.sticky = Some(Sticky { name: container.into(), wait: Some(Duration::from_secs(60)) });
        let assigned = world.assign(&request).await;
        assigned.map(|assigned| assigned[0].pool.to_string()).map_err(|error| error.to_string())
    };
    let edit = async |name: &str, edit: fn(&mut Pool)| {
        let pools = world.ipam.inventory(soon()).await.unwrap().pools;
        let mut pool = pools.into_iter().find(|pool| pool.name() == name).unwrap();
        edit(&mut pool);
        world.put(keys::resource(keys::ResourceKind::IpPool, name), &pool).await;
    };
    let disable = async |name: &str| edit(name, Pool::disable).await;
    let enable = async |name: &str| edit(name, Pool::enable).await;
    let before = ask("c0").await;
    assert_eq!(before, Ok("10.1.0.0/29".to_owned()));
    ask("w").await.unwrap();
    world.release("a", "w").await;
    disable("one").await;
    assert_eq!(ask("c0").await, before, "it has its address already");
    assert_eq!(ask("w").await, Ok("10.2.0.0/29".to_owned()));
    world.release("a", "w").await;
    enable("one").await;
    assert_eq!(ask("w").await, before, "it has waited on");
    disable("one").await;
    assert_eq!(ask("c1").await, Ok("10.2.0.0/29".to_owned()));
    disable("two").await;
    let refused = ask("c2").await.unwrap_err();
    assert!(refused.contains("10.1.0.0/29) does not exist, or is not enabled"), "{refused}");
    world.check().await;
}

#[tokio::test]
async fn fallback_refuses_several_pools_when_none_is_named() {
    let world = world().await;
    let refused = world.assign(&bridged("c0", &[])).await;
    assert!(matches!(refused, Err(Error::Bridge(BridgeError::SeveralPools { .. }))), "{refused:?}");
    let missing = world.assign(&bridged("c0", &["one", "10.9.0.0/24"])).await.unwrap_err();
    assert!(missing.to_string().contains("10.9.0.0/24"), "{missing}");
}

#[tokio::test]
async fn fallback_gives_gateway_of_its_pool() {
    let world = world().await;
    let mut request = bridged("c0", &["one", "two"]);
    request.bridge = Some(Bridge { v4: Gateway::At(ip("10.2.0.6")), v6: Gateway::Recorded });
    assert_eq!(
        world.assign(&request).await.unwrap()[0].gateway,
        Some(ip("10.1.0.1")),
        "the other pool's is configured"
    );
    request.v4_pools = vec!["two".into(), "one".into()];
    request.attachment = attachment("a", "c1");
    assert_eq!(world.assign(&request).await.unwrap()[0].gateway, Some(ip("10.2.0.6")));
    request.attachment = attachment("a", "c2");
    request.v4_pools = vec!["big".into(), "one".into()];
    let refused = world.assign(&request).await;
    assert!(matches!(refused, Err(Error::Bridge(BridgeError::GatewayOutside { .. }))), "{refused:?}");
    request.gateways = vec![ip("10.1.0.1"), ip("10.3.0.9")];
    assert_eq!(world.assign(&request).await.unwrap()[0].gateway, Some(ip("10.3.0.9")));
}

fn set(number: usize, subnets: &[(&str, &str)]) -> Vec<PoolDefinition> {
    let one = |(at, (cidr, ranges)): (usize, &(&str, &str))| PoolDefinition {
        name: format!("net-{number}-{at}"),
        cidr: cidr.parse().unwrap(),
        ranges: ranges.split_once('-').map(|(first, last)| (ip(first), ip(last))).into_iter().collect(),
        set: number,
        free_of: None,
        gateway: None,
    };
    subnets.iter().enumerate().map(one).collect()
}

fn defining(container: &str, sets: &[Vec<PoolDefinition>], v4: usize, v6: usize) -> AssignRequest {
    let mut request = bridged(container, &[]);
    request.wanted = RequestedAddresses::any(v4, v6);
    request.define = sets.concat();
    request
}

fn ips(assigned: &[ipam_core::assign::AssignedAddress]) -> Vec<String> {
    assigned.iter().map(|one| one.ip.to_string()).collect()
}

#[tokio::test]
async fn fallback_gives_attachment_address_of_each_set() {
    let world = World::new().await;
    let sets = [
        set(0, &[("10.1.0.0/24", "10.1.0.10-10.1.0.11"), ("10.2.0.0/24", "10.2.0.10-10.2.0.19")]),
        set(1, &[("fd00::/64", "")]),
        set(2, &[("10.1.0.0/24", "10.1.0.20-10.1.0.22")]),
    ];
    let mut seen = BTreeSet::new();
    for number in 0..3 {
        let assigned = world.assign(&defining(&format!("c{number}"), &sets, 2, 1)).await.unwrap();
        let addresses = ips(&assigned);
        let first = if number < 2 { "10.1.0.1" } else { "10.2.0.1" };
        assert!(addresses[0].starts_with(first) && addresses[1].starts_with("10.1.0.2"), "{addresses:?}");
        assert!(addresses[2].starts_with("fd00::"), "{addresses:?}");
        assert_eq!(world.assign(&defining(&format!("c{number}"), &sets, 2, 1)).await.unwrap(), assigned);
        seen.extend(addresses);
    }
    assert_eq!(seen.len(), 9);
    // The third set of ranges is full, so the assignment fails without taking addresses from the other sets.
    let before = world.dump().await;
    let error = world.assign(&defining("c3", &sets, 2, 1)).await.unwrap_err();
    assert!(error.is_exhaustion(), "{error}");
    assert_eq!(world.dump().await, before);
    // If a request names an address, the set of ranges that contains this address gives no second address.
    world.release("a", "c0").await;
    let mut wanted = defining("c4", &sets, 1, 1);
    let free = seen.iter().find(|text| text.starts_with("10.1.0.2") && text.len() == 9).unwrap();
    let free = world.assign(&defining("c5", &sets, 2, 1)).await.map(|assigned| assigned[1].ip).unwrap_or(ip(free));
    world.release("a", "c5").await;
    wanted.wanted.these = vec![free];
    let addresses = ips(&world.assign(&wanted).await.unwrap());
    assert!(addresses[0] == free.to_string() && !addresses[1].starts_with("10.1.0.2"), "{addresses:?}");
    world.check().await;
}

#[tokio::test]
async fn fallback_subnets_can_change_places() {
    let world = World::new().await;
    let named = |cidr: &str, name: &str| PoolDefinition { name: name.into(), ..set(0, &[(cidr, "")]).remove(0) };
    let define = async |container: &str, define: Vec<PoolDefinition>| {
        world.assign(&defining(container, &[define], 1, 0)).await.map(|assigned| assigned[0].pool.to_string())
    };
    assert_eq!(define("c0", vec![named("10.1.0.0/24", "net")]).await.unwrap(), "10.1.0.0/24");
    let turned = vec![named("10.2.0.0/24", "net"), named("10.1.0.0/24", "net-2")];
    assert_eq!(define("c1", turned).await.unwrap(), "10.2.0.0/24");
    let inventory = world.ipam.inventory(soon()).await.unwrap();
    let names: Vec<_> = inventory.pools.iter().map(|pool| pool.name().to_owned()).collect();
    assert_eq!(names, ["net", "net-2"]);
    // A pool with addresses in use keeps its name when the network configuration no longer names the pool.
    assert_eq!(define("c2", vec![named("10.3.0.0/24", "net")]).await.unwrap(), "10.3.0.0/24");
    let inventory = world.ipam.inventory(soon()).await.unwrap();
    assert_eq!(inventory.pools.iter().map(Pool::name).collect::<Vec<_>>(), ["net", "net-2", "net-3"]);
}

#[tokio::test]
async fn fallback_chooses_free_network_once() {
    let world = World::new().await;
    world.add_pool("other", "10.200.0.0/24").await;
    let auto = |container: &str| {
        let taken = Some(vec!["10.200.1.0/24".parse().unwrap()]);
        let one = |cidr: &str, name: &str| PoolDefinition {
            name: name.into(),
            free_of: taken.clone(),
            ..set(0, &[(cidr, "")]).remove(0)
        };
        defining(container, &[vec![one("0.0.0.0/24", "net"), one("::/64", "net-ipv6")]], 1, 1)
    };
    // Two concurrent first requests of a network choose the same subnet.
    let (one, two) = (auto("c0"), auto("c1"));
    let (one, two) = tokio::join!(world.assign(&one), world.assign(&two));
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!((one[0].pool, one[1].pool), (two[0].pool, two[1].pool));
    assert_eq!((one[0].pool.to_string().as_str(), one[0].gateway), ("10.200.2.0/24", Some(ip("10.200.2.1"))));
    assert!(one[1].ip.to_string().starts_with("fd") && one[1].pool.prefix_len() == 64);
    // New routes of the machine do not change an automatically chosen subnet.
    let mut later = auto("c2");
    later.define[0].free_of = Some(vec!["10.0.0.0/8".parse().unwrap()]);
    assert_eq!(world.assign(&later).await.unwrap()[0].pool, one[0].pool);
    later.define[0].name = "another".into();
    later.define[0].free_of = Some(vec!["10.0.0.0/8".parse().unwrap(), "172.16.0.0/12".parse().unwrap()]);
    later.attachment = attachment("a", "c3");
    let error = world.assign(&later).await.unwrap_err();
    assert!(error.to_string().contains("there is no free private network of /24"), "{error}");
    world.check().await;
}

/// A [`Hints`] implementation that never forgets which pools are full.
#[derive(Debug, Default)]
struct Memory {
    used: Mutex<Vec<IpNet>>,
    full: Mutex<Vec<IpNet>>,
}

impl Hints for Memory {
    fn recall(&self, _: &Attachment) -> Vec<IpNet> {
        self.used.lock().unwrap().clone()
    }

    fn remember(&self, _: &Attachment, blocks: &[IpNet]) {
        *self.used.lock().unwrap() = blocks.to_vec();
    }

    fn recall_full_pools(&self, _: &Attachment) -> Vec<IpNet> {
        self.full.lock().unwrap().clone()
    }

    fn remember_full_pools(&self, _: &Attachment, pools: &[IpNet]) {
        self.full.lock().unwrap().extend(pools);
    }
}

#[tokio::test]
async fn fallback_costs_no_round_trip_and_survives_stale_hint() {
    let world = world().await;
    let memory = Arc::new(Memory::default());
    let counting = CountingStore::new(Arc::clone(&world.store));
    let ipam = World::on(Arc::new(counting.clone()), Nodes::Registered).ipam;
    let ipam = ipam.with_hints(Arc::clone(&memory) as Arc<dyn Hints>);
    let trips = async |container: &str| {
        counting.take();
        let assigned = ipam.assign(&bridged(container, &["one", "big"]), soon()).await.unwrap();
        (counting.take().round_trips(), assigned[0].pool.to_string())
    };
    for number in 0..6 {
        trips(&format!("c{number}")).await;
    }
    for number in 6..9 {
        assert_eq!(trips(&format!("c{number}")).await, (2, "10.3.0.0/24".into()), "{number}");
    }
    assert_eq!(*memory.full.lock().unwrap(), ["10.1.0.0/29".parse().unwrap()], "noted once");
    // If the hints report all pools as full, all pools are tried in order.
    world.release("a", "c0").await;
    memory.full.lock().unwrap().push("10.3.0.0/24".parse().unwrap());
    assert_eq!(trips("again").await.1, "10.1.0.0/29");
    // A wrong hint that a pool is full does not hide the last free address.
    world.release("a", "c1").await;
    *memory.full.lock().unwrap() = vec!["10.1.0.0/29".parse().unwrap()];
    let mut alone = bridged("last", &["one", "two"]);
    for number in 0..5 {
        ipam.assign(&bridged(&format!("t{number}"), &["two"]), soon()).await.unwrap();
    }
    assert_eq!(ipam.assign(&alone, soon()).await.unwrap()[0].pool.to_string(), "10.1.0.0/29");
    alone.attachment = attachment("a", "none");
    assert!(ipam.assign(&alone, soon()).await.unwrap_err().is_exhaustion());
    world.check().await;
}

#[tokio::test]
async fn fallback_keeps_full_parts_of_sets_apart() {
    let world = World::new().await;
    let ipam = world.ipam.clone().with_hints(Arc::new(Memory::default()) as Arc<dyn Hints>);
    let part = |set: usize, name: &str, cidr: &str, ranges: &[(&str, &str)]| PoolDefinition {
        name: name.into(),
        cidr: cidr.parse().unwrap(),
        ranges: ranges.iter().map(|(first, last)| (ip(first), ip(last))).collect(),
        set,
        free_of: None,
        gateway: None,
    };
    for number in 0..6 {
        let mut request = bridged(&format!("c{number}"), &[]);
        request.wanted = RequestedAddresses::any(2, 0);
        request.define = vec![
            part(0, "shared", "10.5.0.0/24", &[("10.5.0.10", "10.5.0.11")]),
            part(0, "more", "10.6.0.0/24", &[]),
            part(1, "shared", "10.5.0.0/24", &[("10.5.0.20", "10.5.0.90")]),
            part(1, "last", "10.7.0.0/24", &[]),
        ];
        let pools: Vec<String> =
            ipam.assign(&request, soon()).await.unwrap().iter().map(|one| one.pool.to_string()).collect();
        let first = if number < 2 { "10.5.0.0/24" } else { "10.6.0.0/24" };
        assert_eq!(pools, [first, "10.5.0.0/24"], "{number}");
    }
}

#[tokio::test]
async fn fallback_keeps_sticky_address_in_any_pool() {
    let world = world().await;
    let sticky = |container: &str| {
        let mut request = bridged(container, &["one", "two"]);
        request.sticky = Some(Sticky { name: "w".into(), wait: Some(Duration::from_secs(60)) });
        request
    };
    let own = world.assign(&sticky("w1")).await.unwrap()[0].ip;
    world.release("a", "w1").await;
    world.pass(3600);
    // A sticky address of the first pool that no longer waits is given to another workload only when the second pool
    // has no free address either.
    for number in 0..9 {
        let assigned = world.assign(&bridged(&format!("c{number}"), &["one", "two"])).await.unwrap();
        assert_ne!(assigned[0].ip, own);
    }
    let last = world.assign(&bridged("c9", &["one", "two"])).await.unwrap();
    assert_eq!((last[0].ip, last[0].gateway), (own, Some(ip("10.1.0.1"))));
    world.check().await;
    // A sticky workload keeps its address in the second pool although the first pool has free addresses.
    world.release("a", "c8").await;
    let second = world.assign(&sticky("w2")).await.unwrap();
    assert_eq!(second[0].gateway, Some(ip("10.2.0.1")));
    for container in ["w2", "c9", "c0"] {
        world.release("a", container).await;
    }
    assert_eq!(world.assign(&sticky("w3")).await.unwrap(), second);
    world.check().await;
}

#[tokio::test]
async fn fallback_keeps_sticky_address_of_each_set() {
    let world = World::new().await;
    let set = |set: usize, cidr: &str| PoolDefinition {
        name: format!("set-{set}"),
        cidr: cidr.parse().unwrap(),
        ranges: Vec::new(),
        set,
        free_of: None,
        gateway: None,
    };
    let of = |container: &str| {
        let mut request = bridged(container, &[]);
        request.wanted = RequestedAddresses::any(2, 0);
        request.define = vec![set(0, "10.5.0.0/28"), set(1, "10.6.0.0/28")];
        request.sticky = Some(Sticky { name: "w".into(), wait: None });
        request
    };
    let first = world.assign(&of("w1")).await.unwrap();
    assert_eq!(first.len(), 2);
    for round in 2..5 {
        world.release("a", &format!("w{}", round - 1)).await;
        let mut other = of("other");
        other.sticky = None;
        assert!(world.assign(&other).await.unwrap().iter().all(|one| !first.iter().any(|own| own.ip == one.ip)));
        assert_eq!(world.assign(&of(&format!("w{round}"))).await.unwrap(), first);
        world.release("a", "other").await;
        world.check().await;
    }
}
