//! Runs every operation several times, each time with one of its requests or answers lost. Each operation must have the
//! outcome that it has when no request or answer is lost.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, BlockRequest, HandleRequest, RequestedAddresses};
use ipam_core::model::{IpamConfig, NewPool, Owner, OwnerChange, OwnerUpdate, PoolUse, ReleaseRequest};
use ipam_core::net::Family;
use ipam_core::vm::{PodRole, VmFate, VmPod};
use ipam_core::{Ipam, Nodes};
use kv::wrap::{CountingStore, Fault, FaultyStore};
use kv::{Key, Store, Value};

use crate::vm;
use crate::world::{World, attachment, consistent, ip, soon};

const HELD: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

type Answer<'a> = Pin<Box<dyn Future<Output = String> + 'a>>;
type Verb = fn(&Ipam) -> Answer<'_>;

/// All operations of the allocator: each has a name and a function that returns the operation's result as text.
const VERBS: [(&str, Verb); 17] = [
    ("assign", |ipam| {
        let request = AssignRequest::new(attachment("b", "c9"), RequestedAddresses::any(1, 1));
        Box::pin(async move { format!("{:?}", ipam.assign(&request, soon()).await) })
    }),
    ("assign_to_handle", |ipam| {
        let request = HandleRequest::new("service", Owner::load_balancer(), RequestedAddresses::any(2, 0))
            .with_most_per_family(2);
        Box::pin(async move { format!("{:?}", ipam.assign_to_handle(&request, soon()).await) })
    }),
    ("assign_to_handle again", |ipam| {
        let request =
            HandleRequest::new("net.c1", Owner::host("a"), RequestedAddresses::any(1, 0)).with_most_per_family(3);
        Box::pin(async move { format!("{:?}", ipam.assign_to_handle(&request, soon()).await) })
    }),
    ("assign_to_vm", |ipam| {
        let request = AssignRequest::new(attachment("b", "c9"), RequestedAddresses::any(1, 1));
        let vm = vm::pod("source", PodRole::Source, VmFate::Stays);
        Box::pin(async move { format!("{:?}", ipam.assign_to_vm(&request, &vm, soon()).await) })
    }),
    ("assign_to_vm again", |ipam| {
        let request = AssignRequest::new(attachment("b", "c9"), RequestedAddresses::any(1, 1));
        let vm = VmPod { handle: "net.c1".into(), ..vm::pod("target", PodRole::Target, VmFate::Stays) };
        Box::pin(async move { format!("{:?}", ipam.assign_to_vm(&request, &vm, soon()).await) })
    }),
    ("release_vm_pod", |ipam| release_vm(ipam, VmFate::Stays)),
    ("release_vm_pod of the last", |ipam| release_vm(ipam, VmFate::Ends)),
    ("ensure_blocks", |ipam| {
        let request = BlockRequest::new(Owner::host("b"), &[Family::V4, Family::V6]);
        Box::pin(async move { format!("{:?}", ipam.ensure_blocks(&request, soon()).await) })
    }),
    ("set_owner_attributes", |ipam| {
        let update = OwnerUpdate { active: None, alternate: Some(OwnerChange::to(attributes())) };
        Box::pin(
            async move { format!("{:?}", ipam.set_owner_attributes(ip(HELD[0]), "net.c1", &update, soon()).await) },
        )
    }),
    ("change_config", |ipam| {
        let change = |config: IpamConfig| config.with_cooldown_seconds(9);
        Box::pin(async move { format!("{:?}", ipam.change_config(change, soon()).await) })
    }),
    ("claim_affinity", |ipam| {
        let cidr = "10.0.0.16/29".parse().unwrap();
        Box::pin(async move { format!("{:?}", ipam.claim_affinity(&Owner::load_balancer(), cidr, soon()).await) })
    }),
    ("release_affinity", |ipam| {
        let cidr = "10.0.0.0/28".parse().unwrap();
        Box::pin(async move {
            format!("{:?}", ipam.release_affinity(&Owner::host("a"), cidr, ReleaseIf::Any, soon()).await)
        })
    }),
    ("release_all_affinities", |ipam| {
        Box::pin(async move {
            format!("{:?}", ipam.release_all_affinities(&Owner::host("a"), ReleaseIf::Any, soon()).await)
        })
    }),
    ("release_pool_affinities", |ipam| {
        let cidr = "10.0.0.0/26".parse().unwrap();
        Box::pin(async move { format!("{:?}", ipam.release_pool_affinities(cidr, ReleaseIf::Any, soon()).await) })
    }),
    ("remove_owner", |ipam| {
        Box::pin(async move { format!("{:?}", ipam.remove_owner(&Owner::host("a"), soon()).await) })
    }),
    ("release_by_handle", |ipam| {
        Box::pin(async move { format!("{:?}", ipam.release_by_handle("net.c1", soon()).await) })
    }),
    ("release_ips", |ipam| {
        let requests = HELD.map(|held| ReleaseRequest::new(ip(held)));
        Box::pin(async move { format!("{:?}", ipam.release_ips(&requests, soon()).await) })
    }),
];

/// Runs a DEL of the pod that owns the addresses of handle `net.c1`.
fn release_vm(ipam: &Ipam, fate: VmFate) -> Answer<'_> {
    let vm = VmPod { handle: "net.c1".into(), ..vm::pod("held", PodRole::Source, fate) };
    let container = attachment("a", "c9");
    Box::pin(async move { format!("{:?}", ipam.release_vm_pod(&vm, &container, &[], &[], soon()).await) })
}

fn attributes() -> BTreeMap<String, String> {
    [("namespace", "shop"), ("pod", "target")].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// A test world in which node `a` has three blocks, including an empty block, and two addresses of a container. The
/// store also contains a key that old versions of Calico stored for a node.
async fn world() -> World {
    let world = World::new().await;
    world.add(NewPool::new("v4", "10.0.0.0/26".parse().unwrap()).with_block_size(30)).await;
    world.add_pool("v6", "fd00::/120").await;
    let services = NewPool::new("services", "10.1.0.0/29".parse().unwrap()).with_block_size(30);
    world.add(services.with_allowed_uses([PoolUse::LoadBalancer])).await;
    for cidr in ["10.0.0.0/29", "10.0.0.32/30"] {
        world.ipam.claim_affinity(&Owner::host("a"), cidr.parse().unwrap(), soon()).await.unwrap();
    }
    let wanted = RequestedAddresses::these(HELD.map(|held| held.parse::<IpAddr>().unwrap()));
    let mut request = AssignRequest::new(attachment("a", "c1"), wanted);
    request.attributes = [("namespace", "shop"), ("pod", "held")].map(|(key, value)| (key.into(), value.into())).into();
    world.assign(&request).await.unwrap();
    world.put(ipam_core::model::keys::legacy_host("a"), &IpamConfig::default()).await;
    world
}

async fn documents(world: &World) -> Vec<(Key, Value)> {
    let kvs = world.dump().await;
    consistent(&kvs);
    kvs.into_iter().map(|kv| (kv.key, kv.value)).collect()
}

#[tokio::test(start_paused = true)]
async fn lost_messages_never_change_outcome_of_verbs() {
    for (name, verb) in VERBS {
        let quiet = world().await;
        let counting = Arc::new(CountingStore::new(Arc::clone(&quiet.store)));
        let counted = World::on(Arc::clone(&counting) as Arc<dyn Store>, Nodes::Registered);
        let answer = verb(&counted.ipam).await;
        assert!(answer.starts_with("Ok"), "{name}: {answer}");
        let after = documents(&quiet).await;
        let requests = usize::try_from(counting.take().txns).unwrap();
        assert!(requests >= 2, "{name} reads and commits");
        for place in 0..requests {
            for fault in [Fault::NotSent, Fault::RequestLost, Fault::ReplyLost, Fault::Held] {
                let place_of = format!("{name}, request {place}: {fault:?}");
                let world = world().await;
                let script = (0..=place).map(|request| (request == place).then_some(fault));
                let faulty = FaultyStore::script(Arc::clone(&world.store), script);
                let broken = World::on(Arc::new(faulty.clone()), Nodes::Registered);
                assert_eq!(verb(&broken.ipam).await, answer, "{place_of}");
                assert_eq!(documents(&world).await, after, "{place_of}");
                faulty.deliver_held().await.unwrap();
                assert_eq!(documents(&world).await, after, "{place_of}, and it came late");
            }
        }
    }
}
