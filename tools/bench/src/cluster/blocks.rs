//! Compares block sizes: measures how new hosts get their first addresses from pools with blocks of different sizes, in
//! empty stores and among many nodes.

use std::path::Path;

use ipam_core::model::{Block, Document, NewPool};
use ipnet::IpNet;

use super::ground::{Ground, Host};
use super::hosts::{Tally, assign_all};
use super::{ms, ratio, runtime, whole};
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
/// The numbers of other nodes in the store, for the comparison of a small with a large cluster.
const NODES: [u32; 2] = [10, 10_000];
/// Number of addresses in use on each of the other nodes.
const USED: u64 = 100;
/// Number of addresses that all hosts assign in all rounds.
const CALLS: f64 = (ROUNDS * HOSTS * EACH) as f64;

/// An etcd with a pool of one block size, and the measurements on this etcd.
struct Stage {
    size: u8,
    /// The number of other nodes in the store.
    nodes: u32,
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
    let mut findings = Findings::default();
    on_empty(folder, &mut findings).await?;
    among_nodes(folder, &mut findings).await?;
    Ok(findings)
}

/// Measures all block sizes on stores without other nodes.
async fn on_empty(folder: &Path, findings: &mut Findings) -> Outcome<()> {
    let mut stages = Vec::new();
    for size in SIZES {
        stages.push(Stage::start(folder, size, 0).await?);
    }
    for round in 0..ROUNDS {
        for stage in &mut stages {
            stage.start_hosts(round).await?;
        }
    }
    let mut rows = Vec::new();
    for stage in &stages {
        rows.push(vec![
            format!("/{}", stage.size),
            whole(f64::from(1_u32 << (32 - stage.size))),
            whole(median(&stage.tally.rates)),
            ms(stage.tally.times.median()),
            ms(stage.tally.times.quantile(0.99)),
            stage.requests_of_add(),
            kb_of_add(stage.sent),
            kb_of_add(stage.received),
            format!("{:.1}", full_bytes(stage.size)? as f64 / 1000.0),
        ]);
    }
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
    Ok(())
}

/// For each block size, compares a store with few other nodes with a store with many.
async fn among_nodes(folder: &Path, findings: &mut Findings) -> Outcome<()> {
    let mut rows = Vec::new();
    for size in SIZES {
        // A store with 10,000 nodes takes a gigabyte of memory, so the stores of the next size are started when those
        // of this size have ended.
        let mut stages = Vec::new();
        for nodes in NODES {
            stages.push(Stage::start(folder, size, nodes).await?);
        }
        for round in 0..ROUNDS {
            for stage in &mut stages {
                stage.start_hosts(round).await?;
            }
        }
        let few = median(&stages[0].tally.rates);
        rows.extend(stages.iter().map(|stage| {
            let rate = median(&stage.tally.rates);
            vec![
                format!("/{size}"),
                whole(f64::from(stage.nodes)),
                whole(rate),
                ratio(rate / few),
                ms(stage.tally.times.median()),
                ms(stage.tally.times.quantile(0.99)),
                stage.requests_of_add(),
                kb_of_add(stage.sent),
                kb_of_add(stage.received),
            ]
        }));
    }
    findings.table(
        "blocks-scale",
        format!(
            "The same {HOSTS} hosts in stores in which each of 10 or 10,000 other nodes has {USED} addresses in blocks of \
             the same size (ms)"
        ),
        &["block", "nodes", "ADD/s", "/ 10 nodes", "p50", "p99", "requests", "KB sent", "KB read"],
        rows,
    );
    Ok(())
}

fn kb_of_add(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / CALLS / 1000.0)
}

impl Stage {
    /// Starts an etcd with `nodes` nodes that have addresses in blocks of the prefix length `size`.
    async fn start(folder: &Path, size: u8, nodes: u32) -> Outcome<Self> {
        let ground = Ground::empty(folder)?;
        ground.pool(NewPool::new("v4", "10.0.0.0/8".parse()?).with_block_size(size)).await?;
        ground.settle_in(size, (0..nodes).map(|number| format!("node-{number}")), 0, &used_blocks(size)).await?;
        Ok(Self { size, nodes, ground, tally: Tally::default(), requests: 0, sent: 0, received: 0 })
    }

    fn requests_of_add(&self) -> String {
        format!("{:.2}", self.requests as f64 / CALLS)
    }

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

/// Returns the number of addresses in use in each block of a node that has [`USED`] addresses.
fn used_blocks(size: u8) -> Vec<u64> {
    let capacity = 1_u64 << (32 - size);
    let mut used = vec![capacity; usize::try_from(USED / capacity).unwrap_or_default()];
    used.extend(Some(USED % capacity).filter(|rest| *rest > 0));
    used
}

/// Size in bytes of a full block's document if each address belongs to a different container.
fn full_bytes(size: u8) -> Outcome<usize> {
    let cidr = IpNet::new([10, 0, 0, 0].into(), size)?;
    let documents = fill::block_of("node", cidr, 0..1 << (32 - size))?;
    let (key, value) = documents.last().ok_or("no block")?;
    Block::decode(key, value.as_bytes())?;
    Ok(value.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_node_hold_its_addresses() {
        assert_eq!([24, 26].map(used_blocks), [vec![100], vec![64, 36]]);
        assert_eq!(used_blocks(28), [16, 16, 16, 16, 16, 16, 4]);
        assert_eq!(used_blocks(30), [4; 25]);
    }
}
