//! The changes of a store, as a stream of server-sent events.
//!
//! Nothing is read ahead: the next change is taken from the store's watch after the client has taken the one before.

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
use ipam_core::timestamps::rfc3339;
use ipam_operator::events::{EventRow, Happening, of_batch};
use ipam_operator::history::time_of;
use kv::{Batch, Content, ErrorKind, Prev, Range, RangeRequest, Revision, Store, WatchRequest, WatchStream};
use serde::Serialize;
use tokio::time::{sleep, timeout};

use super::super::Shown;
use super::super::answer::{Answer, Failure};
use super::Query;

/// The most events of one revision in an answer.
const MOST: usize = 200;
/// The most revisions that a client may go back.
const MOST_RECENT: i64 = 1000;
/// The pause after a watch has ended.
const PAUSE: Duration = Duration::from_secs(1);

/// A change of several addresses at once.
#[derive(Serialize)]
struct Reported {
    revision: i64,
    time: Option<String>,
    events: Vec<EventRow>,
    /// The number of those that are left out.
    more: usize,
}

#[derive(Serialize)]
struct At<'a> {
    revision: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// The keys of blocks, affinities, pools and reservations, and of some others between them.
fn range() -> Range {
    let (first, last) = (keys::ipam_prefix(), keys::resources_prefix(ResourceKind::IpReservation));
    last.prefix_end().map_or(Range::Prefix(first.clone()), |end| Range::FromTo(first, end))
}

/// The place from which a client wants to go on.
enum Start {
    /// After this revision, which it has seen.
    After(Revision),
    /// With the newest revisions, as many as this.
    Recent(i64),
}

impl Start {
    fn of(request: &Request<Incoming>, query: &Query) -> Result<Self, Failure> {
        let seen = request.headers().get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
        let after = if query.get("after").is_some() { Some(query.parsed("after")?) } else { None };
        let recent = if query.get("recent").is_some() { query.parsed("recent")? } else { 0 };
        Ok(match seen.or(after) {
            Some(revision) => Self::After(Revision::new(revision)),
            None => Self::Recent(i64::clamp(recent, 0, MOST_RECENT)),
        })
    }
}

/// The stream of events.
pub(super) async fn answer(shown: &Shown, request: &Request<Incoming>, query: &Query) -> Result<Answer, Failure> {
    let follower = Follower::begin(&shown.store, Start::of(request, query)?, shown.limits.heartbeat).await?;
    let frames = unfold(follower, |mut follower| async move {
        let frame = follower.next().await?;
        Some((Ok::<_, Infallible>(Frame::data(frame)), follower))
    });
    let mut answer = Response::new(StreamBody::new(frames).boxed_unsync());
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    Ok(answer)
}

/// A client that follows.
struct Follower {
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

/// The first of the newest `count` revisions that the store still has.
async fn readable(store: &dyn Store, head: Revision, count: i64) -> kv::Result<Revision> {
    let wanted = Revision::new((head.get() - count + 1).max(1));
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly).with_at(wanted);
    match store.range(request).await.map_err(|error| error.kind().clone()) {
        Ok(_) | Err(ErrorKind::FutureRevision) => Ok(wanted),
        Err(ErrorKind::Compacted { compact_revision }) if compact_revision.is_set() => Ok(compact_revision.next()),
        Err(_) => Ok(head.next()),
    }
}

impl Follower {
    async fn begin(store: &Arc<dyn Store>, start: Start, heartbeat: Duration) -> Result<Self, Failure> {
        let head = newest(&**store).await?;
        let mut follower = Self {
            store: Arc::clone(store),
            changes: futures::stream::pending().boxed(),
            ready: VecDeque::new(),
            heartbeat,
        };
        follower.ready.push_back(Bytes::from_static(b"retry: 2000\n\n"));
        follower.ready.push_back(event("ready", None, &At { revision: head.get(), reason: None }));
        let first = match start {
            Start::After(seen) if seen > head => {
                follower.tell_reset(head, "another store has taken the place of this one");
                head.next()
            }
            Start::After(seen) => seen.next(),
            // A client that begins has missed nothing, even if little of the past is left.
            Start::Recent(count) => readable(&**store, head, count).await?,
        };
        follower.changes = watch(&**store, first).await?;
        Ok(follower)
    }

    /// The first revision from `wanted` on that the store still has.
    /// The next piece of the stream; `None` to end it.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Some(ready);
            }
            match timeout(self.heartbeat, self.changes.next()).await {
                Err(_) => return Some(Bytes::from_static(b": nothing happened\n\n")),
                Ok(Some(Ok(batch))) => self.ready.extend(reported(&batch)),
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

    /// Says that something may be missing, and goes on with the next change.
    async fn reset(&mut self, reason: &str) -> Option<()> {
        sleep(PAUSE).await;
        let head = newest(&*self.store).await.ok()?;
        self.changes = watch(&*self.store, head.next()).await.ok()?;
        self.tell_reset(head, reason);
        Some(())
    }

    fn tell_reset(&mut self, head: Revision, reason: &str) {
        let at = At { revision: head.get(), reason: Some(reason) };
        self.ready.push_back(event("reset", Some(head), &at));
    }
}

/// A batch, if it is about anything that the page shows.
fn reported(batch: &Batch) -> Option<Bytes> {
    let resources = [ResourceKind::IpPool, ResourceKind::IpReservation];
    let is_resource = |key| resources.iter().any(|kind| keys::parse_resource(*kind, key).is_some());
    let reported = of_batch(batch);
    let concerns = batch.events.iter().any(|event| is_resource(&event.kv.key));
    if reported.happenings.is_empty() && reported.unreported.is_empty() && !concerns {
        return None;
    }
    let row = |one: &Happening| EventRow::happened(batch.revision, time_of(batch.time, &one.what), one);
    let document = Reported {
        revision: batch.revision.get(),
        time: batch.time.map(|time| rfc3339(time.into())),
        events: reported.happenings.iter().take(MOST).map(row).collect(),
        more: reported.happenings.len().saturating_sub(MOST),
    };
    Some(event("batch", Some(batch.revision), &document))
}

/// An event as it goes over the wire. JSON has no line feeds.
fn event(name: &str, id: Option<Revision>, document: &impl Serialize) -> Bytes {
    let data = serde_json::to_string(document).unwrap_or_default();
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    format!("event: {name}\n{id}data: {data}\n\n").into()
}
