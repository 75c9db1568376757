//! Tests inspections that compare workload endpoints with addresses and nodes.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam_core::assign::{AssignRequest, HandleRequest, RequestedAddresses};
use ipam_core::model::{IpamConfig, Labels, Node, Owner};
use ipam_core::timestamps::go_string;
use ipam_operator::inspect::{Finding, RepairResult};
use kv::{Range, StoreExt};
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::damages::inspect;
use crate::Operated;
use crate::world::{World, attachment, soon};

const ENDPOINTS: &str = "/calico/resources/v3/projectcalico.org/workloadendpoints";
const NODES: &str = "/calico/resources/v3/projectcalico.org/nodes";

fn now() -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(1_800_000_000).unwrap()
}

/// Creates a test world in which container `c1` on node `a` and container `c2` on node `b` hold one address each.
async fn world() -> (World, IpAddr, IpAddr) {
    let world = World::new().await;
    world.add_pool("main", "10.0.0.0/24").await;
    let (one, two) = (world.one("a", "c1").await.unwrap(), world.one("b", "c2").await.unwrap());
    (world, one, two)
}

/// Stores an endpoint in namespace `shop`, whose spec has the required fields and the fields of `more`.
async fn put(world: &World, name: &str, more: Value) {
    let mut spec = json!({"orchestrator": "cni", "node": name.split('-').next().unwrap(), "endpoint": "eth0"});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let document = json!({"kind": "WorkloadEndpoint", "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
    world.store.put(format!("{ENDPOINTS}/shop/{name}"), document.to_string()).await.unwrap();
}

async fn remove(world: &World, key: &str) {
    world.store.delete(Range::key(key)).await.unwrap();
}

/// Returns the findings of an inspection, as one line of text each.
async fn reported(world: &World) -> Vec<String> {
    let line = |one: &Finding| format!("{} {}: {}", one.code, one.subject, one.what);
    inspect(world).await.findings.iter().map(line).collect()
}

#[tokio::test]
async fn endpoint_names_container_of_address() {
    let (world, one, two) = world().await;
    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": [format!("{one}/32")]})).await;
    put(&world, "b-cni-c2-eth0", json!({"containerID": "c2", "ipNetworks": [format!("{two}/32")]})).await;
    assert_eq!(reported(&world).await, Vec::<String>::new());
    assert_eq!(inspect(&world).await.counts.endpoints, 2);
    // Container `c1` gets an address in a second network.
    let mut other = attachment("a", "c1");
    other.network = "other.net".into();
    let third = world.assign(&AssignRequest::new(other, RequestedAddresses::any(1, 0))).await.unwrap()[0].ip;
    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": [format!("{third}/32")]})).await;
    assert_eq!(reported(&world).await, Vec::<String>::new());

    let subject = "WEP-02 endpoint shop/a-cni-c1-eth0:";
    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": [format!("{two}/32")]})).await;
    assert_eq!(reported(&world).await, [format!("{subject} {two} is held under handle net.c2")]);
    // The endpoint's container `2` is not the holder `c2`, although the handle `net.c2` ends with `2`.
    put(&world, "a-cni-c1-eth0", json!({"containerID": "2", "ipNetworks": [format!("{two}/32")]})).await;
    assert_eq!(reported(&world).await, [format!("{subject} {two} is held under handle net.c2")]);
    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": ["10.0.0.99/32", "10.0.0.98/32"]})).await;
    let free = ["10.0.0.98", "10.0.0.99"].map(|ip| format!("{subject} {ip} is free"));
    assert_eq!(reported(&world).await, free);
    world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
    world.release("b", "c2").await;
    remove(&world, &format!("{ENDPOINTS}/shop/b-cni-c2-eth0")).await;
    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": [format!("{two}/32")]})).await;
    assert_eq!(reported(&world).await, [format!("{subject} {two} is free: it is in cooldown since it was released")]);
    assert!(!inspect(&world).await.findings[0].mendable, "its container may be alive");
}

#[tokio::test]
async fn endpoint_of_foreign_address_is_ignored() {
    let (world, one, two) = world().await;
    let networks = |ip: &str| json!([format!("{ip}/32")]);
    // The endpoint's address is outside of all pools, as if the host-local plugin had assigned it.
    put(&world, "a-cni-c7-eth0", json!({"containerID": "c7", "ipNetworks": networks("192.0.2.7")})).await;
    // OpenStack's endpoints cause no findings, because Neutron assigns their addresses. An endpoint without a container
    // id causes no findings, because its container cannot be compared with the holder.
    let free = networks("10.0.0.99");
    put(&world, "a-openstack-vm-x", json!({"orchestrator": "openstack", "containerID": "vm", "ipNetworks": free}))
        .await;
    put(&world, "a-k8s-pod-eth0", json!({"orchestrator": "k8s", "pod": "pod", "ipNetworks": free})).await;
    // One address is held under a pod's handle from an older version of Calico, the other under the handle of a virtual
    // machine that moves between pods.
    let owner = || Owner::host("a");
    let mut given = Vec::new();
    for handle in ["shop.web", "net.vmi.shop.cart"] {
        let request = HandleRequest::new(handle, owner(), RequestedAddresses::any(1, 0));
        given.push(world.ipam.assign_to_handle(&request, soon()).await.unwrap()[0].ip.to_string());
    }
    for (pod, ip) in [("web", &given[0]), ("virt--launcher--cart", &given[1])] {
        let more = json!({"orchestrator": "k8s", "containerID": "5f2d", "pod": pod, "ipNetworks": networks(ip)});
        put(&world, &format!("a-k8s-{pod}-eth0"), more).await;
    }
    assert_eq!(reported(&world).await, Vec::<String>::new());
    // An endpoint is reported if it lists an address that another container holds.
    put(
        &world,
        "a-k8s-web-eth0",
        json!({"orchestrator": "k8s", "containerID": "5f2d", "pod": "web",
        "ipNetworks": networks(&one.to_string())}),
    )
    .await;
    put(&world, "a-cni-c7-eth0", json!({"containerID": "c7", "ipNetworks": networks(&two.to_string())})).await;
    assert_eq!(reported(&world).await.len(), 2);
}

/// Assigns an address with the given attributes, and returns the address as text.
async fn hold(world: &World, handle: &str, attributes: &[(&str, String)]) -> String {
    let attributes = attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
    let request = HandleRequest::new(handle, Owner::host("a"), RequestedAddresses::any(1, 0));
    let request = request.with_attributes(attributes.collect::<BTreeMap<_, _>>());
    world.ipam.assign_to_handle(&request, soon()).await.unwrap()[0].ip.to_string()
}

#[tokio::test]
async fn endpoint_is_required_for_container_of_calico_network() {
    let (world, one, two) = world().await;
    let old = || ("timestamp", go_string(now() - time::Duration::seconds(60)));
    let text = str::to_owned;
    let pod = |name: &str| [("node", text("a")), ("namespace", text("shop")), ("pod", text(name)), old()];
    let calicos = hold(&world, "k8s-pod-network.5f2d", &pod("web")).await;
    let margays = hold(&world, "my.net.c5", &[("node", text("a")), ("margay.io/net", text("my.net")), old()]).await;
    let mut young = pod("young");
    young[3].1 = go_string(now() - time::Duration::seconds(59));
    hold(&world, "net.young", &young).await;
    hold(&world, "net.undated", &pod("undated")[..3]).await;
    // An address without a recorded pod needs no endpoint: it belongs to a plain container, to a tunnel, or to a manual
    // assignment.
    hold(&world, "net.plain", &[("node", text("a")), old()]).await;
    let tunnel = [("node", text("a")), ("type", text("vxlanTunnelAddress")), ("margay.io/net", text("x")), old()];
    hold(&world, "vxlan-tunnel-addr-a", &tunnel).await;
    hold(&world, "net.vmi.shop.cart", &pod("virt-launcher-cart")).await;
    // Pod `shop/web` holds an address in a bridged network.
    let own = ["node", "namespace", "pod"].map(|name| format!("margay.io/{name}"));
    let bridged = [(own[0].as_str(), text("a")), (&own[1], text("shop")), (&own[2], text("web")), old()];
    hold(&world, "lan.5f2d", &bridged).await;
    assert_eq!(reported(&world).await, Vec::<String>::new(), "no endpoint is kept in this store");

    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": [format!("{one}/32")]})).await;
    put(&world, "b-cni-c2-eth0", json!({"containerID": "c2", "ipNetworks": [format!("{two}/32")]})).await;
    let mut expected = vec![
        format!("ALC-07 address {calicos}: handle k8s-pod-network.5f2d on node a, for pod shop/web"),
        format!("ALC-07 address {margays}: handle my.net.c5 on node a"),
    ];
    expected.sort();
    assert_eq!(reported(&world).await, expected);
    assert!(inspect(&world).await.findings.iter().all(|one| !one.mendable));

    // A missing endpoint is not reported if the container has an endpoint with any address. A missing endpoint is not
    // reported if the pod has an endpoint that is unreadable or has no container id.
    put(&world, "a-cni-c5-eth0", json!({"containerID": "c5"})).await;
    put(&world, "a-k8s-web-eth0", json!({"orchestrator": "k8s", "pod": "web"})).await;
    assert_eq!(reported(&world).await, Vec::<String>::new());
    world.store.put(format!("{ENDPOINTS}/shop/a-k8s-web-eth0"), "{").await.unwrap();
    let unreadable = reported(&world).await;
    assert!(
        unreadable.len() == 1 && unreadable[0].starts_with("WEP-01 endpoint shop/a-k8s-web-eth0: "),
        "{unreadable:?}"
    );
    // Only the newer sandbox of the pod has an endpoint, so the older sandbox's address is reported.
    put(&world, "a-k8s-web-eth0", json!({"orchestrator": "k8s", "pod": "web", "containerID": "77"})).await;
    assert_eq!(reported(&world).await.len(), 1);
    // A network that uses Margay's attribute names for an address is a secondary network, although older addresses of
    // the network use Calico's attribute names.
    let old_name = [("node", text("a")), ("margay.io/net", text("lan")), old()];
    hold(&world, "lan.c9", &old_name).await;
    assert_eq!(reported(&world).await.len(), 2);
    hold(&world, "lan.c10", &[("margay.io/node", text("a")), ("margay.io/net", text("lan")), old()]).await;
    assert_eq!(reported(&world).await.len(), 1);
    // A missing endpoint is not reported for an address whose node is gone.
    remove(&world, &format!("{NODES}/a")).await;
    assert!(reported(&world).await.iter().all(|line| !line.starts_with("ALC-07")));
}

#[tokio::test]
async fn endpoints_of_departed_node_alone_are_deleted() {
    let (world, one, two) = world().await;
    put(&world, "a-cni-c1-eth0", json!({"containerID": "c1", "ipNetworks": [format!("{one}/32")]})).await;
    put(&world, "b-cni-c2-eth0", json!({"containerID": "c2", "ipNetworks": [format!("{two}/32")]})).await;
    put(&world, "dead-cni-c3-eth0", json!({"containerID": "c3", "ipNetworks": ["10.0.0.99/32"]})).await;
    // The endpoint's name and the endpoint's document contain different nodes, and only one of these nodes is
    // registered.
    put(&world, "dead-cni-c4-eth0", json!({"containerID": "c4", "node": "a"})).await;
    put(&world, "dead-openstack-vm-x", json!({"orchestrator": "openstack", "containerID": "vm"})).await;
    let found = inspect(&world).await;
    assert_eq!(reported(&world).await, ["WEP-03 endpoint shop/dead-cni-c3-eth0: node dead is not registered"]);
    let finding = &found.findings[0];
    assert!(finding.mendable);
    let mend = async |finding: &Finding| world.operator().mend(finding, found.revision, soon()).await.unwrap();

    // The repair does not delete the endpoint if, since the inspection, the node was registered again or the endpoint
    // was written again.
    world.add_node("dead", &[]).await;
    assert_eq!(mend(finding).await, RepairResult::Changed);
    remove(&world, &format!("{NODES}/dead")).await;
    put(&world, "dead-cni-c3-eth0", json!({"containerID": "c3b"})).await;
    assert_eq!(mend(finding).await, RepairResult::Changed);
    let found = inspect(&world).await;
    assert_eq!(world.operator().mend(&found.findings[0], found.revision, soon()).await.unwrap(), RepairResult::Done);
    assert_eq!(reported(&world).await, Vec::<String>::new());
    assert_eq!(inspect(&world).await.counts.endpoints, 4);
    assert_eq!(world.operator().mend(&found.findings[0], found.revision, soon()).await.unwrap(), RepairResult::Changed);

    // In a store without registered nodes, no node counts as gone.
    for node in ["a", "b", "c"] {
        remove(&world, &format!("{NODES}/{node}")).await;
    }
    put(&world, "dead-cni-c3-eth0", json!({"containerID": "c3"})).await;
    assert_eq!(reported(&world).await, Vec::<String>::new());
    let last = Node::new("z", Labels::default(), "uid", now());
    let key = ipam_core::model::keys::resource(ipam_core::model::keys::ResourceKind::Node, "z");
    world.put(key, &last).await;
    assert!(reported(&world).await.iter().filter(|line| line.starts_with("WEP-03")).count() == 4);
}
