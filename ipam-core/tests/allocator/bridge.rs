//! Tests bridged networks, and pools that a network configuration defines.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipam_core::assign::{AssignRequest, Bridge, Gateway, PoolDefinition, RequestedAddresses};
use ipam_core::model::NewPool;
use ipam_core::{BridgeError, Error, Ipam, Nodes};
use kv::StoreExt;

use crate::world::{World, attachment, ip, soon};

fn bridged(container: &str, gateway: Gateway) -> AssignRequest {
    let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0));
    request.bridge = Some(Bridge { v4: gateway, v6: gateway });
    request
}

async fn world(cidr: &str) -> World {
    let world = World::new().await;
    world.add_pool("lab", cidr).await;
    world
}

#[tokio::test]
async fn bridge_reserves_ends_and_gateway_on_first_use() {
    let world = world("10.0.0.0/29").await;
    let assigned = world.assign(&bridged("c0", Gateway::First)).await.unwrap();
    assert_eq!(assigned[0].gateway, Some(ip("10.0.0.1")));
    let mut given: BTreeSet<_> = [assigned[0].ip].into();
    // On node `b`, containers of a routed network get addresses from the pool of the bridged network.
    for number in 1..5 {
        given.insert(world.one("b", &format!("c{number}")).await.unwrap());
    }
    let expected: BTreeSet<_> = (2..7).map(|last| ip(&format!("10.0.0.{last}"))).collect();
    assert_eq!(given, expected);
    assert!(world.one("b", "c9").await.is_err());
    world.check().await;
}

#[tokio::test]
async fn bridge_keeps_recorded_gateway() {
    let world = World::new().await;
    let new = NewPool::new("lab", "10.0.0.0/24".parse().unwrap());
    world.ipam.create_pool(&new, Some(ip("10.0.0.254")), soon()).await.unwrap();
    for wish in [Gateway::First, Gateway::Recorded, Gateway::At(ip("10.0.0.254"))] {
        let assigned = world.assign(&bridged("c0", wish)).await.unwrap();
        assert_eq!(assigned[0].gateway, Some(ip("10.0.0.254")));
    }
    let other = world.assign(&bridged("c1", Gateway::At(ip("10.0.0.7")))).await;
    assert!(matches!(other, Err(Error::Bridge(BridgeError::OtherGateway { .. }))));
}

#[tokio::test]
async fn bridge_reserves_only_ends_without_gateway() {
    let world = world("10.0.0.0/30").await;
    let mut given = BTreeSet::new();
    for number in 0..2 {
        let assigned = world.assign(&bridged(&format!("c{number}"), Gateway::Recorded)).await.unwrap();
        assert_eq!(assigned[0].gateway, None);
        given.insert(assigned[0].ip);
    }
    assert_eq!(given, [ip("10.0.0.1"), ip("10.0.0.2")].into());
    let late = world.assign(&bridged("c2", Gateway::First)).await;
    assert!(matches!(late, Err(Error::Bridge(BridgeError::GatewayInUse { .. }))), "{late:?}");
}

#[tokio::test]
async fn bridge_point_to_point_has_gateway_only() {
    let world = World::new().await;
    world.add(NewPool::new("p2p", "10.0.0.0/31".parse().unwrap()).with_block_size(31)).await;
    let assigned = world.assign(&bridged("c0", Gateway::First)).await.unwrap();
    assert_eq!((assigned[0].ip, assigned[0].gateway), (ip("10.0.0.1"), Some(ip("10.0.0.0"))));
    let world = World::new().await;
    world.add(NewPool::new("one", "10.0.0.0/32".parse().unwrap()).with_block_size(32)).await;
    let refused = world.assign(&bridged("c0", Gateway::First)).await;
    assert!(matches!(refused, Err(Error::Bridge(BridgeError::PoolTooSmall { .. }))));
}

#[tokio::test]
async fn bridge_takes_one_pool_of_each_family() {
    let world = world("10.0.0.0/24").await;
    world.add_pool("other", "10.1.0.0/24").await;
    let error = world.assign(&bridged("c0", Gateway::First)).await.unwrap_err();
    assert!(error.to_string().contains("lab, other"), "{error}");
    let mut named = bridged("c0", Gateway::First);
    named.v4_pools = vec!["other".into()];
    assert_eq!(world.assign(&named).await.unwrap()[0].gateway, Some(ip("10.1.0.1")));
}

#[tokio::test]
async fn bridge_keeps_given_addresses_off_reserved_ones() {
    let world = world("10.0.0.0/24").await;
    for reserved in ["10.0.0.0", "10.0.0.1", "10.0.0.255"] {
        let mut request = bridged("c0", Gateway::First);
        request.wanted = RequestedAddresses::these([ip(reserved)]);
        assert!(matches!(world.assign(&request).await, Err(Error::Reserved(_))), "{reserved}");
    }
    let mut request = bridged("c0", Gateway::First);
    request.wanted = RequestedAddresses::these([ip("10.0.0.9")]);
    assert_eq!(world.assign(&request).await.unwrap()[0].gateway, Some(ip("10.0.0.1")));
    assert_eq!(world.assign(&request).await.unwrap()[0].ip, ip("10.0.0.9"));
    world.check().await;
}

fn defined(container: &str, cidr: &str, ranges: &[(&str, &str)]) -> AssignRequest {
    let mut request = bridged(container, Gateway::First);
    let ranges = ranges.iter().map(|(first, last)| (ip(first), ip(last))).collect();
    request.define = vec![PoolDefinition {
        name: "net".into(),
        cidr: cidr.parse().unwrap(),
        ranges,
        set: 0,
        free_of: None,
        gateway: None,
    }];
    request
}

#[tokio::test]
async fn bridge_configuration_makes_pool_and_keeps_to_ranges() {
    let world = World::new().await;
    let ranges = [("10.9.0.10", "10.9.0.12")];
    let mut given = BTreeSet::new();
    for number in 0..3 {
        let assigned = world.assign(&defined(&format!("c{number}"), "10.9.0.0/24", &ranges)).await.unwrap();
        assert_eq!(assigned[0].pool.to_string(), "10.9.0.0/24");
        assert_eq!(assigned[0].gateway, Some(ip("10.9.0.1")));
        given.insert(assigned[0].ip);
    }
    assert_eq!(given, (10..13).map(|last| ip(&format!("10.9.0.{last}"))).collect());
    assert!(world.assign(&defined("c3", "10.9.0.0/24", &ranges)).await.is_err());
    // A wider address range in the network configuration takes effect with the next assignment.
    let wider = [("10.9.0.10", "10.9.0.13")];
    assert_eq!(world.assign(&defined("c3", "10.9.0.0/24", &wider)).await.unwrap()[0].ip, ip("10.9.0.13"));
    let mut outside = defined("c4", "10.9.0.0/24", &wider);
    outside.wanted = RequestedAddresses::these([ip("10.9.0.99")]);
    assert!(matches!(world.assign(&outside).await, Err(Error::Reserved(_))));
    world.check().await;
}

/// In this test, the configurations of two networks define the same subnet, each with its own range of addresses.
#[tokio::test]
async fn bridge_networks_in_one_subnet_keep_to_their_ranges() {
    let world = World::new().await;
    let of = |network: &str, container: &str, first: &str, last: &str| {
        let mut request = defined(container, "10.9.0.0/24", &[(first, last)]);
        request.attachment.network = network.into();
        request.define[0].name = network.into();
        request
    };
    let one = |container: &str| of("one", container, "10.9.0.10", "10.9.0.12");
    let two = |container: &str| of("two", container, "10.9.0.30", "10.9.0.32");
    let mut given = BTreeSet::new();
    for request in [one("a0"), two("b0"), one("a1"), two("b1")] {
        given.insert(world.assign(&request).await.unwrap()[0].ip);
    }
    let reservation = "/calico/resources/v3/projectcalico.org/ipreservations/margay-range-one";
    let written = world.store.get(reservation).await.unwrap().unwrap().mod_revision;
    for request in [one("a2"), two("b2")] {
        given.insert(world.assign(&request).await.unwrap()[0].ip);
    }
    assert_eq!(world.store.get(reservation).await.unwrap().unwrap().mod_revision, written, "nothing changed");
    let expected = [10, 11, 12, 30, 31, 32].map(|last| ip(&format!("10.9.0.{last}")));
    assert_eq!(given, expected.into());
    for full in [one("a3"), two("b3")] {
        assert!(world.assign(&full).await.is_err(), "the other network's range is not its own");
    }
    let mut foreign = one("a4");
    world.ipam.release_attachment(&two("b0").attachment, &[], soon()).await.unwrap();
    foreign.wanted = RequestedAddresses::these([ip("10.9.0.30")]);
    assert!(matches!(world.assign(&foreign).await, Err(Error::Reserved(_))));
    // The requests of both networks are served in one commit.
    world.ipam.release_attachment(&one("a0").attachment, &[], soon()).await.unwrap();
    let together = world.ipam.assign_together(&[one("a5"), two("b5")], soon()).await.unwrap();
    let answers: Vec<_> = together.iter().map(|answer| answer[0].ip).collect();
    assert!(answers[0] < ip("10.9.0.30") && answers[1] >= ip("10.9.0.30"), "{answers:?}");
    world.check().await;
}

#[tokio::test]
async fn bridge_configured_pool_is_not_used_by_others() {
    let world = world("10.0.0.0/24").await;
    world.assign(&defined("c0", "10.9.0.0/24", &[])).await.unwrap();
    let other = world.assign(&bridged("c1", Gateway::First)).await.unwrap();
    assert_eq!(other[0].pool.to_string(), "10.0.0.0/24");
    assert!(world.one("b", "c2").await.unwrap().to_string().starts_with("10.0."));
}

#[tokio::test]
async fn bridge_configuration_is_refused_when_store_contradicts() {
    let world = World::new().await;
    world.assign(&defined("c0", "10.9.0.0/24", &[])).await.unwrap();
    let mut overlapping = defined("c1", "10.9.0.0/16", &[]);
    overlapping.define[0].name = "wide".into();
    assert!(matches!(world.assign(&overlapping).await, Err(Error::Bridge(BridgeError::BadRanges(_)))));
}

/// Calico's kube-controllers releases an address that has Calico's attribute names if the pod's status does not contain
/// the address.
#[tokio::test]
async fn bridge_network_records_no_calico_names_of_node_and_pod() {
    let world = world("10.0.0.0/24").await;
    let of_pod = [("pod", "web"), ("namespace", "shop")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    let mut own = bridged("c0", Gateway::First);
    own.attributes = of_pod.clone().into();
    let mut routed = AssignRequest::new(attachment("b", "c1"), RequestedAddresses::any(1, 0));
    routed.attributes = of_pod.into();
    let names = async |request: &AssignRequest| {
        let ip = world.assign(request).await.unwrap()[0].ip;
        let names = ["node", "pod", "namespace", "margay.io/node", "margay.io/pod", "margay.io/namespace"];
        let entry = world.ipam.attributes_of(ip, soon()).await.unwrap();
        names.map(|name| entry.get(name).unwrap_or_default().to_owned())
    };
    assert_eq!(names(&own).await, ["", "", "", "a", "web", "shop"]);
    assert_eq!(names(&routed).await, ["b", "web", "shop", "", "", ""]);
    let again = world.assign(&own).await.unwrap();
    assert!(world.release("b", "c0").await.is_empty(), "the node is read under our name, too");
    assert_eq!(world.release("a", "c0").await, [again[0].ip]);
    world.check().await;
}

#[tokio::test]
async fn bridge_pools_each_have_unique_id() {
    let world = World::new().await;
    let ipam = Ipam::new(Arc::clone(&world.store), Nodes::Registered);
    let mut ids = BTreeSet::new();
    for number in 0..3 {
        let new = NewPool::new(format!("p{number}"), format!("10.0.{number}.0/24").parse().unwrap());
        ids.insert(ipam.create_pool(&new, None, soon()).await.unwrap().resource().uid().to_owned());
    }
    assert!(ids.len() == 3 && ids.iter().all(|id| id.len() == 36), "{ids:?}");
}

/// In this test the store has 70 pools, which are too many for a commit to guard one by one. Without a guard for all
/// pools together, two networks could each create a pool for the same subnet.
#[tokio::test]
async fn bridge_networks_make_pools_in_turn_when_many_exist() {
    let world = World::new().await;
    for number in 0..70 {
        world.add_pool(&format!("p{number}"), &format!("10.{}.0.0/24", number + 100)).await;
    }
    let lock = async || world.store.get("/margay/v1/pools").await.unwrap().map(|kv| kv.mod_revision);
    let before = lock().await;
    let define = async |container: &str, name: &str, cidr: &str| {
        let mut request = bridged(container, Gateway::First);
        let (name, cidr) = (name.to_owned(), cidr.parse().unwrap());
        request.define = vec![PoolDefinition { name, cidr, ranges: Vec::new(), set: 0, free_of: None, gateway: None }];
        world.assign(&request).await.unwrap();
    };
    define("c1", "one", "10.1.0.0/24").await;
    let made = lock().await;
    assert!(made.is_some() && made > before, "{before:?}, {made:?}");
    define("c2", "other", "10.1.0.0/24").await;
    assert_eq!(lock().await, made, "the pool is there");
}
