//! The facts about a store that need no lock: also while another process has the lock, or hangs with it.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use kv::{Result, Revision};
use uuid::Uuid;

use super::head;
use super::holder;
use super::identity::{IDENTITY, Identity, is_known};
use super::open::Engine;
use super::queue;
use super::store_folder::{HEAD, QUEUE, StoreFolder};

/// A look at a store from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Glance {
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
    pub holder: Holder,
    /// How many wait for it.
    pub waiting: usize,
}

/// The lock holder of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
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
pub fn glance(engine: &dyn Engine, path: &Path) -> Result<Glance> {
    let folder = StoreFolder::new(engine, path);
    if !folder.exists(QUEUE)? && !folder.exists(IDENTITY)? && !folder.exists(folder.entry)? {
        return Err(folder.place.missing());
    }
    let identity = match fs::read(folder.path(IDENTITY)) {
        Ok(bytes) => Identity::parse(&String::from_utf8_lossy(&bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(folder.place.io(&folder.path(IDENTITY), error)),
    };
    let queue = folder.path(QUEUE);
    let tickets = folder.io(QUEUE, tickets(&queue))?;
    let holder = match tickets {
        0 => Holder::Nobody,
        _ => holder::find(&queue).map_or(Holder::Unseen, Holder::Process),
    };
    Ok(Glance {
        unknown_layout: identity.as_ref().map(|identity| identity.format).filter(|format| !is_known(*format)),
        id: identity.as_ref().map(|identity| identity.id).filter(|id| !id.is_nil()),
        engine: identity.map(|identity| identity.engine),
        bytes: folder.io("", size(&folder.place.folder))?,
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
    Ok(folder.io(QUEUE, tickets(&folder.path(QUEUE)))?.saturating_sub(1))
}

/// The queue of a store, for a process that looks at it again and again. The file is opened once.
#[derive(Debug)]
pub struct Queued {
    queue: File,
}

impl Queued {
    /// The queue of the store of `engine` in the folder `path`, as it is there now.
    ///
    /// # Errors
    /// `Missing`; `Io`.
    pub fn open(engine: &dyn Engine, path: &Path) -> Result<Self> {
        let folder = StoreFolder::new(engine, path);
        Ok(Self { queue: folder.io(QUEUE, File::open(folder.path(QUEUE)))? })
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
    match head::newest(&folder.path(HEAD)) {
        Ok(newest) => Ok(i64::try_from(newest).ok().filter(|newest| *newest > 0).map(Revision::new)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(folder.place.io(&folder.path(HEAD), error)),
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
