//! Inspects a store without the store lock, shrinks a store, upgrades the format of a store, and replaces a store with
//! a new one.
//!
//! [`peek`] needs no lock, so it works even while another process holds the store lock or hangs while holding it.
//!
//! When a store is replaced, the new store appears at the path of the old store in one step. The new store is built in
//! the folder `PATH.restoring` beside the old store, where no program opens a store. Once the new store is complete, it
//! is renamed to the path of the old store. A process that is killed before the rename leaves `PATH.restoring` behind,
//! and the next replacement removes this folder.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kv::{ErrorKind, Operation, Result, Revision};
use kv_mvcc::FORMAT_WITH_LEASES;
use kv_mvcc::journal::JOURNAL_BYTES;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use uuid::Uuid;

use super::errors::StoreLabel;
use super::folder;
use super::open::{CommitLog, Create, Engine, OpenOptions, SpareSpace, caught, journaled, open_blocking};
use super::queue::{self, StoreLock};
use super::revision_file;
use super::store_folder::{FolderContents, IDENTITY_FILE, Identity, QUEUE_FILE, REVISION_FILE, StoreFolder, is_known};

/// What can be learned about a store without the store lock and without opening the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StorePeek {
    /// The engine that the file `store.id` names; `None` if the file is missing or cannot be read.
    pub engine: Option<String>,
    /// The layout version of the store's folder if this program does not support it; otherwise `None`. The layout
    /// version is not the format of the store's rows.
    pub unknown_layout: Option<u32>,
    /// The store's id; `None` if the file `store.id` is missing or damaged, or has an unknown layout without an id.
    pub id: Option<Uuid>,
    /// The total size of all files in the store's folder, in bytes.
    pub bytes: u64,
    /// The process that has the store lock, if any.
    pub holder: LockHolder,
    /// The number of processes that wait for the store lock.
    pub waiting: usize,
}

/// The process that has the lock of a store, if known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// No process has the store lock.
    None,
    /// A process has the store lock, for example `12345 (margay-ipam)`.
    Process(String),
    /// A process has the store lock but could not be found: it belongs to another user, whose processes only root sees,
    /// or it has just ended.
    Unseen,
}

/// Inspects the store of `engine` in the folder `path`. `peek` opens no file for writing and waits for no lock.
///
/// # Errors
/// `Missing` if there is no store; `Io` if a file cannot be read.
pub fn peek(engine: &dyn Engine, path: &Path) -> Result<StorePeek> {
    let folder = StoreFolder::new(engine, path);
    if !folder.exists(QUEUE_FILE)? && !folder.exists(IDENTITY_FILE)? && !folder.exists(folder.entry)? {
        return Err(folder.label.missing());
    }
    let identity = match fs::read(folder.path(IDENTITY_FILE)) {
        Ok(bytes) => Identity::parse(&String::from_utf8_lossy(&bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(folder.label.io(&folder.path(IDENTITY_FILE), error)),
    };
    let queue = folder.path(QUEUE_FILE);
    let tickets = folder.io(QUEUE_FILE, tickets(&queue))?;
    let holder = match tickets {
        0 => LockHolder::None,
        _ => queue::find_holder(&queue).map_or(LockHolder::Unseen, LockHolder::Process),
    };
    Ok(StorePeek {
        unknown_layout: identity.as_ref().map(|identity| identity.format).filter(|format| !is_known(*format)),
        id: identity.as_ref().map(|identity| identity.id).filter(|id| !id.is_nil()),
        engine: identity.map(|identity| identity.engine),
        bytes: folder.io("", size(&folder.label.folder))?,
        holder,
        waiting: tickets.saturating_sub(1),
    })
}

/// Returns the number of processes that wait for the lock of the store of `engine` in the folder `path`. A process that
/// keeps the store open for long polls the number of waiting processes, and releases the store lock when another
/// process waits. One call of `waiting` costs a few microseconds.
///
/// # Errors
/// `Io` if the queue file cannot be read.
pub fn waiting(engine: &dyn Engine, path: &Path) -> Result<usize> {
    let folder = StoreFolder::new(engine, path);
    Ok(folder.io(QUEUE_FILE, tickets(&folder.path(QUEUE_FILE)))?.saturating_sub(1))
}

/// The open queue file of a store, for a process that polls the queue.
#[derive(Debug)]
pub struct QueueFile {
    queue: File,
}

impl QueueFile {
    /// Opens the queue file of the store in the folder `path`.
    ///
    /// # Errors
    /// `Missing` if there is no store; `Io` if the file cannot be opened.
    pub fn open(engine: &dyn Engine, path: &Path) -> Result<Self> {
        let folder = StoreFolder::new(engine, path);
        Ok(Self { queue: folder.io(QUEUE_FILE, File::open(folder.path(QUEUE_FILE)))? })
    }

    /// Returns the number of processes that hold the store lock or wait for it; 0 if the queue file cannot be read.
    pub fn count(&self) -> usize {
        queue::tickets(&self.queue).map_or(0, |tickets| tickets.len())
    }
}

/// Reads the newest revision of the store of `engine` in the folder `path` without the store lock, for a process that
/// polls for changes. Returns `None` if no file records the newest revision, so that the store must be opened to read
/// it.
///
/// # Errors
/// `Io` if the file `head` cannot be read.
pub fn newest(engine: &dyn Engine, path: &Path) -> Result<Option<Revision>> {
    let folder = StoreFolder::new(engine, path);
    match revision_file::newest(&folder.path(REVISION_FILE)) {
        Ok(newest) => Ok(i64::try_from(newest).ok().filter(|newest| *newest > 0).map(Revision::new)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(folder.label.io(&folder.path(REVISION_FILE), error)),
    }
}

/// Counts the processes in the queue file `queue`; 0 if the file is missing.
fn tickets(queue: &Path) -> io::Result<usize> {
    match File::open(queue) {
        Ok(file) => Ok(queue::tickets(&file)?.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Returns the total size of all files in a folder and its subfolders, in bytes. Files that are removed while `size`
/// runs do not count.
fn size(path: &Path) -> io::Result<u64> {
    let gone = |error: io::Error| if error.kind() == io::ErrorKind::NotFound { Ok(0) } else { Err(error) };
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => return Ok(metadata.len()),
        Ok(_) => {}
        Err(error) => return gone(error),
    }
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) => return gone(error),
    };
    let mut bytes = 0;
    for entry in entries {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() || kind.is_file() {
            bytes += size(&entry.path())?;
        }
    }
    Ok(bytes)
}

/// Free disk space in bytes that a new store needs in addition to its journal. The size of the file `ballast` is not
/// included, because a store also works without `ballast`.
const MIN_FREE_DISK_BYTES: u64 = 64 << 10;

/// Waits for the store lock, then shrinks the files of the store of `engine` in the folder `path` as far as the engine
/// can.
///
/// # Errors
/// See [`open_blocking`]. If shrinking fails, the store loses no data.
pub fn shrink_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<SpareSpace> {
    let folder = StoreFolder::new(engine, path);
    let _lock = folder.take_lock(&options.clone().with_create(Create::Never))?;
    match folder.inspect()? {
        FolderContents::Complete(_) | FolderContents::Unnamed => {}
        FolderContents::Nothing | FolderContents::Unfinished => return Err(folder.label.missing()),
    }
    let entry = folder.path(engine.entry());
    if engine.log() == CommitLog::Journal {
        // Applies the journal before compacting: its records may remove rows, and then the engine's files can shrink
        // further.
        let revision_file = Arc::new(folder.open_revision_file()?);
        let table = caught(&folder.label, Operation::Open, || engine.open(&entry, &folder.label.store))?;
        let table = journaled(&folder, revision_file, table)?;
        caught(&folder.label, Operation::Compact, || table.checkpoint())?;
    }
    caught(&folder.label, Operation::Compact, || engine.shrink(&entry, &folder.label.store))
}

/// Checks, without creating anything, whether a store of `engine` can be created in the folder `path`. Fails if this
/// process lacks permission to create files, a part of the path is a file, the folder contains another program's files,
/// or the disk is full.
///
/// # Errors
/// The error that an attempt to create the store would return.
pub fn check_creatable(engine: &dyn Engine, path: &Path) -> Result<()> {
    let log_bytes = if engine.log() == CommitLog::Journal { JOURNAL_BYTES } else { 0 };
    StoreFolder::new(engine, path).check_creatable(MIN_FREE_DISK_BYTES + log_bytes)
}

/// The formats of a store's rows before and after an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatUpgrade {
    /// The format of the store's rows before the upgrade.
    pub from: u32,
    /// The format of the store's rows after the upgrade.
    pub to: u32,
}

/// Waits for the store lock, then upgrades the store of `engine` in the folder `path` to the newest format. An upgrade
/// from format 1 to format 2 rewrites no rows. Programs that do not support the newest format refuse to open the
/// upgraded store.
///
/// # Errors
/// Any error of [`open_blocking`], for example `UnknownFormat` if the store has a newer format than this program
/// supports; any error of a write.
pub fn upgrade_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<FormatUpgrade> {
    let store = open_blocking(engine, path, &options.clone().with_create(Create::Never))?;
    let from = store.status().format;
    if from < FORMAT_WITH_LEASES {
        store.raise_format(FORMAT_WITH_LEASES)?;
    }
    Ok(FormatUpgrade { from, to: FORMAT_WITH_LEASES })
}

/// Creates an empty store of `engine` in the folder `path`, in the row format that the options name. Returns false,
/// without changing anything, if the folder already contains a store. `create_blocking` blocks the calling thread.
///
/// # Errors
/// See [`open_blocking`].
pub fn create_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<bool> {
    match StoreFolder::new(engine, path).inspect()? {
        FolderContents::Complete(_) | FolderContents::Unnamed => Ok(false),
        FolderContents::Nothing | FolderContents::Unfinished => {
            let store = open_blocking(engine, path, &options.clone().with_create(Create::IfMissing))?;
            // Another process may have created the store first, with a row format other than `options.format`.
            Ok(store.status().format == options.format)
        }
    }
}

/// Returns what [`upgrade_blocking`] would return, without changing the store's rows. `preview_upgrade_blocking` blocks
/// the calling thread.
///
/// # Errors
/// See [`open_blocking`].
pub fn preview_upgrade_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<FormatUpgrade> {
    let store = open_blocking(engine, path, &options.clone().with_create(Create::Never))?;
    Ok(FormatUpgrade { from: store.status().format, to: FORMAT_WITH_LEASES })
}

/// A temporary folder in which a replacement for a store is built. Dropping a `FolderStaging` removes the temporary
/// folder.
#[derive(Debug)]
pub struct FolderStaging {
    label: StoreLabel,
    store: PathBuf,
    folder: PathBuf,
    /// The open staging folder, whose lock ends when the folder is closed or the process is killed.
    _lock: File,
}

impl FolderStaging {
    /// Creates the staging folder for a store that will replace the store of `engine` in the folder `path`. Removes a
    /// staging folder that a killed process has left behind.
    ///
    /// # Errors
    /// `Locked` if another process is building a replacement of the same store; `Io` or `NoSpace` if the staging folder
    /// cannot be created.
    pub fn begin(engine: &dyn Engine, path: &Path) -> Result<Self> {
        let mut label = StoreFolder::new(engine, path).label;
        // If the path is a symbolic link, the folder that it points to is replaced, not the link.
        if let Ok(real) = fs::canonicalize(&label.folder) {
            label.folder = real;
        }
        let folder = sibling_path(&label.folder, "restoring");
        let io = |result: io::Result<()>| result.map_err(|error| label.io(&folder, error));
        io(folder::create(&folder))?;
        let lock = File::open(&folder).map_err(|error| label.io(&folder, error))?;
        let busy = || label.error(ErrorKind::Locked, "another restore is at work there: wait until it has ended");
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy()),
            Err(TryLockError::Error(error)) => return Err(label.io(&folder, error)),
        }
        // Another process may have removed the staging folder just now, at the end of its replacement of the store.
        if !is_at(&lock, &folder) {
            return Err(busy());
        }
        let store = folder.join("store");
        io(folder::remove(&store))?;
        Ok(Self { label, store, folder, _lock: lock })
    }

    /// The path at which the caller must create the new store's folder, which does not exist yet.
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// Takes the lock of the store to be replaced. The returned value holds the store lock until it is dropped or
    /// passed to [`finish`](Self::finish). Returns `None` if the folder of the old store is missing or empty.
    ///
    /// # Errors
    /// `Locked` if the store lock did not become free in time; `Unsupported` if the folder contains something other
    /// than a store; `Io` if the folder cannot be read.
    pub fn hold(&self, engine: &dyn Engine, wait: Duration) -> Result<Option<FolderReplacement>> {
        let path = &self.label.folder;
        match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
            Ok(true) => return Ok(None),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.label.io(path, error)),
        }
        let folder = StoreFolder::new(engine, path);
        // `Create::IfMissing` lets `take_lock` create the queue file if the damaged store has lost it.
        let options = OpenOptions::default().with_create(Create::IfMissing).with_wait(wait);
        let lock = folder.take_lock(&options)?;
        Ok(Some(FolderReplacement { folder, _lock: lock }))
    }

    /// Renames the new store's folder to its final path, after moving the old store `old` from there to another path.
    /// Returns the old store's new path.
    ///
    /// # Errors
    /// `Unsupported` if another store was created at the final path first, or if the file system cannot exchange two
    /// folders; `Io` if renaming fails. If `finish` fails, the old store is still at its path.
    pub fn finish(self, old: Option<FolderReplacement>) -> Result<Option<PathBuf>> {
        let path = &self.label.folder;
        let io = |error: io::Error| self.label.io(path, error);
        let Some(old) = old else {
            fs::rename(&self.store, path).map_err(|error| match error.kind() {
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => {
                    self.label.error(ErrorKind::Unsupported, "a store was made there meanwhile; nothing was changed")
                }
                _ => io(error),
            })?;
            self.sync_parent().map_err(io)?;
            return Ok(None);
        };
        let aside = (1..)
            .map(|number| sibling_path(path, &format!("replaced-{number}")))
            .find(|aside| fs::symlink_metadata(aside).is_err())
            .unwrap_or_default();
        // The new store is first renamed to `aside`; then the kernel exchanges `aside` and the old store's path. The
        // old store must never be in the staging folder, because that folder is removed later.
        fs::rename(&self.store, &aside).map_err(io)?;
        if let Err(errno) = renameat_with(CWD, &aside, CWD, path, RenameFlags::EXCHANGE) {
            let _ = fs::rename(&aside, &self.store);
            return Err(match errno {
                rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::XDEV => {
                    self.label.error(ErrorKind::Unsupported, cannot_exchange(path)).with_source(io::Error::from(errno))
                }
                _ => io(errno.into()),
            });
        }
        self.sync_parent().map_err(io)?;
        // When the old store's lock is released, the processes in its queue notice that the folder was replaced, and
        // queue in the new folder.
        drop(old);
        Ok(Some(aside))
    }

    fn sync_parent(&self) -> io::Result<()> {
        self.label.folder.parent().map_or(Ok(()), folder::sync)
    }
}

impl Drop for FolderStaging {
    fn drop(&mut self) {
        // If the staging folder cannot be removed now, the next replacement removes it.
        let _ = folder::remove(&self.folder);
    }
}

/// The locked old store that a new store is about to replace.
#[derive(Debug)]
pub struct FolderReplacement {
    folder: StoreFolder,
    _lock: StoreLock,
}

impl FolderReplacement {
    /// The newest revision that the old store's file `head` records; 0 if unknown.
    ///
    /// # Errors
    /// `Io` if the file `head` cannot be read.
    pub fn newest_revision(&self) -> Result<u64> {
        Ok(self.folder.open_revision_file()?.seen())
    }
}

fn sibling_path(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

fn cannot_exchange(path: &Path) -> String {
    let path = path.display();
    format!("this file system cannot exchange two folders: move {path} away yourself and try again")
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(one), Ok(two)) => (one.dev(), one.ino()) == (two.dev(), two.ino()),
        _ => false,
    }
}
