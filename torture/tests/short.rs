//! The short form of the torture, on every store. A failure prints its seed; `torture run --seed` takes it.
#![allow(clippy::print_stdout, reason = "what was done is part of the answer")]

use std::path::Path;
use std::time::Duration;

use conformance::patient;
use torture::{Engine, Mode, Plan, PressPlan, Reach, Report};

async fn torture(engine: Engine, mode: Mode, ops: u64) -> Report {
    carry_out(Plan::new(engine, mode, ops, fastrand::u64(..))).await
}

/// With a daemon beside the processes.
async fn served(engine: Engine, ops: u64) -> Report {
    let mut plan = Plan::new(engine, Mode::Processes, ops, fastrand::u64(..));
    plan.way = Reach::Daemon;
    let report = carry_out(plan).await;
    assert!(report.count("operation through the daemon") > ops / 2, "{report}");
    report
}

/// By etcd's API of a daemon.
async fn over_the_api(engine: Engine, ops: u64) -> Report {
    let mut plan = Plan::new(engine, Mode::Processes, ops, fastrand::u64(..));
    plan.way = Reach::Api;
    carry_out(plan).await
}

async fn carry_out(plan: Plan) -> Report {
    let Plan { engine, mode, ops, seed, .. } = plan;
    match torture::run(&plan, Path::new(env!("CARGO_BIN_EXE_torture"))).await {
        Ok(report) => {
            println!("{report}");
            assert!(report.count("operation") >= ops, "{report}");
            assert!(report.revisions > 0, "{report}");
            report
        }
        Err(failure) => panic!("{engine:?} {mode:?}, seed {seed}: {failure}"),
    }
}

/// That the expected troubles have happened.
fn expect(report: &Report, what: &[impl AsRef<str>]) {
    for what in what.iter().map(AsRef::as_ref) {
        assert!(report.count(what) > 0, "no {what}: {report}");
    }
}

const VERBS: [&str; 9] = [
    "ADD",
    "DEL",
    "affinity claim",
    "affinity release",
    "affinity release of a pool",
    "block ensured",
    "node removed",
    "owner changed",
    "pool made again",
];
const FAULTS: [&str; 4] = ["fault: lands late", "fault: reply lost", "fault: request lost", "death"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_memory() {
    let report = torture(Engine::Memory, Mode::InProcess, 6_000).await;
    expect(&report, &VERBS);
    expect(&report, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sled() {
    expect(&torture(Engine::Sled, Mode::InProcess, 3_000).await, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redb() {
    expect(&torture(Engine::Redb, Mode::InProcess, 3_000).await, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_etcd() {
    expect(&torture(Engine::Etcd, Mode::InProcess, 1_000).await, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sled_with_killed_processes() {
    expect(&torture(Engine::Sled, Mode::Processes, 150).await, &["worker killed (SIGKILL)"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redb_with_killed_processes() {
    expect(&torture(Engine::Redb, Mode::Processes, 300).await, &["worker killed (SIGKILL)"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_etcd_with_killed_processes() {
    expect(&torture(Engine::Etcd, Mode::Processes, 500).await, &["worker killed (SIGKILL)"]);
}

/// The daemon was killed, and frozen.
fn expect_trouble(report: &Report) {
    expect(report, &["worker killed (SIGKILL)"]);
    let troubles = ["frozen (SIGSTOP, SIGCONT)", "killed (SIGKILL) and started"];
    expect(report, &troubles.map(|trouble| format!("fault: margay serve {trouble}")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sled_with_killed_processes_and_a_daemon() {
    expect_trouble(&served(Engine::Sled, 600).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redb_with_killed_processes_and_a_daemon() {
    expect_trouble(&served(Engine::Redb, 600).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sled_with_killed_processes_over_the_api() {
    expect_trouble(&over_the_api(Engine::Sled, 600).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redb_with_killed_processes_over_the_api() {
    expect_trouble(&over_the_api(Engine::Redb, 600).await);
}

/// A crowd of clients while processes take the store, for as many seconds as `MARGAY_PRESS_SECONDS` says.
async fn press(engine: &str) {
    let seconds = std::env::var("MARGAY_PRESS_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(10);
    let margay = Path::new(env!("CARGO_BIN_EXE_torture")).with_file_name("margay");
    let (time, max_call) = (Duration::from_secs(seconds), patient(Duration::from_secs(10)));
    // Other tests run beside this one: it only catches what stands still. `torture press` is strict.
    let plan = PressPlan { margay, engine: engine.to_owned(), time, max_call, min_share: 0.1 };
    match torture::press(&plan).await {
        Ok(report) => println!("{report}"),
        Err(failure) => panic!("{engine}: {failure}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_press_on_redb() {
    press("redb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_press_on_sled() {
    press("sled").await;
}
