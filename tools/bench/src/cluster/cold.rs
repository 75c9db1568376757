//! Compares the calls of a single caller, each in a new process, with a program that only connects to etcd and commits.

use std::fs;
use std::path::Path;

use super::ground::{Families, Ground};
use super::{ms, ratio, runtime};
use crate::contender::{Contender, in_turns};
use crate::fill;
use crate::findings::{Bound, Findings};
use crate::once::add_and_del;
use crate::single::peak_kib;
use crate::{Outcome, Programs};

/// The number of measurements of each contender.
const ROUNDS: u32 = 300;
/// Number of containers on a node before the measurement begins.
const RESIDENTS: u64 = 40;
/// The index of the minimal program in the list of contenders.
const FLOOR: usize = 1;
const ONE_ADDRESS: usize = 2;
const BOTH_FAMILIES: usize = 3;
const COPY: usize = 5;
const BASELINE: usize = 6;

/// Runs each kind of plugin call once with an instrumented plugin, which records the code that it executes.
pub(crate) fn call(programs: &Programs, folder: &Path) -> Outcome<()> {
    let runtime = runtime()?;
    let ground = runtime.block_on(settled(folder))?;
    plugins(&ground, programs).iter().try_for_each(|contender| add_and_del(contender, 2))
}

/// Starts an etcd with registered nodes, two of which have containers.
async fn settled(folder: &Path) -> Outcome<Ground> {
    let ground = Ground::start(folder).await?;
    ground.settle(["steady", "dual"].map(String::from), 0, &[RESIDENTS]).await?;
    let v6 = fill::block_of("dual", "fd00:10::/122".parse()?, 10_000..10_000 + RESIDENTS)?;
    ground.write(v6).await?;
    ground.register((0..ROUNDS).map(|round| format!("new-c{round}"))).await?;
    Ok(ground)
}

fn plugins(ground: &Ground, programs: &Programs) -> [Contender; 3] {
    [
        ground.contender(programs, "one address", "steady", Families::V4),
        ground.contender(programs, "IPv4 and IPv6", "dual", Families::Both),
        ground.newcomer(programs, "the first address of a host"),
    ]
}

/// Measures ADD and DEL of each contender, and the memory and the size of the plugin.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let runtime = runtime()?;
    let ground = runtime.block_on(settled(folder))?;
    let mut contenders = vec![Contender::Empty { program: programs.floor_empty.clone() }, ground.floor(programs)];
    contenders.extend(plugins(&ground, programs));
    if let Some(baseline) = &programs.baseline {
        // The baseline's program file is executed once per round, and the current plugin's three times, so the
        // baseline's file is less often in the processor's caches. Because of the processor's caches, a baseline that
        // is the same build as the plugin appears 4 % slower. The baseline plugin is run from a separate file, so the
        // current plugin is measured from a copied file as well.
        let copy = folder.join("margay-ipam-again");
        fs::copy(&programs.plugin, &copy)?;
        contenders.extend([
            contenders[ONE_ADDRESS].with_plugin("one address, from a copy of the file", &copy),
            contenders[ONE_ADDRESS].with_plugin("the baseline", baseline),
        ]);
    }
    // Each contender has a warm-up run, except the one that uses a new node for each container.
    for contender in contenders.iter().filter(|contender| !contender.is_per_container()) {
        contender.add("warm")?;
        contender.del("warm")?;
    }
    let (adds, dels) = in_turns(&contenders, ROUNDS)?;
    let floor = adds[FLOOR].median();
    let row = |who: usize| {
        let (add, del) = (&adds[who], &dels[who]);
        let has_del = !del.median().is_nan();
        let of_del = |text: String| if has_del { text } else { "-".to_owned() };
        vec![
            contenders[who].name().to_owned(),
            ms(add.median()),
            ms(add.quantile(0.9)),
            ratio(add.median() / floor),
            of_del(ms(del.median())),
            of_del(ms(del.quantile(0.9))),
            of_del(ratio(del.median() / floor)),
        ]
    };
    let mut findings = Findings::default();
    findings.table(
        "cold",
        format!("Whole cold processes on etcd, {ROUNDS} runs each in turns, {RESIDENTS} containers on the node (ms)"),
        &["", "ADD p50", "p90", "/ floor", "DEL p50", "p90", "/ floor"],
        (0..contenders.len()).map(row).collect(),
    );
    let one = &adds[ONE_ADDRESS];
    findings.goal("cold ADD / floor", one.median() / floor, Bound::AtMost(1.5));
    findings.goal("cold DEL / floor", dels[ONE_ADDRESS].median() / floor, Bound::AtMost(1.5));
    findings.goal("cold ADD for IPv4 and IPv6 / floor", adds[BOTH_FAMILIES].median() / floor, Bound::AtMost(1.8));
    if let Some(baseline) = adds.get(BASELINE) {
        findings.goal("cold ADD / the baseline's", adds[COPY].median() / baseline.median(), Bound::AtMost(1.03));
    }
    let peak = peak_kib(&contenders[ONE_ADDRESS])?;
    findings.goal("memory of one ADD (MiB)", peak / 1024.0, Bound::AtMost(12.0));
    let bytes = fs::metadata(&programs.plugin)?.len();
    findings.goal("the plugin's file (MB)", bytes as f64 / 1e6, Bound::AtMost(9.0));
    Ok(findings)
}
