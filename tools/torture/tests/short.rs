//! Runs a short torture on every kind of store, as a test. A failed test prints the seed of its run, for use with
//! `torture run --seed`.
#![allow(clippy::print_stdout, reason = "prints a summary of the run")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use conformance::patient;
use torture::{CLUSTER_FAULTS, Mode, Plan, PressPlan, Reach, Report};

fn plan(store: &str, mode: Mode, ops: u64) -> Plan {
    Plan::new(&stores::drivers(), store, mode, ops, fastrand::u64(..)).unwrap_or_else(|failure| panic!("{failure}"))
}

async fn torture(store: &str, mode: Mode, ops: u64) -> Report {
    carry_out(plan(store, mode, ops)).await
}

/// Runs worker processes that connect to a daemon, or open the store's files while the daemon does not answer.
async fn served(store: &str, ops: u64) -> Report {
    let mut plan = plan(store, Mode::Processes, ops);
    plan.way = Reach::Daemon;
    let report = carry_out(plan).await;
    assert!(report.count("operation through the daemon") > ops / 2, "{report}");
    report
}

/// Runs worker processes that use the etcd API of a daemon.
async fn over_the_api(store: &str, ops: u64) -> Report {
    let mut plan = plan(store, Mode::Processes, ops);
    plan.way = Reach::Api;
    carry_out(plan).await
}

async fn carry_out(plan: Plan) -> Report {
    let Plan { mode, ops, seed, .. } = plan;
    match torture::run(&plan, Path::new(env!("CARGO_BIN_EXE_torture"))).await {
        Ok(report) => {
            println!("{report}");
            assert!(report.count("operation") >= ops, "{report}");
            assert!(report.revisions > 0, "{report}");
            report
        }
        Err(failure) => panic!("{plan:?}, {mode:?}, seed {seed}: {failure}"),
    }
}

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
async fn run_in_memory() {
    let report = torture("memory", Mode::InProcess, 6_000).await;
    expect(&report, &VERBS);
    expect(&report, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_sled() {
    expect(&torture("sled", Mode::InProcess, 3_000).await, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_redb() {
    expect(&torture("redb", Mode::InProcess, 3_000).await, &FAULTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_etcd() {
    expect(&torture("etcd", Mode::InProcess, 1_000).await, &FAULTS);
}

/// Runs the program, because a run on a cluster moves its whole process into a network namespace.
#[test]
fn run_on_etcd_with_three_members() {
    let mut torture = Command::new(env!("CARGO_BIN_EXE_torture"));
    let output = torture.args(["run", "--store", "etcd", "--three", "--ops", "500"]).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    assert!(output.status.success() && said.contains(" 0 violations"), "{said}");
    for what in CLUSTER_FAULTS.iter().chain(&["leader killed: another leader after ", "a commit of each client after "])
    {
        assert!(said.contains(what), "no {what}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_sled_with_killed_processes() {
    expect(&torture("sled", Mode::Processes, 150).await, &["worker killed (SIGKILL)"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_redb_with_killed_processes() {
    expect(&torture("redb", Mode::Processes, 300).await, &["worker killed (SIGKILL)"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_etcd_with_killed_processes() {
    expect(&torture("etcd", Mode::Processes, 500).await, &["worker killed (SIGKILL)"]);
}

/// Checks that the daemon was killed and frozen during the run.
fn expect_trouble(report: &Report) {
    expect(report, &["worker killed (SIGKILL)"]);
    let troubles = ["frozen (SIGSTOP, SIGCONT)", "killed (SIGKILL) and started"];
    expect(report, &troubles.map(|trouble| format!("fault: margay serve {trouble}")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_sled_with_killed_processes_and_daemon() {
    expect_trouble(&served("sled", 600).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_redb_with_killed_processes_and_daemon() {
    expect_trouble(&served("redb", 600).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_sled_with_killed_processes_over_api() {
    expect_trouble(&over_the_api("sled", 600).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_on_redb_with_killed_processes_over_api() {
    expect_trouble(&over_the_api("redb", 600).await);
}

/// Runs `torture press`, with clients and with processes that open the store directly, for `MARGAY_PRESS_SECONDS`
/// seconds.
async fn press(engine: &str) {
    let seconds = std::env::var("MARGAY_PRESS_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(10);
    let margay = Path::new(env!("CARGO_BIN_EXE_torture")).with_file_name("margay");
    let (time, max_call) = (Duration::from_secs(seconds), patient(Duration::from_secs(10)));
    // Other tests run at the same time, so the time limits of this test are so loose that only a hanging call exceeds
    // them. The command `torture press` has strict time limits.
    let plan =
        PressPlan { drivers: stores::drivers(), margay, engine: engine.to_owned(), time, max_call, min_share: 0.1 };
    match torture::press(&plan).await {
        Ok(report) => println!("{report}"),
        Err(failure) => panic!("{engine}: {failure}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn press_on_redb() {
    press("redb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn press_on_sled() {
    press("sled").await;
}
