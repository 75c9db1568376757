//! The command line of `torture`, which tortures the allocator on a store and says what it found; the plan of a run, which is the store,
//! the amount and the seed; and its report.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is what the program is for")]

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use datastore::{Driver, Drivers, Location, Scope};

use crate::Failure;
use crate::faults::Sabotage;
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
    /// Tortures a store.
    Run {
        /// The name of the store.
        #[arg(long, default_value = "memory")]
        store: String,
        /// The kind of the workers.
        #[arg(long, value_enum, default_value = "in-process")]
        mode: Mode,
        /// How many operations.
        #[arg(long, default_value_t = 10_000)]
        ops: u64,
        /// Where random decisions come from; a random one if it is not given.
        #[arg(long)]
        seed: Option<u64>,
        /// How many nodes.
        #[arg(long, default_value_t = 4)]
        nodes: usize,
        /// How many workers on each.
        #[arg(long, default_value_t = 3)]
        workers: usize,
        /// Have the daemon of an embedded store run beside the processes, frozen and killed now and then. The program `margay` must
        /// be beside this one.
        #[arg(long)]
        serve: bool,
        /// Have the processes reach an embedded store by etcd's API of its daemon alone, which is frozen and killed now and then, and
        /// hands the store over. The program `margay` must be beside this one.
        #[arg(long, conflicts_with = "serve")]
        api: bool,
    },
    /// Has the daemon of an embedded store work for hours.
    Soak {
        /// The program `margay`.
        #[arg(long)]
        margay: PathBuf,
        /// Which store: sled or redb.
        #[arg(long, default_value = datastore::DEFAULT_ENGINE)]
        store: String,
        /// For how many hours.
        #[arg(long)]
        hours: f64,
    },
    /// Has a crowd of clients press the daemon of an embedded store while processes take the store.
    Press {
        /// The program `margay`.
        #[arg(long)]
        margay: PathBuf,
        /// Which store: sled or redb.
        #[arg(long)]
        store: String,
        /// For how many seconds.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Is a worker of a run with processes.
    #[command(hide = true)]
    Work(ChildPlan),
}

/// The whole program, made with these stores.
pub fn main(drivers: &Drivers) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    match Arguments::parse().command {
        Command::Run { store, mode, ops, seed, nodes, workers, serve, api } => {
            let seed = seed.unwrap_or_else(|| fastrand::u64(..));
            let mut plan = match Plan::new(drivers, &store, mode, ops, seed) {
                Ok(plan) => plan,
                Err(failure) => return failed(&failure),
            };
            println!("torture: {store} {mode:?}, {ops} operations, seed {seed}");
            plan.nodes = nodes;
            plan.workers = workers;
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

/// The kind of the workers, and their deaths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Tasks of this process, on a store that fails; a death is a dropped future.
    InProcess,
    /// Processes that SIGKILL ends.
    Processes,
}

/// How processes reach an embedded store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Reach {
    /// They open its files.
    #[default]
    Files,
    /// `margay serve` has the store. They connect to it, and open the files if it does not answer.
    Daemon,
    /// `margay serve` has the store, and they reach it by etcd's API alone.
    Api,
}

/// A plan.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The stores of this program.
    drivers: Drivers,
    /// The kind of the store, which is made anew: in memory, in a temporary folder, or an etcd of its own.
    driver: &'static dyn Driver,
    /// The kind of the workers.
    pub mode: Mode,
    /// How many operations, at least.
    pub ops: u64,
    /// Where all random decisions come from.
    pub seed: u64,
    /// How many nodes.
    pub nodes: usize,
    /// How many workers on each.
    pub workers: usize,
    /// How processes reach an embedded store.
    pub way: Reach,
    /// The part that is broken on purpose; in one process only.
    pub sabotage: Sabotage,
}

impl Plan {
    /// A plan for `ops` operations on a store of this name, by three workers on each of four nodes.
    ///
    /// # Errors
    /// A name that none of these drivers has.
    pub fn new(drivers: &Drivers, store: &str, mode: Mode, ops: u64, seed: u64) -> Result<Self, Failure> {
        let driver = drivers.named(store).ok_or_else(|| {
            let names: Vec<_> = drivers.iter().map(|driver| driver.facts().name).collect();
            Failure(format!("there is no store {store:?}: name one of {}", names.join(", ")))
        })?;
        let (nodes, workers, way, sabotage) = (4, 3, Reach::Files, Sabotage::None);
        Ok(Self { drivers: drivers.clone(), driver, mode, ops, seed, nodes, workers, way, sabotage })
    }

    /// The name of the store.
    pub(crate) fn store(&self) -> &'static str {
        self.driver.facts().name
    }

    /// The machines that use the store.
    pub(crate) fn scope(&self) -> Scope {
        self.driver.facts().scope
    }

    /// The store in a folder.
    pub(crate) fn in_folder(&self, folder: &Path) -> Location {
        self.drivers.at_folder(self.driver, folder)
    }

    /// A store in memory.
    pub(crate) fn in_memory(&self) -> Location {
        self.drivers.memory()
    }

    /// The name of a node.
    pub(crate) fn node(number: usize) -> String {
        format!("node{number}")
    }
}

/// The report of a run without violations.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The plan.
    pub plan: Plan,
    /// How often each thing happened.
    pub counts: BTreeMap<String, u64>,
    /// How many revisions were checked.
    pub revisions: i64,
    /// How long it took.
    pub duration: Duration,
}

impl Report {
    /// How often something happened.
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
        Ok(())
    }
}
