//! Tests the runner on stores that block every thread that calls them. Even on stores that block their callers, all
//! test cases must get a verdict, the run must end, and the process must exit.

use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness, RunOptions, Verdict, cases, run};
use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};
use libtest_mimic::{Arguments, Failed, Trial};

/// The first command-line argument, by which this program knows that it is the child process. The second command-line
/// argument of the child process says where the store blocks.
const CHILD: &str = "blocked-child";
/// Time limit for a complete run of the test cases.
const LIMIT: Duration = Duration::from_secs(240);

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Every call of the blocking store blocks the thread that polls it.
    Calls,
    /// Every call of the blocking store starts a task that blocks its thread, and never returns an answer.
    Tasks,
    /// Making a new blocking store blocks the thread.
    Making,
    /// Cleaning up the fixture after a test case blocks the thread.
    ClearingUp,
}

const WAYS: [(&str, Place); 4] =
    [("calls", Place::Calls), ("tasks", Place::Tasks), ("making", Place::Making), ("clearing_up", Place::ClearingUp)];

fn block() -> ! {
    loop {
        thread::park();
    }
}

#[derive(Clone, Copy, Debug)]
struct Blocking(Place);

impl Blocking {
    async fn call<T>(self) -> T {
        match self.0 {
            Place::Tasks => {
                tokio::spawn(async { block() });
            }
            Place::ClearingUp => {}
            Place::Calls | Place::Making => block(),
        }
        std::future::pending().await
    }
}

#[async_trait]
impl Store for Blocking {
    async fn range(&self, _: RangeRequest) -> Result<RangeResponse> {
        self.call().await
    }

    async fn txn(&self, _: Txn) -> Result<TxnResponse> {
        self.call().await
    }

    async fn watch(&self, _: WatchRequest) -> Result<WatchStream> {
        self.call().await
    }

    async fn compact(&self, _: Revision) -> Result<()> {
        self.call().await
    }
}

#[async_trait]
impl Fixture for Blocking {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(*self)
    }

    async fn finish(&mut self) -> std::result::Result<(), BoxError> {
        if matches!(self.0, Place::ClearingUp) {
            block();
        }
        Ok(())
    }
}

#[async_trait]
impl Harness for Blocking {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New]
    }

    async fn fresh(&self) -> std::result::Result<Box<dyn Fixture>, BoxError> {
        if matches!(self.0, Place::Making) {
            block();
        }
        Ok(Box::new(*self))
    }
}

/// Runs the test cases on the blocking store, and prints the name of each failed case.
fn child(way: Place) -> std::result::Result<(), BoxError> {
    let limits = (Duration::from_millis(10), Duration::from_millis(30));
    let options = RunOptions::new().with_patience(limits.0).with_case_limit(limits.1);
    for report in run(Blocking(way), &options)? {
        match report.verdict {
            Verdict::Failed(_) => writeln!(std::io::stdout(), "{}", report.name)?,
            Verdict::Ignored(_) => {}
            verdict => return Err(format!("{}: {verdict:?}", report.name).into()),
        }
    }
    Ok(())
}

/// Checks that a process that runs the cases on a blocking store ends in time, and has printed the name of every case
/// that can run.
fn ends(name: &str) -> std::result::Result<(), Failed> {
    let mut process = Command::new(std::env::current_exe()?)
        .args([CHILD, name])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let end = Instant::now() + LIMIT;
    let status = loop {
        match process.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < end => thread::sleep(Duration::from_millis(50)),
            None => {
                process.kill()?;
                process.wait()?;
                return Err(format!("the process was still there after {LIMIT:?}").into());
            }
        }
    };
    let mut listed = String::new();
    process.stdout.take().ok_or("no output")?.read_to_string(&mut listed)?;
    let abilities = Blocking(Place::Calls).abilities().to_vec();
    let expected: Vec<&str> =
        cases().iter().filter(|case| case.ignored_because(&abilities).is_none()).map(|case| case.name()).collect();
    if !status.success() || listed.lines().ne(expected.iter().copied()) {
        return Err(
            format!("{status}; {} cases of {} failed:\n{listed}", listed.lines().count(), expected.len()).into()
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, name] = &arguments[..]
        && first == CHILD
    {
        let way = WAYS.iter().find(|(known, _)| known == name);
        return match way.map(|(_, way)| child(*way)) {
            Some(Ok(())) => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        };
    }
    let trials = WAYS.map(|(name, _)| Trial::test(format!("run_ends_when_store_blocks_in_{name}"), || ends(name)));
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}
