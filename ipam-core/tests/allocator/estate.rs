//! Tests freeing the addresses and blocks of nodes that are gone, and handing over the addresses and blocks of renamed
//! nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipam_core::assign::{AssignRequest, HandleRequest, RequestedAddresses};
use ipam_core::gc::{DepartedNode, FreeResult, ListedAttachment, RuntimeList, batches, find_unlisted};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{AffinityState, NewPool, Owner, OwnerChange, OwnerUpdate, PoolUse};
use ipam_core::timestamps::go_string;
use ipam_core::{Error, Nodes};
use kv::{Range, StoreExt};
use time::OffsetDateTime;

use crate::world::{World, attachment, soon};

/// The time at which the clock of a [`World`] starts.
const START: i64 = 1_800_000_000;

/// Shorthands for operations on departed nodes.
trait Departing {
    async fn deregister(&self, node: &str);

    async fn estate(&self, node: &str) -> DepartedNode;

    /// Assigns one address to a handle, with the attributes in `recorded`.
    async fn give(&self, handle: &str, owner: &str, recorded: &[(&str, &str)]) -> IpAddr;

    /// Stores an endpoint of a container without a pod, and returns the endpoint's name.
    async fn store_endpoint(&self, node: &str, container: &str) -> String;

    async fn free_all_of(&self, estate: &DepartedNode) -> Result<FreeResult, Error>;

    async fn hand_over(&self, from: &str, to: &str) -> Result<usize, Error>;
}

impl Departing for World {
    async fn deregister(&self, node: &str) {
        self.store.delete(Range::Key(keys::resource(ResourceKind::Node, node))).await.unwrap();
    }

    async fn estate(&self, node: &str) -> DepartedNode {
        let mut found = self.ipam.departed_nodes(|_, name| name == node, soon()).await.unwrap();
        found.departed.remove(node).unwrap_or_default()
    }

    async fn give(&self, handle: &str, owner: &str, recorded: &[(&str, &str)]) -> IpAddr {
        let attributes = recorded.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let request = HandleRequest::new(handle, Owner::host(owner), RequestedAddresses::any(1, 0));
        let request = request.with_usage(PoolUse::Tunnel).with_attributes(attributes);
        self.ipam.assign_to_handle(&request, soon()).await.unwrap()[0].ip
    }

    async fn store_endpoint(&self, node: &str, container: &str) -> String {
        let name = format!("{node}-cni-{container}-eth0");
        let spec =
            serde_json::json!({"orchestrator": "cni", "node": node, "containerID": container, "endpoint": "eth0"});
        let document = serde_json::json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
        self.store.put(keys::workload_endpoint("default", &name), document.to_string()).await.unwrap();
        name
    }

    async fn free_all_of(&self, estate: &DepartedNode) -> Result<FreeResult, Error> {
        let mut all = FreeResult::default();
        for batch in batches(&estate.holds) {
            let freed = self.ipam.free_of_gone(&estate.node, &batch, soon()).await?;
            all.released.extend(freed.released);
            all.changed.extend(freed.changed);
        }
        Ok(all)
    }

    async fn hand_over(&self, from: &str, to: &str) -> Result<usize, Error> {
        let mut commits = 0;
        for share in self.estate(from).await.shares() {
            self.ipam.hand_over(from, to, &share, soon()).await?;
            commits += 1;
        }
        Ok(commits)
    }
}

fn addresses(estate: &DepartedNode) -> BTreeSet<IpAddr> {
    estate.holds.iter().map(|hold| hold.address).collect()
}

#[tokio::test]
async fn renamed_node_passes_all_to_new_name() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.add_pool("v6", "fd00::/124").await;
    let mut both = AssignRequest::new(attachment("a", "both"), RequestedAddresses::any(1, 1));
    both.attachment.boot = Some("boot0001".into());
    let both = world.assign(&both).await.unwrap();
    let tunnel = world.give("vxlan-tunnel-addr-a", "a", &[("node", "a"), ("type", "vxlanTunnelAddress")]).await;
    // Nodes `a` and `b` claim all blocks of the pool, and node `a` also borrows an address.
    for number in 0..12 {
        world.one(if number < 5 { "b" } else { "a" }, &format!("c{number}")).await.unwrap();
    }
    let before = world.estate("a").await;
    assert!(before.parts.values().any(|part| !part.is_own && part.addresses > 0), "some are borrowed: {before:?}");
    let others = world.estate("b").await;
    let stale = "10.9.9.0/30".parse().unwrap();
    let stale_key = keys::affinity(&Owner::host("a"), stale).unwrap();
    world.store.put(stale_key, r#"{"state":"pending","deleted":false}"#).await.unwrap();

    assert!(world.hand_over("a", "d").await.unwrap_err().to_string().contains("node a is registered"));
    world.deregister("a").await;
    assert!(matches!(world.hand_over("a", "d").await, Err(Error::UnknownNode(name)) if name == "d"));
    for wrong in ["", "a", "d/e"] {
        assert!(matches!(world.ipam.hand_over("a", wrong, &[], soon()).await, Err(Error::Invalid(_))), "{wrong:?}");
    }
    assert_eq!(addresses(&world.estate("a").await), addresses(&before), "a refused call changed addresses");
    world.add_node("d", &[]).await;
    let revision = world.store.list(Range::All).await.unwrap().revision;
    assert_eq!(world.hand_over("a", "d").await.unwrap(), 1);
    let now = world.store.list(Range::All).await.unwrap();
    assert_eq!(now.revision, revision.next(), "one commit");
    assert!(now.kvs.iter().all(|kv| !kv.key.to_string().contains("/host/a/")), "the stale affinity went, too");

    assert_eq!(world.estate("a").await, DepartedNode::default());
    let after = world.estate("d").await;
    assert_eq!(addresses(&after), addresses(&before));
    let own = |estate: &DepartedNode| estate.blocks().filter(|cidr| *cidr != stale).collect::<Vec<_>>();
    assert_eq!(own(&after), own(&before));
    let numbers =
        |estate: &DepartedNode| estate.holds.iter().map(|one| (one.address, one.sequence_number)).collect::<Vec<_>>();
    assert_eq!(numbers(&after), numbers(&before), "nothing was given anew");
    assert_eq!(addresses(&world.estate("b").await), addresses(&others));
    for cidr in after.parts.iter().filter(|(_, part)| part.is_own).map(|(cidr, _)| cidr.to_string()) {
        assert_eq!(world.affinity("d", &cidr).await, Some(AffinityState::Confirmed), "{cidr}");
    }
    assert_eq!(world.ipam.addresses_of_handle("vxlan-tunnel-addr-d", soon()).await.unwrap(), [tunnel]);
    assert!(world.ipam.addresses_of_handle("vxlan-tunnel-addr-a", soon()).await.is_err());
    world.check().await;

    let again =
        world.assign(&AssignRequest::new(attachment("d", "both"), RequestedAddresses::any(1, 1))).await.unwrap();
    let ips = |given: &[ipam_core::assign::AssignedAddress]| given.iter().map(|one| one.ip).collect::<Vec<_>>();
    assert_eq!(ips(&again), ips(&both));
    assert_eq!(world.release("d", "both").await.len(), 2);
    assert_eq!(world.hand_over("a", "d").await.unwrap(), 1, "nothing is left, and that is no error");
    world.check().await;
}

#[tokio::test]
async fn renamed_only_node_gets_new_name_with_its_blocks() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add_pool("v4", "10.0.0.0/28").await;
    let first = world.one("old", "c1").await.unwrap();
    assert_eq!(world.hand_over("old", "new").await.unwrap(), 1);
    let known = world.ipam.departed_nodes(|_, _| true, soon()).await.unwrap();
    assert_eq!((known.known.pinned.as_deref(), known.nodes), (Some("new"), BTreeSet::from(["new".to_owned()])));
    assert_eq!(world.release("whatever it is called", "c1").await, [first]);
    // If a node other than the pinned one is renamed, the node name that is pinned in the store stays the same.
    world.hand_over("unknown", "other").await.unwrap();
    assert_eq!(world.ipam.departed_nodes(|_, _| false, soon()).await.unwrap().known.pinned.as_deref(), Some("new"));
    world.check().await;
}

#[tokio::test]
async fn departed_node_loses_only_what_is_its_own() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let mine = world.one("a", "c1").await.unwrap();
    let calicos = world.give("k8s-pod-network.x", "a", &[("node", "a"), ("pod", "web")]).await;
    let nameless = world.give("by-hand", "a", &[]).await;
    let machine = world.give("vm", "a", &[("node", "a")]).await;
    let second = BTreeMap::from([("node".to_owned(), "b".to_owned())]);
    let update = OwnerUpdate { active: None, alternate: Some(OwnerChange::to(second)) };
    world.ipam.set_owner_attributes(machine, "vm", &update, soon()).await.unwrap();
    for number in 0..12 {
        world.one("b", &format!("b{number}")).await.unwrap();
    }
    let borrowed = world.one("c", "c2").await;
    assert!(borrowed.is_err(), "the pool is full");
    world.release("b", "b0").await;
    let estate = world.estate("a").await;
    assert_eq!(addresses(&estate), [mine, calicos].into());
    assert_eq!((estate.shared, estate.nameless), (1, 1), "{estate:?}");

    let registered = world.free_all_of(&estate).await.unwrap_err();
    assert!(registered.to_string().contains("node a is registered"), "{registered}");
    let block = estate.blocks().next().unwrap();
    assert!(world.ipam.give_up_block("a", block, soon()).await.is_err());
    assert_eq!(addresses(&world.estate("a").await), [mine, calicos].into());

    world.deregister("a").await;
    let freed = world.free_all_of(&estate).await.unwrap();
    assert_eq!((freed.released.into_iter().collect::<BTreeSet<_>>(), freed.changed.len()), ([mine, calicos].into(), 0));
    assert!(world.ipam.give_up_block("a", block, soon()).await.unwrap());
    assert!(!world.ipam.give_up_block("a", block, soon()).await.unwrap(), "it has no owner any more");
    for (handle, address) in [("by-hand", nameless), ("vm", machine)] {
        assert_eq!(world.ipam.addresses_of_handle(handle, soon()).await.unwrap(), [address], "{handle}");
    }
    assert_eq!(world.affinity("a", &block.to_string()).await, None);
    world.check().await;
}

#[tokio::test]
async fn departed_node_address_is_kept_when_given_anew() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    let address = world.one("a", "c1").await.unwrap();
    let estate = world.estate("a").await;
    world.release("a", "c1").await;
    let wanted = AssignRequest::new(attachment("a", "c1"), RequestedAddresses::these([address]));
    world.assign(&wanted).await.unwrap();
    world.deregister("a").await;
    let freed = world.free_all_of(&estate).await.unwrap();
    assert_eq!((freed.released, freed.changed), (vec![], vec![address]));
    world.check().await;
}

#[tokio::test]
async fn departed_node_blocks_move_32_per_commit() {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/22".parse().unwrap()).with_block_size(28)).await;
    let claimed = world.ipam.claim_affinity(&Owner::host("a"), "10.0.0.0/22".parse().unwrap(), soon()).await.unwrap();
    assert_eq!(claimed.claimed.len(), 64);
    world.deregister("a").await;
    world.add_node("d", &[]).await;
    assert_eq!(world.hand_over("a", "d").await.unwrap(), 2);
    assert_eq!(world.estate("d").await.blocks().count(), 64);
    world.check().await;
}

/// Creates a request like the CNI plugin's, dated `at` seconds after [`START`].
fn dated(container: &str, interface: &str, at: i64) -> AssignRequest {
    let mut request = AssignRequest::new(attachment("a", container), RequestedAddresses::any(1, 0));
    request.attachment.interface = interface.into();
    let at = OffsetDateTime::from_unix_timestamp(START + at).unwrap();
    request.attributes.insert("timestamp".into(), go_string(at));
    request
}

#[tokio::test]
async fn departed_node_is_judged_by_content_of_runtime_lists() {
    let world = World::on(Arc::new(kv_mvcc::memory()), Nodes::FirstSeen);
    world.add(NewPool::new("v4", "10.0.0.0/24".parse().unwrap())).await;
    let long = "0a1b2c3d4e5f60718293a4b5c6d7e8f9";
    let mut given = BTreeMap::new();
    for (container, interface, at) in
        [("one", "eth0", 0), ("one", "eth1", 0), (long, "eth0", 0), ("late", "eth0", 950), ("later", "eth0", 1001)]
    {
        let address = world.assign(&dated(container, interface, at)).await.unwrap()[0].ip;
        given.insert((container, interface), address);
    }
    let mut undated = dated("undated", "eth0", 0);
    undated.attributes.insert("timestamp".into(), "yesterday".into());
    world.assign(&undated).await.unwrap();
    let all = world.ipam.holdings("a", soon()).await.unwrap().allocations;
    let at = |seconds: i64| OffsetDateTime::from_unix_timestamp(START + seconds).unwrap();
    let listed = |container: &str| ListedAttachment { container: container.into(), ..ListedAttachment::default() };
    let gone = |lists: &[RuntimeList]| {
        let said = find_unlisted(all.clone(), lists);
        let gone: BTreeSet<IpAddr> = said.gone.iter().map(|one| one.address).collect();
        (gone, said.listed, said.young, said.undated, said.unspoken)
    };
    let [eth0, eth1, of_long] = [("one", "eth0"), ("one", "eth1"), (long, "eth0")].map(|key| given[&key]);

    let whole = RuntimeList::new(at(1000), [listed("one"), listed(long)]);
    assert_eq!(gone(&[whole]), ([].into(), 3, 2, 1, 0), "a container is all of its interfaces");
    let interface = ListedAttachment { interface: Some("eth1".into()), ..listed("one") };
    assert_eq!(gone(&[RuntimeList::new(at(1000), [interface])]).0, [eth0, of_long].into());
    let elsewhere = ListedAttachment { network: Some("other".into()), ..listed("one") };
    assert_eq!(gone(&[RuntimeList::new(at(1000), [elsewhere])]).0, [eth0, eth1, of_long].into());
    assert_eq!(gone(&[RuntimeList::new(at(1000), [listed(&long[..12])])]).0, [eth0, eth1].into(), "a short id");
    assert_eq!(gone(&[RuntimeList::new(at(1000), [listed(&long[..11])])]).0.len(), 3, "too short to be one");
    let empty = RuntimeList::new(at(1000), []);
    assert!(empty.is_empty());
    assert_eq!(gone(std::slice::from_ref(&empty)).0.len(), 3);
    assert_eq!(gone(&[RuntimeList::new(at(59), [])]), ([].into(), 0, 5, 1, 0), "an old list frees nothing newer");
    assert_eq!(gone(&[empty.clone().only_for("other")]), ([].into(), 0, 0, 0, 6));
    let two = [RuntimeList::new(at(1000), [listed("one")]), RuntimeList::new(at(1000), [listed(long)])];
    assert_eq!(gone(&two).0, [].into(), "two lists add up");
    let older = [empty, RuntimeList::new(at(59), [])];
    assert_eq!(gone(&older).0, [].into(), "the older one counts");
}

#[tokio::test]
async fn departed_node_endpoints_go_unless_it_comes_back() {
    let world = World::new().await;
    let names = [world.store_endpoint("a", "c1").await, world.store_endpoint("a", "c2").await];
    world.store_endpoint("b", "c3").await;
    // An endpoint is not deleted if the node in the endpoint's name differs from the node in its document. Endpoints of
    // OpenStack are never deleted.
    let odd = r#"{"spec":{"orchestrator":"cni","node":"b","containerID":"c4"}}"#;
    world.store.put(keys::workload_endpoint("default", "a-cni-c4-eth0"), odd).await.unwrap();
    let foreign = r#"{"spec":{"orchestrator":"openstack","node":"a"}}"#;
    world.store.put(keys::workload_endpoint("default", "a-openstack-vm-x"), foreign).await.unwrap();

    let estate = world.estate("a").await;
    assert_eq!(estate.endpoints.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), names);
    assert_eq!((estate.endpoints[0].container.as_str(), estate.blocks().count()), ("c1", 0));
    let refused = world.ipam.delete_endpoints_of_gone("a", &estate.endpoints, soon()).await;
    assert!(refused.unwrap_err().to_string().contains("node a is registered"));
    world.deregister("a").await;
    // A deletion for node `z` does not delete the endpoints of other nodes.
    assert!(world.ipam.delete_endpoints_of_gone("z", &estate.endpoints, soon()).await.unwrap().is_empty());
    world.store.delete(Range::Key(keys::workload_endpoint("default", &names[0]))).await.unwrap();
    let deleted = world.ipam.delete_endpoints_of_gone("a", &estate.endpoints, soon()).await.unwrap();
    assert_eq!(deleted.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), names[1..]);
    assert_eq!(world.estate("a").await, DepartedNode::default());
    assert_eq!(world.estate("b").await.endpoints.len(), 1);
    assert_eq!(world.store.count(Range::Prefix(keys::workload_endpoints_prefix())).await.unwrap(), 3);
}

#[tokio::test]
async fn renamed_node_endpoints_get_new_name() {
    let world = World::new().await;
    for container in ["c1", "c2"] {
        world.store_endpoint("a", container).await;
    }
    let kept = world.store_endpoint("b", "c2").await;
    let stored = async |name: &str| world.value(&keys::workload_endpoint("default", name)).await;
    let before = stored(&kept).await;
    let endpoints = world.estate("a").await.endpoints;
    let refused = world.ipam.hand_over_endpoints("a", "b", &endpoints, soon()).await;
    assert!(refused.unwrap_err().to_string().contains("node a is registered"));
    world.deregister("a").await;
    let refused = world.ipam.hand_over_endpoints("a", "d", &endpoints, soon()).await;
    assert!(matches!(refused, Err(Error::UnknownNode(name)) if name == "d"));
    let moved = world.ipam.hand_over_endpoints("a", "b", &endpoints, soon()).await.unwrap();
    assert_eq!(moved.iter().map(|(_, new)| new.as_str()).collect::<Vec<_>>(), ["b-cni-c1-eth0"]);
    assert_eq!(stored(&kept).await, before, "the other node's own");
    let document: serde_json::Value = serde_json::from_slice(stored("b-cni-c1-eth0").await.as_bytes()).unwrap();
    assert_eq!((&document["spec"]["node"], &document["spec"]["containerID"]), (&"b".into(), &"c1".into()));
    let left = world.estate("a").await.endpoints;
    assert_eq!(left.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["a-cni-c2-eth0"]);
}
