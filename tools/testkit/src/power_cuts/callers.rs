//! Runs several callers that make ADDs and DELs, until all calls are made or the power is cut.

use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::power::Disk;
use conformance::patient;
use serde_json::Value;

use super::ledger::Ledger;
use super::served::Daemon;
use crate::process::{Call, Outcome};
use crate::random::Random;

/// Maximum duration of one plugin call.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval at which a caller checks whether its plugin process has ended.
const PAUSE: Duration = Duration::from_micros(500);
/// While the disk has power, one plugin call in `KILLS` calls is killed, on average. The unsynced writes of a killed
/// call are not lost.
const KILLS: u64 = 8;

/// The parameters of all callers in one round of the test.
pub struct Work<'a> {
    pub disk: &'a Disk,
    pub conf: &'a Value,
    pub ledger: &'a Mutex<Ledger>,
    /// The number of calls that each caller makes.
    pub calls: u64,
    /// The power is cut after this number of answered calls; `None` if another event decides when the power is cut.
    pub last: Option<u64>,
    /// The approximate number of disk operations in one plugin call.
    pub operations: u64,
    /// The number of plugin calls that the daemon has answered so far.
    pub by_daemon: &'a AtomicU64,
}

enum End {
    Exit(ExitStatus),
    Killed,
    PowerCut,
}

impl Work<'_> {
    /// Runs the given number of callers concurrently until all of them have ended. Each caller draws from its own
    /// stream of random numbers.
    pub fn run(&self, callers: u64, random: &mut Random) {
        let randoms: Vec<_> = (0..callers).map(|caller| Random::new(random.next(), caller)).collect();
        thread::scope(|scope| {
            for mut random in randoms {
                scope.spawn(move || {
                    let mut calls = 0..self.calls;
                    while calls.next().is_some() && self.call(&mut random) {}
                });
            }
        });
    }

    /// Makes one ADD or DEL with the plugin. Returns false if the power was cut during the plugin call.
    fn call(&self, random: &mut Random) -> bool {
        let (verb, container) = self.ledger().begin(random);
        let call = Call::new(verb, &container, self.conf);
        let killed_at = random.once_in(KILLS).then(|| self.disk.operations() + random.below(self.operations + 1));
        let mut child = call.start(call.command());
        let status = match self.wait(&mut child, &call, killed_at) {
            End::Exit(status) => status,
            End::Killed => return true,
            End::PowerCut => return false,
        };
        let output = child.wait_with_output().unwrap();
        if !status.success() {
            // A plugin call may fail only if the power was cut.
            assert!(self.disk.is_cut(), "{call:?}: {status}, {}", String::from_utf8_lossy(&output.stdout));
            return false;
        }
        let outcome = Outcome::new(output, &call);
        self.by_daemon.fetch_add(Daemon::has_answered(&outcome.stderr).into(), Ordering::Relaxed);
        let reported = if verb == "ADD" { outcome.addresses().into_iter().collect() } else { [].into() };
        let Some(answers) = self.disk.before_cut(|| self.ledger().end(&container, reported)) else { return false };
        let answers = answers.unwrap_or_else(|what| panic!("{what}"));
        if self.last == Some(answers) {
            self.disk.cut();
        }
        true
    }

    /// Waits until a plugin process has ended. Kills the plugin process when the power is cut, or when the disk has
    /// done `killed_at` operations.
    fn wait(&self, child: &mut Child, call: &Call, killed_at: Option<u64>) -> End {
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return End::Exit(status);
            }
            let is_late = begun.elapsed() > patient(TEST_TIMEOUT);
            let is_cut = self.disk.is_cut();
            if is_late || is_cut || killed_at.is_some_and(|operation| self.disk.operations() >= operation) {
                child.kill().unwrap();
                child.wait().unwrap();
                assert!(!is_late, "{call:?} had no answer after {TEST_TIMEOUT:?}");
                return if is_cut { End::PowerCut } else { End::Killed };
            }
            thread::sleep(PAUSE);
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
