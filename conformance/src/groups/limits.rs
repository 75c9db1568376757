//! Tests limits on sizes and counts, and invalid input.

use kv::{
    Compare, InvalidArgument, Key, MAX_KEY_BYTES, MAX_TXN_OPS, MAX_VALUE_BYTES, Op, Outcome, Range, RangeRequest,
    Revision, StoreExt, Txn, WatchRequest,
};

use crate::expect::{Checked, JudgedByRule, holds, refused, same, too_large, within};
use crate::subject::{BoundedHandle, Subject, after, delete_result};

pub(crate) async fn empty_keys(t: Subject) -> Checked {
    let before = t.revision().await?;
    let empty = || InvalidArgument::EmptyKey;
    let nothing = || Range::key("");
    refused("a read of an empty key", t.range(RangeRequest::new(nothing())).await, empty())?;
    refused("a put", t.put("", "v").await, empty())?;
    refused("a delete", t.delete(nothing()).await, empty())?;
    let then = |op| Txn::new().with_success([op]);
    refused("a read in a transaction", t.txn(then(Op::range(nothing()))).await, empty())?;
    refused("a put in the else-branch", t.txn(Txn::new().with_failure([Op::put("", "v")])).await, empty())?;
    let compare = Txn::new().with_compares([Compare::absent("")]).with_success([Op::put("k", "v")]);
    refused("a compare", t.txn(compare).await, empty())?;
    let watch = t.watch(WatchRequest::new(nothing(), Revision::new(1))).await.map(|_| "a stream");
    refused("a watch", watch, empty())?;
    same("the revision after all of these", t.revision().await?, before).of("E1")
}

fn compares(count: usize) -> impl Iterator<Item = Compare> {
    (0..count).map(|i| Compare::absent(format!("absent/{i}")))
}

fn puts(name: &str, count: usize) -> impl Iterator<Item = Op> {
    (0..count).map(move |i| Op::put(format!("{name}/{i}"), "v"))
}

pub(crate) async fn too_many_ops(t: Subject) -> Checked {
    let over = MAX_TXN_OPS + 1;
    let refusal = || InvalidArgument::TooManyOps { count: over };
    let txns = |count| {
        [
            ("operations", Txn::new().with_success(puts("then", count))),
            ("operations in the else-branch", Txn::new().with_failure(puts("else", count))),
            ("compares", Txn::new().with_compares(compares(count)).with_success([Op::put("k", "v")])),
        ]
    };
    for (what, txn) in txns(over) {
        refused(&format!("{over} {what}"), t.txn(txn).await, refusal())?;
    }
    same("how many keys there are after all refusals", t.count(Range::All).await?, 0).of("E1")?;
    for (what, txn) in txns(MAX_TXN_OPS) {
        let answer = t.txn(txn).await?;
        holds(&format!("{MAX_TXN_OPS} {what} are fine"), answer.succeeded, &answer)?;
    }
    same("how many keys there are", t.count(Range::All).await?, MAX_TXN_OPS as u64 + 1)
}

pub(crate) async fn full_txn(t: Subject) -> Checked {
    let txn = || {
        Txn::new()
            .with_compares(compares(MAX_TXN_OPS))
            .with_success(puts("absent", MAX_TXN_OPS))
            .with_failure(puts("else", MAX_TXN_OPS))
    };
    let first = t.txn(txn()).await?;
    same("branch and results", (first.succeeded, first.results.len()), (true, MAX_TXN_OPS))?;
    let second = t.txn(txn()).await?;
    same("branch and results of the second time", (second.succeeded, second.results.len()), (false, MAX_TXN_OPS))
}

pub(crate) async fn value_sizes(t: Subject) -> Checked {
    let before = t.revision().await?;
    for bytes in [MAX_VALUE_BYTES + 1, 2 << 20, 10 << 20] {
        too_large(&format!("a value of {bytes} bytes"), t.put("k", vec![7; bytes]).await)?;
    }
    t.revision_is("the revision after all refusals", t.revision().await?, before).of("E1")?;
    t.put("k", vec![7; MAX_VALUE_BYTES]).await?;
    let found = t.get("k").await?.map(|kv| kv.value);
    let whole = found.as_ref().is_some_and(|value| value.as_bytes() == vec![7; MAX_VALUE_BYTES]);
    holds("the largest value, whole", whole, &found).of("K2")
}

pub(crate) async fn request_sizes(t: Subject) -> Checked {
    let before = t.revision().await?;
    let four = |bytes: usize| ["a", "b", "c", "d"].map(|key| Op::put(key, vec![7; bytes]));
    let txn = Txn::new().with_success(four(400_000));
    too_large("four values of 400,000 bytes", t.txn(txn).await)?;
    let in_else = Txn::new().with_success([Op::put("k", "v")]).with_failure(four(400_000));
    too_large("four values of 400,000 bytes in the else-branch", t.txn(in_else).await)?;
    same("the keys after both", t.count(Range::All).await?, 0).of("E1")?;
    t.revision_is("the revision after both", t.revision().await?, before).of("E1")?;
    t.run(four(375_000)).await?;
    same("the keys after four values of 375,000 bytes", t.count(Range::All).await?, 4)
}

pub(crate) async fn key_sizes(t: Subject) -> Checked {
    let longest = vec![b'k'; MAX_KEY_BYTES];
    let over = vec![b'k'; MAX_KEY_BYTES + 1];
    let refusal = || InvalidArgument::KeyTooLong { bytes: MAX_KEY_BYTES + 1 };
    let base = t.put(longest.clone(), "v").await?;
    same("the longest key", t.get(longest.clone()).await?.map(|kv| kv.key), Some(Key::new(longest.clone())))?;
    let mut watcher = t.watcher(Range::key(longest), base).await?;
    same("a watch of it", watcher.next().await?.revision, base)?;
    refused("a put of a longer key", t.put(over.clone(), "v").await, refusal())?;
    refused("a read of it", t.get(over.clone()).await, refusal())?;
    refused("a delete of it", t.delete(Range::key(over.clone())).await, refusal())?;
    refused("a prefix as long", t.read_prefix(over).await, refusal())
}

pub(crate) async fn pages_past_the_longest_keys(t: Subject) -> Checked {
    let longest = |last: u8| Key::new([vec![b'k'; MAX_KEY_BYTES - 1], vec![last]].concat());
    let keys: Vec<Key> = [b"a", b"b", b"\xff"].map(|last| longest(last[0])).into();
    for key in &keys {
        t.put(key.clone(), "v").await?;
    }
    for range in [Range::prefix("k"), Range::From("k".into())] {
        let (mut found, mut rest) = (Vec::new(), Some(range.clone()));
        while let Some(part) = rest.take() {
            let page = t.range(RangeRequest::new(part).with_limit(1)).await?;
            rest = page.kvs.last().filter(|_| page.more).map(|last| range.rest(last.key.successor()));
            found.extend(page.kvs.into_iter().map(|kv| kv.key));
        }
        same("the keys of all pages", &found, &keys)?;
    }
    let after_the_first = Range::From(keys[0].successor());
    same("a count from the key after the longest one", t.count(after_the_first.clone()).await?, 2)?;
    same("a delete from there", t.delete(after_the_first).await?, 2)?;
    let too_far = Range::From(keys[0].successor().successor());
    let refusal = InvalidArgument::KeyTooLong { bytes: MAX_KEY_BYTES + 2 };
    refused("a start that is longer still", t.range(RangeRequest::new(too_far)).await, refusal).of("X1")
}

impl BoundedHandle {
    /// Reads the keys with a prefix, and returns the store's error if the read fails.
    async fn read_prefix(&self, prefix: Vec<u8>) -> kv::Result<kv::RangeResponse> {
        self.range(RangeRequest::new(Range::prefix(prefix))).await
    }
}

pub(crate) async fn large_replies(t: Subject) -> Checked {
    for i in 0..4u8 {
        t.put(format!("p/{i}"), vec![i; MAX_VALUE_BYTES]).await?;
    }
    let whole = |kvs: &[kv::Kv]| {
        kvs.len() == 4 && kvs.iter().zip(0..4u8).all(|(kv, i)| kv.value.as_bytes() == vec![i; MAX_VALUE_BYTES])
    };
    let found = t.read(Range::prefix("p/")).await?;
    holds("four whole values of 1.5 MB in one answer", whole(&found.kvs), &found)?;
    let answer = t.run([Op::delete_range(Range::prefix("p/")).with_prev()]).await?;
    let (count, prevs) = delete_result(&answer, 0)?;
    holds("the previous values of four keys from a delete", count == 4 && whole(prevs), &(count, prevs))
}

pub(crate) async fn refusals_change_nothing(t: Subject) -> Checked {
    let base = t.revision().await?;
    let mut effective = 0;
    for i in 0..100 {
        let txn = match i % 10 {
            0 => Txn::new().with_success([Op::put("k", "v"), Op::put("", "v")]),
            3 => Txn::new().with_success([Op::put("k", "v"), Op::delete("k")]),
            5 => Txn::new().with_success(puts("p", MAX_TXN_OPS + 1)),
            8 => {
                Txn::new().with_success([Op::put("k", "v")]).with_failure([Op::put("k", vec![0; MAX_VALUE_BYTES + 1])])
            }
            _ => {
                effective += 1;
                t.put("k", format!("{i}")).await?;
                continue;
            }
        };
        match t.txn(txn).await {
            Err(error) => same("the outcome of an invalid request", error.outcome(), Outcome::NotApplied)?,
            Ok(answer) => holds("a refusal", false, &answer)?,
        }
        same("the revision after a refusal", t.revision().await?, after(base, effective))?;
    }
    same("the keys after all of that", t.keys(Range::All).await?, vec!["k"])
}

pub(crate) async fn awkward_keys_in_errors(t: Subject) -> Checked {
    let key = || Key::new(&b"\xff\x00\x1b[31m\n\xc3\x28"[..]);
    let twice = Txn::new().with_success([Op::put(key(), "a"), Op::put(key(), "b")]);
    match t.txn(twice).await {
        Err(error) => {
            same("the kind", error.kind(), &InvalidArgument::DuplicateKey(key()).into()).of("T8")?;
            let text = format!("{error} {error:?}");
            let clean = text.chars().all(|letter| !letter.is_control());
            holds("a text without control characters", clean, &text)?;
        }
        Ok(answer) => holds("a refusal", false, &answer).of("T8")?,
    }
    t.put(key(), "v").await?;
    same("the key itself", t.get(key()).await?.map(|kv| kv.key), Some(key())).of("K1")
}

pub(crate) async fn use_after_close(mut t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let held = t.handle();
    let mut watcher = held.watcher(Range::All, at.next()).await?;
    t.close().await?;
    refused("a read", held.get("k").await, kv::ErrorKind::Closed)?;
    refused("a write", held.put("k", "new").await, kv::ErrorKind::Closed)?;
    let watch = held.watch(WatchRequest::new(Range::All, at)).await.map(|_| "a stream");
    refused("a new watch", watch, kv::ErrorKind::Closed)?;
    refused("a compaction", held.compact(at).await, kv::ErrorKind::Closed)?;
    let end = within(std::time::Duration::from_secs(10), "a watch that was open", watcher.step()).await??;
    holds("Closed as the end of a watch that was open", end == Err(kv::ErrorKind::Closed), &end)
}
