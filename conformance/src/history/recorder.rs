//! Records the requests of clients and their answers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use futures::StreamExt;
use kv::{
    Batch, ErrorKind, Outcome, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};

/// The request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordedRequest {
    /// A read.
    Range(RangeRequest),
    /// A transaction.
    Txn(Txn),
    /// A compaction.
    Compact(Revision),
}

/// The answer to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordedAnswer {
    /// The answer to a read.
    Range(RangeResponse),
    /// The answer to a transaction.
    Txn(TxnResponse),
    /// That the compaction was made.
    Compacted,
    /// An error, and whether the request may have happened all the same.
    Failed(ErrorKind, Outcome),
    /// Nothing: the caller did not wait for the end.
    Nothing,
}

/// A call. Its times are ticks of one clock that all clients of a history share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Which recorder it went through.
    pub client: u64,
    /// When it began.
    pub start: u64,
    /// The time of the answer; `u64::MAX` if it never was.
    pub end: u64,
    /// The request.
    pub request: RecordedRequest,
    /// The answer to the caller.
    pub answered: RecordedAnswer,
}

impl Call {
    /// The revision of the answer, if there is one.
    pub(super) fn revision(&self) -> Option<Revision> {
        match &self.answered {
            RecordedAnswer::Range(answer) => Some(answer.revision),
            RecordedAnswer::Txn(answer) => Some(answer.revision),
            RecordedAnswer::Compacted | RecordedAnswer::Failed(..) | RecordedAnswer::Nothing => None,
        }
    }

    /// True if it may have happened without an answer to the caller.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.answered, RecordedAnswer::Nothing | RecordedAnswer::Failed(_, Outcome::Unknown))
    }
}

/// The record of one watch.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Which recorder it went through.
    pub client: u64,
    /// The request; in a later part of a history it starts after the events of earlier parts.
    pub request: WatchRequest,
    /// The events, and their times.
    pub items: Vec<(u64, Result<Batch, ErrorKind>)>,
}

impl Stream {
    /// The same watch, from after what has come.
    fn rest(&self) -> Self {
        let come = self.items.iter().rev().find_map(|(_, item)| item.as_ref().ok());
        let start = come.map_or(self.request.start, |batch| batch.revision.next());
        let mut request = self.request.clone();
        request.start = start;
        Self { client: self.client, request, items: Vec::new() }
    }
}

/// A part of a history: all calls and events since the last one was taken.
#[derive(Clone, Debug, Default)]
pub struct RecordedPart {
    /// The calls, in the order in which they ended.
    pub calls: Vec<Call>,
    /// The watches.
    pub streams: Vec<Stream>,
}

/// The requests of all clients, and their answers.
#[derive(Debug, Default)]
pub struct CallHistory {
    clock: AtomicU64,
    clients: AtomicU64,
    recorded: Mutex<RecordedPart>,
}

impl CallHistory {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what was recorded since the last time, so that a long run can be judged in parts.
    ///
    /// No call may be under way: take at a moment when all clients pause or have ended.
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

/// A store around a store that records all that goes through it. Clones are one client.
#[derive(Clone, Debug)]
pub struct Recorder<S> {
    inner: S,
    client: u64,
    history: Arc<CallHistory>,
}

impl<S: Store> Recorder<S> {
    /// A client of its own on this store.
    pub fn new(inner: S, history: Arc<CallHistory>) -> Self {
        let client = history.clients.fetch_add(1, Ordering::SeqCst);
        Self { inner, client, history }
    }

    fn begin(&self, request: RecordedRequest) -> OpenCall<'_> {
        OpenCall { history: &self.history, call: Some((self.client, self.history.tick(), request)) }
    }
}

/// A call that was begun. It is recorded when it ends, or as one without an end when it is dropped.
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
