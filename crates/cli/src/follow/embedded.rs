//! Reading an embedded store in several openings: it is opened, read a little, and closed.

use datastore::OpenStore;
use datastore::care::{self, MvccStore};
use ipam_core::model::keys;
use kv::{Batch, ErrorKind, Kv, Prev, Range, WatchRequest};

use super::{Part, Place, Start, Stop, check_after, check_identity};
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

/// The number of bytes of keys and values that one opening reads. They are in memory until they are printed.
const TURN_BYTES: usize = 16 << 20;
/// The number of bytes that a page of a state should have; to read it takes about a millisecond.
const PAGE_BYTES: usize = 256 << 10;

/// The reader of an embedded store.
#[derive(Debug)]
pub(crate) struct Embedded<'l> {
    at: StoreAt<'l>,
    range: Range,
    /// The id of the store; `None` before the first opening.
    id: Option<String>,
    place: Place,
    /// True if only the past is read.
    is_past: bool,
}

impl<'l> Embedded<'l> {
    pub(super) fn new(at: StoreAt<'l>, range: Range, place: Place, id: Option<String>) -> Self {
        let is_past = matches!(place, Place::Before(Start::Oldest));
        Self { at, range, id, place, is_past }
    }

    /// The place, and the store's id, from which a daemon can go on. The past is read to its end here.
    pub(super) fn place_to_leave(&self) -> Option<(Place, Option<String>)> {
        let may_leave = !self.is_past && matches!(self.place, Place::Log(_) | Place::Lost(_));
        may_leave.then(|| (self.place.clone(), self.id.clone()))
    }

    pub(super) async fn is_worth_reading(&self) -> Result<bool> {
        let Place::Log(next) = self.place else { return Ok(true) };
        let newest = care::newest(self.at.location).await.map_err(|error| self.at.explain(error))?;
        // Not only a higher revision counts: another store, with a lower one, may be in its place.
        Ok(newest.is_none_or(|newest| newest.next() != next))
    }

    /// Reads the next parts. A state comes as a whole: the history could move past it while the caller delivers a part.
    pub(super) async fn read(&mut self) -> Result<Vec<Part>, Stop> {
        let mut parts = self.turn().await?;
        while !self.is_past && matches!(self.place, Place::State(..) | Place::Lost(_)) {
            parts.extend(self.turn().await?);
        }
        Ok(parts)
    }

    /// Opens the store, reads the next parts, and closes it.
    async fn turn(&mut self) -> Result<Vec<Part>, Stop> {
        let at = self.at;
        let open = at.open_files(Need::Read).await?;
        at.and_close(open, async |open: &OpenStore| self.batch(open).await).await
    }

    async fn batch(&mut self, open: &OpenStore) -> Result<Vec<Part>, Stop> {
        let Some(store) = open.embedded() else {
            return Err(Failure::new(format!("{} has no history to read", self.at)).into());
        };
        let id = store.id().to_string();
        check_identity(self.at, self.id.as_deref(), &id)?;
        self.id = Some(id);
        // A copy of the store from before has the same id.
        check_after(self.at, self.place.read(), store.status().revision)?;
        let (mut parts, mut bytes) = (Vec::new(), 0);
        loop {
            let part = match self.part(store).await {
                Err(error) => self.given_up(&error).ok_or_else(|| self.at.explain(error))?,
                Ok(part) => part,
            };
            bytes += size(&part);
            let listed = if let Part::Listed(at, _) = part { Some(at) } else { None };
            let mut is_all = matches!(part, Part::Reached(_));
            parts.push(part);
            if let (Some(at), Place::Log(_), false) = (listed, &self.place, self.is_past) {
                parts.push(Part::Reached(at));
                is_all = true;
            }
            if is_all || bytes >= TURN_BYTES || self.at.somebody_waits().await? {
                return Ok(parts);
            }
        }
    }

    /// Reads the next part.
    async fn part(&mut self, store: &MvccStore) -> kv::Result<Part> {
        match self.place.clone() {
            Place::Before(Start::After(after)) => {
                self.place = Place::Log(after.next());
                Ok(Part::Begins(after, None))
            }
            Place::Before(Start::Oldest) => {
                let oldest = store.oldest().await?;
                self.place = Place::State(oldest.revision, self.range.bounds().0);
                Ok(Part::Begins(oldest.revision, oldest.time))
            }
            Place::Before(start) => {
                let status = store.status();
                self.place = match start {
                    Start::Next => Place::Log(status.revision.next()),
                    _ => Place::State(status.revision, self.range.bounds().0),
                };
                Ok(Part::Begins(status.revision, status.time))
            }
            Place::Lost(after) => {
                let at = store.status().revision;
                self.place = Place::State(at, self.range.bounds().0);
                Ok(Part::GivenUp(after, at))
            }
            Place::State(at, from) => {
                let page = store.page(from, at, PAGE_BYTES).await?;
                let end = self.range.bounds().1;
                let next = page.next.filter(|next| end.as_ref().is_none_or(|end| next < end));
                self.place = next.map_or(Place::Log(at.next()), |next| Place::State(at, next));
                // The newest state stays in memory as a whole, and its blocks say all of it.
                let counts = |kv: &Kv| self.is_past || keys::parse_block(&kv.key).is_some();
                let within = |kv: &Kv| self.range.contains(kv.key.as_bytes()) && counts(kv);
                Ok(Part::Listed(at, page.kvs.into_iter().filter(within).collect()))
            }
            Place::Log(next) => {
                let newest = store.status().revision;
                if next > newest {
                    return Ok(Part::Reached(newest));
                }
                let request = WatchRequest::new(self.range.clone(), next).with_prev(Prev::Return);
                let changes = store.changes(request).await?;
                self.place = Place::Log(changes.next);
                Ok(Part::Happened(changes.batches))
            }
        }
    }

    /// Goes on at the newest state if an error says that the next revision was compacted; in the past, at the oldest state.
    fn given_up(&mut self, error: &kv::Error) -> Option<Part> {
        let ErrorKind::Compacted { compact_revision: mark } = *error.kind() else { return None };
        let read = self.place.read();
        if self.is_past {
            self.place = Place::State(mark, self.range.bounds().0);
            return Some(Part::GivenUp(read, mark));
        }
        self.place = Place::Lost(read);
        Some(Part::Happened(Vec::new()))
    }
}

/// The approximate size of a part in memory, in bytes.
fn size(part: &Part) -> usize {
    let of_batch = |batch: &Batch| -> usize {
        batch.events.iter().map(|event| event.kv.size() + event.prev.as_ref().map_or(0, Kv::size)).sum()
    };
    match part {
        Part::Listed(_, kvs) => kvs.iter().map(Kv::size).sum(),
        Part::Happened(batches) => batches.iter().map(of_batch).sum(),
        _ => 0,
    }
}
