//! Tests reads of key ranges.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv::{Compare, Content, Key, Kv, Op, Range, RangeRequest, RangeResponse, Revision, StoreExt, Txn};
use tokio::task::yield_now;

use crate::expect::{Checked, JudgedByRule, holds, same, some};
use crate::subject::{BoundedHandle, Branch, Subject, entry, span, took};

/// Keys just before, in and just after a prefix range, in ascending order: stores often get the end of such a range
/// wrong.
const AWKWARD: [&[u8]; 10] = [b"v\xff", b"w", b"w\0", b"w\0a", b"wa", b"w\xfe", b"w\xff", b"w\xff\xff", b"x", b"\xff"];

fn bytes_of(found: &RangeResponse) -> Vec<Vec<u8>> {
    found.kvs.iter().map(|kv| kv.key.as_bytes().to_vec()).collect()
}

fn owned(keys: &[&[u8]]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.to_vec()).collect()
}

async fn put_keys(t: &BoundedHandle, keys: &[&[u8]]) -> Checked {
    for key in keys.iter().rev() {
        t.put(*key, "v").await?;
    }
    Ok(())
}

pub(crate) async fn limits(t: Subject) -> Checked {
    for i in 0..5 {
        t.put(format!("p/{i}"), "v").await?;
    }
    t.put("p0", "outside").await?;
    for (limit, shown, more) in
        [(0, 5, false), (-1, 5, false), (1, 1, true), (2, 2, true), (4, 4, true), (5, 5, false), (6, 5, false)]
    {
        let found = t.range(RangeRequest::new(Range::prefix("p/")).with_limit(limit)).await?;
        let seen = (found.kvs.len(), found.count, found.more);
        same(&format!("keys, count and more with a limit of {limit}"), seen, (shown, 5, more))?;
        let first = found.kvs.first().map(|kv| kv.key.to_string());
        same("the first key", first.as_deref(), Some("p/0")).of("G3")?;
    }
    let nothing = t.range(RangeRequest::new(Range::prefix("q/")).with_limit(1)).await?;
    same("count and more of an empty range with a limit", (nothing.count, nothing.more), (0, false))
}

pub(crate) async fn paging(t: Subject) -> Checked {
    const PAGE: i64 = 7;
    t.run((0..50).map(|i| Op::put(format!("p/{i:02}"), format!("{i}")))).await?;
    let before = t.read(Range::prefix("p/")).await?;
    let at = before.revision;
    let mut pages: Vec<Kv> = Vec::new();
    let mut from = Key::from("p/");
    for page in 0.. {
        holds("an end to the pages", page <= 8, &page)?;
        let rest = Range::FromTo(from, Key::from("p0"));
        let found = t.range(RangeRequest::new(rest).with_at(at).with_limit(PAGE)).await?;
        same("the count of what is left", found.count, 50 - pages.len() as u64).of("G4")?;
        let last = some("a key in each page", found.kvs.last())?.key.clone();
        pages.extend(found.kvs);
        if !found.more {
            break;
        }
        // Writes between two pages of a read must not appear in later pages, whatever their keys.
        t.run([Op::put(format!("p/{page:02}x"), "new"), Op::put("p/49", "changed"), Op::delete("p/30")]).await?;
        from = last.successor();
    }
    same("all pages together", &pages, &before.kvs)?;
    let listed = t.list_at(Range::prefix("p/"), at, Content::Full).await?;
    same("the listing at that revision", listed.kvs, before.kvs).of("G7")
}

pub(crate) async fn byte_order(t: Subject) -> Checked {
    put_keys(&t, &AWKWARD).await?;
    same("all keys, in order", bytes_of(&t.read(Range::All).await?), owned(&AWKWARD)).of("K1")?;
    same("the keys that begin with w", bytes_of(&t.read(Range::prefix("w")).await?), owned(&AWKWARD[1..8]))?;
    let middle = Range::FromTo(Key::from("w\0"), Key::new(&b"w\xff"[..]));
    same("the keys of a span", bytes_of(&t.read(middle).await?), owned(&AWKWARD[2..6])).of("G1")
}

pub(crate) async fn prefixes_of_ff(t: Subject) -> Checked {
    let keys: [&[u8]; 8] = [b"w\xfe", b"w\xff", b"w\xff\0", b"w\xff\xff", b"x", b"\xff", b"\xff\xff", b"\xff\xff\xff"];
    put_keys(&t, &keys).await?;
    for (prefix, expected) in
        [(&b"w\xff"[..], &keys[1..4]), (b"\xff", &keys[5..]), (b"\xff\xff", &keys[6..]), (b"\xfe", &[])]
    {
        let found = bytes_of(&t.read(Range::prefix(prefix)).await?);
        same(&format!("the keys that begin with {}", prefix.escape_ascii()), found, owned(expected))?;
    }
    let gone = t.delete(Range::prefix(&b"\xff\xff"[..])).await?;
    same("how many a delete by prefix takes", gone, 2)?;
    same("what is left", bytes_of(&t.read(Range::All).await?), owned(&keys[..6]))
}

pub(crate) async fn everything(t: Subject) -> Checked {
    for range in [Range::All, Range::prefix(""), Range::From(Key::default())] {
        let found = t.read(range.clone()).await?;
        same(&format!("{range:?} on an empty store"), (found.kvs.len(), found.count), (0, 0))?;
    }
    let keys: [&[u8]; 4] = [b"\0", b"a", b"b/c", b"\xff\xff"];
    put_keys(&t, &keys).await?;
    for range in [Range::All, Range::prefix(""), Range::From(Key::default())] {
        let found = t.read(range.clone()).await?;
        same(&format!("{range:?} on a full store"), bytes_of(&found), owned(&keys))?;
    }
    same("how many keys a delete of the empty prefix takes", t.delete(Range::prefix("")).await?, 4)
}

pub(crate) async fn from_a_key(t: Subject) -> Checked {
    put_keys(&t, &AWKWARD).await?;
    for (i, key) in AWKWARD.iter().enumerate() {
        let found = t.read(Range::From(Key::from(*key))).await?;
        same(&format!("all keys from {} on", key.escape_ascii()), bytes_of(&found), owned(&AWKWARD[i..]))?;
    }
    let past_all = t.read(Range::From(Key::new(&b"\xff\0"[..]))).await?;
    same("all keys from after the last one", past_all.count, 0)
}

pub(crate) async fn empty_spans(t: Subject) -> Checked {
    put_keys(&t, &[b"a", b"m", b"z"]).await?;
    for range in [span("a", "a"), span("z", "a"), span("m", "m"), span("b", "c")] {
        let found = t.read(range.clone()).await?;
        same(&format!("entries, count and more of {range}"), (found.kvs, found.count, found.more), (vec![], 0, false))?;
    }
    same("a span with its start and without its end", t.keys(span("a", "z")).await?, vec!["a", "m"])
}

pub(crate) async fn siblings(t: Subject) -> Checked {
    put_keys(&t, &[b"p/1", b"p/10", b"p/2"]).await?;
    same("one key beside longer ones", t.keys(Range::key("p/1")).await?, vec!["p/1"])?;
    same("that key as a prefix", t.keys(Range::prefix("p/1")).await?, vec!["p/1", "p/10"])?;
    same("how many keys a delete of one key takes", t.delete(Range::key("p/1")).await?, 1)?;
    same("what is left", t.keys(Range::All).await?, vec!["p/10", "p/2"])
}

pub(crate) async fn contents(t: Subject) -> Checked {
    let a = t.put("p/a", "1").await?;
    let b = t.put("p/b", "2").await?;
    let c = t.put("p/a", "3").await?;
    let ask = |content| RangeRequest::new(Range::prefix("p/")).with_content(content);
    let keys = t.range(ask(Content::KeysOnly)).await?;
    same("a keys-only answer", keys.kvs, vec![entry("p/a", "", a, c, 2), entry("p/b", "", b, b, 1)])?;
    same("its count", keys.count, 2).of("G4")?;
    for limit in [0, 1, 5] {
        let count = t.range(ask(Content::CountOnly).with_limit(limit)).await?;
        let seen = (count.count, count.kvs.len(), count.more);
        same(&format!("count, keys and more of a count-only answer with a limit of {limit}"), seen, (2, 0, false))?;
    }
    let old = t.range(ask(Content::KeysOnly).with_at(b)).await?;
    same("a keys-only answer of the past", old.kvs, vec![entry("p/a", "", a, a, 1), entry("p/b", "", b, b, 1)])
}

pub(crate) async fn large_answer(t: Subject) -> Checked {
    const KEYS: usize = 3000;
    let value = "v".repeat(2200);
    for first in (0..KEYS).step_by(120) {
        t.run((first..first + 120).map(|i| Op::put(format!("p/{i:04}"), value.as_str()))).await?;
    }
    let found = t.read(Range::prefix("p/")).await?;
    same(
        "keys, count and more of an answer of 6 MiB",
        (found.kvs.len(), found.count, found.more),
        (KEYS, KEYS as u64, false),
    )?;
    let whole = found
        .kvs
        .iter()
        .enumerate()
        .all(|(i, kv)| kv.key.to_string() == format!("p/{i:04}") && kv.value.as_bytes() == value.as_bytes());
    holds("every key with its value, in order", whole, &found.kvs.len())
}

pub(crate) async fn no_torn_reads(t: Subject) -> Checked {
    const READS: usize = 150;
    t.run((0..20).map(|i| Op::put(format!("filler/{i:02}"), "v"))).await?;
    t.run([Op::put("a/token", "here")]).await?;
    let mover = t.another().await?;
    let enough = Arc::new(AtomicBool::new(false));
    let stop = enough.clone();
    let moves = tokio::spawn(async move {
        let (mut from, mut to) = ("a/token", "z/token");
        while !stop.load(Ordering::SeqCst) {
            let txn =
                Txn::new().with_compares([Compare::absent(to)]).with_success([Op::delete(from), Op::put(to, "here")]);
            took("moving the token", &mover.txn(txn).await?, Branch::Success).of("T1")?;
            (from, to) = (to, from);
            yield_now().await;
        }
        Ok(())
    });
    let read = read_tokens(&t, READS).await;
    enough.store(true, Ordering::SeqCst);
    read.and(moves.await?)
}

/// While another client moves a token between two keys, checks that every read of the whole range finds the token
/// exactly once.
async fn read_tokens(t: &BoundedHandle, reads: usize) -> Checked {
    let mut last = Revision::UNSET;
    for _ in 0..reads {
        let found = t.read(Range::All).await?;
        let tokens = found.kvs.iter().filter(|kv| kv.key.to_string().ends_with("/token")).count();
        same("how many tokens one read sees, and how many keys", (tokens, found.kvs.len()), (1, 21))?;
        holds("revisions that do not go back", found.revision >= last, &(last, found.revision)).of("S1")?;
        last = found.revision;
        yield_now().await;
    }
    Ok(())
}
