//! Implements the service Watch. For each gRPC stream there is one task that owns all watches of the stream, and only
//! this task sends on the stream.
//!
//! A progress report is never ahead of an event: the task reports a revision only after every watch of the stream has
//! delivered all events up to the revision. See k3s-io/kine#731 for what breaks if a progress report is sent before the
//! events that it covers. A progress report is never behind an event: the revision of a report is at least the revision
//! of the newest event on the stream.
//!
//! The service uses small buffers, because a client may open a separate stream for each watch. Two buffers of the
//! default size (8 KiB each) would take half of the memory of a watch with its own stream.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_client::proto::{PbEvent, PbResponseHeader, PbWatchRequest, PbWatchRequestUnion, PbWatchResponse};
use futures::stream::{AbortHandle, Abortable, BoxStream, SelectAll, unfold};
use futures::{FutureExt, Stream, StreamExt};
use http::{Request, Response};
use kv::{Batch, ErrorKind, Event, EventKind, InvalidArgument, Kv, Prev, Progress, Range, Revision, WatchRequest};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, interval_at};
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;
use tower_service::Service;

use crate::Api;
use crate::convert::{self, Refusal, key_value, status};
use crate::limits::MAX_REQUEST_BYTES;

/// The answers on a stream of watches.
pub(crate) type WatchAnswers = Pin<Box<dyn Stream<Item = Result<PbWatchResponse, Status>> + Send>>;

/// Maximum number of messages that wait for a client that does not read. When a client's message queue is full, its
/// watches pause; no event is lost.
const MAX_QUEUED_MESSAGES: usize = 16;
/// How long a requested progress report may wait for slower watches. Once a requested progress report is overdue,
/// events of later revisions are held back until it is sent.
const PROGRESS_TIMEOUT: Duration = Duration::from_millis(300);
/// Maximum number of watch items that wait for a progress report. If more than `MAX_HELD_BACK_EVENTS` watch items are
/// held back for a requested progress report, the report is dropped, and the client must request another one.
const MAX_HELD_BACK_EVENTS: usize = 256;
/// The watch id of messages about a whole stream.
const NO_WATCH_ID: i64 = -1;

impl Api {
    /// Starts the task that owns the watches of a stream, and returns the stream's answers.
    pub(crate) fn watches(&self, requests: Streaming<PbWatchRequest>) -> WatchAnswers {
        let (answers, sent) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let session = WatchSession {
            api: self.clone(),
            answers,
            changes: SelectAll::new(),
            cursors: BTreeMap::new(),
            next_id: 0,
            requested: None,
            newest: Revision::UNSET,
            held_back: VecDeque::new(),
        };
        tokio::spawn(session.run(requests));
        Box::pin(unfold(sent, |mut sent| async { sent.recv().await.map(|item| (item, sent)) }))
    }
}

/// The watches of one gRPC stream.
struct WatchSession {
    api: Api,
    answers: mpsc::Sender<Result<PbWatchResponse, Status>>,
    changes: SelectAll<BoxStream<'static, (i64, kv::Result<Batch>)>>,
    cursors: BTreeMap<i64, ClientWatch>,
    next_id: i64,
    /// The progress report that the client has requested.
    requested: Option<PendingProgress>,
    /// The revision of the newest event that was sent on the stream.
    newest: Revision,
    /// Watch items that are held back until the requested progress report is sent.
    held_back: VecDeque<(i64, kv::Result<Batch>)>,
}

/// A progress report that a client has requested and that was not sent yet.
#[derive(Clone, Copy)]
struct PendingProgress {
    /// The progress report must have at least this revision.
    revision: Revision,
    since: Instant,
    /// The revision of a progress report that was requested while events were already held back for an earlier report.
    later: Option<Revision>,
}

impl PendingProgress {
    fn at(revision: Revision) -> Self {
        Self { revision, since: Instant::now(), later: None }
    }
}

struct WatchToCreate {
    id: i64,
    key: Vec<u8>,
    end: Vec<u8>,
    start: i64,
    prev: bool,
    reports: bool,
    fragments: bool,
    filters: Vec<i32>,
}

/// The reason to end a stream: the client has disconnected, or has received an error.
struct StreamEnded;

impl WatchSession {
    async fn run(mut self, mut requests: Streaming<PbWatchRequest>) {
        let interval = self.api.report_interval;
        let mut timer = interval_at(Instant::now() + interval, interval);
        let mut next = None;
        loop {
            let step = tokio::select! {
                request = request(&mut next, &mut requests) => match request {
                    Some(request) => {
                        if is_progress(&request) {
                            // A single report answers all progress requests that have arrived.
                            next = skip_progress(&mut requests);
                        }
                        self.handle_request(request).await
                    }
                    None => return,
                },
                Some((id, item)) = self.changes.next(), if !self.changes.is_empty() => self.deliver(id, item).await,
                _ = timer.tick() => self.report_each().await,
                () = self.answers.closed() => return,
            };
            if step.is_err() {
                return;
            }
        }
    }

    async fn handle_request(&mut self, request: PbWatchRequest) -> Result<(), StreamEnded> {
        match request.request_union {
            Some(PbWatchRequestUnion::CreateRequest(create)) => {
                let wanted = WatchToCreate {
                    id: create.watch_id,
                    key: create.key,
                    end: create.range_end,
                    start: create.start_revision,
                    prev: create.prev_kv,
                    reports: create.progress_notify,
                    fragments: create.fragment,
                    filters: create.filters,
                };
                self.create(wanted).await
            }
            Some(PbWatchRequestUnion::CancelRequest(cancel)) => {
                if self.cursors.remove(&cancel.watch_id).is_none() {
                    return Ok(());
                }
                self.held_back.retain(|(id, _)| *id != cancel.watch_id);
                let now = self.now().await?;
                let canceled = PbWatchResponse { watch_id: cancel.watch_id, canceled: true, ..self.message(now) };
                self.send(canceled).await?;
                self.report_requested().await
            }
            Some(PbWatchRequestUnion::ProgressRequest(_)) => {
                let now = self.now().await?;
                match &mut self.requested {
                    // While a progress report is overdue, events after its revision are held back. A client that
                    // requests another report then gets a second one.
                    Some(requested) if requested.since.elapsed() >= PROGRESS_TIMEOUT => requested.later = Some(now),
                    Some(requested) => requested.revision = now.max(requested.revision),
                    None => self.requested = Some(PendingProgress::at(now)),
                }
                self.report_requested().await
            }
            None => Ok(()),
        }
    }

    async fn create(&mut self, wanted: WatchToCreate) -> Result<(), StreamEnded> {
        let now = self.now().await?;
        let id = match wanted.id {
            0 => self.free_id(),
            taken if self.cursors.contains_key(&taken) => {
                return self.refuse(now, "mvcc: duplicate watch ID provided on the WatchStream").await;
            }
            id => id,
        };
        if wanted.start < 0 {
            return self.compacted(id, now, Revision::UNSET, true).await;
        }
        let range = match range(wanted.key, wanted.end) {
            Some(range) => range,
            None => return self.refuse(now, "mvcc: watcher range is empty").await,
        };
        let start = if wanted.start == 0 { now.next() } else { Revision::new(wanted.start) };
        let oldest = self.api.backing.oldest();
        if start < oldest {
            return self.compacted(id, now, oldest, true).await;
        }
        let prev = if wanted.prev { Prev::Return } else { Prev::Omit };
        let request = WatchRequest::new(range, start).with_prev(prev).with_progress(Progress::Report);
        let stream = match self.api.backing.store().watch(request).await {
            Ok(stream) => stream,
            Err(error) if *error.kind() == ErrorKind::InvalidArgument(InvalidArgument::EmptyWatchRange) => {
                return self.refuse(now, "mvcc: watcher range is empty").await;
            }
            Err(error) => return self.fail(status(&error)).await,
        };
        let Ok(place) = Arc::clone(&self.api.watches).try_acquire_owned() else {
            let (_, text) = Refusal::TooManyRequests.parts();
            return self.refuse(now, text).await;
        };
        let (end, registration) = AbortHandle::new_pair();
        self.changes.push(Abortable::new(stream.map(move |item| (id, item)), registration).boxed());
        let mut cursor = ClientWatch::new(wanted.filters, wanted.fragments, wanted.reports, start, end, place);
        if wanted.start > now.get() {
            cursor.begin = start;
        }
        self.cursors.insert(id, cursor);
        self.send(PbWatchResponse { watch_id: id, created: true, ..self.message(now) }).await
    }

    fn free_id(&mut self) -> i64 {
        while self.cursors.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        self.next_id - 1
    }

    async fn deliver(&mut self, id: i64, item: kv::Result<Batch>) -> Result<(), StreamEnded> {
        if let Some(goal) = self.overdue()
            && !item.as_ref().is_ok_and(|batch| batch.is_progress() || batch.revision <= goal)
        {
            if let Some(cursor) = self.cursors.get_mut(&id) {
                cursor.reached = cursor.reached.max(goal);
            }
            self.held_back.push_back((id, item));
            if self.held_back.len() > MAX_HELD_BACK_EVENTS {
                self.requested = None;
            }
        } else {
            self.forward_item(id, item).await?;
        }
        self.report_requested().await
    }

    /// Returns the revision of an overdue progress report; events after this revision are held back until the report is
    /// sent. Each of the store's watches reports its progress every 200 ms, but not at the same moments as the other
    /// watches. Unless events after the revision of the requested report are held back, a busy watch stays ahead of the
    /// idle watches, and the report is never sent.
    fn overdue(&self) -> Option<Revision> {
        let requested = self.requested.filter(|requested| requested.since.elapsed() >= PROGRESS_TIMEOUT)?;
        Some(requested.revision.max(self.newest))
    }

    async fn forward_item(&mut self, id: i64, item: kv::Result<Batch>) -> Result<(), StreamEnded> {
        // After a client has canceled a watch, an item of this watch may still arrive.
        let Some(cursor) = self.cursors.get_mut(&id) else { return Ok(()) };
        match item {
            Ok(batch) if batch.is_progress() => {
                cursor.reached = cursor.reached.max(batch.revision);
                Ok(())
            }
            Ok(batch) => {
                let (revision, header) = (batch.revision, self.api.header(batch.revision));
                for message in cursor.messages(id, batch, header, self.api.backing.oldest()) {
                    self.answers.send(Ok(message)).await.map_err(|_| StreamEnded)?;
                    self.newest = self.newest.max(revision);
                }
                Ok(())
            }
            Err(error) => {
                self.cursors.remove(&id);
                match *error.kind() {
                    ErrorKind::Compacted { compact_revision } => {
                        let now = self.now().await?;
                        self.compacted(id, now, compact_revision, false).await
                    }
                    // Another store has replaced the store of the watch. Everything that the client has read is
                    // outdated, so the client must list the keys again.
                    ErrorKind::RevisionRegressed => {
                        (self.requested, self.newest) = (None, Revision::UNSET);
                        let now = self.now().await?;
                        self.compacted(id, now, now.next(), false).await
                    }
                    _ => self.fail(status(&error)).await,
                }
            }
        }
    }

    /// Sends the requested progress report once every watch has delivered all events up to the report's revision. A
    /// progress report has the greater of two revisions: the requested one, and the one of the newest event sent. As in
    /// etcd, a requested progress report is dropped if any watch on the stream has a start revision in the future.
    async fn report_requested(&mut self) -> Result<(), StreamEnded> {
        if let Some(requested) = self.requested {
            let revision = requested.revision.max(self.newest);
            let has_begun = self.cursors.values().all(|cursor| cursor.begin <= revision);
            if has_begun && self.cursors.values().any(|cursor| cursor.reached < revision) {
                return Ok(());
            }
            self.requested = requested.later.map(PendingProgress::at);
            if has_begun {
                self.send(PbWatchResponse { watch_id: NO_WATCH_ID, ..self.message(revision) }).await?;
            }
        }
        while let Some((id, item)) = self.held_back.pop_front() {
            self.forward_item(id, item).await?;
        }
        Ok(())
    }

    /// Sends a progress report for each watch that was created with periodic reports.
    async fn report_each(&mut self) -> Result<(), StreamEnded> {
        let reports: Vec<(i64, Revision)> = self
            .cursors
            .iter()
            .filter(|(_, cursor)| cursor.reports && cursor.begin <= cursor.reached)
            .map(|(id, cursor)| (*id, cursor.reached))
            .collect();
        for (id, reached) in reports {
            self.send(PbWatchResponse { watch_id: id, ..self.message(reached) }).await?;
        }
        Ok(())
    }

    /// Refuses to create a watch by confirming and canceling the watch in one message.
    async fn refuse(&mut self, now: Revision, reason: &str) -> Result<(), StreamEnded> {
        let refused = PbWatchResponse {
            watch_id: NO_WATCH_ID,
            created: true,
            canceled: true,
            cancel_reason: reason.to_owned(),
            ..self.message(now)
        };
        self.send(refused).await
    }

    /// Ends a watch whose next revision is compacted. As in etcd, the client can tell only from the message's compact
    /// revision why the watch was canceled.
    async fn compacted(&mut self, id: i64, now: Revision, mark: Revision, is_new: bool) -> Result<(), StreamEnded> {
        if is_new {
            self.send(PbWatchResponse { watch_id: id, created: true, ..self.message(now) }).await?;
        }
        let canceled =
            PbWatchResponse { watch_id: id, canceled: true, compact_revision: mark.get().max(1), ..self.message(now) };
        self.send(canceled).await
    }

    /// Returns the store's revision, or ends the watch stream with an error if the store does not answer.
    async fn now(&mut self) -> Result<Revision, StreamEnded> {
        match self.api.revision().await {
            Ok(now) => Ok(now),
            Err(status) => self.fail(status).await.and(Err(StreamEnded)),
        }
    }

    async fn fail(&mut self, status: Status) -> Result<(), StreamEnded> {
        let _ = self.answers.send(Err(status)).await;
        Err(StreamEnded)
    }

    fn message(&self, revision: Revision) -> PbWatchResponse {
        PbWatchResponse { header: self.api.header(revision), ..PbWatchResponse::default() }
    }

    async fn send(&mut self, message: PbWatchResponse) -> Result<(), StreamEnded> {
        self.answers.send(Ok(message)).await.map_err(|_| StreamEnded)
    }
}

/// Returns the next request of a client: the request that was read ahead, or a new request. Returns `None` at the end
/// of the stream.
async fn request(
    next: &mut Option<PbWatchRequest>,
    requests: &mut Streaming<PbWatchRequest>,
) -> Option<PbWatchRequest> {
    match next.take() {
        None => requests.message().await.ok().flatten(),
        next => next,
    }
}

fn is_progress(request: &PbWatchRequest) -> bool {
    matches!(request.request_union, Some(PbWatchRequestUnion::ProgressRequest(_)))
}

/// Skips the progress requests that have arrived, and returns the first other request. The server limits the number of
/// unread messages: if progress requests were left unread, the requests after them could wait until the connection
/// ends.
fn skip_progress(requests: &mut Streaming<PbWatchRequest>) -> Option<PbWatchRequest> {
    loop {
        match requests.message().now_or_never() {
            Some(Ok(Some(request))) if is_progress(&request) => {}
            Some(Ok(Some(request))) => return Some(request),
            // After the client's stream has ended, every further read returns the end again, so `skip_progress` may
            // discard the end that it has read.
            _ => return None,
        }
    }
}

/// Returns the range of a watch, or `None` if the range cannot contain a key. An empty key stands for the smallest
/// possible key.
fn range(key: Vec<u8>, end: Vec<u8>) -> Option<Range> {
    let key = if key.is_empty() { vec![0] } else { key };
    convert::range(key, end).ok().filter(|range| !range.is_empty())
}

/// Maximum size of keys and values in a message of a watch with fragments, in bytes. An event that exceeds
/// `MAX_FRAGMENT_BYTES` is sent in a message of its own.
const MAX_FRAGMENT_BYTES: usize = 1_572_864;
/// Values of `FilterType` and `Event.EventType` in etcd's protocol.
const FILTER_NO_PUT: i32 = 0;
const FILTER_NO_DELETE: i32 = 1;
const EVENT_TYPE_DELETE: i32 = 1;

#[derive(Debug)]
struct ClientWatch {
    filters: Vec<i32>,
    fragments: bool,
    /// Whether the client gets periodic progress reports for this watch.
    pub(crate) reports: bool,
    /// The revision up to which all events of the watch were sent.
    pub(crate) reached: Revision,
    /// The start revision of a watch that was created with a future start revision; unset for any other watch.
    pub(crate) begin: Revision,
    pub(crate) end: AbortHandle,
    /// The permit that counts the watch among all open watches.
    _place: OwnedSemaphorePermit,
}

impl ClientWatch {
    pub(crate) fn new(
        filters: Vec<i32>,
        fragments: bool,
        reports: bool,
        start: Revision,
        end: AbortHandle,
        place: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            filters,
            fragments,
            reports,
            reached: Revision::new(start.get() - 1),
            begin: Revision::UNSET,
            end,
            _place: place,
        }
    }

    /// Returns the messages for a watch's events at one revision; no messages if the client filters all of these
    /// events. `header` is the response header; its revision is the revision of the events. As in etcd, an event has no
    /// previous entry unless the event's revision is greater than `oldest`, the oldest revision that can be read.
    pub(crate) fn messages(
        &mut self,
        id: i64,
        batch: Batch,
        header: Option<PbResponseHeader>,
        oldest: Revision,
    ) -> Vec<PbWatchResponse> {
        self.reached = batch.revision;
        let has_prev = batch.revision > oldest;
        let events = batch.events.into_iter().filter(|event| self.wants(event));
        let events = events.map(|event| Event { prev: event.prev.filter(|_| has_prev), ..event });
        let mut messages: Vec<PbWatchResponse> = Vec::new();
        let mut room = 0;
        for event in events {
            let size = event.kv.size() + event.prev.as_ref().map_or(0, Kv::size);
            match messages.last_mut() {
                Some(message) if !self.fragments || size <= room => {
                    message.events.push(translated(event));
                    room = room.saturating_sub(size);
                }
                last => {
                    if let Some(message) = last {
                        message.fragment = true;
                    }
                    let events = vec![translated(event)];
                    messages.push(PbWatchResponse { header, watch_id: id, events, ..PbWatchResponse::default() });
                    room = MAX_FRAGMENT_BYTES.saturating_sub(size);
                }
            }
        }
        messages
    }

    fn wants(&self, event: &Event) -> bool {
        let filter = if event.kind == EventKind::Put { FILTER_NO_PUT } else { FILTER_NO_DELETE };
        !self.filters.contains(&filter)
    }
}

impl Drop for ClientWatch {
    fn drop(&mut self) {
        self.end.abort();
    }
}

fn translated(event: Event) -> PbEvent {
    PbEvent {
        r#type: if event.kind == EventKind::Delete { EVENT_TYPE_DELETE } else { 0 },
        kv: Some(key_value(event.kv)),
        prev_kv: event.prev.map(key_value),
    }
}

/// Initial size of an encoding or decoding buffer, in bytes.
const INITIAL_BUFFER_BYTES: usize = 256;
/// Number of buffered bytes at which the encoder sends the buffered messages.
const FLUSH_BYTES: usize = 32 * 1024;

type Prost = ProstCodec<PbWatchResponse, PbWatchRequest>;

/// A Protobuf codec with small buffers for messages of watches.
#[derive(Debug, Default)]
struct SmallBufferCodec;

impl Codec for SmallBufferCodec {
    type Encode = PbWatchResponse;
    type Decode = PbWatchRequest;
    type Encoder = <Prost as Codec>::Encoder;
    type Decoder = <Prost as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        Prost::raw_encoder(BufferSettings::new(INITIAL_BUFFER_BYTES, FLUSH_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        Prost::raw_decoder(BufferSettings::new(INITIAL_BUFFER_BYTES, FLUSH_BYTES))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct WatchService(pub(crate) Api);

impl NamedService for WatchService {
    const NAME: &'static str = "etcdserverpb.Watch";
}

impl Service<Request<Body>> for WatchService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path() != "/etcdserverpb.Watch/Watch" {
            let unknown = Status::new(Code::Unimplemented, "no such method").into_http();
            return Box::pin(ready(Ok(unknown)));
        }
        let watch = WatchMethod(self.0.clone());
        let mut grpc =
            Grpc::new(SmallBufferCodec).apply_max_message_size_config(Some(MAX_REQUEST_BYTES), Some(usize::MAX));
        Box::pin(async move { Ok(grpc.streaming(watch, request).await) })
    }
}

struct WatchMethod(Api);

impl StreamingService<PbWatchRequest> for WatchMethod {
    type Response = PbWatchResponse;
    type ResponseStream = WatchAnswers;
    type Future = Ready<Result<tonic::Response<WatchAnswers>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<PbWatchRequest>>) -> Self::Future {
        ready(Ok(tonic::Response::new(self.0.watches(request.into_inner()))))
    }
}
