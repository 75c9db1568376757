//! Records the requests of test clients and the store's answers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use futures::StreamExt;
use kv::{
    Batch, ErrorKind, Outcome, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordedRequest {
    /// A recorded read.
    Range(RangeRequest),
    /// A recorded transaction.
    Txn(Txn),
    /// A recorded request to compact the store at this revision.
    Compact(Revision),
}

/// A recorded answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordedAnswer {
    /// The store's answer to a recorded read.
    Range(RangeResponse),
    /// The store's answer to a recorded transaction.
    Txn(TxnResponse),
    /// The store carried out a recorded compaction.
    Compacted,
    /// The store returned an error of this kind for a recorded request. The error's outcome says whether the failed
    /// request may have taken effect.
    Failed(ErrorKind, Outcome),
    /// The recorded call has no answer, because the caller dropped its future.
    Nothing,
}

/// A recorded call. The start and end of a call are ticks of a clock that all clients of a history share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The number of the recorder through which the call was made.
    pub client: u64,
    /// The tick of the shared clock at which the call began.
    pub start: u64,
    /// The tick of the shared clock at which the answer arrived; `u64::MAX` if there is no answer.
    pub end: u64,
    /// The request that the caller of the recorded call made.
    pub request: RecordedRequest,
    /// The answer that the caller of the recorded call got.
    pub answered: RecordedAnswer,
}

impl Call {
    pub(super) fn revision(&self) -> Option<Revision> {
        match &self.answered {
            RecordedAnswer::Range(answer) => Some(answer.revision),
            RecordedAnswer::Txn(answer) => Some(answer.revision),
            RecordedAnswer::Compacted | RecordedAnswer::Failed(..) | RecordedAnswer::Nothing => None,
        }
    }

    /// Returns true if the caller does not know whether its request has happened.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.answered, RecordedAnswer::Nothing | RecordedAnswer::Failed(_, Outcome::Unknown))
    }
}

/// A recorded watch.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The number of the recorder through which the watch was opened.
    pub client: u64,
    /// The request that opened the watch. If the watch delivered batches in earlier parts of the history, its start is
    /// the revision after the last of these batches.
    pub request: WatchRequest,
    /// The batches that the watch delivered, and the error that ended it, each with the time of its arrival.
    pub items: Vec<(u64, Result<Batch, ErrorKind>)>,
}

impl Stream {
    /// Returns an empty recording of the rest of this watch: it begins after the last recorded batch, and contains none
    /// of the recorded batches.
    fn rest(&self) -> Self {
        let come = self.items.iter().rev().find_map(|(_, item)| item.as_ref().ok());
        let start = come.map_or(self.request.start, |batch| batch.revision.next());
        let mut request = self.request.clone();
        request.start = start;
        Self { client: self.client, request, items: Vec::new() }
    }
}

/// A part of a recorded history: all calls and events since the previous part was taken.
#[derive(Clone, Debug, Default)]
pub struct RecordedPart {
    /// The recorded calls in the order in which they ended.
    pub calls: Vec<Call>,
    /// The watches that were open during this part of the history.
    pub streams: Vec<Stream>,
}

/// A shared record of the requests and answers of all clients.
#[derive(Debug, Default)]
pub struct CallHistory {
    clock: AtomicU64,
    clients: AtomicU64,
    recorded: Mutex<RecordedPart>,
}

impl CallHistory {
    /// Creates a history without calls.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the store calls and watch events that were recorded since `take` was last called. By calling `take`
    /// repeatedly, a caller can judge a long test run in parts.
    ///
    /// When `take` is called, no recorded store call may be running, so all clients must have paused or ended.
    pub fn take(&self) -> RecordedPart {
        let mut recorded = self.recorded();
        let streams = recorded.streams.iter().map(Stream::rest).collect();
        std::mem::replace(&mut *recorded, RecordedPart { calls: Vec::new(), streams })
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn recorded(&self) -> MutexGuard<'_, RecordedPart> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_stream(&self, client: u64, request: WatchRequest) -> usize {
        let mut recorded = self.recorded();
        recorded.streams.push(Stream { client, request, items: Vec::new() });
        recorded.streams.len() - 1
    }

    fn item(&self, stream: usize, item: &Result<Batch>) {
        let item = match item {
            Ok(batch) => Ok(batch.clone()),
            Err(error) => Err(error.kind().clone()),
        };
        let now = self.tick();
        if let Some(stream) = self.recorded().streams.get_mut(stream) {
            stream.items.push((now, item));
        }
    }
}

/// A store wrapper that records all calls; clones of a `Recorder` count as the same client.
#[derive(Clone, Debug)]
pub struct Recorder<S> {
    inner: S,
    client: u64,
    history: Arc<CallHistory>,
}

impl<S: Store> Recorder<S> {
    /// Creates a recorder on the store `inner`; its calls count as the calls of a new client.
    pub fn new(inner: S, history: Arc<CallHistory>) -> Self {
        let client = history.clients.fetch_add(1, Ordering::SeqCst);
        Self { inner, client, history }
    }

    fn begin(&self, request: RecordedRequest) -> OpenCall<'_> {
        OpenCall { history: &self.history, call: Some((self.client, self.history.tick(), request)) }
    }
}

/// A store call that is running. When the call ends, it is recorded; a call that is dropped earlier is recorded without
/// an answer.
struct OpenCall<'h> {
    history: &'h CallHistory,
    call: Option<(u64, u64, RecordedRequest)>,
}

impl OpenCall<'_> {
    fn end<T>(mut self, answer: &Result<T>, answered: impl FnOnce(&T) -> RecordedAnswer) {
        let answered = match answer {
            Ok(answer) => answered(answer),
            Err(error) => RecordedAnswer::Failed(error.kind().clone(), error.outcome()),
        };
        let end = self.history.tick();
        self.record(end, answered);
    }

    fn record(&mut self, end: u64, answered: RecordedAnswer) {
        if let Some((client, start, request)) = self.call.take() {
            self.history.recorded().calls.push(Call { client, start, end, request, answered });
        }
    }
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        self.record(u64::MAX, RecordedAnswer::Nothing);
    }
}

#[async_trait]
impl<S: Store> Store for Recorder<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let call = self.begin(RecordedRequest::Range(request.clone()));
        let answer = self.inner.range(request).await;
        call.end(&answer, |answer| RecordedAnswer::Range(answer.clone()));
        answer
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let call = self.begin(RecordedRequest::Txn(txn.clone()));
        let answer = self.inner.txn(txn).await;
        call.end(&answer, |answer| RecordedAnswer::Txn(answer.clone()));
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        let stream = self.inner.watch(request.clone()).await?;
        let number = self.history.open_stream(self.client, request);
        let history = self.history.clone();
        Ok(stream.inspect(move |item| history.item(number, item)).boxed())
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        let call = self.begin(RecordedRequest::Compact(revision));
        let answer = self.inner.compact(revision).await;
        call.end(&answer, |()| RecordedAnswer::Compacted);
        answer
    }
}
