//! Tests that a rehearsal returns the answers that the store would return, and leaves the store unchanged.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use fastrand::Rng;
use kv::wrap::{Fault, FaultyStore, Rehearsal};
use kv::{
    Compare, CompareOp, Content, ErrorKind, Key, Op, Operation, Range, RangeRequest, Revision, Store, StoreExt, Target,
    Txn, TxnRange, WatchRequest,
};

const KEYS: [&str; 6] = ["a", "b", "b/1", "b/2", "c", "d"];

fn range(rng: &mut Rng) -> Range {
    match rng.u8(..4) {
        0 => Range::prefix("b"),
        1 => Range::FromTo("a".into(), "c".into()),
        2 => Range::All,
        _ => Range::key(KEYS[rng.usize(..KEYS.len())]),
    }
}

fn read(rng: &mut Rng) -> TxnRange {
    let content = [Content::Full, Content::KeysOnly, Content::CountOnly][rng.usize(..3)];
    TxnRange::new(range(rng)).with_limit(rng.i64(0..4)).with_content(content)
}

fn compare(rng: &mut Rng, newest: i64) -> Compare {
    let op = [CompareOp::Equal, CompareOp::NotEqual, CompareOp::Less, CompareOp::Greater][rng.usize(..4)];
    let revision = Revision::new(rng.i64(0..=newest + 1));
    let target = match rng.u8(..4) {
        0 => Target::Version(rng.i64(0..4)),
        1 => Target::CreateRevision(revision),
        2 => Target::ModRevision(revision),
        _ => Target::Value(rng.u8(..9).to_string().into()),
    };
    Compare::new(range(rng), op, target)
}

/// Generates a list of up to three operations that write each key at most once.
fn branch(rng: &mut Rng) -> Vec<Op> {
    let mut keys = KEYS.to_vec();
    rng.shuffle(&mut keys);
    (0..rng.usize(..4))
        .map(|at| match rng.u8(..4) {
            0 => Op::delete(keys[at]).with_prev(),
            1 => Op::Range(read(rng)),
            2 => Op::put(keys[at], rng.u8(..9).to_string()).with_prev(),
            _ => Op::put(keys[at], rng.u8(..9).to_string()),
        })
        .collect()
}

#[tokio::test]
async fn rehearsal_answers_as_store_would() {
    for seed in 0..200 {
        let mut rng = Rng::with_seed(seed);
        let (store, other) = (kv_mvcc::memory(), kv_mvcc::memory());
        for _ in 0..8 {
            let ops = branch(&mut rng);
            for one in [&store, &other] {
                one.txn(Txn::new().with_success(ops.clone())).await.unwrap();
            }
        }
        let before = store.list(Range::All).await.unwrap();
        let rehearsal = Rehearsal::new(store.clone());
        for step in 0..20 {
            let newest = other.list(Range::All).await.unwrap().revision.get();
            let compares = (0..rng.usize(..3)).map(|_| compare(&mut rng, newest)).collect::<Vec<_>>();
            let txn = Txn::new().with_compares(compares).with_success(branch(&mut rng)).with_failure(branch(&mut rng));
            let reported = rehearsal.txn(txn.clone()).await.unwrap();
            assert_eq!(reported, other.txn(txn.clone()).await.unwrap(), "seed {seed}, step {step}: {txn:?}");
            let TxnRange { range, limit, content, .. } = read(&mut rng);
            let at = Revision::new(rng.i64(0..=reported.revision.get()));
            let request = RangeRequest::new(range).with_at(at).with_limit(limit).with_content(content);
            let (reported, right) =
                (rehearsal.range(request.clone()).await.unwrap(), other.range(request.clone()).await);
            assert_eq!(reported, right.unwrap(), "seed {seed}, step {step}: {request:?}");
        }
        assert_eq!(store.list(Range::All).await.unwrap(), before, "nothing is written");
    }
}

#[tokio::test]
async fn rehearsal_undoes_transaction_that_fails_halfway() {
    let mut failed = 0;
    for reads in 0..6 {
        let left = Arc::new(AtomicI32::new(i32::MAX));
        let counter = Arc::clone(&left);
        let store = FaultyStore::new(kv_mvcc::memory(), move |operation| {
            (operation == Operation::Range && counter.fetch_sub(1, SeqCst) == 0).then_some(Fault::NotSent)
        });
        let rehearsal = Rehearsal::new(store);
        rehearsal.put("a", "1").await.unwrap();
        left.store(reads, SeqCst);
        let both = Txn::new().with_success([Op::put("a", "2"), Op::put("c", "2")]);
        let answer = rehearsal.txn(both).await;
        left.store(i32::MAX, SeqCst);
        // A rehearsed transaction that fails uses up no revision, so the next transaction gets the revision after the
        // last successful transaction.
        rehearsal.put("d", "3").await.unwrap();
        let value = async |key: &str| rehearsal.get(key).await.unwrap().map(|kv| kv.value);
        let (expected, other) = if answer.is_ok() { ("2", Some("2".into())) } else { ("1", None) };
        assert_eq!((value("a").await, value("c").await), (Some(expected.into()), other), "after {reads} reads");
        failed += u32::from(answer.is_err());
    }
    assert!(failed > 1, "{failed}: one of the faults came between the two writes");
}

#[tokio::test]
async fn rehearsal_is_refused_when_impossible() {
    let rehearsal = Rehearsal::new(kv_mvcc::memory());
    let kind = |error: kv::Error| error.kind().clone();
    let later = RangeRequest::new(Range::All).with_at(Revision::new(9));
    assert_eq!(kind(rehearsal.range(later).await.unwrap_err()), ErrorKind::FutureRevision);
    let watch = rehearsal.watch(WatchRequest::new(Range::All, Revision::new(2))).await;
    assert_eq!(watch.err().map(kind), Some(ErrorKind::Unsupported));
    assert_eq!(kind(rehearsal.compact(Revision::new(1)).await.unwrap_err()), ErrorKind::Unsupported);
    let empty = Txn::new().with_success([Op::put(Key::default(), "v")]);
    assert!(matches!(kind(rehearsal.txn(empty).await.unwrap_err()), ErrorKind::InvalidArgument(_)));
}
