//! Reading the history of a store, and following its changes. An embedded store is read here in several openings: it is
//! opened, read a little, and closed. A store that stays open is read in [`watch_reader`].
//!
//! The reader returns parts: first a state, then every change after it. If the store removed history before it was
//! read, the reader reports that, and the state from which it goes on. A reader of the past goes on at the oldest state.
//! Any other reader goes on at the newest one, and has read all of it before it returns any of it: otherwise a slow caller
//! could lose each state, and never come to the changes after it.

mod watch_reader;

use std::time::SystemTime;

use datastore::maintenance::{self, MvccStore};
use datastore::{OpenStore, served};
use ipam_core::model::keys;
use kv::{Batch, ErrorKind, Key, Kv, Prev, Range, Revision, WatchRequest};

use self::watch_reader::WatchReader;
use crate::error::{CommandFailure, Result};
use crate::store::{StoreAccess, StoreUse};

/// The place at which the reader begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FollowStart {
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
pub(crate) enum HistoryPart {
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
pub(crate) enum FollowStop {
    /// The store is not the one that was read before, or is one of its earlier states. The changes after the place that the
    /// reader had reached are no continuation, also if the revision grows beyond that place later.
    OtherStore(CommandFailure),
    /// Anything else.
    Failed(CommandFailure),
}

impl From<CommandFailure> for FollowStop {
    fn from(failure: CommandFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<FollowStop> for CommandFailure {
    fn from(stop: FollowStop) -> Self {
        match stop {
            FollowStop::OtherStore(failure) | FollowStop::Failed(failure) => failure,
        }
    }
}

/// The reader.
pub(crate) struct Follower<'l> {
    at: StoreAccess<'l>,
    range: Range,
    reader: StoreReader<'l>,
}

enum StoreReader<'l> {
    /// It opens the files again and again.
    Embedded(Box<FilesReader<'l>>),
    /// It watches a store that others keep open.
    Watched(Box<WatchReader<'l>>),
}

impl<'l> Follower<'l> {
    /// A reader of this range of a store.
    pub(crate) async fn new(at: StoreAccess<'l>, range: Range, start: FollowStart) -> Self {
        let position = ReadPosition::Before(start);
        let reader = if at.location.is_shared() {
            StoreReader::Watched(Box::new(WatchReader::new(at, range.clone(), position, None)))
        } else {
            StoreReader::of_files(at, &range, position, None).await
        };
        Self { at, range, reader }
    }

    /// The next parts; possibly none. An embedded store is closed when this returns, and stays open for a few
    /// milliseconds at most while another process waits for it. A watch waits a quarter of a second for changes. When a
    /// daemon has ended, or has begun to keep the store open, the reader goes over from the one to the other.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn read(&mut self) -> Result<Vec<HistoryPart>, FollowStop> {
        let left = match &self.reader {
            StoreReader::Embedded(one) => one.position_to_leave(),
            StoreReader::Watched(one) => one.position_to_leave(),
        };
        if let Some((position, id)) = left {
            self.switch_reader(position, id).await?;
        }
        match &mut self.reader {
            StoreReader::Embedded(one) => one.read().await,
            StoreReader::Watched(one) => one.read().await,
        }
    }

    /// Goes on at a place of this store, through its daemon if there is one.
    async fn switch_reader(&mut self, position: ReadPosition, id: Option<String>) -> Result<(), FollowStop> {
        let next = StoreReader::of_files(self.at, &self.range, position, id.clone()).await;
        match (&next, &self.reader) {
            (StoreReader::Embedded(_), StoreReader::Embedded(_)) => return Ok(()),
            (StoreReader::Watched(one), _) => check_identity(self.at, id.as_deref(), one.id())?,
            _ => {}
        }
        self.reader = next;
        Ok(())
    }

    /// False if there is certainly nothing new. The caller checks it before it reads on after [`HistoryPart::Reached`].
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn is_worth_reading(&self) -> Result<bool> {
        match &self.reader {
            StoreReader::Embedded(one) => one.is_worth_reading().await,
            StoreReader::Watched(_) => Ok(true),
        }
    }

    /// Ends the watch until the next read, so that changes do not pile up in memory.
    pub(crate) fn pause(&mut self) {
        if let StoreReader::Watched(one) = &mut self.reader {
            one.pause();
        }
    }

    /// True if a daemon has the store.
    pub(crate) fn is_served(&self) -> bool {
        matches!(&self.reader, StoreReader::Watched(one) if !one.id().is_empty())
    }

    /// Closes the store.
    pub(crate) async fn close(self) -> Result<()> {
        match self.reader {
            StoreReader::Embedded(_) => Ok(()),
            StoreReader::Watched(one) => one.close().await,
        }
    }
}

impl<'l> StoreReader<'l> {
    /// A reader of an embedded store with this id, if that is known: through its daemon, or of its files.
    async fn of_files(at: StoreAccess<'l>, range: &Range, position: ReadPosition, id: Option<String>) -> Self {
        match served::connect(at.location, at.wait).await {
            Some(daemon) => Self::Watched(Box::new(WatchReader::new(at, range.clone(), position, Some(daemon)))),
            None => Self::Embedded(Box::new(FilesReader::new(at, range.clone(), position, id))),
        }
    }
}

/// The place that a reader has reached.
#[derive(Clone, Debug)]
enum ReadPosition {
    /// Nothing was read yet.
    Before(FollowStart),
    /// The state at this revision, from this key on.
    State(Revision, Key),
    /// The newest state, because the changes after this revision were removed.
    Lost(Revision),
    /// The changes from this revision on.
    Log(Revision),
}

/// Refuses a place after the newest revision: it is another store's, or one of a state that was lost.
fn check_after(at: StoreAccess<'_>, after: Revision, newest: Revision) -> Result<(), FollowStop> {
    if after <= newest {
        return Ok(());
    }
    let failure = CommandFailure::new(format!("the watch begins after revision {after}, and {at} is only at {newest}"))
        .hint("the store is another one, or was restored; remove the cursor's file to begin with what is in use now");
    Err(FollowStop::OtherStore(failure))
}

/// Refuses another store than the one that was read before, if that is known.
fn check_identity(at: StoreAccess<'_>, known: Option<&str>, found: &str) -> Result<(), FollowStop> {
    if known.is_none_or(|known| known == found) {
        return Ok(());
    }
    Err(replaced(at))
}

fn replaced(at: StoreAccess<'_>) -> FollowStop {
    let failure = CommandFailure::new(format!("{at} was replaced by another store meanwhile"));
    FollowStop::OtherStore(failure.hint("begin anew to see what is in it"))
}

impl ReadPosition {
    /// The last revision that was read, perhaps in part, or after which the reader begins; unset if it begins with a state.
    fn read(&self) -> Revision {
        match *self {
            Self::Before(FollowStart::After(at)) | Self::State(at, _) | Self::Lost(at) => at,
            Self::Before(_) => Revision::UNSET,
            Self::Log(next) => Revision::new(next.get() - 1),
        }
    }
}

/// The number of bytes of keys and values that one opening reads. They are in memory until they are printed.
const MAX_TURN_BYTES: usize = 16 << 20;
/// The number of bytes that a page of a state should have; to read it takes about a millisecond.
const PAGE_BYTES: usize = 256 << 10;

/// The reader of an embedded store.
#[derive(Debug)]
struct FilesReader<'l> {
    at: StoreAccess<'l>,
    range: Range,
    /// The id of the store; `None` before the first opening.
    id: Option<String>,
    position: ReadPosition,
    /// True if only the past is read.
    is_past: bool,
}

impl<'l> FilesReader<'l> {
    fn new(at: StoreAccess<'l>, range: Range, position: ReadPosition, id: Option<String>) -> Self {
        let is_past = matches!(position, ReadPosition::Before(FollowStart::Oldest));
        Self { at, range, id, position, is_past }
    }

    /// The place, and the store's id, from which a daemon can go on. The past is read to its end here.
    fn position_to_leave(&self) -> Option<(ReadPosition, Option<String>)> {
        let may_leave = !self.is_past && matches!(self.position, ReadPosition::Log(_) | ReadPosition::Lost(_));
        may_leave.then(|| (self.position.clone(), self.id.clone()))
    }

    async fn is_worth_reading(&self) -> Result<bool> {
        let ReadPosition::Log(next) = self.position else { return Ok(true) };
        let newest = maintenance::newest(self.at.location).await.map_err(|error| self.at.explain(error))?;
        // Not only a higher revision counts: another store, with a lower one, may be in its place.
        Ok(newest.is_none_or(|newest| newest.next() != next))
    }

    /// Reads the next parts. A state comes as a whole: the history could move past it while the caller delivers a part.
    async fn read(&mut self) -> Result<Vec<HistoryPart>, FollowStop> {
        let mut parts = self.read_turn().await?;
        while !self.is_past && matches!(self.position, ReadPosition::State(..) | ReadPosition::Lost(_)) {
            parts.extend(self.read_turn().await?);
        }
        Ok(parts)
    }

    /// Opens the store, reads the next parts, and closes it.
    async fn read_turn(&mut self) -> Result<Vec<HistoryPart>, FollowStop> {
        let at = self.at;
        let open = at.open_files(StoreUse::Read).await?;
        at.run_and_close(open, async |open: &OpenStore| self.read_parts(open).await).await
    }

    async fn read_parts(&mut self, open: &OpenStore) -> Result<Vec<HistoryPart>, FollowStop> {
        let Some(store) = open.embedded() else {
            return Err(CommandFailure::new(format!("{} has no history to read", self.at)).into());
        };
        let id = store.id().to_string();
        check_identity(self.at, self.id.as_deref(), &id)?;
        self.id = Some(id);
        // A copy of the store from before has the same id.
        check_after(self.at, self.position.read(), store.status().revision)?;
        let (mut parts, mut bytes) = (Vec::new(), 0);
        loop {
            let part = match self.read_part(store).await {
                Err(error) => self.part_when_compacted(&error).ok_or_else(|| self.at.explain(error))?,
                Ok(part) => part,
            };
            bytes += part_size(&part);
            let listed = if let HistoryPart::Listed(at, _) = part { Some(at) } else { None };
            let mut is_all = matches!(part, HistoryPart::Reached(_));
            parts.push(part);
            if let (Some(at), ReadPosition::Log(_), false) = (listed, &self.position, self.is_past) {
                parts.push(HistoryPart::Reached(at));
                is_all = true;
            }
            if is_all || bytes >= MAX_TURN_BYTES || self.at.has_waiters().await? {
                return Ok(parts);
            }
        }
    }

    /// Reads the next part.
    async fn read_part(&mut self, store: &MvccStore) -> kv::Result<HistoryPart> {
        match self.position.clone() {
            ReadPosition::Before(FollowStart::After(after)) => {
                self.position = ReadPosition::Log(after.next());
                Ok(HistoryPart::Begins(after, None))
            }
            ReadPosition::Before(FollowStart::Oldest) => {
                let oldest = store.oldest().await?;
                self.position = ReadPosition::State(oldest.revision, self.range.bounds().0);
                Ok(HistoryPart::Begins(oldest.revision, oldest.time))
            }
            ReadPosition::Before(start) => {
                let status = store.status();
                self.position = match start {
                    FollowStart::Next => ReadPosition::Log(status.revision.next()),
                    _ => ReadPosition::State(status.revision, self.range.bounds().0),
                };
                Ok(HistoryPart::Begins(status.revision, status.time))
            }
            ReadPosition::Lost(after) => {
                let at = store.status().revision;
                self.position = ReadPosition::State(at, self.range.bounds().0);
                Ok(HistoryPart::GivenUp(after, at))
            }
            ReadPosition::State(at, from) => {
                let page = store.page(from, at, PAGE_BYTES).await?;
                let end = self.range.bounds().1;
                let next = page.next.filter(|next| end.as_ref().is_none_or(|end| next < end));
                self.position = next.map_or(ReadPosition::Log(at.next()), |next| ReadPosition::State(at, next));
                // The newest state stays in memory as a whole, and its blocks say all of it.
                let counts = |kv: &Kv| self.is_past || keys::parse_block(&kv.key).is_some();
                let within = |kv: &Kv| self.range.contains(kv.key.as_bytes()) && counts(kv);
                Ok(HistoryPart::Listed(at, page.kvs.into_iter().filter(within).collect()))
            }
            ReadPosition::Log(next) => {
                let newest = store.status().revision;
                if next > newest {
                    return Ok(HistoryPart::Reached(newest));
                }
                let request = WatchRequest::new(self.range.clone(), next).with_prev(Prev::Return);
                let changes = store.changes(request).await?;
                self.position = ReadPosition::Log(changes.next);
                Ok(HistoryPart::Happened(changes.batches))
            }
        }
    }

    /// Goes on at the newest state if an error says that the next revision was compacted; in the past, at the oldest state.
    fn part_when_compacted(&mut self, error: &kv::Error) -> Option<HistoryPart> {
        let ErrorKind::Compacted { compact_revision: mark } = *error.kind() else { return None };
        let read = self.position.read();
        if self.is_past {
            self.position = ReadPosition::State(mark, self.range.bounds().0);
            return Some(HistoryPart::GivenUp(read, mark));
        }
        self.position = ReadPosition::Lost(read);
        Some(HistoryPart::Happened(Vec::new()))
    }
}

/// The approximate size of a part in memory, in bytes.
fn part_size(part: &HistoryPart) -> usize {
    let of_batch = |batch: &Batch| -> usize {
        batch.events.iter().map(|event| event.kv.size() + event.prev.as_ref().map_or(0, Kv::size)).sum()
    };
    match part {
        HistoryPart::Listed(_, kvs) => kvs.iter().map(Kv::size).sum(),
        HistoryPart::Happened(batches) => batches.iter().map(of_batch).sum(),
        _ => 0,
    }
}
