//! Compares block sizes: measures how new hosts get their first addresses from pools with blocks of different sizes.

use std::path::Path;

use ipam_core::model::{Block, Document, NewPool};
use ipnet::IpNet;

use super::ground::{Ground, Host};
use super::hosts::{Tally, assign_all};
use super::{ms, runtime, whole};
use crate::fill;
use crate::findings::{Findings, Line, Plot};
use crate::report::median;
use crate::{Outcome, Programs};

/// The block sizes to compare, as prefix lengths.
const SIZES: [u8; 4] = [24, 26, 28, 30];
const HOSTS: usize = 50;
/// Number of addresses that each host assigns in a round.
const EACH: usize = 64;
const ROUNDS: usize = 2;

/// An etcd with a pool of one block size, and the measurements on this etcd.
struct Stage {
    size: u8,
    ground: Ground,
    tally: Tally,
    requests: u64,
    sent: u64,
    received: u64,
}

/// Measures pools with each of the block sizes, alternating between the pools.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(folder))
}

async fn measure(folder: &Path) -> Outcome<Findings> {
    let mut stages = Vec::new();
    for size in SIZES {
        let ground = Ground::empty(folder)?;
        ground.pool(NewPool::new("v4", "10.0.0.0/8".parse()?).with_block_size(size)).await?;
        stages.push(Stage { size, ground, tally: Tally::default(), requests: 0, sent: 0, received: 0 });
    }
    for round in 0..ROUNDS {
        for stage in &mut stages {
            stage.start_hosts(round).await?;
        }
    }
    let calls = (ROUNDS * HOSTS * EACH) as f64;
    let mut rows = Vec::new();
    for stage in &stages {
        let kb = |bytes: u64| format!("{:.1}", bytes as f64 / calls / 1000.0);
        rows.push(vec![
            format!("/{}", stage.size),
            whole(f64::from(1_u32 << (32 - stage.size))),
            whole(median(&stage.tally.rates)),
            ms(stage.tally.times.median()),
            ms(stage.tally.times.quantile(0.99)),
            format!("{:.2}", stage.requests as f64 / calls),
            kb(stage.sent),
            kb(stage.received),
            format!("{:.1}", full_bytes(stage.size)? as f64 / 1000.0),
        ]);
    }
    let mut findings = Findings::default();
    findings.table(
        "blocks",
        format!(
            "{HOSTS} hosts at once that start from nothing and get {EACH} addresses each, {ROUNDS} rounds in turns (ms)"
        ),
        &["block", "addresses", "ADD/s", "p50", "p99", "requests", "KB sent", "KB read", "KB of a full block"],
        rows,
    );
    findings.plot(
        "blocks",
        Plot {
            title: format!("Addresses assigned a second, by block size; {HOSTS} hosts at once"),
            x: "block size".into(),
            y: "per second".into(),
            points: SIZES.map(|size| format!("/{size}")).to_vec(),
            lines: vec![Line {
                name: format!("the first {EACH} addresses of each host"),
                values: stages.iter().map(|stage| median(&stage.tally.rates)).collect(),
            }],
        },
    );
    Ok(findings)
}

impl Stage {
    /// Creates new hosts, each of which assigns the addresses of one round.
    async fn start_hosts(&mut self, round: usize) -> Outcome<()> {
        let names: Vec<String> = (0..HOSTS).map(|number| format!("round-{round}-host-{number}")).collect();
        self.ground.register(names.clone()).await?;
        let hosts: Vec<Host> = names.iter().map(|name| self.ground.host(name)).collect::<Outcome<_>>()?;
        // Each round has its own container numbers, so that no two containers have the same id.
        let calls = round * EACH..(round + 1) * EACH;
        for host in &hosts {
            // Before the measurement begins, the simulated host connects to etcd.
            host.ipam.config(fill::soon()).await?;
            host.store.take();
        }
        self.tally.note(assign_all(&hosts, calls).await?, HOSTS * EACH);
        for host in &hosts {
            let counts = host.store.take();
            self.requests += counts.round_trips();
            self.sent += counts.bytes_sent;
            self.received += counts.bytes_received;
        }
        Ok(())
    }
}

/// Size in bytes of a full block's document if each address belongs to a different container.
fn full_bytes(size: u8) -> Outcome<usize> {
    let cidr = IpNet::new([10, 0, 0, 0].into(), size)?;
    let documents = fill::block_of("node", cidr, 0..1 << (32 - size))?;
    let (key, value) = documents.last().ok_or("no block")?;
    Block::decode(key, value.as_bytes())?;
    Ok(value.len())
}
