//! Implements the reads, writes and watches of a shared store. Each read or write of a shared store runs in its own
//! task, and keeps the store open while the task runs. A watch of a shared store can resume after a hand-over, because
//! its only state is a revision.

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::unfold;
use kv::{
    Batch, ErrorKind, Operation, Outcome, Progress, Purpose, RangeRequest, RangeResponse, Result, Revision, Store, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use kv_mvcc::MvccStore;
use tokio::task::JoinHandle;

use super::{OpenGuard, SharedStore};

/// A task that is aborted when the `AbortingTask` is dropped.
struct AbortingTask<T>(JoinHandle<T>);

impl<T> Drop for AbortingTask<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl SharedStore {
    /// Runs `work` on the open store in its own task. Dropping the returned future aborts the task; not polling the
    /// future does not.
    ///
    /// # Errors
    /// Any error of opening the store, or any error that `work` returns.
    async fn with_store<T: Send + 'static, F: Future<Output = Result<T>> + Send + 'static>(
        &self,
        work: impl FnOnce(OpenGuard) -> F,
    ) -> Result<T> {
        let kept = self.keep_open(self.shared.holding.wait_deadline()).await?;
        if self.pinned.is_some_and(|pinned| pinned != kept.generation) {
            return Err(self.replaced(Operation::Open));
        }
        let mut task = AbortingTask(tokio::spawn(work(kept)));
        // The error for a read or write whose task panicked, or whose runtime is shutting down.
        let lost = || self.error(ErrorKind::Closed, Operation::Open).with_outcome(Outcome::Unknown);
        let done = (&mut task.0).await.unwrap_or_else(|_| Err(lost()));
        self.yield_now().await;
        done
    }

    /// Runs `work` on the embedded store in its own task; `work` also receives the store's generation.
    ///
    /// # Errors
    /// `Unsupported` if the store is not embedded; any error of opening the store, or any error that `work` returns.
    pub async fn with_embedded<T: Send + 'static, F: Future<Output = Result<T>> + Send + 'static>(
        &self,
        work: impl FnOnce(MvccStore, u64) -> F + Send + 'static,
    ) -> Result<T> {
        let unsupported = self.error(ErrorKind::Unsupported, Operation::Open);
        self.with_store(|kept| async move {
            let store = kept.open()?.embedded().cloned().ok_or(unsupported)?;
            work(store, kept.generation).await
        })
        .await
    }

    /// Returns whether the store can limit its own history, which depends on the store's format; true if there is no
    /// store yet.
    pub async fn has_bounds_of_its_own(&self) -> bool {
        let has_leases = self.with_embedded(|store, _| async move { Ok(store.has_leases()) }).await;
        has_leases.unwrap_or_else(|error| *error.kind() != ErrorKind::Unsupported)
    }

    /// Checks that the store has disk space for writes of every purpose, not only for releases of addresses.
    ///
    /// # Errors
    /// `NoSpace` if the disk has no room for ordinary writes, even if it has room for releases; any error of opening
    /// the store.
    pub async fn check_room(&self) -> Result<()> {
        self.with_store(|kept| async move { kept.open()?.check_room().await }).await
    }

    /// Starts a watch, provided that the store's generation is still `generation`.
    ///
    /// # Errors
    /// `RevisionRegressed` if a different store has replaced the watched store; any error of a watch.
    pub async fn watch_of(&self, generation: u64, request: WatchRequest) -> Result<WatchStream> {
        watch_on(self.clone(), Some(generation), request).await
    }

    /// Opens a watch that lasts until this process closes the store. Fails if `of` (the expected generation) is set and
    /// the store has another generation. Returns the store's generation and the stream of watch events.
    ///
    /// # Errors
    /// See [`watch_of`](Self::watch_of).
    async fn watch_open(&self, of: Option<u64>, request: WatchRequest) -> Result<(u64, WatchStream)> {
        let shared_store = self.clone();
        self.with_store(move |kept| async move {
            if of.is_some_and(|generation| generation != kept.generation) {
                return Err(shared_store.replaced(Operation::Watch));
            }
            Ok((kept.generation, kept.store(Purpose::Any)?.watch(request).await?))
        })
        .await
    }
}

/// Each call of a method of a shared store keeps the store open while the call runs. If the store is closed, a call
/// waits until the store is open, at most until the deadline in [`SharedStoreOptions`](super::SharedStoreOptions).
#[async_trait]
impl Store for SharedStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.with_store(|kept| async move { kept.store(Purpose::Any)?.range(request).await }).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let purpose = self.purpose;
        self.with_store(move |kept| async move { kept.store(purpose)?.txn(txn).await }).await
    }

    /// A process that yields the store between two calls cannot use `watch`: a watch makes no further store calls, so
    /// the process would never yield the store.
    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        if self.shared.holding.yields_after.is_some() {
            return Err(self.error(ErrorKind::Unsupported, Operation::Watch));
        }
        watch_on(self.clone(), self.pinned, request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.with_store(move |kept| async move { kept.store(Purpose::Any)?.compact(revision).await }).await
    }
}

/// Watches the store, and resumes the watch after each hand-over of the store. If `of` (the expected generation) is
/// set, the watch ends as soon as the store's generation differs from it.
///
/// # Errors
/// `RevisionRegressed` if a different store has replaced the watched store; any error of a watch.
async fn watch_on(shared_store: SharedStore, of: Option<u64>, request: WatchRequest) -> Result<WatchStream> {
    let wants_progress = request.progress == Progress::Report;
    // Progress reports tell a watch without events at which revision to resume after a hand-over. After a hand-over, a
    // watch cannot use its original start revision, because this revision may be compacted by then.
    let request = request.with_progress(Progress::Report);
    let (generation, stream) = shared_store.watch_open(of, request.clone()).await?;
    let cursor = ResumableWatch { shared_store, generation, request, wants_progress, stream: Some(stream) };
    Ok(unfold(cursor, |mut cursor| async move { cursor.next().await.map(|item| (item, cursor)) }).boxed())
}

/// A watch of a shared store, which resumes after each hand-over of the store.
struct ResumableWatch {
    shared_store: SharedStore,
    generation: u64,
    /// The request that resumes the watch after the last delivered batch.
    request: WatchRequest,
    wants_progress: bool,
    /// The event stream of the watch on the open store; `None` once the watch has ended.
    stream: Option<WatchStream>,
}

impl ResumableWatch {
    async fn next(&mut self) -> Option<Result<Batch>> {
        loop {
            match self.stream.as_mut()?.next().await {
                Some(Ok(batch)) => {
                    self.request.start = batch.revision.next();
                    if self.wants_progress || !batch.is_progress() {
                        return Some(Ok(batch));
                    }
                }
                Some(Err(error)) if *error.kind() == ErrorKind::Closed => {
                    // Box the rarely used future of `resume`, because it would enlarge each of thousands of watches.
                    if let Err(error) = Box::pin(self.resume()).await {
                        self.stream = None;
                        return Some(Err(error));
                    }
                }
                Some(Err(error)) => {
                    self.stream = None;
                    return Some(Err(error));
                }
                None => self.stream = None,
            }
        }
    }

    /// Waits until the hand-over ends and then restarts the watch.
    async fn resume(&mut self) -> Result<()> {
        let opened = loop {
            match self.shared_store.watch_open(Some(self.generation), self.request.clone()).await {
                Err(error) if *error.kind() == ErrorKind::Locked => {}
                opened => break opened?,
            }
        };
        self.stream = Some(opened.1);
        Ok(())
    }
}
