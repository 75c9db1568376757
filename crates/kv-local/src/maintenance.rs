//! Work on a store as a whole: the facts about it that need no lock, shrinking it, raising its format, and putting it in the place of
//! another one.
//!
//! A look needs no lock, so it works also while another process has the lock, or hangs with it.
//!
//! A store takes the place of another, or of none, in one step: the new store is built in a folder beside, `PATH.restoring`, that no
//! program takes for a store, and gets its name when it is complete. A process that is killed before leaves that folder, and the
//! next one clears it away.

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

/// A look at a store from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StorePeek {
    /// The engine that `store.id` names; `None` if that file is missing or cannot be read.
    pub engine: Option<String>,
    /// The layout of the folder, if this program does not know it. The format of the rows is another number, which only opening the
    /// store tells.
    pub unknown_layout: Option<u32>,
    /// The store's id; `None` also in a layout that is not known.
    pub id: Option<Uuid>,
    /// The bytes of all files in the folder.
    pub bytes: u64,
    /// The lock holder.
    pub holder: LockHolder,
    /// How many wait for it.
    pub waiting: usize,
}

/// The lock holder of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// Nobody.
    Nobody,
    /// This process, as `12345 (margay-ipam)`.
    Process(String),
    /// A process that cannot be seen: another user's, which only root sees, or one that has just ended.
    Unseen,
}

/// Looks at the store of `engine` in the folder `path`. Nothing is opened for writing, and nobody is waited for.
///
/// # Errors
/// `Missing`; `Io`.
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
        0 => LockHolder::Nobody,
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

/// How many processes wait for the lock of the store of `engine` in the folder `path`. For a lock holder with long
/// work: it releases the lock while another process waits. Costs some microseconds.
///
/// # Errors
/// `Io`.
pub fn waiting(engine: &dyn Engine, path: &Path) -> Result<usize> {
    let folder = StoreFolder::new(engine, path);
    Ok(folder.io(QUEUE_FILE, tickets(&folder.path(QUEUE_FILE)))?.saturating_sub(1))
}

/// The queue of a store, for a process that looks at it again and again. The file is opened once.
#[derive(Debug)]
pub struct QueueFile {
    queue: File,
}

impl QueueFile {
    /// The queue of the store of `engine` in the folder `path`, as it is there now.
    ///
    /// # Errors
    /// `Missing`; `Io`.
    pub fn open(engine: &dyn Engine, path: &Path) -> Result<Self> {
        let folder = StoreFolder::new(engine, path);
        Ok(Self { queue: folder.io(QUEUE_FILE, File::open(folder.path(QUEUE_FILE)))? })
    }

    /// How many processes have the lock or wait for it. An error of the system counts as none.
    pub fn count(&self) -> usize {
        queue::tickets(&self.queue).map_or(0, |tickets| tickets.len())
    }
}

/// The newest revision of the store of `engine` in the folder `path`, without the lock: for a process that looks again and
/// again whether there is anything new. `None` if the store does not tell from outside; then only opening it does.
///
/// # Errors
/// `Io`.
pub fn newest(engine: &dyn Engine, path: &Path) -> Result<Option<Revision>> {
    let folder = StoreFolder::new(engine, path);
    match revision_file::newest(&folder.path(REVISION_FILE)) {
        Ok(newest) => Ok(i64::try_from(newest).ok().filter(|newest| *newest > 0).map(Revision::new)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(folder.label.io(&folder.path(REVISION_FILE), error)),
    }
}

/// How many tickets are drawn in a queue.
fn tickets(queue: &Path) -> io::Result<usize> {
    match File::open(queue) {
        Ok(file) => Ok(queue::tickets(&file)?.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// The bytes of all files in and below a folder. A file that goes away meanwhile does not count.
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

/// The least room that a new store needs on its disk, in bytes, besides a journal. The ballast may be missing.
const MIN_FREE_DISK_BYTES: u64 = 64 << 10;

/// Waits for the store lock and makes the files of the store of `engine` in the folder `path` as small as the engine can.
///
/// # Errors
/// Those of [`open_blocking`]; nothing is lost then.
pub fn shrink_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<SpareSpace> {
    let folder = StoreFolder::new(engine, path);
    let _lock = folder.take_lock(&options.clone().with_create(Create::Never))?;
    match folder.inspect()? {
        FolderContents::Complete(_) | FolderContents::Unnamed => {}
        FolderContents::Nothing | FolderContents::Unfinished => return Err(folder.label.missing()),
    }
    let entry = folder.path(engine.entry());
    if engine.log() == CommitLog::Journal {
        // Records that only the journal has remove rows from the engine, too.
        let revision_file = Arc::new(folder.open_revision_file()?);
        let table = caught(&folder.label, Operation::Open, || engine.open(&entry, &folder.label.store))?;
        let table = journaled(&folder, revision_file, table)?;
        caught(&folder.label, Operation::Compact, || table.checkpoint())?;
    }
    caught(&folder.label, Operation::Compact, || engine.shrink(&entry, &folder.label.store))
}

/// Fails where a store of `engine` could not be made in the folder `path`, as far as is known without making anything:
/// there is no permission, a file is in the way, what is in the folder is somebody else's, or the disk is full.
///
/// # Errors
/// Those with which making it would fail.
pub fn check_creatable(engine: &dyn Engine, path: &Path) -> Result<()> {
    let log_bytes = if engine.log() == CommitLog::Journal { JOURNAL_BYTES } else { 0 };
    StoreFolder::new(engine, path).check_creatable(MIN_FREE_DISK_BYTES + log_bytes)
}

/// The formats of a store before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatUpgrade {
    /// The format that its rows had.
    pub from: u32,
    /// The newest format, which they have now.
    pub to: u32,
}

/// Waits for the store lock and raises the store of `engine` in the folder `path` to the newest format. Every older format
/// that is still read has its step here: from 1 to 2 no row is written anew. A store that was raised is refused by programs that do not
/// know the format.
///
/// # Errors
/// Those of [`open_blocking`], among them `UnknownFormat` for a store that is newer; those of writing.
pub fn upgrade_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<FormatUpgrade> {
    let store = open_blocking(engine, path, &options.clone().with_create(Create::Never))?;
    let from = store.status().format;
    if from < FORMAT_WITH_LEASES {
        store.raise_format(FORMAT_WITH_LEASES)?;
    }
    Ok(FormatUpgrade { from, to: FORMAT_WITH_LEASES })
}

/// Makes an empty store of `engine` in the folder `path`, in the format that the options name. False if there is a store already,
/// which stays as it is. This blocks.
///
/// # Errors
/// Those of [`open_blocking`].
pub fn create_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<bool> {
    match StoreFolder::new(engine, path).inspect()? {
        FolderContents::Complete(_) | FolderContents::Unnamed => Ok(false),
        FolderContents::Nothing | FolderContents::Unfinished => {
            let store = open_blocking(engine, path, &options.clone().with_create(Create::IfMissing))?;
            // Another process may have made it meanwhile.
            Ok(store.status().format == options.format)
        }
    }
}

/// Says what [`upgrade_blocking`] would do, and writes nothing. This blocks.
///
/// # Errors
/// Those of [`open_blocking`].
pub fn preview_upgrade_blocking(engine: &dyn Engine, path: &Path, options: &OpenOptions) -> Result<FormatUpgrade> {
    let store = open_blocking(engine, path, &options.clone().with_create(Create::Never))?;
    Ok(FormatUpgrade { from: store.status().format, to: FORMAT_WITH_LEASES })
}

/// The place in which a store is built. Dropping it clears away what is there.
#[derive(Debug)]
pub struct FolderStaging {
    label: StoreLabel,
    /// The folder that is put in the place of the store's.
    store: PathBuf,
    folder: PathBuf,
    /// Locked as long as this is in use; the kernel frees it.
    _lock: File,
}

impl FolderStaging {
    /// A place to build the store of `engine` in that shall be in the folder `path`. The remains of a killed process
    /// are removed.
    ///
    /// # Errors
    /// `Locked` if somebody is at it; `Io`, `NoSpace`.
    pub fn begin(engine: &dyn Engine, path: &Path) -> Result<Self> {
        let mut label = StoreFolder::new(engine, path).label;
        // The folder itself is replaced, not a link to it.
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
        // Somebody who has just ended may have removed it.
        if !is_at(&lock, &folder) {
            return Err(busy());
        }
        let store = folder.join("store");
        io(folder::remove(&store))?;
        Ok(Self { label, store, folder, _lock: lock })
    }

    /// The folder in which the caller builds the store; it is not there yet.
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// Takes the lock of what is in the store's place, until the replacement or the end of what is returned; nothing
    /// if there is no folder, or an empty one.
    ///
    /// # Errors
    /// `Locked` if the lock was not free in time; `Unsupported` if the folder holds what is no store; `Io`.
    pub fn hold(&self, engine: &dyn Engine, wait: Duration) -> Result<Option<FolderReplacement>> {
        let path = &self.label.folder;
        match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
            Ok(true) => return Ok(None),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.label.io(path, error)),
        }
        let folder = StoreFolder::new(engine, path);
        // A damaged store may have lost its queue.
        let options = OpenOptions::default().with_create(Create::IfMissing).with_wait(wait);
        let lock = folder.take_lock(&options)?;
        Ok(Some(FolderReplacement { folder, _lock: lock }))
    }

    /// Gives the store that was built its place, for good. `old` is what is there; it is moved aside, and where to is
    /// returned.
    ///
    /// # Errors
    /// `Unsupported` if something has come to be there meanwhile, or if the file system cannot exchange two folders;
    /// `Io`. Nothing has changed then.
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
        // First the name that the old folder shall have: what is left in the staging folder is removed.
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
        // A process that waits in the old queue sees that the folder is another one now, and goes on there.
        drop(old);
        Ok(Some(aside))
    }

    fn sync_parent(&self) -> io::Result<()> {
        self.label.folder.parent().map_or(Ok(()), folder::sync)
    }
}

impl Drop for FolderStaging {
    fn drop(&mut self) {
        // The next one does it if this fails.
        let _ = folder::remove(&self.folder);
    }
}

/// A store that is about to be replaced, and its lock.
#[derive(Debug)]
pub struct FolderReplacement {
    folder: StoreFolder,
    _lock: StoreLock,
}

impl FolderReplacement {
    /// The newest revision that the store's file `revision_file` tells of; 0 if it tells of none.
    ///
    /// # Errors
    /// `Io`.
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
