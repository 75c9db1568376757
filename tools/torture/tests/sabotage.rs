//! Proves that a torture run can fail: it must detect broken stores, and allocators that record no pending commits.

#![allow(clippy::print_stdout, reason = "prints the violations that were found")]

use std::path::Path;

use torture::{Mode, Plan, Sabotage};

/// The violations that ignored guards cause: another writer's change is lost, or two documents contradict each other.
const FOUND: [&str; 6] =
    ["went from sequence number", "blocks hold", " the block ", "which is gone", "after its DEL", "was told"];

/// Returns the violation that the torture reports for the given sabotage; panics if it reports none.
async fn said(sabotage: Sabotage) -> String {
    let mut plan = Plan::new(&stores::drivers(), "memory", Mode::InProcess, 300_000, 7)
        .unwrap_or_else(|failure| panic!("{failure}"));
    plan.sabotage = sabotage;
    match torture::run(&plan, Path::new("")).await {
        Ok(report) => panic!("{sabotage:?} was not noticed: {report}"),
        Err(failure) => {
            println!("{sabotage:?}: {failure}");
            failure.0
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sabotage_is_found_when_guards_are_ignored() {
    let said = said(Sabotage::Guards).await;
    // A commit without its guards assigns an address a second time, or overwrites another writer's change.
    assert!(FOUND.iter().any(|what| said.contains(what)), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sabotage_is_found_when_commits_are_not_carried_out() {
    let said = said(Sabotage::Commits).await;
    assert!(
        said.contains("which no revision shows") || said.contains("after its DEL") || said.contains("was told"),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sabotage_is_found_when_commits_lack_part() {
    let said = said(Sabotage::Atomicity).await;
    assert!(said.contains("changed: "), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sabotage_is_found_when_late_commits_are_not_noted() {
    let said = said(Sabotage::Intents).await;
    assert!(said.contains("which is gone") || said.contains("after its DEL"), "{said}");
}
