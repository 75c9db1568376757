//! Runs the workers as processes that are killed with SIGKILL, for example between sending a commit and receiving its
//! response.
//!
//! A torture run with worker processes consists of rounds. Each round starts some worker processes under new names,
//! kills each of them a little later, and then deletes the containers of the killed workers, as a container runtime
//! would. A worker prints each operation before it starts, and its result afterwards; what a killed worker has written
//! can still be read from the pipe. While workers use an embedded store, no other process opens it, so the checker
//! checks the new revisions after each round. On etcd, the checker follows the store during the whole run.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use agent::PendingCommitFolder;
use clap::Args;
use datastore::{Create, Drivers, Scope};
use fastrand::Rng;
use kv::{Range, RangeRequest, Store, StoreExt};
use kv_mvcc::FORMAT_WITH_LEASES;
use tokio::sync::watch;

use crate::Failure;
use crate::chaos::{self, Chaos, Daemon, FROZEN, KILLED, Victim};
use crate::checker::Checker;
use crate::command::{Plan, Reach, Report};
use crate::faults::{Newest, Observed};
use crate::ledger::{Ledger, Witness};
use crate::scene::{self, Access, open, open_etcd, open_options};
use crate::worker::{Deaths, Worker, attachment};

/// The store's name in the records of pending commits.
const STORE: &str = "torture";
/// Maximum time until a new worker process prints its first line.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

const HTTP: &str = "http://";

/// The job of a worker process.
#[derive(Clone, Debug, Args)]
pub struct ChildPlan {
    /// The URL of the store, or of a server with etcd's API.
    #[arg(long)]
    at: String,
    /// The folder for pending commits.
    #[arg(long)]
    intents: PathBuf,
    /// The name of the node.
    #[arg(long)]
    node: String,
    /// The prefix of container names.
    #[arg(long)]
    name: String,
    /// The seed of all random decisions.
    #[arg(long)]
    seed: u64,
    /// Connect to the store's daemon if it runs.
    #[arg(long)]
    served: bool,
}

/// Prints the reports of a worker to standard output, one per line.
struct Lines;

impl Lines {
    /// Prints a line to standard output, from which the parent process reads it. If the pipe is closed, the parent
    /// process has ended, so the worker exits.
    fn say(line: &str) {
        let mut out = std::io::stdout().lock();
        if out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush()).is_err() {
            std::process::exit(0);
        }
    }
}

impl Witness for Lines {
    fn adding(&self, container: &str, node: &str) {
        Self::say(&format!("adding {container} {node}"));
    }

    fn added(&self, container: &str, addresses: &[IpAddr], revision: i64) {
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        Self::say(&format!("added {container} {revision} {}", addresses.join(" ")));
    }

    fn deleting(&self, container: &str, revision: i64) {
        Self::say(&format!("deleting {container} {revision}"));
    }

    fn deleted(&self, container: &str, revision: i64) {
        Self::say(&format!("deleted {container} {revision}"));
    }

    fn counted(&self, what: &'static str) {
        Self::say(&format!("counted {what}"));
    }

    fn took(&self, duration: Duration) {
        Self::say(&format!("took {}", duration.as_micros()));
    }

    fn failed(&self, what: String) {
        Self::say(&format!("failed {}", what.replace('\n', " ")));
    }
}

/// Parses a line that a worker printed, and reports its content to the ledger. Returns `None` if the printed line is
/// incomplete.
fn take_down(ledger: &Ledger, line: &str) -> Option<()> {
    let (verb, rest) = line.split_once(' ')?;
    match verb {
        "counted" => ledger.count(rest, 1),
        "took" => ledger.took(Duration::from_micros(rest.parse().ok()?)),
        "failed" => ledger.failed(rest.to_owned()),
        _ => {
            let mut words = rest.split(' ').filter(|word| !word.is_empty());
            let container = words.next()?;
            let second = words.next()?;
            match verb {
                "adding" => ledger.adding(container, second),
                "added" => {
                    let addresses = words.map(str::parse).collect::<Result<Vec<IpAddr>, _>>().ok()?;
                    ledger.added(container, &addresses, second.parse().ok()?);
                }
                "deleting" => ledger.deleting(container, second.parse().ok()?),
                "deleted" => ledger.deleted(container, second.parse().ok()?),
                _ => return None,
            }
        }
    }
    Some(())
}

/// Runs a worker in this process until the process is killed.
///
/// # Errors
/// An error if the store cannot be opened. Returns no error if an operation fails; the worker reports the failure on
/// standard output.
pub async fn be_a_worker(drivers: &Drivers, plan: &ChildPlan) -> Result<(), Failure> {
    let newest = Newest::default();
    let access = if plan.at.starts_with(HTTP) {
        let store = Arc::new(Observed::new(open_etcd(&plan.at)?, newest.clone()));
        Access::open(store, newest, Arc::new(PendingCommitFolder::new(&plan.intents, STORE)))
    } else {
        let location = drivers.parse(&plan.at).map_err(|error| Failure(error.to_string()))?;
        if plan.served { Access::Served(location, newest) } else { Access::Folder(location, newest) }
    };
    let mut worker =
        Worker::new(access, Arc::new(Lines), plan.node.clone(), plan.name.clone(), plan.seed, Deaths::FromOutside);
    loop {
        if let Err(failure) = worker.step().await {
            worker.witness.failed(failure.0);
            return Ok(());
        }
    }
}

struct Process {
    child: Child,
    reader: JoinHandle<()>,
    /// Receives a message for each line that the worker process has printed.
    begun: std::sync::mpsc::Receiver<()>,
    node: String,
    name: String,
}

impl Process {
    fn start(program: &Path, plan: &ChildPlan, ledger: &Arc<Ledger>) -> Result<Self, Failure> {
        let mut child = Command::new(program)
            .args(["work", "--at", &plan.at, "--node", &plan.node, "--name", &plan.name])
            .arg("--intents")
            .arg(&plan.intents)
            .args(["--seed", &plan.seed.to_string()])
            .args(plan.served.then_some("--served"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take().ok_or_else(|| Failure("a worker has no output".into()))?;
        let (tell, begun) = std::sync::mpsc::channel();
        let ledger = Arc::clone(ledger);
        let reader = std::thread::spawn(move || {
            // The last line of a killed worker may be cut off. If the line that announces an operation is cut off, the
            // operation has not begun.
            for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if take_down(&ledger, &line).is_none() {
                    ledger.count("line that was cut off", 1);
                }
                // The receiver may be dropped after it got the message for the worker's first line, so a send error is
                // ignored.
                let _ = tell.send(());
            }
        });
        Ok(Self { child, reader, begun, node: plan.node.clone(), name: plan.name.clone() })
    }

    /// Kills the worker process when `life` has passed since its first line, and waits until all its lines have been
    /// read.
    fn kill_after(mut self, life: Duration) -> Result<(String, String), Failure> {
        let begun = self.begun.recv_timeout(CALL_TIMEOUT);
        std::thread::sleep(life);
        self.child.kill()?;
        self.child.wait()?;
        begun.map_err(|_| Failure(format!("worker {} never said anything", self.name)))?;
        self.reader.join().map_err(|_| Failure("the reader of a worker's output has panicked".into()))?;
        Ok((self.node, self.name))
    }
}

/// How the workers of the run reach the store.
enum Place {
    Folder(PathBuf),
    Server(String),
}

struct Run<'a> {
    plan: &'a Plan,
    program: &'a Path,
    ledger: Arc<Ledger>,
    intents: PathBuf,
    place: Place,
    newest: Newest,
    rng: Rng,
    rounds: u64,
}

pub(crate) async fn run(plan: &Plan, program: &Path) -> Result<Report, Failure> {
    if plan.scope() == Scope::Process {
        return Err(Failure("processes cannot share a store in memory".into()));
    }
    let begun = Instant::now();
    let folder = tempfile::tempdir()?;
    let ledger: Arc<Ledger> = Arc::default();
    let mut run = Run {
        plan,
        program,
        ledger: Arc::clone(&ledger),
        intents: folder.path().join("intents"),
        place: Place::Folder(folder.path().join("store")),
        newest: Newest::default(),
        rng: Rng::with_seed(plan.seed),
        rounds: 0,
    };
    let revisions = match (plan.scope(), plan.way) {
        (Scope::Cluster, _) => {
            let server = chaos::start_etcd()?;
            let url = server.url();
            run.on_a_server(server, url).await?
        }
        (_, Reach::Api) => {
            let (daemon, url) = run.daemon().await?;
            run.on_a_server(daemon, url).await?
        }
        _ => run.in_a_folder().await?,
    };
    Ok(Report::new(plan, &ledger, revisions, begun, Vec::new()))
}

impl Run<'_> {
    /// Runs the rounds of a run on an embedded store, which this process opens after each round to check the new
    /// revisions.
    async fn in_a_folder(&mut self) -> Result<i64, Failure> {
        let Place::Folder(folder) = &self.place else { return Ok(0) };
        let folder = folder.clone();
        let location = self.plan.in_folder(&folder);
        let opened = open(&location, Create::IfMissing).await?;
        let store = opened.store();
        scene::prepare(&store, self.plan).await?;
        let checker = Checker::begin(&store, Arc::clone(&self.ledger)).await?;
        opened.close().await?;
        let chaos = if self.plan.way == Reach::Daemon {
            let daemon = Daemon::start(&self.margay(), &location, None)?;
            Some(Chaos::begin(daemon, self.plan.seed, Arc::clone(&self.ledger)))
        } else {
            None
        };
        let worked = self.rounds_in(&folder, checker).await;
        let daemon = chaos.map(Chaos::end).transpose();
        worked.and_then(|revisions| daemon.map(|_| revisions))
    }

    /// True if the planned operations are done and, for a run with faults, the server process has been frozen and
    /// killed. A run whose server is never frozen or killed ends after ten times the planned number of operations.
    fn is_done(&self) -> bool {
        let operations = self.ledger.operations();
        if operations < self.plan.ops {
            return false;
        }
        let has_troubles = self.plan.way == Reach::Daemon || matches!(self.place, Place::Server(_));
        let counts = self.ledger.counts();
        let met = |trouble: &str| counts.keys().any(|what| what.starts_with("fault: ") && what.ends_with(trouble));
        !has_troubles || (met(FROZEN) && met(KILLED)) || operations >= 10 * self.plan.ops
    }

    async fn rounds_in(&mut self, folder: &Path, mut checker: Checker) -> Result<i64, Failure> {
        let first = checker.replay.revision;
        loop {
            let is_last = self.is_done();
            let left = if is_last { Vec::new() } else { self.round().await? };
            let opened = open(&self.plan.in_folder(folder), Create::Never).await?;
            let store: Arc<dyn Store> = Arc::new(Observed::new(opened.store(), self.newest.clone()));
            catch_up(&mut checker, &store).await?;
            self.clean(&scene::allocator(Arc::clone(&store)), &left).await?;
            if is_last {
                scene::take_back(&store, self.plan).await?;
            }
            catch_up(&mut checker, &store).await?;
            if is_last {
                checker.end(&store).await?;
                opened.close().await?;
                return Ok(checker.replay.revision - first);
            }
            opened.close().await?;
        }
    }

    fn margay(&self) -> PathBuf {
        self.program.with_file_name("margay")
    }

    /// Starts a daemon that offers etcd's API for an embedded store whose format supports leases.
    async fn daemon(&self) -> Result<(Daemon, String), Failure> {
        let Place::Folder(folder) = &self.place else { return Err(Failure("a daemon has a folder".into())) };
        let options = open_options(Create::IfMissing).with_format(FORMAT_WITH_LEASES);
        let location = self.plan.in_folder(folder);
        datastore::open(&location, &options).await?.close().await?;
        let url = format!("{HTTP}{}", chaos::free_address()?);
        let daemon = Daemon::start(&self.margay(), &location, Some(&url))?;
        let begun = Instant::now();
        while let Err(error) = open_etcd(&url)?.range(RangeRequest::new(Range::key("k"))).await {
            if begun.elapsed() > CALL_TIMEOUT {
                return Err(error.into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok((daemon, url))
    }

    /// Runs the rounds of a run on an etcd server, or on a daemon that offers etcd's API. The checker follows the store
    /// during the whole run, while faults are injected into the server.
    async fn on_a_server<V: Victim>(&mut self, server: V, url: String) -> Result<i64, Failure> {
        let store = open_etcd(&url)?;
        self.place = Place::Server(url);
        scene::prepare(&store, self.plan).await?;
        let checker = Checker::begin(&store, Arc::clone(&self.ledger)).await?;
        let chaos = Chaos::begin(server, self.plan.seed, Arc::clone(&self.ledger));
        let following = checker.in_the_background(&store);
        let worked = self.rounds_on(&store).await;
        let server = chaos.end();
        let ended = match worked.and(server) {
            Ok(server) => scene::take_back(&store, self.plan).await.map(|()| server),
            Err(failure) => Err(failure),
        };
        following.end(ended).await
    }

    async fn rounds_on(&mut self, store: &Arc<dyn Store>) -> Result<(), Failure> {
        let observed: Arc<dyn Store> = Arc::new(Observed::new(Arc::clone(store), self.newest.clone()));
        let ipam =
            scene::allocator(observed).with_pending_commits(Arc::new(PendingCommitFolder::new(&self.intents, STORE)));
        while !self.is_done() && self.ledger.violation().is_none() {
            let left = self.round().await?;
            self.clean(&ipam, &left).await?;
        }
        Ok(())
    }

    /// Starts the worker processes of a round and kills each of them after a while. Returns the containers that the
    /// killed workers have not deleted, each as node and name.
    async fn round(&mut self) -> Result<Vec<(String, String)>, Failure> {
        self.rounds += 1;
        let mut killers = Vec::new();
        for number in 0..self.plan.nodes {
            let at = match &self.place {
                Place::Folder(folder) => self.plan.in_folder(folder).to_string(),
                Place::Server(url) => url.clone(),
            };
            let plan = ChildPlan {
                at,
                intents: self.intents.clone(),
                node: Plan::node(number),
                name: format!("r{}p{number}y", self.rounds),
                seed: self.rng.u64(..),
                served: self.plan.way == Reach::Daemon,
            };
            let process = Process::start(self.program, &plan, &self.ledger)?;
            let life = Duration::from_micros(self.rng.u64(1_000..400_000));
            killers.push(tokio::task::spawn_blocking(move || process.kill_after(life)));
        }
        let mut left = Vec::new();
        for killer in killers {
            let (node, name) = killer.await.map_err(|error| Failure(error.to_string())).flatten()?;
            self.ledger.count("worker killed (SIGKILL)", 1);
            left.extend(self.ledger.left_by(&name).into_iter().map(|container| (node.clone(), container)));
        }
        self.ledger.violation().map_or(Ok(left), |what| Err(Failure(what)))
    }

    /// Deletes the containers of killed workers, as a container runtime would.
    async fn clean(&self, ipam: &ipam_core::Ipam, left: &[(String, String)]) -> Result<(), Failure> {
        for (node, container) in left {
            self.ledger.deleting(container, self.newest.get());
            let mut attempts = 0;
            while let Err(error) = ipam.release_attachment(&attachment(node, container), &[], scene::deadline()).await {
                attempts += 1;
                if attempts == 100 {
                    return Err(error.into());
                }
            }
            self.ledger.deleted(container, self.newest.get());
            self.ledger.count("DEL after a kill", 1);
        }
        Ok(())
    }
}

/// Lets the checker check all revisions up to the store's current revision.
async fn catch_up(checker: &mut Checker, store: &Arc<dyn Store>) -> Result<(), Failure> {
    let now = store.list(Range::All).await?.revision.get();
    let (_keep, goal) = watch::channel(Some(now));
    checker.follow(store, goal).await
}
