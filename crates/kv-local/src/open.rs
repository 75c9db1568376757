//! Opens and creates stores in folders on disk. The table of an open store owns the store lock, and converts the
//! engine's panics to errors.

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

/// A database library that keeps a table of ordered rows in a store's folder.
pub trait Engine: Send + Sync {
    /// The engine's name. Margay's programs also use the engine's name as the `datastore_type` of its stores.
    fn name(&self) -> &'static str;

    /// The name of the engine's only file or folder in the store's folder. An engine that has several files or
    /// temporary files keeps all of them in one folder with the name `entry`.
    fn entry(&self) -> &'static str;

    /// The engine's data files that are never empty, as paths relative to the store's folder. `files` returns an empty
    /// list only if the engine keeps no data on disk.
    fn files(&self) -> &'static [&'static str];

    /// How commits of the engine become durable. Choose `Journal` for an engine that needs more than one sync per
    /// commit.
    fn log(&self) -> CommitLog;

    /// Opens the engine's table at the absolute path `entry`, or creates a missing table. `store` is the store's name
    /// for error messages.
    ///
    /// The caller holds the store lock, catches panics, and makes no commit after a failed commit. Behind a journal,
    /// the opened table may show rows that are not durable; the caller makes a commit before it shows such rows to
    /// others.
    ///
    /// # Errors
    /// `Corrupt`, `Io`, `NoSpace`, `Locked` or `UnknownFormat`, as the engine reports them.
    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>>;

    /// Shrinks the engine's files at `entry` as much as possible. The caller holds the store lock and has closed the
    /// engine's files.
    ///
    /// The store must lose no data if the process is killed while `shrink` runs. The default implementation of `shrink`
    /// does nothing.
    ///
    /// # Errors
    /// The errors of [`Engine::open`].
    fn shrink(&self, entry: &Path, store: &str) -> Result<SpareSpace> {
        let (_, _) = (entry, store);
        Ok(SpareSpace::Kept)
    }
}

/// How the commits of an engine become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitLog {
    /// A [journal](kv_mvcc::journal) in front of the engine makes commits durable.
    Journal,
    /// The engine's own log makes commits durable.
    Own,
}

/// Whether the engine's files still contain space that the store does not need, after [`Engine::shrink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpareSpace {
    /// The engine has returned all space that the store does not need to the file system.
    GivenBack,
    /// The engine keeps space that the store does not need, for later writes.
    Kept,
}

/// Whether opening a store creates the store if it is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// `open` fails for a missing store, and writes no file.
    Never,
    /// `open` creates a missing store.
    IfMissing,
}

impl Create {
    /// Returns open options with this `Create` value, and with `wait` as the maximum time to wait for the store lock.
    pub fn with_wait(self, wait: Duration) -> OpenOptions {
        OpenOptions::default().with_create(self).with_wait(wait)
    }
}

/// How a process shares a store with other processes while the store is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// This process uses an embedded store alone until it closes the store. A daemon that has the store open hands the
    /// store over to this process.
    #[default]
    Alone,
    /// This process sends its calls to the daemon that has the store open. If no daemon runs, this mode works like
    /// `Alone`.
    Served,
    /// This process sends its calls to the daemon that has the store open. If no daemon runs, this process opens an
    /// embedded store itself, and lets waiting processes use the store between two calls.
    InTurns,
    /// This process sends its calls to the daemon that has the store open. If no daemon runs, this process opens an
    /// embedded store itself, and decides when to release it for other processes.
    OnRequest,
}

/// The options for opening a store on disk.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Whether opening creates the store if it is missing.
    pub create: Create,
    /// Maximum time to wait for the store lock while other processes hold it.
    pub wait: Duration,
    /// The limits on the history that the store keeps.
    pub retention: Retention,
    /// The clock from which the store's revisions get their timestamps.
    pub clock: Clock,
    /// The threads on which the store runs blocking work.
    pub blocking: Blocking,
    /// The purpose of the writes to the opened store.
    pub purpose: Purpose,
    /// The format of the rows of a newly created store.
    pub format: u32,
    /// How programs share the open store with other processes. Drivers of embedded stores ignore the field `sharing`
    /// and open the store for this process alone.
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
    /// Sets whether opening creates the store if it is missing.
    #[must_use]
    pub fn with_create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// Sets the maximum time to wait for the store lock.
    #[must_use]
    pub fn with_wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets the limits on the history that the store keeps.
    #[must_use]
    pub fn with_retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Sets how the store is shared with other processes.
    #[must_use]
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Sets the threads on which the store runs blocking work.
    #[must_use]
    pub fn with_blocking(mut self, blocking: Blocking) -> Self {
        self.blocking = blocking;
        self
    }

    /// Sets the purpose of the writes to the opened store.
    #[must_use]
    pub fn with_purpose(mut self, purpose: Purpose) -> Self {
        self.purpose = purpose;
        self
    }

    /// Sets the format of the rows of a newly created store.
    #[must_use]
    pub fn with_format(mut self, format: u32) -> Self {
        self.format = format;
        self
    }

    /// Sets the clock from which the store's revisions get their timestamps.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }
}

/// Interval between two attempts to open an engine whose files are still locked.
const OPEN_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum time to retry opening an engine whose files are still locked. A process that keeps the engine's files locked
/// beyond this timeout bypasses the queue for the store lock.
const OPEN_RETRY_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpectedId {
    /// The file `store.id` must contain this id; opening fails for any other id.
    This(Uuid),
    /// The file `store.id` was lost, and the id in the table is used.
    Any,
    New,
}

/// Opens the store of `engine` in the folder `path` on a thread that may block (see [`open_blocking`]).
///
/// # Errors
/// The errors of [`open_blocking`].
pub async fn open(engine: impl Engine + 'static, path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    let (name, path, options) = (engine.name(), path.to_owned(), options.clone());
    let blocking = options.blocking;
    blocking
        .run(move || open_blocking(&engine, &path, &options))
        .await
        .unwrap_or_else(|error| Err(Error::new(ErrorKind::Io, Operation::Open, name).with_source(error)))
}

/// Waits for the store lock, then opens or creates the store of `engine` in the folder `path`. The store lock is
/// released when the store is closed or its last handle is dropped.
///
/// # Errors
/// `Missing` if there is no store and the options do not allow creating one; `Locked` if the lock did not become free
/// in time; `Corrupt` if the store is damaged, in which case the store is unchanged; `RevisionRegressed` if the store's
/// newest revisions are gone; `Unsupported` if the folder contains something other than a store; `UnknownFormat` if a
/// later Margay version wrote the store; `Io` and `NoSpace`. Each error message tells the user what to do.
pub fn open_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    let folder = StoreFolder::new(engine, path);
    loop {
        match open_once(engine, &folder, options) {
            // Some engines write to their files while opening. Opening a store with the purpose `Release` frees
            // reserved space if the disk is full. Freeing reserved space needs no lock, because only the length of the
            // file `ballast` changes.
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
        // This user may use the store but cannot change the modes of its files, because another user owns them.
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

/// Opens the engine's table while this process holds the store lock. If the engine's files are still locked, the kernel
/// has not closed all files of the previous lock holder yet, so this function retries for a short time.
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

/// The table of an open store, with the store lock.
///
/// Some engines panic on damaged files; `LockedTable` turns their panics into `Corrupt` errors. A `LockedTable` also
/// records the revision of each commit in the file `head`. Dropping a `LockedTable` closes the engine and then releases
/// the store lock.
#[derive(Debug)]
struct LockedTable {
    table: Option<Box<dyn Table>>,
    label: StoreLabel,
    revision_file: Arc<RevisionFile>,
    reserved_space: Arc<ReservedSpace>,
    // Fields are dropped in order of declaration, so the lock must be declared after `table`.
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
        // The field `table` is `None` only while `drop` runs.
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
        // `drop` cannot return an error of closing the engine, but no data is lost: every commit is durable.
        let closed = kv_mvcc::caught(|| drop(table));
        self.reserved_space.refill();
        if let Err(error) = folder::give_to_owner(&self.label.folder) {
            tracing::warn!(
                %error,
                store = self.label.store,
                "cannot change the owner of files that root created; the store's owner may be unable to open the store"
            );
        }
        // Changing a file's owner changes the file's times, so the fingerprint must be recorded afterwards.
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

/// Runs the closure `f`, which calls the engine. A panic of the engine means that the store is damaged, and becomes a
/// `Corrupt` error. Adds advice for the user to errors about damaged stores.
pub(crate) fn caught<T>(label: &StoreLabel, operation: Operation, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let engine_panicked = || Error::new(ErrorKind::Corrupt, operation, label.store.clone()).with_source(ENGINE_GAVE_UP);
    kv_mvcc::caught(f).unwrap_or_else(|| Err(engine_panicked())).map_err(|error| label.advise(error))
}
