//! Tests watches that start at a past, compacted or future revision, and watches that resume after a disconnect.

use kv::{ErrorKind, EventKind, MAX_TXN_OPS, Op, Prev, Range, Revision, StoreExt, WatchRequest};

use crate::expect::{Checked, JudgedByRule, holds, is_compacted, same};
use crate::subject::{BoundedHandle, Subject, after};
use crate::watcher::Watcher;

/// Puts `p/k` `count` times, and returns the revisions of the puts.
async fn puts(t: &BoundedHandle, count: usize) -> Checked<Vec<Revision>> {
    let mut revisions = Vec::with_capacity(count);
    for i in 0..count {
        revisions.push(t.put("p/k", format!("v{i}")).await?);
    }
    Ok(revisions)
}

/// Checks that a watch of `p/` delivers each revision from `start` to `last` with exactly one event.
async fn gives_all(watcher: &mut Watcher, start: Revision, last: Revision) -> Checked {
    let batches = watcher.until(last).await?;
    let seen: Vec<i64> = batches.iter().map(|batch| batch.revision.get()).collect();
    let expected: Vec<i64> = (start.get()..=last.get()).collect();
    same("every revision once, in order", seen, expected).of("W2")
}

pub(crate) async fn replay_then_live(t: Subject) -> Checked {
    const PAST: usize = 50;
    const LIVE: usize = 100;
    let base = t.revision().await?;
    puts(&t, PAST).await?;
    let writer = t.another().await?;
    let writes = tokio::spawn(async move { writer.write_all(LIVE, |i| Op::put(format!("p/{i}"), "live")).await });
    // Several watches start one after another while the writer runs. Each watch switches from past to live events at a
    // different revision.
    for _ in 0..5 {
        let mut watcher = t.watcher(Range::prefix("p/"), base.next()).await?;
        gives_all(&mut watcher, base.next(), after(base, PAST as i64)).await?;
    }
    let mut watcher = t.watcher(Range::prefix("p/"), base.next()).await?;
    gives_all(&mut watcher, base.next(), after(base, (PAST + LIVE) as i64)).await?;
    writes.await?
}

pub(crate) async fn starts(t: Subject) -> Checked {
    let now = puts(&t, 3).await?[2];
    let mut inclusive = t.watcher(Range::prefix("p/"), now).await?;
    let mut next = t.watcher(Range::prefix("p/"), now.next()).await?;
    let mut later = t.watcher(Range::prefix("p/"), after(now, 3)).await?;
    same("the first batch of a watch from now", inclusive.next().await?.revision, now)?;
    let last = puts(&t, 4).await?[3];
    gives_all(&mut next, now.next(), last).await?;
    gives_all(&mut inclusive, now.next(), last).await?;
    same("the first batch of a watch from the future", later.next().await?.revision, after(now, 3)).of("W9")?;
    same("its next batch", later.next().await?.revision, last).of("W9")
}

pub(crate) async fn future_and_other_keys(t: Subject) -> Checked {
    let now = t.put("p/k", "v").await?;
    let mut watcher = t.watcher(Range::prefix("p/"), after(now, 5)).await?;
    for i in 0..4 {
        t.put("p/k", format!("too early {i}")).await?;
    }
    t.put("q/k", "the start, but of another key").await?;
    let first = t.put("p/k", "wanted").await?;
    same("the first batch", watcher.next().await?.revision, first)
}

/// Checks that a watch ends with `Compacted` before it delivers any event.
async fn is_too_late(t: &BoundedHandle, range: Range, start: Revision, mark: Revision) -> Checked {
    let mut watcher = t.watcher(range.clone(), start).await?;
    match watcher.step().await? {
        Err(kind) => is_compacted(&format!("a watch of {range} from {start}, below the mark"), &kind, mark)?,
        Ok(batch) => holds("no batch from below the mark", false, &batch)?,
    }
    watcher.over().await
}

pub(crate) async fn start_below_mark(t: Subject) -> Checked {
    let revisions = puts(&t, 6).await?;
    let mark = revisions[3];
    t.compact(mark).await?;
    for start in [Revision::new(1), revisions[0], revisions[2]] {
        is_too_late(&t, Range::prefix("p/"), start, mark).await?;
        is_too_late(&t, Range::prefix("nothing/"), start, mark).await?;
        is_too_late(&t, Range::key("p/k"), start, mark).await?;
    }
    gives_all(&mut t.watcher(Range::prefix("p/"), mark).await?, mark, revisions[5]).await
}

pub(crate) async fn start_at_mark_put(t: Subject) -> Checked {
    let revisions = puts(&t, 5).await?;
    let mark = revisions[2];
    t.compact(mark).await?;
    let ask = WatchRequest::new(Range::prefix("p/"), mark).with_prev(Prev::Return);
    let batches = t.watcher_of(ask).await?.until(revisions[4]).await?;
    same("the first batch", batches.first().map(|batch| batch.revision), Some(mark))?;
    for (batch, before) in batches.iter().zip([revisions[1], revisions[2], revisions[3]]) {
        let prev = batch.events[0].prev.as_ref().map(|kv| kv.mod_revision);
        let at_mark = batch.revision == mark && prev.is_none();
        holds("the exact previous value; at the mark it may be missing", at_mark || prev == Some(before), batch)
            .of("W6")?;
    }
    Ok(())
}

pub(crate) async fn start_at_mark_delete(t: Subject) -> Checked {
    puts(&t, 2).await?;
    t.put("p/stays", "v").await?;
    let mark = t.run([Op::delete("p/k")]).await?.revision;
    t.put("p/stays", "later").await?;
    t.compact(mark).await?;
    let batch = t.watcher(Range::prefix("p/"), mark).await?.next().await?;
    same("the first batch", batch.revision, mark)?;
    let seen: Vec<_> = batch.events.iter().map(|event| (event.kind, event.kv.key.to_string())).collect();
    same("its events", seen, vec![(EventKind::Delete, "p/k".to_owned())])
}

pub(crate) async fn overtaken_by_mark(t: Subject) -> Checked {
    const WRITES: usize = 40;
    let base = t.revision().await?;
    let mut watcher = t.watcher(Range::prefix("p/"), base.next()).await?;
    puts(&t, WRITES).await?;
    let mark = after(base, WRITES as i64 / 2);
    t.compact(mark).await?;
    let last = puts(&t, 1).await?[0];
    all_or_compacted(&mut watcher, base.next(), last, mark).await
}

/// Checks that a watch delivers all revisions from `start` to the last one without a gap, or ends with `Compacted`.
pub(crate) async fn all_or_compacted(
    watcher: &mut Watcher,
    start: Revision,
    last: Revision,
    mark: Revision,
) -> Checked {
    let mut next = start;
    while next <= last {
        match watcher.step().await? {
            Ok(batch) => same("the next revision, without a gap", batch.revision, next)?,
            Err(kind) => {
                holds("Compacted only below the mark", next < mark, &(next, mark))?;
                is_compacted("the end of a watch that the mark overtook", &kind, mark)?;
                return watcher.over().await;
            }
        }
        next = next.next();
    }
    Ok(())
}

pub(crate) async fn goes_on_past_its_mark(t: Subject) -> Checked {
    let base = t.revision().await?;
    let mut watcher = t.watcher(Range::prefix("p/"), base.next()).await?;
    let mut quiet = t.watcher(Range::prefix("quiet/"), base.next()).await?;
    for round in 0..5 {
        let revisions = puts(&t, 4).await?;
        gives_all(&mut watcher, revisions[0], revisions[3]).await?;
        t.compact(revisions[3]).await?;
        same("the revision", t.revision().await?, after(base, 4 * (round + 1))).of("C2")?;
    }
    // The watch of the range `quiet/` has delivered no event so far, so the revision from which it continues may be
    // compacted. Once a key in the range `quiet/` is put again, the watch of this range must deliver the put, or end
    // with `Compacted` if its position was compacted.
    let last = t.put("quiet/k", "v").await?;
    match quiet.step().await? {
        Ok(batch) => same("the first batch of a watch of a quiet range", batch.revision, last)?,
        Err(kind) => holds("its event or Compacted", matches!(kind, ErrorKind::Compacted { .. }), &kind)?,
    }
    let next = t.put("p/k", "v").await?;
    same("the next batch of a watch that keeps up", watcher.next().await?.revision, next)
}

pub(crate) async fn large_txn_replayed(t: Subject) -> Checked {
    let base = t.revision().await?;
    let at = t.run((0..MAX_TXN_OPS).map(|i| Op::put(format!("p/{i:03}"), "v"))).await?.revision;
    t.put("p/last", "v").await?;
    let batch = t.watcher(Range::prefix("p/"), base.next()).await?.next().await?;
    same("the revision of the batch", batch.revision, at)?;
    same("how many events it has", batch.events.len(), MAX_TXN_OPS)?;
    let in_order = batch.events.iter().enumerate().all(|(i, event)| event.kv.key.to_string() == format!("p/{i:03}"));
    holds("the events in the order of operations", in_order, &batch).of("W2")
}

pub(crate) async fn resumes_after_reopen(mut t: Subject) -> Checked {
    let base = t.revision().await?;
    let last = puts(&t, 10).await?[9];
    let mut first = t.watcher(Range::prefix("p/"), base.next()).await?;
    gives_all(&mut first, base.next(), after(base, 6)).await?;
    let resume = first.resume_from();
    drop(first);
    t.reopen().await?;
    let mut second = t.watcher(Range::prefix("p/"), resume).await?;
    gives_all(&mut second, resume, last).await?;
    let live = t.put("p/k", "live").await?;
    same("the next batch, live", second.next().await?.revision, live)
}

pub(crate) async fn resumes_anywhere(t: Subject) -> Checked {
    let base = t.revision().await?;
    let last = puts(&t, 12).await?[11];
    let mut from = base.next();
    while from <= last {
        let handle = t.another().await?;
        let mut watcher = handle.watcher(Range::prefix("p/"), from).await?;
        let to = after(from, 2).min(last);
        gives_all(&mut watcher, from, to).await?;
        from = watcher.resume_from();
    }
    Ok(())
}
