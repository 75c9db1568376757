//! Compares garbage collections, and the operator's commands that read a whole cluster, on an etcd with few nodes and
//! on one with many. The commands are whole processes and change nothing.

use std::path::Path;
use std::process::Command;

use super::ground::Ground;
use super::meter::{Meter, Reading};
use super::{ms, ratio, whole};
use crate::contender::run as run_process;
use crate::findings::Findings;
use crate::report::Times;
use crate::{Outcome, Programs};

/// Number of measurements of each command.
const ROUNDS: usize = 5;
/// The node whose garbage collection is measured. The nodes with lower numbers have died in the part `dead-node`.
const NODE: &str = "node-15";
/// Stands for a folder in which a garbage collection remembers which blocks it has read; each measurement of a first
/// run has a folder of its own.
const NEW_MEMORY: &str = "{new}";
/// Stands for the folder in which the garbage collections of a node remember which blocks they have read.
const MEMORY: &str = "{kept}";

/// The measured commands, in the order of a round.
const COMMANDS: [(&str, &[&str]); 5] = [
    (
        "a node's first gc after a boot: `margay gc --boot --netns`",
        &["gc", "--boot", "--netns", "--node", NODE, "--looks", NEW_MEMORY],
    ),
    ("its later ones, as its timer runs them", &["gc", "--boot", "--netns", "--node", NODE, "--looks", MEMORY]),
    (
        "its daily one, if it reads all blocks: `--all-blocks`",
        &["gc", "--boot", "--netns", "--all-blocks", "--node", NODE, "--looks", NEW_MEMORY],
    ),
    ("an operator's `margay gc --gone`", &["gc", "--gone"]),
    ("an operator's `margay ipam check`", &["ipam", "check"]),
];

/// The measurements of one command on one etcd.
#[derive(Default)]
struct CommandCost {
    times: Times,
    work: Reading,
    mib: f64,
}

/// Measures all commands on all etcds in turns. `grounds` has the number of nodes of each etcd.
pub(super) fn measure<const COUNT: usize>(
    programs: &Programs,
    folder: &Path,
    grounds: [(u32, &Ground); COUNT],
    findings: &mut Findings,
) -> Outcome<()> {
    let mut costs: [[CommandCost; COMMANDS.len()]; COUNT] = std::array::from_fn(|_| Default::default());
    for round in 0..=ROUNDS {
        for ((nodes, ground), costs) in grounds.iter().zip(&mut costs) {
            for ((_, arguments), cost) in COMMANDS.iter().zip(costs) {
                let kept = folder.join(format!("gc-of-{nodes}"));
                let new = tempfile::tempdir_in(folder)?;
                let folders = [(MEMORY, kept.display().to_string()), (NEW_MEMORY, new.path().display().to_string())];
                let arguments: Vec<String> = arguments
                    .iter()
                    .map(|argument| {
                        folders.iter().fold((*argument).to_owned(), |text, (name, path)| text.replace(name, path))
                    })
                    .collect();
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                // The first round warms the stores up, creates the folder that is kept, and measures the memory.
                if round == 0 {
                    cost.mib = peak_mib(programs, ground, &arguments)?;
                    continue;
                }
                let meter = Meter::start(&ground.etcd)?;
                cost.times.push(run_process(operator_command(programs, ground, &arguments), "")?);
                cost.work.add(meter.stop()?);
            }
        }
    }
    let mut rows = Vec::new();
    for (place, (name, _)) in COMMANDS.iter().enumerate() {
        let of_command = || costs.iter().map(|costs| &costs[place]);
        let few = of_command().next().map_or(f64::NAN, |cost| cost.times.median());
        rows.extend(grounds.iter().zip(of_command()).map(|((nodes, _), cost)| {
            let each = |total: f64| total / ROUNDS as f64;
            vec![
                (*name).to_owned(),
                whole(f64::from(*nodes)),
                ms(cost.times.median()),
                ratio(cost.times.median() / few),
                whole(each(cost.work.requests)),
                format!("{:.1}", each(cost.work.bytes_received) / 1e6),
                ms(each(cost.work.etcd_seconds) * 1000.0),
                format!("{:.0}", cost.mib),
            ]
        }));
    }
    findings.table(
        "gc",
        format!(
            "Garbage collection and the commands that read a cluster, each node with 100 addresses, whole processes \
             without `--apply`, p50 of {ROUNDS} (ms)"
        ),
        &["", "among nodes", "p50", "/ 10 nodes", "requests", "MB read", "processor time of etcd", "memory (MiB)"],
        rows,
    );
    Ok(())
}

/// Returns a command of `margay` for the cluster's store.
pub(super) fn operator_command(programs: &Programs, ground: &Ground, arguments: &[&str]) -> Command {
    let mut command = Command::new(&programs.margay);
    command.arg("--store").arg(store_of(ground)).args(arguments).env_clear();
    command
}

fn store_of(ground: &Ground) -> String {
    format!("etcd://{}", ground.etcd.address())
}

/// Runs a command of `margay`, and returns its peak memory in MiB.
fn peak_mib(programs: &Programs, ground: &Ground, arguments: &[&str]) -> Outcome<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("peak-of").arg(&programs.margay).args(["", "--store", &store_of(ground)]).args(arguments).env_clear();
    let done = command.output()?;
    let kib: Result<f64, _> = String::from_utf8(done.stdout)?.trim().parse();
    let failed = || format!("margay {} failed: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr));
    Ok(kib.map_err(|_| failed())? / 1024.0)
}
