//! Tests the meaning of the compares in transactions.

use kv::CompareOp::{self, Equal, Greater, Less, NotEqual};
use kv::{Compare, ErrorKind, Kv, LeaseId, Op, Range, Revision, StoreExt, Target, Txn};

use crate::expect::{Checked, JudgedByRule, refused, same};
use crate::subject::{Branch, Subject, after, delete_result, entry, read_result, span, took};

const OPERATORS: [CompareOp; 4] = [Equal, NotEqual, Less, Greater];

/// Creates a transaction that puts `value` at `key` if the given compare holds, and reads `key` otherwise.
fn put_if(compare: Compare, key: &str, value: &str) -> Txn {
    Txn::new().with_compares([compare]).with_success([Op::put(key, value)]).with_failure([Op::range(Range::key(key))])
}

/// Creates a key twice, each time with `absent` as the compare. When the key is created a second time, the compare must
/// fail, and the failure branch must return the value from the first creation.
async fn create_twice(t: &Subject, key: &str, absent: Target) -> Checked {
    let compare = || Compare::new(Range::key(key), Equal, absent.clone());
    let first = t.txn(put_if(compare(), key, "one")).await?;
    took("creating an absent key", &first, Branch::Success)?;
    let second = t.txn(put_if(compare(), key, "two")).await?;
    took("creating an existing key", &second, Branch::Failure)?;
    let made = entry(key, "one", first.revision, first.revision, 1);
    same("what the else-branch finds", &read_result(&second, 0)?.kvs, &vec![made]).of("T2")
}

pub(crate) async fn create_by_version(t: Subject) -> Checked {
    create_twice(&t, "k", Target::Version(0)).await
}

pub(crate) async fn create_by_revisions(t: Subject) -> Checked {
    create_twice(&t, "c", Target::CreateRevision(Revision::UNSET)).await?;
    create_twice(&t, "m", Target::ModRevision(Revision::UNSET)).await
}

pub(crate) async fn update_by_mod_revision(t: Subject) -> Checked {
    let first = t.put("k", "one").await?;
    let update = |at, value: &str| put_if(Compare::unchanged("k", at), "k", value);
    let right = t.txn(update(first, "two")).await?;
    took("an update at the right revision", &right, Branch::Success)?;
    let now = entry("k", "two", first, right.revision, 2);
    let wrong = t.txn(update(first, "three")).await?;
    took("an update at an old revision", &wrong, Branch::Failure)?;
    same("what the else-branch finds", &read_result(&wrong, 0)?.kvs, &vec![now.clone()])?;
    same("the key", t.get("k").await?, Some(now))?;
    let missing = t.txn(put_if(Compare::unchanged("gone", first), "gone", "v")).await?;
    took("an update of an absent key", &missing, Branch::Failure)?;
    same("what the else-branch finds", &read_result(&missing, 0)?.kvs, &Vec::<Kv>::new())
}

pub(crate) async fn delete_by_mod_revision(t: Subject) -> Checked {
    let first = t.put("k", "one").await?;
    let now = t.put("k", "two").await?;
    let delete = |at| {
        Txn::new()
            .with_compares([Compare::unchanged("k", at)])
            .with_success([Op::delete("k").with_prev()])
            .with_failure([Op::range(Range::key("k"))])
    };
    let there = entry("k", "two", first, now, 2);
    let wrong = t.txn(delete(first)).await?;
    took("a delete at an old revision", &wrong, Branch::Failure)?;
    same("what the else-branch finds", &read_result(&wrong, 0)?.kvs, &vec![there.clone()])?;
    let right = t.txn(delete(now)).await?;
    took("a delete at the right revision", &right, Branch::Success)?;
    same("count and entries of the delete", delete_result(&right, 0)?, (1, &[there][..])).of("O2")?;
    same("the key", t.get("k").await?, None)
}

/// A function that makes a compare target from a number, for example `Target::Version`.
type Numeric = fn(i64) -> Target;

const NUMERIC: [(&str, Numeric); 3] = [
    ("version", Target::Version),
    ("create revision", |number| Target::CreateRevision(Revision::new(number))),
    ("mod revision", |number| Target::ModRevision(Revision::new(number))),
];

pub(crate) async fn numbers_of_missing_key(t: Subject) -> Checked {
    t.put("other", "v").await?;
    for (name, target) in NUMERIC {
        for op in OPERATORS {
            for given in [-1, 0, 1] {
                let holds = t.compare(Compare::new(Range::key("gone"), op, target(given))).await?;
                same(&format!("{name} of an absent key {op:?} {given}"), holds, op.holds(&0, &given))?;
            }
        }
    }
    Ok(())
}

pub(crate) async fn numbers_of_existing_key(t: Subject) -> Checked {
    let created = t.put("k", "one").await?;
    let modified = t.put("k", "two").await?;
    let stored = [2, created.get(), modified.get()];
    for ((name, target), stored) in NUMERIC.into_iter().zip(stored) {
        for op in OPERATORS {
            for given in [0, stored - 1, stored, stored + 1] {
                let holds = t.compare(Compare::new(Range::key("k"), op, target(given))).await?;
                same(&format!("{name} ({stored}) {op:?} {given}"), holds, op.holds(&stored, &given))?;
            }
        }
    }
    Ok(())
}

/// A put with a lease that does not exist must fail, whether or not the store supports leases.
pub(crate) async fn unknown_lease(t: Subject) -> Checked {
    let put = t.put("k", "v").await?;
    let Some(lease) = LeaseId::new(0x7061_6e69_6373_0001) else { return Ok(()) };
    let both = Txn::new().with_success([Op::put("other", "v"), Op::put("k", "w").with_lease(lease)]);
    refused("a put to a lease that is not there", t.txn(both).await, ErrorKind::LeaseNotFound)?;
    same("the key", t.get("k").await?, Some(entry("k", "v", put, put, 1)))?;
    same("the other key", t.get("other").await?, None)?;
    for key in ["k", "gone"] {
        for op in OPERATORS {
            for given in [-1, 0, 1] {
                let holds = t.compare(Compare::new(Range::key(key), op, Target::Lease(given))).await?;
                same(&format!("the lease of {key} {op:?} {given}"), holds, op.holds(&0, &given))?;
            }
        }
    }
    Ok(())
}

/// Returns true if a value compare on a key holds.
async fn value_holds(t: &Subject, key: &str, op: CompareOp, given: &[u8]) -> Checked<bool> {
    t.compare(Compare::new(Range::key(key), op, Target::Value(given.into()))).await
}

pub(crate) async fn value_of_missing_key(t: Subject) -> Checked {
    t.put("other", "a").await?;
    for op in OPERATORS {
        for given in [&b""[..], b"a"] {
            let holds = value_holds(&t, "gone", op, given).await?;
            same(&format!("the value of an absent key {op:?} {:?}", given.escape_ascii().to_string()), holds, false)?;
        }
    }
    Ok(())
}

pub(crate) async fn empty_value(t: Subject) -> Checked {
    t.put("k", "").await?;
    for given in [&b""[..], b"a"] {
        for op in OPERATORS {
            let holds = value_holds(&t, "k", op, given).await?;
            same(
                &format!("an empty value {op:?} {:?}", given.escape_ascii().to_string()),
                holds,
                op.holds(&b""[..], given),
            )?;
        }
    }
    Ok(())
}

pub(crate) async fn values_are_unsigned(t: Subject) -> Checked {
    let values: [&[u8]; 6] = [b"", b"\x00", b"\x7f", b"\x80", b"\x80\x00", b"\xff"];
    for (i, stored) in values.iter().enumerate() {
        t.put("k", *stored).await?;
        for (j, given) in values.iter().enumerate() {
            for op in OPERATORS {
                let holds = value_holds(&t, "k", op, given).await?;
                let what =
                    format!("{:?} {op:?} {:?}", stored.escape_ascii().to_string(), given.escape_ascii().to_string());
                same(&what, holds, op.holds(&i, &j))?;
            }
        }
    }
    Ok(())
}

pub(crate) async fn all_compares_count(t: Subject) -> Checked {
    let at = t.put("k", "v").await?;
    let yes = || Compare::unchanged("k", at);
    let no = || Compare::absent("k");
    for (what, compares, branch) in [
        ("no compare", vec![], Branch::Success),
        ("two that hold", vec![yes(), yes()], Branch::Success),
        ("the first of two that does not hold", vec![no(), yes()], Branch::Failure),
        ("the last of two that does not hold", vec![yes(), no()], Branch::Failure),
        ("two that do not hold", vec![no(), no()], Branch::Failure),
    ] {
        took(what, &t.txn(Txn::new().with_compares(compares)).await?, branch)?;
    }
    Ok(())
}

pub(crate) async fn range_compares(t: Subject) -> Checked {
    let base = t.revision().await?;
    t.put("p/a", "same").await?;
    t.put("p/b", "same").await?;
    let newest = t.put("p/b", "same").await?;
    let all = Range::prefix("p/");
    for (what, range, op, target, expected) in [
        ("all keys exist", all.clone(), Greater, Target::Version(0), true),
        ("all keys are at version 1 (one is at 2)", all.clone(), Equal, Target::Version(1), false),
        ("no key is at version 1 (one is)", all.clone(), NotEqual, Target::Version(1), false),
        ("all values are equal", all.clone(), Equal, Target::Value("same".into()), true),
        ("all values are less", all.clone(), Less, Target::Value("same".into()), false),
        ("nothing is newer than now", all.clone(), Less, Target::ModRevision(newest.next()), true),
        ("nothing is newer than before", all.clone(), Less, Target::ModRevision(newest), false),
        ("keys of a range with some are absent", all.clone(), Equal, Target::ModRevision(Revision::UNSET), false),
        ("all were created after the start", all, Greater, Target::CreateRevision(base), true),
        ("keys of an empty range exist", Range::prefix("q/"), Greater, Target::Version(0), false),
        ("keys of an empty range are absent", Range::prefix("q/"), Equal, Target::Version(0), true),
        ("a value in an empty range differs", Range::prefix("q/"), NotEqual, Target::Value("x".into()), false),
        ("keys of an inverted range are absent", span("z", "a"), Equal, Target::ModRevision(Revision::UNSET), true),
    ] {
        same(what, t.compare(Compare::new(range, op, target)).await?, expected)?;
    }
    Ok(())
}

pub(crate) async fn compares_see_state_before(t: Subject) -> Checked {
    let txn = Txn::new()
        .with_compares([Compare::absent("k")])
        .with_success([Op::put("k", "v"), Op::range(Range::key("k"))])
        .with_failure([Op::delete("k")]);
    let first = t.txn(txn.clone()).await?;
    took("the compare of a key that the branch then writes", &first, Branch::Success)?;
    let second = t.txn(txn.clone()).await?;
    took("the same transaction again", &second, Branch::Failure)?;
    let third = t.txn(txn).await?;
    took("and again, after its else-branch has deleted the key", &third, Branch::Success)?;
    t.revision_is("its revision", third.revision, after(first.revision, 2)).of("R2")
}

pub(crate) async fn compare_only_is_fresh(t: Subject) -> Checked {
    let other = t.another().await?;
    for round in 0..50 {
        let at = other.put("k", format!("{round}")).await?;
        let txn = Txn::new().with_compares([Compare::unchanged("k", at)]);
        let answer = t.txn(txn).await?;
        took("a compare with a revision that another handle was just told", &answer, Branch::Success)?;
        same("the results of a transaction of compares alone", answer.results, vec![]).of("T9")?;
        t.revision_is("its revision", answer.revision, at).of("R6")?;
    }
    Ok(())
}
