//! Implements the file that redb reads and writes. The file implementation needs fewer syncs than redb's own file
//! backend, and writes nothing when it closes the file.
//!
//! With redb's own file backend, a process that opens the store, commits once and closes the store syncs six times. One
//! of these six syncs marks the file as open, one belongs to the commit, and four belong to closing, when redb records
//! its allocator state and removes the mark. With this module, a process that opens the store, commits once and closes
//! the store syncs only three times; a process that commits nothing never syncs.
//!
//! - **Closing writes nothing.** Each commit already records redb's allocator state (redb's quick repair, which needs
//!   two syncs). Because the allocator state is recorded, redb opens a file as fast after a crash as after a clean
//!   close. To the next process, a file that this module has closed looks as if the previous process had been killed:
//!   its header still marks the file as open.
//! - **Opening syncs nothing.** When redb opens a file that was not closed, it writes the file header twice, without
//!   and with the mark that the file is open, and requests a sync each time. This module keeps the headers that redb
//!   writes during opening in memory. It writes redb's last header, which marks the file as open, only if the file
//!   contains a different header; usually the file already contains this header.
//! - **The file is synced before the first write.** If a process is killed between writing and syncing a commit, the
//!   commit can be read but is not durable. Pages that an unsynced commit has freed must not be overwritten before the
//!   commit is durable.

use std::io;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

/// The maximum size of redb's file header, in bytes.
const HEADER_BYTES: usize = 4096;

/// The state that a [`DbFile`] shares with its [`FileSwitch`].
#[derive(Debug)]
struct SharedFile<B> {
    file: B,
    phase: Mutex<FilePhase>,
}

#[derive(Debug)]
enum FilePhase {
    /// While redb opens the file, its header writes are kept in memory. Contains the last header that redb wrote;
    /// `None` if redb has written none.
    Opening(Option<Vec<u8>>),
    /// The file has not been changed since redb opened it, and its content might not be durable.
    AsFound,
    /// The file has been synced since it was opened, and all operations go directly to the real file.
    Open,
    Closed,
}

/// The file that redb reads and writes; `B` is the type of the real file.
#[derive(Debug)]
pub(crate) struct DbFile<B>(Arc<SharedFile<B>>);

/// A handle with which `backend-redb` opens and closes a [`DbFile`] that redb owns.
#[derive(Debug)]
pub(crate) struct FileSwitch<B>(Arc<SharedFile<B>>);

impl<B: StorageBackend> DbFile<B> {
    pub(crate) fn new(file: B) -> (Self, FileSwitch<B>) {
        let shared = Arc::new(SharedFile { file, phase: Mutex::new(FilePhase::Opening(None)) });
        (Self(Arc::clone(&shared)), FileSwitch(shared))
    }
}

impl<B: StorageBackend> FileSwitch<B> {
    /// Called after redb has opened the file: writes the header that was kept in memory if it differs from the header
    /// in the file.
    pub(crate) fn opened(&self) -> io::Result<()> {
        let mut phase = self.0.phase();
        match &*phase {
            FilePhase::Opening(waiting) if self.0.is_new(waiting.as_deref()) => self.0.begin_writing(&mut phase),
            FilePhase::Opening(_) => {
                *phase = FilePhase::AsFound;
                Ok(())
            }
            FilePhase::AsFound | FilePhase::Open | FilePhase::Closed => Ok(()),
        }
    }
}

impl<B> FileSwitch<B> {
    /// Closes the file without writing to it; after `close`, reads, writes and syncs fail.
    pub(crate) fn close(&self) {
        *self.0.phase() = FilePhase::Closed;
    }
}

impl<B> SharedFile<B> {
    fn phase(&self) -> MutexGuard<'_, FilePhase> {
        // The lock may be poisoned, but the file's phase is valid even if a thread panics while it holds the lock.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_open(&self) -> io::Result<()> {
        if matches!(*self.phase(), FilePhase::Closed) {
            return Err(io::Error::other("the store has been closed"));
        }
        Ok(())
    }
}

impl<B: StorageBackend> SharedFile<B> {
    /// Returns true if `header` differs from the header in the file on the disk.
    fn is_new(&self, header: Option<&[u8]>) -> bool {
        header.is_some_and(|header| {
            let mut current = vec![0; header.len()];
            self.file.read(0, &mut current).is_err() || current != header
        })
    }

    /// Prepares the first write: writes the header that was kept in memory if it differs from the header in the file,
    /// and syncs the content that the file had when it was opened.
    fn begin_writing(&self, phase: &mut FilePhase) -> io::Result<()> {
        match phase {
            FilePhase::Opening(Some(header)) if self.is_new(Some(header)) => self.file.write(0, header)?,
            FilePhase::Opening(_) | FilePhase::AsFound => {}
            FilePhase::Open | FilePhase::Closed => return Ok(()),
        }
        self.file.sync_data()?;
        *phase = FilePhase::Open;
        Ok(())
    }

    /// Before an operation that depends on the header in the file, writes the header that was kept in memory, if there
    /// is one.
    fn settle(&self) -> io::Result<()> {
        let mut phase = self.phase();
        if matches!(*phase, FilePhase::Opening(Some(_))) { self.begin_writing(&mut phase) } else { Ok(()) }
    }

    /// If redb writes a header while it opens the file, holds the header back and returns true; otherwise returns
    /// false.
    fn hold_back(&self, offset: u64, data: &[u8]) -> bool {
        let mut phase = self.phase();
        let FilePhase::Opening(waiting) = &mut *phase else { return false };
        let is_header = offset == 0 && data.len() <= HEADER_BYTES;
        let replaces = waiting.as_ref().is_none_or(|waiting| waiting.len() == data.len());
        if is_header && replaces {
            *waiting = Some(data.to_vec());
        }
        is_header && replaces
    }
}

impl<B: StorageBackend> StorageBackend for DbFile<B> {
    fn len(&self) -> io::Result<u64> {
        // The file's length is right even while redb's header is only in memory, because redb sets the length of a new
        // file before it writes the header.
        self.0.check_open()?;
        self.0.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.check_open()?;
        if offset < HEADER_BYTES as u64 {
            self.0.settle()?;
        }
        self.0.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.check_open()?;
        let mut phase = self.0.phase();
        if !matches!(*phase, FilePhase::Opening(None)) {
            self.0.begin_writing(&mut phase)?;
        }
        drop(phase);
        self.0.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.check_open()?;
        let mut phase = self.0.phase();
        match &*phase {
            // A sync that redb requests while it opens the file is not needed, because the file is always synced before
            // its first write.
            FilePhase::Opening(_) => Ok(()),
            FilePhase::AsFound => self.0.begin_writing(&mut phase),
            FilePhase::Open | FilePhase::Closed => {
                drop(phase);
                self.0.file.sync_data()
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.check_open()?;
        if self.0.hold_back(offset, data) {
            return Ok(());
        }
        // If redb writes beyond the header while it opens the file, redb is creating or repairing the file. While redb
        // creates or repairs the file, the order of its writes matters, so no write is held back.
        self.0.begin_writing(&mut self.0.phase())?;
        self.0.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.file.close()
    }

    // The queue for the store lock keeps out other Margay processes; redb's locks on the file keep out other programs.

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.query_lock_range(start, end)
    }
}

#[cfg(test)]
#[path = "power_tests.rs"]
mod tests;
