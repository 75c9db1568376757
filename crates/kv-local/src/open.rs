//! Opening and making a store on disk, and its table, which holds the lock of the store and whose engine may panic.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Purpose, Result};
use kv_mvcc::journal::Journaled;
use kv_mvcc::{
    Blocking, Clock, ENGINE_GAVE_UP, FORMAT, Inspection, MvccStore, Options, Reserve, Retention, Table, View, Visit,
    Write,
};
use uuid::Uuid;

use super::ballast::Ballast;
use super::errors::Place;
use super::folder;
use super::head::Head;
use super::queue::StoreLock;
use super::store_folder::{Found, StoreFolder};

/// An engine that keeps a table in a store's folder.
pub trait Engine: Send + Sync {
    /// Its name. A store in Margay's programs has this name as its `datastore_type`.
    fn name(&self) -> &'static str;

    /// The name of its one file or folder in the store's folder. An engine with drafts or several files has a folder.
    fn entry(&self) -> &'static str;

    /// The files that hold its data and are never empty, relative to the store's folder; at least one for an engine that keeps data.
    fn files(&self) -> &'static [&'static str];

    /// The mechanism that makes its commits durable: a journal for an engine that syncs more than once for a commit, else the
    /// engine's own log.
    fn log(&self) -> Log;

    /// Opens the table at `entry`, an absolute path, and makes it if it is not there; `store` names it in errors.
    ///
    /// The caller has the lock of the store, catches panics, and refuses commits after a failed one. With a journal, what
    /// the table shows need not be durable until a commit is: the caller makes one before it shows anything that may be lost.
    ///
    /// # Errors
    /// `Corrupt`, `Io`, `NoSpace`, `Locked`, `UnknownFormat`.
    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>>;

    /// Makes its files at `entry` as small as it can; they are not open, and the caller has the lock.
    ///
    /// An engine that can must see to it that it can be killed meanwhile. By itself, an engine cannot.
    ///
    /// # Errors
    /// As [`Engine::open`].
    fn shrink(&self, entry: &Path, store: &str) -> Result<Room> {
        let (_, _) = (entry, store);
        Ok(Room::Kept)
    }
}

/// The mechanism that makes the commits of an engine durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// A [journal](kv_mvcc::journal) in front of it.
    Journal,
    /// A log of its own.
    Own,
}

/// The fate of the room that an engine's files do not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// It was returned to the file system.
    GivenBack,
    /// The engine keeps it, to use it again itself.
    Kept,
}

/// Whether a store that is not there is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// It is an error, and nothing is written.
    Never,
    /// It is made.
    IfMissing,
}

impl Create {
    /// The options with this answer to whether a missing store is made, and this limit on the wait for the store lock.
    pub fn with_wait(self, wait: Duration) -> OpenOptions {
        OpenOptions::default().with_create(self).with_wait(wait)
    }
}

/// How a store is shared with other processes while this one has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// An embedded one is this process's own until it is closed. A daemon that has it hands it over for that.
    #[default]
    Alone,
    /// Through the daemon that has it. Without a daemon, as `Alone`.
    Served,
    /// Through the daemon that has it. Without a daemon, an embedded one is given to a process that waits, between two calls.
    InTurns,
    /// Through the daemon that has it. Without a daemon, an embedded one is given to others when this process says so.
    OnRequest,
}

/// How to open a store on disk.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Whether a store that is not there is made.
    pub create: Create,
    /// How long to wait for the store lock while other processes have the store.
    pub wait: Duration,
    /// How much history is kept.
    pub retention: Retention,
    /// Where the times of revisions come from.
    pub clock: Clock,
    /// Where work that blocks is done.
    pub blocking: Blocking,
    /// The purpose for which the store is opened.
    pub purpose: Purpose,
    /// The format that a store gets that is made.
    pub format: u32,
    /// How the store is shared. That is for programs: a driver opens it for this process alone.
    pub sharing: Sharing,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            create: Create::Never,
            wait: Duration::from_secs(10),
            retention: Retention::default(),
            clock: Clock::system(),
            blocking: Blocking::default(),
            purpose: Purpose::default(),
            format: FORMAT,
            sharing: Sharing::default(),
        }
    }
}

impl OpenOptions {
    /// With this answer to whether a missing store is made.
    #[must_use]
    pub fn with_create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// With this limit on the wait for the store lock.
    #[must_use]
    pub fn with_wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// With these bounds on the history that is kept.
    #[must_use]
    pub fn with_retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Shared like this.
    #[must_use]
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// With this answer to where work that blocks is done.
    #[must_use]
    pub fn with_blocking(mut self, blocking: Blocking) -> Self {
        self.blocking = blocking;
        self
    }

    /// For this purpose.
    #[must_use]
    pub fn with_purpose(mut self, purpose: Purpose) -> Self {
        self.purpose = purpose;
        self
    }

    /// With this format for a store that is made.
    #[must_use]
    pub fn with_format(mut self, format: u32) -> Self {
        self.format = format;
        self
    }

    /// With this source of time.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }
}

/// How soon an engine is tried again whose files are about to be given up.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long that may take. A process that has them longer did not hold the lock.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(1);

/// The id that `store.id` must have, or will get.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expects {
    /// This store and no other.
    This(Uuid),
    /// Nothing: it was lost, and what the table says counts.
    Any,
    /// Nothing: the store is new.
    New,
}

/// Opens the store of `engine` in the folder `path`, on a thread that may block; see [`open_blocking`].
///
/// # Errors
/// Those of [`open_blocking`].
pub async fn open(engine: impl Engine + 'static, path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    let (name, path, options) = (engine.name(), path.to_owned(), options.clone());
    let blocking = options.blocking;
    blocking
        .run(move || open_blocking(&engine, &path, &options))
        .await
        .unwrap_or_else(|error| Err(Error::new(ErrorKind::Io, Operation::Open, name).with_source(error)))
}

/// Waits for the store lock and opens the store of `engine` in the folder `path`, or makes it. The lock is released when the store
/// is closed or its last handle dropped.
///
/// # Errors
/// `Missing` if there is none and the options do not make one; `Locked` if the lock was not free in time; `Corrupt` if the store
/// is damaged, which is left as it is; `RevisionRegressed` if its newest revisions are gone; `Unsupported` if the folder holds something else; `UnknownFormat` for a later
/// version's store; `Io` and `NoSpace`. Each says what to do.
pub fn open_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    let folder = StoreFolder::new(engine, path);
    loop {
        match open_once(engine, &folder, options) {
            // An engine that writes when it is opened: a release makes room for that, too. It needs no lock for it, since only
            // the length of a file changes that holds nothing.
            Err(error)
                if *error.kind() == ErrorKind::NoSpace
                    && options.purpose == Purpose::Release
                    && folder.ballast.give_up() => {}
            opened => return opened,
        }
    }
}

fn open_once(engine: &dyn Engine, folder: &StoreFolder, options: &OpenOptions) -> Result<MvccStore> {
    let lock = folder.take_lock(options)?;
    let expects = match (folder.inspect()?, options.create) {
        (Found::Complete(id), _) => Expects::This(id),
        (Found::Unnamed, _) => Expects::Any,
        (Found::Nothing | Found::Unfinished, Create::Never) => return Err(folder.place.missing()),
        (Found::Nothing | Found::Unfinished, Create::IfMissing) => {
            folder.begin_creation()?;
            Expects::New
        }
    };
    let entry = folder.path(engine.entry());
    let head = Arc::new(folder.open_head()?);
    let inspection = if head.is_as_left() { Inspection::Newest } else { Inspection::Entries };
    let table = open_engine(engine, &entry, folder, options.wait)?;
    let newest_seen = head.seen();
    let ballast = Arc::clone(&folder.ballast);
    let reserve: Arc<dyn Reserve> = Arc::clone(&folder.ballast) as _;
    let table = match engine.log() {
        Log::Journal => Box::new(journaled(folder, Arc::clone(&head), table)?),
        Log::Own => table,
    };
    let table = Guarded::new(table, folder.place.clone(), Arc::clone(&head), ballast, lock);
    let restricted = folder::restrict_all(&entry);
    match expects {
        Expects::New => folder.io(engine.entry(), restricted)?,
        // Somebody who may use the store without owning it cannot change that.
        Expects::This(_) | Expects::Any => drop(restricted),
    }
    if expects == Expects::Any && is_empty(&table)? {
        return Err(folder.place.damaged("its file store.id and all its rows are gone"));
    }
    let store = MvccStore::open(
        Box::new(table),
        Options {
            name: engine.name(),
            retention: options.retention,
            clock: options.clock.clone(),
            blocking: options.blocking,
            expected_id: match expects {
                Expects::This(id) => Some(id),
                Expects::Any | Expects::New => None,
            },
            inspection,
            purpose: options.purpose,
            reserve: Some(reserve),
            format: options.format,
        },
    )
    .map_err(|error| folder.place.advise(error))?;
    let newest = store.status().revision;
    if newest.get().cast_unsigned() < newest_seen {
        return Err(folder.place.regressed(newest, newest_seen));
    }
    if !matches!(expects, Expects::This(_)) {
        folder.name(store.id())?;
    }
    folder.remove_marker()?;
    head.set_in_order();
    Ok(store)
}

/// The table behind its journal.
pub(crate) fn journaled(folder: &StoreFolder, head: Arc<Head>, table: Box<dyn Table>) -> Result<Journaled> {
    if caught(&folder.place, Operation::Open, || Journaled::has_begun(&*table))? {
        folder.check_journal()?;
    }
    let journal = Box::new(folder.open_journal(head)?);
    caught(&folder.place, Operation::Open, || Journaled::open(table, journal, &folder.place.store))
}

/// Opens the engine, of which we have the lock. If it is locked all the same, the kernel is still ending the
/// former lock holder, and closes the files of a process one after the other: it will not take long.
fn open_engine(engine: &dyn Engine, entry: &Path, folder: &StoreFolder, wait: Duration) -> Result<Box<dyn Table>> {
    let (begun, patience) = (Instant::now(), wait.min(GIVEN_UP_WITHIN));
    loop {
        match caught(&folder.place, Operation::Open, || engine.open(entry, &folder.place.store)) {
            Err(error) if *error.kind() == ErrorKind::Locked && begun.elapsed() < patience => thread::sleep(LOOK_AGAIN),
            opened => return opened,
        }
    }
}

fn is_empty(table: &dyn Table) -> Result<bool> {
    let mut empty = true;
    table.view()?.scan(&[], &[u8::MAX], &mut |_, _| {
        empty = false;
        ControlFlow::Break(())
    })?;
    Ok(empty)
}

/// A table of an engine on disk.
///
/// Engines panic on some damaged files; here that becomes `Corrupt`. Each commit leaves its revision in `head`. On drop the engine
/// closes first, then the lock is released.
#[derive(Debug)]
struct Guarded {
    table: Option<Box<dyn Table>>,
    place: Place,
    head: Arc<Head>,
    ballast: Arc<Ballast>,
    // Below `table`, since fields are dropped in this order.
    _lock: StoreLock,
}

impl Guarded {
    pub(crate) fn new(
        table: Box<dyn Table>,
        place: Place,
        head: Arc<Head>,
        ballast: Arc<Ballast>,
        lock: StoreLock,
    ) -> Self {
        Self { table: Some(table), place, head, ballast, _lock: lock }
    }

    fn table(&self, operation: Operation) -> Result<&dyn Table> {
        // Only a drop takes it away.
        self.table.as_deref().ok_or_else(|| Error::new(ErrorKind::Closed, operation, self.place.store.clone()))
    }
}

impl Table for Guarded {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        let table = self.table(Operation::Range)?;
        let view = caught(&self.place, Operation::Range, || table.view())?;
        Ok(Box::new(GuardedView { view: Some(view), place: &self.place }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let table = self.table(Operation::Txn)?;
        let result = caught(&self.place, Operation::Txn, || table.commit(writes));
        match result {
            Ok(()) => self.head.note(writes),
            Err(_) => self.head.set_in_doubt(),
        }
        result
    }

    fn recover(&self) -> Result<()> {
        let table = self.table(Operation::Open)?;
        caught(&self.place, Operation::Open, || table.recover())?;
        self.head.set_in_order();
        Ok(())
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let table = self.table.take();
        // There is nobody to tell, and nothing is lost: what was committed is durable.
        let closed = kv_mvcc::caught(|| drop(table));
        self.ballast.take_back();
        if let Err(error) = folder::give_to_owner(&self.place.folder) {
            tracing::warn!(%error, store = self.place.store, "what root made here stays root's: its owner may be kept out");
        }
        // This changes their times, too, so it comes after.
        if closed.is_some() {
            self.head.close_cleanly();
        }
    }
}

struct GuardedView<'a> {
    view: Option<Box<dyn View + 'a>>,
    place: &'a Place,
}

impl GuardedView<'_> {
    fn view(&self) -> Result<&dyn View> {
        self.view.as_deref().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Range, self.place.store.clone()))
    }
}

impl View for GuardedView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let view = self.view()?;
        caught(self.place, Operation::Range, || view.get(key))
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        let view = self.view()?;
        caught(self.place, Operation::Range, || view.scan(from, to, visit))
    }
}

impl Drop for GuardedView<'_> {
    fn drop(&mut self) {
        let view = self.view.take();
        let _ = kv_mvcc::caught(|| drop(view));
    }
}

/// Runs `f`; its panic is the engine's word for damage. Damage comes with advice.
pub(crate) fn caught<T>(place: &Place, operation: Operation, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let gave_up = || Error::new(ErrorKind::Corrupt, operation, place.store.clone()).with_source(ENGINE_GAVE_UP);
    kv_mvcc::caught(f).unwrap_or_else(|| Err(gave_up())).map_err(|error| place.advise(error))
}
