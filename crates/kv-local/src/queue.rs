//! Queues the processes that want to open a store. The processes get the store lock one at a time, in the order of
//! their arrival. This module also finds the process that holds the store lock, for the error of a process that has
//! waited too long.
//!
//! The queue consists of byte locks (open file description locks) on one file, which is never unlinked and stays empty.
//! Ticket `n` is a write lock on byte `n`. An arriving process draws a ticket: it locks the first byte above all locked
//! bytes. The process holds the store lock once it gets a read lock on all bytes before its ticket. The kernel unlocks
//! the byte of a process that has ended, so a dead process blocks no other process. The processes behind a dead waiter
//! still wait for the lock holder.
//!
//! Two callers never hold the store lock at the same time, although drawing a ticket takes several steps. Proof by
//! contradiction: assume that the holders of two tickets `a < b` both hold the store lock. The process that drew the
//! higher ticket `b` found the lower byte `a` unlocked, so byte `a` was locked after byte `b`. The process that locked
//! byte `a` then looked for locked bytes above `a`. Having found byte `b`, it would have given ticket `a` back and
//! drawn another.
//!
//! Open file description locks belong to the open file and not to the process. If one process opens a store twice, the
//! two openings queue like two processes.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The lock of a store, released when this value is dropped or the process ends.
///
/// A child process that was forked without exec shares the open queue file and thus the lock. If the process that
/// forked drops its `StoreLock`, its forked child loses the lock as well; if that process is killed, the child keeps
/// the lock.
#[derive(Debug)]
pub(crate) struct StoreLock {
    file: File,
}

#[derive(Debug)]
pub(crate) enum LockError {
    Late,
    /// Locking or opening the queue file failed.
    Io(io::Error),
}

impl From<io::Error> for LockError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl StoreLock {
    /// Waits for the store lock in the queue file `path`, for at most the duration `wait`. The callback `open` opens
    /// the queue file for reading and writing.
    pub(crate) fn take(
        path: &Path,
        wait: Duration,
        open: impl Fn(&Path) -> io::Result<File>,
    ) -> Result<Self, LockError> {
        let deadline = Instant::now().checked_add(wait);
        loop {
            let lock = Self { file: open(path)? };
            let ticket = draw(&lock.file)?;
            if !try_lock(&lock.file, LockMode::Read, ByteRange::before(ticket))? {
                wait_for(&lock.file, ticket, deadline)?;
            }
            // If the store's folder was replaced during the wait, the file at `path` belongs to another store, and the
            // caller must queue again in that file.
            if is_same_file(&lock.file, path)? {
                return Ok(lock);
            }
        }
    }
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        // Closing the queue file also releases the lock, unless a forked child shares the open file.
        let _ = set(&self.file, LockMode::None, ByteRange::ALL);
    }
}

/// Draws the lowest ticket above all drawn tickets of the queue.
fn draw(file: &File) -> io::Result<i64> {
    let mut from = 0;
    loop {
        let ticket = first_free(file, from)?;
        if claim(file, ticket)? {
            return Ok(ticket);
        }
        from = ticket;
    }
}

/// Draws the ticket `ticket` if no ticket at or above it is drawn. Returns true if `claim` has drawn the ticket.
fn claim(file: &File, ticket: i64) -> io::Result<bool> {
    if !try_lock(file, LockMode::Write, ByteRange::one(ticket))? {
        return Ok(false);
    }
    let highest = locked_until(file, ticket + 1)?.is_none();
    if !highest {
        set(file, LockMode::None, ByteRange::one(ticket))?;
    }
    Ok(highest)
}

/// Returns the first byte at or above `from` such that neither this byte nor any higher byte is locked.
fn first_free(file: &File, mut from: i64) -> io::Result<i64> {
    while let Some(end) = locked_until(file, from)? {
        from = end;
    }
    Ok(from)
}

/// Waits until all bytes of the queue file before byte `ticket` are unlocked.
///
/// The kernel's wait for a file lock has no time limit, so a separate thread waits. The waiting thread uses the same
/// open queue file as its caller, and so holds the same locks. If the deadline passes before the lock is acquired,
/// dropping the caller's `StoreLock` gives back the ticket immediately. If the waiting thread outlives the call of
/// `wait_for`, its read locks cover only bytes that other processes have unlocked, and the thread closes the file when
/// it ends.
fn wait_for(file: &File, ticket: i64, deadline: Option<Instant>) -> Result<(), LockError> {
    if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        return Err(LockError::Late);
    }
    let given_up = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::sync_channel(1);
    let (shared, flag) = (file.try_clone()?, Arc::clone(&given_up));
    thread::Builder::new().name("margay-queue".to_owned()).spawn(move || {
        let _ = sender.send(block(&shared, ticket, &flag));
    })?;
    let result = receive(&receiver, deadline);
    given_up.store(true, Ordering::Relaxed);
    result
}

fn receive(receiver: &Receiver<io::Result<()>>, deadline: Option<Instant>) -> Result<(), LockError> {
    let received = match deadline {
        None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
        Some(deadline) => receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())),
    };
    match received {
        Ok(result) => result.map_err(LockError::Io),
        Err(RecvTimeoutError::Timeout) => Err(LockError::Late),
        Err(RecvTimeoutError::Disconnected) => Err(LockError::Io(io::Error::other("the waiting thread ended"))),
    }
}

/// Waits until the ticket just before `ticket` is free, then until all lower tickets are free.
///
/// Waiting for all lower tickets in one step would be correct, too, but slower: each release of the store lock would
/// then wake all waiting processes.
fn block(file: &File, ticket: i64, given_up: &AtomicBool) -> io::Result<()> {
    for bytes in [ByteRange::one(ticket - 1), ByteRange::before(ticket)] {
        if given_up.load(Ordering::Relaxed) {
            break;
        }
        lock(file, LockMode::Read, bytes)?;
    }
    Ok(())
}

fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(theirs) => Ok((ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[derive(Clone, Copy)]
enum LockMode {
    Read,
    Write,
    None,
}

/// A range of bytes in the queue file. To the kernel, length 0 means "up to the end of the file", so an empty range
/// must never be passed to the kernel.
#[derive(Clone, Copy)]
struct ByteRange {
    start: i64,
    len: i64,
}

impl ByteRange {
    const ALL: Self = Self { start: 0, len: 0 };

    fn one(ticket: i64) -> Self {
        Self { start: ticket, len: 1 }
    }

    fn before(ticket: i64) -> Self {
        Self { start: 0, len: ticket }
    }

    fn from(start: i64) -> Self {
        Self { start, len: 0 }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the kernel's constants are 0, 1 and 2")]
fn flock(lock: LockMode, bytes: ByteRange) -> libc::flock {
    let kind = match lock {
        LockMode::Read => libc::F_RDLCK,
        LockMode::Write => libc::F_WRLCK,
        LockMode::None => libc::F_UNLCK,
    };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start,
        l_len: bytes.len,
        l_pid: 0,
    }
}

/// Finds the first range that another open file has locked and that ends above the byte `from`; returns the end of this
/// range.
fn locked_until(file: &File, from: i64) -> io::Result<Option<i64>> {
    let mut probe = flock(LockMode::Write, ByteRange::from(from));
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut probe))?;
    if i32::from(probe.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    match probe.l_start.checked_add(probe.l_len) {
        Some(end) if probe.l_len > 0 && end < i64::MAX => Ok(Some(end)),
        // Programs that use this queue lock single bytes. A lock up to the end of the queue file comes from a program
        // that does not use the queue.
        _ => Err(io::Error::other("another program has locked the whole file")),
    }
}

/// Returns the drawn tickets of the queue in ascending order, except the ticket of `file` itself. The process with the
/// first ticket holds the store lock; the others wait. The result may lack tickets that are drawn while `tickets` runs.
pub(crate) fn tickets(file: &File) -> io::Result<Vec<i64>> {
    let mut tickets = Vec::new();
    let mut spans = vec![(0, i64::MAX)];
    while let Some((from, to)) = spans.pop() {
        // A probe for a read lock finds only tickets, which are write locks; it does not conflict with the read locks
        // of waiting processes.
        let mut probe = flock(LockMode::Read, ByteRange { start: from, len: to - from });
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut probe))?;
        if i32::from(probe.l_type) == libc::F_UNLCK {
            continue;
        }
        let ticket = probe.l_start;
        if probe.l_len != 1 || !(from..to).contains(&ticket) {
            return Err(io::Error::other("another program has locked the file"));
        }
        tickets.push(ticket);
        // Empty ranges are skipped, because the kernel takes length 0 for "up to the end of the file".
        spans.extend([(from, ticket), (ticket + 1, to)].into_iter().filter(|(from, to)| from < to));
    }
    tickets.sort_unstable();
    Ok(tickets)
}

/// Locks a range of bytes unless another open file has a conflicting lock. Locking an empty range always succeeds.
fn try_lock(file: &File, lock: LockMode, bytes: ByteRange) -> io::Result<bool> {
    if bytes.len == 0 {
        return Ok(true);
    }
    match set(file, lock, bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

fn set(file: &File, lock: LockMode, bytes: ByteRange) -> io::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&flock(lock, bytes)))?;
    Ok(())
}

/// Waits until no other open file has a conflicting lock, then locks a range of bytes.
fn lock(file: &File, lock: LockMode, bytes: ByteRange) -> io::Result<()> {
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLKW(&flock(lock, bytes))) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Maximum time to search for the lock holder. The search for the lock holder has a time limit, because a host may run
/// thousands of processes and the caller's own timeout is already over.
const HOLDER_NAME_TIMEOUT: Duration = Duration::from_millis(300);

/// Finds the process that holds the store lock of the queue file `path`. Returns the process id and name, for example
/// `12345 (margay-ipam)`.
///
/// The kernel's list of locks does not name the owners of open file description locks. The file `/proc/PID/fdinfo/FD`
/// lists the locks of an open file, including open file description locks. The process with a write lock on the lowest
/// byte holds the store lock. Only root can see the open files of other users' processes.
pub(crate) fn find_holder(path: &Path) -> Option<String> {
    find_holder_among(Path::new("/proc"), path)
}

fn find_holder_among(processes: &Path, path: &Path) -> Option<String> {
    let queue = fs::metadata(path).ok()?;
    let started = Instant::now();
    let (mut lowest, mut first) = (u64::MAX, Vec::new());
    for process in fs::read_dir(processes).ok()?.flatten() {
        if started.elapsed() > HOLDER_NAME_TIMEOUT {
            // The search timed out, so the process with the lowest ticket found so far may be a waiter rather than the
            // lock holder. If the error message named a waiting process, the user might end the wrong process.
            return None;
        }
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Some(ticket) = ticket_of(&process.path(), path, &queue) else { continue };
        if ticket < lowest {
            (lowest, first) = (ticket, Vec::new());
        }
        if ticket == lowest {
            first.push((pid, process.path()));
        }
    }
    // A newly forked child shares its parent's open files until it executes its own program, so a process that was
    // found to hold the lowest ticket is checked a second time.
    first.into_iter().find_map(|(pid, process)| {
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        (ticket_of(&process, path, &queue) == Some(lowest)).then(|| format!("{pid} ({})", name.trim()))
    })
}

/// Returns the lowest ticket that a process has in the queue file `path`, whose metadata is `queue`.
fn ticket_of(process: &Path, path: &Path, queue: &Metadata) -> Option<u64> {
    let files = fs::read_dir(process.join("fd")).ok()?.flatten();
    let tickets = files.filter_map(|file| {
        // A stat call may hang on a file of a dead network file system, so the file name is compared first.
        let is_queue = fs::read_link(file.path()).is_ok_and(|link| link.file_name() == path.file_name())
            && fs::metadata(file.path()).is_ok_and(|file| (file.dev(), file.ino()) == (queue.dev(), queue.ino()));
        let info = || fs::read_to_string(process.join("fdinfo").join(file.file_name())).ok();
        if is_queue { parse_ticket(&info()?) } else { None }
    });
    tickets.min()
}

/// Parses the content of an open file's `fdinfo` file, in which each lock has a line that begins with `lock:`. Returns
/// the byte on which the open file has a write lock.
fn parse_ticket(info: &str) -> Option<u64> {
    info.lines().find_map(|line| {
        let mut words = line.strip_prefix("lock:")?.split_whitespace();
        if !words.any(|word| word == "OFDLCK") || !words.any(|word| word == "WRITE") {
            return None;
        }
        words.nth(2)?.parse().ok()
    })
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
