//! Tests the revision counter of a store.

use kv::{Compare, MAX_TXN_OPS, Op, Range, RangeRequest, Revision, StoreExt, Txn};

use crate::expect::{Checked, JudgedByRule, holds, same, some};
use crate::subject::{Branch, Subject, after, entry, read_result, took};

pub(crate) async fn fresh_store(t: Subject) -> Checked {
    same("the revision of a new store", t.revision().await?, Revision::new(1))?;
    same("the revision of its first write", t.put("k", "v").await?, Revision::new(2))
}

pub(crate) async fn dense(t: Subject) -> Checked {
    let base = t.revision().await?;
    for step in 1..=30 {
        let answer = match step % 3 {
            0 => t.run([Op::delete("a"), Op::put("b", "v")]).await?,
            1 => t.run([Op::put("a", "v")]).await?,
            _ => t.run([Op::delete_range(Range::All)]).await?,
        };
        same("the revision of an effective write", answer.revision, after(base, step))?;
        same("the revision of the read after it", t.revision().await?, after(base, step)).of("R6")?;
    }
    Ok(())
}

pub(crate) async fn identical_put(t: Subject) -> Checked {
    let first = t.put("k", "v").await?;
    let second = t.put("k", "v").await?;
    t.revision_is("the revision of an identical put", second, first.next())?;
    same("the entry after it", t.get("k").await?, Some(entry("k", "v", first, second, 2)))
}

pub(crate) async fn nothing_happens(t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let fails = || Compare::absent("k");
    let txns = [
        ("an empty transaction", Txn::new()),
        ("a transaction that only reads", Txn::new().with_success([Op::range(Range::All)])),
        ("a failed compare and no else", Txn::new().with_compares([fails()]).with_success([Op::put("k", "new")])),
        (
            "a failed compare and an else that only reads",
            Txn::new().with_compares([fails()]).with_success([Op::delete("k")]).with_failure([Op::range(Range::All)]),
        ),
    ];
    for (what, txn) in txns {
        same(&format!("the revision of {what}"), t.txn(txn).await?.revision, at)?;
        same(&format!("the revision after {what}"), t.revision().await?, at)?;
    }
    Ok(())
}

pub(crate) async fn delete_only_missing(t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let missing = [Op::delete("a"), Op::delete_range(span_of_nothing()), Op::delete("a")];
    let txn = Txn::new().with_compares([Compare::unchanged("k", at)]).with_success(missing);
    let answer = t.txn(txn).await?;
    took("a transaction that deletes what is not there", &answer, Branch::Success).of("T2")?;
    same("its revision", answer.revision, at)?;
    same("the revision after it", t.revision().await?, at)
}

fn span_of_nothing() -> Range {
    Range::prefix("nothing/")
}

pub(crate) async fn many_puts_one_revision(t: Subject) -> Checked {
    let base = t.put("k", "v").await?;
    let answer = t.run((0..MAX_TXN_OPS).map(|i| Op::put(format!("p/{i:03}"), "v"))).await?;
    t.revision_is("the revision of a transaction of many puts", answer.revision, base.next())?;
    let listed = t.list(Range::prefix("p/")).await?.kvs;
    same("how many keys there are", listed.len(), MAX_TXN_OPS).of("T2")?;
    let together = listed.iter().all(|kv| kv.mod_revision == answer.revision && kv.create_revision == answer.revision);
    holds("one revision for all of them", together, &listed)
}

pub(crate) async fn noop_delete_and_put(t: Subject) -> Checked {
    let base = t.put("k", "v").await?;
    let answer = t.run([Op::delete("missing"), Op::put("k", "new"), Op::range(Range::key("k"))]).await?;
    t.revision_is("the revision of a transaction with one effective operation", answer.revision, base.next())?;
    same("the revision of its read", read_result(&answer, 2)?.revision, answer.revision).of("R6")?;
    let found = some("the key", t.get("k").await?)?;
    same("the mod revision of the key", found.mod_revision, answer.revision)
}

pub(crate) async fn header_covers_answer(t: Subject) -> Checked {
    let reader = t.handle();
    let reads = async move {
        for _ in 0..100 {
            let found = reader.read(Range::prefix("k/")).await?;
            let newest = found.kvs.iter().map(|kv| kv.mod_revision).max().unwrap_or_default();
            holds("a revision not below any in the answer", found.revision >= newest, &(found.revision, newest))?;
        }
        Ok(())
    };
    let writes = t.write_all(100, |i| Op::put(format!("k/{}", i % 7), format!("{i}")));
    let (read, written): (Checked, Checked) = futures::join!(reads, writes);
    read.and(written)
}

pub(crate) async fn header_of_past_read(t: Subject) -> Checked {
    let old = t.put("k", "old").await?;
    t.put("k", "new").await?;
    let now = t.put("other", "v").await?;
    let found = t.range(RangeRequest::new(Range::key("k")).with_at(old)).await?;
    t.revision_is("the revision of a read of the past", found.revision, now)?;
    same("the entry that it found", found.kvs, vec![entry("k", "old", old, old, 1)]).of("G7")
}

pub(crate) async fn revision_after_reopen(mut t: Subject) -> Checked {
    t.put("k", "v").await?;
    let before = t.run([Op::delete("k")]).await?.revision;
    t.reopen().await?;
    same("the revision after opening again", t.revision().await?, before)?;
    let next = t.put("k", "new").await?;
    same("the next revision", next, before.next())?;
    t.reopen().await?;
    same("the revision after opening once more", t.revision().await?, next)?;
    same("the entry that was acknowledged", t.get("k").await?, Some(entry("k", "new", next, next, 1))).of("S2")
}
