//! Tests watches under load: many watches, slow readers, large events and dropped watches.

use std::time::{Duration, Instant};

use kv::{Op, Range, StoreExt, WatchRequest};
use tokio::runtime::Handle as Runtime;

use crate::expect::{Checked, JudgedByRule, holds, same};
use crate::groups::watch_past::all_or_compacted;
use crate::subject::{Subject, after};

pub(crate) async fn long_backlog(t: Subject) -> Checked {
    const WRITES: usize = 3000;
    let base = t.revision().await?;
    // Each revision writes two keys, so that the test notices if a revision is split into two batches.
    let ops = |i: usize| [Op::put(format!("p/{}", i % 50), "a"), Op::put("q", "b")];
    let mut writes = Vec::new();
    for first in (0..WRITES).step_by(100) {
        let round = (first..first + 100).map(|i| t.run(ops(i)));
        writes.extend(futures::future::try_join_all(round).await?);
    }
    same("how many revisions there are", writes.len(), WRITES)?;
    let last = after(base, WRITES as i64);
    let batches = t.watcher(Range::All, base.next()).await?.until(last).await?;
    same("how many batches a backlog gives", batches.len(), WRITES)?;
    let whole = batches.iter().all(|batch| batch.events.len() == 2);
    holds("every revision whole", whole, &batches.iter().find(|batch| batch.events.len() != 2)).of("W3")
}

pub(crate) async fn many_watchers(t: Subject) -> Checked {
    const WATCHERS: usize = 100;
    const WRITES: usize = 100;
    let base = t.revision().await?;
    let ranges = [Range::All, Range::prefix("p/"), Range::prefix("p/1"), Range::key("p/17")];
    let expected =
        ranges.clone().map(|range| (0..WRITES).filter(|i| range.contains(format!("p/{i}").as_bytes())).count());
    let never_polled = t.watch(WatchRequest::new(Range::All, base.next())).await?;
    let mut watchers = Vec::new();
    for i in 0..WATCHERS {
        let (range, count) = (ranges[i % ranges.len()].clone(), expected[i % ranges.len()]);
        let mut watcher = t.watcher(range, base.next()).await?;
        watchers.push(tokio::spawn(async move { watcher.take(count).await }));
    }
    t.within("writes beside a watcher that does not read", t.write_all(WRITES, |i| Op::put(format!("p/{i}"), "v")))
        .await??;
    for (i, watcher) in watchers.into_iter().enumerate() {
        let batches = watcher.await??;
        same("how many batches a watcher got", batches.len(), expected[i % ranges.len()]).of("W2")?;
    }
    drop(never_polled);
    Ok(())
}

pub(crate) async fn stalled_watcher(t: Subject) -> Checked {
    const WRITES: usize = 10_000;
    let base = t.revision().await?;
    let mut stalled = t.watcher(Range::prefix("p/"), base.next()).await?;
    let first = t.put("p/0", "first").await?;
    same("its first batch", stalled.next().await?.revision, first)?;
    t.write_all(WRITES, |i| Op::put(format!("p/{}", i % 100), "v")).await?;
    let last = after(first, WRITES as i64);
    same("the revision after all writes", t.revision().await?, last).of("R2")?;
    // The store may limit its history, so its compaction mark can be at any revision up to the latest.
    all_or_compacted(&mut stalled, first.next(), last, last).await
}

pub(crate) async fn many_stalled_watchers(t: Subject) -> Checked {
    const WATCHERS: usize = 8;
    const WRITES: usize = 16;
    const BYTES: usize = 1 << 20;
    const ROUNDS: usize = 20;
    // The test allows a few slow rounds, because a busy disk can cause them; if stalled watchers blocked the store,
    // every round would be slow.
    const MAX_SLOW_ROUNDS: usize = ROUNDS / 5;
    // A call in a round with stalled watchers must take less than a second on a quiet machine.
    let prompt = t.patience() / 10;
    let base = t.revision().await?;
    let mut stalled = Vec::new();
    for _ in 0..WATCHERS {
        stalled.push(t.watcher(Range::prefix("p/"), base.next()).await?);
    }
    let mut last = base;
    for i in 0..WRITES {
        last = t.put(format!("p/{i}"), vec![b'v'; BYTES]).await?;
    }
    let mut slow = Vec::new();
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        let put = t.put("q", "v").await?;
        let found = t.read(Range::key("q")).await?;
        same("the key that was just written", found.kvs.first().map(|kv| kv.mod_revision), Some(put))?;
        let batch = t.watcher(Range::key("q"), put).await?.next().await?;
        same("the revision that another watcher gets", batch.revision, put)?;
        slow.extend(Some(begun.elapsed()).filter(|took| *took > prompt));
        if slow.len() > MAX_SLOW_ROUNDS {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let checked = format!(
        "at most {MAX_SLOW_ROUNDS} of {ROUNDS} rounds longer than {prompt:?} beside {WATCHERS} watchers that do not read"
    );
    holds(&checked, slow.len() <= MAX_SLOW_ROUNDS, &slow)?;
    let now = t.revision().await?;
    for watcher in &mut stalled {
        // The store may limit its history, so its compaction mark can be at any revision up to the latest.
        all_or_compacted(watcher, base.next(), last, now).await?;
    }
    Ok(())
}

pub(crate) async fn dropped_watches(t: Subject) -> Checked {
    const WATCHES: usize = 10_000;
    const OPENED_TOGETHER: usize = 500;
    let base = t.revision().await?;
    t.put("p/k", "v").await?;
    let tasks = || Runtime::current().metrics().num_alive_tasks();
    let before = tasks();
    for round in 0..WATCHES / OPENED_TOGETHER {
        let mut held = Vec::with_capacity(OPENED_TOGETHER);
        for i in 0..OPENED_TOGETHER {
            let start = if i % 2 == 0 { base.next() } else { after(base, 1_000_000) };
            held.push(t.watcher(Range::prefix("p/"), start).await?);
        }
        // Some watches are dropped while they deliver events, some before they start, and some while they wait for
        // events.
        for watcher in held.iter_mut().step_by(50) {
            watcher.next().await?;
        }
        t.put("p/k", format!("{round}")).await?;
    }
    // Tolerate up to 16 more tasks than at the start of the test, because the runtime or the store may have started
    // tasks of their own.
    let settled = async {
        while tasks() > before + 16 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let all_gone = t.within("the tasks of dropped watches", settled).await;
    holds(&format!("about {before} tasks, as before the watches"), all_gone.is_ok(), &tasks())?;
    let last = t.put("p/k", "last").await?;
    same("a watch after all that", t.watcher(Range::All, last).await?.next().await?.revision, last)
}

pub(crate) async fn large_values(t: Subject) -> Checked {
    const FILLS: &[u8; 8] = b"abcdefgh";
    const BYTES: usize = 1 << 20;
    let base = t.revision().await?;
    let mut live = t.watcher(Range::prefix("p/"), base.next()).await?;
    let mut last = base;
    for (i, fill) in FILLS.iter().enumerate() {
        last = t.put(format!("p/{i}"), vec![*fill; BYTES]).await?;
    }
    let mut replayed = t.watcher(Range::prefix("p/"), base.next()).await?;
    for watcher in [&mut live, &mut replayed] {
        let batches = watcher.until(last).await?;
        same("how many batches there are", batches.len(), FILLS.len())?;
        for (batch, fill) in batches.iter().zip(FILLS) {
            let value = &batch.events[0].kv.value;
            let whole = value.len() == BYTES && value.as_bytes().iter().all(|byte| byte == fill);
            holds("a whole value of 1 MiB", whole, value)?;
        }
    }
    Ok(())
}
