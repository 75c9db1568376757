//! The file under redb: fewer syncs than redb's own, and a close that costs nothing.
//!
//! A CNI plugin opens the store, commits once and is gone. redb would sync six times for that: once when it marks the
//! file as being in use, once for the commit, and four times to close, which records the allocator's state and takes
//! the mark away. Here it is three times:
//!
//! - **Closing writes nothing.** Commits record the allocator's state themselves (redb's quick repair, two syncs), so
//!   a file that was not closed is opened as fast as one that was. Being killed is what every close looks like.
//! - **Opening syncs once.** After such an end redb writes the header twice, unmarked and marked, and syncs each time.
//!   What counts is only the last state, which is what was there before: it is written if it differs, and synced once.
//!   That one sync is needed: a process that was killed between writing a commit and syncing it leaves a commit that
//!   can be read but is not durable yet.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

/// More than redb's header takes.
const HEADER_BYTES: usize = 4096;

/// The state that a [`DbFile`] and its [`Switch`] share.
#[derive(Debug)]
struct Shared {
    file: File,
    phase: Mutex<Phase>,
}

#[derive(Debug)]
enum Phase {
    /// redb is opening the file; a header that it wrote waits here.
    Opening(Option<Vec<u8>>),
    /// Everything goes straight to the file.
    Open,
    /// Nothing goes to the file any more.
    Closed,
}

/// The file, as redb sees it.
#[derive(Debug)]
pub(crate) struct DbFile(Arc<Shared>);

/// Our hand on a file that redb owns.
#[derive(Debug)]
pub(crate) struct Switch(Arc<Shared>);

impl DbFile {
    pub(crate) fn new(file: File) -> (Self, Switch) {
        let shared = Arc::new(Shared { file, phase: Mutex::new(Phase::Opening(None)) });
        (Self(Arc::clone(&shared)), Switch(shared))
    }
}

impl Switch {
    /// redb has opened the file: brings it up to date, durably.
    pub(crate) fn opened(&self) -> io::Result<()> {
        let mut phase = self.0.phase();
        if matches!(*phase, Phase::Opening(_)) { self.0.leave_opening(&mut phase) } else { Ok(()) }
    }

    /// From here on nothing is written, read or synced.
    pub(crate) fn close(&self) {
        *self.0.phase() = Phase::Closed;
    }
}

impl Shared {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        // It holds no invariant that a panic could break.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the opening: the header that waits is written if it is not what the file has, and the file is synced.
    fn leave_opening(&self, phase: &mut Phase) -> io::Result<()> {
        let Phase::Opening(waiting) = std::mem::replace(phase, Phase::Open) else { return Ok(()) };
        if let Some(header) = waiting {
            let mut current = vec![0; header.len()];
            let same = self.file.read_exact_at(&mut current, 0).is_ok() && current == header;
            if !same {
                self.file.write_all_at(&header, 0)?;
            }
        }
        self.file.sync_data()
    }

    fn check_open(&self) -> io::Result<()> {
        if matches!(*self.phase(), Phase::Closed) { Err(closed()) } else { Ok(()) }
    }

    /// Before anything is done to the file that the header that waits has a part in.
    fn settle(&self) -> io::Result<()> {
        let mut phase = self.phase();
        match *phase {
            Phase::Open | Phase::Opening(None) => Ok(()),
            Phase::Opening(Some(_)) => self.leave_opening(&mut phase),
            Phase::Closed => Err(closed()),
        }
    }
}

fn closed() -> io::Error {
    io::Error::other("the store has been closed")
}

impl StorageBackend for DbFile {
    fn len(&self) -> io::Result<u64> {
        // A header that waits is within the file: redb wrote one when it made the file.
        self.0.check_open()?;
        Ok(self.0.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset < HEADER_BYTES as u64 {
            self.0.settle()?;
        } else {
            self.0.check_open()?;
        }
        self.0.file.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.settle()?;
        self.0.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        match *self.0.phase() {
            Phase::Opening(_) => Ok(()),
            Phase::Open => self.0.file.sync_data(),
            Phase::Closed => Err(closed()),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset == 0 && data.len() <= HEADER_BYTES {
            let mut phase = self.0.phase();
            if let Phase::Opening(waiting) = &mut *phase
                && waiting.as_ref().is_none_or(|waiting| waiting.len() == data.len())
            {
                *waiting = Some(data.to_vec());
                return Ok(());
            }
        }
        let mut phase = self.0.phase();
        if matches!(*phase, Phase::Opening(_)) {
            self.0.leave_opening(&mut phase)?;
        }
        if matches!(*phase, Phase::Closed) {
            return Err(closed());
        }
        drop(phase);
        self.0.file.write_all_at(data, offset)
    }

    fn close(&self) -> io::Result<()> {
        self.0.file.unlock()
    }

    // The queue in front of the store keeps other processes of ours away. This lock keeps other programs away.
    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        let whole = matches!(start, Bound::Unbounded | Bound::Included(0)) && end == Bound::Unbounded;
        if !whole {
            return Err(BackendError::Unsupported);
        }
        match self.0.file.try_lock() {
            Ok(()) => Ok(true),
            Err(std::fs::TryLockError::WouldBlock) => Ok(false),
            Err(std::fs::TryLockError::Error(error)) => Err(error.into()),
        }
    }

    fn unlock_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<(), BackendError> {
        Ok(self.0.file.unlock()?)
    }
}
