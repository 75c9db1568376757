//! Tests reads of past revisions, and compaction.

use kv::{Content, ErrorKind, InvalidArgument, Key, Op, Range, RangeRequest, Revision, StoreExt};

use crate::expect::{Checked, JudgedByRule, compacted, holds, refused, same};
use crate::subject::{BoundedHandle, Subject, after, entry, text};

/// The value of a key at a revision, as a string.
async fn value_at(t: &BoundedHandle, key: &str, at: Revision) -> Checked<Option<String>> {
    Ok(t.read_at(Range::key(key), at).await?.kvs.first().map(|kv| text(&kv.value)))
}

/// Reads a key at a revision, and returns the store's error if the read fails.
async fn try_at(t: &BoundedHandle, key: &str, at: Revision) -> kv::Result<kv::RangeResponse> {
    t.range(RangeRequest::new(Range::key(key)).with_at(at)).await
}

/// Puts `k` `count` times, and returns the revisions of the puts.
async fn puts(t: &BoundedHandle, count: usize) -> Checked<Vec<Revision>> {
    let mut revisions = Vec::with_capacity(count);
    for i in 0..count {
        revisions.push(t.put("k", format!("v{i}")).await?);
    }
    Ok(revisions)
}

pub(crate) async fn every_revision(t: Subject) -> Checked {
    let revisions = puts(&t, 10).await?;
    for (i, at) in revisions.iter().enumerate() {
        let expected = entry("k", &format!("v{i}"), revisions[0], *at, i as i64 + 1);
        same(&format!("the entry after put {i}"), t.read_at(Range::key("k"), *at).await?.kvs, vec![expected])?;
    }
    Ok(())
}

pub(crate) async fn create_delete_recreate(t: Subject) -> Checked {
    let created = t.put("k", "one").await?;
    let deleted = t.run([Op::delete("k")]).await?.revision;
    let again = t.put("k", "two").await?;
    let at = |revision| t.read_at(Range::key("k"), revision);
    same("before the creation", at(after(created, -1)).await?.count, 0)?;
    same("after the creation", at(created).await?.kvs, vec![entry("k", "one", created, created, 1)])?;
    same("after the deletion", at(deleted).await?.kvs, vec![])?;
    same("after the second creation", at(again).await?.kvs, vec![entry("k", "two", again, again, 1)])
}

pub(crate) async fn range_in_the_past(t: Subject) -> Checked {
    t.run([Op::put("p/a", "1"), Op::put("p/b", "2"), Op::put("p/c", "3")]).await?;
    let at = t.run([Op::delete("p/b"), Op::put("p/d", "4")]).await?.revision;
    t.run([Op::put("p/aa", "later"), Op::delete("p/c"), Op::put("p/d", "changed")]).await?;
    t.delete(Range::prefix("p/")).await?;
    let ask = |limit| RangeRequest::new(Range::prefix("p/")).with_at(at).with_limit(limit);
    let all = t.range(ask(0)).await?;
    let seen: Vec<String> = all.kvs.iter().map(|kv| format!("{}={}", kv.key, text(&kv.value))).collect();
    same("the keys of that time with their values", seen, vec!["p/a=1", "p/c=3", "p/d=4"])?;
    let page = t.range(ask(2)).await?;
    same("keys, count and more with a limit", (page.kvs.len(), page.count, page.more), (2, 3, true))?;
    let count = t.range(ask(1).with_content(Content::CountOnly)).await?;
    same("count, keys and more of a count", (count.count, count.kvs.len(), count.more), (3, 0, false))
}

pub(crate) async fn future_revisions(t: Subject) -> Checked {
    let now = t.put("k", "v").await?;
    for ahead in [1, 100] {
        let at = after(now, ahead);
        refused("a read of the future", try_at(&t, "k", at).await, ErrorKind::FutureRevision)?;
        refused("a read of an absent key in the future", try_at(&t, "gone", at).await, ErrorKind::FutureRevision)?;
        let count = RangeRequest::new(Range::All).with_at(at).with_content(Content::CountOnly);
        refused("a count in the future", t.range(count).await, ErrorKind::FutureRevision)?;
    }
    same("a read at the current revision", value_at(&t, "k", now).await?.as_deref(), Some("v"))
}

pub(crate) async fn latest_by_number(t: Subject) -> Checked {
    let revisions = puts(&t, 3).await?;
    for number in [0, -1, i64::MIN] {
        let found = t.read_at(Range::key("k"), Revision::new(number)).await?;
        let expected = entry("k", "v2", revisions[0], revisions[2], 3);
        same(&format!("a read at {number}"), found.kvs, vec![expected])?;
    }
    Ok(())
}

pub(crate) async fn txn_in_the_past(t: Subject) -> Checked {
    let before = t.run([Op::put("a", "old"), Op::put("b", "old"), Op::put("c", "old")]).await?.revision;
    let at = t.run([Op::put("a", "new"), Op::delete("b"), Op::put("d", "new")]).await?.revision;
    t.run([Op::put("a", "later"), Op::put("b", "later"), Op::delete("d")]).await?;
    let seen = async |revision| -> Checked<Vec<String>> {
        let found = t.read_at(Range::All, revision).await?;
        Ok(found.kvs.iter().map(|kv| format!("{}={}", kv.key, text(&kv.value))).collect())
    };
    same("the state before the transaction", seen(before).await?, vec!["a=old", "b=old", "c=old"])?;
    same("the state after it", seen(at).await?, vec!["a=new", "c=old", "d=new"]).of("G9")
}

pub(crate) async fn compaction(t: Subject) -> Checked {
    let revisions = puts(&t, 6).await?;
    let mark = revisions[3];
    t.compact(mark).await?;
    for old in &revisions[..3] {
        compacted("a read below the mark", try_at(&t, "k", *old).await, mark)?;
    }
    for (i, at) in revisions.iter().enumerate().skip(3) {
        let expected = entry("k", &format!("v{i}"), revisions[0], *at, i as i64 + 1);
        same("the entry at or above the mark", t.read_at(Range::key("k"), *at).await?.kvs, vec![expected])?;
    }
    same("the latest state", t.value("k").await?.as_deref(), Some("v5"))
}

pub(crate) async fn compaction_limits(t: Subject) -> Checked {
    let revisions = puts(&t, 4).await?;
    let (mark, now) = (revisions[2], revisions[3]);
    for number in [0, -1] {
        let answer = t.compact(Revision::new(number)).await;
        refused(&format!("a compaction to {number}"), answer, InvalidArgument::RevisionNotSet)?;
    }
    t.compact(mark).await?;
    compacted("a compaction to the mark", t.compact(mark).await, mark)?;
    compacted("a compaction to below the mark", t.compact(revisions[1]).await, mark)?;
    refused("a compaction to the future", t.compact(now.next()).await, ErrorKind::FutureRevision)?;
    same("the state at the mark", value_at(&t, "k", mark).await?.as_deref(), Some("v2")).of("C3")?;
    t.compact(now).await?;
    compacted("a second compaction to the current revision", t.compact(now).await, now)
}

pub(crate) async fn old_keys_stay(t: Subject) -> Checked {
    let old = t.put("old", "v").await?;
    let twice = t.put("twice", "1").await?;
    let updated = t.put("twice", "2").await?;
    let revisions = puts(&t, 40).await?;
    t.compact(revisions[39]).await?;
    same("a key that was not changed for long", t.get("old").await?, Some(entry("old", "v", old, old, 1)))?;
    same("one that was updated long ago", t.get("twice").await?, Some(entry("twice", "2", twice, updated, 2)))?;
    let at = t.read_at(Range::key("old"), revisions[39]).await?;
    same("the old key, read at the mark", at.kvs, vec![entry("old", "v", old, old, 1)])
}

pub(crate) async fn mark_at_a_deletion(t: Subject) -> Checked {
    let created = t.put("k", "v").await?;
    t.put("stays", "v").await?;
    let deleted = t.run([Op::delete("k")]).await?.revision;
    t.put("later", "v").await?;
    t.compact(deleted).await?;
    same("the deleted key at the mark", t.read_at(Range::key("k"), deleted).await?.kvs, vec![])?;
    same("another key at the mark", value_at(&t, "stays", deleted).await?.as_deref(), Some("v"))?;
    compacted("the key before its deletion", try_at(&t, "k", created).await, deleted).of("G6")
}

pub(crate) async fn mark_at_now(t: Subject) -> Checked {
    t.run([Op::put("a", "1"), Op::put("b", "2")]).await?;
    let mark = t.put("a", "3").await?;
    t.compact(mark).await?;
    let at_mark = t.read(Range::All).await?;
    let next = t.put("c", "4").await?;
    same("the revision of the write after it", next, mark.next()).of("C2")?;
    t.delete(Range::key("a")).await?;
    t.put("b", "5").await?;
    same("the state at the mark", t.read_at(Range::All, mark).await?.kvs, at_mark.kvs)?;
    same("the state after the next write", t.read_at(Range::All, next).await?.count, 3)?;
    same("the keys now", t.keys(Range::All).await?, vec!["b", "c"])
}

pub(crate) async fn compacted_comes_first(t: Subject) -> Checked {
    let revisions = puts(&t, 3).await?;
    let (old, mark) = (revisions[0], revisions[2]);
    t.compact(mark).await?;
    compacted("a read of an absent key below the mark", try_at(&t, "gone", old).await, mark)?;
    let count = RangeRequest::new(Range::All).with_at(old).with_content(Content::CountOnly);
    compacted("a count below the mark", t.range(count).await, mark)?;
    let nothing = RangeRequest::new(Range::FromTo(Key::from("z"), Key::from("a"))).with_at(old);
    compacted("a read of an empty span below the mark", t.range(nothing).await, mark)?;
    compacted("a read at 1", try_at(&t, "k", Revision::new(1)).await, mark)
}

pub(crate) async fn compaction_is_no_write(t: Subject) -> Checked {
    let revisions = puts(&t, 5).await?;
    let now = revisions[4];
    let mut watcher = t.watcher(Range::All, now.next()).await?;
    t.compact(revisions[2]).await?;
    same("the revision after a compaction", t.revision().await?, now)?;
    t.compact(now).await?;
    same("the revision after another", t.revision().await?, now)?;
    let next = t.put("k", "next").await?;
    same("the revision of the next write", next, now.next())?;
    let batch = watcher.next().await?;
    same("the revision of the next batch", batch.revision, next)?;
    same("how many events it has", batch.events.len(), 1)
}

pub(crate) async fn mark_after_reopen(mut t: Subject) -> Checked {
    let revisions = puts(&t, 8).await?;
    let mark = revisions[4];
    t.compact(mark).await?;
    t.reopen().await?;
    compacted("a read below the mark after opening again", try_at(&t, "k", revisions[3]).await, mark)?;
    for (i, at) in revisions.iter().enumerate().skip(4) {
        let found = value_at(&t, "k", *at).await?;
        same("a value at or above the mark", found, Some(format!("v{i}")))?;
    }
    compacted("a compaction to the mark", t.compact(mark).await, mark).of("C1")?;
    t.compact(mark.next()).await?;
    t.reopen().await?;
    compacted("a read below the new mark", try_at(&t, "k", mark).await, mark.next())
}

pub(crate) async fn bounded_room(t: Subject) -> Checked {
    const ROUNDS: usize = 100;
    const WRITES: usize = 100;
    let value = "v".repeat(1024);
    let mut early = 0;
    for round in 0..ROUNDS {
        t.next_round();
        t.write_all(WRITES, |i| Op::put(format!("k/{}", i % 10), value.as_str())).await?;
        let mark = t.revision().await?;
        t.compact(mark).await?;
        if round == ROUNDS / 4 {
            early = t.stored_bytes().await?;
        }
    }
    let late = t.stored_bytes().await?;
    // `early` is the store's size on disk in bytes after a quarter of the writes, so a store that never frees disk
    // space would grow to four times `early`.
    let bound = 2 * early + (1 << 20);
    holds(&format!("at most {bound} bytes after 4 times as many writes"), late <= bound, &(early, late))
}
