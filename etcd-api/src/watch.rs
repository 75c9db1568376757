//! The service Watch: one task for each gRPC stream owns all watches of that stream, and is the only one that sends.
//!
//! Therefore no report of progress is ahead of an event: the task reports a revision once every watch of the stream has
//! delivered all events up to it (k3s-io/kine#731 shows the damage of an early report).

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::proto::{PbWatchRequest, PbWatchRequestUnion, PbWatchResponse};
use futures::stream::{AbortHandle, Abortable, BoxStream, SelectAll, unfold};
use futures::{Stream, StreamExt};
use kv::{Batch, ErrorKind, InvalidArgument, Prev, Progress, Range, Revision, WatchRequest};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval_at};
use tonic::{Status, Streaming};

use crate::Api;
use crate::convert;
use crate::refusals::{Refusal, status};
use crate::watch_cursor::Cursor;

/// The answers of a stream of watches.
pub(crate) type Answers = Pin<Box<dyn Stream<Item = Result<PbWatchResponse, Status>> + Send>>;

/// So many messages wait for a client that does not read; then its watches wait, too, and lose nothing.
const ROOM: usize = 16;
/// How often a watch reports its progress without a request, as with etcd.
const REPORT: Duration = Duration::from_secs(10 * 60);
/// The id of messages that are about a whole stream.
const NO_WATCH: i64 = -1;

impl Api {
    /// Begins to serve a stream of watches.
    pub(crate) fn watches(&self, requests: Streaming<PbWatchRequest>) -> Answers {
        let (answers, sent) = mpsc::channel(ROOM);
        let session = Session {
            api: self.clone(),
            answers,
            changes: SelectAll::new(),
            cursors: BTreeMap::new(),
            next_id: 0,
            requested: None,
        };
        tokio::spawn(session.run(requests));
        Box::pin(unfold(sent, |mut sent| async { sent.recv().await.map(|item| (item, sent)) }))
    }
}

/// The watches of one gRPC stream.
struct Session {
    api: Api,
    answers: mpsc::Sender<Result<PbWatchResponse, Status>>,
    changes: SelectAll<BoxStream<'static, (i64, kv::Result<Batch>)>>,
    cursors: BTreeMap<i64, Cursor>,
    next_id: i64,
    /// The revision that a client that requested progress waits for.
    requested: Option<Revision>,
}

/// A watch that a client wants.
struct Wanted {
    id: i64,
    key: Vec<u8>,
    end: Vec<u8>,
    start: i64,
    prev: bool,
    reports: bool,
    fragments: bool,
    filters: Vec<i32>,
}

/// The client is gone, or has its error: the stream ends.
struct Ended;

impl Session {
    async fn run(mut self, mut requests: Streaming<PbWatchRequest>) {
        let mut timer = interval_at(Instant::now() + REPORT, REPORT);
        loop {
            let step = tokio::select! {
                request = requests.message() => match request {
                    Ok(Some(request)) => self.obey(request).await,
                    Ok(None) | Err(_) => return,
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

    async fn obey(&mut self, request: PbWatchRequest) -> Result<(), Ended> {
        match request.request_union {
            Some(PbWatchRequestUnion::CreateRequest(create)) => {
                let wanted = Wanted {
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
                let now = self.now().await?;
                let canceled = PbWatchResponse { watch_id: cancel.watch_id, canceled: true, ..self.message(now) };
                self.send(canceled).await?;
                self.report_requested().await
            }
            Some(PbWatchRequestUnion::ProgressRequest(_)) => {
                let now = self.now().await?;
                self.requested = self.requested.max(Some(now));
                self.report_requested().await
            }
            None => Ok(()),
        }
    }

    async fn create(&mut self, wanted: Wanted) -> Result<(), Ended> {
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
        self.cursors.insert(id, Cursor::new(wanted.filters, wanted.fragments, wanted.reports, start, end, place));
        self.send(PbWatchResponse { watch_id: id, created: true, ..self.message(now) }).await
    }

    fn free_id(&mut self) -> i64 {
        while self.cursors.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        self.next_id - 1
    }

    async fn deliver(&mut self, id: i64, item: kv::Result<Batch>) -> Result<(), Ended> {
        // An item may come just before the end of a watch that its client has canceled.
        let Some(cursor) = self.cursors.get_mut(&id) else { return Ok(()) };
        match item {
            Ok(batch) if batch.is_progress() => {
                cursor.reached = batch.revision;
                self.report_requested().await
            }
            Ok(batch) => {
                let header = self.api.header(batch.revision);
                for message in cursor.messages(id, batch, header) {
                    self.answers.send(Ok(message)).await.map_err(|_| Ended)?;
                }
                self.report_requested().await
            }
            Err(error) => {
                self.cursors.remove(&id);
                match *error.kind() {
                    ErrorKind::Compacted { compact_revision } => {
                        let now = self.now().await?;
                        self.compacted(id, now, compact_revision, false).await?;
                        self.report_requested().await
                    }
                    // Another store took its place, where nothing that the client knows holds: it must read anew.
                    ErrorKind::RevisionRegressed => {
                        let now = self.now().await?;
                        self.compacted(id, now, now.next(), false).await
                    }
                    _ => self.fail(status(&error)).await,
                }
            }
        }
    }

    /// Reports the requested revision once every watch has delivered all events up to it.
    async fn report_requested(&mut self) -> Result<(), Ended> {
        let Some(requested) = self.requested else { return Ok(()) };
        if self.cursors.values().any(|cursor| cursor.reached < requested) {
            return Ok(());
        }
        self.requested = None;
        self.send(PbWatchResponse { watch_id: NO_WATCH, ..self.message(requested) }).await
    }

    /// Reports the progress of each watch whose client wants that.
    async fn report_each(&mut self) -> Result<(), Ended> {
        let reports: Vec<(i64, Revision)> = self
            .cursors
            .iter()
            .filter(|(_, cursor)| cursor.reports)
            .map(|(id, cursor)| (*id, cursor.reached))
            .collect();
        for (id, reached) in reports {
            self.send(PbWatchResponse { watch_id: id, ..self.message(reached) }).await?;
        }
        Ok(())
    }

    /// A watch that is not made: it is confirmed and canceled at once.
    async fn refuse(&mut self, now: Revision, reason: &str) -> Result<(), Ended> {
        let refused = PbWatchResponse {
            watch_id: NO_WATCH,
            created: true,
            canceled: true,
            cancel_reason: reason.to_owned(),
            ..self.message(now)
        };
        self.send(refused).await
    }

    /// A watch whose next revision is below the mark ends. As with etcd, the revision is all that says why.
    async fn compacted(&mut self, id: i64, now: Revision, mark: Revision, is_new: bool) -> Result<(), Ended> {
        if is_new {
            self.send(PbWatchResponse { watch_id: id, created: true, ..self.message(now) }).await?;
        }
        let canceled =
            PbWatchResponse { watch_id: id, canceled: true, compact_revision: mark.get().max(1), ..self.message(now) };
        self.send(canceled).await
    }

    /// The store's revision; without an answer of the store the stream ends with the error.
    async fn now(&mut self) -> Result<Revision, Ended> {
        match self.api.revision().await {
            Ok(now) => Ok(now),
            Err(status) => self.fail(status).await.and(Err(Ended)),
        }
    }

    async fn fail(&mut self, status: Status) -> Result<(), Ended> {
        let _ = self.answers.send(Err(status)).await;
        Err(Ended)
    }

    fn message(&self, revision: Revision) -> PbWatchResponse {
        PbWatchResponse { header: self.api.header(revision), ..PbWatchResponse::default() }
    }

    async fn send(&mut self, message: PbWatchResponse) -> Result<(), Ended> {
        self.answers.send(Ok(message)).await.map_err(|_| Ended)
    }
}

/// The range of a watch. A key without bytes means the first key there can be; `None` for a range without keys.
fn range(key: Vec<u8>, end: Vec<u8>) -> Option<Range> {
    let key = if key.is_empty() { vec![0] } else { key };
    convert::range(key, end).ok().filter(|range| !range.is_empty())
}
