//! Runs the workers as tasks of this process, on one open store that injects faults.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::PendingCommitFolder;
use datastore::{Create, Scope};
use ipam_core::pending_commits::PendingCommits;
use kv::Store;
use kv::wrap::FaultyStore;
use tokio::sync::watch;

use crate::Failure;
use crate::chaos::{self, Chaos};
use crate::checker::Checker;
use crate::command::{Plan, Report, Servers};
use crate::faults::{Broken, Late, Newest, NoIntents, Observed, Sabotage, injected};
use crate::ledger::Ledger;
use crate::members::{CLUSTER_FAULTS, Cluster, Service};
use crate::scene::{self, Access, open_etcd};
use crate::worker::{Deaths, Worker};

/// Maximum number of revisions by which the checker may lag behind the workers. Every store under test keeps a history
/// of more than `LEAD` revisions.
const LEAD: i64 = 1_000;
/// Maximum time until the checker has checked a new revision.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// The open store of a run and, for etcd, the thread that injects faults into the etcd servers.
struct Place {
    /// The store for the checker and for the preparation.
    store: Arc<dyn Store>,
    /// The stores of the workers: one for all, or one for each node.
    stores: Vec<Arc<dyn Store>>,
    chaos: Option<Chaos>,
    service: Arc<Service>,
}

async fn open(plan: &Plan, folder: &Path, ledger: &Arc<Ledger>) -> Result<Place, Failure> {
    let service: Arc<Service> = Arc::default();
    let location = match plan.scope() {
        Scope::Process => plan.in_memory(),
        Scope::Machine => plan.in_folder(&folder.join("store")),
        Scope::Cluster if plan.servers == Servers::Three => {
            let cluster = Cluster::start(Arc::clone(&service))?;
            let stores = (0..plan.nodes).map(|node| cluster.open_client(node)).collect::<kv::Result<_>>()?;
            let store = cluster.open(0)?;
            let chaos = Chaos::begin(cluster, plan.seed, Arc::clone(ledger));
            return Ok(Place { store, stores, chaos: Some(chaos), service });
        }
        Scope::Cluster => {
            let server = chaos::start_etcd()?;
            let store = open_etcd(&server.url())?;
            let chaos = Chaos::begin(server, plan.seed, Arc::clone(ledger));
            return Ok(Place { stores: vec![Arc::clone(&store)], store, chaos: Some(chaos), service });
        }
    };
    let store = scene::open(&location, Create::IfMissing).await?.store();
    Ok(Place { stores: vec![Arc::clone(&store)], store, chaos: None, service })
}

pub(crate) async fn run(plan: &Plan) -> Result<Report, Failure> {
    let begun = Instant::now();
    let folder = tempfile::tempdir()?;
    let ledger: Arc<Ledger> = Arc::default();
    let Place { store, stores, chaos, service } = open(plan, folder.path(), &ledger).await?;
    patiently(async || scene::prepare(&store, plan).await).await?;
    let checker = patiently(async || Checker::begin(&store, Arc::clone(&ledger)).await).await?;
    let progress = checker.progress();
    let following = checker.in_the_background(&store);
    let newest = Newest::default();
    let intents: Arc<dyn PendingCommits> = match plan.sabotage {
        Sabotage::Intents => Arc::new(NoIntents),
        _ => Arc::new(PendingCommitFolder::new(folder.path().join("intents"), "torture")),
    };
    let (mut lates, mut accesses) = (Vec::new(), Vec::new());
    for (number, store) in stores.into_iter().enumerate() {
        let seed = plan.seed.wrapping_add(number as u64);
        let broken = Broken::around(store, plan.sabotage);
        let observed: Arc<dyn Store> = Arc::new(Observed::new(broken, newest.clone()));
        let late = Late::new(observed, plan.sabotage.rarity_of_late_commits(), seed ^ 1, Arc::clone(&ledger));
        let slow: Arc<dyn Store> = Arc::new(late.clone());
        let faulty: Arc<dyn Store> = Arc::new(FaultyStore::new(slow, injected(seed ^ 2, Arc::clone(&ledger))));
        accesses.push(Access::open(faulty, newest.clone(), Arc::clone(&intents)));
        lates.push(late);
    }
    let worked = work(plan, &accesses, &ledger, &progress).await;
    service.close();

    // All delayed commits must have happened before the final checks.
    for late in lates {
        late.landed().await;
    }
    let victim = chaos.map(Chaos::end).transpose();
    let ended = match worked.and(victim) {
        Ok(victim) => patiently(async || scene::take_back(&store, plan).await).await.map(|()| victim),
        Err(failure) => Err(failure),
    };
    let revisions = following.end(ended).await?;
    Ok(Report::new(plan, &ledger, revisions, begun, service.outages()))
}

/// Runs all workers until the planned number of operations is done or a violation is found.
async fn work(
    plan: &Plan,
    accesses: &[Access],
    ledger: &Arc<Ledger>,
    progress: &watch::Receiver<i64>,
) -> Result<(), Failure> {
    let mut tasks = Vec::new();
    for number in 0..plan.nodes * plan.workers {
        let node = Plan::node(number % plan.nodes);
        let seed = plan.seed.wrapping_mul(1_000_003).wrapping_add(number as u64);
        let access = accesses[number % plan.nodes % accesses.len()].clone();
        let witness = Arc::clone(ledger);
        let mut worker = Worker::new(access, witness, node, format!("w{number}"), seed, Deaths::Dropped);
        let (ledger, mut progress, plan) = (Arc::clone(ledger), progress.clone(), plan.clone());
        tasks.push(tokio::spawn(async move {
            while !is_done(&plan, &ledger) && ledger.violation().is_none() {
                keep_pace(&worker.access, &mut progress).await?;
                worker.step().await?;
            }
            worker.end().await
        }));
    }
    let mut outcome = Ok(());
    for task in tasks {
        let done = task.await.map_err(|error| Failure(error.to_string())).flatten();
        if let Err(failure) = &done {
            crate::ledger::Witness::failed(&**ledger, failure.0.clone());
        }
        outcome = outcome.and(done);
    }
    outcome
}

/// True if the planned operations are done and each fault of the plan has been injected.
fn is_done(plan: &Plan, ledger: &Ledger) -> bool {
    let is_met = |fault: &str| ledger.counts().contains_key(fault);
    ledger.operations() >= plan.ops && (plan.servers == Servers::One || CLUSTER_FAULTS.into_iter().all(is_met))
}

/// Waits while the checker is too far behind the workers, because the store compacts old revisions that the checker
/// still has to read.
async fn keep_pace(access: &Access, progress: &mut watch::Receiver<i64>) -> Result<(), Failure> {
    let near = |checked: &i64| access.newest() - *checked < LEAD;
    let near = tokio::time::timeout(CALL_TIMEOUT, progress.wait_for(near)).await;
    let ended = near.map(|near| near.is_err());
    match ended {
        Ok(false) => Ok(()),
        Ok(true) => Err(Failure("the checker has ended".into())),
        Err(_) => Err(Failure(format!("the checker stands at revision {}", *progress.borrow()))),
    }
}

/// Calls `what` until it succeeds or [`CALL_TIMEOUT`] has passed, because the server may be down for a while.
async fn patiently<T>(what: impl AsyncFn() -> Result<T, Failure>) -> Result<T, Failure> {
    let until = Instant::now() + CALL_TIMEOUT;
    loop {
        match what().await {
            Err(_) if Instant::now() < until => tokio::time::sleep(Duration::from_millis(50)).await,
            done => return done,
        }
    }
}
