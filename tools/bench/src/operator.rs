//! Measures the operator's commands on full stores, and how much a running command delays an ADD.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use ipam_core::model::keys;
use kv::{Compare, Op, Store, Txn};
use kv_local::OpenOptions;
use kv_mvcc::MvccStore;
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use crate::contender::Contender;
use crate::fill::{block_number, block_of};
use crate::findings::Findings;
use crate::report::{Times, median};
use crate::{Outcome, Programs};
use testkit::server::Etcd;

/// The number of nodes in the measured store.
const NODES: u32 = 100;
const BLOCKS: u32 = 100;
const USED: u64 = 50;
const ADDRESSES: u64 = NODES as u64 * BLOCKS as u64 * USED;
/// Number of concurrent commits while the store is filled before the measurement.
const FILLERS: usize = 64;
/// The number of measurements of each command.
const ROUNDS: usize = 3;
/// Number of measured ADDs while an operator's command runs.
const ADDS: u32 = 200;
/// Upper bound of the duration of each operator's command, in seconds.
const SECONDS: f64 = 5.0;
const MEMORY: f64 = 300.0;
const HELD_UP: f64 = 50.0;
/// Lower bound of the rate of a migration, in addresses per second.
const MOVED: f64 = 50_000.0;

/// The duration and the peak memory of an operator's command.
#[derive(Clone, Copy)]
struct Cost {
    seconds: f64,
    mib: f64,
}

/// Measures all commands on all kinds of stores and, on redb, ADDs while a command runs.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let folder = folder.join("operator");
    std::fs::create_dir(&folder)?;
    let contender = Contender::margay(programs, &folder, "margay-ipam on redb", "redb");
    contender.add("resident")?;
    Builder::new_current_thread().enable_all().build()?.block_on(fill(&folder.join("ipam.redb")))?;
    let etcd = Etcd::start()?;
    let url = |engine: &str, name: &str| format!("{engine}://{}", folder.join(name).display());
    let source = url("redb", "ipam.redb");
    let targets = [
        ("redb", url("redb", "copy.redb")),
        ("etcd", etcd.url().replace("http://", "etcd://")),
        ("sled", url("sled", "copy.sled")),
    ];
    let mut findings = Findings::default();
    moves(programs, &source, &targets, &mut findings)?;
    looks(programs, &targets, &folder, &mut findings)?;
    beside(programs, &contender, &source, &folder, &mut findings)?;
    Ok(findings)
}

/// Adds nodes, blocks and addresses to a store that the plugin has created.
async fn fill(path: &Path) -> Outcome<()> {
    let store = backend_redb::open(path, &OpenOptions::default()).await?;
    let mut under_way = JoinSet::new();
    // Tries to create one more block than `NODES * BLOCKS`, because the plugin's own node already has one of the
    // blocks.
    for number in 0..=NODES * BLOCKS {
        let cidr = block_number(number)?;
        let first_container = u64::from(number) * 64;
        let documents = block_of(&format!("other{}", number / BLOCKS), cidr, first_container..first_container + USED)?;
        let writes: Vec<Op> = documents.into_iter().map(|(key, value)| Op::put(key, value)).collect();
        under_way.spawn(commit(
            store.clone(),
            Txn::new().with_compares([Compare::absent(keys::block(cidr))]).with_success(writes),
        ));
        while under_way.len() >= FILLERS {
            under_way.join_next().await.transpose()?.transpose()?;
        }
    }
    while let Some(done) = under_way.join_next().await {
        done??;
    }
    Ok(store.close().await?)
}

async fn commit(store: MvccStore, txn: Txn) -> kv::Result<()> {
    store.txn(txn).await.map(drop)
}

/// Runs a command of `margay` until the command ends. Returns the command's duration and peak memory.
fn cost(programs: &Programs, arguments: &[&str]) -> Outcome<Cost> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("peak-of").arg(&programs.margay).arg("").args(arguments).env_clear();
    let begun = Instant::now();
    let done = command.output()?;
    let seconds = begun.elapsed().as_secs_f64();
    let said = String::from_utf8(done.stdout)?;
    let kib: f64 = said
        .trim()
        .parse()
        .map_err(|_| format!("margay {} failed: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr)))?;
    Ok(Cost { seconds, mib: kib / 1024.0 })
}

/// Measures the migration of a store to each kind of target store.
fn moves(programs: &Programs, source: &str, targets: &[(&str, String)], findings: &mut Findings) -> Outcome<()> {
    let mut rows = Vec::new();
    for (engine, target) in targets {
        let copy = cost(programs, &["migrate", source, target])?;
        let finish = cost(programs, &["migrate", source, target, "--finish"])?;
        let rate = ADDRESSES as f64 / copy.seconds;
        rows.push(vec![
            format!("redb to {engine}"),
            format!("{:.1}", copy.seconds),
            format!("{rate:.0}"),
            format!("{MOVED:.0}"),
            format!("{:.0}", copy.mib),
            format!("{:.1}", finish.seconds),
        ]);
    }
    findings.table(
        "moves",
        format!("`margay migrate` of {ADDRESSES} addresses in {} blocks, with all of it read back", NODES * BLOCKS),
        &["", "copy (s)", "addresses/s", "at least", "memory (MiB)", "`--finish` (s)"],
        rows,
    );
    Ok(())
}

/// Measures the commands that read a whole store.
fn looks(programs: &Programs, stores: &[(&str, String)], folder: &Path, findings: &mut Findings) -> Outcome<()> {
    let file = folder.join("export").display().to_string();
    let mut rows = Vec::new();
    for (name, arguments) in commands(&file) {
        let mut row = vec![format!("`margay {name}`")];
        for (_, store) in stores {
            let arguments: Vec<&str> = ["--store", store].into_iter().chain(arguments.iter().copied()).collect();
            let costs = (0..ROUNDS).map(|_| cost(programs, &arguments)).collect::<Outcome<Vec<_>>>()?;
            let seconds = median(&costs.iter().map(|cost| cost.seconds).collect::<Vec<_>>());
            let mib = costs.iter().map(|cost| cost.mib).fold(0.0, f64::max);
            row.extend([format!("{seconds:.1}"), format!("{mib:.0}")]);
        }
        rows.push(row);
    }
    let bounds = stores.iter().flat_map(|(engine, _)| match *engine {
        "sled" => ["-".to_owned(), "-".to_owned()],
        _ => [format!("{SECONDS:.1}"), format!("{MEMORY:.0}")],
    });
    rows.push(std::iter::once("at most".to_owned()).chain(bounds).collect());
    let header: Vec<String> =
        stores.iter().flat_map(|(engine, _)| [format!("{engine} (s)"), "MiB".to_owned()]).collect();
    findings.table(
        "looks",
        format!("Commands on {ADDRESSES} addresses in {} blocks, medians of {ROUNDS}", NODES * BLOCKS),
        &std::iter::once("").chain(header.iter().map(String::as_str)).collect::<Vec<_>>(),
        rows,
    );
    Ok(())
}

fn commands(file: &str) -> [(&'static str, Vec<&str>); 3] {
    [
        ("ipam show", vec!["ipam", "show"]),
        ("ipam check", vec!["ipam", "check"]),
        ("export", vec!["export", file, "--force"]),
    ]
}

/// Measures ADDs while an operator's command runs again and again.
fn beside(
    programs: &Programs,
    contender: &Contender,
    store: &str,
    folder: &Path,
    findings: &mut Findings,
) -> Outcome<()> {
    let file = folder.join("export").display().to_string();
    let alone = pairs(contender, "alone")?;
    let mut rows = vec![row("nothing", &alone, &alone, 0)];
    for (name, arguments) in commands(&file) {
        let over = Arc::new(AtomicBool::new(false));
        let (flag, program) = (Arc::clone(&over), programs.margay.clone());
        let arguments: Vec<String> = ["--store", store].into_iter().chain(arguments).map(str::to_owned).collect();
        let worker = thread::spawn(move || {
            let mut runs = 0;
            while !flag.load(Relaxed) {
                let done = Command::new(&program).args(&arguments).env_clear().output();
                if !done.is_ok_and(|done| done.status.success()) {
                    return None;
                }
                runs += 1;
            }
            Some(runs)
        });
        let times = pairs(contender, &name.replace(' ', "-"));
        over.store(true, Relaxed);
        let runs = worker.join().ok().flatten().ok_or("a command beside the ADDs failed")?;
        let times = times?;
        rows.push(row(&format!("`margay {name}`"), &times, &alone, runs));
    }
    findings.table(
        "beside-operator",
        format!("Cold ADDs on redb, {ADDRESSES} addresses in the store, {ADDS} beside each command (ms)"),
        &["beside", "p50", "p99", "longest", "- p50 alone", "at most", "runs of the command"],
        rows,
    );
    Ok(())
}

fn row(name: &str, times: &Times, alone: &Times, runs: usize) -> Vec<String> {
    let ms = |share| format!("{:.1}", times.quantile(share));
    let held_up = times.quantile(1.0) - alone.median();
    vec![
        name.to_owned(),
        ms(0.5),
        ms(0.99),
        ms(1.0),
        format!("{held_up:.1}"),
        format!("{HELD_UP:.0}"),
        runs.to_string(),
    ]
}

/// Measures ADDs, each followed by a DEL and a pause.
fn pairs(contender: &Contender, name: &str) -> Outcome<Times> {
    let mut times = Times::default();
    for number in 0..ADDS {
        let id = format!("{name}{number}");
        times.push(contender.add(&id)?);
        contender.del(&id)?;
        thread::sleep(Duration::from_millis(20));
    }
    Ok(times)
}
