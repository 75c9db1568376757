//! One watch of a gRPC stream: what its client wants of it, and how far it has come.

use etcd_client::proto::{PbEvent, PbResponseHeader, PbWatchResponse};
use futures::stream::AbortHandle;
use kv::{Batch, Event, EventKind, Kv, Revision};
use tokio::sync::OwnedSemaphorePermit;

use crate::convert::key_value;

/// A message of a watch with fragments carries so many bytes of keys and values at the most, or one event.
const FRAGMENT: usize = 1_572_864;
/// `FilterType` and `Event.EventType` of etcd's protocol.
const NO_PUT: i32 = 0;
const NO_DELETE: i32 = 1;
const DELETE: i32 = 1;

/// A watch as its client created it.
#[derive(Debug)]
pub(crate) struct Cursor {
    filters: Vec<i32>,
    fragments: bool,
    /// True if the client gets the watch's progress from time to time.
    pub(crate) reports: bool,
    /// All events up to this revision were sent.
    pub(crate) reached: Revision,
    /// The revision at which a watch of the future begins; unset for any other.
    pub(crate) begin: Revision,
    /// Ends the watch.
    pub(crate) end: AbortHandle,
    /// The room that it takes among all watches.
    _place: OwnedSemaphorePermit,
}

impl Cursor {
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

    /// The messages for the events of one revision; none if the client filters all of them. `header` is of that revision. Entries
    /// from before `oldest`, the oldest revision that can be read, are left out, as with etcd.
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
                    room = FRAGMENT.saturating_sub(size);
                }
            }
        }
        messages
    }

    fn wants(&self, event: &Event) -> bool {
        let filter = if event.kind == EventKind::Put { NO_PUT } else { NO_DELETE };
        !self.filters.contains(&filter)
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        self.end.abort();
    }
}

fn translated(event: Event) -> PbEvent {
    PbEvent {
        r#type: if event.kind == EventKind::Delete { DELETE } else { 0 },
        kv: Some(key_value(event.kv)),
        prev_kv: event.prev.map(key_value),
    }
}
