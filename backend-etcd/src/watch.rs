//! Implements watches that resume after their connection is lost.
//!
//! For each watch, a task reads etcd's messages and splits them into batches of one revision each. The task of a watch
//! reads from etcd even if the watcher does not read: all streams of a connection share one flow-control window, so a
//! few unread streams would stall every call on the connection. The total size of the events that are queued for a
//! watcher is limited. When the watcher's queue is full, the task of the watch closes the stream from etcd and delivers
//! the remaining batches as the watcher reads. When the task of a watch has delivered all remaining batches, it opens
//! the watch again at the next revision.
//!
//! After a watch has lost its connection, the task makes a linearizable read before it opens the watch again; the read
//! fails if the cluster was restored to an older state. If a watch starts above the revision of the member that opens
//! it, the task first makes a linearizable read, which fails if the cluster was restored to an older state. When a
//! watch is opened again, its task drops events of revisions that it has already delivered, so no event is repeated. A
//! watch that is opened again misses no event, because etcd sends all events from the requested revision on, or reports
//! `Compacted`.
//!
//! For a watch with progress reports, the task of the watch requests a report from etcd twice a second. Older etcd
//! servers may report progress ahead of an event, so their reports are dropped.

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

/// Maximum size in bytes of all events that are queued for one watcher.
const MAX_WAITING_BYTES: u32 = 8 << 20;
/// Approximate memory in bytes that a queued event takes in addition to its content.
const EVENT_OVERHEAD_BYTES: usize = 128;
/// Interval at which the task of a watch requests a progress report from etcd.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// The backoff before a watch is opened again: the first pause, and the maximum to which the pauses grow.
const MIN_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A batch for the watcher, and a permit for the bytes that the batch takes in the queue until it is delivered.
type QueuedBatch = (Result<Batch>, Option<OwnedSemaphorePermit>);

/// Opens a watch on etcd and starts the task that keeps it open.
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

/// The stream of batches that a watcher reads from its watch.
struct BatchStream {
    /// The queue of batches for the watcher; `None` once the watch has ended.
    reported: Option<UnboundedReceiver<QueuedBatch>>,
    task: AbortHandle,
}

impl Stream for BatchStream {
    type Item = Result<Batch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(reported) = &mut self.reported else { return Poll::Ready(None) };
        let Poll::Ready(item) = reported.poll_recv(context) else { return Poll::Pending };
        // Before the task of a watch ends, it sends the watcher an error with the reason. If the task ends without
        // sending an error, it panicked or its runtime was shut down.
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

/// A watch on etcd whose creation etcd has confirmed.
struct ConfirmedWatch {
    stream: etcd_client::WatchStream,
    header: Option<ResponseHeader>,
    /// The first message of the watch's stream, not processed yet; this message may end the watch.
    first: WatchResponse,
    /// True if the watcher requested progress reports and the server sends correct reports.
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

/// The reason why a watch's event stream from etcd ended.
enum WatchCut {
    /// The stream from etcd failed, or the watch's own task closed it. After its stream from etcd has failed, the watch
    /// can resume on a new stream.
    Off(Error),
    /// The watch has ended and cannot resume.
    Over(Error),
}

struct EtcdWatcher {
    cluster: Arc<EtcdCluster>,
    span: KeySpan,
    prev: Prev,
    progress: Progress,
    /// The next revision that the watch delivers to the watcher.
    next: Revision,
    tell: UnboundedSender<QueuedBatch>,
    room: Arc<Semaphore>,
    /// The time at which the watch's stream failed; `None` while messages arrive.
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
        // The start of the watch is above the member's revision: the member lags behind, or the cluster was restored to
        // an older state. On a restored cluster, the watch could wait for ever, so a linearizable read checks that the
        // cluster was not restored. The linearizable read can use the watch's connection, because no events have been
        // sent on it that could fill its flow-control window.
        let reached = opened.header.as_ref().map_or(Revision::UNSET, |header| Revision::new(header.revision()));
        if reached.next() < self.next {
            self.prove_no_regress(deadline).await?;
        }
        Ok(opened)
    }

    /// Runs the watch, and opens it again after lost connections, until it ends with an error or the watcher is
    /// dropped.
    async fn follow(mut self, opened: ConfirmedWatch) {
        let tell = self.tell.clone();
        let mut closed = self.cluster.closed.subscribe();
        let end = tokio::select! {
            biased;
            _ = closed.wait_for(|closed| *closed) => Error::new(ErrorKind::Closed, Operation::Watch, STORE_NAME),
            end = self.read_batches(opened) => end,
        };
        // If sending the error fails, the watcher was dropped and does not need the error.
        let _ = tell.send((Err(end), None));
    }

    /// Delivers batches to the watcher until the watch ends, and returns the error that ended it.
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

    /// Delivers the messages of one event stream until this stream ends.
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
                    // Close the stream from etcd before waiting, because an unread open stream would stall other calls
                    // on its connection.
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

    /// Splits one etcd message into batches; fails if the message ends the watch.
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

    /// Delivers a batch to the watcher if its queue has room; otherwise returns the batch.
    fn deliver_now(&mut self, batch: Batch) -> Result<(), Batch> {
        match Arc::clone(&self.room).try_acquire_many_owned(room_for(&batch)) {
            Ok(permit) => self.deliver(batch, Some(permit)),
            Err(_) => return Err(batch),
        }
        Ok(())
    }

    /// Delivers the remaining batches of a closed stream, each as soon as the watcher's queue has room.
    async fn deliver_late(&mut self, first: Batch, others: impl Iterator<Item = Batch> + Send) {
        for batch in std::iter::once(first).chain(others) {
            // Acquiring a permit cannot fail, because the semaphore is never closed.
            let permit = Arc::clone(&self.room).acquire_many_owned(room_for(&batch)).await.ok();
            self.deliver(batch, permit);
        }
        // Before the task opens the next stream, it waits for room in the watcher's queue; otherwise it would have to
        // close the new stream at once.
        let _ = self.room.acquire_many(MAX_WAITING_BYTES / 2).await;
    }

    fn deliver(&mut self, batch: Batch, permit: Option<OwnedSemaphorePermit>) {
        self.next = batch.revision.next();
        self.cluster.seen.note(batch.revision);
        // Sending a batch fails only after the watcher was dropped, and dropping the watcher aborts this task.
        let _ = self.tell.send((Ok(batch), permit));
    }

    /// Processes a progress report, by which etcd says that it has sent all events up to the report's revision.
    fn note_progress(&mut self, response: &WatchResponse, reports: bool) {
        let Some(header) = response.header() else { return };
        let reached = Revision::new(header.revision());
        if reports && reached >= self.next {
            self.deliver(Batch::progress(reached), None);
        }
        self.next = self.next.max(reached.next());
    }

    /// Opens the watch again on a new stream, and retries until [`watch_patience`](EtcdCluster::watch_patience) has
    /// passed since the stream failed.
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

    /// Checks with a linearizable read that the cluster was not restored to an older state.
    ///
    /// # Errors
    /// `RevisionRegressed` if the cluster's revision is lower than the newest observed revision, or any store error.
    async fn prove_no_regress(&self, deadline: Instant) -> Result<()> {
        let work = |connection: Connection| {
            let key = self.span.key.clone();
            async move { connection.kv().get(key, Some(GetOptions::new().with_count_only())).await }
        };
        self.cluster.call(Operation::Watch, Resend::Always, deadline, work).await.map(|_| ())
    }
}

/// Sends a watch request to etcd, and waits until etcd confirms the watch.
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
    // If etcd refuses a watch, for example because of an old token, etcd first confirms the watch and then ends it.
    if first.canceled() && first.compact_revision() == 0 {
        return Err(watch_ended(first.cancel_reason()));
    }
    Ok(ConfirmedWatch { stream, header: first.header().cloned(), first, reports })
}

fn undecodable() -> Error {
    Error::new(ErrorKind::Undecodable, Operation::Watch, STORE_NAME).with_detail("an event without a key")
}

/// Groups those events of a message that are at or after revision `next` into one batch per revision. A revision is
/// never split over several messages, because the watch request does not allow fragments.
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

/// Returns the number of bytes that a batch takes in the watcher's queue; at most the size of the whole queue.
fn room_for(batch: &Batch) -> u32 {
    let of = |event: &Event| EVENT_OVERHEAD_BYTES + event.kv.size() + event.prev.as_ref().map_or(0, kv::Kv::size);
    let bytes: usize = batch.events.iter().map(of).sum();
    u32::try_from(bytes).unwrap_or(MAX_WAITING_BYTES).min(MAX_WAITING_BYTES)
}
