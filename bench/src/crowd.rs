//! Sixteen callers at once: how many ADDs a second, and whether everybody gets a turn.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::contender::Contender;
use crate::report::print;
use crate::{Outcome, Programs};

const CALLERS: usize = 16;
const ROUND: Duration = Duration::from_secs(4);
const ROUNDS: usize = 3;

/// What one contender did in all its rounds.
#[derive(Debug, Default)]
struct Tally {
    rates: Vec<f64>,
    spreads: Vec<f64>,
    failed: usize,
}

/// Measures rates and fairness.
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
            one_round(contender, round, tally);
        }
    }
    let median = |numbers: &[f64]| {
        let mut sorted = numbers.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
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

/// Every caller adds as fast as it can until the time is over; then everything is deleted again, unmeasured.
fn one_round(contender: &Contender, round: usize, tally: &mut Tally) {
    let over = AtomicBool::new(false);
    let start = Instant::now();
    let callers: Vec<(usize, usize)> = thread::scope(|scope| {
        let call = |caller: usize| {
            let over = &over;
            move || {
                let (mut done, mut failed) = (0, 0);
                while !over.load(Relaxed) {
                    match contender.add(&format!("r{round}c{caller}n{done}")) {
                        Ok(_) => done += 1,
                        Err(_) => failed += 1,
                    }
                }
                (done, failed)
            }
        };
        let running: Vec<_> = (0..CALLERS).map(|caller| scope.spawn(call(caller))).collect();
        thread::sleep(ROUND);
        over.store(true, Relaxed);
        running.into_iter().map(|caller| caller.join().unwrap_or((0, 1))).collect()
    });
    let elapsed = start.elapsed().as_secs_f64();
    let done: Vec<usize> = callers.iter().map(|(done, _)| *done).collect();
    let sum: usize = done.iter().sum();
    let (most, least) = (done.iter().max().unwrap_or(&0), done.iter().min().unwrap_or(&0));
    tally.rates.push(sum as f64 / elapsed);
    tally.spreads.push((most - least) as f64 * CALLERS as f64 / (sum.max(1) as f64));
    tally.failed += callers.iter().map(|(_, failed)| failed).sum::<usize>();
    for (caller, (done, _)) in callers.iter().enumerate() {
        for number in 0..*done {
            if contender.del(&format!("r{round}c{caller}n{number}")).is_err() {
                tally.failed += 1;
            }
        }
    }
}
