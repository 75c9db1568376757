//! Reads the history of a store and follows the store's changes. The type `FilesReader` opens the files of an embedded
//! store for each read, and closes the files after the read. The module [`watch_reader`] reads a store that stays open:
//! etcd, or a store that a daemon has opened.
//!
//! A reader first returns a state of the store, and then every change after this state. If the store compacts changes
//! before the reader has read them, the reader reports a gap. After the reader has reported a gap in the history, it
//! returns a state of the store after the gap. After a gap, a reader that started with `FollowStart::Oldest` returns
//! the oldest state that the store still has. After a gap, a reader that did not start with `FollowStart::Oldest`
//! returns the newest state. The reader reads the whole newest state before it returns any part of the state. A reader
//! that returned the newest state page by page might never reach the later changes, because the store can compact this
//! state while a slow caller handles the first page.

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
    /// The reader starts with the oldest state that the store has. The reader ends at the revision that was the newest
    /// revision when the reader started.
    Oldest,
    Newest,
    Next,
    After(Revision),
}

#[derive(Clone, Debug)]
pub(crate) enum HistoryPart {
    /// The revision of the store at which the reader starts. After `Begins`, the reader returns the state at the start
    /// revision, unless it started with `FollowStart::Next` or `FollowStart::After`.
    Begins(Revision, Option<SystemTime>),
    /// Some keys of the store's state, with their values, and the revision of the state.
    Listed(Revision, Vec<Kv>),
    /// The changes of several revisions, one batch for each revision, with the previous value of each changed key.
    Happened(Vec<Batch>),
    /// The store compacted the changes between the first and the second revision before the reader read these changes.
    /// After `GivenUp(from, to)`, the reader returns the state of the store at `to`.
    GivenUp(Revision, Revision),
    /// The store cannot be reached; the text says why. The caller should call `read` again a little later; the reader
    /// then continues where it stopped.
    Interrupted(String),
    /// The revision up to which the reader has returned all changes. A reader that did not start with
    /// `FollowStart::Oldest` also returns `Reached` after the last key of a state.
    Reached(Revision),
}

pub(crate) enum FollowStop {
    /// The store was replaced by another store, or was reset to an earlier state, since the last read. If the store was
    /// replaced or reset, its changes must not be read as a continuation, even if their revisions are higher than the
    /// last revision that was read.
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

/// Reads the history of a range of keys in a store, and then follows new changes of these keys.
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
    /// Creates a reader for a range of keys. The reader reads through the store's daemon if one runs.
    pub(crate) async fn new(at: StoreAccess<'l>, range: Range, start: FollowStart) -> Self {
        let position = ReadPosition::Before(start);
        let reader = if at.location.is_shared() {
            StoreReader::Watched(Box::new(WatchReader::new(at, range.clone(), position, None)))
        } else {
            StoreReader::of_files(at, &range, position, None).await
        };
        Self { at, range, reader }
    }

    /// Returns the next parts of the history; the list may be empty. An embedded store is closed when this method
    /// returns. While another process waits for the store lock, this method keeps the store open for a few milliseconds
    /// at most. On a cluster or a daemon, this method waits up to 250 ms for changes. When a daemon starts or ends,
    /// this method switches between reading through the daemon and reading the store's files.
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

    /// Replaces the reader by a reader that continues at `position`, and reads through the store's daemon if one runs.
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

    /// Returns false if the store certainly has no new changes. After [`HistoryPart::Reached`], callers must not call
    /// `read` again before `is_worth_reading` returns true.
    ///
    /// # Errors
    /// Any store error.
    pub(crate) async fn is_worth_reading(&self) -> CommandResult<bool> {
        match &self.reader {
            StoreReader::Embedded(one) => one.is_worth_reading().await,
            StoreReader::Watched(_) => Ok(true),
        }
    }

    /// Cancels the watch until the next read, so that unread changes do not accumulate in memory.
    pub(crate) fn pause(&mut self) {
        if let StoreReader::Watched(one) = &mut self.reader {
            one.pause();
        }
    }

    /// True if the reader reads through a daemon of the store.
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
    /// Creates a reader of an embedded store. The reader uses the store's daemon if one runs, or else opens the store's
    /// files. `id` is the expected store id, or `None` if the caller does not know it.
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
    /// The reader is in the middle of a state: the revision of the state, and the next key to read.
    State(Revision, Key),
    /// The store has compacted changes after this revision, so the reader continues with the newest state.
    Lost(Revision),
    /// The next revision whose changes the reader reads.
    Log(Revision),
}

/// Fails if the position `after` is higher than the store's newest revision, which happens if the store was replaced or
/// reset.
fn check_after(at: StoreAccess<'_>, after: Revision, newest: Revision) -> Result<(), FollowStop> {
    if after <= newest {
        return Ok(());
    }
    let failure = CommandFailure::new(format!("the watch begins after revision {after}, and {at} is only at {newest}"))
        .hint(
            "the store was replaced or restored; delete the cursor file, and the next run begins with a list of the \
             addresses in use",
        );
    Err(FollowStop::OtherStore(failure))
}

/// Fails if the id `found` in the store differs from the `known` store id.
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
    /// Returns the last revision that was read, at least in part, or the revision after which the reader starts.
    /// Returns [`Revision::UNSET`] if the reader has not started yet and its start revision is not known.
    fn read(&self) -> Revision {
        match *self {
            Self::Before(FollowStart::After(at)) | Self::State(at, _) | Self::Lost(at) => at,
            Self::Before(_) => Revision::UNSET,
            Self::Log(next) => Revision::new(next.get() - 1),
        }
    }
}

/// Maximum total size in bytes of the keys and values that are read before the store is closed again. The keys and
/// values that are read before the store is closed stay in memory until they are printed.
const MAX_TURN_BYTES: usize = 16 << 20;
/// Target size in bytes of one page of keys and values. Reading one page takes about a millisecond.
const PAGE_BYTES: usize = 256 << 10;

/// Reads an embedded store by opening its files for each read.
#[derive(Debug)]
struct FilesReader<'l> {
    at: StoreAccess<'l>,
    range: Range,
    id: Option<String>,
    position: ReadPosition,
    /// True if the reader started with `FollowStart::Oldest`, and thus ends at the revision that was the newest
    /// revision at its start.
    is_past: bool,
}

impl<'l> FilesReader<'l> {
    fn new(at: StoreAccess<'l>, range: Range, position: ReadPosition, id: Option<String>) -> Self {
        let is_past = matches!(position, ReadPosition::Before(FollowStart::Oldest));
        Self { at, range, id, position, is_past }
    }

    /// Returns the position and the store id with which a daemon can take over the reading. Returns `None` if a daemon
    /// must not take over: while the reader starts or reads a state, and always if the reader started with
    /// `FollowStart::Oldest`.
    fn position_to_leave(&self) -> Option<(ReadPosition, Option<String>)> {
        let may_leave = !self.is_past && matches!(self.position, ReadPosition::Log(_) | ReadPosition::Lost(_));
        may_leave.then(|| (self.position.clone(), self.id.clone()))
    }

    async fn is_worth_reading(&self) -> CommandResult<bool> {
        let ReadPosition::Log(next) = self.position else { return Ok(true) };
        let newest = maintenance::newest(self.at.location).await.map_err(|error| self.at.explain(error))?;
        // Call `read` even if the store's newest revision is below `next`: a lower revision may mean that the store was
        // replaced.
        Ok(newest.is_none_or(|newest| newest.next() != next))
    }

    /// Returns the next parts of the history. The store's newest state is returned in one piece, because it could be
    /// compacted while the caller handles a part of it.
    async fn read(&mut self) -> Result<Vec<HistoryPart>, FollowStop> {
        let mut parts = self.read_turn().await?;
        while !self.is_past && matches!(self.position, ReadPosition::State(..) | ReadPosition::Lost(_)) {
            parts.extend(self.read_turn().await?);
        }
        Ok(parts)
    }

    /// Opens the store, reads the next parts of the history, and closes the store.
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
        // A restored copy of the store's folder has the original's store id, but its revision may be lower than the
        // reader's position.
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
                // The whole newest state of the store is held in memory at once. To save memory, only the block
                // documents of the newest state are kept: they contain every address and its holder.
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

    /// If `error` says that history was compacted, moves the reader's position to the newest state, or to the oldest
    /// state if the reader started with `FollowStart::Oldest`.
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
