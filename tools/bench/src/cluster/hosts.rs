//! Compares many concurrent hosts that run Margay with equally many plain etcd clients, whose commits have the same
//! size as Margay's. The hosts are simulated in this process, each with its own connection.

use std::future::Future;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options};
use ipam_core::{Ipam, Nodes};
use tokio::task::JoinSet;

use super::ground::{Ground, Host};
use super::raw::{Bare, Recorder, Shape};
use super::{ms, ratio, runtime, whole};
use crate::fill::{one_address, soon};
use crate::findings::{Bound, Findings, Line, Plot};
use crate::report::{Times, median};
use crate::{Outcome, Programs};

/// The numbers of concurrent hosts that are measured, each with the number of rounds. Configurations with few hosts run
/// more rounds, because their rounds are short.
const CROWDS: [(usize, usize); 4] = [(1, 16), (10, 10), (50, 10), (200, 10)];
/// Number of addresses that each host assigns in a round. The addresses of a round and the `RESIDENTS` addresses that
/// each host has from the start fill a block of 64.
pub(super) const EACH: usize = 24;
pub(super) const RESIDENTS: u64 = 40;

#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) rates: Vec<f64>,
    pub(super) times: Times,
}

impl Tally {
    pub(super) fn note(&mut self, (elapsed, times): (Duration, Times), calls: usize) {
        self.rates.push(calls as f64 / elapsed.as_secs_f64());
        self.times.append(times);
    }
}

/// Measures the rate at which concurrent hosts assign addresses.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(folder))
}

async fn measure(folder: &Path) -> Outcome<Findings> {
    let ground = Ground::start(folder).await?;
    let (hosts, mut bare) = crowd(&ground).await?;
    let shapes = Arc::new(shapes(&ground, 0).await?);
    let mut rows = Vec::new();
    let (mut ours_line, mut bare_line) = (Vec::new(), Vec::new());
    let mut share = 0.0;
    for (count, rounds) in CROWDS {
        let (hosts, bare) = (&hosts[..count], &mut bare[..count]);
        let (mut ours, mut floor) = (Tally::default(), Tally::default());
        for round in 0..rounds {
            if round % 2 == 0 {
                floor.note(commit_all(bare, &shapes).await?, count * EACH);
                ours.note(assign_all(hosts, 0..EACH).await?, count * EACH);
            } else {
                ours.note(assign_all(hosts, 0..EACH).await?, count * EACH);
                floor.note(commit_all(bare, &shapes).await?, count * EACH);
            }
            release_all(hosts, 0..EACH).await?;
        }
        let (rate, raw) = (median(&ours.rates), median(&floor.rates));
        // The store grows and the disk's speed varies, so only adjacent rounds are compared.
        let shares: Vec<f64> = ours.rates.iter().zip(&floor.rates).map(|(ours, bare)| ours / bare).collect();
        share = median(&shares);
        rows.push(vec![
            whole(count as f64),
            whole(rate),
            whole(raw),
            ratio(share),
            ms(ours.times.median()),
            ms(ours.times.quantile(0.99)),
            ms(floor.times.median()),
            ms(floor.times.quantile(0.99)),
        ]);
        ours_line.push(rate);
        bare_line.push(raw);
    }
    let mut findings = Findings::default();
    let last = shapes.last().map(Shape::reported).unwrap_or_default();
    findings.table(
        "hosts",
        format!(
            "Hosts at once, {EACH} ADDs each in a round, beside as many bare clients that commit the same ({last}) (ms)"
        ),
        &["hosts", "ADD/s", "bare/s", "ratio", "ADD p50", "p99", "bare p50", "p99"],
        rows,
    );
    findings.goal("200 hosts at once: ADD/s / bare transactions of the same size", share, Bound::AtLeast(0.7));
    findings.plot(
        "hosts",
        Plot {
            title: "Addresses assigned a second, by how many hosts ask at once".into(),
            x: "hosts at once".into(),
            y: "per second".into(),
            points: CROWDS.map(|(count, _)| whole(count as f64)).to_vec(),
            lines: vec![
                Line { name: "Margay: ADD".into(), values: ours_line },
                Line { name: "a bare client: the same transaction".into(), values: bare_line },
            ],
        },
    );
    Ok(findings)
}

/// Creates as many hosts and as many bare clients as the largest measurement needs.
pub(super) async fn crowd(ground: &Ground) -> Outcome<(Vec<Host>, Vec<Bare>)> {
    let count = CROWDS.iter().map(|(count, _)| *count).max().unwrap_or_default();
    let names: Vec<String> = (0..count).map(|number| format!("host-{number}")).collect();
    // The pool's first block belongs to the host whose commits are recorded.
    ground.settle(names.clone(), 1, &[RESIDENTS]).await?;
    let hosts: Vec<Host> = names.iter().map(|name| ground.host(name)).collect::<Outcome<_>>()?;
    Bare::prepare(&mut ground.client().await?).await?;
    let mut bare = Vec::new();
    for name in names {
        bare.push(Bare::connect(ground.client().await?, name).await?);
    }
    // Before the measurement begins, all simulated hosts connect to etcd.
    assign_all(&hosts, 0..1).await?;
    release_all(&hosts, 0..1).await?;
    Ok((hosts, bare))
}

/// Records the commits of a host that assigns [`EACH`] addresses, one after another, in block number `block` of the
/// pool.
pub(super) async fn shapes(ground: &Ground, block: u32) -> Outcome<Vec<Shape>> {
    ground.settle(["recorder".to_owned()], block, &[RESIDENTS]).await?;
    let recorder = Recorder::new(EtcdStore::open(&Options::new([ground.etcd.url()]))?);
    let ipam = Ipam::new(Arc::new(recorder.clone()), Nodes::Registered);
    for number in 0..EACH {
        // The container ids of this recording use a host number that no simulated host has, so each container's handle
        // is new.
        ipam.assign(&one_address("recorder", container(usize::from(u16::MAX), number)), soon()).await?;
    }
    let shapes = recorder.take();
    if shapes.len() == EACH { Ok(shapes) } else { Err("an assignment was not one commit".into()) }
}

/// Returns the number of a host's container.
pub(super) fn container(host: usize, number: usize) -> u64 {
    1 << 40 | (host as u64) << 20 | number as u64
}

/// On all hosts concurrently, assigns an address to each container in `calls`, one after another on each host.
pub(super) async fn assign_all(hosts: &[Host], calls: Range<usize>) -> Outcome<(Duration, Times)> {
    let assign = |host: Host, number: usize, calls: Range<usize>| async move {
        let mut times = Times::default();
        for call in calls {
            let request = one_address(&host.name, container(number, call));
            let begun = Instant::now();
            host.ipam.assign(&request, soon()).await.map_err(|error| error.to_string())?;
            times.push(begun.elapsed());
        }
        Ok(times)
    };
    at_once(hosts.iter().cloned().enumerate().map(|(number, host)| assign(host, number, calls.clone()))).await
}

/// On all hosts concurrently, releases the addresses of the containers in `calls`.
pub(super) async fn release_all(hosts: &[Host], calls: Range<usize>) -> Outcome<(Duration, Times)> {
    let release = |host: Host, number: usize, calls: Range<usize>| async move {
        let mut times = Times::default();
        for call in calls {
            let attachment = one_address(&host.name, container(number, call)).attachment;
            let begun = Instant::now();
            host.ipam.release_attachment(&attachment, &[], soon()).await.map_err(|error| error.to_string())?;
            times.push(begun.elapsed());
        }
        Ok(times)
    };
    at_once(hosts.iter().cloned().enumerate().map(|(number, host)| release(host, number, calls.clone()))).await
}

/// On all bare clients concurrently, makes the commits in `shapes`, one after another on each client.
pub(super) async fn commit_all(bare: &mut [Bare], shapes: &Arc<Vec<Shape>>) -> Outcome<(Duration, Times)> {
    let commit = |mut one: Bare| {
        let shapes = Arc::clone(shapes);
        async move {
            let mut times = Times::default();
            for shape in shapes.iter() {
                let begun = Instant::now();
                one.commit(shape).await.map_err(|error| error.to_string())?;
                times.push(begun.elapsed());
            }
            Ok((times, one))
        }
    };
    let begun = Instant::now();
    let mut running: JoinSet<Result<(Times, Bare), String>> = JoinSet::new();
    let ids: Vec<_> = bare.iter().map(|one| running.spawn(commit(one.clone())).id()).collect();
    let mut times = Times::default();
    while let Some(done) = running.join_next_with_id().await {
        let (id, done) = done?;
        let (its_times, one) = done?;
        times.append(its_times);
        if let Some(place) = ids.iter().position(|known| *known == id) {
            bare[place] = one;
        }
    }
    Ok((begun.elapsed(), times))
}

/// Runs all futures of `work` concurrently. Returns the time until the last future has completed, and the duration of
/// each call.
async fn at_once<F>(work: impl Iterator<Item = F>) -> Outcome<(Duration, Times)>
where
    F: Future<Output = Result<Times, String>> + Send + 'static,
{
    let begun = Instant::now();
    let mut running: JoinSet<Result<Times, String>> = work.collect();
    let mut times = Times::default();
    while let Some(done) = running.join_next().await {
        times.append(done??);
    }
    Ok((begun.elapsed(), times))
}
