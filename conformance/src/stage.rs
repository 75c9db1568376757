//! Runs conformance cases with a tokio runtime, a test harness, and a lock for cases that must run alone.
//!
//! A store under test may block the thread that polls it. A blocked thread stops timers and cancellation on its tokio
//! runtime. The runner's own thread watches the time limits of the test cases, because a blocked runtime cannot do so.
//! If a test case blocks a thread of the runtime, the runner abandons that runtime and starts a new one for the next
//! case.

use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

use crate::case::{Case, Weight};
use crate::expect::{Checked, Failure};
use crate::harness::{BoxError, Fixture, Harness, Scene, Tenancy};
use crate::patience::patient;
use crate::runner::{Report, RunOptions, Verdict};
use crate::subject::{CaseProgress, Subject};

/// Number of worker threads of each tokio runtime on which test cases and their stores run.
const WORKER_THREADS: usize = 4;

/// The interval at which a run with a stop flag checks the flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum time that a runtime with a free thread takes to run a trivial task on a quiet machine.
const MAX_IDLE_RUNTIME_DELAY: Duration = Duration::from_secs(2);

const NEEDS_ITS_OWN: &str = "it needs a store that no other client uses";
pub(crate) const STOPPED: &str = "the run was stopped";
const BLOCKED: &str = "; the store blocks a thread, which was left behind";

/// Runs conformance cases on the stores of one test harness.
pub(crate) struct Stage {
    /// The tokio runtimes that the runner has started for test cases so far. The last runtime in `runtimes` is in use.
    /// All earlier runtimes in `runtimes` were abandoned because a test case blocked them, but may still run tasks that
    /// the harness started.
    runtimes: Mutex<Vec<Runtime>>,
    harness: Arc<dyn Harness>,
    options: RunOptions,
    /// A lock with which a heavy test case runs alone, with no other test case at the same time. Heavy test cases take
    /// the write lock, light cases take a read lock.
    turns: RwLock<()>,
}

/// The reason why the runner abandoned a test case.
#[derive(Debug)]
enum AbandonReason {
    Stopped,
    TooLate { limit: Duration, has_rounds: bool },
}

impl Stage {
    pub(crate) fn new(harness: Arc<dyn Harness>, options: RunOptions) -> Result<Self, BoxError> {
        Ok(Self { runtimes: Mutex::new(vec![runtime()?]), harness, options, turns: RwLock::default() })
    }

    /// The reason why a test case cannot run in this environment; `None` if the case can run.
    pub(crate) fn ignored_because(&self, case: &Case) -> Option<&'static str> {
        if self.harness.tenancy() == Tenancy::Shared && case.tenancy == Tenancy::Exclusive {
            return Some(NEEDS_ITS_OWN);
        }
        case.ignored_because(self.harness.abilities())
    }

    pub(crate) fn report(&self, case: &Case) -> Report {
        let started = Instant::now();
        let verdict = match self.ignored_because(case) {
            Some(reason) => Verdict::Ignored(reason),
            None => match self.attempt(case) {
                None => Verdict::Ignored(STOPPED),
                Some(Ok(())) => Verdict::Passed,
                Some(Err(failure)) => Verdict::Failed(Box::new(failure)),
            },
        };
        Report { name: case.name, group: case.group, rules: case.rules, verdict, took: started.elapsed() }
    }

    /// Runs one test case on a fresh store, and fails it if it panics or hangs.
    pub(crate) fn judge(&self, case: &Case) -> Checked {
        let rule = case.rules.first().copied();
        match self.ignored_because(case) {
            Some(reason) => Err(Failure::new("the environment", "what the case needs", reason).or_rule(rule)),
            None => self
                .attempt(case)
                .unwrap_or_else(|| Err(Failure::new("the case as a whole", "an end", STOPPED).or_rule(rule))),
        }
    }

    /// Runs one test case; returns `None` if the run is stopped before the case ends.
    fn attempt(&self, case: &Case) -> Option<Checked> {
        // The runner's thread holds the lock that lets heavy cases run alone, so the lock is released even if the test
        // case never ends.
        let (_shared, _alone) = match case.weight {
            Weight::Light => (Some(self.turns.read().unwrap_or_else(PoisonError::into_inner)), None),
            Weight::Heavy => (None, Some(self.turns.write().unwrap_or_else(PoisonError::into_inner))),
        };
        if self.options.stopped() {
            return None;
        }
        let rule = case.rules.first().copied();
        let runtime = match self.free_runtime() {
            Ok(runtime) => runtime,
            Err(error) => return Some(Err(Failure::new("the runner", "a runtime", error.to_string()).or_rule(rule))),
        };
        let (tell, progress) = mpsc::channel();
        let (harness, story, patience) = (self.harness.clone(), case.clone(), patient(self.options.patience));
        let work = runtime.spawn(async move {
            let outcome = perform(harness, story, patience, tell.clone()).await;
            // The runner may have abandoned this test case and dropped the receiver; the result is then discarded.
            let _ = tell.send(CaseProgress::Finished(outcome));
        });
        let failure = match self.wait_for(&progress) {
            Ok(Ok(())) => return Some(Ok(())),
            Ok(Err(failure)) => failure,
            Err(given_up) => {
                let blocked = self.give_up(&work);
                match given_up {
                    AbandonReason::Stopped => return None,
                    AbandonReason::TooLate { limit, has_rounds } => {
                        let more = if blocked { BLOCKED } else { "" };
                        let of = if has_rounds { " of a round" } else { "" };
                        Failure::new("the case as a whole", "an end", format!("no end{of} within {limit:?}{more}"))
                    }
                }
            }
        };
        Some(Err(failure.or_rule(rule)))
    }

    /// Waits for the result of a test case. `wait_for` fails if the test case or one of its rounds exceeds its time
    /// limit, or if the run is stopped.
    fn wait_for(&self, progress: &mpsc::Receiver<CaseProgress>) -> Result<Checked, AbandonReason> {
        let (mut has_rounds, mut limit, mut begun) = (false, patient(self.options.case_limit), Instant::now());
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            match progress.recv_timeout(if self.options.stop.is_some() { left.min(STOP_CHECK_INTERVAL) } else { left })
            {
                Ok(CaseProgress::Finished(outcome)) => return Ok(outcome),
                _ if self.options.stopped() => return Err(AbandonReason::Stopped),
                Ok(CaseProgress::RoundBegan) => {
                    (has_rounds, limit, begun) = (true, patient(self.options.case_limit), Instant::now());
                }
                Err(RecvTimeoutError::Timeout) if left > STOP_CHECK_INTERVAL && self.options.stop.is_some() => {}
                Err(_) => return Err(AbandonReason::TooLate { limit, has_rounds }),
            }
        }
    }

    /// Aborts the task of an abandoned test case. Returns true if the task cannot end because the test case blocks its
    /// thread.
    fn give_up(&self, work: &JoinHandle<()>) -> bool {
        work.abort();
        let end = Instant::now() + patient(MAX_IDLE_RUNTIME_DELAY.min(self.options.case_limit));
        while !work.is_finished() && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        !work.is_finished()
    }

    /// The runtime for a test case: the last runtime if it runs a trivial task in time, otherwise a new runtime.
    fn free_runtime(&self) -> Result<Handle, BoxError> {
        let mut runtimes = self.runtimes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = runtimes.last() {
            let (tell, answered) = mpsc::channel();
            runtime.spawn(async move { tell.send(()) });
            if answered.recv_timeout(patient(MAX_IDLE_RUNTIME_DELAY.min(self.options.case_limit))).is_ok() {
                return Ok(runtime.handle().clone());
            }
        }
        let runtime = runtime()?;
        let handle = runtime.handle().clone();
        runtimes.push(runtime);
        Ok(handle)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // A hanging store must not delay the test report, so the stage does not wait for its runtimes to end.
        for runtime in self.runtimes.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            runtime.shutdown_background();
        }
    }
}

fn runtime() -> Result<Runtime, BoxError> {
    Ok(Builder::new_multi_thread().worker_threads(WORKER_THREADS).enable_all().build()?)
}

async fn make(harness: &dyn Harness, scene: Scene) -> Result<Box<dyn Fixture>, BoxError> {
    match scene {
        Scene::Plain => harness.fresh().await,
        scene => harness.fresh_in(scene).await,
    }
}

async fn perform(
    harness: Arc<dyn Harness>,
    case: Case,
    patience: Duration,
    progress: mpsc::Sender<CaseProgress>,
) -> Checked {
    let fresh =
        AssertUnwindSafe(make(&*harness, case.scene)).catch_unwind().await.map_err(|panic| panicked(&*panic))?;
    let fixture =
        fresh.map_err(|error| Failure::new("the environment: a fresh store", "a store", error.to_string()))?;
    let (subject, over) = Subject::new(harness, fixture, patience, progress);
    let answered = AssertUnwindSafe(async { (case.story)(subject).await }).catch_unwind().await;
    let outcome = answered.unwrap_or_else(|panic| Err(panicked(&*panic)));
    let Ok(mut fixture) = over.await else { return outcome };
    let finished = AssertUnwindSafe(fixture.finish()).catch_unwind().await;
    let finished = finished.unwrap_or_else(|panic| Err(panic_text(&*panic).into()));
    outcome?;
    finished.map_err(|error| Failure::new("the environment: clearing up", "success", error.to_string()))
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    Failure::new("the case as a whole", "no panic", panic_text(panic))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a panic: {}", text.unwrap_or("without a text"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::ReferenceHarness;

    #[test]
    fn stage_restarts_time_limit_with_each_round() {
        let limit = Duration::from_secs(1);
        let stage = Stage::new(Arc::new(ReferenceHarness), RunOptions::new().with_case_limit(limit)).unwrap();
        let (tell, progress) = mpsc::channel();
        thread::spawn(move || {
            let begun = Instant::now();
            // In this test, all rounds together take longer than the time limit of a case, even if the limit is
            // extended for load; each single round takes less.
            let long = patient(limit).mul_f64(1.5);
            while begun.elapsed() < long {
                tell.send(CaseProgress::RoundBegan).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
            tell.send(CaseProgress::Finished(Ok(()))).unwrap();
        });
        assert!(matches!(stage.wait_for(&progress), Ok(Ok(()))));
    }

    #[test]
    fn stage_notices_stop_when_rounds_are_quick() {
        let options = RunOptions::new().with_stop(Arc::new(true.into()));
        let stage = Stage::new(Arc::new(ReferenceHarness), options).unwrap();
        let (tell, progress) = mpsc::channel();
        tell.send(CaseProgress::RoundBegan).unwrap();
        assert!(matches!(stage.wait_for(&progress), Err(AbandonReason::Stopped)));
    }

    #[test]
    fn stage_gives_up_case_when_round_hangs() {
        let stage = Stage::new(Arc::new(ReferenceHarness), RunOptions::new().with_case_limit(Duration::ZERO)).unwrap();
        let (tell, progress) = mpsc::channel();
        tell.send(CaseProgress::RoundBegan).unwrap();
        assert!(matches!(stage.wait_for(&progress), Err(AbandonReason::TooLate { has_rounds: true, .. })));
    }
}
