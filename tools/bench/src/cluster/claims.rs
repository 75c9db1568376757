//! Compares claiming a new block in a pool with many claimed blocks with claiming one in an empty pool. The benchmark
//! also measures ADDs that are refused because the pool is full.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use ipam_core::affinity::ReleaseIf;
use ipam_core::model::{
    Affinity, AffinityState, Attribute, Block, Document, Handle, NewPool, Owner, Pool, handle_id, keys,
};
use ipam_core::pools;
use ipam_core::reservations::Reservations;
use ipnet::IpNet;
use kv::wrap::CallCounts;
use time::OffsetDateTime;

use super::ground::{Documents, Ground, Host};
use super::{ms, ratio, runtime, whole};
use crate::fill::{NETWORK, one_address, soon};
use crate::findings::{Bound, Findings, Line, Plot};
use crate::report::Times;
use crate::{Outcome, Programs};

/// A pool with 16,384 blocks.
const POOL: &str = "10.0.0.0/12";
const BLOCKS: usize = 1 << 14;
/// The numbers of blocks that are claimed in the pool before the measurement begins. A completely full pool is measured
/// separately.
const CLAIMED: [usize; 4] = [0, 5_000, 10_000, 14_600];
const HOSTS: usize = 5_000;
/// Number of block claims that are measured on each pool.
const CLAIMS: usize = 150;
/// Number of refused ADDs that are measured on the full pool.
const REFUSALS: usize = 5;

struct Stage {
    _ground: Ground,
    host: Host,
    claimed: usize,
    times: Times,
    counts: Vec<CallCounts>,
}

impl Stage {
    async fn start(folder: &Path, claimed: usize) -> Outcome<Self> {
        let ground = Ground::empty(folder)?;
        let pool = ground.pool(NewPool::new("v4", POOL.parse()?)).await?;
        let claimers = (0..CLAIMS).map(|number| format!("claimer-{number}"));
        ground.register((0..HOSTS).map(host_name).chain(claimers)).await?;
        let mut documents = Documents::new();
        for (place, block) in claim_as_hosts_do(&pool, claimed).into_iter().enumerate() {
            documents.extend(full_block(&host_name(place % HOSTS), block)?);
        }
        ground.write(documents).await?;
        let host = ground.host("")?;
        Ok(Self { _ground: ground, host, claimed, times: Times::default(), counts: Vec::new() })
    }

    /// Assigns the first address of a host without blocks, then releases the address and the block.
    async fn claim(&mut self, number: usize) -> Outcome<()> {
        let name = format!("claimer-{number}");
        let request = one_address(&name, 1 << 40 | number as u64);
        self.host.store.take();
        let begun = Instant::now();
        self.host.ipam.assign(&request, soon()).await?;
        self.times.push(begun.elapsed());
        self.counts.push(self.host.store.take());
        self.host.ipam.release_attachment(&request.attachment, &[], soon()).await?;
        let owner = Owner::host(name);
        let released = self.host.ipam.release_all_affinities(&owner, ReleaseIf::Empty, soon()).await?;
        if released.released.len() == 1 { Ok(()) } else { Err("a claim was not one block".into()) }
    }

    /// Requests an address for a host without blocks, and fails unless the request is refused because the pool is
    /// exhausted.
    async fn refuse(&mut self, number: usize) -> Outcome<()> {
        let request = one_address(&format!("claimer-{number}"), 1 << 40 | number as u64);
        self.host.store.take();
        let begun = Instant::now();
        match self.host.ipam.assign(&request, soon()).await {
            Err(ipam_core::Error::Exhausted { .. }) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Err("a full pool gave an address".into()),
        }
        self.times.push(begun.elapsed());
        self.counts.push(self.host.store.take());
        Ok(())
    }

    /// Returns the table row with the measurements on this etcd server. The argument `empty` is the median duration of
    /// a claim in an empty pool.
    fn row(&self, name: &str, empty: f64) -> Vec<String> {
        let mean = |of: fn(&CallCounts) -> u64| {
            self.counts.iter().map(|counts| of(counts) as f64).sum::<f64>() / self.counts.len() as f64
        };
        let most = self.counts.iter().map(CallCounts::round_trips).max().unwrap_or_default();
        vec![
            name.to_owned(),
            format!("{:.0} %", 100.0 * self.claimed as f64 / BLOCKS as f64),
            ms(self.times.median()),
            ms(self.times.quantile(0.9)),
            ratio(self.times.median() / empty),
            format!("{:.1}", mean(CallCounts::round_trips)),
            whole(most as f64),
            format!("{:.1}", mean(|counts| counts.bytes_received) / 1000.0),
        ]
    }
}

/// Measures claims of blocks on each server, alternating between the servers.
pub(crate) fn run(_: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(folder))
}

async fn measure(folder: &Path) -> Outcome<Findings> {
    let mut stages = Vec::new();
    for claimed in CLAIMED {
        stages.push(Stage::start(folder, claimed).await?);
    }
    let mut full = Stage::start(folder, BLOCKS).await?;
    for number in 0..CLAIMS {
        for stage in &mut stages {
            stage.claim(number).await?;
        }
    }
    for number in 0..REFUSALS {
        full.refuse(number).await?;
    }
    let empty = stages[0].times.median();
    let mut rows: Vec<_> = stages.iter().map(|stage| stage.row(&whole(stage.claimed as f64), empty)).collect();
    rows.push(full.row("16,384: refused", empty));
    let mut findings = Findings::default();
    findings.table(
        "claims",
        format!(
            "The first address of a host without blocks, in a pool of {} blocks, {CLAIMS} times in turns (ms)",
            whole(BLOCKS as f64)
        ),
        &["blocks claimed", "share", "p50", "p90", "/ empty pool", "requests", "at most", "KB read"],
        rows,
    );
    let dearest = stages.iter().map(|stage| stage.times.median() / empty).fold(0.0, f64::max);
    findings.goal(
        "claim of a block in a pool of which 0 to 89 % is claimed / in an empty one",
        dearest,
        Bound::AtMost(2.0),
    );
    let line = |name: &str, share: f64| Line {
        name: name.to_owned(),
        values: stages.iter().map(|stage| stage.times.quantile(share)).collect(),
    };
    findings.plot(
        "claims",
        Plot {
            title: "Claiming a block, by how much of the pool is claimed".into(),
            x: format!("share of {} blocks that is claimed", whole(BLOCKS as f64)),
            y: "ms".into(),
            points: CLAIMED.map(|claimed| format!("{:.0} %", 100.0 * claimed as f64 / BLOCKS as f64)).to_vec(),
            lines: vec![line("p50", 0.5), line("p90", 0.9)],
        },
    );
    Ok(findings)
}

fn host_name(number: usize) -> String {
    format!("host-{number}")
}

/// Returns the blocks that hosts own after they have claimed `count` blocks, one host after another. Each host claims
/// the next free block after its own start position in the pool.
fn claim_as_hosts_do(pool: &Pool, count: usize) -> Vec<IpNet> {
    let mut taken = BTreeSet::new();
    let mut claimed = Vec::new();
    for number in 0..count {
        let start = pools::start_of(&host_name(number % HOSTS));
        claimed.extend(pools::blocks_from(pool, start).find(|block| taken.insert(*block)));
    }
    claimed
}

/// Returns the documents of a host's full block, in which all addresses belong to one container.
fn full_block(node: &str, cidr: IpNet) -> Outcome<Documents> {
    let owner = Owner::host(node);
    let id = handle_id(NETWORK, &format!("all-of-{}", cidr.network()));
    let holder = Attribute::new(Some(&id), one_address(node, 0).attributes);
    let mut block = Block::new(cidr, Some(&owner), OffsetDateTime::now_utc(), None)?;
    let size = block.assign_auto(block.capacity(), &holder, &Reservations::default()).len();
    let mut handle = Handle::new();
    handle.increment(cidr, size);
    let affinity = keys::affinity(&owner, cidr).ok_or("no host")?;
    Ok(vec![
        (affinity, Affinity::new(AffinityState::Confirmed).encode()?),
        (keys::handle(&id), handle.encode()?),
        (keys::block(cidr), block.encode()?),
    ])
}
