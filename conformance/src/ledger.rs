//! Records the store's answers to writers while faults are injected, and later compares the answers with the store's
//! contents.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv::{ErrorKind, Kv, Op, Outcome, Range, Revision, Txn};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::expect::{Checked, Failure, JudgedByRule, RECOVERY_TIMEOUT, holds, same, within};
use crate::subject::{BoundedHandle, in_time};

/// The prefix of all keys that a ledger's writers write.
const PREFIX: &str = "ledger/";
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The store's answer to a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LedgerAnswer {
    /// The acknowledged write happened at this revision.
    Applied(Revision),
    /// The failed write has not happened and will not happen.
    NotApplied(ErrorKind),
    /// The write failed with an unknown outcome: it may have happened.
    Unknown(ErrorKind),
}

/// All writes of a group of writers, with the store's answers. Each write is a transaction without compares that puts
/// two keys of its own, whose versions show whether the write ran twice.
#[derive(Debug, Default)]
pub(crate) struct Ledger(BTreeMap<String, LedgerAnswer>);

impl Ledger {
    /// Sends a write with the given name and value size, and records the store's answer.
    pub(crate) async fn write_sized(
        &mut self,
        handle: &BoundedHandle,
        name: String,
        bytes: usize,
    ) -> Checked<LedgerAnswer> {
        let put = |half: &str| Op::put(format!("{PREFIX}{name}/{half}"), vec![b'v'; bytes]);
        let said = match handle.txn(Txn::new().with_success([put("a"), put("b")])).await {
            Ok(answer) => LedgerAnswer::Applied(answer.revision),
            Err(error) => {
                in_time(&error)?;
                match error.outcome() {
                    Outcome::NotApplied => LedgerAnswer::NotApplied(error.kind().clone()),
                    Outcome::Unknown => LedgerAnswer::Unknown(error.kind().clone()),
                }
            }
        };
        self.0.insert(name, said.clone());
        Ok(said)
    }

    /// Sends a write with the given name, and records the store's answer.
    pub(crate) async fn write(&mut self, handle: &BoundedHandle, name: String) -> Checked<LedgerAnswer> {
        self.write_sized(handle, name, 1).await
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    pub(crate) fn said(&self) -> impl Iterator<Item = &LedgerAnswer> {
        self.0.values()
    }

    pub(crate) fn failed(&self) -> usize {
        self.said().filter(|said| !matches!(said, LedgerAnswer::Applied(_))).count()
    }

    pub(crate) fn newest(&self) -> Revision {
        let revisions =
            self.said().filter_map(|said| if let LedgerAnswer::Applied(at) = said { Some(*at) } else { None });
        revisions.max().unwrap_or(Revision::UNSET)
    }

    /// Checks that the store contains every acknowledged write and no write with the outcome "not applied". Each write
    /// in the store must be complete and must have run only once.
    pub(crate) async fn is_true(&self, handle: &BoundedHandle) -> Checked {
        let found = handle.read(Range::prefix(PREFIX)).await?;
        holds("a revision not below any that was acknowledged", found.revision >= self.newest(), &found.revision)
            .of("R8")?;
        let found: BTreeMap<String, Kv> = found.kvs.into_iter().map(|kv| (kv.key.to_string(), kv)).collect();
        for (name, said) in &self.0 {
            let half = |half: &str| found.get(&format!("{PREFIX}{name}/{half}"));
            let halves = (half("a"), half("b"));
            check_write(name, said, halves).map_err(|failure| failure.with_note(&format!("{name}, told {said:?}")))?;
        }
        Ok(())
    }
}

fn check_write(name: &str, said: &LedgerAnswer, halves: (Option<&Kv>, Option<&Kv>)) -> Checked {
    let at = |half: Option<&Kv>| half.map(|kv| kv.mod_revision);
    same("the revisions of both halves of a write", at(halves.0), at(halves.1)).of("S5")?;
    let times = halves.0.map_or(0, |kv| kv.version);
    holds(&format!("{name} was written at most once"), times <= 1, &halves).of("E3")?;
    match said {
        LedgerAnswer::Applied(revision) => same("what was acknowledged", at(halves.0), Some(*revision)).of("S3"),
        LedgerAnswer::NotApplied(_) => same("what certainly did not happen", at(halves.0), None).of("E2"),
        LedgerAnswer::Unknown(_) => Ok(()),
    }
}

/// A group of running writers.
pub(crate) struct Writers {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<Checked<Ledger>>,
    acknowledged: Arc<watch::Sender<usize>>,
}

impl Writers {
    /// Starts one writer task for each store handle; `name` distinguishes these writers from other groups of writers.
    pub(crate) fn start(name: &str, handles: impl IntoIterator<Item = BoundedHandle>) -> Self {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(watch::Sender::new(0)));
        let mut tasks = JoinSet::new();
        for (writer, handle) in handles.into_iter().enumerate() {
            let name = format!("{name}-{writer}");
            tasks.spawn(write_on(name, handle, stop.clone(), acknowledged.clone()));
        }
        Self { stop, tasks, acknowledged }
    }

    /// Waits until the store has acknowledged `writes` more writes.
    pub(crate) async fn progress(&self, writes: usize) -> Checked {
        let mut acknowledged = self.acknowledged.subscribe();
        let wanted = *acknowledged.borrow() + writes;
        // The running writers hold the sender of the channel `acknowledged`, so waiting on it cannot fail.
        let wait = acknowledged.wait_for(|count| *count >= wanted);
        within(RECOVERY_TIMEOUT, &format!("{writes} more writes"), wait).await.of("N2")?.map(|_| ()).map_err(gone)
    }

    /// Lets the writers finish their current store calls, and returns all recorded answers.
    pub(crate) async fn stop(mut self) -> Checked<Ledger> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Ledger::default();
        while let Some(ledger) = self.tasks.join_next().await {
            all.extend(ledger??);
        }
        Ok(all)
    }
}

fn gone(error: watch::error::RecvError) -> Failure {
    Failure::new("writers", "at work", error.to_string())
}

async fn write_on(
    name: String,
    handle: BoundedHandle,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<watch::Sender<usize>>,
) -> Checked<Ledger> {
    let mut ledger = Ledger::default();
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        match ledger.write(&handle, format!("{name}-{count}")).await? {
            LedgerAnswer::Applied(_) => acknowledged.send_modify(|count| *count += 1),
            _ => tokio::time::sleep(RETRY_INTERVAL).await,
        }
        count += 1;
    }
    Ok(ledger)
}
