//! Tests secondary networks in a store that Margay shares with Calico.

use std::net::IpAddr;

use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, AssignedAddress, Bridge, Gateway, RequestedAddresses};
use ipam_core::model::{AssignmentMode, IpamConfig, NewPool, Owner, ReleaseRequest, keys};
use ipam_core::{BridgeError, Error};
use ipam_operator::inspect::{AddressReporting, Code, RepairResult};
use kv::StoreExt;

use crate::Operated;
use crate::world::{World, attachment, ip, soon};

const BLOCKS: [&str; 4] = ["10.9.0.0/30", "10.9.0.4/30", "10.9.0.8/30", "10.9.0.12/30"];

/// A request of a container on the secondary network `macvlan` for an address from a named pool.
fn secondary(node: &str, container: &str) -> AssignRequest {
    let mut attachment = attachment(node, container);
    attachment.network = "macvlan".into();
    let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
    let of_pod = [("pod", "web"), ("namespace", "shop"), ("timestamp", "2027-01-15 08:00:00 +0000 UTC")];
    request.attributes = of_pod.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    request.v4_pools = vec!["lan".into()];
    request.bridge = Some(Bridge { v4: Gateway::Recorded, v6: Gateway::Recorded });
    request
}

/// A request of a pod on Calico's network for an address from the pool of network `macvlan`.
fn calicos(node: &str, container: &str) -> AssignRequest {
    let mut request = AssignRequest::new(attachment(node, container), RequestedAddresses::any(1, 0));
    request.v4_pools = vec!["lan".into()];
    request
}

/// Creates a test world with a pool of four blocks for secondary networks, in a store that Calico does not use yet.
async fn alone() -> World {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/26").await;
    let lan = NewPool::new("lan", "10.9.0.0/28".parse().unwrap()).with_block_size(30);
    world.add(lan.with_assignment_mode(AssignmentMode::Manual)).await;
    world
}

/// Stores Calico's `ClusterInformation`, by which Margay recognizes a store that Calico uses.
async fn enter_calico(world: &World) {
    let document = r#"{"kind":"ClusterInformation","metadata":{"name":"default"},"spec":{"clusterGUID":"x"}}"#;
    world.store.put(keys::cluster_information(), document).await.unwrap();
}

async fn beside_calico() -> World {
    let world = alone().await;
    enter_calico(&world).await;
    world
}

/// Rewrites all blocks to the form that earlier versions of Margay wrote.
async fn age(world: &World) {
    for kv in world.dump().await.iter().filter(|kv| keys::parse_block(&kv.key).is_some()) {
        let text = String::from_utf8(kv.value.as_bytes().to_vec()).unwrap();
        let old = ["node", "pod", "namespace"]
            .iter()
            .fold(text, |text, name| text.replace(&format!("margay.io/{name}"), name));
        world.store.put(kv.key.clone(), old).await.unwrap();
    }
}

async fn owner_of(world: &World, ip: IpAddr) -> String {
    for cidr in BLOCKS {
        if cidr.parse::<ipnet::IpNet>().unwrap().contains(&ip) {
            return world.block(cidr).await.unwrap().owner().map(|owner| owner.to_string()).unwrap_or_default();
        }
    }
    panic!("{ip} is in no block");
}

/// The keys of the affinities between nodes and the pool's blocks; Calico creates a route for each of these affinities.
async fn routed(world: &World) -> Vec<String> {
    let keys = world.dump().await.into_iter().map(|kv| kv.key.to_string());
    keys.filter(|key| key.starts_with("/calico/ipam/v2/host/") && key.contains("/10.9.0.")).collect()
}

async fn names_of(world: &World, given: &AssignedAddress) -> [String; 6] {
    let entry = world.ipam.attributes_of(given.ip, soon()).await.unwrap();
    let names = ["node", "pod", "namespace", "margay.io/node", "margay.io/pod", "margay.io/namespace"];
    names.map(|name| entry.get(name).unwrap_or_default().to_owned())
}

#[tokio::test]
async fn secondary_blocks_are_not_seen_by_calico_routing() {
    let world = beside_calico().await;
    let given = world.assign(&secondary("a", "c1")).await.unwrap();
    assert_eq!(owner_of(&world, given[0].ip).await, "virtual:secondary@a");
    assert!(routed(&world).await.is_empty());
    let pod = world.one("a", "p1").await.unwrap();
    assert_eq!(world.ipam.attributes_of(pod, soon()).await.unwrap().get("node"), Some("a"));
    let blocks = world.dump().await.into_iter().filter_map(|kv| keys::parse_block(&kv.key));
    let around = blocks.filter(|cidr| cidr.contains(&pod)).collect::<Vec<_>>();
    assert!(world.block(&around[0].to_string()).await.unwrap().is_owned_by(&Owner::host("a")));
    world.check().await;
    assert_eq!(world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap().findings, []);
    assert_eq!(world.ipam.borrowed(soon()).await.unwrap().addresses, [], "a node's blocks have two owners");
    // The test releases an address of node `a` as a DEL does, and removes the node.
    let released = world.ipam.release_attachment(&secondary("a", "c1").attachment, &[], soon()).await.unwrap();
    assert_eq!(released, [given[0].ip]);
    let again = world.assign(&secondary("a", "c2")).await.unwrap();
    let done = world.ipam.remove_owner(&Owner::host("a"), soon()).await.unwrap();
    assert_eq!(done.released.len(), 2, "{done:?}");
    assert_eq!(owner_of(&world, again[0].ip).await, "");
}

#[tokio::test]
async fn secondary_blocks_from_before_move_in_one_commit() {
    let world = alone().await;
    let mut old = Vec::new();
    for number in 0..5 {
        old.extend(world.assign(&secondary("a", &format!("c{number}"))).await.unwrap());
    }
    age(&world).await;
    assert_eq!(routed(&world).await.len(), 2);
    assert_eq!(names_of(&world, &old[0]).await, ["a", "web", "shop", "", "", ""]);
    let numbers: Vec<_> = seen_by_kube_controllers(&world).await;
    assert_eq!(numbers.len(), 5);
    enter_calico(&world).await;

    let before = world.store.list(kv::Range::All).await.unwrap().revision;
    let new = world.assign(&secondary("a", "new")).await.unwrap();
    assert_eq!(world.store.list(kv::Range::All).await.unwrap().revision, before.next(), "one commit");
    assert!(routed(&world).await.is_empty());
    for given in old.iter().chain(&new) {
        assert_eq!(owner_of(&world, given.ip).await, "virtual:secondary@a");
        assert_eq!(names_of(&world, given).await, ["", "", "", "a", "web", "shop"]);
    }
    world.check().await;
    // The release requests were made before the block got a secondary owner, like stale requests of Calico's
    // kube-controllers.
    for request in numbers {
        let refused = world.ipam.release_ips(&[request], soon()).await;
        assert!(matches!(refused, Err(Error::ReleaseConflict(_))), "{refused:?}");
    }
    assert_eq!(
        world.ipam.release_attachment(&secondary("a", "c0").attachment, &[], soon()).await.unwrap(),
        [old[0].ip]
    );
}

/// Returns the allocations that Calico's kube-controllers would release: those with Calico's attribute name for a pod.
async fn seen_by_kube_controllers(world: &World) -> Vec<ReleaseRequest> {
    let mut seen = Vec::new();
    for cidr in BLOCKS {
        let Some(block) = world.block(cidr).await else { continue };
        for (address, entry) in block.allocated().filter(|(_, entry)| entry.get("pod").is_some()) {
            let mut request = ReleaseRequest::new(address);
            request.handle = entry.handle().map(str::to_owned);
            request.sequence_number = Some(block.sequence_number_of(address));
            seen.push(request);
        }
    }
    seen
}

#[tokio::test]
async fn secondary_network_claims_anew_when_block_has_calico_pods() {
    let world = alone().await;
    let first = world.assign(&secondary("a", "c1")).await.unwrap();
    let pod = world.assign(&calicos("a", "p1")).await.unwrap();
    assert_eq!(first[0].block, pod[0].block);
    age(&world).await;
    enter_calico(&world).await;
    let second = world.assign(&secondary("a", "c2")).await.unwrap();
    assert_ne!(second[0].block, first[0].block);
    assert_eq!(owner_of(&world, first[0].ip).await, "host:a");
    assert_eq!(owner_of(&world, second[0].ip).await, "virtual:secondary@a");
    let ends = [ip("10.9.0.0"), ip("10.9.0.15")];
    let shared = world.block(&first[0].block.to_string()).await.unwrap();
    let free = shared.free_addresses().find(|ip| !ends.contains(ip));
    let mut specific = secondary("a", "c3");
    specific.wanted = RequestedAddresses::these([free.unwrap()]);
    let refused = world.assign(&specific).await.unwrap_err();
    assert!(matches!(refused, Error::Bridge(BridgeError::CalicosBlock { .. })), "{refused}");

    let found = world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap();
    let reported: Vec<_> = found.findings.iter().map(|one| (one.code, one.mendable)).collect();
    assert_eq!(reported, [(Code::CalicosNames, true), (Code::MixedBlock, false)], "{:#?}", found.findings);
    assert_eq!(world.operator().mend(&found.findings[0], found.revision, soon()).await.unwrap(), RepairResult::Done);
    assert_eq!(names_of(&world, &first[0]).await, ["", "", "", "a", "web", "shop"]);
    assert_eq!(names_of(&world, &pod[0]).await, ["a", "", "", "", "", ""]);
    // Containers on a secondary network get no address from a block in which Calico's pod has an address, even when all
    // other blocks are full.
    let mut given = 1;
    while world.assign(&secondary("a", &format!("more{given}"))).await.is_ok() {
        given += 1;
    }
    let last = world.assign(&secondary("a", "last")).await.unwrap_err();
    assert!(matches!(&last, Error::Exhausted { .. }), "{last}");
    assert_eq!(world.block(&first[0].block.to_string()).await.unwrap().allocated().count(), 2);
    // After Calico's pod has ended, the next assignment from the block makes the node's secondary owner the block's
    // owner.
    world.release("a", "p1").await;
    world.assign(&secondary("a", "last")).await.unwrap();
    assert!(routed(&world).await.is_empty());
    world.check().await;
}

#[tokio::test]
async fn secondary_network_is_refused_when_pool_is_calico() {
    let world = beside_calico().await;
    for pools in [vec!["main".to_owned()], Vec::new()] {
        let mut request = secondary("a", "c1");
        request.v4_pools = pools;
        let refused = world.assign(&request).await.unwrap_err();
        assert!(matches!(&refused, Error::Bridge(BridgeError::CalicosPool { pool }) if pool == "main"), "{refused}");
        for command in ["margay pool create NAME CIDR --manual", "margay get ippool main -o yaml"] {
            assert!(refused.to_string().contains(command), "{refused}");
        }
    }
    let mut specific = secondary("a", "c1");
    specific.wanted = RequestedAddresses::these([ip("10.0.0.9")]);
    specific.v4_pools = Vec::new();
    let refused = world.assign(&specific).await.unwrap_err();
    assert!(matches!(refused, Error::Bridge(BridgeError::CalicosPool { .. })), "{refused}");
    let alone = alone().await;
    let mut request = secondary("a", "c1");
    request.v4_pools = vec!["main".into()];
    alone.assign(&request).await.unwrap();
}

#[tokio::test]
async fn secondary_blocks_count_towards_limit() {
    let world = beside_calico().await;
    world.configure(IpamConfig::default().with_max_blocks_per_host(1).with_strict_affinity(true)).await;
    world.assign(&calicos("a", "p1")).await.unwrap();
    let refused = world.assign(&secondary("a", "c1")).await;
    assert!(matches!(refused, Err(Error::BlockLimit)), "{refused:?}");
    world.assign(&secondary("b", "c1")).await.unwrap();
    let refused = world.assign(&calicos("b", "p2")).await;
    assert!(matches!(refused, Err(Error::BlockLimit)), "{refused:?}");
}

#[tokio::test]
async fn secondary_blocks_are_borrowed_only_by_nodes() {
    let world = beside_calico().await;
    for number in 0..8 {
        world.assign(&secondary("a", &format!("c{number}"))).await.unwrap();
    }
    let mut given = 0;
    while world.assign(&secondary("b", &format!("d{given}"))).await.is_ok() {
        given += 1;
    }
    assert_eq!(8 + given, 14, "all but the ends");
    world.ipam.release_attachment(&secondary("a", "c3").attachment, &[], soon()).await.unwrap();
    let refused = world.assign(&calicos("c", "p1")).await;
    assert!(matches!(refused, Err(Error::Exhausted { .. })), "{refused:?}");
    let borrowed = world.assign(&secondary("c", "e1")).await.unwrap();
    assert_eq!(owner_of(&world, borrowed[0].ip).await, "virtual:secondary@a");
    let reported = world.ipam.borrowed(soon()).await.unwrap().addresses;
    assert!(
        reported.iter().any(|one| one.ip == borrowed[0].ip && one.block_owner == "a" && one.kind == "pod"),
        "{reported:?}"
    );
    world.check().await;
}

#[tokio::test]
async fn secondary_blocks_are_found_by_check_and_moved_by_repair() {
    let world = alone().await;
    let old = world.assign(&secondary("b", "c1")).await.unwrap();
    age(&world).await;
    enter_calico(&world).await;
    let unknown = world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap();
    let reported: Vec<_> = unknown.findings.iter().map(|one| (one.code, one.mendable)).collect();
    assert_eq!(reported, [(Code::SecondaryOfNode, false)], "it is not known yet that macvlan is not Calico's");
    world.assign(&secondary("a", "c2")).await.unwrap();
    let found = world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap();
    let reported: Vec<_> = found.findings.iter().map(|one| (one.code, one.mendable)).collect();
    assert_eq!(reported, [(Code::CalicosNames, true), (Code::SecondaryOfNode, true)], "{:#?}", found.findings);
    assert_eq!(world.operator().mend(&found.findings[1], found.revision, soon()).await.unwrap(), RepairResult::Done);
    assert_eq!(world.operator().mend(&found.findings[0], found.revision, soon()).await.unwrap(), RepairResult::Changed);
    assert_eq!(world.operator().inspect(AddressReporting::Findings, soon()).await.unwrap().findings, []);
    assert_eq!(owner_of(&world, old[0].ip).await, "virtual:secondary@b");
    assert_eq!(names_of(&world, &old[0]).await, ["", "", "", "b", "web", "shop"]);
    assert!(routed(&world).await.is_empty());
    world.check().await;
}

#[tokio::test]
async fn secondary_networks_follow_what_is_done_for_node() {
    let world = beside_calico().await;
    let given = world.assign(&secondary("a", "c1")).await.unwrap();
    let (block, node) = (given[0].block, keys::resource(keys::ResourceKind::Node, "a"));
    let done = world.ipam.release_node_affinities("a", ReleaseIf::Empty, soon()).await.unwrap();
    assert_eq!((done.released, done.in_use), (vec![], vec![block]));
    world.store.delete(kv::Range::Key(node)).await.unwrap();
    assert!(
        world
            .operator()
            .inspect(AddressReporting::Findings, soon())
            .await
            .unwrap()
            .findings
            .iter()
            .any(|one| one.code == Code::OwnerGone)
    );
    let estates = world.ipam.departed_nodes(|known, name| !known.registered.contains(name), soon()).await.unwrap();
    let estate = &estates.departed["a"];
    assert_eq!(estate.blocks().collect::<Vec<_>>(), [block]);
    let over = world.ipam.hand_over("a", "b", &[block], soon()).await.unwrap();
    assert_eq!((over.blocks, over.addresses), (vec![block], vec![given[0].ip]));
    assert_eq!(owner_of(&world, given[0].ip).await, "virtual:secondary@b");
    assert_eq!(world.ipam.attributes_of(given[0].ip, soon()).await.unwrap().node(), Some("b"));
    world.check().await;
    world.store.delete(kv::Range::Key(keys::resource(keys::ResourceKind::Node, "b"))).await.unwrap();
    assert!(world.ipam.give_up_block("b", block, soon()).await.unwrap());
    assert!(!world.ipam.give_up_block("b", block, soon()).await.unwrap());
    assert_eq!(owner_of(&world, given[0].ip).await, "");
}
