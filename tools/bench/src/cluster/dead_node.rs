//! Measures which documents a dead node leaves behind, and the cost of freeing its addresses: with an operator's
//! command if the node does not return, or by the node's own garbage collection if it returns. Also measures the garbage
//! collection of a node that lives, and the commands that read a whole cluster.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant};

use ipam_core::gc::{self, Evidence, ReadScope};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, Owner};
use kv::{Range, RangeRequest, Store, StoreExt};

use super::commands::{self, operator_command};
use super::ground::{Ground, Host};
use super::meter::Meter;
use super::{ms, ratio, runtime, whole};
use crate::contender::run as run_process;
use crate::fill::soon;
use crate::findings::Findings;
use crate::report::Times;
use crate::{Outcome, Programs};

/// The numbers of nodes in the store, besides those that die.
const NODES: [u32; 3] = [10, 1_000, 10_000];
/// Number of addresses in use in each block of a node.
const USED: [u64; BLOCKS as usize] = [64, 36];
const BLOCKS: u32 = 2;
/// Number of dead nodes for each way of freeing addresses: the operator's command, and garbage collection.
const DEAD: u32 = 5;

/// For one step of freeing addresses (such as garbage collection), the measurements over all dead nodes.
#[derive(Default)]
struct Step {
    times: Times,
    /// Number of etcd requests that this `Step` sends for one dead node.
    requests: u64,
    left: Left,
}

/// How many documents and addresses of a node are still in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Left {
    addresses: usize,
    affinities: usize,
    blocks: usize,
}

/// What a dead node has left before anything is freed.
const ALL: Left = Left { addresses: 100, affinities: BLOCKS as usize, blocks: BLOCKS as usize };

/// Measures how the operator's command and garbage collection free the addresses of dead nodes.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(programs, folder))
}

/// The three measured steps on a store with a number of nodes.
struct Stage {
    nodes: u32,
    ground: Ground,
    /// An operator frees the addresses of a node that is gone for good.
    gone: Step,
    /// A node that comes back reads what it holds.
    scan: Step,
    /// A node that has come back frees what is left over.
    free: Step,
}

async fn measure(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let mut stages = Vec::new();
    for nodes in NODES {
        stages.push(Stage::start(folder, nodes).await?);
    }
    for number in 0..DEAD {
        for stage in &mut stages {
            stage.free_gone(programs, number).await?;
            stage.free_rebooted(DEAD + number).await?;
        }
    }
    let few = &stages[0];
    let before = ["the node has died", "-", "-", "-", "-"].map(str::to_owned).to_vec();
    let mut rows = vec![[before, ALL.cells()].concat()];
    for (name, step) in [
        (
            "it is gone for good: `margay gc --node NAME --free --apply`, the whole command",
            of_gone as fn(&Stage) -> &Step,
        ),
        ("or it comes back, and `margay gc --boot` reads what it holds", |stage| &stage.scan),
        ("... and frees what is left over", |stage| &stage.free),
    ] {
        rows.extend(stages.iter().map(|stage| step(stage).row(name, stage.nodes, step(few))));
    }
    let mut findings = Findings::default();
    findings.table(
        "dead-node",
        format!("A node with 100 addresses in 2 blocks, among other such nodes, p50 of {DEAD} (ms)"),
        &["", "among nodes", "p50", "/ 10 nodes", "requests", "addresses held", "blocks that are its", "blocks stored"],
        rows,
    );
    let [small, .., large] = &stages[..] else { return Err("no stores to compare".into()) };
    let grounds = [small, large].map(|stage| (stage.nodes, &stage.ground));
    commands::measure(programs, folder, grounds, &mut findings)?;
    Ok(findings)
}

fn of_gone(stage: &Stage) -> &Step {
    &stage.gone
}

impl Stage {
    async fn start(folder: &Path, nodes: u32) -> Outcome<Self> {
        let ground = Ground::start(folder).await?;
        ground.settle((0..nodes + 2 * DEAD).map(|number| format!("node-{number}")), 0, &USED).await?;
        let [gone, scan, free] = Default::default();
        Ok(Self { nodes, ground, gone, scan, free })
    }

    /// Deletes node number `number`, and frees its addresses with the operator's command.
    async fn free_gone(&mut self, programs: &Programs, number: u32) -> Outcome<()> {
        let host = self.ground.host("")?;
        let name = format!("node-{number}");
        expect(left_of(&host, number).await?, ALL)?;
        host.store.delete(Range::Key(keys::resource(ResourceKind::Node, &name))).await?;
        let command = operator_command(programs, &self.ground, &["gc", "--node", &name, "--free", "--apply"]);
        let meter = Meter::start(&self.ground.etcd)?;
        self.gone.times.push(run_process(command, "")?);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of requests")]
        let requests = meter.stop()?.requests as u64;
        self.gone.requests = requests;
        self.gone.left = left_of(&host, number).await?;
        expect(self.gone.left, Left::default())
    }

    /// Frees the addresses of node number `number` as its own garbage collection does after a reboot.
    async fn free_rebooted(&mut self, number: u32) -> Outcome<()> {
        let host = self.ground.host("")?;
        let name = format!("node-{number}");
        // Before the measurement begins, the simulated host connects to etcd.
        expect(left_of(&host, number).await?, ALL)?;
        let mut stale = Vec::new();
        let judged = self.scan.time(&host, async {
            let (holdings, _) = host.ipam.holdings_within(&name, &ReadScope::default(), soon()).await?;
            stale = host.ipam.judge(&holdings, &rebooted()).earlier;
            Ok(())
        });
        judged.await?;
        self.scan.left = left_of(&host, number).await?;
        expect(self.scan.left, ALL)?;
        let freed = self.free.time(&host, async {
            for batch in gc::batches(&stale) {
                host.ipam.free(&batch, soon()).await?;
            }
            Ok(())
        });
        freed.await?;
        self.free.left = left_of(&host, number).await?;
        expect(self.free.left, Left { addresses: 0, ..ALL })
    }
}

impl Step {
    async fn time(&mut self, host: &Host, work: impl Future<Output = Outcome<()>>) -> Outcome<()> {
        host.store.take();
        let begun = Instant::now();
        work.await?;
        self.times.push(begun.elapsed());
        self.requests = host.store.take().round_trips();
        Ok(())
    }

    /// Returns the table row of a step among `nodes` nodes. The argument `few` is the step among the fewest nodes.
    fn row(&self, name: &str, nodes: u32, few: &Self) -> Vec<String> {
        let cells = [
            name.to_owned(),
            whole(f64::from(nodes)),
            ms(self.times.median()),
            ratio(self.times.median() / few.times.median()),
            whole(self.requests as f64),
        ];
        [cells.to_vec(), self.left.cells()].concat()
    }
}

impl Left {
    fn cells(self) -> Vec<String> {
        [self.addresses, self.affinities, self.blocks].map(|count| whole(count as f64)).to_vec()
    }
}

fn expect(left: Left, expected: Left) -> Outcome<()> {
    if left == expected { Ok(()) } else { Err(format!("{left:?} is left instead of {expected:?}").into()) }
}

/// The evidence of a machine that has just rebooted: no attachment is live.
fn rebooted() -> Evidence {
    let (up, live) = (Duration::from_secs(60), BTreeSet::new());
    Evidence { boot: "feedbeef".into(), up, live, namespaces: None, within: None }
}

/// Returns the numbers of the blocks that belong to node number `number`.
fn blocks_of(number: u32) -> impl Iterator<Item = u32> {
    number * BLOCKS..(number + 1) * BLOCKS
}

async fn left_of(host: &Host, number: u32) -> Outcome<Left> {
    let mut left = Left::default();
    for block in blocks_of(number) {
        let key = keys::block(super::ground::nth_block(block)?);
        let found = host.store.range(RangeRequest::new(Range::Key(key))).await?;
        left.blocks += found.kvs.len();
        for kv in &found.kvs {
            left.addresses += Block::decode(&kv.key, kv.value.as_bytes())?.allocated().count();
        }
    }
    let prefix = keys::affinities_prefix(&Owner::host(format!("node-{number}")), None).ok_or("no host")?;
    left.affinities = host.store.range(RangeRequest::new(Range::Prefix(prefix))).await?.kvs.len();
    Ok(left)
}
