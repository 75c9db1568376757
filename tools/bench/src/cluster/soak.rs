//! Measures an etcd for a long time under churn, with a quota of 2 GiB and with Margay's compaction: the size of the
//! database, the latency of calls and the memory of etcd must not grow.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use backend_etcd::{EtcdStore, Options};
use ipam_operator::compaction::compact_older;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::ground::{Ground, Host};
use super::{ms, runtime, whole};
use crate::Outcome;
use crate::fill::{one_address, soon};
use crate::findings::{Bound, Findings, Line, Plot};
use crate::report::Times;

/// The number of simulated hosts, which start and end containers at the same time.
const HOSTS: usize = 50;
/// Number of ADDs and DELs per second that all hosts together attempt.
const CHANGES_PER_SECOND: u32 = 2_000;
/// Number of addresses that each host has from the start.
const RESIDENTS: u64 = 40;
/// The history that a compaction keeps. At 2,000 changes a second 20 s of history have some 600 MB.
const KEEP: Duration = Duration::from_secs(20);
/// The interval between two measurements.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(60);
/// The default quota of etcd, in bytes.
const QUOTA_BYTES: u64 = 2 << 30;
const MIB: f64 = 1_048_576.0;

/// The measurements of one minute.
struct Sample {
    changes_per_second: f64,
    /// The median duration of a call, in milliseconds.
    p50: f64,
    /// The 99th percentile of the durations of the calls, in milliseconds.
    p99: f64,
    size_mib: f64,
    in_use_mib: f64,
    memory_mib: f64,
}

/// Runs the churn for this number of minutes, and prints the measurements of each minute.
pub(crate) fn run(folder: &Path, minutes: u32) -> Outcome<Findings> {
    runtime()?.block_on(measure(folder, minutes))
}

async fn measure(folder: &Path, minutes: u32) -> Outcome<Findings> {
    let ground = Ground::with_quota(folder, QUOTA_BYTES).await?;
    let names: Vec<String> = (0..HOSTS).map(|number| format!("host-{number}")).collect();
    ground.settle(names.clone(), 0, &[RESIDENTS]).await?;
    let (over, times) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Times::default())));
    let mut work: JoinSet<Result<(), String>> = JoinSet::new();
    for (number, name) in names.iter().enumerate() {
        work.spawn(churn(ground.host(name)?, number, Arc::clone(&over), Arc::clone(&times)));
    }
    let store = EtcdStore::open(&Options::new([ground.etcd.url()]))?;
    work.spawn(compact(store, Arc::clone(&over)));
    let mut samples = Vec::new();
    for _ in 0..minutes {
        let begun = Instant::now();
        tokio::select! {
            () = sleep(SAMPLE_INTERVAL) => {}
            // A caller or the compactor ends early only if it fails.
            ended = work.join_next() => ended.ok_or("no host is left")???,
        }
        let taken = std::mem::take(&mut *times.lock().unwrap_or_else(PoisonError::into_inner));
        let sample = sample(&ground, &taken, begun.elapsed()).await?;
        progress(samples.len() + 1, &sample);
        samples.push(sample);
    }
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = work.join_next().await {
        ended??;
    }
    Ok(findings(&samples))
}

/// Starts and ends containers on a host at the host's share of the rate.
async fn churn(host: Host, number: usize, over: Arc<AtomicBool>, times: Arc<Mutex<Times>>) -> Result<(), String> {
    let mut ticks = interval(Duration::from_secs(1) * u32::try_from(HOSTS).unwrap_or(1) / CHANGES_PER_SECOND);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut container = (number as u64) << 32 | 1 << 60;
    while !over.load(Ordering::Relaxed) {
        container += 1;
        let request = one_address(&host.name, container);
        for is_add in [true, false] {
            ticks.tick().await;
            let begun = Instant::now();
            match is_add {
                true => drop(host.ipam.assign(&request, soon()).await.map_err(|error| error.to_string())?),
                false => drop(
                    host.ipam
                        .release_attachment(&request.attachment, &[], soon())
                        .await
                        .map_err(|error| error.to_string())?,
                ),
            }
            times.lock().unwrap_or_else(PoisonError::into_inner).push(begun.elapsed());
        }
    }
    Ok(())
}

/// Compacts as `margay-compact.timer` does, but more often.
async fn compact(store: EtcdStore, over: Arc<AtomicBool>) -> Result<(), String> {
    let mut mark = None;
    while !over.load(Ordering::Relaxed) {
        let (_, noted) =
            compact_older(&store, mark.take(), KEEP, SystemTime::now()).await.map_err(|error| error.to_string())?;
        mark = Some(noted);
        sleep(KEEP / 10).await;
    }
    Ok(())
}

async fn sample(ground: &Ground, times: &Times, elapsed: Duration) -> Outcome<Sample> {
    let status = ground.client().await?.status().await?;
    let process = ground.etcd.process().ok_or("etcd has ended")?;
    let about = fs::read_to_string(format!("/proc/{process}/status"))?;
    let memory = about.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let kib: f64 = memory.trim().trim_end_matches(" kB").parse()?;
    Ok(Sample {
        changes_per_second: times.len() as f64 / elapsed.as_secs_f64(),
        p50: times.median(),
        p99: times.quantile(0.99),
        size_mib: status.db_size() as f64 / MIB,
        in_use_mib: status.raft_used_db_size() as f64 / MIB,
        memory_mib: kib / 1024.0,
    })
}

#[expect(clippy::print_stdout, reason = "prints its progress")]
fn progress(minute: usize, sample: &Sample) {
    let Sample { changes_per_second, p50, p99, size_mib, in_use_mib, memory_mib } = sample;
    println!(
        "minute {minute}: {changes_per_second:.0} changes/s, p50 {} ms, p99 {} ms, database {size_mib:.0} MiB ({in_use_mib:.0} in \
         use), etcd's memory {memory_mib:.0} MiB",
        ms(*p50),
        ms(*p99)
    );
}

fn findings(samples: &[Sample]) -> Findings {
    let mut findings = Findings::default();
    let rows = samples.iter().enumerate().map(|(minute, sample)| {
        vec![
            whole((minute + 1) as f64),
            whole(sample.changes_per_second),
            ms(sample.p50),
            ms(sample.p99),
            whole(sample.size_mib),
            whole(sample.in_use_mib),
            whole(sample.memory_mib),
        ]
    });
    findings.table(
        "soak",
        format!("{HOSTS} hosts that start and end containers on an etcd with a quota of 2 GiB"),
        &["minute", "changes/s", "p50 (ms)", "p99", "database (MiB)", "in use", "memory (MiB)"],
        rows.collect(),
    );
    let largest = samples.iter().map(|sample| sample.size_mib).fold(0.0, f64::max);
    findings.goal("largest database / quota", largest * MIB / QUOTA_BYTES as f64, Bound::AtMost(0.8));
    let values = |value: fn(&Sample) -> f64| samples.iter().map(value).collect();
    findings.plot(
        "soak",
        Plot {
            title: "An etcd under churn with compaction, quota 2,048 MiB".into(),
            x: "minute".into(),
            y: "MiB".into(),
            points: (1..=samples.len()).map(|minute| minute.to_string()).collect(),
            lines: vec![
                Line { name: "database".into(), values: values(|sample| sample.size_mib) },
                Line { name: "in use".into(), values: values(|sample| sample.in_use_mib) },
                Line { name: "etcd's memory".into(), values: values(|sample| sample.memory_mib) },
            ],
        },
    );
    findings
}
