//! Tests a store on a simulated disk that can lose power and, with it, unsynced writes.

use fastrand::Rng;
use kv::{Outcome, Range, Revision};

use crate::expect::{Checked, Failure, JudgedByRule, holds};
use crate::seed::{SEED, seed};
use crate::steps::Steps;
use crate::subject::{BoundedHandle, Subject};

const POWER_CUTS: u64 = 200;
const MAX_OPERATIONS_PER_CUT: u32 = 160;

/// The power of the simulated disk fails at a random disk operation, while the store is used or opened. After a power
/// cut, no acknowledged or seen write may be lost, and no write with the outcome "not applied" may exist. Each step (a
/// numbered transaction) must be complete or missing.
pub(crate) async fn power_cuts(mut t: Subject) -> Checked {
    let steps = Steps { width: 3, base: t.revision().await? };
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut done = 0;
    for cut in 0..POWER_CUTS {
        t.next_round();
        t.cut_power_after(random.u32(0..MAX_OPERATIONS_PER_CUT))?;
        if cut % 3 == 2 {
            t.reopen_without_power().await?;
        }
        let work = WorkBeforeCut::until_it_fails(&t.handle(), done).await;
        t.restore_power(random.u64(..)).await?;
        let note = |failure: Failure| failure.with_note(&format!("{SEED}={seed}, cut {cut}"));
        let now = t.revision().await?;
        holds(&format!("revision {} or later, which was seen", work.seen), now >= work.seen, &now)
            .of("S4")
            .map_err(note)?;
        done = steps.check_crashed(&t, work.done).await.map_err(note)?;
        let lie = work.outcome == Outcome::NotApplied && done > work.done;
        holds("nothing of a step that failed as not applied", !lie, &done).of("E2").map_err(note)?;
    }
    holds("some work between the cuts", done > POWER_CUTS / 2, &done)
}

/// The store's actions between two power cuts of the simulated disk.
struct WorkBeforeCut {
    /// The number of steps that the store acknowledged before the power cut.
    done: u64,
    /// The [`Outcome`] that the error of the first failed step reports.
    outcome: Outcome,
    /// The newest revision that a reader or a watch saw before the power cut.
    seen: Revision,
}

impl WorkBeforeCut {
    async fn until_it_fails(store: &BoundedHandle, first: u64) -> Self {
        let mut work = Self { done: first, outcome: Outcome::Unknown, seen: Revision::UNSET };
        let mut watch = match store.revision().await {
            Ok(now) => store.watcher(Range::prefix("step/"), now.next()).await.ok(),
            Err(_) => None,
        };
        loop {
            let reader = async { store.read(Range::key("?")).await.map_or(Revision::UNSET, |found| found.revision) };
            let (written, seen) = futures::join!(store.txn(Steps::txn(3, work.done)), reader);
            work.seen = work.seen.max(seen);
            match written {
                Ok(_) => work.done += 1,
                Err(error) => {
                    work.outcome = error.outcome();
                    return work;
                }
            }
            if let Some(watcher) = &mut watch {
                match watcher.step().await {
                    Ok(Ok(batch)) => work.seen = work.seen.max(batch.revision),
                    _ => watch = None,
                }
            }
        }
    }
}
