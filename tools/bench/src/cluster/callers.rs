//! Measures many concurrent callers of the plugin on one node. Each call of the plugin is a process of its own.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::ground::{Families, Ground};
use super::{ms, ratio, runtime, whole};
use crate::contender::Contender;
use crate::findings::{Bound, Findings};
use crate::report::{Times, median};
use crate::serve::Daemon;
use crate::{Outcome, Programs};

pub(crate) const CALLERS: usize = 16;
/// Number of ADDs that each caller makes in a round.
pub(crate) const EACH: usize = 30;
const ROUNDS: usize = 10;
const RESIDENTS: u64 = 40;

/// The CNI verb of the measured calls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Add,
    Del,
}

#[derive(Debug, Default)]
struct Tally {
    adds: Times,
    rates: Vec<f64>,
    del_rates: Vec<f64>,
}

/// Measures the rates and latencies of concurrent callers for each contender.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let runtime = runtime()?;
    let ground = runtime.block_on(async {
        let ground = Ground::start(folder).await?;
        ground.settle(["busy".to_owned()], 0, &[RESIDENTS]).await?;
        Outcome::Ok(ground)
    })?;
    let agent = "margay-ipam, with the agent";
    let contenders = [
        ground.floor(programs),
        ground.contender(programs, "margay-ipam", "busy", Families::V4),
        ground.contender(programs, agent, "busy", Families::V4),
    ];
    let url = format!("etcd://{}", ground.etcd.address());
    let mut tallies = contenders.each_ref().map(|_| Tally::default());
    for round in 0..ROUNDS {
        for (contender, tally) in contenders.iter().zip(&mut tallies) {
            let _agent = (contender.name() == agent).then(|| Daemon::start(programs, &url)).transpose()?;
            let (elapsed, adds) = at_once(contender, Verb::Add, round)?;
            tally.adds.append(adds);
            tally.rates.push((CALLERS * EACH) as f64 / elapsed.as_secs_f64());
            let (elapsed, dels) = at_once(contender, Verb::Del, round)?;
            if dels.median() > 0.0 {
                tally.del_rates.push((CALLERS * EACH) as f64 / elapsed.as_secs_f64());
            }
        }
    }
    let floor = median(&tallies[0].rates);
    let row = |(contender, tally): (&Contender, &Tally)| {
        let del = median(&tally.del_rates);
        vec![
            contender.name().to_owned(),
            whole(median(&tally.rates)),
            ratio(median(&tally.rates) / floor),
            if del.is_nan() { "-".to_owned() } else { whole(del) },
            ms(tally.adds.median()),
            ms(tally.adds.quantile(0.99)),
        ]
    };
    let mut findings = Findings::default();
    findings.table(
        "callers",
        format!(
            "{CALLERS} callers at once on one node, {ROUNDS} rounds of {} calls, each a process (ms)",
            CALLERS * EACH
        ),
        &["", "ADD/s", "/ floor", "DEL/s", "ADD p50", "p99"],
        contenders.iter().zip(&tallies).map(row).collect(),
    );
    for (what, tally) in [("", &tallies[1]), (", with the agent", &tallies[2])] {
        findings.goal(&format!("16 callers on one node{what}: ADD/s"), median(&tally.rates), Bound::AtLeast(300.0));
    }
    Ok(findings)
}

/// Runs all callers of the plugin concurrently. Returns the time until the last caller has ended, and the duration of
/// each call.
pub(crate) fn at_once(contender: &Contender, verb: Verb, round: usize) -> Outcome<(Duration, Times)> {
    let begun = Instant::now();
    let calls = |caller: usize| {
        let mut times = Times::default();
        for number in 0..EACH {
            let id = format!("r{round}c{caller}n{number}");
            match verb {
                Verb::Add => times.push(contender.add(&id).map_err(|error| error.to_string())?),
                Verb::Del => times.extend(contender.del(&id).map_err(|error| error.to_string())?),
            }
        }
        Ok::<_, String>(times)
    };
    let times: Vec<Result<Times, String>> = thread::scope(|scope| {
        let running: Vec<_> = (0..CALLERS).map(|caller| scope.spawn(move || calls(caller))).collect();
        running.into_iter().map(|caller| caller.join().unwrap_or_else(|_| Err("a caller panicked".into()))).collect()
    });
    let elapsed = begun.elapsed();
    let mut all = Times::default();
    for times in times {
        all.append(times?);
    }
    Ok((elapsed, all))
}
