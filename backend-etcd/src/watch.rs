//! Implements watches that survive the loss of their connection.
//!
//! A task reads etcd's messages and splits them into whole revisions. The task reads even if the watcher does not read:
//! all streams of a connection share one flow-control window, so a few unread streams would stall every call on the
//! connection. The total size of the queued revisions is limited. At the limit, the task closes the stream, delivers
//! the remaining batches as the watcher reads, and then opens the watch again at the next revision.
//!
//! A watch that has lost its connection is opened again after a linearizable read, which fails if the cluster has
//! returned to an earlier state. The same read follows if a watch starts above the revision of the member that opens
//! the watch. Events before the watch's next revision are dropped, so no event is repeated. etcd either sends all
//! events from the requested revision on or reports `Compacted`, so no event is missed.
//!
//! A watch with progress reports requests progress from etcd twice a second. Progress reports of older servers may be
//! ahead of an event, so reports of older servers are dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_client::{EventType, GetOptions, ResponseHeader, WatchOptions, WatchResponse};
use futures::{Stream, StreamExt};
use kv::{
    Batch, Error, ErrorKind, Event, EventKind, Operation, Prev, Progress, Result, Revision, WatchRequest, WatchStream,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, interval};

use crate::cluster::{EtcdCluster, EtcdResponse, Freshness, Resend, reports_progress};
use crate::error::{STORE_NAME, watch_ended};
use crate::members::Connection;
use crate::wire::{self, KeySpan};

/// Maximum size of the events that are queued for a watcher, in bytes.
const MAX_WAITING_BYTES: u32 = 8 << 20;
/// Approximate memory that a queued event takes besides its content, in bytes.
const EVENT_OVERHEAD_BYTES: usize = 128;
/// Interval at which progress is requested from etcd.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// The first and the maximum pause before a watch is opened again.
const MIN_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A batch for the watcher, and the share of the queue's room that the batch takes until it is delivered.
type QueuedBatch = (Result<Batch>, Option<OwnedSemaphorePermit>);

/// Opens a watch and starts the task that maintains the watch.
pub(crate) async fn open(cluster: Arc<EtcdCluster>, span: KeySpan, request: &WatchRequest) -> Result<WatchStream> {
    let (tell, reported) = unbounded_channel();
    let room = Arc::new(Semaphore::new(MAX_WAITING_BYTES as usize));
    let WatchRequest { start, prev, progress, .. } = *request;
    let watcher =
        EtcdWatcher { cluster, span, prev, progress, next: start, tell, room, cut_off: None, pause: MIN_PAUSE };
    let opened = watcher.open(watcher.cluster.deadline()).await?;
    let task = tokio::spawn(watcher.follow(opened)).abort_handle();
    Ok(BatchStream { reported: Some(reported), task }.boxed())
}

/// The stream of batches that a watcher reads.
struct BatchStream {
    /// The queue of batches; `None` once the watch has ended.
    reported: Option<UnboundedReceiver<QueuedBatch>>,
    task: AbortHandle,
}

impl Stream for BatchStream {
    type Item = Result<Batch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(reported) = &mut self.reported else { return Poll::Ready(None) };
        let Poll::Ready(item) = reported.poll_recv(context) else { return Poll::Pending };
        // The task of a watch sends the reason before it ends. If no reason arrives, the task panicked or its runtime
        // was shut down.
        let item = item.map_or_else(|| Err(disconnected(Revision::UNSET)), |(item, _room)| item);
        if item.is_err() {
            self.reported = None;
        }
        Poll::Ready(Some(item))
    }
}

impl Drop for BatchStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn disconnected(resume_from: Revision) -> Error {
    Error::new(ErrorKind::Disconnected { resume_from }, Operation::Watch, STORE_NAME)
}

/// A watch whose creation etcd has confirmed.
struct ConfirmedWatch {
    stream: etcd_client::WatchStream,
    header: Option<ResponseHeader>,
    /// The first message of the watch, which is not processed yet and may end the watch.
    first: WatchResponse,
    /// True if the watcher wants progress reports and the server's reports can be trusted.
    reports: bool,
}

impl EtcdResponse for ConfirmedWatch {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header.as_ref()
    }

    fn freshness(&self) -> Freshness {
        Freshness::OfMember
    }
}

/// The reason why the stream of a watch ended.
enum WatchCut {
    /// The stream broke, or the watcher's task closed it. The watch can resume on a new stream.
    Off(Error),
    /// The watch has ended and cannot resume.
    Over(Error),
}

struct EtcdWatcher {
    cluster: Arc<EtcdCluster>,
    span: KeySpan,
    prev: Prev,
    progress: Progress,
    /// The next revision that the watcher must get.
    next: Revision,
    tell: UnboundedSender<QueuedBatch>,
    room: Arc<Semaphore>,
    /// When the stream of the watch broke; `None` while messages arrive.
    cut_off: Option<Instant>,
    pause: Duration,
}

impl EtcdWatcher {
    async fn open(&self, deadline: Instant) -> Result<ConfirmedWatch> {
        let options = WatchOptions::new()
            .with_range(self.span.end.clone())
            .with_start_revision(self.next.get())
            .with_progress_notify();
        let options = match self.prev {
            Prev::Omit => options,
            Prev::Return => options.with_prev_key(),
        };
        let work = |connection: Connection| create(connection, self.span.key.clone(), options.clone(), self.progress);
        let opened = self.cluster.call(Operation::Watch, Resend::Always, deadline, work).await?;
        // Either the member lags behind, or the cluster has returned to an earlier state since the last read. On a
        // cluster that has returned to an earlier state, the watch could wait forever. The member has no event to send
        // yet, so the read cannot stall behind an unread stream.
        let reached = opened.header.as_ref().map_or(Revision::UNSET, |header| Revision::new(header.revision()));
        if reached.next() < self.next {
            self.prove_no_regress(deadline).await?;
        }
        Ok(opened)
    }

    /// Maintains the watch until the watch ends or the watcher is dropped.
    async fn follow(mut self, opened: ConfirmedWatch) {
        let tell = self.tell.clone();
        let mut closed = self.cluster.closed.subscribe();
        let end = tokio::select! {
            biased;
            _ = closed.wait_for(|closed| *closed) => Error::new(ErrorKind::Closed, Operation::Watch, STORE_NAME),
            end = self.read_batches(opened) => end,
        };
        // Sending fails if the watcher was dropped; the error is not needed then.
        let _ = tell.send((Err(end), None));
    }

    /// Delivers batches to the watcher until the watch ends; returns the reason for the end.
    async fn read_batches(&mut self, mut opened: ConfirmedWatch) -> Error {
        loop {
            match self.drain(opened).await {
                WatchCut::Over(error) => return error,
                WatchCut::Off(error) => tracing::debug!(
                    %error,
                    next = %self.next,
                    "lost an etcd watch; opening the watch again at the next revision"
                ),
            }
            opened = match self.open_again().await {
                Ok(opened) => opened,
                Err(error) => return error,
            };
        }
    }

    /// Delivers the messages of one stream until the stream ends.
    async fn drain(&mut self, opened: ConfirmedWatch) -> WatchCut {
        let ConfirmedWatch { mut stream, first: mut response, reports, .. } = opened;
        let mut reminder = interval(PROGRESS_INTERVAL);
        loop {
            let mut batches = match self.take(&response) {
                Ok(batches) => batches.into_iter(),
                Err(cut) => return cut,
            };
            while let Some(batch) = batches.next() {
                if let Err(batch) = self.deliver_now(batch) {
                    // Close the stream first: an open stream must not stay unread while this task waits.
                    drop(stream);
                    self.deliver_late(batch, batches).await;
                    return WatchCut::Off(disconnected(self.next).with_detail("the watcher did not read"));
                }
            }
            if response.events().is_empty() && !response.created() {
                self.note_progress(&response, reports);
            }
            let message = loop {
                tokio::select! {
                    message = stream.message() => break message,
                    _ = reminder.tick(), if reports => {
                        if let Err(error) = stream.request_progress().await {
                            break Err(error);
                        }
                    }
                }
            };
            response = match message {
                Ok(Some(response)) => response,
                Ok(None) => return WatchCut::Off(disconnected(self.next)),
                Err(error) => return WatchCut::Off(disconnected(self.next).with_source(error)),
            };
            self.cut_off = None;
            self.pause = MIN_PAUSE;
        }
    }

    /// Splits one message of etcd into batches; fails if the message ends the watch.
    fn take(&self, response: &WatchResponse) -> Result<Vec<Batch>, WatchCut> {
        if response.compact_revision() > 0 {
            let compact_revision = Revision::new(response.compact_revision());
            return Err(WatchCut::Over(Error::new(
                ErrorKind::Compacted { compact_revision },
                Operation::Watch,
                STORE_NAME,
            )));
        }
        if response.canceled() {
            return Err(WatchCut::Off(disconnected(self.next).with_source(watch_ended(response.cancel_reason()))));
        }
        batches(response, self.next).map_err(|()| WatchCut::Over(undecodable()))
    }

    /// Delivers a batch to the watcher if the queue has room; otherwise returns the batch.
    fn deliver_now(&mut self, batch: Batch) -> Result<(), Batch> {
        match Arc::clone(&self.room).try_acquire_many_owned(room_for(&batch)) {
            Ok(permit) => self.deliver(batch, Some(permit)),
            Err(_) => return Err(batch),
        }
        Ok(())
    }

    /// Delivers the remaining batches of a closed stream as the watcher makes room in the queue.
    async fn deliver_late(&mut self, first: Batch, others: impl Iterator<Item = Batch> + Send) {
        for batch in std::iter::once(first).chain(others) {
            // Acquiring cannot fail, because the semaphore is never closed.
            let permit = Arc::clone(&self.room).acquire_many_owned(room_for(&batch)).await.ok();
            self.deliver(batch, permit);
        }
        // Wait for room before the next stream is opened; without room, the next stream would be closed again
        // immediately.
        let _ = self.room.acquire_many(MAX_WAITING_BYTES / 2).await;
    }

    fn deliver(&mut self, batch: Batch, permit: Option<OwnedSemaphorePermit>) {
        self.next = batch.revision.next();
        self.cluster.seen.note(batch.revision);
        // Sending fails only if the watcher was dropped; in this case, the task is about to be aborted.
        let _ = self.tell.send((Ok(batch), permit));
    }

    /// Processes a progress report, which means that etcd has sent all events up to the report's revision.
    fn note_progress(&mut self, response: &WatchResponse, reports: bool) {
        let Some(header) = response.header() else { return };
        let reached = Revision::new(header.revision());
        if reports && reached >= self.next {
            self.deliver(Batch::progress(reached), None);
        }
        self.next = self.next.max(reached.next());
    }

    /// Opens the watch again. Retries until the time limit [`watch_patience`](EtcdCluster::watch_patience) has passed.
    async fn open_again(&mut self) -> Result<ConfirmedWatch> {
        let until = *self.cut_off.get_or_insert_with(Instant::now) + self.cluster.watch_patience;
        loop {
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(MAX_PAUSE);
            let deadline = self.cluster.deadline().min(until);
            let opened = match self.prove_no_regress(deadline).await {
                Ok(()) => self.open(deadline).await,
                Err(error) => Err(error),
            };
            match opened {
                Ok(opened) => return Ok(opened),
                Err(error) if !error.kind().is_transient() => return Err(error),
                Err(error) if Instant::now() >= until => return Err(disconnected(self.next).with_source(error)),
                Err(_) => {}
            }
        }
    }

    /// Checks with a linearizable read that the cluster has not returned to an earlier state.
    ///
    /// # Errors
    /// `RevisionRegressed` if the cluster's state is older than the newest observed state; any store error.
    async fn prove_no_regress(&self, deadline: Instant) -> Result<()> {
        let work = |connection: Connection| {
            let key = self.span.key.clone();
            async move { connection.kv().get(key, Some(GetOptions::new().with_count_only())).await }
        };
        self.cluster.call(Operation::Watch, Resend::Always, deadline, work).await.map(|_| ())
    }
}

/// Requests a watch and waits until etcd confirms the watch.
async fn create(
    connection: Connection,
    key: Vec<u8>,
    options: WatchOptions,
    progress: Progress,
) -> Result<ConfirmedWatch, etcd_client::Error> {
    let reports = match progress {
        Progress::Omit => false,
        Progress::Report => reports_progress(connection.client().status().await?.version()),
    };
    let mut stream = connection.watch().watch(key, Some(options)).await?;
    let first = stream.message().await?.ok_or_else(|| watch_ended("the connection was closed"))?;
    // etcd refuses a watch, for example because of an old token, by confirming the watch and then ending it.
    if first.canceled() && first.compact_revision() == 0 {
        return Err(watch_ended(first.cancel_reason()));
    }
    Ok(ConfirmedWatch { stream, header: first.header().cloned(), first, reports })
}

fn undecodable() -> Error {
    Error::new(ErrorKind::Undecodable, Operation::Watch, STORE_NAME).with_detail("an event without a key")
}

/// Groups the events of a message from the revision `next` on into one batch for each revision. etcd never splits a
/// revision into several messages, because the request does not allow fragments.
fn batches(response: &WatchResponse, next: Revision) -> Result<Vec<Batch>, ()> {
    let mut batches: Vec<Batch> = Vec::new();
    for event in response.events() {
        let kv = wire::kv(event.kv().cloned().ok_or(())?);
        let revision = kv.mod_revision;
        if revision < next {
            continue;
        }
        let kind = match event.event_type() {
            EventType::Put => EventKind::Put,
            EventType::Delete => EventKind::Delete,
        };
        let event = Event { kind, kv, prev: event.prev_kv().cloned().map(wire::kv) };
        match batches.last_mut() {
            Some(batch) if batch.revision == revision => batch.events.push(event),
            _ => batches.push(Batch { revision, time: None, events: vec![event] }),
        }
    }
    Ok(batches)
}

/// Returns the share of the queue's room that a batch takes, in bytes; at most the whole room.
fn room_for(batch: &Batch) -> u32 {
    let of = |event: &Event| EVENT_OVERHEAD_BYTES + event.kv.size() + event.prev.as_ref().map_or(0, kv::Kv::size);
    let bytes: usize = batch.events.iter().map(of).sum();
    u32::try_from(bytes).unwrap_or(MAX_WAITING_BYTES).min(MAX_WAITING_BYTES)
}
