//! Answers requests for a store's changes: as a stream of server-sent events, or as the history of an address, a
//! container, a pod or a node.
//!
//! A stream takes the next change from the store's watch only after the client has read the previous change.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::unfold;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::samples::oldest_revision;
use ipam_core::timestamps::rfc3339;
use ipam_operator::events::{BlockEvent, BlockEventKind, EventRow, of_batch, of_listed};
use ipam_operator::history::{HistoryOf, time_after, time_of};
use kv::{
    Batch, Content, ErrorKind, Operation, Pages, Prev, Range, RangeRequest, Revision, Store, StoreExt, WatchRequest,
    WatchStream,
};
use serde::Serialize;
use tokio::time::{sleep, timeout};

use super::search::HolderQuery;
use super::{Query, json_text_response};
use crate::http::PageContext;
use crate::http::answer::{ANSWER_TTL, HttpError, HttpResponse};

/// Maximum number of events that a stream sends for one revision.
const MAX_EVENTS_PER_REVISION: usize = 200;
/// Maximum number of past revisions that a client may request.
const MAX_RECENT_REVISIONS: i64 = 1000;
/// How long to wait before a watch that has ended is restarted.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// The changes that one revision made, as the web page shows them.
#[derive(Serialize)]
struct RevisionEvents {
    revision: i64,
    time: Option<String>,
    events: Vec<EventRow>,
    /// The number of events that are omitted because the revision has more than [`MAX_EVENTS_PER_REVISION`] events.
    more: usize,
}

#[derive(Serialize)]
struct RevisionMark<'a> {
    revision: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Returns the range of keys that contains blocks, affinities, pools and reservations. The range also contains keys of
/// other kinds, because the range extends from the first IPAM key to the last reservation.
fn range() -> Range {
    let (first, last) = (keys::ipam_prefix(), keys::resources_prefix(ResourceKind::IpReservation));
    last.prefix_end().map_or(Range::Prefix(first.clone()), |end| Range::FromTo(first, end))
}

/// The revision at which a client's event stream starts.
enum StreamStart {
    /// The stream starts after this revision, which the client has already received.
    After(Revision),
    /// The number of newest revisions with which the stream starts.
    Recent(i64),
}

impl StreamStart {
    fn of(request: &Request<Incoming>, query: &Query) -> Result<Self, HttpError> {
        let seen = request.headers().get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
        let after = if query.get("after").is_some() { Some(query.parsed("after")?) } else { None };
        let recent = if query.get("recent").is_some() { query.parsed("recent")? } else { 0 };
        Ok(match seen.or(after) {
            Some(revision) => Self::After(Revision::new(revision)),
            None => Self::Recent(i64::clamp(recent, 0, MAX_RECENT_REVISIONS)),
        })
    }
}

/// Answers a request with a stream of server-sent events.
pub(super) async fn stream(
    page: &PageContext,
    request: &Request<Incoming>,
    query: &Query,
) -> Result<HttpResponse, HttpError> {
    let follower = EventFollower::begin(&page.store, StreamStart::of(request, query)?, page.limits.heartbeat).await?;
    let frames = unfold(follower, |mut follower| async move {
        let frame = follower.next().await?;
        Some((Ok::<_, Infallible>(Frame::data(frame)), follower))
    });
    let mut answer = Response::new(StreamBody::new(frames).boxed_unsync());
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    Ok(answer)
}

/// The event stream of one client.
struct EventFollower {
    store: Arc<dyn Store>,
    changes: WatchStream,
    ready: VecDeque<Bytes>,
    heartbeat: Duration,
}

async fn newest(store: &dyn Store) -> kv::Result<Revision> {
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly);
    Ok(store.range(request).await?.revision)
}

async fn watch(store: &dyn Store, start: Revision) -> kv::Result<WatchStream> {
    let start = Revision::new(start.get().max(1));
    store.watch(WatchRequest::new(range(), start).with_prev(Prev::Return)).await
}

/// Returns the oldest of the newest `count` revisions. If the store has compacted some of the newest `count` revisions,
/// returns the oldest revision that is still readable.
async fn readable(store: &dyn Store, head: Revision, count: i64) -> kv::Result<Revision> {
    let wanted = Revision::new((head.get() - count + 1).max(1));
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly).with_at(wanted);
    match store.range(request).await.map_err(|error| error.kind().clone()) {
        Ok(_) | Err(ErrorKind::FutureRevision) => Ok(wanted),
        Err(ErrorKind::Compacted { compact_revision }) if compact_revision.is_set() => Ok(compact_revision.next()),
        Err(_) => Ok(head.next()),
    }
}

impl EventFollower {
    async fn begin(store: &Arc<dyn Store>, start: StreamStart, heartbeat: Duration) -> Result<Self, HttpError> {
        let head = newest(&**store).await?;
        let mut follower = Self {
            store: Arc::clone(store),
            changes: futures::stream::pending().boxed(),
            ready: VecDeque::new(),
            heartbeat,
        };
        follower.ready.push_back(Bytes::from_static(b"retry: 2000\n\n"));
        follower.ready.push_back(event("ready", None, &RevisionMark { revision: head.get(), reason: None }));
        let first = match start {
            StreamStart::After(seen) if seen > head => {
                follower.tell_reset(head, "another store has taken the place of this one");
                head.next()
            }
            StreamStart::After(seen) => seen.next(),
            // A new client has missed nothing, even if the store has compacted most of its history.
            StreamStart::Recent(count) => readable(&**store, head, count).await?,
        };
        follower.changes = watch(&**store, first).await?;
        Ok(follower)
    }

    /// Returns the next bytes of the event stream, or `None` to end the stream.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Some(ready);
            }
            match timeout(self.heartbeat, self.changes.next()).await {
                Err(_) => return Some(Bytes::from_static(b": nothing happened\n\n")),
                Ok(Some(Ok(batch))) => self.ready.extend(revision_events(&batch)),
                Ok(Some(Err(error))) => {
                    let reason = match error.kind() {
                        ErrorKind::Compacted { .. } => "the store has given up this part of its history".to_owned(),
                        _ => error.to_string(),
                    };
                    self.reset(&reason).await?;
                }
                Ok(None) => self.reset("the watch has ended").await?,
            }
        }
    }

    /// Tells the client that events may be missing, and continues with the next change.
    async fn reset(&mut self, reason: &str) -> Option<()> {
        sleep(RECONNECT_INTERVAL).await;
        let head = newest(&*self.store).await.ok()?;
        self.changes = watch(&*self.store, head.next()).await.ok()?;
        self.tell_reset(head, reason);
        Some(())
    }

    fn tell_reset(&mut self, head: Revision, reason: &str) {
        let at = RevisionMark { revision: head.get(), reason: Some(reason) };
        self.ready.push_back(event("reset", Some(head), &at));
    }
}

/// Returns a batch of changes as a server-sent event, or `None` if the web page shows none of the changes.
fn revision_events(batch: &Batch) -> Option<Bytes> {
    let resources = [ResourceKind::IpPool, ResourceKind::IpReservation];
    let is_resource = |key| resources.iter().any(|kind| keys::parse_resource(*kind, key).is_some());
    let reported = of_batch(batch);
    let concerns = batch.events.iter().any(|event| is_resource(&event.kv.key));
    if reported.block_events.is_empty() && reported.unreported.is_empty() && !concerns {
        return None;
    }
    let row = |one: &BlockEvent| EventRow::happened(batch.revision, time_of(batch.time, &one.what), one);
    let document = RevisionEvents {
        revision: batch.revision.get(),
        time: batch.time.map(|time| rfc3339(time.into())),
        events: reported.block_events.iter().take(MAX_EVENTS_PER_REVISION).map(row).collect(),
        more: reported.block_events.len().saturating_sub(MAX_EVENTS_PER_REVISION),
    };
    Some(event("batch", Some(batch.revision), &document))
}

/// Formats a server-sent event. The JSON text contains no line feeds, so it fits on one `data:` line.
fn event(name: &str, id: Option<Revision>, document: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(document).unwrap_or_default();
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    format!("event: {name}\n{id}data: {data}\n\n").into()
}

/// Maximum number of events in a history; a longer history omits its oldest events.
const MAX_HISTORY_EVENTS: usize = 500;
/// Maximum number of attempts to read a history. An attempt to read the history fails if the store compacts the history
/// meanwhile.
const MAX_ATTEMPTS: usize = 3;

#[derive(Default, Serialize)]
struct EventHistory {
    /// The oldest revision that the store can still read.
    oldest_revision: i64,
    oldest_time: Option<String>,
    /// The events of the history, newest first.
    events: VecDeque<EventRow>,
    /// Whether older events are omitted from the history.
    more: bool,
}

enum HistorySubject {
    Known(HistoryOf),
    Pod(HolderQuery),
}

impl HistorySubject {
    fn of(query: &Query) -> Result<Self, HttpError> {
        if query.need("kind")? == "address" {
            return Ok(Self::Known(HistoryOf::Address(query.parsed("of")?)));
        }
        Ok(match HolderQuery::of(query)? {
            HolderQuery::Container(name) => Self::Known(HistoryOf::Name(name)),
            HolderQuery::Node(name) => Self::Known(HistoryOf::Node(name)),
            pod @ HolderQuery::Pod(_) => Self::Pod(pod),
        })
    }

    fn ranges(&self) -> Vec<Range> {
        match self {
            Self::Known(subject) => subject.ranges(),
            Self::Pod(_) => vec![Range::Prefix(keys::blocks_prefix(None))],
        }
    }

    fn concerns(&self, block_event: &BlockEvent) -> bool {
        match (self, &block_event.what) {
            (Self::Known(subject), _) => subject.concerns(block_event),
            (Self::Pod(pod), BlockEventKind::Moved { from, to, .. }) => pod.has(from) || pod.has(to),
            (Self::Pod(pod), what) => what.holder().is_some_and(|entry| pod.has(entry)),
        }
    }
}

pub(super) async fn history(page: &PageContext, query: &Query) -> Result<HttpResponse, HttpError> {
    let whose = HistorySubject::of(query)?;
    let question = format!("{} {}", query.need("kind")?, query.need("of")?);
    let read = page.cache.read_exclusively(read_with_retries(page, &whose));
    Ok(json_text_response(&page.cache.history.get(&question, ANSWER_TTL, read).await?))
}

async fn read_with_retries(page: &PageContext, whose: &HistorySubject) -> Result<String, HttpError> {
    for _ in 0..MAX_ATTEMPTS {
        match read_history(page, whose).await {
            Ok(reported) => return serde_json::to_string(&reported).map_err(HttpError::unavailable),
            Err(error) if matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(HttpError::unavailable("the store gives up its history faster than it can be read; try again"))
}

async fn read_history(page: &PageContext, whose: &HistorySubject) -> kv::Result<EventHistory> {
    let store = &*page.store;
    let newest = store.range(RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly)).await?;
    let oldest = oldest_revision(store, newest.revision).await?;
    let mut reported = EventHistory { oldest_revision: oldest.get(), ..EventHistory::default() };
    for range in whose.ranges() {
        if !reported.events.is_empty() {
            break;
        }
        // Reads the state at the oldest revision, then the changes after that revision.
        let mut pages = Pages::new(range.clone(), oldest);
        while let Some(page) = pages.next(store).await? {
            for kv in page {
                let listed = of_listed(&kv.key, kv.value.as_bytes()).unwrap_or_default();
                listed
                    .iter()
                    .filter(|one| whose.concerns(one))
                    .for_each(|one| reported.add(EventRow::listed(oldest, one)));
            }
        }
        visit_changes_since(store, &range, oldest.next(), |batch| reported.add_batch(batch, whose)).await?;
    }
    let everything = Range::Prefix(keys::ipam_prefix());
    reported.oldest_time = time_after(store, &everything, oldest).await?.map(rfc3339);
    Ok(reported)
}

impl EventHistory {
    fn add_batch(&mut self, batch: &Batch, whose: &HistorySubject) {
        let Batch { revision, time, .. } = batch;
        let all = of_batch(batch).block_events;
        for one in all.iter().filter(|one| whose.concerns(one)) {
            self.add(EventRow::happened(Revision::new(revision.get()), time_of(*time, &one.what), one));
        }
    }

    fn add(&mut self, row: EventRow) {
        self.events.push_front(row);
        if self.events.len() > MAX_HISTORY_EVENTS {
            self.events.pop_back();
            self.more = true;
        }
    }
}

/// How long to wait for further changes after the watch has reached the newest key. The list of keys shows no deleted
/// key, so it cannot show up to which revision the watch has reported deletions; the watch may still have some to
/// report.
const QUIET_INTERVAL: Duration = Duration::from_millis(200);
/// How long to wait for the next change while the watch has not reached the newest key.
const HISTORY_TIMEOUT: Duration = Duration::from_secs(10);

/// Calls `see` for every change in a range, from a revision up to the present.
async fn visit_changes_since(
    store: &dyn Store,
    range: &Range,
    from: Revision,
    mut see: impl FnMut(&Batch) + Send,
) -> kv::Result<()> {
    let listing = store.list_at(range.clone(), Revision::UNSET, Content::KeysOnly).await?;
    let newest = listing.kvs.iter().map(|kv| kv.mod_revision).max().unwrap_or(Revision::UNSET);
    let mut reported = Revision::UNSET;
    let mut changes = store.watch(WatchRequest::new(range.clone(), from).with_prev(Prev::Return)).await?;
    while reported < listing.revision {
        let is_there = reported >= newest || newest < from;
        match timeout(if is_there { QUIET_INTERVAL } else { HISTORY_TIMEOUT }, changes.next()).await {
            Ok(Some(batch)) => {
                let batch = batch?;
                reported = batch.revision;
                see(&batch);
            }
            Ok(None) => return Ok(()),
            Err(_) if is_there => return Ok(()),
            Err(_) => {
                let error = kv::Error::new(ErrorKind::Timeout, Operation::Watch, "history");
                return Err(error.with_detail("the store tells no more of its history; try again"));
            }
        }
    }
    Ok(())
}
