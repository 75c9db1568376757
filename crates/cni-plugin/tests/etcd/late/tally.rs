//! Counts the situations and outcomes of all test rounds with late ADDs.

use std::collections::BTreeMap;

use super::host::Settled;
use super::inside::Log;
use super::plan::{Place, Plan, When};

/// If a test run has at least this many rounds, in a fifth of them the ADD must end (killed, stopped or timed out)
/// while its commit is unanswered.
const MANY: u64 = 100;

/// The commit of an ADD that did not end normally: it was killed or stopped, or it timed out.
#[derive(Debug)]
pub(super) struct Commit {
    /// Bytes that identify the ADD's commit in etcd's write-ahead log.
    pub(super) mark: Vec<u8>,
    /// Number of times that etcd's write-ahead log contained the ADD's commit at the moment when etcd was stopped.
    pub(super) before: usize,
    /// Number of times that etcd's write-ahead log contained the ADD's commit after etcd had read everything that was
    /// sent to it, and before the runtime's next call. On a cluster, while one member is still stopped, the test lets
    /// the runtime make its next call and then counts the commits in that member's write-ahead log.
    pub(super) between: Option<usize>,
}

/// Counts of situations and outcomes over all test rounds.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// The number of test rounds with a commit in flight: the ADD was killed, was stopped or timed out while its commit
    /// was unanswered.
    in_flight: u64,
    /// The number of test rounds in which a commit was in flight but not yet in etcd's write-ahead log when etcd was
    /// stopped.
    to_come: u64,
    counts: BTreeMap<String, u64>,
}

impl Tally {
    fn count(&mut self, what: impl Into<String>) {
        self.add(what, 1);
    }

    fn add(&mut self, what: impl Into<String>, count: usize) {
        *self.counts.entry(what.into()).or_default() += count as u64;
    }

    /// Counts a test round by the progress of its ADDs (no commit, commit in flight, committed) at the time when etcd
    /// was stopped.
    pub(super) fn stopped(&mut self, plan: &Plan, commits: &[Commit], ended_well: usize, unread: u64) {
        let place = plan.place.name();
        self.count(format!("{place}: rounds"));
        if commits.is_empty() {
            let all = plan.containers.len();
            let why = if ended_well == all { "all ADDs had ended well" } else { "ADDs had not come so far" };
            return self.count(format!("{place}: no commit in flight, {why}"));
        }
        self.in_flight += 1;
        self.to_come += u64::from(commits.iter().any(|commit| commit.before == 0));
        self.count(format!("{place}: a commit in flight, of an ADD {:?}", plan.fate));
        let more = [
            (unread > 0, "and etcd had bytes to read"),
            (plan.new_block, "on a node without a block"),
            (plan.containers.len() > 1, "of several ADDs at once"),
        ];
        for (_, what) in more.into_iter().filter(|(holds, _)| *holds) {
            self.count(format!("{place}: a commit in flight, {what}"));
        }
    }

    /// Counts a test round by its outcome, after all commits have reached etcd.
    pub(super) fn landed(&mut self, plan: &Plan, commits: &[Commit], next: &[Settled], log: &Log) {
        let sent_again: usize = next.iter().map(|settled| settled.sent_again).sum();
        for commit in commits {
            let all = log.count(&commit.mark);
            let came = match (plan.when, plan.place, commit.between) {
                _ if commit.before > 0 => "before etcd was stopped",
                (When::After, _, Some(between)) if between > 0 => "later, before the next call",
                (When::Before, Place::Cluster, Some(between)) if all > between => "later, when the next call was over",
                (When::Before | When::With, Place::One, _) if all > sent_again => "later, beside the next call",
                _ => "never, or it is not known",
            };
            self.count(format!("{}: a commit in flight came to etcd's log {came}", plan.place.name()));
        }
        self.count(format!("next call: {:?}", plan.next));
        self.add("next calls that failed and were repeated", next.iter().map(|settled| settled.failed).sum());
        self.add("commits that a next call sent again", sent_again);
    }

    pub(super) fn print(&self) {
        let Self { in_flight, to_come, counts } = self;
        println!("{in_flight:>8}  rounds with a commit in flight, {to_come} with one that etcd's log did not have yet");
        for (what, count) in counts {
            println!("{count:>8}  {what}");
        }
    }

    /// Checks that enough of the test's rounds had commits in flight for a meaningful test.
    pub(super) fn proves_something(&self, rounds: u64) {
        let Self { in_flight, to_come, .. } = *self;
        let [least, least_to_come] = if rounds < MANY { [1, 0] } else { [rounds / 5, rounds / 10] };
        assert!(
            in_flight >= least && to_come >= least_to_come,
            "of {rounds} rounds {in_flight} had a commit in flight, and {to_come} one that etcd's log did not have yet; to \
             prove anything it takes {least} and {least_to_come}: run it on a machine with less to do, or with another \
             MARGAY_LATE_SEED"
        );
    }
}
