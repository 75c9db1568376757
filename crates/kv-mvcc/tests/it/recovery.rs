//! Tests which errors and outcomes callers get when commits fail.

use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use kv::{Content, ErrorKind, Op, Outcome, Range, Revision, Store, StoreExt, Txn, WatchRequest};
use kv_mvcc::{Options, Retention, Table, Write};

use crate::wrapped::{Fault, Wrapped, count, rows};

fn put(key: &str) -> Txn {
    Txn::new().with_success([Op::put(key, "v")])
}

#[tokio::test]
async fn commit_failure_is_definite_when_it_did_not_happen() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    store.put("a", "1").await.unwrap();
    for kind in [&ErrorKind::CommitIo, &ErrorKind::NoSpace] {
        table.fail_next(Fault::Refused(kind));
        let error = store.txn(put("b")).await.unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (kind, Outcome::NotApplied), "{error}");
        assert!(error.to_string().contains("as the test wants it"), "{error}");
    }
    table.fail_next(Fault::Panic);
    let error = store.txn(put("b")).await.unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::Corrupt, Outcome::NotApplied), "{error}");
    assert!(store.get("b").await.unwrap().is_none());
    assert_eq!(store.put("b", "2").await.unwrap(), Revision::new(3));
    store.verify().await.unwrap();
}

#[tokio::test]
async fn commit_failure_is_success_when_it_happened() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    let mut stream = store.watch(WatchRequest::new(Range::All, Revision::new(2))).await.unwrap();
    table.fail_next(Fault::Applied);
    assert_eq!(store.txn(put("a")).await.unwrap().revision, Revision::new(2));
    let batch = tokio::time::timeout(Duration::from_secs(10), stream.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(batch.revision, Revision::new(2));
    table.fail_next(Fault::Applied);
    store.compact(Revision::new(2)).await.unwrap();
    assert_eq!(store.status().compacted, Revision::new(2));
    store.verify().await.unwrap();
}

#[tokio::test]
async fn compaction_that_fails_leaves_mark() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    store.put("a", "1").await.unwrap();
    table.fail_next(Fault::Refused(&ErrorKind::CommitIo));
    let error = store.compact(Revision::new(2)).await.unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (&ErrorKind::CommitIo, Outcome::NotApplied));
    assert_eq!(store.status().compacted, Revision::UNSET);
    store.compact(Revision::new(2)).await.unwrap();
}

#[tokio::test]
async fn sweep_that_fails_is_made_up_for() {
    let table = Wrapped::default();
    let store = table.store(Options { retention: Retention::UNBOUNDED, ..Options::default() });
    for i in 0..10 {
        store.put("a", format!("{i}")).await.unwrap();
    }
    // A compaction makes two commits: one that sets the compaction mark, and one that removes the rows below the mark.
    // The second commit of the compaction fails in this test.
    table.fail_after(1, Fault::Refused(&ErrorKind::CommitIo));
    store.compact(Revision::new(8)).await.unwrap();
    assert!(!table.has_fault(), "the sweep has met the fault");
    assert_eq!((store.status().compacted, count(&table.inner, b'l')), (Revision::new(8), 10));
    store.verify().await.unwrap();
    // The next write also removes the rows that the failed commit of the compaction should have removed.
    store.put("a", "last").await.unwrap();
    assert_eq!(count(&table.inner, b'l') as i64, store.status().revision.get() - 7);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn unknown_commit_stops_writing() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    store.put("a", "1").await.unwrap();
    for (fault, there) in [(Fault::Applied, true), (Fault::Refused(&ErrorKind::CommitIo), false)] {
        let before = store.status().revision;
        table.set_broken(true);
        table.fail_next(fault);
        let error = store.txn(put("b")).await.unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (&ErrorKind::CommitIo, Outcome::Unknown));
        let commits = table.commits();
        for _ in 0..2 {
            let error = store.txn(put("c")).await.unwrap_err();
            assert_eq!((error.kind(), error.outcome()), (&ErrorKind::Poisoned, Outcome::NotApplied));
        }
        let error = store.compact(before).await.unwrap_err();
        assert_eq!((error.kind(), error.outcome()), (&ErrorKind::Poisoned, Outcome::NotApplied));
        assert_eq!(table.commits(), commits, "no commit comes before the table has recovered");
        assert!(store.get("a").await.unwrap().is_some(), "reads go on");
        table.set_broken(false);
        let found = if there { before.next() } else { before };
        assert_eq!(store.txn(put("c")).await.unwrap().revision, found.next());
        assert!(store.get("b").await.unwrap().is_some(), "from the first round on");
    }
    assert!(store.get("c").await.unwrap().is_some());
    store.verify().await.unwrap();
}

#[tokio::test]
async fn group_members_are_all_told_same() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    table.fail_next(Fault::Refused(&ErrorKind::NoSpace));
    let keys: Vec<String> = (0..20).map(|i| format!("k{i}")).collect();
    let answers = join_all(keys.iter().map(|key| store.txn(put(key)))).await;
    let mut failed = 0;
    for (key, answer) in keys.iter().zip(answers) {
        let there = store.get(key.as_str()).await.unwrap().is_some();
        match answer {
            Ok(_) => assert!(there, "{key}"),
            Err(error) => {
                assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NoSpace, Outcome::NotApplied));
                assert!(!there, "{key}");
                failed += 1;
            }
        }
    }
    assert!(failed > 0);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn group_has_no_trace_of_member_that_failed_halfway() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    store.txn(Txn::new().with_success([Op::put("bad", "value"), Op::put("good", "1")])).await.unwrap();
    // The value row with the lowest key belongs to revision 2.
    let value = rows(&table.inner).into_iter().find(|(key, _)| key[0] == b'v').unwrap();
    table.inner.commit(&[Write::Delete(value.0)]).unwrap();
    let halfway = Txn::new().with_success([
        Op::put("new", "x"),
        Op::put("good", "2"),
        Op::delete_range(Range::prefix("g0")),
        Op::put("bad", "x").with_prev(),
    ]);
    let last = Txn::new().with_success([Op::delete("g0")]);
    let group = [put("g0"), halfway.clone(), put("g1"), halfway, last];
    let answers = join_all(group.into_iter().map(|txn| store.txn(txn))).await;
    let outcomes: Vec<_> = answers.iter().map(|answer| answer.as_ref().map(|answer| answer.revision.get())).collect();
    let [Ok(3), Err(first), Ok(4), Err(second), Ok(5)] = outcomes[..] else { panic!("{answers:?}") };
    for error in [first, second] {
        assert_eq!((error.kind(), error.outcome()), (&ErrorKind::Corrupt, Outcome::NotApplied), "{error}");
    }
    let keys = store.list_at(Range::All, Revision::UNSET, Content::KeysOnly).await.unwrap().kvs;
    let found: Vec<_> = keys.iter().map(|kv| (kv.key.to_string(), kv.mod_revision.get(), kv.version)).collect();
    let expected = [("bad", 2, 1), ("g1", 4, 1), ("good", 2, 1)];
    assert_eq!(found, expected.map(|(key, revision, version)| (key.to_owned(), revision, version)));
    assert_eq!(store.get("good").await.unwrap().unwrap().value, "1".into());
    store.close().await.unwrap();
    assert_eq!(count(&table.inner, b'v'), 3, "the values of good, g0 and g1; none of the failed write");
    // The number of live keys in the status matches the rows that remain in the table.
    assert_eq!(table.store(Options::default()).status().live, 3);
}

#[tokio::test]
async fn transaction_is_refused_whole_when_touching_too_much() {
    let table = Wrapped::default();
    let store = table.store(Options { retention: Retention::UNBOUNDED, ..Options::default() });
    // Each key is written three times, so about 3,900 keys of maximum length reach the limit of 48 MiB of rows per
    // commit.
    for i in 0..4100 {
        let key = format!("{i:0>width$}", width = kv::MAX_KEY_BYTES);
        store.txn(put(&key)).await.unwrap();
    }
    let before = store.status();
    let txn = Txn::new().with_success([Op::put("other", "x"), Op::delete_range(Range::prefix("0"))]);
    let error = store.txn(txn).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::TooLarge { bytes } if *bytes > 48 << 20), "{error}");
    assert_eq!(error.outcome(), Outcome::NotApplied);
    assert_eq!(store.status(), before);
    store.verify().await.unwrap();
}

#[tokio::test]
async fn commits_are_shared_by_writers() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    let before = table.commits();
    // A single thread queues all 200 transactions before any of them can run.
    let answers = join_all((0..200).map(|i| store.txn(put(&format!("k{i}"))))).await;
    let mut revisions: Vec<i64> = answers.into_iter().map(|answer| answer.unwrap().revision.get()).collect();
    revisions.sort_unstable();
    assert_eq!(revisions, (2..202).collect::<Vec<_>>(), "each has its own");
    let commits = table.commits() - before;
    assert!(commits < 150, "{commits} commits for 200 transactions");
    store.verify().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn dropped_call_happens_once_or_never() {
    let table = Wrapped::default();
    let store = table.store(Options::default());
    let mut tasks = Vec::new();
    for i in 0..500_u64 {
        let store = store.clone();
        tasks.push(tokio::spawn(async move {
            let write = store.txn(Txn::new().with_success([Op::put(format!("k{i}"), "v")]));
            let _ = tokio::time::timeout(Duration::from_micros(i % 50 * 10), write).await;
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    store.put("last", "v").await.unwrap();
    let kvs = store.list(Range::All).await.unwrap().kvs;
    assert!(kvs.iter().all(|kv| kv.version == 1));
    assert_eq!(kvs.len() as u64, store.status().live);
    assert_eq!(store.status().revision.get(), 1 + kvs.len() as i64);
    store.verify().await.unwrap();
    store.close().await.unwrap();
}
