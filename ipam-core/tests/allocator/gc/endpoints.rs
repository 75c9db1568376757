//! Tests that workload endpoints are deleted with the addresses of their containers.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::gc::{FreeResult, Hold, Holdings, batches, with_endpoints};
use ipam_core::model::{NewPool, keys};
use kv::{Range, StoreExt};
use serde_json::json;

use super::{evidence, give, one_machine};
use crate::world::{World, attachment, soon};

/// Stores a workload endpoint of a container of node `a`.
async fn store(world: &World, container: &str, interface: &str, addresses: &[IpAddr]) {
    let networks: Vec<String> = addresses.iter().map(|ip| format!("{ip}/32")).collect();
    let spec = json!({"orchestrator": "cni", "node": "a", "containerID": container, "endpoint": interface,
        "ipNetworks": networks});
    let key = keys::workload_endpoint("default", &format!("a-cni-{container}-{interface}"));
    world.store.put(key, json!({"metadata": {}, "spec": spec}).to_string()).await.unwrap();
}

async fn endpoints(world: &World) -> Vec<String> {
    let stored = world.store.list(Range::Prefix(keys::workload_endpoints_prefix())).await.unwrap();
    stored.kvs.iter().map(|kv| keys::parse_workload_endpoint(&kv.key).unwrap().1.to_owned()).collect()
}

/// Returns the [`Hold`]s that free the addresses of the given containers.
async fn going(world: &World, holdings: &Holdings, containers: &[&str], live: &[IpAddr]) -> Vec<Hold> {
    let gone: Vec<_> =
        holdings.allocations.iter().filter(|one| containers.contains(&one.container.as_str())).cloned().collect();
    let endpoints = world.ipam.node_endpoints(|node| node == "a", soon()).await.unwrap();
    with_endpoints(&gone, holdings, &endpoints, &evidence(live.iter().copied().collect()))
}

/// Returns the names of the endpoints that are deleted when the addresses of the given [`Hold`]s are freed.
fn named(holds: &[Hold]) -> BTreeSet<&str> {
    holds.iter().filter_map(|hold| hold.endpoint.as_ref()).map(|endpoint| endpoint.name.as_str()).collect()
}

async fn free(world: &World, holds: &[Hold]) -> FreeResult {
    let mut all = FreeResult::default();
    for batch in batches(holds) {
        let freed = world.ipam.free(&batch, soon()).await.unwrap();
        all.released.extend(freed.released);
        all.changed.extend(freed.changed);
        all.endpoints.extend(freed.endpoints);
    }
    all
}

#[tokio::test]
async fn endpoint_goes_in_commit_that_frees_its_address() {
    let world = one_machine().await;
    let one = give(&world, "c1", "boot0001", 0).await;
    let two = give(&world, "c2", "boot0001", 0).await;
    store(&world, "c1", "eth0", &[one]).await;
    store(&world, "c2", "eth0", &[two]).await;
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let holds = going(&world, &holdings, &["c1"], &[]).await;
    let before = super::revision(&world).await;
    let freed = free(&world, &holds).await;
    assert_eq!(
        (freed.released, freed.endpoints.len(), freed.endpoints[0].name.as_str()),
        (vec![one], 1, "a-cni-c1-eth0")
    );
    assert_eq!(super::revision(&world).await, before.next(), "one commit");
    assert_eq!(endpoints(&world).await, ["a-cni-c2-eth0"]);
    world.check().await;
}

#[tokio::test]
async fn endpoint_stays_while_container_may_live() {
    let world = World::on(std::sync::Arc::new(kv_mvcc::memory()), ipam_core::Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    let mut given = Vec::new();
    for (container, interface) in
        [("alone", "eth0"), ("other", "net1"), ("several", "eth0"), ("several", "net1"), ("live", "eth0")]
    {
        let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0));
        request.attachment.interface = interface.into();
        given.push(world.assign(&request).await.unwrap()[0].ip);
    }
    let host_local: IpAddr = "192.0.2.1".parse().unwrap();
    store(&world, "alone", "eth0", &[given[0]]).await;
    // The freed attachment of container `other` is in another network. The endpoint of container `other` has neither
    // the interface nor the address of the freed attachment.
    store(&world, "other", "eth0", &[host_local]).await;
    store(&world, "several", "eth0", &[given[2]]).await;
    // The endpoint of container `live` also has an address outside all pools, which is still in use.
    store(&world, "live", "eth0", &[given[4], host_local]).await;
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let all = ["alone", "other", "several", "live"];
    let holds = going(&world, &holdings, &all, &[host_local]).await;
    assert_eq!(named(&holds), ["a-cni-alone-eth0", "a-cni-several-eth0"].into());
    // Only the addresses of interface `eth0` are freed, so container `several` keeps an address.
    let some: Vec<_> = holdings.allocations.iter().filter(|one| one.interface == "eth0").cloned().collect();
    let known = world.ipam.node_endpoints(|node| node == "a", soon()).await.unwrap();
    let holds_of_some = with_endpoints(&some, &holdings, &known, &evidence(BTreeSet::new()));
    assert_eq!(named(&holds_of_some), ["a-cni-alone-eth0", "a-cni-live-eth0"].into());

    // After a new request of the container in a later boot, the container's address and endpoint are not deleted. A
    // pod's endpoint is kept if the endpoint belongs to a newer sandbox of the pod.
    let mut again = AssignRequest::new(attachment("a", "alone"), RequestedAddresses::any(1, 0));
    again.attachment.boot = Some("boot0002".into());
    assert_eq!(world.assign(&again).await.unwrap()[0].ip, given[0]);
    let newer = json!({"spec": {"orchestrator": "cni", "node": "a", "containerID": "newer", "endpoint": "eth0"}});
    world.store.put(keys::workload_endpoint("default", "a-cni-several-eth0"), newer.to_string()).await.unwrap();
    let freed = free(&world, &holds).await;
    assert_eq!((freed.changed, freed.endpoints.len()), (vec![given[0]], 0));
    assert_eq!(endpoints(&world).await.len(), 4);
}

#[tokio::test]
async fn endpoints_of_full_block_take_several_commits() {
    let world = World::on(std::sync::Arc::new(kv_mvcc::memory()), ipam_core::Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap()).with_block_size(25)).await;
    for number in 0..70 {
        let container = format!("c{number}");
        let address = give(&world, &container, "boot0001", 0).await;
        store(&world, &container, "eth0", &[address]).await;
    }
    let holdings = world.ipam.holdings("a", soon()).await.unwrap();
    let names: Vec<String> = (0..70).map(|number| format!("c{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let holds = going(&world, &holdings, &names, &[]).await;
    let sizes = |batches: Vec<Vec<Hold>>| batches.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(batches(&holds)), [32, 32, 6]);
    assert_eq!(sizes(batches(&holdings.allocations)), [64, 6], "without endpoints");
    let freed = free(&world, &holds).await;
    assert_eq!((freed.released.len(), freed.endpoints.len(), endpoints(&world).await.len()), (70, 70, 0));
    world.check().await;
}
