//! Runs the cases that kill processes and damage files, on a correct store and on broken stores. The cases must pass on
//! the correct store and fail on the broken stores.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod breakage;
mod flawed_store;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use breakage::{BROKEN, Breakage};
use conformance::{Ability, BoxError, Fixture, Harness, Report, RunOptions, Verdict, play_role, run};
use flawed_store::FlawedStore;
use kv::{ErrorKind, Result, Store};
use kv_local::{CommitLog, Create, Engine, OpenOptions};
use kv_mvcc::{MvccStore, Table};
use libtest_mimic::{Arguments, Failed, Trial};
use table::FileTable;
use tempfile::TempDir;

#[derive(Clone, Copy, Debug)]
struct InFile(Breakage);

impl Engine for InFile {
    fn name(&self) -> &'static str {
        "file"
    }

    fn entry(&self) -> &'static str {
        "log"
    }

    fn files(&self) -> &'static [&'static str] {
        &["log"]
    }

    fn log(&self) -> CommitLog {
        CommitLog::Own
    }

    fn open(&self, entry: &Path, _: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(FileTable::open(entry, self.0)?))
    }
}

#[derive(Debug)]
struct Held {
    way: Breakage,
    path: PathBuf,
    store: Arc<MvccStore>,
    // `Some` only in the process that created the store, because this process must delete the folder.
    _folder: Option<TempDir>,
}

const WAIT: Duration = Duration::from_secs(10);

async fn open(way: Breakage, path: &Path, wait: Duration) -> Result<Arc<MvccStore>> {
    if way == Breakage::SkipsLock {
        fs::create_dir_all(path).unwrap();
        let table = Box::new(FileTable::open(&path.join("log"), way)?);
        return Ok(Arc::new(MvccStore::open(table, kv_mvcc::Options { name: "file", ..Default::default() })?));
    }
    let options = OpenOptions::default().with_create(Create::IfMissing).with_wait(wait);
    let opened = kv_local::open(InFile(way), path, &options).await;
    if way == Breakage::MakesItAnew && opened.as_ref().is_err_and(|error| *error.kind() == ErrorKind::Corrupt) {
        fs::remove_dir_all(path).unwrap();
        return Ok(Arc::new(kv_local::open(InFile(way), path, &options).await?));
    }
    Ok(Arc::new(opened?))
}

#[async_trait]
impl Harness for InFile {
    fn abilities(&self) -> &[Ability] {
        use Ability::{Close, Damage, Embedded, Folder, Measure, New, Processes, Progress, Reopen, Trace};
        &[New, Reopen, Close, Measure, Processes, Embedded, Folder, Damage, Trace, Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("store");
        Ok(Box::new(Held { way: self.0, store: open(self.0, &path, WAIT).await?, path, _folder: Some(folder) }))
    }

    /// The address of a store also names the fault to inject into it.
    async fn join(&self, address: &str, wait: Duration) -> Result<Box<dyn Fixture>> {
        let (way, path) = address.split_once(':').unwrap();
        let (way, path) = (Breakage::named(way).unwrap(), PathBuf::from(path));
        Ok(Box::new(Held { way, store: open(way, &path, wait).await?, path, _folder: None }))
    }

    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        Ok(format!("{:?}:{}", self.0, folder.join("store").display()))
    }
}

#[async_trait]
impl Fixture for Held {
    fn store(&self) -> Arc<dyn Store> {
        match self.way {
            Breakage::CallsItNotApplied | Breakage::OpByOp | Breakage::ForgetsMark => {
                FlawedStore::around(self.store.clone(), self.way)
            }
            _ => self.store.clone(),
        }
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(self.way, &self.path, WAIT).await?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(fs::metadata(self.path.join("log"))?.len())
    }

    fn address(&self) -> Result<String, BoxError> {
        Ok(format!("{:?}:{}", self.way, self.path.display()))
    }
}

fn reports(way: Breakage, case: &str) -> Vec<Report> {
    run(InFile(way), &RunOptions::new().with_filter(case)).unwrap()
}

fn passes(case: &str) -> std::result::Result<(), Failed> {
    match reports(Breakage::Healthy, case).iter().find(|report| !matches!(report.verdict, Verdict::Passed)) {
        Some(report) => Err(format!("{report:#?}").into()),
        None => Ok(()),
    }
}

/// Checks that the given conformance case detects the injected fault. A conformance case detects an injected fault only
/// if a process is killed while the fault has an effect. If the case passes on the broken store, it runs again, because
/// on a busy machine every kill may miss the time when the fault has an effect.
fn notices((way, rule, case): (Breakage, &'static str, &'static str)) -> std::result::Result<(), Failed> {
    const RUNS: usize = 3;
    let mut last = Vec::new();
    for _ in 0..RUNS {
        last = reports(way, case);
        match &last[..] {
            [report] if report.rule_broken() == Some(rule) => return Ok(()),
            [report] if matches!(report.verdict, Verdict::Passed) => {}
            _ => break,
        }
    }
    Err(format!("{rule} is broken, and the case says {last:#?}").into())
}

/// The test cases that run on the store without an injected fault: all cases about processes, crashes and files.
const CASES: [&str; 24] = [
    "H14", "H17", "R11", "D01", "D02", "D03", "D04", "D05", "D06", "D08", "D09", "D11", "D13", "D14", "D15", "M01",
    "M02", "M03", "M04", "M05", "M06", "M07", "R10", "W26",
];

fn main() -> ExitCode {
    if let Some(code) = play_role(&InFile(Breakage::Healthy)) {
        return code;
    }
    let healthy = CASES.into_iter().map(|case| Trial::test(format!("healthy_passes_{case}"), move || passes(case)));
    let broken = BROKEN
        .into_iter()
        .map(|broken| Trial::test(format!("{:?}_breaks_{}", broken.0, broken.1), move || notices(broken)));
    libtest_mimic::run(&Arguments::from_args(), healthy.chain(broken).collect()).exit_code()
}
