//! Runs conformance cases and reports their results.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::case::{Case, Group};
use crate::expect::Failure;
use crate::harness::{BoxError, Harness};
use crate::stage::Stage;
use crate::table::cases;

/// Options that select conformance cases and set their time limits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunOptions {
    /// Runs only cases whose name contains this string.
    pub filter: Option<String>,
    /// The time limit for one store call or for one batch of a watch; 10 s by default. The limits `patience` and
    /// `case_limit` are meant for a quiet machine; on a busy machine they are extended (see
    /// [`patient`](crate::patient)).
    pub patience: Duration,
    /// The time limit for one test case, or for one round of a case with many rounds; 2 minutes by default. When a test
    /// case exceeds its time limit, the runner ends it, even if the store blocks its threads; the blocked threads are
    /// abandoned.
    pub case_limit: Duration,
    /// Stops the run when this flag becomes true: the runner abandons the current case and starts no further case.
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { filter: None, patience: Duration::from_secs(10), case_limit: Duration::from_secs(120), stop: None }
    }
}

impl RunOptions {
    /// Creates options that run all test cases with the default time limits, which are long enough for a slow disk.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs only cases whose name contains this string.
    #[must_use]
    pub fn with_filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = Some(filter.into());
        self
    }

    /// Sets the time limit for one store call or for one batch of a watch.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets the time limit for one test case, or for one round of a case with many rounds.
    #[must_use]
    pub fn with_case_limit(mut self, case_limit: Duration) -> Self {
        self.case_limit = case_limit;
        self
    }

    /// Stops the run when `stop` becomes true: the runner abandons the current case and starts no further case.
    #[must_use]
    pub fn with_stop(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = Some(stop);
        self
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::SeqCst))
    }

    fn wants(&self, case: &Case) -> bool {
        self.filter.as_ref().is_none_or(|filter| case.name.contains(filter.as_str()))
    }
}

/// The result of a conformance case.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// The store follows the rules that the case judges.
    Passed,
    /// The store breaks a rule that the case judges.
    Failed(Box<Failure>),
    /// The test case did not run, for the given reason.
    Ignored(&'static str),
}

/// A conformance case and its result.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The name of the test case that ran.
    pub name: &'static str,
    /// The topic under which the report lists this test case.
    pub group: Group,
    /// The rules that the reported test case judges.
    pub rules: &'static [&'static str],
    /// The result of the test case.
    pub verdict: Verdict,
    /// How long the test case ran.
    pub took: Duration,
}

impl Report {
    /// The number of the broken rule, if the test case failed.
    pub fn rule_broken(&self) -> Option<&'static str> {
        match &self.verdict {
            Verdict::Failed(failure) => Some(failure.rule()),
            Verdict::Passed | Verdict::Ignored(_) => None,
        }
    }
}

/// Runs test cases one after another and returns a report for each of them. The function `run` blocks its thread, so it
/// must not be called on an async runtime.
///
/// # Errors
/// An error if no tokio runtime could be started. Faults of the store are reported as a [`Verdict`] and not as an
/// error.
pub fn run(harness: impl Harness, options: &RunOptions) -> Result<Vec<Report>, BoxError> {
    Ok(Run::new(harness, options)?.collect())
}

/// An iterator that runs one conformance case at each step and returns its report. Each step of a `Run` blocks its
/// thread, so it must not run on an async runtime.
pub struct Run {
    stage: Stage,
    cases: std::vec::IntoIter<Case>,
}

impl Run {
    /// Creates a run of the selected test cases.
    ///
    /// # Errors
    /// An error if no tokio runtime could be started.
    pub fn new(harness: impl Harness, options: &RunOptions) -> Result<Self, BoxError> {
        let stage = Stage::new(Arc::new(harness), options.clone())?;
        let cases: Vec<Case> = cases().into_iter().filter(|case| options.wants(case)).collect();
        Ok(Self { stage, cases: cases.into_iter() })
    }

    /// The selected test cases that have not run yet.
    pub fn cases(&self) -> &[Case] {
        self.cases.as_slice()
    }
}

impl Iterator for Run {
    type Item = Report;

    fn next(&mut self) -> Option<Report> {
        let case = self.cases.next()?;
        Some(self.stage.report(&case))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.cases.size_hint()
    }
}

impl ExactSizeIterator for Run {}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};

    use super::*;
    use crate::harness::{Ability, Fixture};
    use crate::stage::STOPPED;

    /// The way in which a deliberately faulty test store misbehaves.
    #[derive(Clone, Copy, Debug)]
    enum Mishap {
        Panics,
        NeverAnswers,
        BlocksItsThread,
        IsNotMade,
    }

    #[derive(Debug)]
    struct MishapStore(Mishap);

    impl MishapStore {
        async fn happen<T>(&self) -> T {
            match self.0 {
                Mishap::Panics => panic!("the engine is on fire"),
                Mishap::BlocksItsThread => loop {
                    std::thread::park();
                },
                Mishap::NeverAnswers | Mishap::IsNotMade => std::future::pending().await,
            }
        }
    }

    #[async_trait]
    impl Store for MishapStore {
        async fn range(&self, _: RangeRequest) -> Result<RangeResponse> {
            self.happen().await
        }

        async fn txn(&self, _: Txn) -> Result<TxnResponse> {
            self.happen().await
        }

        async fn watch(&self, _: WatchRequest) -> Result<WatchStream> {
            self.happen().await
        }

        async fn compact(&self, _: Revision) -> Result<()> {
            self.happen().await
        }
    }

    #[async_trait]
    impl Fixture for MishapStore {
        fn store(&self) -> Arc<dyn Store> {
            Arc::new(Self(self.0))
        }
    }

    #[async_trait]
    impl Harness for MishapStore {
        fn abilities(&self) -> &[Ability] {
            &[]
        }

        async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
            match self.0 {
                Mishap::IsNotMade => Err("no room for a store".into()),
                mishap => Ok(Box::new(Self(mishap))),
            }
        }
    }

    /// Returns the verdict of case `B01`, which reads an absent key, on a faulty store.
    fn said_of(mishap: Mishap) -> String {
        // A store that blocks its thread makes case `B01` run until its time limit, so the time limit of this case is
        // short. On a faulty store that does not block its thread, case `B01` ends without the runner's help, but may
        // take long on a busy machine.
        let case_limit = if matches!(mishap, Mishap::BlocksItsThread) { 1 } else { 60 };
        let limits = (Duration::from_millis(50), Duration::from_secs(case_limit));
        let options = RunOptions::new().with_filter("B01").with_patience(limits.0).with_case_limit(limits.1);
        let reports = run(MishapStore(mishap), &options).unwrap();
        assert_eq!(reports.len(), 1);
        match &reports[0].verdict {
            Verdict::Failed(failure) => failure.to_string(),
            other => panic!("{mishap:?}: {other:?}"),
        }
    }

    #[test]
    fn run_counts_mishaps_as_failures_of_case() {
        for (mishap, expected) in [
            (Mishap::Panics, "a panic: the engine is on fire"),
            (Mishap::NeverAnswers, "the store did not answer within "),
            (Mishap::BlocksItsThread, "no end within "),
            (Mishap::IsNotMade, "no room for a store"),
        ] {
            let said = said_of(mishap);
            assert!(said.starts_with("breaks rule G1: A range is") && said.contains(expected), "{mishap:?}: {said}");
        }
    }

    #[test]
    fn run_gives_up_at_once_when_stopped() {
        let stop = Arc::new(AtomicBool::new(false));
        let options = RunOptions::new().with_filter("B0").with_stop(stop.clone());
        let run = Run::new(MishapStore(Mishap::NeverAnswers), &options).unwrap();
        let cases = run.len();
        let reports = std::thread::scope(|scope| {
            let reports = scope.spawn(|| run.collect::<Vec<_>>());
            stop.store(true, Ordering::SeqCst);
            reports.join().unwrap()
        });
        assert_eq!(reports.len(), cases);
        assert!(reports.iter().all(|report| matches!(report.verdict, Verdict::Ignored(STOPPED))), "{reports:?}");
    }

    #[test]
    fn run_ignores_case_with_reason_when_it_cannot_run() {
        let reports = run(MishapStore(Mishap::NeverAnswers), &RunOptions::new().with_filter("R10")).unwrap();
        assert!(matches!(reports[0].verdict, Verdict::Ignored(reason) if reason.contains("open a store again")));
    }
}
