//! Reading the history of a store, and following its changes. An embedded store is read here in several openings: it is
//! opened, read a little, and closed. A store that stays open is read in [`watched`].
//!
//! The reader returns parts: first a state, then every change after it. If the store removed history before it was
//! read, the reader reports that, and the state from which it goes on. A reader of the past goes on at the oldest state.
//! Any other reader goes on at the newest one, and has read all of it before it returns any of it: otherwise a slow caller
//! could lose each state, and never come to the changes after it.

mod watched;

use std::time::SystemTime;

use datastore::maintenance::{self, MvccStore};
use datastore::{OpenStore, served};
use ipam_core::model::keys;
use kv::{Batch, ErrorKind, Key, Kv, Prev, Range, Revision, WatchRequest};

use self::watched::Watched;
use crate::error::{Failure, Result};
use crate::store::{Need, StoreAt};

/// The place at which the reader begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// The oldest state that the store has; the reader goes up to the revision that is the newest one now.
    Oldest,
    /// The newest state.
    Newest,
    /// The first change after the newest state.
    Next,
    /// The first change after this revision.
    After(Revision),
}

/// A part of the history.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// The reader begins at this revision. The state of the revision follows, unless it begins with changes.
    Begins(Revision, Option<SystemTime>),
    /// Some keys with their values at this revision.
    Listed(Revision, Vec<Kv>),
    /// The changes, one revision each, with the former value of each key.
    Happened(Vec<Batch>),
    /// The history after the first revision, up to the second one, was removed unread. The state at the second revision
    /// follows.
    GivenUp(Revision, Revision),
    /// The store cannot be reached, because of this. The caller reads again a little later; the reader goes on here.
    Interrupted(String),
    /// Everything up to this revision was reported. It also follows the last key of a state, unless only the past is read.
    Reached(Revision),
}

/// Why a reader ends.
pub(crate) enum Stop {
    /// The store is not the one that was read before, or is one of its earlier states. The changes after the place that the
    /// reader had reached are no continuation, also if the revision grows beyond that place later.
    Another(Failure),
    /// Anything else.
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Another(failure) | Stop::Failed(failure) => failure,
        }
    }
}

/// The reader.
pub(crate) struct Follower<'l> {
    at: StoreAt<'l>,
    range: Range,
    reader: Reader<'l>,
}

enum Reader<'l> {
    /// It opens the files again and again.
    Embedded(Box<Embedded<'l>>),
    /// It watches a store that others keep open.
    Watched(Box<Watched<'l>>),
}

impl<'l> Follower<'l> {
    /// A reader of this range of a store.
    pub(crate) async fn new(at: StoreAt<'l>, range: Range, start: Start) -> Self {
        let place = Place::Before(start);
        let reader = if at.location.is_shared() {
            Reader::Watched(Box::new(Watched::new(at, range.clone(), place, None)))
        } else {
            Reader::of_files(at, &range, place, None).await
        };
        Self { at, range, reader }
    }

    /// The next parts; possibly none. An embedded store is closed when this returns, and stays open for a few
    /// milliseconds at most while another process waits for it. A watch waits a quarter of a second for changes. When a
    /// daemon has ended, or has begun to keep the store open, the reader goes over from the one to the other.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn read(&mut self) -> Result<Vec<Part>, Stop> {
        let left = match &self.reader {
            Reader::Embedded(one) => one.place_to_leave(),
            Reader::Watched(one) => one.place_to_leave(),
        };
        if let Some((place, id)) = left {
            self.go_on(place, id).await?;
        }
        match &mut self.reader {
            Reader::Embedded(one) => one.read().await,
            Reader::Watched(one) => one.read().await,
        }
    }

    /// Goes on at a place of this store, through its daemon if there is one.
    async fn go_on(&mut self, place: Place, id: Option<String>) -> Result<(), Stop> {
        let next = Reader::of_files(self.at, &self.range, place, id.clone()).await;
        match (&next, &self.reader) {
            (Reader::Embedded(_), Reader::Embedded(_)) => return Ok(()),
            (Reader::Watched(one), _) => check_identity(self.at, id.as_deref(), one.id())?,
            _ => {}
        }
        self.reader = next;
        Ok(())
    }

    /// False if there is certainly nothing new. The caller checks it before it reads on after [`Part::Reached`].
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn is_worth_reading(&self) -> Result<bool> {
        match &self.reader {
            Reader::Embedded(one) => one.is_worth_reading().await,
            Reader::Watched(_) => Ok(true),
        }
    }

    /// Ends the watch until the next read, so that changes do not pile up in memory.
    pub(crate) fn pause(&mut self) {
        if let Reader::Watched(one) = &mut self.reader {
            one.pause();
        }
    }

    /// True if a daemon has the store.
    pub(crate) fn is_served(&self) -> bool {
        matches!(&self.reader, Reader::Watched(one) if !one.id().is_empty())
    }

    /// Closes the store.
    pub(crate) async fn close(self) -> Result<()> {
        match self.reader {
            Reader::Embedded(_) => Ok(()),
            Reader::Watched(one) => one.close().await,
        }
    }
}

impl<'l> Reader<'l> {
    /// A reader of an embedded store with this id, if that is known: through its daemon, or of its files.
    async fn of_files(at: StoreAt<'l>, range: &Range, place: Place, id: Option<String>) -> Self {
        match served::connect(at.location, at.wait).await {
            Some(daemon) => Self::Watched(Box::new(Watched::new(at, range.clone(), place, Some(daemon)))),
            None => Self::Embedded(Box::new(Embedded::new(at, range.clone(), place, id))),
        }
    }
}

/// The place that a reader has reached.
#[derive(Clone, Debug)]
enum Place {
    /// Nothing was read yet.
    Before(Start),
    /// The state at this revision, from this key on.
    State(Revision, Key),
    /// The newest state, because the changes after this revision were removed.
    Lost(Revision),
    /// The changes from this revision on.
    Log(Revision),
}

/// Refuses a place after the newest revision: it is another store's, or one of a state that was lost.
fn check_after(at: StoreAt<'_>, after: Revision, newest: Revision) -> Result<(), Stop> {
    if after <= newest {
        return Ok(());
    }
    let failure = Failure::new(format!("the watch begins after revision {after}, and {at} is only at {newest}"))
        .hint("the store is another one, or was restored; remove the cursor's file to begin with what is in use now");
    Err(Stop::Another(failure))
}

/// Refuses another store than the one that was read before, if that is known.
fn check_identity(at: StoreAt<'_>, known: Option<&str>, found: &str) -> Result<(), Stop> {
    if known.is_none_or(|known| known == found) {
        return Ok(());
    }
    Err(replaced(at))
}

fn replaced(at: StoreAt<'_>) -> Stop {
    let failure = Failure::new(format!("{at} was replaced by another store meanwhile"));
    Stop::Another(failure.hint("begin anew to see what is in it"))
}

impl Place {
    /// The last revision that was read, perhaps in part, or after which the reader begins; unset if it begins with a state.
    fn read(&self) -> Revision {
        match *self {
            Self::Before(Start::After(at)) | Self::State(at, _) | Self::Lost(at) => at,
            Self::Before(_) => Revision::UNSET,
            Self::Log(next) => Revision::new(next.get() - 1),
        }
    }
}

/// The number of bytes of keys and values that one opening reads. They are in memory until they are printed.
const TURN_BYTES: usize = 16 << 20;
/// The number of bytes that a page of a state should have; to read it takes about a millisecond.
const PAGE_BYTES: usize = 256 << 10;

/// The reader of an embedded store.
#[derive(Debug)]
struct Embedded<'l> {
    at: StoreAt<'l>,
    range: Range,
    /// The id of the store; `None` before the first opening.
    id: Option<String>,
    place: Place,
    /// True if only the past is read.
    is_past: bool,
}

impl<'l> Embedded<'l> {
    fn new(at: StoreAt<'l>, range: Range, place: Place, id: Option<String>) -> Self {
        let is_past = matches!(place, Place::Before(Start::Oldest));
        Self { at, range, id, place, is_past }
    }

    /// The place, and the store's id, from which a daemon can go on. The past is read to its end here.
    fn place_to_leave(&self) -> Option<(Place, Option<String>)> {
        let may_leave = !self.is_past && matches!(self.place, Place::Log(_) | Place::Lost(_));
        may_leave.then(|| (self.place.clone(), self.id.clone()))
    }

    async fn is_worth_reading(&self) -> Result<bool> {
        let Place::Log(next) = self.place else { return Ok(true) };
        let newest = maintenance::newest(self.at.location).await.map_err(|error| self.at.explain(error))?;
        // Not only a higher revision counts: another store, with a lower one, may be in its place.
        Ok(newest.is_none_or(|newest| newest.next() != next))
    }

    /// Reads the next parts. A state comes as a whole: the history could move past it while the caller delivers a part.
    async fn read(&mut self) -> Result<Vec<Part>, Stop> {
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
            bytes += part_size(&part);
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
fn part_size(part: &Part) -> usize {
    let of_batch = |batch: &Batch| -> usize {
        batch.events.iter().map(|event| event.kv.size() + event.prev.as_ref().map_or(0, Kv::size)).sum()
    };
    match part {
        Part::Listed(_, kvs) => kvs.iter().map(Kv::size).sum(),
        Part::Happened(batches) => batches.iter().map(of_batch).sum(),
        _ => 0,
    }
}
