//! Tests which events watches deliver, and what the events contain.

use kv::{
    Batch, Compare, Event, EventKind, InvalidArgument, Key, Kv, Op, Prev, Range, Revision, StoreExt, Txn, Value,
    WatchRequest,
};

use crate::expect::{Checked, JudgedByRule, holds, refused, same};
use crate::subject::{Branch, Subject, entry, span, took};

fn put_event(kv: Kv) -> Event {
    Event { kind: EventKind::Put, kv, prev: None }
}

fn delete_event(key: &str, at: Revision) -> Event {
    let kv = Kv {
        key: Key::from(key),
        value: Value::default(),
        create_revision: Revision::UNSET,
        mod_revision: at,
        version: 0,
        lease: None,
    };
    Event { kind: EventKind::Delete, kv, prev: None }
}

/// Formats each event of a batch as `put` or `del`, followed by the key.
fn answered(batch: &Batch) -> Vec<String> {
    let word = |event: &Event| if event.kind == EventKind::Put { "put" } else { "del" };
    batch.events.iter().map(|event| format!("{} {}", word(event), event.kv.key)).collect()
}

pub(crate) async fn simple_events(t: Subject) -> Checked {
    let base = t.put("k", "old").await?;
    let mut watcher = t.watcher(Range::key("k"), base.next()).await?;
    let one = t.put("k", "one").await?;
    let same_again = t.put("k", "one").await?;
    let deleted = t.run([Op::delete("k")]).await?.revision;
    t.run([Op::delete("k")]).await?;
    let again = t.put("k", "two").await?;
    let batches = watcher.take(4).await?;
    let expected = [
        put_event(entry("k", "one", base, one, 2)),
        put_event(entry("k", "one", base, same_again, 3)),
        delete_event("k", deleted),
        put_event(entry("k", "two", again, again, 1)),
    ];
    for (batch, event) in batches.iter().zip(expected) {
        same("the batch's revision", batch.revision, event.kv.mod_revision)?;
        same("its events", &batch.events, &vec![event]).of("W5")?;
    }
    let last = t.put("k", "last").await?;
    same("the next batch, with nothing in between", watcher.next().await?.revision, last)
}

pub(crate) async fn deletion_fields(t: Subject) -> Checked {
    let at = t.put("k", "a value").await?;
    let mut watcher = t.watcher(Range::key("k"), at.next()).await?;
    let deleted = t.run([Op::delete("k")]).await?.revision;
    same("the event of a deletion", watcher.next().await?.events, vec![delete_event("k", deleted)])
}

pub(crate) async fn what_was_before(t: Subject) -> Checked {
    let base = t.revision().await?;
    let ask = WatchRequest::new(Range::key("k"), base.next()).with_prev(Prev::Return);
    let mut live = t.watcher_of(ask.clone()).await?;
    let one = t.put("k", "one").await?;
    let two = t.put("k", "two").await?;
    t.run([Op::delete("k")]).await?;
    t.put("k", "three").await?;
    let before = vec![None, Some(entry("k", "one", one, one, 1)), Some(entry("k", "two", one, two, 2)), None];
    for (how, watcher) in [("live", &mut live), ("replayed", &mut t.watcher_of(ask).await?)] {
        let batches = watcher.take(4).await?;
        let prevs: Vec<Option<Kv>> =
            batches.into_iter().flat_map(|batch| batch.events).map(|event| event.prev).collect();
        same(&format!("the previous values, {how}"), &prevs, &before)?;
    }
    Ok(())
}

pub(crate) async fn creations(t: Subject) -> Checked {
    let base = t.revision().await?;
    t.put("k", "1").await?;
    t.put("k", "2").await?;
    t.run([Op::delete("k")]).await?;
    t.put("k", "3").await?;
    let last = t.run([Op::put("k", "4"), Op::put("j", "1")]).await?.revision;
    let batches = t.watcher(Range::All, base.next()).await?.until(last).await?;
    let new: Vec<bool> = batches
        .iter()
        .flat_map(|batch| &batch.events)
        .filter(|event| event.kind == EventKind::Put)
        .map(|event| event.kv.create_revision == event.kv.mod_revision)
        .collect();
    same("which puts are creations", new, vec![true, false, true, false, true])
}

pub(crate) async fn order_in_a_txn(t: Subject) -> Checked {
    let base = t.put("other", "v").await?;
    let mut live = t.watcher(Range::prefix("q"), base.next()).await?;
    let answer = t.run(["q3", "q1", "q2"].map(|key| Op::put(key, "v"))).await?;
    let mut replayed = t.watcher(Range::prefix("q"), base.next()).await?;
    for watcher in [&mut live, &mut replayed] {
        let batch = watcher.next().await?;
        same("the revision of the batch", batch.revision, answer.revision).of("W3")?;
        same("its events, in the order of operations", answered(&batch), vec!["put q3", "put q1", "put q2"])?;
    }
    Ok(())
}

pub(crate) async fn mixed_txn(t: Subject) -> Checked {
    t.run(["p/c", "p/a", "p/b", "x"].map(|key| Op::put(key, "v"))).await?;
    let base = t.revision().await?;
    let mut live = t.watcher(Range::All, base.next()).await?;
    let ops = [Op::put("y", "v"), Op::delete("x"), Op::put("b", "v"), Op::delete("gone"), Op::put("a", "v")];
    let mixed = t.run(ops).await?.revision;
    let ranged = t.run([Op::delete_range(Range::prefix("p/"))]).await?.revision;
    let mut replayed = t.watcher(Range::All, base.next()).await?;
    for watcher in [&mut live, &mut replayed] {
        let batch = watcher.next().await?;
        same("the batch of a mixed transaction", batch.revision, mixed)?;
        same("its events", answered(&batch), vec!["put y", "del x", "put b", "put a"])?;
        let batch = watcher.next().await?;
        same("the batch of a range delete", batch.revision, ranged)?;
        same("its events, by key", answered(&batch), vec!["del p/a", "del p/b", "del p/c"]).of("W2")?;
    }
    Ok(())
}

pub(crate) async fn nothing_to_tell(t: Subject) -> Checked {
    let base = t.put("p/k", "v").await?;
    let mut watcher = t.watcher(Range::prefix("p/"), base.next()).await?;
    let fails = Txn::new().with_compares([Compare::absent("p/k")]).with_success([Op::put("p/new", "v")]);
    took("a transaction that fails", &t.txn(fails).await?, Branch::Failure).of("T1")?;
    t.run([Op::delete("p/gone"), Op::range(Range::All)]).await?;
    for outside in ["p", "p0", "p.", "q/k", "o/k"] {
        t.put(outside, "v").await?;
    }
    t.delete(Range::key("p0")).await?;
    let last = t.put("p/k", "last").await?;
    let batch = watcher.next().await?;
    same("the first batch", (batch.revision, answered(&batch)), (last, vec!["put p/k".to_owned()]))
}

pub(crate) async fn filters(t: Subject) -> Checked {
    let base = t.revision().await?;
    let keys: [&[u8]; 7] = [b"\0", b"w", b"w\0", b"wa", b"w\xff", b"x", b"\xff\xff"];
    let ranges = [
        Range::key("w"),
        Range::prefix("w"),
        Range::prefix(&b"w\xff"[..]),
        Range::prefix(&b"\xff"[..]),
        Range::From(Key::from("x")),
        span("w\0", "x"),
        Range::All,
        Range::prefix(""),
    ];
    let mut live = Vec::new();
    for range in &ranges {
        live.push(t.watcher(range.clone(), base.next()).await?);
    }
    t.run(keys.map(|key| Op::put(key, "v"))).await?;
    for key in keys {
        t.put(key, "w").await?;
    }
    for (range, live) in ranges.iter().zip(&mut live) {
        let expected: Vec<&[u8]> = keys.into_iter().filter(|key| range.contains(key)).collect();
        let replayed = &mut t.watcher(range.clone(), base.next()).await?;
        for watcher in [live, replayed] {
            let together = watcher.next().await?;
            let seen: Vec<&[u8]> = together.events.iter().map(|event| event.kv.key.as_bytes()).collect();
            same(&format!("the events of one transaction in {range:?}"), &seen, &expected)?;
            let single = watcher.take(expected.len()).await?;
            let seen: Vec<&[u8]> =
                single.iter().flat_map(|batch| &batch.events).map(|event| event.kv.key.as_bytes()).collect();
            same(&format!("the events of single writes in {range:?}"), &seen, &expected)?;
        }
    }
    Ok(())
}

pub(crate) async fn empty_ranges(t: Subject) -> Checked {
    let now = t.put("k", "v").await?;
    let watch = async |range, start| t.watch(WatchRequest::new(range, start)).await.map(|_| "a stream");
    for range in [span("b", "a"), span("a", "a")] {
        let what = format!("a watch of {range}");
        refused(&what, watch(range, now).await, InvalidArgument::EmptyWatchRange)?;
    }
    for number in [0, -1] {
        let answer = watch(Range::All, Revision::new(number)).await;
        refused(&format!("a watch from {number} on"), answer, InvalidArgument::RevisionNotSet)?;
    }
    refused("a watch of an empty key", watch(Range::key(""), now).await, InvalidArgument::EmptyKey)
}

pub(crate) async fn read_after_event(t: Subject) -> Checked {
    const ROUNDS: usize = 60;
    let base = t.revision().await?;
    let other = t.another().await?;
    let mut watcher = t.watcher(Range::prefix("k/"), base.next()).await?;
    let writer = t.handle();
    let writes = async move { writer.write_all(ROUNDS, |i| Op::put(format!("k/{i}"), "v")).await };
    let reads = async move {
        for _ in 0..ROUNDS {
            let batch = watcher.next().await?;
            for event in &batch.events {
                let found = other.read(Range::Key(event.kv.key.clone())).await?;
                holds("a revision not before the event", found.revision >= batch.revision, &found.revision)?;
                let seen = found.kvs.first().map(|kv| kv.mod_revision);
                same("the entry of the event", seen, Some(batch.revision))?;
            }
        }
        Ok(())
    };
    let (written, read): (Checked, Checked) = futures::join!(writes, reads);
    written.and(read)
}
