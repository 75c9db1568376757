//! Putting a store in the place of another, or where none is, in one step.
//!
//! The new store is built in a folder beside, `PATH.restoring`, that no program takes for a store, and gets its name
//! when it is complete. A process that is killed before leaves that folder, and the next one clears it away.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv::{ErrorKind, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::errors::Place;
use super::folder;
use super::open::{Create, Engine, OpenOptions};
use super::queue::StoreLock;
use super::store_folder::StoreFolder;

/// The place in which a store is built. Dropping it clears away what is there.
#[derive(Debug)]
pub struct Staging {
    place: Place,
    /// The folder that is put in the place of the store's.
    store: PathBuf,
    folder: PathBuf,
    /// Locked as long as this is in use; the kernel frees it.
    _lock: File,
}

impl Staging {
    /// A place to build the store of `engine` in that shall be in the folder `path`. The remains of a killed process
    /// are removed.
    ///
    /// # Errors
    /// `Locked` if somebody is at it; `Io`, `NoSpace`.
    pub fn begin(engine: &dyn Engine, path: &Path) -> Result<Self> {
        let mut place = StoreFolder::new(engine, path).place;
        // The folder itself is replaced, not a link to it.
        if let Ok(real) = fs::canonicalize(&place.folder) {
            place.folder = real;
        }
        let folder = beside(&place.folder, "restoring");
        let io = |result: io::Result<()>| result.map_err(|error| place.io(&folder, error));
        io(folder::create(&folder))?;
        let lock = File::open(&folder).map_err(|error| place.io(&folder, error))?;
        let busy = || place.error(ErrorKind::Locked, "another restore is at work there: wait until it has ended");
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy()),
            Err(TryLockError::Error(error)) => return Err(place.io(&folder, error)),
        }
        // Somebody who has just ended may have removed it.
        if !is_at(&lock, &folder) {
            return Err(busy());
        }
        let store = folder.join("store");
        io(folder::remove(&store))?;
        Ok(Self { place, store, folder, _lock: lock })
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
    pub fn hold(&self, engine: &dyn Engine, wait: Duration) -> Result<Option<Replacement>> {
        let path = &self.place.folder;
        match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
            Ok(true) => return Ok(None),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.place.io(path, error)),
        }
        let folder = StoreFolder::new(engine, path);
        // A damaged store may have lost its queue.
        let options = OpenOptions::default().with_create(Create::IfMissing).with_wait(wait);
        let lock = folder.take_lock(&options)?;
        Ok(Some(Replacement { folder, _lock: lock }))
    }

    /// Gives the store that was built its place, for good. `old` is what is there; it is moved aside, and where to is
    /// returned.
    ///
    /// # Errors
    /// `Unsupported` if something has come to be there meanwhile, or if the file system cannot exchange two folders;
    /// `Io`. Nothing has changed then.
    pub fn finish(self, old: Option<Replacement>) -> Result<Option<PathBuf>> {
        let path = &self.place.folder;
        let io = |error: io::Error| self.place.io(path, error);
        let Some(old) = old else {
            fs::rename(&self.store, path).map_err(|error| match error.kind() {
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => {
                    self.place.error(ErrorKind::Unsupported, "a store was made there meanwhile; nothing was changed")
                }
                _ => io(error),
            })?;
            self.sync_parent().map_err(io)?;
            return Ok(None);
        };
        let aside = (1..)
            .map(|number| beside(path, &format!("replaced-{number}")))
            .find(|aside| fs::symlink_metadata(aside).is_err())
            .unwrap_or_default();
        // First the name that the old folder shall have: what is left in the staging folder is removed.
        fs::rename(&self.store, &aside).map_err(io)?;
        if let Err(errno) = renameat_with(CWD, &aside, CWD, path, RenameFlags::EXCHANGE) {
            let _ = fs::rename(&aside, &self.store);
            return Err(match errno {
                rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::XDEV => {
                    self.place.error(ErrorKind::Unsupported, cannot_exchange(path)).with_source(io::Error::from(errno))
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
        self.place.folder.parent().map_or(Ok(()), folder::sync)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The next one does it if this fails.
        let _ = folder::remove(&self.folder);
    }
}

/// A store that is about to be replaced, and its lock.
#[derive(Debug)]
pub struct Replacement {
    folder: StoreFolder,
    _lock: StoreLock,
}

impl Replacement {
    /// The newest revision that the store's file `head` tells of; 0 if it tells of none.
    ///
    /// # Errors
    /// `Io`.
    pub fn newest_revision(&self) -> Result<u64> {
        Ok(self.folder.open_head()?.seen())
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
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
