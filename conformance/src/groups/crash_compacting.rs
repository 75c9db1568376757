//! Tests a store whose processes are killed during compactions.

use std::time::Duration;

use kv::{Op, Range, RangeRequest, StoreExt, Txn};

use super::crash::in_round;
use crate::expect::{Checked, Failure, JudgedByRule, compacted, holds, same};
use crate::harness::BoxError;
use crate::process::{RoleJob, moment, number, say};
use crate::steps::Steps;
use crate::subject::{BoundedHandle, Subject, after};

/// Number of steps between two compactions.
const COMPACT_EVERY: u64 = 10;
const STEP_WIDTH: u64 = 60;

/// Child role: writes steps of 60 keys each; after every tenth step, compacts the store at the revision of the previous
/// step.
pub(crate) async fn compact(job: RoleJob<'_>) -> Result<(), BoxError> {
    let (base, first) = (job.argument(0)?, job.argument(1)?);
    let fixture = job.join().await?;
    let store = fixture.store();
    for n in first.. {
        let revision = store.txn(Steps::txn(STEP_WIDTH, n)).await?.revision;
        say(format_args!("done {n}"))?;
        if n % COMPACT_EVERY == COMPACT_EVERY - 1 {
            let mark = after(revision, -1);
            let marked = mark.get().unsigned_abs() - base;
            say(format_args!("try {marked}"))?;
            store.compact(mark).await?;
            say(format_args!("mark {marked}"))?;
        }
    }
    Ok(())
}

/// The progress that a compacting child process has reported.
#[derive(Clone, Copy, Debug, Default)]
struct CompactionProgress {
    done: u64,
    /// The step whose revision is the store's compaction mark.
    mark: u64,
    /// The step at which the last compaction was started.
    tried: u64,
}

impl CompactionProgress {
    fn hear(&mut self, line: &str) -> Checked {
        match line.split_once(' ') {
            Some(("done", n)) => self.done = number(n)? + 1,
            Some(("try", n)) => self.tried = number(n)?,
            Some(("mark", n)) => self.mark = number(n)?,
            _ => return Err(Failure::new("what another process says", "done, try or mark", line)),
        }
        Ok(())
    }
}

/// After a kill during a compaction, the store has the old or the new compaction mark, and every state from that mark
/// on is readable.
pub(crate) async fn killed_while_compacting(mut t: Subject) -> Checked {
    let rounds = 100;
    let steps = Steps { width: STEP_WIDTH, base: t.revision().await? };
    let base = steps.base.get().unsigned_abs();
    let mut known = CompactionProgress::default();
    let mut taken = Duration::from_millis(1);
    t.let_go().await?;
    for round in 0..rounds {
        t.next_round();
        let mut process = t.process("compact", &[base, known.done])?;
        let mut compactions = 0;
        while compactions <= round % 2 {
            let line = process.line().await?.unwrap_or_default();
            known.hear(&line)?;
            compactions += u64::from(line.starts_with("try"));
        }
        if round == 0 {
            let started = process.age();
            known.hear(&process.line().await?.unwrap_or_default())?;
            taken = process.age() - started;
        } else {
            moment(taken * u32::try_from(round * 7 % 24).unwrap_or_default() / 20).await;
        }
        for line in process.kill().await? {
            known.hear(&line)?;
        }
        t.retake().await?;
        known = check_compacted(&t, &steps, known).await.map_err(|failure| in_round(failure, round))?;
        t.let_go().await?;
    }
    Ok(())
}

async fn check_compacted(
    t: &BoundedHandle,
    steps: &Steps,
    mut known: CompactionProgress,
) -> Checked<CompactionProgress> {
    known.done = steps.check_crashed(t, known.done).await?;
    if known.tried == 0 {
        return Ok(known);
    }
    let below = |mark| RangeRequest::new(Range::key("?")).with_at(after(steps.revision(mark), -1));
    // A read just below the new compaction mark fails if and only if the compaction has taken effect.
    if known.mark < known.tried && t.range(below(known.tried)).await.is_err() {
        known.mark = known.tried;
    }
    if known.mark > 0 {
        compacted("a read below the mark", t.range(below(known.mark)).await, steps.revision(known.mark))?;
    }
    for at in [known.mark, known.mark + 1, known.done] {
        steps.check_past(t, at.min(known.done)).await?;
    }
    let first = steps.revision(known.mark.max(1));
    let events = t.watcher(Range::prefix("step/"), first).await?.until(steps.revision(known.done)).await.of("C6")?;
    same("how many revisions a watch from the mark has", events.len() as u64, known.done + 1 - known.mark.max(1))
        .of("C6")?;
    Ok(known)
}

/// Child role: repeatedly creates a key, deletes it, and compacts the store at the revision of the deletion.
pub(crate) async fn compact_deletions(job: RoleJob<'_>) -> Result<(), BoxError> {
    let fixture = job.join().await?;
    let store = fixture.store();
    loop {
        store.put("gone", "v").await?;
        let revision = store.txn(Txn::new().with_success([Op::delete("gone")])).await?.revision;
        say(format_args!("at {revision}"))?;
        store.compact(revision).await?;
        say(format_args!("at {revision}"))?;
    }
}

/// A store must keep its revision if it is compacted at its newest revision, which is a deletion, and its process is
/// then killed.
pub(crate) async fn deletion_compacted_and_killed(mut t: Subject) -> Checked {
    let rounds = 50;
    t.let_go().await?;
    for round in 0..rounds {
        t.next_round();
        let mut process = t.process("compact_deletions", &[])?;
        let mut last = 0;
        for _ in 0..1 + round % 5 {
            last = number(&process.say("at").await?)?;
        }
        moment(Duration::from_micros(round * 37 % 700)).await;
        for line in process.kill().await? {
            last = number(line.trim_start_matches("at"))?;
        }
        t.retake().await?;
        let now = t.revision().await?;
        holds(&format!("revision {last} or later, after kill {round}"), now.get().unsigned_abs() >= last, &now)?;
        same("the revision of the next write", t.put("next", "v").await?, now.next())?;
        t.let_go().await?;
    }
    Ok(())
}
