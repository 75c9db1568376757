//! The command line of `torture`, which tortures the allocator on a store and says what it found.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is what the program is for")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use datastore::Drivers;

use crate::plan::{Mode, Plan, Reach};
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
