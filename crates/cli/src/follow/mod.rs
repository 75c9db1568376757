//! Reads the history of a store and follows the store's changes. The type `FilesReader` reads the files of an embedded
//! store, and opens and closes the store for each read. [`watch_reader`] reads a store that stays open.
//!
//! A reader returns the history in parts: first a state of the store, then every change after this state. If the store
//! compacts history before the reader has read it, the reader reports the gap and continues with a state. A reader of
//! the past continues with the oldest state. A reader that does not read the past continues with the newest state, and
//! reads all of the newest state before it returns any part. If a reader returned the newest state page by page, this
//! state could be compacted while a slow caller handles the first page, and the reader might never reach the changes
//! after the state.

mod watch_reader;

use std::time::SystemTime;

use datastore::maintenance::{self, MvccStore};
use datastore::{OpenStore, served};
use ipam_core::model::keys;
use kv::{Batch, ErrorKind, Key, Kv, Prev, Range, Revision, WatchRequest};

use self::watch_reader::WatchReader;
use crate::error::{CommandFailure, CommandResult};
use crate::store::{StoreAccess, StoreUse};

/// The position in the history at which a reader starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FollowStart {
    /// The reader starts with the oldest state that the store has. The reader ends at the revision that is the newest
    /// revision at its start.
    Oldest,
    Newest,
    Next,
    After(Revision),
}

#[derive(Clone, Debug)]
pub(crate) enum HistoryPart {
    /// The reader starts at this revision. The state at this revision follows, unless the reader starts with changes.
    Begins(Revision, Option<SystemTime>),
    /// Some keys of a state, with their values at this revision.
    Listed(Revision, Vec<Kv>),
    /// The changes of several revisions, one batch for each revision, with the former value of each changed key.
    Happened(Vec<Batch>),
    /// The history after the first revision, up to the second revision, was compacted before the reader read it. The
    /// state at the second revision follows.
    GivenUp(Revision, Revision),
    /// The store cannot be reached, for the reason in this text. The caller should read again a little later; the
    /// reader then continues where it stopped.
    Interrupted(String),
    /// All changes up to this revision were reported. `Reached` also follows the last key of a state, except in a
    /// reader of the past.
    Reached(Revision),
}

pub(crate) enum FollowStop {
    /// The store is not the store that was read before, or was reset to an earlier state. Changes of a replaced or
    /// reset store do not continue the history that was read, even when the store's revision exceeds the last revision
    /// that was read.
    OtherStore(CommandFailure),
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

/// Reads the history of a range of keys in a store, and follows the changes of these keys.
pub(crate) struct Follower<'l> {
    at: StoreAccess<'l>,
    range: Range,
    reader: StoreReader<'l>,
}

enum StoreReader<'l> {
    /// The reader opens the store's files for each read.
    Embedded(Box<FilesReader<'l>>),
    /// The reader watches a cluster, or a store that a daemon keeps open.
    Watched(Box<WatchReader<'l>>),
}

impl<'l> Follower<'l> {
    /// Creates a reader for a range of keys. The reader uses the store's daemon if one runs.
    pub(crate) async fn new(at: StoreAccess<'l>, range: Range, start: FollowStart) -> Self {
        let position = ReadPosition::Before(start);
        let reader = if at.location.is_shared() {
            StoreReader::Watched(Box::new(WatchReader::new(at, range.clone(), position, None)))
        } else {
            StoreReader::of_files(at, &range, position, None).await
        };
        Self { at, range, reader }
    }

    /// Returns the next parts of the history, or no part. An embedded store is closed when this method returns; while
    /// another process waits for the store, this method keeps the store open for a few milliseconds at most. A watch
    /// waits for changes for 250 ms. When a daemon starts or ends, the reader switches between the daemon and the
    /// store's files.
    ///
    /// # Errors
    /// [`FollowStop::OtherStore`] if the store was replaced or reset; any store error.
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

    /// Continues at a position of this store, through the store's daemon if one runs.
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

    /// Returns false if the store certainly has no new changes. Callers must check for new changes before they read
    /// again after [`HistoryPart::Reached`].
    ///
    /// # Errors
    /// Any store error.
    pub(crate) async fn is_worth_reading(&self) -> CommandResult<bool> {
        match &self.reader {
            StoreReader::Embedded(one) => one.is_worth_reading().await,
            StoreReader::Watched(_) => Ok(true),
        }
    }

    /// Ends the watch until the next read, so that changes do not accumulate in memory.
    pub(crate) fn pause(&mut self) {
        if let StoreReader::Watched(one) = &mut self.reader {
            one.pause();
        }
    }

    /// True if the reader is connected to a daemon of the store.
    pub(crate) fn is_served(&self) -> bool {
        matches!(&self.reader, StoreReader::Watched(one) if !one.id().is_empty())
    }

    pub(crate) async fn close(self) -> CommandResult<()> {
        match self.reader {
            StoreReader::Embedded(_) => Ok(()),
            StoreReader::Watched(one) => one.close().await,
        }
    }
}

impl<'l> StoreReader<'l> {
    /// Creates a reader of an embedded store, which uses the store's daemon if one runs, or else the store's files.
    /// `id` is the store's id, if the caller knows the id.
    async fn of_files(at: StoreAccess<'l>, range: &Range, position: ReadPosition, id: Option<String>) -> Self {
        match served::connect(at.location, at.wait).await {
            Some(daemon) => Self::Watched(Box::new(WatchReader::new(at, range.clone(), position, Some(daemon)))),
            None => Self::Embedded(Box::new(FilesReader::new(at, range.clone(), position, id))),
        }
    }
}

/// The position in the history up to which a reader has read.
#[derive(Clone, Debug)]
enum ReadPosition {
    Before(FollowStart),
    /// The reader is in the middle of the state at this revision, and this key is the next key to read.
    State(Revision, Key),
    /// The newest state is read next, because the changes after this revision were compacted.
    Lost(Revision),
    /// The changes from this revision on are read next.
    Log(Revision),
}

/// Refuses a position after the newest revision, because the store was replaced by another store or reset to an earlier
/// state.
fn check_after(at: StoreAccess<'_>, after: Revision, newest: Revision) -> Result<(), FollowStop> {
    if after <= newest {
        return Ok(());
    }
    let failure = CommandFailure::new(format!("the watch begins after revision {after}, and {at} is only at {newest}"))
        .hint("delete the cursor file to start with the addresses in use now: the store was replaced or restored");
    Err(FollowStop::OtherStore(failure))
}

/// Refuses a store whose id differs from the known store id.
fn check_identity(at: StoreAccess<'_>, known: Option<&str>, found: &str) -> Result<(), FollowStop> {
    if known.is_none_or(|known| known == found) {
        return Ok(());
    }
    Err(replaced(at))
}

fn replaced(at: StoreAccess<'_>) -> FollowStop {
    let failure = CommandFailure::new(format!("{at} was replaced by another store meanwhile"));
    FollowStop::OtherStore(failure.hint("run the command again to watch the new store"))
}

impl ReadPosition {
    /// Returns the last revision that was read, perhaps only in part, or the revision after which the reader starts.
    /// Returns the unset revision if the reader starts with a state.
    fn read(&self) -> Revision {
        match *self {
            Self::Before(FollowStart::After(at)) | Self::State(at, _) | Self::Lost(at) => at,
            Self::Before(_) => Revision::UNSET,
            Self::Log(next) => Revision::new(next.get() - 1),
        }
    }
}

/// Maximum number of bytes of keys and values that are read in one opening of the store. All bytes that one opening
/// reads are in memory until they are printed.
const MAX_TURN_BYTES: usize = 16 << 20;
/// Target size in bytes of one page of a state. Reading one page takes about a millisecond.
const PAGE_BYTES: usize = 256 << 10;

/// Reads an embedded store by opening its files for each read.
#[derive(Debug)]
struct FilesReader<'l> {
    at: StoreAccess<'l>,
    range: Range,
    id: Option<String>,
    position: ReadPosition,
    /// True if the reader ends at the revision that was the newest revision when the reader started.
    is_past: bool,
}

impl<'l> FilesReader<'l> {
    fn new(at: StoreAccess<'l>, range: Range, position: ReadPosition, id: Option<String>) -> Self {
        let is_past = matches!(position, ReadPosition::Before(FollowStart::Oldest));
        Self { at, range, id, position, is_past }
    }

    /// Returns the position and the store id with which a daemon can continue the reading. Returns `None` if this
    /// reader must continue itself, as a reader of the past must.
    fn position_to_leave(&self) -> Option<(ReadPosition, Option<String>)> {
        let may_leave = !self.is_past && matches!(self.position, ReadPosition::Log(_) | ReadPosition::Lost(_));
        may_leave.then(|| (self.position.clone(), self.id.clone()))
    }

    async fn is_worth_reading(&self) -> CommandResult<bool> {
        let ReadPosition::Log(next) = self.position else { return Ok(true) };
        let newest = maintenance::newest(self.at.location).await.map_err(|error| self.at.explain(error))?;
        // A newest revision below `next` also counts as new: another store may have replaced this store.
        Ok(newest.is_none_or(|newest| newest.next() != next))
    }

    /// Returns the next parts of the history. All parts of a state are returned together, because a state could be
    /// compacted while the caller handles only a part of it.
    async fn read(&mut self) -> Result<Vec<HistoryPart>, FollowStop> {
        let mut parts = self.read_turn().await?;
        while !self.is_past && matches!(self.position, ReadPosition::State(..) | ReadPosition::Lost(_)) {
            parts.extend(self.read_turn().await?);
        }
        Ok(parts)
    }

    /// Opens the store, reads the next parts, and closes the store.
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
        // A restored copy of the store's folder has the same store id, but might have a lower revision.
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
                // All of the newest state is held in memory. Only blocks of the newest state are kept, because the
                // blocks contain every address and its holder.
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

    /// Continues with a state if the error says that history was compacted: with the newest state, or in a reader of
    /// the past with the oldest state.
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
