//! Runs the daemon for hours with ADDs, DELs, watches, compactions and hand-overs of the store. The daemon's memory and
//! files must not grow without bound, no address may be assigned twice, and in the end the store must contain exactly
//! the acknowledged addresses.
//!
//! Clients also use etcd's API: they grant and renew leases, let leases expire, and compact the history.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent::{Answer, Del, Verb, VerbRequest};
use datastore::served::{ServedStore, connect, is_trusted, socket};
use datastore::{Create, Drivers, Location};
use etcd_client::{Client, LeaseGrantOptions, PutOptions};
use futures::StreamExt;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use kv::{ErrorKind, Range, Store, StoreExt, WatchRequest};
use tokio::task::JoinSet;
use tokio::time::sleep;
use wire::{DaemonConnection, FrameKind};

use crate::chaos::{self, Daemon};
use crate::scene::open_etcd;

/// Number of clients that concurrently send ADDs and DELs to the daemon.
const CALLERS: usize = 8;
const CONTAINERS: usize = 100;
/// Number of concurrent watches on each interface: the daemon's own socket, and its etcd API.
const WATCHES: usize = 4;
/// Number of clients that hold leases through etcd's API.
const LEASES: usize = 8;
/// The interval at which memory and files are measured, the measurements are printed, and the history is compacted.
const MEASURE: Duration = Duration::from_secs(60);
/// Number of the newest revisions that a compaction keeps.
const KEEP: i64 = 2_000;
/// Maximum duration of one call of a client to the daemon.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Upper limit of the daemon's memory, in MiB.
const MOST_MIB: f64 = 64.0;
/// Upper limit of the size of the store's files in the second half of the run, as a multiple of their size in the first
/// half.
const GROWTH: f64 = 1.5;
const MARGIN_MIB: f64 = 16.0;

/// The plan of a long run: the daemon's program, the store's engine, and the duration.
#[derive(Clone, Debug)]
pub struct SoakPlan {
    /// The path of the program `margay`.
    pub margay: PathBuf,
    /// The store drivers that this program supports.
    pub drivers: Drivers,
    /// The name of the storage engine: sled or redb.
    pub engine: String,
    /// The duration of the long run.
    pub time: Duration,
}

/// The daemon's memory and the store's files at one moment, in MiB.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Duration,
    calls: u64,
    memory: f64,
    files: f64,
    revision: i64,
}

/// The counts of a long run that has found no fault.
#[derive(Debug)]
pub struct SoakReport {
    events: u64,
    leases: u64,
    held: usize,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, calls, memory, files, revision } = self;
        write!(f, "{:>6}s {calls:>8} {revision:>9} {memory:>11.1} {files:>10.1}", at.as_secs())
    }
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { events, leases, held } = self;
        write!(f, "soak: {events} revisions seen by watches, {leases} leases ended, {held} addresses held in the end")
    }
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

struct Shared {
    location: Location,
    over: AtomicBool,
    calls: AtomicU64,
    events: AtomicU64,
    /// Number of leases that expired in time after their last renewal.
    leases: AtomicU64,
    /// For each assigned address, the container that uses it.
    held: Mutex<BTreeMap<IpAddr, String>>,
}

/// Runs the plan. The function `progress` is called with a line of measurements once a minute.
///
/// # Errors
/// An error for the first fault that the long run found.
pub async fn soak(plan: &SoakPlan, progress: impl Fn(String)) -> Result<SoakReport, String> {
    let folder = tempfile::Builder::new().prefix("margay-soak").tempdir().map_err(text)?;
    let path = folder.path().join("store");
    let location = plan.drivers.of_engine(&plan.engine, &path).map_err(text)?;
    margay(plan, &location, &["store", "create", "--format", "2"])?;
    margay(plan, &location, &["pool", "create", "soak", "10.96.0.0/16"])?;
    let api = format!("http://{}", chaos::free_address().map_err(text)?);
    let daemon = Daemon::start(&plan.margay, &location, Some(&api)).map_err(text)?;
    let store = reach(&location).await?;
    let shared = Arc::new(Shared {
        location: location.clone(),
        over: AtomicBool::new(false),
        calls: AtomicU64::new(0),
        events: AtomicU64::new(0),
        leases: AtomicU64::new(0),
        held: Mutex::default(),
    });
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || churn(&shared, caller))
        })
        .collect();
    let mut watches = JoinSet::new();
    for _ in 0..WATCHES {
        watches.spawn(watch(Arc::new(store.clone()), Arc::clone(&shared)));
        watches.spawn(watch(open_etcd(&api).map_err(text)?, Arc::clone(&shared)));
    }
    for number in 0..LEASES {
        let (shared, api) = (Arc::clone(&shared), api.clone());
        watches.spawn(async move { hold_leases(&api, number, &shared.over, &shared.leases).await });
    }
    let measured = measure(plan, &shared, &store, &Server { daemon: &daemon, api: &api }, &path, progress).await;
    shared.over.store(true, Ordering::SeqCst);
    for caller in callers {
        caller.join().map_err(|_| "a caller panicked".to_owned())??;
    }
    // A watch task notices the end of the run only when it receives another event, so one more key is written.
    store.put("/soak/end", "").await.map_err(text)?;
    while let Some(watched) = watches.join_next().await {
        watched.map_err(text)??;
    }
    let samples = measured?;
    drop((store, daemon));
    let held = shared.held.lock().unwrap_or_else(PoisonError::into_inner).len();
    conclude(plan, &shared, held).await?;
    files_bounded(&samples)?;
    let count = |number: &AtomicU64| number.load(Ordering::SeqCst);
    let (events, leases) = (count(&shared.events), count(&shared.leases));
    if leases == 0 && plan.time > MEASURE {
        return Err("no lease has ended".to_owned());
    }
    Ok(SoakReport { events, leases, held })
}

fn margay(plan: &SoakPlan, location: &Location, arguments: &[&str]) -> Result<String, String> {
    let done = Command::new(&plan.margay).args(["--store", &location.to_string()]).args(arguments).output();
    let done = done.map_err(|error| format!("{}: {error}", plan.margay.display()))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(format!("margay {}: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr)))
}

async fn reach(location: &Location) -> Result<ServedStore, String> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        if let Some(store) = connect(location, CALL_TIMEOUT).await {
            return Ok(store);
        }
        sleep(Duration::from_millis(10)).await;
    }
    Err("the daemon does not come up".to_owned())
}

/// Sends ADDs and DELs of containers to the daemon until the run is over.
fn churn(shared: &Shared, caller: usize) -> Result<(), String> {
    let mut own: Vec<(Attachment, IpAddr)> = Vec::new();
    let mut number = 0_u64;
    while !shared.over.load(Ordering::SeqCst) {
        if own.is_empty() || (own.len() < CONTAINERS && fastrand::bool()) {
            number += 1;
            let attachment = Attachment {
                network: "soak".to_owned(),
                container: format!("c{caller}n{number}"),
                interface: "eth0".to_owned(),
                node: "node".to_owned(),
                boot: None,
            };
            let request = AssignRequest::new(attachment.clone(), RequestedAddresses::any(1, 0));
            let answer = ask(shared, Verb::Add(Box::new(request.into())))?;
            let Answer::Assigned(assigned) = answer else { return Err(format!("an ADD came to {answer:?}")) };
            let address = assigned.first().map(|one| one.ip).ok_or("an ADD without an address")?;
            let mut held = shared.held.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(other) = held.insert(address, attachment.container.clone()) {
                return Err(format!("{address} was assigned to {} while {other} has it", attachment.container));
            }
            own.push((attachment, address));
        } else {
            let (attachment, address) = own.swap_remove(fastrand::usize(..own.len()));
            // Removes the address from the map of held addresses before sending the DEL, because the daemon may assign
            // the address again as soon as the DEL has released it.
            shared.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
            let del = Del {
                attachment,
                old_handle: String::new(),
                addresses: vec![address],
                endpoint: None,
                namespace: None,
                vm: None,
            };
            match ask(shared, Verb::Del(del))? {
                Answer::Released(released) if released == [address] => {}
                other => return Err(format!("a DEL of {address} came to {other:?}")),
            }
        }
        shared.calls.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Sends a CNI verb to the daemon over a new connection, as a plugin does.
fn ask(shared: &Shared, verb: Verb) -> Result<Answer, String> {
    let socket = socket(&shared.location).ok_or("no socket")?;
    let connection =
        DaemonConnection::open(&socket, CALL_TIMEOUT, |uid| is_trusted(&shared.location, uid)).map_err(text)?;
    let asked = VerbRequest { within: CALL_TIMEOUT, lock_file: PathBuf::new(), verb };
    connection.ask(FrameKind::Verb, &asked, CALL_TIMEOUT).map_err(text)
}

/// Checks that a watch delivers every revision of the store, in ascending order.
async fn watch(store: Arc<dyn Store>, shared: Arc<Shared>) -> Result<(), String> {
    let mut next = store.range(kv::RangeRequest::new(Range::key("/soak"))).await.map_err(text)?.revision.next();
    loop {
        let request = WatchRequest::new(Range::All, next);
        let mut stream = store.watch(request).await.map_err(text)?;
        while let Some(item) = stream.next().await {
            let batch = match item {
                Ok(batch) => batch,
                Err(error) => match error.kind() {
                    ErrorKind::Compacted { compact_revision } => {
                        next = *compact_revision;
                        break;
                    }
                    _ => return Err(format!("a watch ended: {error}")),
                },
            };
            if batch.revision != next {
                return Err(format!("a watch saw revision {} in place of {next}", batch.revision));
            }
            next = batch.revision.next();
            shared.events.fetch_add(1, Ordering::Relaxed);
            if shared.over.load(Ordering::SeqCst) {
                return Ok(());
            }
        }
    }
}

/// The running daemon, and the URL of its etcd API.
struct Server<'a> {
    daemon: &'a Daemon,
    api: &'a str,
}

/// Until the run is over, repeatedly measures the daemon, compacts its history, and opens the store in this process.
async fn measure(
    plan: &SoakPlan,
    shared: &Shared,
    store: &ServedStore,
    server: &Server<'_>,
    path: &Path,
    progress: impl Fn(String),
) -> Result<Vec<Sample>, String> {
    progress("   time    calls  revision  memory MiB  files MiB".to_owned());
    let begun = Instant::now();
    let mut samples = Vec::new();
    while begun.elapsed() < plan.time {
        sleep(MEASURE.min(plan.time.saturating_sub(begun.elapsed()))).await;
        let answer = store.range(kv::RangeRequest::new(Range::key("/soak"))).await.map_err(text)?;
        let sample = Sample {
            at: begun.elapsed(),
            calls: shared.calls.load(Ordering::Relaxed),
            memory: server.daemon.mib().map_err(text)?,
            files: bytes(path) as f64 / f64::from(1 << 20),
            revision: answer.revision.get(),
        };
        if samples.last().is_some_and(|last: &Sample| last.calls == sample.calls) {
            return Err("the callers stand still".to_owned());
        }
        progress(sample.to_string());
        if sample.memory > MOST_MIB {
            return Err(format!("the daemon had {:.1} MiB of memory; the limit is {MOST_MIB}", sample.memory));
        }
        samples.push(sample);
        if answer.revision.get() > KEEP {
            compact(server.api, answer.revision.get() - KEEP).await?;
        }
        let open = datastore::open(&shared.location, &Create::Never.with_wait(CALL_TIMEOUT)).await.map_err(text)?;
        open.close().await.map_err(text)?;
    }
    Ok(samples)
}

fn bytes(path: &Path) -> u64 {
    let Ok(metadata) = path.symlink_metadata() else { return 0 };
    if !metadata.is_dir() {
        return metadata.len();
    }
    path.read_dir().into_iter().flatten().flatten().map(|entry| bytes(&entry.path())).sum()
}

/// Checks that the store contains exactly the acknowledged addresses after the run.
async fn conclude(plan: &SoakPlan, shared: &Shared, held: usize) -> Result<(), String> {
    margay(plan, &shared.location, &["store", "verify"])?;
    margay(plan, &shared.location, &["ipam", "check"])?;
    let open = datastore::open(&shared.location, &Create::Never.with_wait(CALL_TIMEOUT)).await.map_err(text)?;
    let census = ipam_core::Ipam::new(open.store(), ipam_core::Nodes::FirstSeen)
        .census(kv::Deadline::after(Duration::from_secs(60)))
        .await
        .map_err(text);
    open.close().await.map_err(text)?;
    let used: usize = census?.nodes.values().map(|node| node.used).sum();
    if used == held { Ok(()) } else { Err(format!("{held} addresses were acknowledged, and the store has {used}")) }
}

/// Fails if the store's files kept growing in the second half of the run.
fn files_bounded(samples: &[Sample]) -> Result<(), String> {
    let (first, second) = samples.split_at(samples.len() / 2);
    let most = |samples: &[Sample]| samples.iter().map(|sample| sample.files).fold(0.0, f64::max);
    let (half, end) = (most(first), most(second));
    if !first.is_empty() && end > half * GROWTH + MARGIN_MIB {
        return Err(format!("the files grew from {half:.1} MiB in the first half to {end:.1} MiB in the second"));
    }
    Ok(())
}

/// Time to live of each lease in seconds, the shortest that the daemon grants.
const LEASE_TTL_SECONDS: i64 = 2;
/// A lease must expire at most this long after its last renewal. `LEASE_GONE_TIMEOUT` is long, because the daemon may
/// hand over the store before the lease expires.
const LEASE_GONE_TIMEOUT: Duration = Duration::from_secs(15);
/// The interval between two renewals of a lease.
const RENEWAL_INTERVAL: Duration = Duration::from_millis(500);
const RENEWALS: u32 = 10;

/// Grants and renews leases one after another until `over` is set, and counts the leases that expired in time.
///
/// # Errors
/// Any error of the API; an error if a key disappears while its lease is renewed, or still exists long after the last
/// renewal.
async fn hold_leases(url: &str, number: usize, over: &AtomicBool, ended: &AtomicU64) -> Result<(), String> {
    let mut client = Client::connect([url], None).await.map_err(text)?;
    let key = format!("/soak/lease/{number}");
    while !over.load(Ordering::SeqCst) {
        let lease = client.lease_grant(LEASE_TTL_SECONDS, None::<LeaseGrantOptions>).await.map_err(text)?.id();
        client.put(key.clone(), "held", Some(PutOptions::new().with_lease(lease))).await.map_err(text)?;
        let (mut keeper, mut answers) = client.lease_keep_alive(lease).await.map_err(text)?;
        for _ in 0..RENEWALS {
            let begun = Instant::now();
            keeper.keep_alive().await.map_err(text)?;
            let answer = answers.message().await.map_err(text)?.ok_or("the stream of renewals ended")?;
            if answer.ttl() != LEASE_TTL_SECONDS {
                return Err(format!("a renewal of a lease came to {} s", answer.ttl()));
            }
            if client.get(key.clone(), None).await.map_err(text)?.kvs().is_empty() {
                return Err(format!("{key} is gone although its lease was renewed {:?} ago", begun.elapsed()));
            }
            sleep(RENEWAL_INTERVAL).await;
        }
        let last = Instant::now();
        while !client.get(key.clone(), None).await.map_err(text)?.kvs().is_empty() {
            if last.elapsed() > LEASE_GONE_TIMEOUT {
                return Err(format!("{key} is there {:?} after the last renewal of its lease", last.elapsed()));
            }
            sleep(Duration::from_millis(100)).await;
        }
        ended.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Compacts the history before `revision` with a request to etcd's API.
///
/// # Errors
/// Any error of the API, unless another client has already compacted the revision.
pub(crate) async fn compact(url: &str, revision: i64) -> Result<(), String> {
    let mut client = Client::connect([url], None).await.map_err(text)?;
    match client.compact(revision, None).await {
        Err(error) if !error.to_string().contains("has been compacted") => Err(text(error)),
        _ => Ok(()),
    }
}
