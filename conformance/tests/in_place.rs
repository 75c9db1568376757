//! Runs all conformance cases on one store that is emptied between two cases.
#![allow(clippy::unwrap_used, reason = "a test")]

mod one;

use std::sync::Arc;

use conformance::{ForeignKeys, InPlaceHarness, Report, RunOptions, Verdict, run};
use kv::{Range, StoreExt};
use one::One;
use tokio::runtime::Runtime;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn failed(reports: &[Report]) -> Vec<&Report> {
    reports.iter().filter(|report| matches!(report.verdict, Verdict::Failed(_))).collect()
}

#[test]
fn in_place_run_passes_and_leaves_store_empty() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let one = One::in_memory();
    let reports = run(InPlaceHarness::new(one.clone(), ForeignKeys::Leave), &RunOptions::new()).unwrap();
    assert!(failed(&reports).is_empty(), "{:#?}", failed(&reports));
    let passed = reports.iter().filter(|report| matches!(report.verdict, Verdict::Passed)).count();
    assert!(passed >= 110, "only {passed} cases ran");
    assert_eq!(runtime.block_on(one.0.count(Range::All)).unwrap(), 0);
}

#[test]
fn in_place_run_names_foreign_key_and_leaves_it() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let one = One::in_memory();
    let at = runtime.block_on(one.0.put("theirs", "v")).unwrap();
    let reports =
        run(InPlaceHarness::new(one.clone(), ForeignKeys::Leave), &RunOptions::new().with_filter("B0")).unwrap();
    assert_eq!(failed(&reports).len(), reports.len());
    for report in &reports {
        let Verdict::Failed(failure) = &report.verdict else { panic!("{report:?}") };
        assert_eq!(failure.got(), "another client writes to this store meanwhile: theirs");
    }
    let left = runtime.block_on(one.0.get("theirs")).unwrap().unwrap();
    assert_eq!((left.mod_revision, left.version), (at, 1));
}

#[test]
fn in_place_run_erases_everything_only_when_asked() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let one = One::in_memory();
    runtime.block_on(one.0.put("theirs", "v")).unwrap();
    let reports =
        run(InPlaceHarness::new(one.clone(), ForeignKeys::Erase), &RunOptions::new().with_filter("B0")).unwrap();
    assert!(failed(&reports).is_empty(), "{:#?}", failed(&reports));
    assert_eq!(runtime.block_on(one.0.count(Range::All)).unwrap(), 0);
}

#[test]
fn in_place_run_clears_up_after_case_was_given_up() {
    let runtime = runtime();
    let _entered = runtime.enter();
    let one = One::in_memory();
    let in_place = Arc::new(InPlaceHarness::new(one.clone(), ForeignKeys::Leave));
    runtime.block_on(async {
        let fixture = conformance::Harness::fresh(&in_place).await.unwrap();
        fixture.store().put("ours", "v").await.unwrap();
        // The test drops the fixture without `finish`, as the runner does when a test case exceeds its time limit.
        drop(fixture);
        assert_eq!(one.0.count(Range::All).await.unwrap(), 1);
        in_place.clear_up().await.unwrap();
        assert_eq!(one.0.count(Range::All).await.unwrap(), 0);
    });
}
