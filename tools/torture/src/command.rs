//! Parses the command line of `torture`, plans a run (its store, number of operations and seed), and prints the report
//! of the run.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the program prints its results")]

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use datastore::{Driver, Drivers, Location, Scope};

use crate::Failure;
use crate::faults::Sabotage;
use crate::ledger::Ledger;
use crate::members::{self, Outage};
use crate::press::PressPlan;
use crate::processes::ChildPlan;
use crate::soak::SoakPlan;

#[derive(Debug, Parser)]
#[command(about = "Tortures the allocator on a store: many nodes at once, faults and kills, every revision checked")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs many nodes on one store, with faults and kills.
    Run {
        /// The name of the store.
        #[arg(long, default_value = "memory")]
        store: String,
        /// How workers run.
        #[arg(long, value_enum, default_value = "in-process")]
        mode: Mode,
        /// The minimum number of operations.
        #[arg(long, default_value_t = 10_000)]
        ops: u64,
        /// The seed of all random decisions. Default: a random seed, which is printed.
        #[arg(long)]
        seed: Option<u64>,
        /// The number of nodes.
        #[arg(long, default_value_t = 4)]
        nodes: usize,
        /// The number of workers on each node.
        #[arg(long, default_value_t = 3)]
        workers: usize,
        /// Run the daemon of an embedded store beside the workers, and freeze and kill it now and then. The program
        /// `margay` must be in the folder of this program.
        #[arg(long)]
        serve: bool,
        /// Let the workers reach an embedded store only through etcd's API of its daemon. The daemon is frozen and
        /// killed now and then and releases the store to other processes. The program `margay` must be in the folder of
        /// this program.
        #[arg(long, conflicts_with = "serve")]
        api: bool,
        /// Run an etcd cluster of three members, each in its own network namespace: leaders are killed, members cut
        /// off, slowed down, replaced, defragmented and restarted, and certificates exchanged. This needs root.
        #[arg(long)]
        three: bool,
    },
    /// Runs the daemon of an embedded store for hours.
    Soak {
        /// The path of the program `margay`.
        #[arg(long)]
        margay: PathBuf,
        /// The engine: sled or redb.
        #[arg(long, default_value = datastore::DEFAULT_ENGINE)]
        store: String,
        /// The duration in hours.
        #[arg(long)]
        hours: f64,
    },
    /// Loads the daemon of an embedded store with many clients while other processes take the store.
    Press {
        /// The path of the program `margay`.
        #[arg(long)]
        margay: PathBuf,
        /// The engine: sled or redb.
        #[arg(long)]
        store: String,
        /// The duration in seconds.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Runs one worker of a run with processes.
    #[command(hide = true)]
    Work(ChildPlan),
}

/// Runs the program `torture` with these store drivers.
pub fn main(drivers: &Drivers) -> ExitCode {
    let arguments = Arguments::parse();
    if matches!(arguments.command, Command::Run { three: true, .. })
        && let Err(error) = members::enter_namespace()
    {
        return failed(&error);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    match arguments.command {
        Command::Run { store, mode, ops, seed, nodes, workers, serve, api, three } => {
            let seed = seed.unwrap_or_else(|| fastrand::u64(..));
            let mut plan = match Plan::new(drivers, &store, mode, ops, seed) {
                Ok(plan) => plan,
                Err(failure) => return failed(&failure),
            };
            println!("torture: {store} {mode:?}, {ops} operations, seed {seed}");
            plan.nodes = nodes;
            plan.workers = workers;
            plan.servers = if three { Servers::Three } else { Servers::One };
            plan.way = match (serve, api) {
                (true, _) => Reach::Daemon,
                (_, true) => Reach::Api,
                _ => Reach::Files,
            };
            let program = match std::env::current_exe() {
                Ok(program) => program,
                Err(error) => return failed(&error),
            };
            match runtime.block_on(crate::run(&plan, &program)) {
                Ok(report) => println!("{report}"),
                Err(failure) => {
                    eprintln!("torture: VIOLATION, seed {seed}\n{failure}");
                    return ExitCode::FAILURE;
                }
            }
        }
        Command::Soak { margay, store, hours } => {
            let plan = SoakPlan {
                drivers: drivers.clone(),
                margay,
                engine: store,
                time: Duration::from_secs_f64(hours * 3600.0),
            };
            match runtime.block_on(crate::soak(&plan, |line| println!("{line}"))) {
                Ok(report) => println!("{report}"),
                Err(failure) => {
                    eprintln!("soak: {failure}");
                    return ExitCode::FAILURE;
                }
            }
        }
        Command::Press { margay, store, seconds } => {
            let (time, max_call) = (Duration::from_secs(seconds), Duration::from_secs(2));
            let plan =
                PressPlan { drivers: drivers.clone(), margay, engine: store, time, max_call, min_share: 1.0 / 3.0 };
            match runtime.block_on(crate::press(&plan)) {
                Ok(report) => println!("{report}"),
                Err(failure) => {
                    eprintln!("torture: {failure}");
                    return ExitCode::FAILURE;
                }
            }
        }
        Command::Work(plan) => {
            if let Err(failure) = runtime.block_on(crate::be_a_worker(drivers, &plan)) {
                return failed(&failure);
            }
        }
    }
    ExitCode::SUCCESS
}

fn failed(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("torture: {error}");
    ExitCode::FAILURE
}

/// How the workers of a run are executed, and how a worker dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Tasks of this process, on a store that injects faults. A death is a dropped future.
    InProcess,
    /// Processes that are killed with SIGKILL.
    Processes,
}

/// How worker processes reach an embedded store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Reach {
    /// Workers open the store's files.
    #[default]
    Files,
    /// `margay serve` holds the store. Workers connect to the daemon, and open the files if it does not answer.
    Daemon,
    /// `margay serve` holds the store. Workers use etcd's API only.
    Api,
}

/// The number of etcd servers of a run on etcd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Servers {
    /// One etcd, which is frozen and killed.
    #[default]
    One,
    /// A cluster of three members, with the faults of clusters ([`CLUSTER_FAULTS`](crate::CLUSTER_FAULTS)).
    Three,
}

/// The plan of a run: its store, number of operations, workers and seed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    drivers: Drivers,
    /// The driver of the store under test. Each run creates a new store, in memory, in a temporary folder or on a new
    /// etcd server.
    driver: &'static dyn Driver,
    /// Whether the workers of the run are tasks or processes.
    pub mode: Mode,
    /// The minimum number of operations in the run.
    pub ops: u64,
    /// The seed of all random decisions in the run.
    pub seed: u64,
    /// The number of simulated nodes.
    pub nodes: usize,
    /// The number of workers on each node.
    pub workers: usize,
    /// How worker processes reach an embedded store.
    pub way: Reach,
    /// The number of etcd servers.
    pub servers: Servers,
    /// Which part of the run is broken on purpose, to prove that the checks detect it. Only runs in [`Mode::InProcess`]
    /// can be sabotaged.
    pub sabotage: Sabotage,
}

impl Plan {
    /// Plans a run of `ops` operations on the store `store`, with four nodes and three workers on each node.
    ///
    /// # Errors
    /// An error if no driver has the name `store`.
    pub fn new(drivers: &Drivers, store: &str, mode: Mode, ops: u64, seed: u64) -> Result<Self, Failure> {
        let driver = drivers.named(store).ok_or_else(|| {
            let names: Vec<_> = drivers.iter().map(|driver| driver.facts().name).collect();
            Failure(format!("there is no store {store:?}: name one of {}", names.join(", ")))
        })?;
        let (nodes, workers, way, servers, sabotage) = (4, 3, Reach::Files, Servers::One, Sabotage::None);
        Ok(Self { drivers: drivers.clone(), driver, mode, ops, seed, nodes, workers, way, servers, sabotage })
    }

    pub(crate) fn store(&self) -> &'static str {
        self.driver.facts().name
    }

    pub(crate) fn scope(&self) -> Scope {
        self.driver.facts().scope
    }

    pub(crate) fn in_folder(&self, folder: &Path) -> Location {
        self.drivers.at_folder(self.driver, folder)
    }

    pub(crate) fn in_memory(&self) -> Location {
        self.drivers.memory()
    }

    pub(crate) fn node(number: usize) -> String {
        format!("node{number}")
    }
}

/// The report of a run that found no violation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The plan of the reported run.
    pub plan: Plan,
    /// The number of times that each kind of event happened in the run, by the event's name.
    pub counts: BTreeMap<String, u64>,
    /// The duration of the slowest call of the allocator.
    pub slowest_call: Duration,
    /// The times without service after faults of a cluster.
    pub outages: Vec<Outage>,
    /// The number of revisions that the checker checked.
    pub revisions: i64,
    /// The duration of the run.
    pub duration: Duration,
}

impl Report {
    pub(crate) fn new(plan: &Plan, ledger: &Ledger, revisions: i64, begun: Instant, outages: Vec<Outage>) -> Self {
        let (counts, slowest_call) = (ledger.counts(), ledger.slowest_call());
        Self { plan: plan.clone(), counts, slowest_call, outages, revisions, duration: begun.elapsed() }
    }

    /// Returns the number of times that the named event happened in the run.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { mode, seed, nodes, workers, .. } = &self.plan;
        writeln!(f, "{} {mode:?}, seed {seed}, {nodes} nodes with {workers} workers each", self.plan.store())?;
        writeln!(
            f,
            "{} operations, {} revisions checked, 0 violations, {:.1} s",
            self.count("operation"),
            self.revisions,
            self.duration.as_secs_f64()
        )?;
        for (what, count) in self.counts.iter().filter(|(what, _)| *what != "operation") {
            writeln!(f, "  {count:>9}  {what}")?;
        }
        writeln!(f, "  slowest call: {} ms", self.slowest_call.as_millis())?;
        for outage in &self.outages {
            writeln!(f, "  {outage}")?;
        }
        Ok(())
    }
}
