//! A watch that outlives its connections.
//!
//! A task reads what etcd sends and cuts it into whole revisions. It reads on whether or not anybody takes them: all
//! streams of a connection share its window, so a few open streams that nobody reads would stop every call on it. The
//! revisions that wait are bounded in bytes. When that bound is reached, the task first hangs up, then waits, and opens the
//! watch again, from where it stopped, once the watcher reads again.
//!
//! A watch that was cut off is opened again as well, after a linearizable read, which fails if the cluster went back in time. If
//! a watch starts above the revision of the member that opens it, such a read follows, too.
//! Events from before the next revision are left out, so nothing comes twice; etcd sends everything from there on or
//! says `Compacted`, so nothing is missing.
//!
//! A watch that reports progress requests it from etcd twice a second. Older servers may report progress ahead of an event, so
//! nothing of theirs is passed on.

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

/// How many bytes of events wait for a watcher that does not read.
const MAX_WAITING_BYTES: u32 = 8 << 20;
/// The room that an event takes besides its bytes, about.
const EVENT_OVERHEAD_BYTES: usize = 128;
/// How often etcd is asked for its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// Before a watch is opened again, at first and at the most.
const MIN_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A batch on its way to the watcher, and the room that it takes until then.
type QueuedBatch = (Result<Batch>, Option<OwnedSemaphorePermit>);

/// Opens a watch and sees to it from then on.
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

/// The watcher's end.
struct BatchStream {
    /// Taken when the watch ends.
    reported: Option<UnboundedReceiver<QueuedBatch>>,
    task: AbortHandle,
}

impl Stream for BatchStream {
    type Item = Result<Batch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(reported) = &mut self.reported else { return Poll::Ready(None) };
        let Poll::Ready(item) = reported.poll_recv(context) else { return Poll::Pending };
        // The task says why it ends; if it could not, its runtime is gone or it failed.
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

/// A watch that etcd has confirmed.
struct ConfirmedWatch {
    stream: etcd_client::WatchStream,
    header: Option<ResponseHeader>,
    /// Not yet read from: it may say the end already.
    first: WatchResponse,
    /// True if progress is wanted, and the server's reports can be believed.
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

/// Why nothing more comes from a connection.
enum WatchCut {
    /// It broke, or we hung up: the watch can go on over another one.
    Off(Error),
    /// The watch is over.
    Over(Error),
}

struct EtcdWatcher {
    cluster: Arc<EtcdCluster>,
    span: KeySpan,
    prev: Prev,
    progress: Progress,
    /// Everything before this revision was delivered.
    next: Revision,
    tell: UnboundedSender<QueuedBatch>,
    room: Arc<Semaphore>,
    /// Since when nothing was heard.
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
        // The member is behind, or the cluster went back after it was last read: then the watch could wait for ever. It has no
        // event to send yet, so the read does not wait behind a stream that is not read.
        let reached = opened.header.as_ref().map_or(Revision::UNSET, |header| Revision::new(header.revision()));
        if reached.next() < self.next {
            self.prove_no_regress(deadline).await?;
        }
        Ok(opened)
    }

    /// Until the watch is over or nobody listens any more.
    async fn follow(mut self, opened: ConfirmedWatch) {
        let tell = self.tell.clone();
        let mut closed = self.cluster.closed.subscribe();
        let end = tokio::select! {
            biased;
            _ = closed.wait_for(|closed| *closed) => Error::new(ErrorKind::Closed, Operation::Watch, STORE_NAME),
            end = self.read_batches(opened) => end,
        };
        // If nobody listens any more, nobody needs to know.
        let _ = tell.send((Err(end), None));
    }

    /// Until the watch is over; the reason.
    async fn read_batches(&mut self, mut opened: ConfirmedWatch) -> Error {
        loop {
            match self.drain(opened).await {
                WatchCut::Over(error) => return error,
                WatchCut::Off(error) => tracing::debug!(%error, next = %self.next, "a watch was cut off"),
            }
            opened = match self.open_again().await {
                Ok(opened) => opened,
                Err(error) => return error,
            };
        }
    }

    /// Delivers what comes over one connection until nothing more does.
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
                    // Not a moment with the stream open and nobody reading it.
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

    /// The batches of one message, unless the message ends the watch.
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

    /// Delivers a batch if there is room for it; hands it back if there is none.
    fn deliver_now(&mut self, batch: Batch) -> Result<(), Batch> {
        match Arc::clone(&self.room).try_acquire_many_owned(room_for(&batch)) {
            Ok(permit) => self.deliver(batch, Some(permit)),
            Err(_) => return Err(batch),
        }
        Ok(())
    }

    /// Delivers what came before the task hung up, as the watcher makes room for it.
    async fn deliver_late(&mut self, first: Batch, others: impl Iterator<Item = Batch> + Send) {
        for batch in std::iter::once(first).chain(others) {
            // The semaphore is never closed.
            let permit = Arc::clone(&self.room).acquire_many_owned(room_for(&batch)).await.ok();
            self.deliver(batch, permit);
        }
        // The next stream needs room too: a stream that is full at once would be opened for nothing.
        let _ = self.room.acquire_many(MAX_WAITING_BYTES / 2).await;
    }

    fn deliver(&mut self, batch: Batch, permit: Option<OwnedSemaphorePermit>) {
        self.next = batch.revision.next();
        self.cluster.seen.note(batch.revision);
        // If nobody listens any more, this task is about to be ended.
        let _ = self.tell.send((Ok(batch), permit));
    }

    /// etcd says from time to time that all up to some revision was sent.
    fn note_progress(&mut self, response: &WatchResponse, reports: bool) {
        let Some(header) = response.header() else { return };
        let reached = Revision::new(header.revision());
        if reports && reached >= self.next {
            self.deliver(Batch::progress(reached), None);
        }
        self.next = self.next.max(reached.next());
    }

    /// Opens the watch again, for as long as that is worth trying.
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

    /// Makes a linearizable read, whose answer is judged as every answer is.
    ///
    /// # Errors
    /// `RevisionRegressed` if the cluster is older than what was seen of it; any store error.
    async fn prove_no_regress(&self, deadline: Instant) -> Result<()> {
        let work = |connection: Connection| {
            let key = self.span.key.clone();
            async move { connection.kv().get(key, Some(GetOptions::new().with_count_only())).await }
        };
        self.cluster.call(Operation::Watch, Resend::Always, deadline, work).await.map(|_| ())
    }
}

/// Asks for a watch and waits until etcd confirms it.
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
    // A refusal, such as that of an old token, comes as a watch that is confirmed and ended at once.
    if first.canceled() && first.compact_revision() == 0 {
        return Err(watch_ended(first.cancel_reason()));
    }
    Ok(ConfirmedWatch { stream, header: first.header().cloned(), first, reports })
}

fn undecodable() -> Error {
    Error::new(ErrorKind::Undecodable, Operation::Watch, STORE_NAME).with_detail("an event without a key")
}

/// The events of a message from `next` on, one batch for each revision. etcd never cuts a revision in two, since the
/// request does not allow it.
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

/// How much of the room a batch takes: never more than all of it.
fn room_for(batch: &Batch) -> u32 {
    let of = |event: &Event| EVENT_OVERHEAD_BYTES + event.kv.size() + event.prev.as_ref().map_or(0, kv::Kv::size);
    let bytes: usize = batch.events.iter().map(of).sum();
    u32::try_from(bytes).unwrap_or(MAX_WAITING_BYTES).min(MAX_WAITING_BYTES)
}
