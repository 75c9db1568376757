//! Runs a real Kubernetes on one node with Margay as its network, and plays scenarios: `make kubernetes`.
//!
//! The node is a machine of its own, made of Linux namespaces with their own folders; the host stays unchanged. The
//! results are printed as a table.
#![allow(clippy::unwrap_used, reason = "a scenario fails by panicking")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

mod cluster;
mod compare;
mod machine;
mod network;
mod pods;
mod programs;
mod remains;
mod scenarios;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{env, thread};

use crate::cluster::Cluster;
use crate::machine::INTERRUPTED;
use crate::network::{Network, Setup, Store};
use crate::scenarios::{ALL, Scenario};

const USAGE: &str = "\
usage: kubernetes-lab [SCENARIO...]
variables: NETWORK=calico|bridge|host-local  STORE=etcd|redb|sled  SERVE=1  CONTAINERD=2  KEEP_LOGS=1
scenarios (by default all but compare):";

/// One row of the table.
struct Outcome {
    scenario: &'static str,
    setup: String,
    time: Duration,
    result: Result<String, String>,
}

fn main() -> ExitCode {
    let names: Vec<String> = env::args().skip(1).collect();
    let chosen: Vec<&Scenario> = ALL.iter().filter(|scenario| wanted(scenario, &names)).collect();
    let (Some(setup), false) = (setup(), chosen.len() < names.len()) else {
        eprintln!("{USAGE}");
        for scenario in ALL {
            eprintln!("  {:<16} {}", scenario.name, scenario.shows);
        }
        return ExitCode::from(2);
    };
    if !nix::unistd::geteuid().is_root() {
        eprintln!("make kubernetes needs root: containers and their networks do");
        return ExitCode::FAILURE;
    }
    let interrupted = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).unwrap();
    }
    thread::spawn(move || {
        while !interrupted.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(100));
        }
        INTERRUPTED.store(true, Ordering::Relaxed);
    });
    let outcomes = play(setup, &chosen);
    print_table(&outcomes);
    match outcomes.iter().all(|outcome| outcome.result.is_ok()) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Returns whether a scenario is among the named ones, or without names among the default ones.
fn wanted(scenario: &Scenario, names: &[String]) -> bool {
    if names.is_empty() { scenario.name != "compare" } else { names.iter().any(|name| name == scenario.name) }
}

/// Reads the set-up from the environment; None if a variable has an unknown value.
fn setup() -> Option<Setup> {
    let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    let network = match variable("NETWORK").as_deref() {
        None | Some("calico") => Network::Routed,
        Some("bridge") => Network::Bridge,
        Some("host-local") => Network::HostLocal,
        Some(_) => return None,
    };
    let store = match variable("STORE").as_deref() {
        None | Some("etcd") => Store::Etcd,
        Some("redb") => Store::Redb,
        Some("sled") => Store::Sled,
        Some(_) => return None,
    };
    let serve = variable("SERVE").is_some_and(|value| value != "0");
    Some(Setup { network, store, serve, status: programs::containerd().is_some() })
}

/// Plays scenarios on one cluster. After a failed scenario, the next one gets a new cluster.
fn play(setup: Setup, scenarios: &[&'static Scenario]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    let mut running: Option<Cluster> = None;
    for scenario in scenarios.iter().filter(|scenario| (scenario.fits)(setup)) {
        if INTERRUPTED.load(Ordering::Relaxed) {
            break;
        }
        let mut cluster = running.take().unwrap_or_else(|| Cluster::new(setup));
        if !cluster.has_started() {
            println!("starting Kubernetes: {setup}");
            let started = attempt("start", &mut cluster, setup, |cluster| {
                cluster.start();
                String::new()
            });
            if started.result.is_err() {
                outcomes.push(started);
                break;
            }
            println!("its node is ready after {:.1} s", started.time.as_secs_f64());
        }
        println!("{}: {}", scenario.name, scenario.shows);
        let outcome = attempt(scenario.name, &mut cluster, setup, scenario.run);
        if let Ok(seen) = &outcome.result {
            println!("  {seen}");
            running = Some(cluster);
        }
        outcomes.push(outcome);
    }
    outcomes
}

/// Plays one scenario. If it fails, keeps the logs of all programs, and prints where they are.
fn attempt(name: &'static str, cluster: &mut Cluster, setup: Setup, run: fn(&mut Cluster) -> String) -> Outcome {
    let begun = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| run(cluster))).map_err(|panic| said(&*panic));
    let time = begun.elapsed();
    if result.is_err() || env::var_os("KEEP_LOGS").is_some() {
        let kept = logs_folder(name);
        cluster.keep_logs(&kept);
        let state = if result.is_err() { "has FAILED (see above)" } else { "is done" };
        println!("{name} {state}; the logs of all programs are in {}", kept.display());
    }
    Outcome { scenario: name, setup: setup.to_string(), time, result }
}

/// Returns a new folder for the logs of a failed scenario, beside the programs.
fn logs_folder(scenario: &str) -> PathBuf {
    programs::kubernetes().join("logs").join(format!("{scenario}-{}", std::process::id()))
}

fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
}

/// Prints the results as a table in Markdown.
fn print_table(outcomes: &[Outcome]) {
    println!("\n| Scenario | Set-up | Time | Result |\n|---|---|---|---|");
    for Outcome { scenario, setup, time, result } in outcomes {
        let result = match result {
            Ok(seen) => seen.as_str(),
            Err(_) => "**failed**",
        };
        println!("| {scenario} | {setup} | {:.0} s | {result} |", time.as_secs_f64());
    }
}
