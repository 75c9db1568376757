//! Provides the store for a conformance case, with shorthand methods that keep the cases short.

mod answers;
mod servers;

use std::future::Future;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::channel::oneshot;
use kv::{
    Compare, Content, Error, ErrorKind, Op, Operation, Range, RangeRequest, RangeResponse, Result, Revision, Store,
    StoreExt, Txn, TxnResponse, WatchRequest, WatchStream,
};

use crate::expect::{Checked, Failure, JudgedByRule, RECOVERY_TIMEOUT, holds, same, within};
use crate::harness::{Ability, BoxError, Fixture, Harness, Tenancy};
use crate::process::{self, Process};
use crate::watcher::Watcher;

pub(crate) use answers::{Branch, after, delete_result, entry, put_result, read_result, span, text, took};
pub(crate) use servers::UnusedAddress;

/// The interval between two reads that check whether a store has recovered from a fault.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The store name in errors that the conformance suite itself makes.
const SUITE_NAME: &str = "conformance";
/// Maximum number of concurrent writes that [`BoundedHandle::write_all`] makes.
const MAX_CONCURRENT_WRITES: usize = 64;

/// The progress of a test case, which the case reports to the runner's thread.
#[derive(Debug)]
pub(crate) enum CaseProgress {
    /// A new round of the test case begins; each round has its own time limit.
    RoundBegan,
    Finished(Checked),
}

/// A store handle with a time limit for each call.
#[derive(Clone, Debug)]
pub(crate) struct BoundedHandle {
    store: Arc<dyn Store>,
    patience: Duration,
    tenancy: Tenancy,
}

impl Deref for BoundedHandle {
    type Target = dyn Store;

    fn deref(&self) -> &Self::Target {
        &*self.store
    }
}

impl BoundedHandle {
    pub(crate) fn new(store: Arc<dyn Store>, patience: Duration, tenancy: Tenancy) -> Self {
        Self { store: Arc::new(TimeoutStore { inner: store, patience }), patience, tenancy }
    }

    /// Checks that the store returned the revision that this test case expects after its own writes. On a shared store,
    /// the answer's revision may be higher than expected, because other clients write to the store, too.
    #[track_caller]
    pub(crate) fn revision_is(&self, checked: &str, got: Revision, expected: Revision) -> Checked {
        match self.tenancy {
            Tenancy::Exclusive => same(checked, got, expected),
            Tenancy::Shared => holds(&format!("{checked}: {expected} or more"), got >= expected, &got),
        }
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Returns a handle like this one, with the same time limits, on a different store (usually a wrapper of this
    /// handle's store).
    pub(crate) fn over(&self, store: impl Store) -> Self {
        Self { store: Arc::new(store), ..self.clone() }
    }

    pub(crate) async fn revision(&self) -> Checked<Revision> {
        Ok(self.range(RangeRequest::new(Range::key("?")).with_content(Content::CountOnly)).await?.revision)
    }

    pub(crate) async fn read(&self, range: Range) -> Checked<RangeResponse> {
        Ok(self.range(RangeRequest::new(range)).await?)
    }

    pub(crate) async fn read_at(&self, range: Range, at: Revision) -> Checked<RangeResponse> {
        Ok(self.range(RangeRequest::new(range).with_at(at)).await?)
    }

    /// Reads the keys of a range as strings.
    pub(crate) async fn keys(&self, range: Range) -> Checked<Vec<String>> {
        Ok(self.read(range).await?.kvs.iter().map(|kv| kv.key.to_string()).collect())
    }

    /// Reads the value of a key as a string.
    pub(crate) async fn value(&self, key: &str) -> Checked<Option<String>> {
        Ok(self.get(key).await?.map(|kv| text(&kv.value)))
    }

    pub(crate) async fn run(&self, ops: impl IntoIterator<Item = Op> + Send) -> Checked<TxnResponse> {
        Ok(self.txn(Txn::new().with_success(ops)).await?)
    }

    /// Returns true if the given transaction compare holds.
    pub(crate) async fn compare(&self, compare: Compare) -> Checked<bool> {
        Ok(self.txn(Txn::new().with_compares([compare])).await?.succeeded)
    }

    /// Makes `count` writes of one operation each, concurrently and in any order.
    pub(crate) async fn write_all(&self, count: usize, op: impl Fn(usize) -> Op) -> Checked {
        let mut writes = futures::stream::iter((0..count).map(|i| self.txn(Txn::new().with_success([op(i)]))))
            .buffer_unordered(MAX_CONCURRENT_WRITES);
        while let Some(written) = writes.next().await {
            written?;
        }
        Ok(())
    }

    /// Opens a watch whose events lack the previous states of the keys.
    pub(crate) async fn watcher(&self, range: Range, start: Revision) -> Checked<Watcher> {
        self.watcher_of(WatchRequest::new(range, start)).await
    }

    pub(crate) async fn watcher_of(&self, request: WatchRequest) -> Checked<Watcher> {
        Ok(Watcher::new(self.watch(request.clone()).await?, request, self.patience))
    }

    /// Wraps the event stream of a watch that was opened with the given request.
    pub(crate) fn watching(&self, stream: WatchStream, request: WatchRequest) -> Watcher {
        Watcher::new(stream, request, self.patience)
    }

    /// After a fault, reads repeatedly until the store answers again, with a time limit.
    pub(crate) async fn heals(&self) -> Checked<Revision> {
        let healed = async {
            loop {
                if let Ok(found) = self.range(RangeRequest::new(Range::key("?"))).await {
                    return found.revision;
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        };
        within(RECOVERY_TIMEOUT, "a store of which the faults are over", healed).await.of("N2")
    }

    /// Awaits `work` with the time limit of one store call.
    pub(crate) async fn within<T>(&self, checked: &str, work: impl Future<Output = T>) -> Checked<T> {
        within(self.patience, checked, work).await
    }
}

/// The argument of each conformance case: a handle on a fresh store, and the abilities of the test environment.
pub(crate) struct Subject {
    // Field order matters: the store handle is dropped before the fixture, which shuts the store down.
    handle: Option<BoundedHandle>,
    fixture: Option<Box<dyn Fixture>>,
    /// Sends the fixture to the runner at the end of the test case.
    home: Option<oneshot::Sender<Box<dyn Fixture>>>,
    harness: Arc<dyn Harness>,
    none: BoundedHandle,
    progress: mpsc::Sender<CaseProgress>,
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.handle = None;
        if let (Some(fixture), Some(home)) = (self.fixture.take(), self.home.take()) {
            // Sending the fixture fails if the runner has abandoned the test case and dropped the receiver; the fixture
            // is then dropped here.
            drop(home.send(fixture));
        }
    }
}

impl Deref for Subject {
    type Target = BoundedHandle;

    fn deref(&self) -> &Self::Target {
        self.handle.as_ref().unwrap_or(&self.none)
    }
}

impl Subject {
    /// Creates a subject, and a channel that receives its fixture at the end of the test case, even after a panic.
    pub(crate) fn new(
        harness: Arc<dyn Harness>,
        fixture: Box<dyn Fixture>,
        patience: Duration,
        progress: mpsc::Sender<CaseProgress>,
    ) -> (Self, oneshot::Receiver<Box<dyn Fixture>>) {
        let tenancy = harness.tenancy();
        let (home, over) = oneshot::channel();
        let handle = Some(BoundedHandle::new(fixture.store(), patience, tenancy));
        let none = BoundedHandle { store: Arc::new(ClosedStore), patience, tenancy };
        (Self { handle, fixture: Some(fixture), home: Some(home), harness, none, progress }, over)
    }

    fn surroundings(&self) -> Checked<&dyn Fixture> {
        self.fixture.as_deref().ok_or_else(|| environment("the store", &"it is gone".into()))
    }

    fn surroundings_mut(&mut self) -> Checked<&mut Box<dyn Fixture>> {
        self.fixture.as_mut().ok_or_else(|| environment("the store", &"it is gone".into()))
    }

    fn handle_on(&self, store: Arc<dyn Store>) -> BoundedHandle {
        BoundedHandle::new(store, self.none.patience, self.none.tenancy)
    }

    pub(crate) fn handle(&self) -> BoundedHandle {
        BoundedHandle::clone(self)
    }

    /// Opens a second, independent handle on the store.
    pub(crate) async fn another(&self) -> Checked<BoundedHandle> {
        let store = self.surroundings()?.another().await.map_err(|error| environment("another handle", &error))?;
        Ok(self.handle_on(store))
    }

    /// Closes and reopens the store of the test case. Before `reopen`, the test case must drop its own handles and
    /// watches.
    pub(crate) async fn reopen(&mut self) -> Checked {
        self.handle = None;
        let fixture = self.surroundings_mut()?;
        fixture.reopen().await.map_err(|error| environment("opening the store again", &error))?;
        let store = fixture.store();
        self.handle = Some(self.handle_on(store));
        Ok(())
    }

    /// Closes the store while the test case still has handles on it.
    pub(crate) async fn close(&mut self) -> Checked {
        self.surroundings_mut()?.close().await.map_err(|error| environment("closing the store", &error))
    }

    /// Closes an embedded store, so that other processes can open it.
    pub(crate) async fn let_go(&mut self) -> Checked {
        if self.can(Ability::Embedded) {
            self.handle = None;
            self.close().await?;
        }
        Ok(())
    }

    /// Reopens the store after [`let_go`](Self::let_go).
    pub(crate) async fn retake(&mut self) -> Checked {
        if self.can(Ability::Embedded) { self.reopen().await } else { Ok(()) }
    }

    /// Reports to the runner that a round begins, which restarts the time limit of the test case. The time limit of the
    /// case restarts because each round may reopen the store, and some stores take seconds to open.
    pub(crate) fn next_round(&self) {
        // If the runner has abandoned the test case, its receiver is gone and the progress message is dropped.
        let _ = self.progress.send(CaseProgress::RoundBegan);
    }

    pub(crate) fn can(&self, ability: Ability) -> bool {
        self.harness.abilities().contains(&ability)
    }

    pub(crate) fn address(&self) -> Checked<String> {
        self.surroundings()?.address().map_err(|error| environment("the store's address", &error))
    }

    pub(crate) fn address_in(&self, folder: &Path) -> Checked<String> {
        self.harness.address_in(folder).map_err(|error| environment("an address in a folder", &error))
    }

    /// Makes the store in a folder look as if a later version of the program had written it.
    pub(crate) fn make_newer(&self, folder: &Path) -> Checked {
        self.harness.make_newer(folder).map_err(|error| environment("a store of a later version", &error))
    }

    /// Cuts the power of the simulated disk after this number of further disk operations.
    pub(crate) fn cut_power_after(&mut self, operations: u32) -> Checked {
        let fixture = self.surroundings_mut()?;
        fixture.cut_power_after(operations).map_err(|error| environment("cutting the power", &error))
    }

    /// Reopens the store while the simulated power may fail.
    pub(crate) async fn reopen_without_power(&mut self) -> Checked {
        self.handle = None;
        let fixture = self.surroundings_mut()?;
        if fixture.reopen().await.is_ok() {
            let store = fixture.store();
            self.handle = Some(self.handle_on(store));
        }
        Ok(())
    }

    /// Restores the power of the simulated disk and reopens the store.
    pub(crate) async fn restore_power(&mut self, seed: u64) -> Checked {
        self.handle = None;
        let fixture = self.surroundings_mut()?;
        fixture
            .restore_power(seed)
            .await
            .map_err(|error| environment("opening the store after a power cut", &error))?;
        let store = fixture.store();
        self.handle = Some(self.handle_on(store));
        Ok(())
    }

    /// Starts a child process that plays a role with the store of this test case.
    pub(crate) fn process(&self, role: &str, arguments: &[u64]) -> Checked<Process> {
        self.process_at(&self.address()?, role, arguments)
    }

    /// Starts a child process that plays a role with the store at an address.
    pub(crate) fn process_at(&self, address: &str, role: &str, arguments: &[u64]) -> Checked<Process> {
        Process::start(process::command(role, arguments, address)?, self.patience())
    }

    pub(crate) async fn join(&self, address: &str, wait: Duration) -> Result<JoinedStore> {
        let fixture = self.harness.join(address, wait).await?;
        Ok(JoinedStore { handle: self.handle_on(fixture.store()), _fixture: fixture })
    }

    pub(crate) fn patience(&self) -> Duration {
        self.none.patience
    }

    pub(crate) async fn stored_bytes(&self) -> Checked<u64> {
        self.surroundings()?.stored_bytes().await.map_err(|error| environment("measuring the store", &error))
    }
}

/// A store that this process has joined; dropping a `JoinedStore` closes the store.
#[derive(Debug)]
pub(crate) struct JoinedStore {
    // The store handle is declared before the fixture: fields are dropped in declaration order, and the handle must go
    // first.
    handle: BoundedHandle,
    _fixture: Box<dyn Fixture>,
}

impl Deref for JoinedStore {
    type Target = BoundedHandle;

    fn deref(&self) -> &Self::Target {
        &self.handle
    }
}

/// Checks that an error came from the store, and not from a time limit of the conformance suite.
#[track_caller]
pub(crate) fn in_time(error: &Error) -> Checked {
    if error.store() != SUITE_NAME {
        return Ok(());
    }
    Err(Failure::new(
        "a call while something is wrong",
        "an answer within the time limit of the store",
        error.to_string(),
    ))
    .of("N2")
}

#[track_caller]
fn environment(what: &str, error: &BoxError) -> Failure {
    Failure::new(format!("the environment: {what}"), "success", error.to_string())
}

/// A store wrapper that limits the time of each call.
#[derive(Debug)]
struct TimeoutStore {
    inner: Arc<dyn Store>,
    patience: Duration,
}

impl TimeoutStore {
    async fn wait<T>(&self, operation: Operation, work: impl Future<Output = Result<T>> + Send) -> Result<T> {
        tokio::time::timeout(self.patience, work).await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Timeout, operation, SUITE_NAME)
                .with_detail(format!("the store did not answer within {:?}", self.patience)))
        })
    }
}

#[async_trait]
impl Store for TimeoutStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.wait(Operation::Range, self.inner.range(request)).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.wait(Operation::Txn, self.inner.txn(txn)).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.wait(Operation::Watch, self.inner.watch(request)).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.wait(Operation::Compact, self.inner.compact(revision)).await
    }
}

/// A placeholder for the store of a test case while the real store is closed; every call of the placeholder fails.
#[derive(Debug)]
struct ClosedStore;

fn gone<T>(operation: Operation) -> Result<T> {
    Err(Error::new(ErrorKind::Closed, operation, SUITE_NAME))
}

#[async_trait]
impl Store for ClosedStore {
    async fn range(&self, _: RangeRequest) -> Result<RangeResponse> {
        gone(Operation::Range)
    }

    async fn txn(&self, _: Txn) -> Result<TxnResponse> {
        gone(Operation::Txn)
    }

    async fn watch(&self, _: WatchRequest) -> Result<WatchStream> {
        gone(Operation::Watch)
    }

    async fn compact(&self, _: Revision) -> Result<()> {
        gone(Operation::Compact)
    }
}
