//! Opening and making a store on disk, and its table, which holds the lock of the store and whose engine may panic.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Purpose, Result};
use kv_mvcc::journal::JournaledTable;
use kv_mvcc::{
    Blocking, Clock, ENGINE_GAVE_UP, FORMAT, Inspection, MvccStore, Options, Retention, SpaceReserve, Table, View,
    Visit, Write,
};
use uuid::Uuid;

use super::errors::StoreLabel;
use super::folder;
use super::queue::StoreLock;
use super::reserved_space::ReservedSpace;
use super::revision_file::RevisionFile;
use super::store_folder::{FolderContents, StoreFolder};

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
    fn log(&self) -> CommitLog;

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
    fn shrink(&self, entry: &Path, store: &str) -> Result<SpareSpace> {
        let (_, _) = (entry, store);
        Ok(SpareSpace::Kept)
    }
}

/// The mechanism that makes the commits of an engine durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitLog {
    /// A [journal](kv_mvcc::journal) in front of it.
    Journal,
    /// A log of its own.
    Own,
}

/// The fate of the room that an engine's files do not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpareSpace {
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
const OPEN_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// How long that may take. A process that has them longer did not hold the lock.
const OPEN_RETRY_TIMEOUT: Duration = Duration::from_secs(1);

/// The id that `store.id` must have, or will get.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpectedId {
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
                    && folder.reserved_space.release_part() => {}
            opened => return opened,
        }
    }
}

fn open_once(engine: &dyn Engine, folder: &StoreFolder, options: &OpenOptions) -> Result<MvccStore> {
    let lock = folder.take_lock(options)?;
    let expects = match (folder.inspect()?, options.create) {
        (FolderContents::Complete(id), _) => ExpectedId::This(id),
        (FolderContents::Unnamed, _) => ExpectedId::Any,
        (FolderContents::Nothing | FolderContents::Unfinished, Create::Never) => return Err(folder.label.missing()),
        (FolderContents::Nothing | FolderContents::Unfinished, Create::IfMissing) => {
            folder.begin_creation()?;
            ExpectedId::New
        }
    };
    let entry = folder.path(engine.entry());
    let revision_file = Arc::new(folder.open_revision_file()?);
    let inspection = if revision_file.is_as_left() { Inspection::Newest } else { Inspection::Entries };
    let table = open_engine(engine, &entry, folder, options.wait)?;
    let newest_seen = revision_file.seen();
    let reserved_space = Arc::clone(&folder.reserved_space);
    let reserve: Arc<dyn SpaceReserve> = Arc::clone(&folder.reserved_space) as _;
    let table = match engine.log() {
        CommitLog::Journal => Box::new(journaled(folder, Arc::clone(&revision_file), table)?),
        CommitLog::Own => table,
    };
    let table = LockedTable::new(table, folder.label.clone(), Arc::clone(&revision_file), reserved_space, lock);
    let restricted = folder::restrict_all(&entry);
    match expects {
        ExpectedId::New => folder.io(engine.entry(), restricted)?,
        // Somebody who may use the store without owning it cannot change that.
        ExpectedId::This(_) | ExpectedId::Any => drop(restricted),
    }
    if expects == ExpectedId::Any && is_empty(&table)? {
        return Err(folder.label.damaged("its file store.id and all its rows are gone"));
    }
    let store = MvccStore::open(
        Box::new(table),
        Options {
            name: engine.name(),
            retention: options.retention,
            clock: options.clock.clone(),
            blocking: options.blocking,
            expected_id: match expects {
                ExpectedId::This(id) => Some(id),
                ExpectedId::Any | ExpectedId::New => None,
            },
            inspection,
            purpose: options.purpose,
            reserve: Some(reserve),
            format: options.format,
        },
    )
    .map_err(|error| folder.label.advise(error))?;
    let newest = store.status().revision;
    if newest.get().cast_unsigned() < newest_seen {
        return Err(folder.label.regressed(newest, newest_seen));
    }
    if !matches!(expects, ExpectedId::This(_)) {
        folder.name(store.id())?;
    }
    folder.remove_marker()?;
    revision_file.set_in_order();
    Ok(store)
}

/// The table behind its journal.
pub(crate) fn journaled(
    folder: &StoreFolder,
    revision_file: Arc<RevisionFile>,
    table: Box<dyn Table>,
) -> Result<JournaledTable> {
    if caught(&folder.label, Operation::Open, || JournaledTable::has_begun(&*table))? {
        folder.check_journal()?;
    }
    let journal = Box::new(folder.open_journal(revision_file)?);
    caught(&folder.label, Operation::Open, || JournaledTable::open(table, journal, &folder.label.store))
}

/// Opens the engine, of which we have the lock. If it is locked all the same, the kernel is still ending the
/// former lock holder, and closes the files of a process one after the other: it will not take long.
fn open_engine(engine: &dyn Engine, entry: &Path, folder: &StoreFolder, wait: Duration) -> Result<Box<dyn Table>> {
    let (begun, patience) = (Instant::now(), wait.min(OPEN_RETRY_TIMEOUT));
    loop {
        match caught(&folder.label, Operation::Open, || engine.open(entry, &folder.label.store)) {
            Err(error) if *error.kind() == ErrorKind::Locked && begun.elapsed() < patience => {
                thread::sleep(OPEN_RETRY_INTERVAL);
            }
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
/// Engines panic on some damaged files; here that becomes `Corrupt`. Each commit leaves its revision in `revision_file`. On drop the engine
/// closes first, then the lock is released.
#[derive(Debug)]
struct LockedTable {
    table: Option<Box<dyn Table>>,
    label: StoreLabel,
    revision_file: Arc<RevisionFile>,
    reserved_space: Arc<ReservedSpace>,
    // Below `table`, since fields are dropped in this order.
    _lock: StoreLock,
}

impl LockedTable {
    pub(crate) fn new(
        table: Box<dyn Table>,
        label: StoreLabel,
        revision_file: Arc<RevisionFile>,
        reserved_space: Arc<ReservedSpace>,
        lock: StoreLock,
    ) -> Self {
        Self { table: Some(table), label, revision_file, reserved_space, _lock: lock }
    }

    fn table(&self, operation: Operation) -> Result<&dyn Table> {
        // Only a drop takes it away.
        self.table.as_deref().ok_or_else(|| Error::new(ErrorKind::Closed, operation, self.label.store.clone()))
    }
}

impl Table for LockedTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        let table = self.table(Operation::Range)?;
        let view = caught(&self.label, Operation::Range, || table.view())?;
        Ok(Box::new(LockedView { view: Some(view), label: &self.label }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let table = self.table(Operation::Txn)?;
        let result = caught(&self.label, Operation::Txn, || table.commit(writes));
        match result {
            Ok(()) => self.revision_file.note(writes),
            Err(_) => self.revision_file.set_in_doubt(),
        }
        result
    }

    fn recover(&self) -> Result<()> {
        let table = self.table(Operation::Open)?;
        caught(&self.label, Operation::Open, || table.recover())?;
        self.revision_file.set_in_order();
        Ok(())
    }
}

impl Drop for LockedTable {
    fn drop(&mut self) {
        let table = self.table.take();
        // There is nobody to tell, and nothing is lost: what was committed is durable.
        let closed = kv_mvcc::caught(|| drop(table));
        self.reserved_space.refill();
        if let Err(error) = folder::give_to_owner(&self.label.folder) {
            tracing::warn!(%error, store = self.label.store, "what root made here stays root's: its owner may be kept out");
        }
        // This changes their times, too, so it comes after.
        if closed.is_some() {
            self.revision_file.close_cleanly();
        }
    }
}

struct LockedView<'a> {
    view: Option<Box<dyn View + 'a>>,
    label: &'a StoreLabel,
}

impl LockedView<'_> {
    fn view(&self) -> Result<&dyn View> {
        self.view.as_deref().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Range, self.label.store.clone()))
    }
}

impl View for LockedView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let view = self.view()?;
        caught(self.label, Operation::Range, || view.get(key))
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        let view = self.view()?;
        caught(self.label, Operation::Range, || view.scan(from, to, visit))
    }
}

impl Drop for LockedView<'_> {
    fn drop(&mut self) {
        let view = self.view.take();
        let _ = kv_mvcc::caught(|| drop(view));
    }
}

/// Runs `f`; its panic is the engine's word for damage. Damage comes with advice.
pub(crate) fn caught<T>(label: &StoreLabel, operation: Operation, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let gave_up = || Error::new(ErrorKind::Corrupt, operation, label.store.clone()).with_source(ENGINE_GAVE_UP);
    kv_mvcc::caught(f).unwrap_or_else(|| Err(gave_up())).map_err(|error| label.advise(error))
}
