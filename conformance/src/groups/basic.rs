//! Tests single reads and writes.

use kv::{Key, Op, Range, StoreExt};

use crate::expect::{Checked, JudgedByRule, holds, same, some};
use crate::subject::{Subject, delete_result, entry, put_result, span};

pub(crate) async fn get_missing_key(t: Subject) -> Checked {
    let found = t.read(Range::key("k")).await?;
    same("the entries of an absent key", found.kvs, vec![])?;
    same("the count of an absent key", found.count, 0)?;
    holds("a revision of at least 1", found.revision.is_set(), &found.revision).of("R6")
}

pub(crate) async fn put_and_get(t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let found = t.read(Range::key("k")).await?;
    same("the entry after its creation", found.kvs, vec![entry("k", "v", at, at, 1)])?;
    t.revision_is("the revision of the read", found.revision, at).of("R6")
}

pub(crate) async fn put_twice(t: Subject) -> Checked {
    let first = t.put("k", "one").await?;
    let second = t.put("k", "two").await?;
    same("the entry after the second put", t.get("k").await?, Some(entry("k", "two", first, second, 2)))
}

pub(crate) async fn put_with_prev(t: Subject) -> Checked {
    let first = t.run([Op::put("k", "one").with_prev()]).await?;
    same("the previous value at the creation", put_result(&first, 0)?, None)?;
    let second = t.run([Op::put("k", "two").with_prev()]).await?;
    let before = entry("k", "one", first.revision, first.revision, 1);
    same("the previous value at the second put", put_result(&second, 0)?, Some(&before))?;
    let third = t.run([Op::put("k", "three")]).await?;
    same("the previous value, which was not requested", put_result(&third, 0)?, None)
}

pub(crate) async fn empty_value(t: Subject) -> Checked {
    let at = t.put("k", "").await?;
    let found = t.read(Range::key("k")).await?;
    same("the count of a key with an empty value", found.count, 1)?;
    same("its entry", found.kvs, vec![entry("k", "", at, at, 1)])
}

pub(crate) async fn delete_with_prev(t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let answer = t.run([Op::delete("k").with_prev()]).await?;
    same("count and entries of the delete", delete_result(&answer, 0)?, (1, &[entry("k", "v", at, at, 1)][..]))?;
    t.revision_is("the revision of the delete", answer.revision, at.next()).of("R2")?;
    same("the key afterwards", t.get("k").await?, None)
}

pub(crate) async fn delete_missing(t: Subject) -> Checked {
    let at = t.put("other", "v").await?;
    let answer = t.run([Op::delete("k").with_prev()]).await?;
    same("count and entries of the delete", delete_result(&answer, 0)?, (0, &[][..]))?;
    t.revision_is("the revision of a delete of nothing", answer.revision, at).of("R3")?;
    t.revision_is("the revision afterwards", t.revision().await?, at).of("R3")
}

pub(crate) async fn delete_twice(t: Subject) -> Checked {
    t.put("k", "v").await?;
    let first = t.run([Op::delete("k")]).await?;
    let second = t.run([Op::delete("k")]).await?;
    same("the first count", delete_result(&first, 0)?.0, 1).of("O2")?;
    same("the second count", delete_result(&second, 0)?.0, 0)?;
    t.revision_is("the revision of the second delete", second.revision, first.revision).of("R3")
}

pub(crate) async fn delete_and_put_again(t: Subject) -> Checked {
    t.put("k", "one").await?;
    t.put("k", "two").await?;
    t.delete(Range::key("k")).await?;
    let at = t.put("k", "three").await?;
    same("the entry after deletion and put", t.get("k").await?, Some(entry("k", "three", at, at, 1)))
}

pub(crate) async fn delete_range(t: Subject) -> Checked {
    let b = t.put("b", "2").await?;
    let c = t.put("c", "3").await?;
    let a = t.put("a", "1").await?;
    let answer = t.run([Op::delete_range(span("a", "c")).with_prev()]).await?;
    let gone = [entry("a", "1", a, a, 1), entry("b", "2", b, b, 1)];
    same("count and entries of the range delete", delete_result(&answer, 0)?, (2, &gone[..]))?;
    t.revision_is("its revision", answer.revision, a.next()).of("R2")?;
    same("what is left", t.read(Range::All).await?.kvs, vec![entry("c", "3", c, c, 1)])
}

pub(crate) async fn delete_empty_range(t: Subject) -> Checked {
    let at = t.put("b", "v").await?;
    for range in [span("b", "b"), span("c", "a"), Range::prefix("zz")] {
        let answer = t.run([Op::delete_range(range).with_prev()]).await?;
        same("count and entries of a delete of an empty range", delete_result(&answer, 0)?, (0, &[][..]))?;
        t.revision_is("its revision", answer.revision, at).of("R3")?;
    }
    same("the key that is outside all of them", t.value("b").await?.as_deref(), Some("v"))
}

pub(crate) async fn every_byte(t: Subject) -> Checked {
    let bytes: Vec<u8> = (0..=255).collect();
    let backwards: Vec<u8> = (0..=255).rev().collect();
    t.put(bytes.clone(), backwards.clone()).await?;
    let found = some("the key of all bytes", t.get(bytes.clone()).await?)?;
    same("its key", found.key.as_bytes(), &bytes[..])?;
    same("its value", found.value.as_bytes(), &backwards[..])?;
    for byte in 0..=255u8 {
        t.put(vec![b'/', byte], vec![byte]).await?;
    }
    let listed = t.list(Range::prefix("/")).await?.kvs;
    let keys: Vec<Key> = listed.iter().map(|kv| kv.key.clone()).collect();
    let expected: Vec<Key> = (0..=255u8).map(|byte| Key::new(vec![b'/', byte])).collect();
    same("one key for each byte, in the order of bytes", keys, expected).of("K1")?;
    let kept = listed.iter().zip(0..=255u8).all(|(kv, byte)| kv.value.as_bytes() == [byte]);
    holds("one value for each byte", kept, &listed)
}

pub(crate) async fn two_handles(t: Subject) -> Checked {
    let other = t.another().await?;
    for round in 0..20 {
        let written = format!("v{round}");
        let (writer, reader) = if round % 2 == 0 { (&*t, &other) } else { (&other, &*t) };
        let at = writer.put("k", written.as_str()).await?;
        let found = reader.read(Range::key("k")).await?;
        same("the value through the other handle", found.kvs.first().map(|kv| kv.mod_revision), Some(at))?;
        holds("a revision not before the write", found.revision >= at, &found.revision)?;
        same("the value through the other handle", reader.value("k").await?, Some(written))?;
    }
    Ok(())
}
