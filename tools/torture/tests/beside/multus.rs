//! Runs random pods with two networks each on a real etcd. In the first network, Calico's client or Margay assigns the
//! addresses; in the secondary network, only Margay does. Some calls of Calico's client are slow or halt. A model of
//! kube-controllers releases addresses that no pod uses.
//!
//! The environment variable `BESIDE_OPS` sets the minimum number of operations of the test.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options};
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, Bridge, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::{AssignmentMode, NewPool, Owner, keys};
use kv::{Store, StoreExt};

use crate::calico::{Calico, JUST_NOW, LONG_AGO, Pool};
use crate::halting::{Halting, Left};
use crate::judge::Stored;
use crate::kube_controllers::{KubeControllers, Pods};
use crate::random::seed;
use crate::scene::{HOSTS, allocator, attachment, blocks_of, calico, clean_up, everything, judge, prepare, soon};
use crate::turns::{Authors, Commits, Side, noting};
use testkit::server::Etcd;

/// The address pools: one for the first network and one for the secondary network.
const POOLS: [&str; 2] = ["10.0.0.0/26", "10.9.0.0/26"];
const WORKERS: usize = 4;
/// Number of operations between two checks of the store's new revisions.
const SEGMENT: usize = 4_000;

/// The names of the attributes that record the pods of the secondary network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Own,
    /// Calico's attribute names, which earlier versions of Margay wrote for the secondary network.
    Calicos,
}

/// The holder of each acknowledged address, and the errors that the test has found.
#[derive(Clone, Default)]
struct Answered {
    has: Arc<Mutex<BTreeMap<IpAddr, String>>>,
    wrong: Arc<Mutex<Vec<String>>>,
}

impl Answered {
    fn given(&self, ip: IpAddr, pod: &str) {
        if let Some(other) = self.has.lock().unwrap().insert(ip, pod.to_owned()) {
            self.wrong.lock().unwrap().push(format!("{ip} was given to {pod} and is {other}'s"));
        }
    }

    fn leaves(&self, pod: &str) {
        self.has.lock().unwrap().retain(|_, holder| holder != pod);
    }

    fn released(&self, ip: IpAddr, handle: &str) {
        // The address may have been assigned to another pod since this pod released it.
        let is_its = |pod: &&String| handle.ends_with(&format!(".{pod}"));
        if let Some(pod) = self.has.lock().unwrap().get(&ip).filter(is_its) {
            self.wrong.lock().unwrap().push(format!("kube-controllers released {ip} of {handle}, and {pod} has it"));
        }
    }
}

#[derive(Clone)]
struct Field {
    store: Arc<dyn Store>,
    authors: Authors,
    answered: Answered,
    pods: Pods,
    names: Names,
    done: Arc<AtomicUsize>,
    released: Arc<AtomicUsize>,
    left: Left,
}

impl Field {
    fn store_of(&self, side: Side) -> Arc<dyn Store> {
        noting(&self.store, side, &self.authors, &Commits::default())
    }

    fn count(&self) {
        self.done.fetch_add(1, SeqCst);
    }

    fn is_wrong(&self) -> bool {
        !self.answered.wrong.lock().unwrap().is_empty()
    }
}

fn secondary(host: &str, pod: &str) -> Attachment {
    Attachment { network: "macvlan".into(), interface: "net1".into(), ..attachment(host, pod) }
}

/// A worker that starts and ends pods on one host.
struct Worker {
    name: String,
    host: &'static str,
    field: Field,
    random: fastrand::Rng,
}

impl Worker {
    fn request(&self, attachment: Attachment, pool: &str) -> AssignRequest {
        let pod = attachment.container.clone();
        let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
        request.v4_pools = vec![pool.to_owned()];
        request.attributes =
            [("pod", pod), ("namespace", "default".to_owned())].map(|(name, value)| (name.to_owned(), value)).into();
        request
    }

    /// Makes a call with Calico's client. Returns `None` if the client of Calico has halted before one of its store
    /// calls.
    async fn calicos<T, F>(&mut self, pod: &str, pool: Pool, work: impl FnOnce(Calico) -> F) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        self.field.count();
        let (store, fate) = Halting::around(self.field.store_of(Side::Calicos), self.random.u64(..));
        let mut writer = calico(store, self.host, &pool);
        writer.claimed = if self.random.bool() { LONG_AGO } else { JUST_NOW };
        writer.pod = Some(pod.to_owned());
        self.field.left.behind(fate, work(writer)).await
    }

    async fn assign(&self, request: &AssignRequest) -> Option<IpAddr> {
        self.field.count();
        let ipam = allocator(self.field.store_of(Side::Ours));
        match ipam.assign(request, soon()).await {
            Ok(assigned) => Some(assigned[0].ip),
            Err(ipam_core::Error::Exhausted { .. } | ipam_core::Error::BlockLimit) => None,
            Err(error) => panic!("ADD {:?}: {error}", request.attachment),
        }
    }

    async fn release(&self, attachment: &Attachment) {
        self.field.count();
        allocator(self.field.store_of(Side::Ours)).release_attachment(attachment, &[], soon()).await.unwrap();
    }

    /// Runs one pod from its start to its end.
    async fn pod(&mut self, number: usize) {
        let pod = format!("{}-{number}", self.name);
        let handle = format!("net.{pod}");
        let Field { answered, pods, .. } = self.field.clone();
        pods.create(&pod);
        // For one pod in sixteen, the first network uses the pool of the secondary network.
        let pool = POOLS[usize::from(self.random.u32(..16) == 0)];
        let first = if self.random.bool() {
            let own = handle.clone();
            let assigned = self
                .calicos(&pod, blocks_of(pool, 30), |writer| async move { writer.auto_assign(&own, 1).await })
                .await;
            assigned.and_then(Result::ok).unwrap_or_default()
        } else {
            let name = if pool == POOLS[0] { "v4" } else { "lan" };
            let request = self.request(attachment(self.host, &pod), name);
            self.assign(&request).await.into_iter().collect()
        };
        first.iter().for_each(|ip| answered.given(*ip, &pod));
        if !first.is_empty() {
            pods.report(&pod, first.iter().copied());
            if self.random.u32(..3) > 0 {
                let mut request = self.request(secondary(self.host, &pod), "lan");
                request.bridge = (self.field.names == Names::Own).then(Bridge::default);
                if let Some(ip) = self.assign(&request).await {
                    answered.given(ip, &pod);
                }
            }
        }
        if self.random.u32(..4) == 0 {
            tokio::time::sleep(Duration::from_millis(self.random.u64(..60))).await;
        }
        self.disturb(&pod).await;
        answered.leaves(&pod);
        if self.random.bool() {
            pods.delete(&pod);
        }
        self.release(&secondary(self.host, &pod)).await;
        if self.random.u32(..3) == 0 {
            let blocks = blocks_of(pool, 30);
            self.calicos(&pod, blocks, |writer| async move { writer.release_by_handle(&handle).await }).await;
        } else {
            self.release(&attachment(self.host, &pod)).await;
        }
        pods.delete(&pod);
    }

    /// Claims or releases a random block with either Calico's client or Margay.
    async fn disturb(&mut self, pod: &str) {
        let pool = POOLS[self.random.usize(..2)];
        let blocks = blocks_of(pool, 30);
        let cidr = blocks.blocks[self.random.usize(..blocks.blocks.len())].clone();
        let net = cidr.parse().unwrap();
        let owner = Owner::all_of(self.host)[usize::from(pool == POOLS[1])].clone();
        let ipam = allocator(self.field.store_of(Side::Ours));
        match self.random.u32(..24) {
            0 => drop(self.calicos(pod, blocks, |writer| async move { writer.release_affinity(&cidr).await }).await),
            1 => drop(self.calicos(pod, blocks, |writer| async move { writer.release_empty(&cidr).await }).await),
            2 => drop(self.calicos(pod, blocks, |writer| async move { writer.claim_affinity(&cidr).await }).await),
            3 => drop(ipam.release_affinity(&owner, net, ReleaseIf::Any, soon()).await.unwrap()),
            4 => drop(ipam.release_affinity(&owner, net, ReleaseIf::Empty, soon()).await.unwrap()),
            5 => drop(ipam.claim_affinity(&owner, net, soon()).await.unwrap()),
            _ => {}
        }
    }
}

/// Lets the model of kube-controllers check all addresses again and again until `over` is set.
async fn control(field: Field, over: Arc<AtomicBool>) {
    let mut controllers = KubeControllers::new(field.pods.clone());
    let calico = calico(field.store_of(Side::Calicos), HOSTS[0], &blocks_of(POOLS[0], 30));
    while !over.load(SeqCst) {
        field.count();
        for (ip, handle) in controllers.look(&calico).await {
            field.count();
            field.released.fetch_add(1, SeqCst);
            field.answered.released(ip, &handle);
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Runs the workers until `ops` operations are done or the test finds an error. Checks the new revisions in batches,
/// once per [`SEGMENT`] operations.
async fn run(field: &Field, random: &mut fastrand::Rng, ops: usize) {
    let over = Arc::new(AtomicBool::new(false));
    let controllers = tokio::spawn(control(field.clone(), Arc::clone(&over)));
    let (mut at, mut seen) = (0, BTreeMap::new());
    while field.done.load(SeqCst) < ops && !field.is_wrong() {
        let begin = everything(&field.store).await;
        let until = ops.min(field.done.load(SeqCst) + SEGMENT);
        let mut tasks = Vec::new();
        for host in HOSTS {
            for number in 0..WORKERS {
                let name = format!("{host}{number}-{at}");
                let mut worker = Worker { name, host, field: field.clone(), random: random.fork() };
                tasks.push(tokio::spawn(async move {
                    let mut number = 0;
                    while worker.field.done.load(SeqCst) < until && !worker.field.is_wrong() {
                        worker.pod(number).await;
                        number += 1;
                    }
                }));
            }
        }
        for task in tasks {
            task.await.unwrap();
        }
        at += 1;
        let judge = judge(&field.store, &begin, &field.authors).await.unwrap_or_else(|what| panic!("{what}"));
        for (side, count) in judge.seen {
            *seen.entry(side).or_insert(0) += count;
        }
    }
    over.store(true, SeqCst);
    controllers.await.unwrap();
    println!("revisions: {seen:?}");
}

async fn field(server: &Etcd, names: Names) -> Field {
    let store: Arc<dyn Store> = Arc::new(EtcdStore::open(&Options::new([server.url()])).unwrap());
    prepare(&store, POOLS[0], 30).await;
    let lan = NewPool::new("lan", POOLS[1].parse().unwrap()).with_block_size(30);
    let lan = lan.with_assignment_mode(AssignmentMode::Manual);
    allocator(Arc::clone(&store)).create_pool(&lan, None, soon()).await.unwrap();
    store.put(keys::cluster_information(), "{}").await.unwrap();
    Field {
        store,
        authors: Authors::default(),
        answered: Answered::default(),
        pods: Pods::default(),
        names,
        done: Arc::default(),
        released: Arc::default(),
        left: Left::default(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_with_two_networks_live_beside_kube_controllers() {
    let ops = std::env::var("BESIDE_OPS").map_or(2_500, |text| text.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(seed());
    let server = Etcd::start().unwrap();
    let field = field(&server, Names::Own).await;
    let begun = Instant::now();
    run(&field, &mut random, ops).await;
    let (done, released) = (field.done.load(SeqCst), field.released.load(SeqCst));
    println!("{done} operations in {:?}; kube-controllers released {released}", begun.elapsed());
    assert_eq!(*field.answered.wrong.lock().unwrap(), Vec::<String>::new());
    assert!(released > 0, "kube-controllers found nothing");
    field.left.settle().await;
    let stored = Stored::read(&everything(&field.store).await.1);
    println!("left: {} handles", stored.handles.len());
    clean_up(&field.store).await.unwrap_or_else(|what| panic!("{what}"));
}

/// With the attribute names that earlier versions of Margay wrote, kube-controllers releases an address that a pod
/// uses, and the test must detect this.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_with_calico_names_lose_live_address() {
    let mut random = fastrand::Rng::with_seed(seed());
    let server = Etcd::start().unwrap();
    let field = field(&server, Names::Calicos).await;
    // The run ends as soon as an address is wrongly released. The number of operations is large, because
    // kube-controllers makes fewer checks during the same number of operations on a busy machine.
    run(&field, &mut random, 80_000).await;
    let wrong = field.answered.wrong.lock().unwrap().clone();
    assert!(wrong.iter().any(|what| what.contains("kube-controllers released")), "{wrong:?}");
    println!("found out after {} operations: {}", field.done.load(SeqCst), wrong[0]);
}
