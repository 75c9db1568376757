//! Tests networks that define their pools: several networks of one name, changed subnets, and gateways outside the
//! subnet.

use std::collections::BTreeMap;

use ipam_core::assign::{AssignRequest, AssignedAddress, Bridge, Gateway, PoolDefinition, RequestedAddresses};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Affinity, AffinityState, AssignmentMode, IpamConfig, NewPool, Owner, Pool};
use ipam_core::net::overlap;
use ipam_core::sticky::Sticky;
use ipam_core::{BridgeError, Error};
use ipnet::IpNet;
use kv::StoreExt;

use crate::world::{World, attachment, ip, soon};

/// Creates an ADD on network `net` that defines a pool for each given subnet and wants one address from each pool.
fn defining(node: &str, container: &str, subnets: &[&str]) -> AssignRequest {
    let v6 = subnets.iter().filter(|subnet| subnet.contains(':')).count();
    let mut request = AssignRequest::new(attachment(node, container), RequestedAddresses::any(subnets.len() - v6, v6));
    request.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::First });
    let (mut of_v4, mut of_v6) = (0, 0);
    let define = |(set, subnet): (usize, &&str)| {
        let (number, suffix) = if subnet.contains(':') { (&mut of_v6, "-ipv6") } else { (&mut of_v4, "") };
        *number += 1;
        let numbered = if *number > 1 { format!("-{number}") } else { String::new() };
        let (name, cidr) = (format!("net{suffix}{numbered}"), subnet.parse().unwrap());
        PoolDefinition { name, cidr, ranges: Vec::new(), set, free_of: None, gateway: None }
    };
    request.define = subnets.iter().enumerate().map(define).collect();
    request
}

fn subnets(assigned: &[AssignedAddress]) -> Vec<String> {
    assigned.iter().map(|one| one.pool.to_string()).collect()
}

/// Shorthands for the tests of networks that define their pools.
trait OnNetworks {
    async fn on_subnets(&self, container: &str, of: &[&str]) -> Vec<AssignedAddress>;

    /// Checks that every block, affinity and reservation belongs to a pool, and returns the pools' networks by name.
    async fn pools(&self) -> BTreeMap<String, String>;

    /// Asserts that a network configuration is refused and the store unchanged, because its subnet overlaps with `by`,
    /// a subnet of pool `net`.
    async fn is_refused(&self, of: &[&str], by: &str);

    async fn edit(&self, name: &str, edit: impl Fn(&mut Pool));
}

impl OnNetworks for World {
    async fn on_subnets(&self, container: &str, of: &[&str]) -> Vec<AssignedAddress> {
        let assigned = self.assign(&defining("a", container, of)).await.unwrap();
        assert_eq!(subnets(&assigned), of, "{container}");
        assigned
    }

    async fn pools(&self) -> BTreeMap<String, String> {
        self.check().await;
        let inventory = self.ipam.inventory(soon()).await.unwrap();
        let pools: Vec<(String, IpNet)> =
            inventory.pools.iter().map(|pool| (pool.name().to_owned(), pool.cidr())).collect();
        for kv in self.dump().await {
            let of_affinity = keys::parse_affinity(&kv.key).map(|(_, block)| block);
            if let Some(block) = keys::parse_block(&kv.key).or(of_affinity) {
                assert!(pools.iter().any(|(_, cidr)| cidr.contains(&block)), "{} is of no pool", kv.key);
            }
            if let Some(name) = keys::parse_resource(ResourceKind::IpReservation, &kv.key)
                && let Some(pool) = name.strip_prefix("margay-bridge-")
            {
                let document: serde_json::Value = serde_json::from_slice(kv.value.as_bytes()).unwrap();
                let cidr = pools.iter().find(|(name, _)| name == pool).map(|(_, cidr)| *cidr).unwrap();
                let reserved = document["spec"]["reservedCIDRs"].as_array().unwrap();
                let is_inside =
                    |net: &serde_json::Value| cidr.contains(&net.as_str().unwrap().parse::<IpNet>().unwrap());
                assert!(reserved.iter().all(is_inside), "{document}");
            }
        }
        pools.into_iter().map(|(name, cidr)| (name, cidr.to_string())).collect()
    }

    async fn is_refused(&self, of: &[&str], by: &str) {
        let before = self.dump().await;
        let refused = self.assign(&defining("a", "c1", of)).await.unwrap_err();
        let Error::Bridge(BridgeError::BadRanges(text)) = refused else { panic!("{refused}") };
        let expected = format!("subnet {} overlaps with {by} of pool net; choose another subnet, or delete", of[0]);
        assert!(text.starts_with(&expected), "{text}");
        assert_eq!(self.dump().await, before);
    }

    async fn edit(&self, name: &str, edit: impl Fn(&mut Pool)) {
        let pools = self.ipam.inventory(soon()).await.unwrap().pools;
        let mut pool = pools.into_iter().find(|pool| pool.name() == name).unwrap();
        edit(&mut pool);
        self.put(keys::resource(ResourceKind::IpPool, name), &pool).await;
    }
}

fn these(pools: &[(&str, &str)]) -> BTreeMap<String, String> {
    pools.iter().map(|(name, cidr)| ((*name).to_owned(), (*cidr).to_owned())).collect()
}

#[tokio::test]
async fn networks_of_one_name_have_pool_for_each_subnet() {
    for (one, two, three) in
        [("10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/30"), ("fd00:1::/64", "fd00:2::/64", "fd00:3::/120")]
    {
        let world = World::new().await;
        world.on_subnets("c1", &[one]).await;
        let second = world.on_subnets("c2", &[two]).await;
        world.on_subnets("c3", &[three]).await;
        world.on_subnets("c4", &[one]).await;
        assert_eq!(world.on_subnets("c2", &[two]).await, second, "it has its address already");
        let name = if one.contains(':') { "net-ipv6" } else { "net" };
        let (name_2, name_3) = (format!("{name}-2"), format!("{name}-3"));
        assert_eq!(world.pools().await, these(&[(name, one), (&name_2, two), (&name_3, three)]));
    }
}

#[tokio::test]
async fn network_pool_name_is_taken_by_other_network() {
    let world = World::new().await;
    world.on_subnets("c1", &["10.3.0.0/24", "10.4.0.0/24"]).await;
    let mut other = defining("a", "c2", &["10.5.0.0/24"]);
    (other.attachment.network, other.define[0].name) = ("net-2".into(), "net-2".into());
    assert_eq!(subnets(&world.assign(&other).await.unwrap()), ["10.5.0.0/24"]);
    let expected = these(&[("net", "10.3.0.0/24"), ("net-2", "10.4.0.0/24"), ("net-2-2", "10.5.0.0/24")]);
    assert_eq!(world.pools().await, expected);
    // The second network no longer uses its pool, so its new pool replaces the old pool. The first network's pool
    // stays, although no address of the pool is in use.
    for container in ["c1", "c2"] {
        let mut attachment = attachment("a", container);
        world.ipam.release_attachment(&attachment, &[], soon()).await.unwrap();
        attachment.network = "net-2".into();
        world.ipam.release_attachment(&attachment, &[], soon()).await.unwrap();
    }
    other.define[0].cidr = "10.6.0.0/24".parse().unwrap();
    world.assign(&other).await.unwrap();
    let expected = these(&[("net", "10.3.0.0/24"), ("net-2", "10.4.0.0/24"), ("net-2-2", "10.6.0.0/24")]);
    assert_eq!(world.pools().await, expected);
}

#[tokio::test]
async fn network_pool_makes_way_for_new_subnet_when_unused() {
    let world = World::new().await;
    let subnets = |number: usize| [format!("10.42.{number}.0/24"), format!("fd42:{}::/64", number + 1)];
    for number in 0..5 {
        let of = subnets(number);
        let of = [of[0].as_str(), of[1].as_str()];
        let container = format!("c{number}");
        world.on_subnets(&container, &of).await;
        assert_eq!(world.pools().await, these(&[("net", of[0]), ("net-ipv6", of[1])]));
        world.release("a", &container).await;
    }
    // A pool is not replaced while any of its addresses is in use.
    world.on_subnets("d1", &["10.43.0.0/24"]).await;
    world.on_subnets("d2", &["10.43.1.0/24"]).await;
    let of_v6 = subnets(4)[1].clone();
    let both = these(&[("net", "10.43.0.0/24"), ("net-2", "10.43.1.0/24"), ("net-ipv6", &of_v6)]);
    assert_eq!(world.pools().await, both);
    world.release("a", "d1").await;
    world.on_subnets("d3", &["10.43.2.0/24"]).await;
    let both = these(&[("net", "10.43.2.0/24"), ("net-2", "10.43.1.0/24"), ("net-ipv6", &of_v6)]);
    assert_eq!(world.pools().await, both);
}

#[tokio::test]
async fn network_pool_is_replaced_when_subnet_changes_size() {
    let sizes = ["10.9.0.0/24", "10.9.0.0/16", "10.9.4.0/22", "10.9.4.0/26", "10.9.0.0/20"];
    let world = World::new().await;
    for cidr in sizes {
        world.on_subnets("c0", &[cidr]).await;
        assert_eq!(world.pools().await, these(&[("net", cidr)]));
        world.is_refused(&["10.0.0.0/8"], cidr).await;
        world.release("a", "c0").await;
    }
    // The changed network is refused, because its blocks would overlap with stored blocks of another size.
    world.is_refused(&["10.9.4.0/29"], "10.9.0.0/20").await;
    let world = World::new().await;
    world.on_subnets("c0", &["10.9.4.0/29"]).await;
    world.release("a", "c0").await;
    world.is_refused(&["10.9.4.0/24"], "10.9.4.0/29").await;
    world.on_subnets("c0", &["10.9.5.0/24"]).await;
    assert_eq!(world.pools().await, these(&[("net", "10.9.5.0/24")]));
}

#[tokio::test]
async fn network_pool_stays_when_not_owned_by_network() {
    let edits: [fn(&mut Pool); 3] = [
        Pool::disable,
        |pool| pool.resource_mut().remove_annotation("margay.io/network"),
        |pool| pool.resource_mut().set_annotation("margay.io/network", "other"),
    ];
    for edit in edits {
        let world = World::new().await;
        world.on_subnets("c1", &["10.1.0.0/24"]).await;
        world.release("a", "c1").await;
        world.edit("net", edit).await;
        world.on_subnets("c2", &["10.2.0.0/24"]).await;
        assert_eq!(world.pools().await, these(&[("net", "10.1.0.0/24"), ("net-2", "10.2.0.0/24")]));
    }
    for mode in [AssignmentMode::Automatic, AssignmentMode::Manual] {
        let world = World::new().await;
        world.on_subnets("before", &["10.7.0.0/24"]).await;
        world.release("a", "before").await;
        let new = NewPool::new("net-2", "10.1.0.0/24".parse().unwrap()).with_assignment_mode(mode);
        world.ipam.create_pool(&new, None, soon()).await.unwrap();
        world.on_subnets("c1", &["10.7.0.0/24"]).await;
        world.on_subnets("c2", &["10.2.0.0/24"]).await;
        let expected = these(&[("net", "10.7.0.0/24"), ("net-2", "10.1.0.0/24"), ("net-3", "10.2.0.0/24")]);
        assert_eq!(world.pools().await, expected);
    }
}

#[tokio::test]
async fn network_pool_stays_when_address_waits() {
    let sticky = Sticky { name: "w".into(), wait: None };
    for (cooldown, sticky) in [(60, None), (0, Some(sticky))] {
        let world = World::new().await;
        world.configure(IpamConfig::default().with_cooldown_seconds(cooldown)).await;
        let mut first = defining("a", "c1", &["10.1.0.0/24"]);
        first.sticky = sticky;
        world.assign(&first).await.unwrap();
        world.release("a", "c1").await;
        world.on_subnets("c2", &["10.2.0.0/24"]).await;
        assert_eq!(world.pools().await, these(&[("net", "10.1.0.0/24"), ("net-2", "10.2.0.0/24")]));
        world.pass(61);
        world.on_subnets("c3", &["10.3.0.0/24"]).await;
        let first = if cooldown > 0 { "10.3.0.0/24" } else { "10.1.0.0/24" };
        assert_eq!(world.pools().await["net"], first);
    }
}

#[tokio::test]
async fn network_pool_takes_affinities_of_any_owner() {
    let world = World::new().await;
    world.on_subnets("c1", &["10.1.0.0/24"]).await;
    world.release("a", "c1").await;
    let stale = [
        (Owner::host("b"), "10.1.0.0/28", AffinityState::Confirmed),
        (Owner::host("c"), "10.1.0.0/25", AffinityState::Pending),
        (Owner::Virtual("load-balancer".into()), "10.1.0.64/26", AffinityState::PendingDeletion),
    ];
    for (owner, cidr, state) in stale {
        let key = keys::affinity(&owner, cidr.parse().unwrap()).unwrap();
        world.put(key, &Affinity::new(state)).await;
    }
    world.on_subnets("c2", &["10.2.0.0/24"]).await;
    assert_eq!(world.pools().await, these(&[("net", "10.2.0.0/24")]));
}

#[tokio::test]
async fn network_pool_of_many_blocks_stays_and_name_is_numbered() {
    let world = World::new().await;
    let mut containers = Vec::new();
    for number in 0..19 {
        let container = format!("c{number}");
        let mut request = defining("a", &container, &["10.1.0.0/16"]);
        request.wanted = RequestedAddresses::these([ip(&format!("10.1.{number}.9"))]);
        world.assign(&request).await.unwrap();
        containers.push(container);
    }
    for container in &containers {
        world.release("a", container).await;
    }
    world.on_subnets("d1", &["10.2.0.0/24"]).await;
    assert_eq!(world.pools().await, these(&[("net", "10.1.0.0/16"), ("net-2", "10.2.0.0/24")]));
}

/// One commit holds at most 120 guards.
#[tokio::test]
async fn network_pools_that_change_at_once_fit_into_commit() {
    let world = World::new().await;
    let subnets = |first: usize| -> Vec<String> {
        let v4 = (0..8).map(|number| format!("10.{}.0.0/24", first + number));
        v4.chain((0..4).map(|number| format!("fd{:02}:{}::/64", first, number + 1))).collect()
    };
    for round in 0..3 {
        let of = subnets(10 + 20 * round);
        let of: Vec<&str> = of.iter().map(String::as_str).collect();
        world.on_subnets("c", &of).await;
        world.release("a", "c").await;
    }
    let pools = world.pools().await;
    assert!(subnets(50).iter().all(|cidr| pools.values().any(|pool| pool == cidr)), "{pools:?}");
}

#[tokio::test]
async fn networks_of_one_name_begin_together_in_one_commit() {
    let world = World::new().await;
    world.on_subnets("c0", &["10.1.0.0/24"]).await;
    world.release("a", "c0").await;
    let (one, two) = (["10.1.0.0/24"], ["10.2.0.0/24"]);
    let requests = [("c1", one), ("c2", two), ("c3", one), ("c4", two)];
    let requests: Vec<_> = requests.iter().map(|(container, of)| defining("a", container, of)).collect();
    let answers = world.ipam.assign_together(&requests, soon()).await.unwrap();
    let of: Vec<String> = answers.iter().flat_map(|answer| subnets(answer)).collect();
    assert_eq!(of, [one[0], two[0], one[0], two[0]]);
    assert_eq!(world.pools().await, these(&[("net", one[0]), ("net-2", two[0])]));
}

/// In this test, one ADD claims a block of an unused pool while another ADD replaces the pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn network_pool_is_never_replaced_when_coming_into_use() {
    let world = World::new().await;
    for round in 0..60 {
        let base = format!("{}", round % 200);
        let [old, new, third] = [1, 2, 3].map(|part| format!("10.{part}.{base}.0/24"));
        world.on_subnets("c0", &[&old]).await;
        world.release("a", "c0").await;
        let requests = [("a", "c1", &old), ("b", "c2", &new), ("c", "c3", &third), ("b", "c4", &old)];
        let tasks = requests.map(|(node, container, of)| {
            let (ipam, request) = (world.ipam.clone(), defining(node, container, &[of.as_str()]));
            tokio::spawn(async move { ipam.assign(&request, soon()).await })
        });
        for (task, (_, _, of)) in tasks.into_iter().zip(&requests) {
            assert_eq!(subnets(&task.await.unwrap().unwrap()), [of.as_str()]);
        }
        let pools = world.pools().await;
        assert!([&old, &new, &third].iter().all(|cidr| pools.values().any(|pool| *pool == **cidr)), "{pools:?}");
        for kv in world.dump().await.iter().filter(|kv| keys::parse_block(&kv.key).is_some()) {
            let block = keys::parse_block(&kv.key).unwrap();
            let overlapping = pools.values().filter(|cidr| overlap(cidr.parse().unwrap(), block)).count();
            assert_eq!(overlapping, 1, "{block}");
        }
        for (node, container, _) in requests {
            world.release(node, container).await;
        }
    }
}

#[tokio::test]
async fn network_pool_name_stays_taken_by_malformed_document() {
    let world = World::new().await;
    let key = keys::resource(ResourceKind::IpPool, "net");
    world.store.put(key.clone(), "damaged").await.unwrap();
    world.on_subnets("c1", &["10.1.0.0/24"]).await;
    assert_eq!(world.value(&key).await.as_bytes(), b"damaged");
    assert_eq!(world.pools().await, these(&[("net-2", "10.1.0.0/24")]));
}

#[tokio::test]
async fn network_pool_of_chosen_subnet_is_found_by_name() {
    let world = World::new().await;
    world.add_pool("net", "fd00::/64").await;
    let mut auto = defining("a", "c1", &["0.0.0.0/24"]);
    auto.define[0].free_of = Some(Vec::new());
    let refused = world.assign(&auto).await.unwrap_err().to_string();
    assert!(refused.contains("pool net of this network is of another family"), "{refused}");
    // A pool with an automatically chosen subnet is not replaced, since its network can find the pool only by the
    // pool's name.
    let world = World::new().await;
    let chosen = world.assign(&auto).await.unwrap()[0].pool;
    world.release("a", "c1").await;
    world.on_subnets("c2", &["10.1.0.0/24"]).await;
    world.release("a", "c2").await;
    assert_eq!(world.assign(&auto).await.unwrap()[0].pool, chosen);
}

#[tokio::test]
async fn network_gateway_of_ipv6_may_lie_outside_subnet() {
    let world = World::new().await;
    let mut request = defining("a", "c1", &["fd00::/126"]);
    request.define[0].gateway = Some(ip("fe80::1"));
    let mut given = Vec::new();
    for (container, gateway) in [("c1", "fe80::1"), ("c2", "fe80::2"), ("c3", "2001:db8::1")] {
        request.attachment.container = container.into();
        request.define[0].gateway = Some(ip(gateway));
        let assigned = world.assign(&request).await.unwrap();
        assert_eq!(assigned[0].gateway, Some(ip(gateway)));
        assert_eq!(world.assign(&request).await.unwrap(), assigned, "an ADD that is repeated");
        given.push(assigned[0].ip);
    }
    given.sort_unstable();
    assert_eq!(given, ["fd00::1", "fd00::2", "fd00::3"].map(ip));
    for bad in ["ff02::1", "::", "fd00::"] {
        request.define[0].gateway = Some(ip(bad));
        let refused = world.assign(&request).await;
        assert!(matches!(refused, Err(Error::Bridge(BridgeError::BadGateway { .. }))), "{bad} {refused:?}");
    }
    // A network that names its pool, and a network with two pools, can have a gateway outside the subnet.
    let mut named = AssignRequest::new(attachment("a", "d1"), RequestedAddresses::any(0, 1));
    world.add_pool("six", "fd06::/64").await;
    named.v6_pools = vec!["six".into()];
    named.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::At(ip("fe80::9")) });
    assert_eq!(world.assign(&named).await.unwrap()[0].gateway, Some(ip("fe80::9")));
    let mut two = defining("a", "d2", &["fd07::/64", "fd08::/64"]);
    two.define[0].gateway = Some(ip("fe80::7"));
    two.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::At(ip("fe80::8")) });
    let gateways: Vec<_> = world.assign(&two).await.unwrap().iter().map(|one| one.gateway).collect();
    assert_eq!(gateways, [Some(ip("fe80::7")), Some(ip("fe80::8"))]);
    world.check().await;
}

#[tokio::test]
async fn network_gateway_of_ipv4_is_refused_outside_subnet() {
    let world = World::new().await;
    let mut request = defining("a", "c1", &["10.1.0.0/24"]);
    request.define[0].gateway = Some(ip("10.9.0.1"));
    let refused = world.assign(&request).await.unwrap_err().to_string();
    let expected = "gateway 10.9.0.1 is outside of 10.1.0.0/24; name one inside, or leave it out and name it in the network's \
                    routes: {\"dst\": \"0.0.0.0/0\", \"gw\": \"10.9.0.1\"}";
    assert_eq!(refused, expected);
    assert!(!world.dump().await.iter().any(|kv| keys::parse_resource(ResourceKind::IpPool, &kv.key).is_some()));
}
