//! Runs a scenario with all operations of the allocator on each kind of store. The allocator's answers and the stored
//! documents must be the same on all stores.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use backend_etcd::{EtcdStore, Options};
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, BlockRequest, HandleRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    Document, ExpectedOwner, IpamConfig, Labels, NewPool, Node, Owner, OwnerChange, OwnerUpdate, PoolUse,
    ReleaseRequest,
};
use ipam_core::net::Family;
use ipam_core::{Ipam, Nodes};
use ipnet::IpNet;
use kv::{Deadline, Range, Store, StoreExt};
use kv_local::{Create, OpenOptions};
use time::OffsetDateTime;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn pod(name: &str) -> BTreeMap<String, String> {
    [("namespace", "shop"), ("pod", name)].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// The answers of the allocator, each with the documents that the store contains afterwards.
#[derive(Debug, Default, PartialEq)]
struct Answered(Vec<String>);

struct Teller {
    store: Arc<dyn Store>,
    ipam: Ipam,
    clock: Arc<AtomicI64>,
    answered: Answered,
}

impl Teller {
    fn new(store: Arc<dyn Store>) -> Self {
        let (clock, uids) = (Arc::new(AtomicI64::new(1_800_000_000)), AtomicU32::new(0));
        let reading = Arc::clone(&clock);
        let now = move || OffsetDateTime::from_unix_timestamp(reading.load(SeqCst)).unwrap();
        let uid = move || format!("00000000-0000-4000-8000-{:012}", uids.fetch_add(1, SeqCst));
        let ipam = Ipam::new(Arc::clone(&store), Nodes::Registered).with_clock(Arc::new(now)).with_uids(Arc::new(uid));
        Self { store, ipam, clock, answered: Answered::default() }
    }

    async fn note(&mut self, answer: impl Debug) {
        let stored = self.store.list(Range::All).await.unwrap().kvs;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let stored: Vec<_> = stored.iter().map(|kv| format!("{} {}", kv.key, text(kv.value.as_bytes()))).collect();
        self.answered.0.push(format!("{answer:?}\n{}", stored.join("\n")));
    }

    async fn tell(mut self) -> Answered {
        self.prepare().await;
        self.assign().await;
        self.read_and_change().await;
        self.give_back().await;
        self.answered
    }

    async fn prepare(&mut self) {
        for name in ["a", "b"] {
            let node = Node::new(name, Labels::new(), "uid", OffsetDateTime::UNIX_EPOCH).encode().unwrap();
            self.store.put(keys::resource(ResourceKind::Node, name), node).await.unwrap();
        }
        for (name, cidr, bits, uses) in [
            ("v4", "10.0.0.0/24", 28, PoolUse::Workload),
            ("v6", "fd00::/120", 124, PoolUse::Workload),
            ("services", "10.1.0.0/24", 28, PoolUse::LoadBalancer),
        ] {
            let pool = NewPool::new(name, net(cidr)).with_block_size(bits).with_allowed_uses([uses]);
            let made = self.ipam.create_pool(&pool, None, soon()).await.unwrap();
            self.note(made.cidr()).await;
        }
        let strict = |config: IpamConfig| config.with_strict_affinity(true).with_cooldown_seconds(30);
        let answer = self.ipam.change_config(strict, soon()).await;
        self.note(answer).await;
        let answer = self.ipam.change_config(|config| config.with_strict_affinity(false), soon()).await;
        self.note(answer).await;
        let wrong = self.ipam.change_config(|config| config.with_max_blocks_per_host(3), soon()).await;
        self.note(wrong).await;
    }

    async fn assign(&mut self) {
        let families = [Family::V4, Family::V6];
        for owner in [Owner::host("a"), Owner::host("a"), Owner::host("b")] {
            let answer = self.ipam.ensure_blocks(&BlockRequest::new(owner, &families), soon()).await;
            self.note(answer).await;
        }
        let attachment = Attachment {
            network: "net".into(),
            container: "c1".into(),
            interface: "eth0".into(),
            node: "a".into(),
            boot: None,
        };
        let request = AssignRequest::new(attachment, RequestedAddresses::any(1, 1));
        for _ in 0..2 {
            let answer = self.ipam.assign(&request, soon()).await;
            self.note(answer).await;
        }
        let machine = HandleRequest::new("net.vmi.shop.cart", Owner::host("a"), RequestedAddresses::any(2, 0))
            .with_attributes(pod("source"))
            .with_most_per_family(2);
        let service = HandleRequest::new("service", Owner::load_balancer(), RequestedAddresses::any(20, 0));
        for request in [&machine, &machine, &service] {
            let answer = self.ipam.assign_to_handle(request, soon()).await;
            self.note(answer).await;
        }
        let claims = [("b", "10.0.0.128/26"), ("b", "10.1.0.0/24"), ("b", "10.9.0.0/24"), ("nosuch", "10.0.0.0/24")];
        for (node, cidr) in claims {
            let answer = self.ipam.claim_affinity(&Owner::host(node), net(cidr), soon()).await;
            self.note(answer).await;
        }
    }

    async fn held(&self, handle: &str) -> Vec<IpAddr> {
        self.ipam.addresses_of_handle(handle, soon()).await.unwrap()
    }

    async fn read_and_change(&mut self) {
        let address = self.held("net.vmi.shop.cart").await[0];
        let source = ExpectedOwner::Pod { namespace: "shop".into(), name: "source".into() };
        let arrive = OwnerChange::to(pod("target")).if_owned_by(ExpectedOwner::None);
        let take_over = OwnerChange::to(pod("target")).if_owned_by(source);
        for update in [
            OwnerUpdate { active: None, alternate: Some(arrive.clone()) },
            OwnerUpdate { active: None, alternate: Some(arrive) },
            OwnerUpdate { active: Some(take_over.clone()), alternate: Some(OwnerChange::clear()) },
            OwnerUpdate { active: Some(take_over), alternate: None },
        ] {
            let answer = self.ipam.set_owner_attributes(address, "net.vmi.shop.cart", &update, soon()).await;
            self.note(answer).await;
        }
        let answer = self.ipam.attributes_of(address, soon()).await;
        self.note(answer).await;
        let answer = self.ipam.addresses_of_handle("nosuch", soon()).await;
        self.note(answer).await;
        let answer = self
            .ipam
            .utilization(Deadline::after(Duration::from_secs(60)))
            .await
            .unwrap()
            .of_pools(&["v4", "10.1.0.0/24"]);
        self.note(answer).await;
    }

    async fn give_back(&mut self) {
        let machine = self.held("net.vmi.shop.cart").await;
        let wrong = [ReleaseRequest::new(machine[0]), ReleaseRequest::new(machine[1]).with_handle("net.c1")];
        let right = [ReleaseRequest::new(machine[0]).with_handle("net.vmi.shop.cart")];
        for requests in [&wrong[..], &right[..], &right[..]] {
            let answer = self.ipam.release_ips(requests, soon()).await;
            self.note(answer).await;
        }
        let answer = self.ipam.attributes_of(machine[0], soon()).await;
        self.note(answer).await;
        for handle in ["service", "service", "net.vmi.shop.cart"] {
            let answer = self.ipam.release_by_handle(handle, soon()).await;
            self.note(answer).await;
        }
        self.clock.fetch_add(60, SeqCst);
        let answer =
            self.ipam.release_affinity(&Owner::host("b"), net("10.0.0.128/27"), ReleaseIf::Empty, soon()).await;
        self.note(answer).await;
        for which in [ReleaseIf::Empty, ReleaseIf::Any] {
            let answer = self.ipam.release_pool_affinities(net("10.0.0.0/24"), which, soon()).await;
            self.note(answer).await;
        }
        for owner in [Owner::host("a"), Owner::host("a"), Owner::load_balancer()] {
            let answer = self.ipam.remove_owner(&owner, soon()).await;
            self.note(answer).await;
        }
        let answer = self.ipam.release_all_affinities(&Owner::host("b"), ReleaseIf::Empty, soon()).await;
        self.note(answer).await;
        let answer = self.ipam.release_by_handle("net.c1", soon()).await;
        self.note(answer).await;
    }
}

/// Runs the scenario on an in-memory store, whose answers the other stores must repeat, and checks that the expected
/// errors occur.
async fn expected() -> Answered {
    let answered = Teller::new(Arc::new(kv_mvcc::memory())).tell().await;
    let failed: Vec<&str> =
        answered.0.iter().filter_map(|part| part.lines().next()).filter(|one| one.starts_with("Err")).collect();
    let refused = ["Settings", "HandleLimit", "OutsidePools", "UnknownNode", "Owner", "Owner", "NotFound"];
    let later = ["ReleaseConflict", "CoolingDown", "NotFound"];
    assert_eq!(failed.len(), refused.len() + later.len(), "{failed:#?}");
    for (error, kind) in failed.iter().zip(refused.into_iter().chain(later)) {
        assert!(error.starts_with(&format!("Err({kind}")), "{kind}: {error}");
    }
    answered
}

fn compare(answered: &Answered, expected: &Answered) {
    for (number, (answered, expected)) in answered.0.iter().zip(&expected.0).enumerate() {
        assert_eq!(answered, expected, "answer {number}");
    }
    assert_eq!(answered.0.len(), expected.0.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verbs_on_sled() {
    let folder = tempfile::tempdir().unwrap();
    let options = OpenOptions::default().with_create(Create::IfMissing);
    let store = backend_sled::open(&folder.path().join("store"), &options).await.unwrap();
    compare(&Teller::new(Arc::new(store.clone())).tell().await, &expected().await);
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verbs_on_redb() {
    let folder = tempfile::tempdir().unwrap();
    let options = OpenOptions::default().with_create(Create::IfMissing);
    let store = backend_redb::open(&folder.path().join("store"), &options).await.unwrap();
    compare(&Teller::new(Arc::new(store.clone())).tell().await, &expected().await);
    store.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verbs_on_etcd() {
    let server = testkit::server::Etcd::start().unwrap();
    let store = EtcdStore::open(&Options::new([server.url()])).unwrap();
    compare(&Teller::new(Arc::new(store)).tell().await, &expected().await);
}
