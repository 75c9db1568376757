//! Runs random operations of Calico's client and of Margay on a real etcd. Some calls of Calico's client are slow, halt
//! for a while, or halt for ever.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use backend_etcd::{EtcdStore, Options};
use ipam_core::affinity::ReleaseIf;
use ipam_core::model::Owner;
use kv::Store;

use crate::calico::{Calico, JUST_NOW, LONG_AGO, Pool};
use crate::halting::{Halting, Left};
use crate::judge::Stored;
use crate::scene::{HOSTS, add, allocator, blocks_of, calico, clean_up, del, everything, judge, prepare, soon};
use crate::turns::{Authors, Commits, Side, noting};
use testkit::server::Etcd;

const POOL: &str = "10.0.0.0/27";
const ROUNDS: usize = 60;

/// Returns the seed of a run: the number in the environment variable `BESIDE_SEED`, or a random number.
pub(crate) fn seed() -> u64 {
    let seed = match std::env::var("BESIDE_SEED") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("BESIDE_SEED has to be a number below 2^64, not {text}")),
        Err(_) => fastrand::u64(..),
    };
    println!("BESIDE_SEED={seed}");
    seed
}

/// The holder of each address whose assignment was acknowledged. Before the release of an address is requested, the
/// address is removed from this map of acknowledged holders.
#[derive(Clone, Default)]
struct Answered(Arc<Mutex<BTreeMap<IpAddr, String>>>);

impl Answered {
    fn given(&self, ip: IpAddr, container: &str) {
        let other = self.0.lock().unwrap().insert(ip, container.to_owned());
        assert_eq!(other, None, "{ip} was given to {container} too");
    }

    fn leaves(&self, container: &str) {
        self.0.lock().unwrap().retain(|_, holder| holder != container);
    }
}

/// A worker of the test on one host, which assigns and releases addresses with Calico's client or with Margay.
struct Worker {
    name: String,
    host: &'static str,
    store: Arc<dyn Store>,
    authors: Authors,
    answered: Answered,
    left: Left,
    random: fastrand::Rng,
    pool: Pool,
}

impl Worker {
    /// Returns a store wrapper that records `side` (Calico or Margay) as the author of its commits.
    fn store_of(&self, side: Side) -> Arc<dyn Store> {
        noting(&self.store, side, &self.authors, &Commits::default())
    }

    /// Makes a call with Calico's client. Returns `None` if the client of Calico has halted before one of its store
    /// calls.
    async fn calicos<T, F>(&mut self, work: impl FnOnce(Calico) -> F) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let noted = self.store_of(Side::Calicos);
        let (store, fate) = Halting::around(noted, self.random.u64(..));
        let mut writer = calico(store, self.host, &self.pool);
        writer.claimed = if self.random.bool() { LONG_AGO } else { JUST_NOW };
        self.left.behind(fate, work(writer)).await
    }

    /// Adds a container with Calico's client and deletes it again. If Calico's client halts during the ADD, the
    /// container's DEL is sent to Margay.
    async fn calico_round(&mut self, round: usize) {
        let container = format!("{}-{round}", self.name);
        let handle = format!("net.{container}");
        let (own, count) = (handle.clone(), self.random.usize(1..3));
        let assigned = self.calicos(|writer| async move { writer.auto_assign(&own, count).await }).await;
        let Some(assigned) = assigned else {
            // A container runtime sends a DEL even after a failed ADD. In this test, the node is switched from Calico
            // to Margay between the ADD and the DEL.
            del(&allocator(self.store_of(Side::Ours)), self.host, &container).await.unwrap();
            return;
        };
        for ip in assigned.unwrap_or_default() {
            self.answered.given(ip, &container);
        }
        let cidr = self.pool.blocks[self.random.usize(..self.pool.blocks.len())].clone();
        match self.random.u32(..6) {
            0 => drop(self.calicos(|writer| async move { writer.release_affinity(&cidr).await }).await),
            1 => drop(self.calicos(|writer| async move { writer.release_empty(&cidr).await }).await),
            2 => drop(self.calicos(|writer| async move { writer.claim_affinity(&cidr).await }).await),
            _ => {}
        }
        self.answered.leaves(&container);
        if self.random.bool() {
            self.calicos(|writer| async move { writer.release_by_handle(&handle).await }).await;
        } else {
            del(&allocator(self.store_of(Side::Ours)), self.host, &container).await.unwrap();
        }
    }

    async fn our_round(&mut self, round: usize) {
        let ipam = allocator(self.store_of(Side::Ours));
        let container = format!("{}-{round}", self.name);
        match add(&ipam, self.host, &container).await {
            Ok(ip) => self.answered.given(ip, &container),
            Err(ipam_core::Error::Exhausted { .. } | ipam_core::Error::BlockLimit) => {}
            Err(error) => panic!("ADD {container}: {error}"),
        }
        let cidr = self.pool.blocks[self.random.usize(..self.pool.blocks.len())].parse().unwrap();
        let owner = Owner::host(self.host);
        match self.random.u32(..6) {
            0 => drop(ipam.release_affinity(&owner, cidr, ReleaseIf::Any, soon()).await.unwrap()),
            1 => drop(ipam.release_affinity(&owner, cidr, ReleaseIf::Empty, soon()).await.unwrap()),
            2 => drop(ipam.claim_affinity(&owner, cidr, soon()).await.unwrap()),
            _ => {}
        }
        self.answered.leaves(&container);
        if self.random.u32(..4) == 0 {
            let handle = format!("net.{container}");
            self.calicos(|writer| async move { writer.release_by_handle(&handle).await }).await;
        } else {
            del(&ipam, self.host, &container).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_steps_on_etcd() {
    let mut random = fastrand::Rng::with_seed(seed());
    let server = Etcd::start().unwrap();
    let store: Arc<dyn Store> = Arc::new(EtcdStore::open(&Options::new([server.url()])).unwrap());
    prepare(&store, POOL, 30).await;
    let (begin, authors, answered) = (everything(&store).await, Authors::default(), Answered::default());
    let left = Left::default();

    let mut tasks = Vec::new();
    for host in HOSTS {
        for number in 0..3 {
            let mut worker = Worker {
                name: format!("{host}{number}"),
                host,
                store: Arc::clone(&store),
                authors: Arc::clone(&authors),
                answered: answered.clone(),
                left: left.clone(),
                random: random.fork(),
                pool: blocks_of(POOL, 30),
            };
            tasks.push(tokio::spawn(async move {
                for round in 0..ROUNDS {
                    match number {
                        0 => worker.our_round(round).await,
                        _ => worker.calico_round(round).await,
                    }
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    left.settle().await;

    let judge = judge(&store, &begin, &authors).await.unwrap_or_else(|what| panic!("{what}"));
    println!("revisions: {:?}", judge.seen);
    assert!(
        judge.seen.get(&Side::Ours) > Some(&100) && judge.seen.get(&Side::Calicos) > Some(&100),
        "{:?}",
        judge.seen
    );
    let stored = Stored::read(&everything(&store).await.1);
    let unfinished = stored.affinities.values().filter(|affinity| !affinity.is_confirmed()).count();
    println!("left unfinished: {unfinished} affinities, {} handles", stored.handles.len());
    clean_up(&store).await.unwrap_or_else(|what| panic!("{what}"));
    drop(server);
}
