//! The file under redb: fewer syncs than redb's own, and a close that costs nothing.
//!
//! A process that opens the store, commits once and is gone syncs six times with redb as it is: once when it marks the
//! file as being in use, once for the commit, and four times to close, which records the allocator's state and takes
//! the mark away. Here it is three times, and not at all if it commits nothing:
//!
//! - **Closing writes nothing.** Commits record the allocator's state themselves (redb's quick repair, two syncs), so
//!   a file that was not closed is opened as fast as one that was. Being killed is what every close looks like.
//! - **Opening syncs nothing.** After such an end redb writes the header twice, unmarked and marked, and syncs each
//!   time. Only the last state counts, which is the state from before: it is written if it differs.
//! - **The first write syncs before.** A process that was killed between writing a commit and syncing it leaves a
//!   commit that can be read but is not durable yet. Pages that it has freed must not be overwritten before it is.

use std::io;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

/// More than redb's header takes.
const HEADER_BYTES: usize = 4096;

/// The state that a [`DbFile`] and its [`FileSwitch`] share.
#[derive(Debug)]
struct SharedFile<B> {
    file: B,
    phase: Mutex<FilePhase>,
}

#[derive(Debug)]
enum FilePhase {
    /// redb is opening the file; a header that it wrote waits here.
    Opening(Option<Vec<u8>>),
    /// The file is as it was found, durable or not.
    AsFound,
    /// Everything goes straight to the file.
    Open,
    /// Nothing goes to the file any more.
    Closed,
}

/// The file, as redb sees it; `B` is the file as it is.
#[derive(Debug)]
pub(crate) struct DbFile<B>(Arc<SharedFile<B>>);

/// Our hand on a file that redb owns.
#[derive(Debug)]
pub(crate) struct FileSwitch<B>(Arc<SharedFile<B>>);

impl<B: StorageBackend> DbFile<B> {
    pub(crate) fn new(file: B) -> (Self, FileSwitch<B>) {
        let shared = Arc::new(SharedFile { file, phase: Mutex::new(FilePhase::Opening(None)) });
        (Self(Arc::clone(&shared)), FileSwitch(shared))
    }
}

impl<B: StorageBackend> FileSwitch<B> {
    /// redb has opened the file: brings it up to date.
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
    /// From here on nothing is written, read or synced.
    pub(crate) fn close(&self) {
        *self.0.phase() = FilePhase::Closed;
    }
}

impl<B> SharedFile<B> {
    fn phase(&self) -> MutexGuard<'_, FilePhase> {
        // It holds no invariant that a panic could break.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unless nothing goes to the file any more.
    fn check_open(&self) -> io::Result<()> {
        if matches!(*self.phase(), FilePhase::Closed) {
            return Err(io::Error::other("the store has been closed"));
        }
        Ok(())
    }
}

impl<B: StorageBackend> SharedFile<B> {
    /// True if this header is not the one that the file has.
    fn is_new(&self, header: Option<&[u8]>) -> bool {
        header.is_some_and(|header| {
            let mut current = vec![0; header.len()];
            self.file.read(0, &mut current).is_err() || current != header
        })
    }

    /// Before anything is written: a header that waits is, if it is a new one, and what was found becomes durable.
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

    /// Before anything is done that a waiting header has a part in.
    fn settle(&self) -> io::Result<()> {
        let mut phase = self.phase();
        if matches!(*phase, FilePhase::Opening(Some(_))) { self.begin_writing(&mut phase) } else { Ok(()) }
    }

    /// Lets a header that is written while opening wait; false if this is no such thing.
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
        // A header that waits is within the file: redb sets the length of a new one first.
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
            // Before the first write is soon enough.
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
        // More than a header: redb makes or repairs the file, and relies on its order.
        self.0.begin_writing(&mut self.0.phase())?;
        self.0.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.file.close()
    }

    // The queue in front of the store keeps other processes of ours away; redb's locks keep other programs away.

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
