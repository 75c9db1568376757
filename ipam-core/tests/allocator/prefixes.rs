//! Tests assignments from pools of prefixes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, AssignedAddress, Bridge, Gateway, HandleRequest, RequestedAddresses};
use ipam_core::gc::{Evidence, judge};
use ipam_core::model::{
    AssignmentMode, Block, Document, IpamConfig, NewPool, Owner, Pool, PoolUse, ReleaseRequest, keys,
    node_prefix_handle,
};
use ipam_core::net::Family;
use ipam_core::sticky::Sticky;
use ipam_core::{BridgeError, Error, ErrorSubject, Holding, Result, Standing};
use ipnet::IpNet;
use kv::{Range, StoreExt};

use crate::concurrent::{every_revision_is_consistent, faulty};
use crate::hints::{Memory, counted};
use crate::world::{World, attachment, held, ip, soon};

/// A test world with a pool of /64 prefixes.
async fn world(cidr: &str) -> World {
    let world = World::new().await;
    world.add(NewPool::new("p", cidr.parse().unwrap()).with_prefix_length(64)).await;
    world
}

fn request(node: &str, container: &str) -> AssignRequest {
    let mut request = AssignRequest::new(attachment(node, container), RequestedAddresses::any(0, 1));
    request.v6_pools = vec!["p".to_owned()];
    request
}

fn net(assigned: &AssignedAddress) -> IpNet {
    IpNet::new(assigned.ip, assigned.prefix_length.unwrap()).unwrap()
}

async fn prefix(world: &World, node: &str, container: &str) -> Result<IpNet> {
    let assigned = world.assign(&request(node, container)).await?;
    assert_eq!(assigned.len(), 1);
    Ok(net(&assigned[0]))
}

#[tokio::test]
async fn prefix_is_given_to_each_container() {
    let world = world("2001:db8::/48").await;
    let first = prefix(&world, "a", "c1").await.unwrap();
    assert_eq!((first.prefix_len(), first), (64, first.trunc()));
    assert_eq!(prefix(&world, "a", "c1").await.unwrap(), first, "repeated");
    let mut all = BTreeSet::from([first]);
    for number in 2..70 {
        let next = prefix(&world, ["a", "b"][number % 2], &format!("c{number}")).await.unwrap();
        assert!("2001:db8::/48".parse::<IpNet>().unwrap().contains(&next));
        assert!(all.insert(next), "{next} twice");
    }
    world.check().await;
    assert_eq!(held(&world.ipam, &attachment("a", "c1")).await, [first.addr()]);
    assert_eq!(world.release("a", "c1").await, [first.addr()]);
    assert!(held(&world.ipam, &attachment("a", "c1")).await.is_empty());
    world.check().await;
}

#[tokio::test]
async fn prefix_is_named_by_any_address_inside() {
    let world = world("2001:db8::/48").await;
    let mut wanted = request("a", "c1");
    wanted.wanted = RequestedAddresses::these([ip("2001:db8:0:7::1")]);
    let assigned = world.assign(&wanted).await.unwrap();
    assert_eq!(net(&assigned[0]), "2001:db8:0:7::/64".parse::<IpNet>().unwrap());
    assert_eq!(world.assign(&wanted).await.unwrap(), assigned, "repeated");
    wanted.attachment = attachment("b", "c2");
    wanted.wanted = RequestedAddresses::these([ip("2001:db8:0:7:ffff::")]);
    assert!(matches!(world.assign(&wanted).await.unwrap_err(), Error::AlreadyAssigned(_)));

    let inside = ip("2001:db8:0:7:1:2:3:4");
    assert!(matches!(world.ipam.holding(inside, soon()).await.unwrap(), Holding::Held(_)));
    assert_eq!(world.ipam.holding(ip("2001:db8:0:8::1"), soon()).await.unwrap(), Holding::Free);
    let compared = world.ipam.compare(&attachment("a", "c1"), &[], &[inside], soon()).await.unwrap();
    assert_eq!(compared.standings, [(inside, Standing::Own)]);
    let released = world.ipam.release_ips(&[ReleaseRequest::new(inside)], soon()).await.unwrap();
    assert_eq!(released.released.len(), 1);
    assert_eq!(world.ipam.holding(inside, soon()).await.unwrap(), Holding::Free);
    world.check().await;
}

#[tokio::test]
async fn prefix_is_refused_when_full_or_reserved_inside() {
    let world = world("2001:db8::/62").await;
    world.reserve(&["2001:db8:0:1:5::7/128"]).await;
    let mut all = BTreeSet::new();
    for number in 0..3 {
        all.insert(prefix(&world, "a", &format!("c{number}")).await.unwrap());
    }
    let expected = ["2001:db8::/64", "2001:db8:0:2::/64", "2001:db8:0:3::/64"].map(|text| text.parse().unwrap());
    assert_eq!(all, BTreeSet::from(expected));
    assert!(matches!(prefix(&world, "a", "c3").await.unwrap_err(), Error::Exhausted { .. }));
    let usage = world.ipam.utilization(soon()).await.unwrap().pools[0].usage;
    let shown = [usage.capacity, usage.in_use, usage.reserved, usage.available].map(|count| count.to_string());
    assert_eq!(shown, ["4", "3", "1", "0"]);
    world.release("a", "c1").await;
    prefix(&world, "b", "c3").await.unwrap();
    world.check().await;
}

#[tokio::test]
async fn prefix_and_address_come_and_go_in_one_commit() {
    let world = world("2001:db8::/48").await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let mut both = request("a", "c1");
    both.wanted = RequestedAddresses::any(1, 1);
    let before = world.store.list(Range::All).await.unwrap().revision;
    let assigned = world.assign(&both).await.unwrap();
    let after = world.store.list(Range::All).await.unwrap().revision;
    assert_eq!(after.get(), before.get() + 1);
    assert_eq!(assigned.iter().map(|one| one.prefix_length).collect::<Vec<_>>(), [None, Some(64)]);
    assert_eq!(world.release("a", "c1").await.len(), 2);
    assert_eq!(world.store.list(Range::All).await.unwrap().revision.get(), after.get() + 1);
    world.check().await;
}

#[tokio::test]
async fn prefixes_of_ipv4_are_apart_from_addresses() {
    let world = World::new().await;
    world.add(NewPool::new("p", "10.64.0.0/16".parse().unwrap()).with_prefix_length(28)).await;
    world.add_pool("v4", "10.0.0.0/24").await;
    let mut request = request("a", "c1");
    (request.wanted, request.v4_pools, request.v6_pools) =
        (RequestedAddresses::any(1, 0), vec!["p".into()], Vec::new());
    let assigned = world.assign(&request).await.unwrap();
    let given = net(&assigned[0]);
    assert_eq!((given.prefix_len(), assigned[0].block.prefix_len()), (28, 19));
    let other = IpNet::from(world.one("a", "c2").await.unwrap());
    let addresses: IpNet = "10.0.0.0/24".parse().unwrap();
    assert!(addresses.contains(&other), "no pool of prefixes is chosen without its name: {other}");
    world.check().await;
}

#[tokio::test]
async fn prefix_blocks_are_not_seen_by_calico() {
    let world = world("2001:db8::/48").await;
    prefix(&world, "a", "c1").await.unwrap();
    let keys: Vec<String> = world.dump().await.iter().map(|kv| kv.key.to_string()).collect();
    assert!(keys.iter().any(|key| key.contains("/assignment/ipv6/prefixes/")), "{keys:?}");
    assert!(!keys.iter().any(|key| key.contains("/assignment/ipv6/block/")), "{keys:?}");

    world.store.put(keys::cluster_information(), "{}").await.unwrap();
    let refused = prefix(&world, "a", "c2").await.unwrap_err();
    assert!(matches!(refused, Error::PrefixesBesideCalico(_)), "{refused}");
    let mut bridged = request("a", "c3");
    bridged.bridge = Some(Bridge::default());
    let assigned = world.assign(&bridged).await.unwrap();
    let block = world.block(&assigned[0].block.to_string()).await.unwrap();
    assert_eq!(block.owner(), Some(Owner::secondary("a")), "the block is a secondary one, which Calico does not use");
    bridged.bridge = Some(Bridge { v4: Gateway::First, v6: Gateway::First });
    bridged.attachment = attachment("a", "c4");
    let refused = world.assign(&bridged).await.unwrap_err();
    assert!(matches!(refused, Error::Bridge(BridgeError::NoGateway { .. })), "{refused}");
}

#[tokio::test]
async fn prefix_outlives_its_pool_and_is_found() {
    let world = world("2001:db8::/48").await;
    let given = prefix(&world, "a", "c1").await.unwrap();
    world.store.delete(Range::Key(keys::resource(keys::ResourceKind::IpPool, "p"))).await.unwrap();
    let IpNet::V6(net) = given else { panic!("{given}") };
    let inside = net.broadcast().into();
    assert!(matches!(world.ipam.holding(inside, soon()).await.unwrap(), Holding::Held(_)));
    let released = world.ipam.release_ips(&[ReleaseRequest::new(inside)], soon()).await.unwrap();
    assert_eq!(released.released.len(), 1);
    assert!(world.ipam.release_by_handle("net.c1", soon()).await.is_err());
    let error = world.ipam.addresses_of_handle("net.c1", soon()).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { kind: ErrorSubject::Handle, .. }), "{error}");
}

#[tokio::test]
async fn prefix_stays_with_workload() {
    let world = world("2001:db8::/60").await;
    let sticky = |container: &str| {
        let mut request = request("a", container);
        request.sticky = Some(Sticky { name: "shop/router-0".into(), wait: Some(Duration::from_secs(60)) });
        request
    };
    let first = world.assign(&sticky("c1")).await.unwrap();
    world.release("a", "c1").await;
    prefix(&world, "a", "other").await.unwrap();
    assert_eq!(world.assign(&sticky("c2")).await.unwrap(), first);
    world.check().await;
}

#[tokio::test]
async fn prefix_takes_two_requests_when_steady() {
    let world = world("2001:db8::/48").await;
    let hints = Arc::new(Memory::default());
    let (ipam, store) = counted(&world, &hints);
    ipam.assign(&request("a", "c1"), soon()).await.unwrap();
    store.take();
    ipam.assign(&request("a", "c2"), soon()).await.unwrap();
    assert_eq!(store.take().round_trips(), 2);
    ipam.release_attachment(&attachment("a", "c2"), &[], soon()).await.unwrap();
    assert_eq!(store.take().round_trips(), 2);
}

#[tokio::test]
async fn prefix_is_refused_when_block_is_damaged() {
    let world = world("2001:db8::/58").await;
    prefix(&world, "a", "c1").await.unwrap();
    let key = keys::block("2001:db8::/58".parse().unwrap());
    let stored = world.value(&key).await;
    let mut json: serde_json::Value = serde_json::from_slice(stored.as_bytes()).unwrap();
    json["allocations"].as_array_mut().unwrap().pop();
    let text = json.to_string();
    assert!(Block::decode(&key, text.as_bytes()).unwrap_err().to_string().contains("63 prefixes"));
    world.store.put(key, text).await.unwrap();
    assert!(prefix(&world, "a", "c2").await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn prefix_is_given_once_with_many_callers_and_faults() {
    let quiet = world("2001:db8::/60").await;
    let start = quiet.store.list(Range::All).await.unwrap();
    let world = faulty(&quiet);
    let tasks = (0..12).map(|caller| {
        let world = world.clone();
        tokio::spawn(async move {
            let node = ["a", "b", "c"][caller % 3];
            for round in 0..15 {
                let container = format!("c{caller}-{round}");
                let given = prefix(&world, node, &container).await.unwrap();
                assert_eq!(held(&world.ipam, &attachment(node, &container)).await, [given.addr()]);
                world.release(node, &container).await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let end = every_revision_is_consistent(&quiet, start).await;
    assert!(end.iter().all(|kv| keys::parse_handle(&kv.key).is_none()), "a handle is left");
}

/// In this test, the container's interface uses an address of its prefix that differs from the recorded one.
#[tokio::test]
async fn prefix_on_interface_is_not_collected() {
    let world = world("2001:db8::/48").await;
    let given = prefix(&world, "a", "c1").await.unwrap();
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let judged = |live: IpAddr| {
        let evidence = Evidence {
            boot: "boot0002".into(),
            up: Duration::from_secs(60),
            live: [live].into(),
            namespaces: Some(BTreeSet::new()),
            within: None,
        };
        let judged = judge(&holdings, &evidence, None);
        (judged.live.len(), judged.earlier.len())
    };
    assert_eq!(judged(ip(&format!("{}1", given.addr()))), (1, 0));
    assert_eq!(judged(ip("2001:db9::1")), (0, 1));
}

#[tokio::test]
async fn prefix_cooldown_covers_any_address_inside() {
    let world = world("2001:db8::/48").await;
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    let given = prefix(&world, "a", "c1").await.unwrap();
    world.release("a", "c1").await;
    let inside = ip(&format!("{}5", given.addr()));
    assert!(matches!(world.ipam.holding(inside, soon()).await.unwrap(), Holding::InCooldown(_)));
    assert!(matches!(world.ipam.attributes_of(inside, soon()).await.unwrap_err(), Error::CoolingDown(_)));
}

#[tokio::test]
async fn prefix_release_by_address_inside_forgets_workload() {
    let world = world("2001:db8::/48").await;
    let mut request = request("a", "c1");
    request.sticky = Some(Sticky { name: "w".into(), wait: None });
    let given = net(&world.assign(&request).await.unwrap()[0]);
    let inside = ["5", "6"].map(|end| ReleaseRequest::new(ip(&format!("{}{end}", given.addr()))));
    let done = world.ipam.release_ips(&inside, soon()).await.unwrap();
    assert_eq!(done.released, [given.addr()]);
    assert!(world.store.get(keys::sticky("w")).await.unwrap().is_none());
    world.check().await;
}

/// The command `calicoctl replace` deletes a pool's annotations that the given file does not contain.
#[tokio::test]
async fn prefix_pool_without_annotation_assigns_nothing() {
    for mode in [AssignmentMode::Manual, AssignmentMode::Automatic] {
        refuses_without_its_annotation(mode).await;
    }
}

async fn refuses_without_its_annotation(mode: AssignmentMode) {
    let world = world("2001:db8::/48").await;
    let given = prefix(&world, "a", "c1").await.unwrap();
    let plain = NewPool::new("p", "2001:db8::/48".parse().unwrap()).with_assignment_mode(mode);
    let plain = Pool::new(&plain, "u", world.ipam.now()).unwrap();
    world.put(keys::resource(keys::ResourceKind::IpPool, "p"), &plain).await;
    let inside = ip(&format!("{}5", given.addr()));
    let mut wanted = request("a", "c2");
    wanted.wanted = RequestedAddresses::these([inside]);
    for request in [request("a", "c2"), wanted] {
        let refused = world.assign(&request).await.unwrap_err().to_string();
        assert!(
            refused.contains("pool p has addresses now") && refused.contains("margay.io/prefix-length"),
            "{refused}"
        );
    }
    assert!(matches!(world.ipam.holding(inside, soon()).await.unwrap(), Holding::Held(_)));
    let compared = world.ipam.compare(&attachment("a", "c1"), &[], &[inside], soon()).await.unwrap();
    assert_eq!(compared.standings, [(inside, Standing::Own)], "a failing CHECK would end the container");
    assert_eq!(world.release("a", "c1").await, [given.addr()]);
}

/// In this test, another program has recreated a pool with another prefix length, but with blocks of equal size.
#[tokio::test]
async fn prefix_block_of_other_length_is_left_alone() {
    let world = world("2001:db8::/60").await;
    prefix(&world, "a", "c1").await.unwrap();
    let other = NewPool::new("p", "2001:db8::/60".parse().unwrap()).with_prefix_length(62);
    let other = Pool::new(&other, "u", world.ipam.now()).unwrap();
    world.put(keys::resource(keys::ResourceKind::IpPool, "p"), &other).await;
    for container in ["c1", "c2"] {
        let mut request = request("a", container);
        assert!(world.assign(&request).await.is_err(), "{container}");
        request.wanted = RequestedAddresses::these([ip("2001:db8:0:4::1")]);
        let refused = world.assign(&request).await.unwrap_err().to_string();
        assert!(refused.contains("networks of /62") && refused.contains("some of /64"), "{refused}");
    }
    world.check().await;
}

#[tokio::test]
async fn prefix_of_node_goes_to_its_heir() {
    let world = world("2001:db8::/48").await;
    let handle = |node: &str| node_prefix_handle("p", node);
    let request = HandleRequest::new(handle("gone"), Owner::secondary("gone"), RequestedAddresses::any(0, 1))
        .with_pools(Family::V6, ["p"])
        .with_usage(PoolUse::Workload)
        .with_attributes([("margay.io/node".to_owned(), "gone".to_owned())].into());
    let given = world.ipam.assign_to_handle(&request, soon()).await.unwrap();
    let done = world.ipam.hand_over("gone", "b", &[given[0].block], soon()).await.unwrap();
    assert_eq!(done.handles, [(handle("gone"), handle("b"))]);
    assert_eq!(world.ipam.addresses_of_handle(&handle("b"), soon()).await.unwrap(), [given[0].ip]);
    world.check().await;
}
