//! Finds out where the time of an ADD goes when 200 hosts assign at once. Repeats the requests of real ADDs, from a bare
//! transaction to the ADD itself, so that each row of the table adds one thing.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::ground::{Ground, Host};
use super::hosts::{EACH, RESIDENTS, assign_all, container, release_all};
use super::meter::{Meter, Reading};
use super::replay::{Replayer, Step};
use super::{ms, ratio, runtime, whole};
use crate::findings::Findings;
use crate::report::{Times, median};
use crate::{Outcome, Programs};

const HOSTS: usize = 200;
/// Number of rounds. In each, all hosts make [`EACH`] calls of every kind.
const ROUNDS: usize = 6;
const CALLS: f64 = (HOSTS * EACH) as f64;

/// The kinds of calls, in the order in which they add to each other. The DEL is measured after the ADD that it reverts.
/// The last kind shows what an ADD would gain from reads that need not be the latest.
const KINDS: [(Kind, &str); 9] = [
    (Kind::Replay(Step::Puts), "one transaction: a block and a handle"),
    (Kind::Replay(Step::Guards), "+ the guards of an ADD: the bare client"),
    (Kind::Replay(Step::BlockRead), "+ a read of the block before it"),
    (Kind::Replay(Step::WholeRead), "+ all else that an ADD reads, in the same request"),
    (Kind::Replay(Step::Store), "+ through Margay's store"),
    (Kind::Replay(Step::Documents), "+ documents decoded and encoded"),
    (Kind::Add, "+ the allocator: the ADD"),
    (Kind::Del, "a DEL"),
    (Kind::Replay(Step::StaleRead), "for comparison: + all else that an ADD reads, where the reads may be stale"),
];
/// The place of the bare client in [`KINDS`].
const BARE: usize = 1;
/// The place of the ADD in [`KINDS`].
const ADD: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Replay(Step),
    Add,
    Del,
}

/// The measurements of one kind of call.
#[derive(Debug, Default)]
struct Cost {
    rates: Vec<f64>,
    times: Times,
    work: Reading,
    elapsed: Duration,
    retries: usize,
}

/// Measures all kinds of calls in turns.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(folder))
}

async fn measure(folder: &Path) -> Outcome<Findings> {
    let ground = Ground::start(folder).await?;
    let names: Vec<String> = (0..HOSTS).map(|number| format!("host-{number}")).collect();
    ground.settle(names.clone(), 0, &[RESIDENTS]).await?;
    let mut replayers = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let containers: Vec<u64> = (0..EACH).map(|call| container(number, call)).collect();
        replayers.push(Replayer::record(&ground, name.clone(), &containers).await?);
    }
    let hosts: Vec<Host> = names.iter().map(|name| ground.host(name)).collect::<Outcome<_>>()?;
    // Before the measurement begins, all simulated hosts connect to etcd and learn which block they use.
    assign_all(&hosts, 0..1).await?;
    release_all(&hosts, 0..1).await?;
    let mut costs: [Cost; KINDS.len()] = Default::default();
    for _ in 0..ROUNDS {
        for ((kind, _), cost) in KINDS.iter().zip(&mut costs) {
            if *kind != Kind::Del {
                reset_all(&mut replayers).await?;
            }
            hosts.iter().for_each(|host| drop(host.commits.take()));
            let meter = Meter::start(&ground.etcd)?;
            let (elapsed, times) = match kind {
                Kind::Replay(step) => replay_all(&mut replayers, *step).await?,
                Kind::Add => assign_all(&hosts, 0..EACH).await?,
                Kind::Del => release_all(&hosts, 0..EACH).await?,
            };
            cost.work.add(meter.stop()?);
            cost.rates.push(CALLS / elapsed.as_secs_f64());
            cost.times.append(times);
            cost.elapsed += elapsed;
            cost.retries += hosts.iter().map(|host| host.commits.take().failed.len()).sum::<usize>();
        }
    }
    let mut findings = Findings::default();
    tables(&costs, &mut findings);
    Ok(findings)
}

fn tables(costs: &[Cost; KINDS.len()], findings: &mut Findings) {
    // The store grows and the disk's speed varies, so only calls of the same round are compared.
    let to_bare = |cost: &Cost| {
        let shares: Vec<f64> = cost.rates.iter().zip(&costs[BARE].rates).map(|(rate, bare)| rate / bare).collect();
        median(&shares)
    };
    // The time in which all hosts together make one call, in microseconds.
    let each = |cost: &Cost| 1e6 / median(&cost.rates);
    let steps = KINDS.iter().zip(costs).enumerate().map(|(place, ((_, name), cost))| {
        let before = place.checked_sub(1).map_or(0.0, |before| each(&costs[before]));
        let (added, share) = if place > ADD {
            ("-".to_owned(), "-".to_owned())
        } else {
            let added = each(cost) - before;
            (format!("{added:.0}"), format!("{:.0} %", 100.0 * added / each(&costs[ADD])))
        };
        vec![
            (*name).to_owned(),
            whole(median(&cost.rates)),
            ratio(to_bare(cost)),
            format!("{:.0}", each(cost)),
            added,
            share,
            ms(cost.times.median()),
            ms(cost.times.quantile(0.99)),
        ]
    });
    findings.table(
        "costs",
        format!(
            "{HOSTS} hosts at once: what each part of an ADD takes, {ROUNDS} rounds of {} calls in turns",
            whole(CALLS)
        ),
        &["", "per second", "/ bare", "µs each", "adds (µs)", "of an ADD", "p50 (ms)", "p99"],
        steps.collect(),
    );
    let total = CALLS * ROUNDS as f64;
    let work = KINDS.iter().zip(costs).map(|((_, name), Cost { work, elapsed, retries, .. })| {
        let micros = |seconds: f64| format!("{:.0}", seconds * 1e6 / total);
        let kb = |bytes: f64| format!("{:.1}", bytes / total / 1000.0);
        let seconds = elapsed.as_secs_f64();
        vec![
            (*name).to_owned(),
            format!("{:.2}", work.requests / total),
            format!("{:.3}", *retries as f64 / total),
            kb(work.bytes_sent),
            kb(work.bytes_received),
            micros(work.client_seconds),
            micros(work.etcd_seconds),
            format!("{:.2}", (work.client_seconds + work.etcd_seconds) / seconds),
            format!("{:.0} %", 100.0 * work.sync_seconds / seconds),
        ]
    });
    findings.table(
        "costs-work",
        "What these calls send, read and compute, for each call".into(),
        &[
            "",
            "requests",
            "retries",
            "KB sent",
            "KB read",
            "clients' processor time (µs)",
            "etcd's (µs)",
            "processors in use",
            "time in syncs",
        ],
        work.collect(),
    );
}

async fn reset_all(replayers: &mut [Replayer]) -> Outcome<()> {
    for replayer in replayers {
        replayer.reset().await?;
    }
    Ok(())
}

/// Repeats the ADDs of all replayers concurrently. Returns the time until the last has ended, and the duration of each
/// call.
async fn replay_all(replayers: &mut [Replayer], step: Step) -> Outcome<(Duration, Times)> {
    let begun = Instant::now();
    let mut running: JoinSet<Result<Times, String>> = replayers
        .iter()
        .cloned()
        .map(|mut one| async move { one.replay(step).await.map_err(|error| error.to_string()) })
        .collect();
    let mut times = Times::default();
    while let Some(done) = running.join_next().await {
        times.append(done??);
    }
    Ok((begun.elapsed(), times))
}
