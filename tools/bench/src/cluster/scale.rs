//! Measures the cost of a full store: does the same work on an etcd server with few nodes and on one with many nodes.
//! The documents of nodes and blocks are written directly to each etcd server, without an allocator.

use std::path::Path;

use super::ground::{Families, Ground, Host};
use super::hosts::{self, Tally, assign_all, release_all};
use super::{ms, ratio, runtime, whole};
use crate::contender::{Contender, in_turns};
use crate::findings::{Bound, Findings, Line, Plot};
use crate::report::median;
use crate::{Outcome, Programs};

const NODES: [u32; 3] = [10, 1_000, 10_000];
/// Number of addresses in use in each block of a node.
const USED: [u64; 2] = [64, 36];
/// The number of measurements of each contender.
const ROUNDS: u32 = 200;
/// The number of concurrent simulated hosts.
const HOSTS: usize = 10;
const HOST_ROUNDS: usize = 8;

/// Measures etcd servers with different numbers of nodes, alternating between the servers.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let runtime = runtime()?;
    let mut grounds = Vec::new();
    for nodes in NODES {
        grounds.push(runtime.block_on(async {
            let ground = Ground::start(folder).await?;
            ground.settle((0..nodes).map(|number| format!("node-{number}")), 0, &USED).await?;
            Outcome::Ok(ground)
        })?);
    }
    let mut contenders: Vec<Contender> =
        grounds.iter().map(|ground| ground.contender(programs, "", "node-0", Families::V4)).collect();
    contenders.push(grounds[0].floor(programs));
    for contender in &contenders {
        contender.add("warm")?;
        contender.del("warm")?;
    }
    let (adds, dels) = in_turns(&contenders, ROUNDS)?;
    let tallies = runtime.block_on(at_once(&grounds))?;

    let few = adds[0].median();
    let rows = NODES.iter().enumerate().map(|(place, nodes)| {
        let addresses = f64::from(*nodes) * USED.iter().sum::<u64>() as f64;
        vec![
            whole(f64::from(*nodes)),
            whole(addresses),
            ms(adds[place].median()),
            ms(adds[place].quantile(0.9)),
            ratio(adds[place].median() / few),
            ms(dels[place].median()),
            whole(median(&tallies[place].rates)),
        ]
    });
    let mut findings = Findings::default();
    let rate = format!("ADD/s of {HOSTS} hosts");
    findings.table(
        "scale",
        format!("Cold ADD and DEL, whole process, by what is in the store, {ROUNDS} runs each in turns (ms)"),
        &["nodes", "addresses in use", "ADD p50", "p90", "/ 10 nodes", "DEL p50", &rate],
        rows.collect(),
    );
    findings.goal(
        "cold ADD at 10,000 nodes, 1,000,000 addresses / at 10 nodes",
        adds[2].median() / few,
        Bound::AtMost(1.2),
    );
    let line = |name: &str, values: Vec<f64>| Line { name: name.to_owned(), values };
    let of_all = |share: f64| adds[..NODES.len()].iter().map(|times| times.quantile(share)).collect();
    findings.plot(
        "scale",
        Plot {
            title: "A cold ADD, by the number of nodes with 100 addresses each".into(),
            x: "nodes in the cluster".into(),
            y: "ms".into(),
            points: NODES.map(|nodes| whole(f64::from(nodes))).to_vec(),
            lines: vec![
                line("p50", of_all(0.5)),
                line("p90", of_all(0.9)),
                line("the floor: connect, commit two keys; p50", vec![adds[NODES.len()].median(); NODES.len()]),
            ],
        },
    );
    Ok(findings)
}

/// Measures a few concurrent hosts on each etcd server, alternating between the servers.
async fn at_once(grounds: &[Ground]) -> Outcome<Vec<Tally>> {
    let mut crowds: Vec<Vec<Host>> = Vec::new();
    for ground in grounds {
        let hosts: Vec<Host> =
            (0..HOSTS).map(|number| ground.host(&format!("node-{number}"))).collect::<Outcome<_>>()?;
        assign_all(&hosts, 0..1).await?;
        release_all(&hosts, 0..1).await?;
        crowds.push(hosts);
    }
    let mut tallies: Vec<Tally> = grounds.iter().map(|_| Tally::default()).collect();
    for _ in 0..HOST_ROUNDS {
        for (hosts, tally) in crowds.iter().zip(&mut tallies) {
            tally.note(assign_all(hosts, 0..hosts::EACH).await?, HOSTS * hosts::EACH);
            release_all(hosts, 0..hosts::EACH).await?;
        }
    }
    Ok(tallies)
}
