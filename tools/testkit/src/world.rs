//! Provides a store with pools and nodes, a clock that the test sets, and checks of the store's consistency.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipam_core::assign::{AssignRequest, AssignedAddress, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    Affinity, AffinityState, Block, Document, Handle, IpamConfig, NewPool, Node, Owner, StickyRecord,
};
use ipam_core::sticky::{STICKY, waits_until};
use ipam_core::{Ipam, Nodes, Result};
use kv::{Deadline, Key, Kv, Range, Store, StoreExt};
use kv_mvcc::{Blocking, MemoryTable, MvccStore, Options};
use time::OffsetDateTime;

/// A test store in which the nodes `a`, `b` and `c` are registered.
#[derive(Clone, Debug)]
pub struct World {
    pub store: Arc<dyn Store>,
    pub ipam: Ipam,
    clock: Arc<AtomicI64>,
}

pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

impl World {
    pub async fn new() -> Self {
        Self::of_nodes(kv_mvcc::memory()).await
    }

    /// Creates a store that works on the caller's thread, for tests with a single caller at a time: this store would
    /// run concurrent callers one after another.
    pub async fn of_one_caller() -> Self {
        let options = Options { name: "memory", blocking: Blocking::InPlace, ..Options::default() };
        Self::of_nodes(MvccStore::open(Box::new(MemoryTable::new()), options).unwrap()).await
    }

    async fn of_nodes(store: MvccStore) -> Self {
        let world = Self::on(Arc::new(store), Nodes::Registered);
        for name in ["a", "b", "c"] {
            world.add_node(name, &[]).await;
        }
        world
    }

    pub fn on(store: Arc<dyn Store>, nodes: Nodes) -> Self {
        let clock = Arc::new(AtomicI64::new(1_800_000_000));
        let reading = Arc::clone(&clock);
        let now = move || OffsetDateTime::from_unix_timestamp(reading.load(SeqCst)).unwrap();
        let uids = Mutex::new(0);
        let uid = move || {
            let mut next = uids.lock().unwrap();
            *next += 1;
            format!("00000000-0000-4000-8000-{next:012}")
        };
        let ipam = Ipam::new(Arc::clone(&store), nodes).with_clock(Arc::new(now)).with_uids(Arc::new(uid));
        Self { store, ipam, clock }
    }

    /// Returns an allocator with the test's clock on `store`, a wrapper of the test store.
    pub fn through(&self, store: Arc<dyn Store>) -> Ipam {
        let reading = Arc::clone(&self.clock);
        let now = move || OffsetDateTime::from_unix_timestamp(reading.load(SeqCst)).unwrap();
        Ipam::new(store, Nodes::Registered).with_clock(Arc::new(now))
    }

    /// Creates a pool of four addresses with a cooldown of one minute: three addresses are in use, and the release of
    /// the fourth is dated ten years in the future.
    pub async fn full_but_for_a_release_dated_ahead() -> Self {
        let world = Self::new().await;
        world.add_pool("v4", "10.0.0.0/30").await;
        world.configure(IpamConfig::default().with_cooldown_seconds(60)).await;
        for number in 0..4 {
            world.one("a", &format!("c{number}")).await.unwrap();
        }
        let ten_years = 10 * 365 * 24 * 3600;
        world.pass(ten_years);
        world.release("a", "c1").await;
        world.pass(-ten_years);
        world
    }

    pub fn pass(&self, seconds: i64) {
        self.clock.fetch_add(seconds, SeqCst);
    }

    pub async fn add_node(&self, name: &str, labels: &[(&str, &str)]) {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let node = Node::new(name, labels, "uid", OffsetDateTime::UNIX_EPOCH);
        self.put(keys::resource(ResourceKind::Node, name), &node).await;
    }

    /// Creates a pool whose blocks have four addresses each.
    pub async fn add_pool(&self, name: &str, cidr: &str) {
        let bits = if cidr.contains(':') { 126 } else { 30 };
        self.add(NewPool::new(name, cidr.parse().unwrap()).with_block_size(bits)).await;
    }

    pub async fn add(&self, new: NewPool) {
        self.ipam.create_pool(&new, None, soon()).await.unwrap();
    }

    pub async fn configure(&self, config: IpamConfig) {
        self.put(keys::config(), &config).await;
    }

    pub async fn reserve(&self, cidrs: &[&str]) {
        let networks: Vec<_> = cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect();
        self.ipam.create_reservation("reserved", &networks, soon()).await.unwrap();
    }

    pub async fn put(&self, key: Key, document: &impl Document) {
        self.store.put(key, document.encode().unwrap()).await.unwrap();
    }

    pub async fn value(&self, key: &Key) -> kv::Value {
        self.store.get(key.clone()).await.unwrap().unwrap().value
    }

    pub async fn block(&self, cidr: &str) -> Option<Block> {
        let key = keys::block(cidr.parse().unwrap());
        self.store.get(key.clone()).await.unwrap().map(|kv| Block::decode(&key, kv.value.as_bytes()).unwrap())
    }

    pub async fn affinity(&self, node: &str, cidr: &str) -> Option<AffinityState> {
        let key = keys::affinity(&Owner::Host(node.into()), cidr.parse().unwrap()).unwrap();
        let stored = self.store.get(key.clone()).await.unwrap();
        stored.map(|kv| Affinity::decode(&key, kv.value.as_bytes()).unwrap().state())
    }

    pub async fn assign(&self, request: &AssignRequest) -> Result<Vec<AssignedAddress>> {
        self.ipam.assign(request, soon()).await
    }

    /// Assigns a single IPv4 address to a container on a node.
    pub async fn one(&self, node: &str, container: &str) -> Result<IpAddr> {
        let assigned =
            self.assign(&AssignRequest::new(attachment(node, container), RequestedAddresses::any(1, 0))).await?;
        assert_eq!(assigned.len(), 1);
        Ok(assigned[0].ip)
    }

    pub async fn release(&self, node: &str, container: &str) -> Vec<IpAddr> {
        self.ipam.release_attachment(&attachment(node, container), &[], soon()).await.unwrap()
    }

    /// Returns every key of the store with its value.
    pub async fn dump(&self) -> Vec<Kv> {
        self.store.list(Range::All).await.unwrap().kvs
    }

    /// Fails if the store's blocks, handles and affinities do not agree.
    pub async fn check(&self) {
        consistent(&self.dump().await);
    }
}

/// Returns the addresses that an attachment holds.
pub async fn held(ipam: &Ipam, attachment: &Attachment) -> Vec<IpAddr> {
    ipam.compare(attachment, &[], &[], soon()).await.unwrap().held
}

/// Returns the attachment of a container's interface `eth0` in the network `net`.
pub fn attachment(node: &str, container: &str) -> Attachment {
    Attachment {
        network: "net".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: node.into(),
        boot: Some("boot0001".into()),
    }
}

/// Fails if the blocks, handles and affinities in `kvs` do not agree: each handle must count exactly its addresses in
/// blocks, each owned block must have a confirmed affinity, and each affinity must belong to a block of the same owner.
pub fn consistent(kvs: &[Kv]) {
    let mut held: BTreeMap<String, BTreeMap<String, i64>> = BTreeMap::new();
    let mut owned = Vec::new();
    for kv in kvs.iter().filter(|kv| keys::parse_block(&kv.key).is_some()) {
        let block = Block::decode(&kv.key, kv.value.as_bytes()).unwrap();
        for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            if let Some(name) = entry.get(STICKY) {
                let record = kvs.iter().find(|kv| kv.key == keys::sticky(name));
                let record = record.map(|kv| StickyRecord::decode(&kv.key, kv.value.as_bytes()).unwrap());
                let knows = record.is_some_and(|record| record.addresses.iter().any(|one| one.address == ip));
                assert!(knows, "{ip} is kept by {name}, whose record does not have it");
            }
            if waits_until(entry).is_some() {
                continue;
            }
            let blocks = held.entry(entry.handle().unwrap().to_owned()).or_default();
            *blocks.entry(block.cidr().to_string()).or_default() += 1;
        }
        match block.owner() {
            Some(owner) => owned.push(keys::affinity(&owner, block.cidr()).unwrap()),
            None => assert!(!block.is_empty(), "{} is empty and has no owner", block.cidr()),
        }
    }
    let mut counted = BTreeMap::new();
    for kv in kvs {
        if let Some(id) = keys::parse_handle(&kv.key) {
            let handle = Handle::decode(&kv.key, kv.value.as_bytes()).unwrap();
            let blocks: BTreeMap<String, i64> = handle.blocks().map(|(cidr, n)| (cidr.to_string(), n)).collect();
            counted.insert(id.to_owned(), blocks);
        }
    }
    assert_eq!(held, counted, "what blocks hold, and what handles count");
    let mut affine: Vec<Key> = Vec::new();
    for kv in kvs.iter().filter(|kv| keys::parse_affinity(&kv.key).is_some()) {
        let affinity = Affinity::decode(&kv.key, kv.value.as_bytes()).unwrap();
        assert_eq!(affinity.state(), AffinityState::Confirmed, "{}", kv.key);
        affine.push(kv.key.clone());
    }
    owned.sort();
    affine.sort();
    assert_eq!(owned, affine, "blocks with an owner, and affinities");
}
