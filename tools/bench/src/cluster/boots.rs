//! Measures nodes that boot at the same time: each makes its first ADD, and so connects to etcd and claims its first
//! block. The nodes are simulated in this process, each with its own connection.

use std::path::Path;
use std::time::{Duration, Instant};

use ipam_core::model::NewPool;
use tokio::task::JoinSet;

use super::commits::{Collision, CommitCounts};
use super::ground::{Ground, Host};
use super::{ms, runtime, whole};
use crate::fill::{one_address, soon};
use crate::findings::Findings;
use crate::report::{Times, median};
use crate::{Outcome, Programs};

/// A pool with 262,144 blocks.
const LARGE_POOL: &str = "10.0.0.0/8";
/// A pool with 1,024 blocks, so that 1,000 nodes claim nearly all of them.
const SMALL_POOL: &str = "10.0.0.0/16";
/// Number of measurements of each wave, each on a new etcd.
const ROUNDS: usize = 3;

/// Whether the nodes of a wave make their first ADDs at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    AtOnce,
    OneByOne,
}

/// Nodes that boot, and what was measured.
struct Wave {
    pool: &'static str,
    nodes: usize,
    order: Order,
    /// The time until all nodes had a block, in seconds, for each round.
    elapsed: Vec<f64>,
    adds: Times,
    /// For each node, the number of attempts after the first.
    retries: Vec<usize>,
    /// For each node, the number of its requests to etcd.
    requests: Vec<u64>,
    collisions: Vec<Collision>,
}

/// Measures waves of nodes, from few to a thousand.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(folder))
}

async fn measure(folder: &Path) -> Outcome<Findings> {
    let mut waves = [
        Wave::new(LARGE_POOL, 10, Order::AtOnce),
        Wave::new(LARGE_POOL, 100, Order::AtOnce),
        Wave::new(LARGE_POOL, 1_000, Order::AtOnce),
        Wave::new(LARGE_POOL, 1_000, Order::OneByOne),
        Wave::new(SMALL_POOL, 10, Order::AtOnce),
        Wave::new(SMALL_POOL, 100, Order::AtOnce),
        Wave::new(SMALL_POOL, 1_000, Order::AtOnce),
        Wave::new(SMALL_POOL, 1_000, Order::OneByOne),
    ];
    for _ in 0..ROUNDS {
        for wave in &mut waves {
            wave.boot(folder).await?;
        }
    }
    let mut findings = Findings::default();
    findings.table(
        "boots",
        format!("Nodes that boot and get their first address, and so claim their first block, {ROUNDS} rounds"),
        &[
            "nodes",
            "pool",
            "all have one after (s)",
            "ADD/s",
            "ADD p50 (ms)",
            "p99",
            "retries",
            "at most",
            "requests",
            "at most",
            "same block",
            "a neighbour's",
            "other",
        ],
        waves.iter().map(Wave::row).collect(),
    );
    Ok(findings)
}

impl Wave {
    fn new(pool: &'static str, nodes: usize, order: Order) -> Self {
        let (elapsed, adds, retries, requests, collisions) = Default::default();
        Self { pool, nodes, order, elapsed, adds, retries, requests, collisions }
    }

    /// Boots all nodes once, on a new etcd.
    async fn boot(&mut self, folder: &Path) -> Outcome<()> {
        let ground = Ground::empty(folder)?;
        ground.pool(NewPool::new("v4", self.pool.parse()?)).await?;
        let names: Vec<String> = (0..self.nodes).map(|number| format!("node-{number}")).collect();
        ground.register(names.clone()).await?;
        let nodes: Vec<Host> = names.iter().map(|name| ground.host(name)).collect::<Outcome<_>>()?;
        let begun = Instant::now();
        match self.order {
            Order::AtOnce => {
                let mut booting: JoinSet<_> = nodes.iter().cloned().enumerate().map(first_add).collect();
                while let Some(booted) = booting.join_next().await {
                    self.adds.push(booted??);
                }
            }
            Order::OneByOne => {
                for node in nodes.iter().cloned().enumerate() {
                    self.adds.push(first_add(node).await?);
                }
            }
        }
        self.elapsed.push(begun.elapsed().as_secs_f64());
        let store = ground.store()?;
        for node in &nodes {
            let CommitCounts { attempts, failed } = node.commits.take();
            self.retries.push(attempts.saturating_sub(1));
            self.requests.push(node.store.take().round_trips());
            for commit in failed {
                self.collisions.push(commit.collision(&store).await?);
            }
        }
        Ok(())
    }

    fn row(&self) -> Vec<String> {
        let order = match self.order {
            Order::AtOnce => "at once",
            Order::OneByOne => "one by one",
        };
        let elapsed = median(&self.elapsed);
        let requests: Vec<usize> =
            self.requests.iter().map(|requests| usize::try_from(*requests).unwrap_or(usize::MAX)).collect();
        let most = |counts: &[usize]| whole(counts.iter().copied().max().unwrap_or_default() as f64);
        let collisions = |kind| {
            let count = self.collisions.iter().filter(|collision| **collision == kind).count();
            format!("{:.2}", count as f64 / self.retries.len() as f64)
        };
        vec![
            format!("{} {order}", whole(self.nodes as f64)),
            self.pool.to_owned(),
            format!("{elapsed:.2}"),
            whole(self.nodes as f64 / elapsed),
            ms(self.adds.median()),
            ms(self.adds.quantile(0.99)),
            format!("{:.2}", mean(&self.retries)),
            most(&self.retries),
            format!("{:.2}", mean(&requests)),
            most(&requests),
            collisions(Collision::Block),
            collisions(Collision::Neighbour),
            collisions(Collision::Other),
        ]
    }
}

/// Assigns the first address of a node, and returns how long that took.
async fn first_add((number, node): (usize, Host)) -> Result<Duration, String> {
    let request = one_address(&node.name, 1 << 40 | number as u64);
    let begun = Instant::now();
    node.ipam.assign(&request, soon()).await.map_err(|error| error.to_string())?;
    Ok(begun.elapsed())
}

fn mean(counts: &[usize]) -> f64 {
    counts.iter().sum::<usize>() as f64 / counts.len() as f64
}
