//! Measures which documents a dead node leaves behind, and the cost of freeing its addresses: with an operator's
//! command if the node does not return, or by the node's own garbage collection if it returns.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ipam_core::gc::{self, Evidence, ReadScope};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, Owner};
use kv::{Range, RangeRequest, Store, StoreExt};

use super::ground::{Ground, Host};
use super::{ms, runtime, whole};
use crate::contender::run as run_process;
use crate::fill::soon;
use crate::findings::Findings;
use crate::report::Times;
use crate::{Outcome, Programs};

const NODES: u32 = 1_000;
/// Number of addresses in use in each block of a node.
const USED: [u64; BLOCKS as usize] = [64, 36];
const BLOCKS: u32 = 2;
/// Number of dead nodes for each way of freeing addresses: the operator's command, and garbage collection.
const DEAD: u32 = 5;

/// For one step of freeing addresses (such as garbage collection), the measurements over all dead nodes.
#[derive(Default)]
struct Step {
    times: Times,
    /// Number of etcd requests that this `Step` sends for one dead node; `None` for an operator's command, whose
    /// requests are not counted.
    requests: Option<u64>,
    left: Left,
}

/// How many documents and addresses of a node are still in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Left {
    addresses: usize,
    affinities: usize,
    blocks: usize,
}

/// Measures how the operator's command and garbage collection free the addresses of dead nodes.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    runtime()?.block_on(measure(programs, folder))
}

async fn measure(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let ground = Ground::start(folder).await?;
    ground.settle((0..NODES).map(|number| format!("node-{number}")), 0, &USED).await?;
    let host = ground.host("")?;
    let all = Left { addresses: 100, affinities: 2, blocks: 2 };
    let none = Left::default();
    let [mut gone, mut scan, mut free] = <[Step; 3]>::default();
    for number in 0..DEAD {
        let name = format!("node-{number}");
        expect(left_of(&host, number).await?, all)?;
        host.store.delete(Range::Key(keys::resource(ResourceKind::Node, &name))).await?;
        let mut command = Command::new(&programs.margay);
        command.arg("--store").arg(format!("etcd://{}", ground.etcd.url().trim_start_matches("http://")));
        command.args(["gc", "--node", &name, "--free", "--apply"]);
        gone.times.push(run_process(command, "")?);
        gone.left = left_of(&host, number).await?;
    }
    expect(gone.left, none)?;
    for number in DEAD..2 * DEAD {
        let name = format!("node-{number}");
        let mut stale = Vec::new();
        let judged = scan.time(&host, async {
            let (holdings, _) = host.ipam.holdings_within(&name, &ReadScope::default(), soon()).await?;
            stale = host.ipam.judge(&holdings, &rebooted()).earlier;
            Ok(())
        });
        judged.await?;
        scan.left = left_of(&host, number).await?;
        let freed = free.time(&host, async {
            for batch in gc::batches(&stale) {
                host.ipam.free(&batch, soon()).await?;
            }
            Ok(())
        });
        freed.await?;
        free.left = left_of(&host, number).await?;
    }
    expect(scan.left, all)?;
    expect(free.left, Left { addresses: 0, ..all })?;

    let before = vec!["the node has died".into(), "-".into(), "-".into()];
    let mut rows = vec![[before, all.cells()].concat()];
    rows.extend([
        gone.row(&format!(
            "it is gone for good: `margay gc --node NAME --free --apply`, the whole command, among {} nodes",
            whole(f64::from(NODES))
        )),
        scan.row(&format!(
            "or it comes back, and `margay gc --boot` reads what it holds, among {} nodes",
            whole(f64::from(NODES))
        )),
        free.row("... and frees what is left over"),
    ]);
    let mut findings = Findings::default();
    findings.table(
        "dead-node",
        format!(
            "A node with 100 addresses in 2 blocks, among {} such nodes, p50 of {DEAD} (ms)",
            whole(f64::from(NODES))
        ),
        &["", "p50", "requests", "addresses held", "blocks that are its", "blocks stored"],
        rows,
    );
    Ok(findings)
}

impl Step {
    async fn time(&mut self, host: &Host, work: impl Future<Output = Outcome<()>>) -> Outcome<()> {
        host.store.take();
        let begun = Instant::now();
        work.await?;
        self.times.push(begun.elapsed());
        self.requests = Some(host.store.take().round_trips());
        Ok(())
    }

    fn row(&self, name: &str) -> Vec<String> {
        let requests = self.requests.map_or("-".to_owned(), |requests| whole(requests as f64));
        [vec![name.to_owned(), ms(self.times.median()), requests], self.left.cells()].concat()
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
