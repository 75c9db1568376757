//! Measures many concurrent callers of the plugins: the ADDs per second, how evenly the callers are served, and the
//! longest wait.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::contender::Contender;
use crate::report::{Times, median, print};
use crate::{Outcome, Programs};

const CALLERS: usize = 16;
const QUEUED_CALLERS: usize = 32;
const ROUND: Duration = Duration::from_secs(4);
const ROUNDS: usize = 3;

#[derive(Debug, Default)]
struct Tally {
    rates: Vec<f64>,
    spreads: Vec<f64>,
    failed: usize,
    /// For each round, the duration of the longest call divided by the mean duration of all calls.
    worst: Vec<f64>,
}

/// Measures for each contender the rate of ADDs and how evenly the callers are served.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<()> {
    let folder = folder.join("crowd");
    std::fs::create_dir(&folder)?;
    let contenders = [
        Contender::host_local(programs, &folder),
        Contender::margay(programs, &folder, "margay-ipam on redb", "redb"),
        Contender::margay(programs, &folder, "margay-ipam on sled", "sled"),
    ];
    let mut tallies: Vec<Tally> = contenders.iter().map(|_| Tally::default()).collect();
    for contender in &contenders {
        contender.add("first")?;
    }
    for round in 0..ROUNDS {
        for (contender, tally) in contenders.iter().zip(&mut tallies) {
            one_round(contender, CALLERS, round, tally);
        }
    }
    let peer = median(&tallies[0].rates);
    let rows = contenders.iter().zip(&tallies).map(|(contender, tally)| {
        let rate = median(&tally.rates);
        vec![
            contender.name().to_owned(),
            format!("{rate:.0}"),
            format!("{:.2}", rate / peer),
            tally.failed.to_string(),
            format!("{:.0} %", median(&tally.spreads) * 100.0),
        ]
    });
    print(
        &format!("{CALLERS} callers at once, {ROUNDS} rounds of {} s in turns", ROUND.as_secs()),
        &["", "ADD/s", "/ host-local", "failed", "turns per caller, (max - min) / mean"],
        rows.collect(),
    );
    Ok(())
}

/// Measures how evenly the queue for the store lock serves its callers.
pub(crate) fn queue(programs: &Programs, folder: &Path) -> Outcome<()> {
    let folder = folder.join("queue");
    std::fs::create_dir(&folder)?;
    let mut rows = Vec::new();
    for engine in ["redb", "sled"] {
        let contender = Contender::margay(programs, &folder, "margay-ipam", engine);
        contender.add("first")?;
        let mut tally = Tally::default();
        for round in 0..ROUNDS {
            one_round(&contender, QUEUED_CALLERS, round, &mut tally);
        }
        rows.push(vec![
            engine.to_owned(),
            format!("{:.0}", median(&tally.rates)),
            format!("{:.0} %", median(&tally.spreads) * 100.0),
            "10 %".to_owned(),
            format!("{:.1}", median(&tally.worst)),
            "3.0".to_owned(),
            tally.failed.to_string(),
        ]);
    }
    print(
        &format!("{QUEUED_CALLERS} callers in the queue, {ROUNDS} rounds of {} s", ROUND.as_secs()),
        &["", "ADD/s", "turns, (max - min) / mean", "at most", "longest call / mean", "at most", "failed"],
        rows,
    );
    Ok(())
}

/// All callers add containers as fast as possible until the time is over. After the timed ADDs, their containers are
/// deleted; this is not measured.
fn one_round(contender: &Contender, callers: usize, round: usize, tally: &mut Tally) {
    let over = AtomicBool::new(false);
    let start = Instant::now();
    let callers: Vec<(usize, usize, Times)> = thread::scope(|scope| {
        let call = |caller: usize| {
            let over = &over;
            move || {
                let (mut done, mut failed, mut times) = (0, 0, Times::default());
                while !over.load(Relaxed) {
                    match contender.add(&format!("r{round}c{caller}n{done}")) {
                        Ok(time) => {
                            done += 1;
                            times.push(time);
                        }
                        Err(_) => failed += 1,
                    }
                }
                (done, failed, times)
            }
        };
        let running: Vec<_> = (0..callers).map(|caller| scope.spawn(call(caller))).collect();
        thread::sleep(ROUND);
        over.store(true, Relaxed);
        running.into_iter().map(|caller| caller.join().unwrap_or((0, 1, Times::default()))).collect()
    });
    let elapsed = start.elapsed().as_secs_f64();
    let done: Vec<usize> = callers.iter().map(|(done, ..)| *done).collect();
    let sum: usize = done.iter().sum();
    let (most, least) = (done.iter().max().unwrap_or(&0), done.iter().min().unwrap_or(&0));
    tally.rates.push(sum as f64 / elapsed);
    tally.spreads.push((most - least) as f64 * callers.len() as f64 / (sum.max(1) as f64));
    tally.failed += callers.iter().map(|(_, failed, _)| failed).sum::<usize>();
    let longest = callers.iter().map(|(.., times)| times.quantile(1.0)).fold(0.0, f64::max);
    let mean = callers.iter().map(|(.., times)| times.sum()).sum::<f64>() / sum.max(1) as f64;
    tally.worst.push(longest / mean);
    for (caller, (done, ..)) in callers.iter().enumerate() {
        for number in 0..*done {
            if contender.del(&format!("r{round}c{caller}n{number}")).is_err() {
                tally.failed += 1;
            }
        }
    }
}
