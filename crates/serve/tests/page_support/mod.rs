//! Creates example stores for tests of the web page, and serves these stores over HTTP.
#![allow(dead_code, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod browser;
pub(crate) mod client;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use conformance::patient;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Attribute, Block, Document, IpReservation, Labels, NewPool, Node, Owner};
use ipam_core::reservations::Reservations;
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Store, StoreExt};
use kv_mvcc::{Clock, MemoryTable, MvccStore, Options};
use serve::accept::Listener;
use serve::http::{ClientLimits, DaemonInfo, PageContext, serve};
use serve::metrics::Metrics;
use time::OffsetDateTime;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

const DAY: u64 = 24 * 60 * 60;

/// The name of a pod that tries to inject a script into the web page.
pub(crate) const SCRIPT: &str = "<script>alert(1)</script>";

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Returns an allocator on a new store in memory.
pub(crate) fn empty() -> Ipam {
    empty_with_clock().0
}

/// Like [`empty`], but also returns the number of seconds by which the allocator's clock lags behind the real time.
fn empty_with_clock() -> (Ipam, Arc<AtomicU64>) {
    let behind = Arc::new(AtomicU64::new(0));
    let clock = {
        let behind = Arc::clone(&behind);
        Clock::new(move || SystemTime::now() - Duration::from_secs(behind.load(Ordering::Relaxed)))
    };
    let options = Options { name: "memory", clock, ..Options::default() };
    let store = MvccStore::open(Box::new(MemoryTable::new()), options).unwrap();
    (Ipam::new(Arc::new(store), Nodes::FirstSeen), behind)
}

pub(crate) async fn add(
    ipam: &Ipam,
    node: &str,
    container: &str,
    pod: &str,
    wanted: RequestedAddresses,
    pools: &[&str],
) -> Vec<String> {
    let attachment = Attachment {
        network: "k8s-pod-network".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: node.into(),
        boot: None,
    };
    let mut request = AssignRequest::new(attachment, wanted);
    let now = ipam_core::timestamps::go_string(OffsetDateTime::now_utc());
    let (namespace, pod) = pod.split_once(" in ").map_or(("shop", pod), |(pod, namespace)| (namespace, pod));
    for (name, value) in [("pod", pod), ("namespace", namespace), ("timestamp", &now)] {
        request.attributes.insert(name.into(), value.into());
    }
    request.v4_pools = pools.iter().filter(|pool| !pool.contains("v6")).map(|pool| (*pool).to_owned()).collect();
    request.v6_pools = pools.iter().filter(|pool| pool.contains("v6")).map(|pool| (*pool).to_owned()).collect();
    let assigned = ipam.assign(&request, soon()).await.unwrap();
    assigned.iter().map(|one| one.ip.to_string()).collect()
}

pub(crate) async fn pool(ipam: &Ipam, name: &str, cidr: &str, block_size: u8) {
    let new = NewPool::new(name, cidr.parse().unwrap()).with_block_size(block_size);
    ipam.create_pool(&new, None, soon()).await.unwrap();
}

async fn register(store: &dyn Store, node: &str) {
    let document = Node::new(node, Labels::new(), node, OffsetDateTime::now_utc());
    store.put(keys::resource(ResourceKind::Node, node), document.encode().unwrap()).await.unwrap();
}

/// Returns a container id in the form that runtimes use.
pub(crate) fn container(number: usize) -> String {
    format!("{number:08x}").repeat(8)
}

/// Creates three pools that have filled for five days: a nearly full pool, an IPv6 pool, and a pool with a reservation.
/// The store has three nodes, a borrowed address, an address in cooldown, and an inconsistency.
pub(crate) async fn three_pools() -> Ipam {
    let (ipam, behind) = empty_with_clock();
    behind.store(5 * DAY, Ordering::Relaxed);
    let store = Arc::clone(ipam.store());
    for node in ["worker-1", "worker-2", "worker-3"] {
        register(&*store, node).await;
    }
    ipam.change_config(|config| config.with_cooldown_seconds(3600), soon()).await.unwrap();
    pool(&ipam, "default", "10.65.0.0/22", 26).await;
    pool(&ipam, "edge", "192.168.40.0/26", 28).await;
    pool(&ipam, "fabric-v6", "fd80:65::/112", 122).await;
    let reserved = ["10.65.3.0/25".parse().unwrap()];
    let document = IpReservation::new("printers", &reserved, "uid", OffsetDateTime::now_utc());
    let key = keys::resource(ResourceKind::IpReservation, "printers");
    store.put(key, document.encode().unwrap()).await.unwrap();
    for number in 0..150 {
        behind.store(5 * DAY * (150 - number as u64) / 150, Ordering::Relaxed);
        let node = format!("worker-{}", number % 3 + 1);
        let pod = ["web-7d9f", "cart-55c8", "db-0 in data", "dns-8kx in kube-system"][number % 4];
        let pod = match pod.split_once(" in ") {
            Some((pod, namespace)) => format!("{pod}{number} in {namespace}"),
            None => format!("{pod}{number}"),
        };
        add(&ipam, &node, &container(number), &pod, RequestedAddresses::any(1, 0), &["default"]).await;
    }
    for number in 200..250 {
        let node = format!("worker-{}", number % 3 + 1);
        add(
            &ipam,
            &node,
            &container(number),
            &format!("edge-{number}"),
            RequestedAddresses::any(1, 1),
            &["edge", "fabric-v6"],
        )
        .await;
    }
    add(&ipam, "worker-1", &container(999), SCRIPT, RequestedAddresses::any(1, 0), &["default"]).await;
    for number in 0..20 {
        ipam.release_by_handle(&format!("k8s-pod-network.{}", container(number)), soon()).await.unwrap();
    }
    // The handle refers to a block that does not exist.
    let block = "10.65.2.192/26".parse().unwrap();
    let mut handle = ipam_core::model::Handle::new();
    handle.increment(block, 1);
    store.put(keys::handle("k8s-pod-network.gone"), handle.encode().unwrap()).await.unwrap();
    ipam
}

/// Creates a pool with `blocks` claimed blocks, some of which are full.
pub(crate) async fn many_blocks(blocks: usize) -> Ipam {
    let ipam = empty();
    let store = Arc::clone(ipam.store());
    pool(&ipam, "large", "10.0.0.0/8", 26).await;
    let now = OffsetDateTime::now_utc();
    for place in 0..blocks {
        let first = Ipv4Addr::from(0x0a00_0000 + u32::try_from(place).unwrap() * 64);
        let node = format!("node-{:03}", place % 200);
        let cidr = format!("{first}/26").parse().unwrap();
        let mut block = Block::new(cidr, Some(&Owner::host(&node)), now, None).unwrap();
        let wanted = place * 7919 % 65;
        for number in 0..wanted.min(3) {
            let attributes =
                [("node", node.clone()), ("pod", format!("pod-{place}-{number}")), ("namespace", "load".into())];
            let attributes: BTreeMap<_, _> = attributes.map(|(name, value)| (name.to_owned(), value)).into();
            let holder = Attribute::new(Some(&format!("net.{}", container(place * 64 + number))), attributes);
            _ = block.assign_auto(if number == 2 { wanted - 2 } else { 1 }, &holder, &Reservations::default());
        }
        store.put(keys::block(cidr), block.encode().unwrap()).await.unwrap();
    }
    ipam
}

/// A daemon's HTTP server, on its own port.
pub(crate) struct Daemon {
    pub(crate) address: SocketAddr,
    pub(crate) ipam: Ipam,
    pub(crate) metrics: Arc<Metrics>,
    // The runtime is dropped last, because the connections run as tasks of the runtime.
    stop: Option<oneshot::Sender<()>>,
    pub(crate) runtime: Runtime,
}

pub(crate) fn shown(ipam: &Ipam) -> PageContext {
    let about = DaemonInfo {
        store: "redb:///var/lib/margay/ipam.redb".into(),
        engine: "redb".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        node: "worker-1".into(),
        boot: None,
    };
    PageContext::new(ipam.clone().into(), about, Arc::new(Metrics::new()))
}

impl Daemon {
    /// Serves the web page for the store that `fill` creates.
    pub(crate) fn new<F: Future<Output = Ipam>>(fill: impl FnOnce() -> F) -> Self {
        Self::with_limits(fill, ClientLimits::default())
    }

    pub(crate) fn with_limits<F: Future<Output = Ipam>>(fill: impl FnOnce() -> F, limits: ClientLimits) -> Self {
        Self::at(fill, limits, 0)
    }

    pub(crate) fn at<F: Future<Output = Ipam>>(fill: impl FnOnce() -> F, limits: ClientLimits, port: u16) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let ipam = runtime.block_on(fill());
        let shown = shown(&ipam).with_hosts(vec!["ipam.lan".into()]).with_limits(limits);
        let metrics = Arc::clone(&shown.metrics);
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, port))).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let until = async move { _ = stopped.await };
        runtime.spawn(serve(Listener::Tcp(listener), Arc::new(shown), until));
        Self { address, ipam, metrics, stop: Some(stop), runtime }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Stops the daemon, and waits until the daemon no longer answers.
    pub(crate) fn stop(&mut self) {
        self.stop.take();
        let until = std::time::Instant::now() + patient(Duration::from_secs(10));
        while std::net::TcpStream::connect(self.address).is_ok() {
            assert!(std::time::Instant::now() < until, "it still answers");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
