//! Tests addresses of virtual machines: each change is one commit, and a stopped virtual machine keeps its addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::gc::batches;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Handle};
use ipam_core::vm::{PodRole, VmAnswer, VmFate, VmPod};
use ipam_core::{Ipam, Nodes, Result};
use kv::wrap::{CountingStore, Fault};
use kv::{Range, Store, StoreExt};

use crate::intents::{Notes, allocator, breaking};
use crate::world::{World, attachment, soon};

/// Creates a pod of the virtual machine `shop/cart`.
pub(crate) fn pod(name: &str, role: PodRole, fate: VmFate) -> VmPod {
    VmPod {
        handle: "net.vmi.shop.cart".into(),
        namespace: "shop".into(),
        name: name.into(),
        role,
        fate,
        attributes: [("vmi-name".to_owned(), "cart".to_owned())].into(),
    }
}

/// Runs an ADD of a virtual machine's pod on a node, for one address of each family.
async fn add(ipam: &Ipam, node: &str, name: &str, role: PodRole) -> Result<VmAnswer> {
    let mut request = AssignRequest::new(attachment(node, name), RequestedAddresses::any(1, 1));
    request.attributes = [("timestamp".to_owned(), name.to_owned())].into();
    ipam.assign_to_vm(&request, &pod(name, role, VmFate::Stays), soon()).await
}

async fn del(ipam: &Ipam, node: &str, name: &str, fate: VmFate) -> Vec<IpAddr> {
    let vm = pod(name, PodRole::Source, fate);
    ipam.release_vm_pod(&vm, &attachment(node, name), &[], &[], soon()).await.unwrap()
}

fn addresses(answer: &VmAnswer) -> Vec<IpAddr> {
    match answer {
        VmAnswer::First(given) | VmAnswer::Kept(given) => given.iter().map(|one| one.ip).collect(),
        VmAnswer::Off => Vec::new(),
    }
}

async fn world() -> World {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.add_pool("v6", "fd00::/124").await;
    world
}

/// Returns the names of the pods that own an address, as the active owner and as the alternate owner.
async fn owners(world: &World, ip: IpAddr) -> (Option<String>, Option<String>) {
    let entry = world.ipam.attributes_of(ip, soon()).await.unwrap();
    let pod = |attributes: &BTreeMap<String, String>| attributes.get("pod").cloned();
    (pod(entry.attributes()), pod(entry.alternate_attributes()))
}

async fn revision(world: &World) -> u64 {
    u64::try_from(world.store.list(Range::All).await.unwrap().revision.get()).unwrap()
}

#[tokio::test]
async fn vm_calls_are_one_commit_for_both_families() {
    let world = world().await;
    let before = revision(&world).await;
    let first = add(&world.ipam, "a", "source", PodRole::Source).await.unwrap();
    assert!(matches!(first, VmAnswer::First(_)));
    let held = addresses(&first);
    assert_eq!(held.len(), 2);
    let target = add(&world.ipam, "b", "target", PodRole::Target).await.unwrap();
    assert!(matches!(target, VmAnswer::Kept(_)));
    assert_eq!(addresses(&target), held);
    for ip in &held {
        assert_eq!(owners(&world, *ip).await, (Some("source".into()), Some("target".into())));
    }
    assert!(del(&world.ipam, "a", "source", VmFate::Stays).await.is_empty());
    assert_eq!(owners(&world, held[1]).await, (None, Some("target".into())));
    assert_eq!(addresses(&add(&world.ipam, "c", "next", PodRole::Source).await.unwrap()), held);
    assert!(del(&world.ipam, "b", "target", VmFate::Ends).await.is_empty(), "another pod is an owner");
    world.check().await;
    assert_eq!(del(&world.ipam, "c", "next", VmFate::Ends).await, held);
    assert_eq!(revision(&world).await - before, 6, "a commit for each of six calls");
    assert!(del(&world.ipam, "c", "next", VmFate::Ends).await.is_empty(), "once more is no error");
    assert_eq!(revision(&world).await - before, 6);
    world.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_pods_that_start_at_once_have_same_addresses() {
    for _ in 0..8 {
        let world = world().await;
        let tasks = (0..8).map(|number| {
            let (world, node) = (world.clone(), ["a", "b", "c"][number % 3]);
            tokio::spawn(async move { add(&world.ipam, node, &format!("p{number}"), PodRole::Source).await.unwrap() })
        });
        let mut held = Vec::new();
        for task in tasks.collect::<Vec<_>>() {
            held.push(addresses(&task.await.unwrap()));
        }
        held.dedup();
        assert_eq!(held.len(), 1, "{held:?}");
        world.check().await;
    }
}

/// The first ADD of a virtual machine needs as many round trips to the store as that of a container, and a restart
/// needs no more.
#[tokio::test]
async fn vm_costs_no_more_than_container() {
    let quiet = world().await;
    let counting = Arc::new(CountingStore::new(Arc::clone(&quiet.store)));
    let world = World::on(Arc::clone(&counting) as Arc<dyn Store>, Nodes::Registered);
    let any = RequestedAddresses::any(1, 1);
    for container in ["c1", "c2"] {
        counting.take();
        world.assign(&AssignRequest::new(attachment("a", container), any.clone())).await.unwrap();
    }
    let ordinary = counting.take().round_trips();
    add(&world.ipam, "a", "source", PodRole::Source).await.unwrap();
    assert_eq!(counting.take().round_trips(), ordinary, "first launch");
    add(&world.ipam, "a", "again", PodRole::Source).await.unwrap();
    assert!(counting.take().round_trips() <= ordinary, "restart");
    add(&world.ipam, "b", "target", PodRole::Target).await.unwrap();
    assert!(counting.take().round_trips() <= ordinary, "target");
    world.release("a", "c1").await;
    let release = counting.take().round_trips();
    del(&world.ipam, "b", "target", VmFate::Stays).await;
    assert!(counting.take().round_trips() <= release, "DEL that keeps");
    del(&world.ipam, "a", "again", VmFate::Ends).await;
    assert!(counting.take().round_trips() <= release, "DEL that releases");
}

/// Neither garbage collection nor the removal of the node may free the addresses of a stopped virtual machine.
#[tokio::test]
async fn vm_address_is_kept_when_stopped() {
    let world = world().await;
    let held = addresses(&add(&world.ipam, "a", "source", PodRole::Source).await.unwrap());
    let untouched = async |what: &str| {
        let holdings = world.ipam.holdings("a", soon()).await.unwrap();
        assert_eq!((holdings.allocations.len(), holdings.special), (0, 2), "{what}");
    };
    untouched("running").await;
    // The virtual machine's node is deleted, and the machine starts on another node.
    world.store.delete(Range::Key(keys::resource(ResourceKind::Node, "a"))).await.unwrap();
    let found = world.ipam.departed_nodes(|_, name| name == "a", soon()).await.unwrap();
    let estate = &found.departed["a"];
    assert_eq!((batches(&estate.holds).len(), estate.shared), (0, 2));
    assert_eq!(addresses(&add(&world.ipam, "b", "elsewhere", PodRole::Source).await.unwrap()), held);
    world.add_node("a", &[]).await;
    del(&world.ipam, "b", "elsewhere", VmFate::Stays).await;
    assert_eq!(owners(&world, held[0]).await, (None, None));
    untouched("stopped").await;
}

/// A plugin process dies while its commit is on the way to the store. A commit that reaches the store after its pod has
/// ended must not make this pod the owner of an address.
#[tokio::test(start_paused = true)]
async fn vm_add_when_killed_does_not_land_after_del() {
    for fault in [Fault::Held, Fault::ReplyLost] {
        let world = world().await;
        let held = addresses(&add(&world.ipam, "a", "first", PodRole::Source).await.unwrap());
        del(&world.ipam, "a", "first", VmFate::Stays).await;
        let notes = Arc::<Notes>::default();
        // The blocks of the virtual machine's handle are read with range requests instead of a transaction, so only one
        // transaction precedes the commit.
        let (faulty, reported) = breaking(&world, fault, 1);
        let broken = allocator(&(Arc::new(faulty.clone()) as Arc<dyn Store>), &notes);
        let killed = tokio::spawn(async move { add(&broken, "a", "killed", PodRole::Source).await });
        tokio::time::timeout(Duration::from_secs(60), reported.notified()).await.unwrap();
        killed.abort();
        assert!(killed.await.unwrap_err().is_cancelled());
        assert_eq!(notes.count(), 1);

        let ipam = allocator(&world.store, &notes);
        assert!(del(&ipam, "a", "killed", VmFate::Stays).await.is_empty());
        faulty.deliver_held().await.unwrap();
        for ip in &held {
            assert_eq!(owners(&world, *ip).await, (None, None), "{fault:?}");
        }
        assert_eq!(notes.count(), 0);
        world.check().await;
    }
}

/// Only the word `Disabled` in Calico's settings turns off persistent addresses of virtual machines. Persistent
/// addresses stay enabled if the settings document is unreadable or its value is not `Disabled`.
#[tokio::test]
async fn vm_addresses_are_turned_off_only_by_word_disabled() {
    let world = world().await;
    let switch = |text: &str| {
        let document = format!(r#"{{"spec":{{"kubeVirtVMAddressPersistence":{text}}}}}"#);
        let key = "/calico/resources/v3/projectcalico.org/ipamconfigurations/default";
        let store = Arc::clone(&world.store);
        async move { store.put(key, document).await.unwrap() }
    };
    for (text, is_off) in [(r#""Enabled""#, false), ("Disabled", false), (r#""Disabled""#, true), ("1", false)] {
        switch(text).await;
        let answer = add(&world.ipam, "a", "source", PodRole::Source).await.unwrap();
        assert_eq!(matches!(answer, VmAnswer::Off), is_off, "{text}");
    }
}

/// If a write by Calico is interrupted, the handle's count can be too high, and Calico never corrects it.
#[tokio::test]
async fn vm_handle_is_repaired_when_it_counts_too_much() {
    let world = world().await;
    let held = addresses(&add(&world.ipam, "a", "source", PodRole::Source).await.unwrap());
    for blocks in [&["10.0.0.12/30"][..], &["10.0.0.12/30", "fd00::c/126"]] {
        let key = keys::handle("net.vmi.shop.cart");
        let mut handle = Handle::decode(&key, world.value(&key).await.as_bytes()).unwrap();
        blocks.iter().for_each(|cidr| handle.set(cidr.parse().unwrap(), 1));
        world.put(key, &handle).await;
        assert_eq!(addresses(&add(&world.ipam, "b", "target", PodRole::Target).await.unwrap()), held);
        world.check().await;
    }
}

#[tokio::test]
async fn vm_requested_address_of_missing_family_is_assigned() {
    let world = world().await;
    let vm = pod("source", PodRole::Source, VmFate::Stays);
    let request = |wanted: RequestedAddresses| AssignRequest::new(attachment("a", "source"), wanted);
    let first = world.ipam.assign_to_vm(&request(RequestedAddresses::any(1, 0)), &vm, soon()).await.unwrap();
    let v6: IpAddr = "fd00::5".parse().unwrap();
    let second = world.ipam.assign_to_vm(&request(RequestedAddresses::these(vec![v6])), &vm, soon()).await.unwrap();
    assert_eq!(addresses(&second), [v6]);
    let mut all = world.ipam.addresses_of_handle(&vm.handle, soon()).await.unwrap();
    all.sort_unstable();
    assert_eq!(all, [addresses(&first), vec![v6]].concat());
    world.check().await;
}

#[tokio::test]
async fn vm_release_far_ahead_is_dated_anew_without_room() {
    let world = World::full_but_for_a_release_dated_ahead().await;
    let request = AssignRequest::new(attachment("a", "pod"), RequestedAddresses::any(1, 0));
    let vm = pod("pod", PodRole::Source, VmFate::Stays);
    assert!(world.ipam.assign_to_vm(&request, &vm, soon()).await.is_err());
    world.pass(61);
    assert_eq!(addresses(&world.ipam.assign_to_vm(&request, &vm, soon()).await.unwrap()).len(), 1);
    world.check().await;
}
