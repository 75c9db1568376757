//! Tests watches with progress reports.

use std::time::{Duration, Instant};

use kv::{Op, Progress, Range, Revision, StoreExt, WatchRequest};

use crate::expect::{Checked, Failure, JudgedByRule, holds, same};
use crate::subject::{BoundedHandle, Subject};
use crate::watcher::Watcher;

/// Maximum delay of a watch's progress report (rule W19).
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(1);

async fn reporting(t: &BoundedHandle, range: Range, start: Revision) -> Checked<Watcher> {
    t.watcher_of(WatchRequest::new(range, start).with_progress(Progress::Report)).await
}

/// One client writes keys in the watched range, and a second client writes keys outside of it. The watch must deliver
/// every event in the watched range. After a progress report, no event of the reported revision or an earlier one may
/// arrive.
pub(crate) async fn never_ahead(t: Subject) -> Checked {
    const WRITES: usize = 200;
    let base = t.revision().await?;
    let mut watcher = reporting(&t, Range::prefix("p/"), base.next()).await?;
    let writer = t.another().await?;
    let within = tokio::spawn(async move { writer.write_all(WRITES, |i| Op::put("p/k", format!("{i}"))).await });
    let writer = t.another().await?;
    let beside = tokio::spawn(async move { writer.write_all(WRITES, |i| Op::put("q/k", format!("{i}"))).await });
    let mut events = 0;
    while events < WRITES {
        let batch = watcher.next().await?;
        events += batch.events.len();
    }
    within.await??;
    beside.await??;
    // A watch that starts in the past must also report correct progress.
    let mut again = reporting(&t, Range::prefix("p/"), base.next()).await?;
    let mut events = 0;
    while events < WRITES {
        events += again.next().await?.events.len();
    }
    same("the events of the watch from the past", events, WRITES).of("W2")
}

/// A watch whose client did not request progress reports must deliver only events.
pub(crate) async fn not_unasked(t: Subject) -> Checked {
    let base = t.put("p/k", "v").await?;
    let mut watcher = t.watcher(Range::prefix("p/"), base.next()).await?;
    for i in 0..20 {
        t.put("q/k", format!("{i}")).await?;
    }
    let last = t.put("p/k", "last").await?;
    same("the next batch", watcher.next().await?.revision, last).of("W18")
}

/// A watch must report a revision at most one second after a client has read that revision.
pub(crate) async fn soon(t: Subject) -> Checked {
    let base = t.put("p/k", "v").await?;
    let mut watcher = reporting(&t, Range::prefix("p/"), base.next()).await?;
    for round in 0..3 {
        let mut wanted = t.put("q/k", format!("{round}")).await?;
        if round == 2 {
            wanted = t.put("p/k", "in the range").await?;
        }
        let begun = Instant::now();
        while watcher.resume_from() <= wanted {
            watcher.next().await?;
        }
        let took = begun.elapsed();
        // The limit of one second for progress reports grows with the load of the machine.
        holds("progress within a second", took < PROGRESS_TIMEOUT.max(t.patience() / 10), &took).of("W19")?;
    }
    let Some(seen) = watcher.seen_progress() else {
        return Err(Failure::new("a watch with progress", "a report", "none")).of("W19");
    };
    holds("a report at or after the first write beside", seen > base, &seen).of("W19")
}
