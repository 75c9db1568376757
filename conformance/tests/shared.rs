//! Runs the cases that tolerate a shared store on a store that another client uses. The cases that tolerate a shared
//! store must pass, must not change other clients' keys, and must delete their own keys.
#![allow(clippy::unwrap_used, reason = "a test")]

mod one;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use conformance::{PrefixHarness, Report, RunOptions, Tenancy, Verdict, cases, run};
use futures::StreamExt;
use kv::{Key, Op, Range, Revision, Store, StoreExt, Txn, WatchRequest};
use one::One;

const OURS: &str = "m/suite/";
/// The keys in the store that no test case has written. Some keys of other clients sort directly before or after the
/// suite's key prefix.
const FOREIGN: [&str; 8] = ["\0", "k", "m/suite", "m/suite.", "m/suite0", "p/1", "w", "\u{7f}"];
/// The key that another client writes continuously.
const BUSY: &str = "m/suite-of-another-client";

/// Runs the test cases while another client writes continuously.
fn judge_beside_a_writer(store: &Arc<dyn Store>) -> Vec<Report> {
    let (harness, stop) = (PrefixHarness::new(One(store.clone()), OURS), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let write = async {
                for round in 0.. {
                    store.put(BUSY, format!("{round}")).await.unwrap();
                    store.txn(Txn::new().with_success([Op::delete(BUSY)])).await.unwrap();
                    tokio::time::sleep(std::time::Duration::from_micros(100)).await;
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                }
            };
            tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(write);
        });
        let reports = run(harness, &RunOptions::new());
        stop.store(true, Ordering::SeqCst);
        reports.unwrap()
    })
}

#[test]
fn shared_cases_pass_beside_others_and_leave_their_keys() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (store, first): (Arc<dyn Store>, Revision) = runtime.block_on(async {
        let One(store) = One::in_memory();
        let foreign = store.txn(Txn::new().with_success(FOREIGN.map(|key| Op::put(key, "theirs")))).await.unwrap();
        (store, foreign.revision)
    });
    let _entered = runtime.enter();
    // The test itself watches the store, and so sees all changes by the test cases and by the client that writes
    // continuously.
    let watch = runtime.block_on(store.watch(WatchRequest::new(Range::All, first.next()))).unwrap();
    let seen = runtime.spawn(async move {
        let ours = |key: &Key| key.as_bytes().starts_with(OURS.as_bytes());
        let (mut strangers, mut written) = (Vec::new(), 0);
        let mut events = watch.flat_map(|batch| futures::stream::iter(batch.unwrap().events));
        while let Some(event) = events.next().await {
            match event.kv.key {
                key if key == Key::from("the end") => break,
                key if ours(&key) => written += 1,
                key if key == Key::from(BUSY) => {}
                key => strangers.push(key),
            }
        }
        (strangers, written)
    });

    let reports = judge_beside_a_writer(&store);

    let failed: Vec<&Report> = reports.iter().filter(|report| matches!(report.verdict, Verdict::Failed(_))).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let passed = reports.iter().filter(|report| matches!(report.verdict, Verdict::Passed)).count();
    assert_eq!(passed, cases().iter().filter(|case| case.tenancy() == Tenancy::Shared).count());
    assert!(passed >= 70, "only {passed} cases can share a store");
    runtime.block_on(async {
        let kvs = store.list(Range::All).await.unwrap().kvs;
        let left: Vec<(Key, Revision, i64)> = kvs.into_iter().map(|kv| (kv.key, kv.mod_revision, kv.version)).collect();
        let untouched: Vec<(Key, Revision, i64)> = FOREIGN.map(|key| (key.into(), first, 1)).into();
        assert_eq!(left, untouched);
        store.put("the end", "").await.unwrap();
        let (strangers, written) = seen.await.unwrap();
        assert!(strangers.is_empty(), "keys of others were touched: {strangers:?}");
        assert!(written > 1000, "only {written} events of ours were seen");
    });
}

#[test]
fn shared_cases_need_nothing_of_environment() {
    for case in cases().iter().filter(|case| case.tenancy() == Tenancy::Shared) {
        assert!(case.needs().is_empty(), "{} shares its store but needs {:?}", case.name(), case.needs());
    }
}
