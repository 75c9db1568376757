//! Compares the stores: the conformance rules that each store keeps, the time of a durable commit and of opening, and
//! the results of torture, kills and power cuts. The command `make scoreboard` inserts the printed page into the book.
#![allow(clippy::unwrap_used, reason = "a failed measurement panics")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints the page and its progress")]

#[path = "../../tests/support/tested.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod tested;

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use datastore::{Create, Location};
use kv::StoreExt;
use serde_json::Value;
use tested::{command, drivers};
use testkit::server;

const COMMITS: u32 = 500;
const VALUE_BYTES: usize = 1024;
const OPENINGS: usize = 20;
/// Maximum time to wait for a store that another process uses, or for a daemon to start listening.
const WAIT: Duration = Duration::from_secs(30);

/// The environment variables, with their values, that set how much the torture, kill and power-cut tests do.
const LONG_SETTINGS: [(&str, &str); 3] =
    [("MARGAY_TORTURE_OPS", "20000"), ("MARGAY_CRASH_ROUNDS", "100"), ("MARGAY_POWER_ROUNDS", "60")];
/// The scoreboard's table rows for the long tests, each with its test program and test name.
const LONG_TESTS: [(&str, &str, &str); 3] = [
    ("20,000 operations of torture", "programs", "torture_finds_nothing"),
    ("100 kills", "kills", "kills_leave_all_or_nothing"),
    ("60 power cuts", "cuts", "power_cuts_lose_nothing"),
];

/// A store under measurement: its location, its folder and its servers; opening the location creates the store.
struct Place {
    location: Location,
    /// The folder with the store's files; `None` for a store without files.
    folder: Option<PathBuf>,
    /// Keeps the measured store's servers and temporary folders alive as long as this value.
    _kept: Vec<Box<dyn Any>>,
}

/// A running daemon; dropping a `Daemon` kills its process.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the kinds of stores to compare: memory, the local engines, etcd, and a daemon.
fn kinds() -> Vec<String> {
    let local = drivers().local().map(|driver| driver.facts().name.to_owned()).collect::<Vec<_>>();
    [vec!["memory".to_owned()], local, vec!["etcd".to_owned(), "serve".to_owned()]].concat()
}

fn place(kind: &str) -> Place {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    match kind {
        "memory" => Place { location: drivers().memory(), folder: None, _kept: Vec::new() },
        "etcd" => {
            let etcd = server::Etcd::start().unwrap();
            let location = drivers().parse(&etcd.url().replace("http:", "etcd:")).unwrap();
            let data = etcd.data();
            Place { location, folder: Some(data), _kept: vec![Box::new(etcd)] }
        }
        "serve" => {
            let store = format!("redb://{}", path.display());
            let created =
                Command::new(command()).args(["--store", &store, "store", "create", "--format", "2"]).output();
            assert!(created.unwrap().status.success());
            let address = server::dead_address().unwrap();
            let mut serve = Command::new(command());
            serve.args(["--store", &store, "serve", "--insecure-loopback", "--listen", &format!("http://{address}")]);
            let daemon = Daemon(serve.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
            let begun = Instant::now();
            while std::net::TcpStream::connect(address).is_err() {
                assert!(begun.elapsed() < WAIT, "the daemon does not listen");
                thread::sleep(Duration::from_millis(10));
            }
            let location = drivers().parse(&format!("etcd://{address}")).unwrap();
            Place { location, folder: Some(path), _kept: vec![Box::new(daemon), Box::new(folder)] }
        }
        engine => {
            let location = drivers().of_engine(engine, &path).unwrap();
            Place { location, folder: Some(path), _kept: vec![Box::new(folder)] }
        }
    }
}

/// Returns the groups of conformance rules, in the order of `SEMANTICS.md`, and the group of each rule.
fn groups() -> (Vec<String>, BTreeMap<String, String>) {
    let (mut groups, mut of_rule) = (Vec::<String>::new(), BTreeMap::new());
    let mut heading = String::new();
    for line in kv::SEMANTICS.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            text.clone_into(&mut heading);
        } else if let Some((rule, _)) = line.strip_prefix("- **").and_then(|line| line.split_once("**"))
            && rule.chars().any(|letter| letter.is_ascii_digit())
        {
            if groups.last() != Some(&heading) {
                groups.push(heading.clone());
            }
            of_rule.insert(rule.to_owned(), heading.clone());
        }
    }
    (groups, of_rule)
}

/// Runs the conformance cases on an empty store; returns the numbers of passed, failed and ignored cases per group of
/// rules, and the failed cases.
fn judge(place: &Place, of_rule: &BTreeMap<String, String>) -> (BTreeMap<String, [u32; 3]>, Vec<String>) {
    let url = place.location.to_string();
    let output = Command::new(command()).args(["conformance", &url, "-o", "json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{url}: {error}: {}", String::from_utf8_lossy(&output.stderr)));
    let (mut counts, mut failed) = (BTreeMap::<String, [u32; 3]>::new(), Vec::new());
    for case in report["cases"].as_array().unwrap() {
        let text = |member: &str| case[member].as_str().unwrap_or_default();
        let of = counts.entry(of_rule[text("rule")].clone()).or_default();
        match text("result") {
            "passed" => of[0] += 1,
            "ignored" => of[2] += 1,
            _ => {
                of[1] += 1;
                failed.push(format!("{} ({})", text("name"), text("rule")));
            }
        }
    }
    (counts, failed)
}

/// Returns the median of the durations, in milliseconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn bytes_below(path: &Path) -> io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return Ok(metadata.blocks() * 512);
    }
    path.read_dir()?.map(|entry| bytes_below(&entry?.path())).sum()
}

/// Measures the time of a commit, the time of opening the store, and the disk space after the commits, as strings for
/// the scoreboard's table.
fn measure(place: &Place) -> [String; 3] {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let options = Create::IfMissing.with_wait(WAIT);
        let open = datastore::open(&place.location, &options).await.unwrap();
        let mut commits = Vec::new();
        for number in 0..COMMITS {
            let begun = Instant::now();
            open.store().put(format!("/scoreboard/{number}"), vec![7; VALUE_BYTES]).await.unwrap();
            commits.push(begun.elapsed());
        }
        open.close().await.unwrap();
        let commit = format!("{:.2} ms", median(commits));
        let Some(folder) = place.folder.as_deref() else {
            return [commit, "-".to_owned(), "-".to_owned()];
        };
        let size = format!("{:.1} MiB", bytes_below(folder).unwrap() as f64 / f64::from(1 << 20));
        let mut openings = Vec::new();
        for _ in 0..OPENINGS {
            let begun = Instant::now();
            let open = datastore::open(&place.location, &Create::Never.with_wait(WAIT)).await.unwrap();
            open.store().get("/scoreboard/0").await.unwrap().unwrap();
            openings.push(begun.elapsed());
            open.close().await.unwrap();
        }
        [commit, format!("{:.2} ms", median(openings)), size]
    })
}

/// Runs one of the long tests on an engine, and returns its result as a string for the scoreboard's table.
fn run_long_test(engine: &str, program: &str, test: &str) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--quiet", "--profile", "ci", "-p", "plugged", "--test", program, "--", test]);
    let output = cargo.env("MARGAY_PLUGGED", engine).envs(LONG_SETTINGS).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(out.contains("1 passed") || out.contains("1 failed"), "{test} was not run: {out}{err}");
    if !output.status.success() {
        eprintln!("{out}{err}");
    }
    if output.status.success() { "nothing lost" } else { "**failed**" }.to_owned()
}

fn row<T: Deref<Target = str>>(name: &str, cells: impl IntoIterator<Item = T>) {
    let cells: Vec<String> = cells.into_iter().map(|cell| format!(" {} |", &*cell)).collect();
    println!("| {name} |{}", cells.concat());
}

fn main() {
    // Arguments that start with `-` are ignored, because Cargo passes options such as `--bench` to this program.
    let wanted: Vec<String> = env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let kinds: Vec<String> =
        kinds().into_iter().filter(|kind| wanted.is_empty() || wanted.iter().any(|name| kind == name)).collect();
    let (groups, of_rule) = groups();
    let (mut judged, mut measured, mut long_tests) = (Vec::new(), Vec::new(), Vec::new());
    for kind in &kinds {
        eprintln!("scoreboard: {kind}: the rules");
        judged.push(judge(&place(kind), &of_rule));
        eprintln!("scoreboard: {kind}: times");
        measured.push(measure(&place(kind)));
        let is_local = drivers().local().any(|driver| driver.facts().name == kind);
        long_tests.push(LONG_TESTS.map(|(what, program, test)| {
            if !is_local {
                return "-".to_owned();
            }
            eprintln!("scoreboard: {kind}: {what}");
            run_long_test(kind, program, test)
        }));
    }
    row("", kinds.iter().map(String::as_str));
    println!("|---|{}", "---|".repeat(kinds.len()));
    let cell = |[passed, failed, ignored]: [u32; 3]| match (passed, failed) {
        (0, 0) if ignored > 0 => "not run".to_owned(),
        (passed, 0) => format!("{passed}"),
        (passed, failed) => format!("{passed}, **{failed} failed**"),
    };
    for group in &groups {
        row(group, judged.iter().map(|(counts, _)| cell(counts.get(group).copied().unwrap_or_default())));
    }
    let sums = judged.iter().map(|(counts, _)| {
        counts.values().fold([0; 3], |sum, count| [sum[0] + count[0], sum[1] + count[1], sum[2] + count[2]])
    });
    row("**All cases**", sums.map(cell));
    for (at, name) in ["A durable commit", "Opening", "Size"].into_iter().enumerate() {
        row(name, measured.iter().map(|measured| measured[at].as_str()));
    }
    for (at, (name, _, _)) in LONG_TESTS.into_iter().enumerate() {
        row(name, long_tests.iter().map(|long_tests| long_tests[at].as_str()));
    }
    for (kind, (_, failed)) in kinds.iter().zip(&judged) {
        if !failed.is_empty() {
            println!("\n{kind} failed: {}.", failed.join(", "));
        }
    }
}
