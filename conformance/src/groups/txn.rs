//! Tests the effects of the operations in transactions.

use kv::{Compare, Content, InvalidArgument, Key, Op, OpResult, Range, StoreExt, Txn, TxnRange};

use crate::expect::{Checked, JudgedByRule, refused, same};
use crate::subject::{
    BoundedHandle, Branch, Subject, after, delete_result, entry, put_result, read_result, span, took,
};

pub(crate) async fn get_put_get(t: Subject) -> Checked {
    let first = t.put("k", "old").await?;
    let get = || Op::range(Range::key("k"));
    let answer = t.run([get(), Op::put("k", "new").with_prev(), get()]).await?;
    let old = entry("k", "old", first, first, 1);
    let new = entry("k", "new", first, answer.revision, 2);
    same("the read before the put", &read_result(&answer, 0)?.kvs, &vec![old.clone()])?;
    same("what the put replaced", put_result(&answer, 1)?, Some(&old)).of("O1")?;
    same("the read after the put", &read_result(&answer, 2)?.kvs, &vec![new])?;
    t.revision_is("the revision", answer.revision, first.next()).of("R2")
}

pub(crate) async fn range_after_writes(t: Subject) -> Checked {
    let first = t.put("p/2", "old").await?;
    let last = t.put("p/3", "stays").await?;
    let all = || Range::prefix("p/");
    let answer = t
        .run([
            Op::put("p/1", "new"),
            Op::delete("p/2").with_prev(),
            Op::range(all()),
            Op::Range(TxnRange::new(all()).with_limit(1).with_content(Content::KeysOnly)),
            Op::Range(TxnRange::new(all()).with_content(Content::CountOnly)),
        ])
        .await?;
    let made = entry("p/1", "new", answer.revision, answer.revision, 1);
    same("what was deleted", delete_result(&answer, 1)?, (1, &[entry("p/2", "old", first, first, 1)][..])).of("O2")?;
    let found = read_result(&answer, 2)?;
    same("the range after both", &found.kvs, &vec![made.clone(), entry("p/3", "stays", last, last, 1)])?;
    let page = read_result(&answer, 3)?;
    same("a limited read of keys", &page.kvs, &vec![entry("p/1", "", made.create_revision, made.mod_revision, 1)])?;
    same("its count and whether there is more", (page.count, page.more), (2, true)).of("G4")?;
    let count = read_result(&answer, 4)?;
    same("a count", (count.count, count.more, count.kvs.len()), (2, false, 0)).of("G5")?;
    same("the keys afterwards", t.keys(all()).await?, vec!["p/1", "p/3"]).of("T2")
}

/// Checks that a transaction fails because it writes `k` twice, and that the transaction has no effect.
async fn is_duplicate(t: &BoundedHandle, what: &str, txn: Txn) -> Checked {
    let before = t.read(Range::All).await?;
    refused(what, t.txn(txn).await, InvalidArgument::DuplicateKey(Key::from("k")))?;
    let now = t.read(Range::All).await?;
    same(&format!("the store after {what}"), now.kvs, before.kvs).of("E1")?;
    t.revision_is(&format!("the revision after {what}"), now.revision, before.revision).of("E1")
}

pub(crate) async fn two_puts(t: Subject) -> Checked {
    t.put("k", "there").await?;
    let twice =
        |one: &str, two: &str| Txn::new().with_success([Op::put("k", one), Op::put("j", "v"), Op::put("k", two)]);
    is_duplicate(&t, "two puts of one key with different values", twice("a", "b")).await?;
    is_duplicate(&t, "two puts of one key with the same value", twice("a", "a")).await
}

pub(crate) async fn put_and_delete(t: Subject) -> Checked {
    t.put("k", "there").await?;
    let put = || Op::put("k", "v");
    let of = |ops: [Op; 2]| Txn::new().with_success(ops);
    is_duplicate(&t, "a put and then a delete", of([put(), Op::delete("k")])).await?;
    is_duplicate(&t, "a delete and then a put", of([Op::delete("k"), put()])).await?;
    is_duplicate(&t, "a put and then a range delete", of([put(), Op::delete_range(span("j", "l"))])).await?;
    is_duplicate(&t, "a prefix delete and then a put", of([Op::delete_range(Range::prefix("k")), put()])).await?;
    is_duplicate(&t, "a put and then a delete of everything", of([put(), Op::delete_range(Range::All)])).await
}

pub(crate) async fn duplicate_in_other_branch(t: Subject) -> Checked {
    t.put("there", "v").await?;
    let twice = || [Op::put("k", "a"), Op::put("k", "b")];
    let holds = || Compare::new(Range::key("there"), kv::CompareOp::Equal, kv::Target::Version(1));
    let fails = || Compare::absent("there");
    let in_else = Txn::new().with_compares([holds()]).with_success([Op::put("j", "v")]).with_failure(twice());
    is_duplicate(&t, "a duplicate in the else-branch that would not run", in_else).await?;
    let in_then = Txn::new().with_compares([fails()]).with_success(twice()).with_failure([Op::put("j", "v")]);
    is_duplicate(&t, "a duplicate in the branch that would not run", in_then).await
}

pub(crate) async fn two_deletes(t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let answer = t.run([Op::delete("k"), Op::delete("k"), Op::delete_range(Range::prefix("k"))]).await?;
    let counts: Vec<u64> =
        (0..3).map(|place| delete_result(&answer, place).map(|found| found.0)).collect::<Checked<_>>()?;
    same("the counts of three deletes of one key", counts, vec![1, 0, 0])?;
    t.revision_is("their revision", answer.revision, at.next()).of("R2")
}

pub(crate) async fn delete_beside_put(t: Subject) -> Checked {
    t.run([Op::put("c", "v"), Op::put("cc", "v"), Op::put("d", "old")]).await?;
    let answer = t.run([Op::delete_range(span("c", "d")), Op::put("d", "new")]).await?;
    same("the count of the delete up to the key that is put", delete_result(&answer, 0)?.0, 2)?;
    same("the key that is put", t.value("d").await?.as_deref(), Some("new"))?;
    same("what is left", t.keys(Range::All).await?, vec!["d"]).of("G1")
}

pub(crate) async fn same_key_in_both_branches(t: Subject) -> Checked {
    let txn = Txn::new()
        .with_compares([Compare::absent("k")])
        .with_success([Op::put("k", "created")])
        .with_failure([Op::put("k", "updated")]);
    took("the first time", &t.txn(txn.clone()).await?, Branch::Success)?;
    same("the value of the first branch", t.value("k").await?.as_deref(), Some("created"))?;
    took("the second time", &t.txn(txn).await?, Branch::Failure)?;
    same("the value of the else-branch", t.value("k").await?.as_deref(), Some("updated"))
}

pub(crate) async fn one_result_each(t: Subject) -> Checked {
    t.put("k", "v").await?;
    let success =
        [Op::put("a", "1"), Op::range(Range::key("k")), Op::delete("k"), Op::delete("gone"), Op::put("b", "2")];
    let failure = [Op::delete("gone"), Op::range(Range::All), Op::range(Range::key("gone"))];
    let txn = Txn::new().with_compares([Compare::absent("a")]).with_success(success).with_failure(failure);
    let kinds = |results: &[OpResult]| -> String {
        results
            .iter()
            .map(|result| match result {
                OpResult::Put { .. } => 'p',
                OpResult::Delete { .. } => 'd',
                OpResult::Range(_) => 'r',
            })
            .collect()
    };
    same("the kinds of results, in order", kinds(&t.txn(txn.clone()).await?.results), "prddp")?;
    same("the kinds of results of the else-branch", kinds(&t.txn(txn).await?.results), "drr")
}

pub(crate) async fn failed_txn_writes_nothing(t: Subject) -> Checked {
    let at = t.run([Op::put("a", "1"), Op::put("b", "2")]).await?.revision;
    let txn = Txn::new()
        .with_compares([Compare::unchanged("a", at), Compare::unchanged("b", at.next())])
        .with_success([Op::put("a", "x"), Op::delete("b"), Op::put("c", "x")])
        .with_failure([Op::range(Range::All)]);
    let answer = t.txn(txn).await?;
    took("a transaction of which one compare does not hold", &answer, Branch::Failure)?;
    let untouched = vec![entry("a", "1", at, at, 1), entry("b", "2", at, at, 1)];
    same("what its else-branch sees", &read_result(&answer, 0)?.kvs, &untouched)?;
    same("the keys afterwards", t.read(Range::All).await?.kvs, untouched)?;
    t.revision_is("the revision", t.revision().await?, at).of("R3")
}

pub(crate) async fn disjoint_txns_race(t: Subject) -> Checked {
    const ROUNDS: i64 = 200;
    let base = t.revision().await?;
    let racer = |handle: BoundedHandle, key: &'static str| async move {
        let mut at = handle.put(key, "0").await?;
        for round in 1..=ROUNDS {
            let update = Txn::new()
                .with_compares([Compare::unchanged(key, at)])
                .with_success([Op::put(key, format!("{round}"))]);
            let answer = handle.txn(update).await?;
            took("an update that only its own client makes", &answer, Branch::Success)?;
            at = answer.revision;
        }
        Ok(())
    };
    let one = tokio::spawn(racer(t.handle(), "one"));
    let two = tokio::spawn(racer(t.another().await?, "two"));
    let (one, two): (Checked, Checked) = (one.await?, two.await?);
    one.and(two)?;
    t.revision_is("the revision after all of them", t.revision().await?, after(base, 2 * (ROUNDS + 1))).of("R2")
}
