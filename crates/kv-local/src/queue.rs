//! The queue in front of a store: one process at a time, first come first served; and the lock holder, for the error of a process
//! that waited in vain.
//!
//! The queue is made of nothing but byte locks (open file description locks) on one file that is never unlinked; the
//! file stays empty. Ticket `n` is a write lock on byte `n`. A process that comes takes the first byte above all locked
//! bytes, and holds the store lock once a read lock on all bytes before it is granted. The kernel frees a dead
//! process's byte, so neither a dead holder nor a dead waiter stops the others, and a dead waiter lets nobody pass the
//! holder.
//!
//! Why two callers never have the lock at once, although drawing a ticket is not one step: suppose tickets `a < b` both
//! have it. `b` found all bytes before it free, so `a` was locked only after that, when `b` was locked already. But
//! after locking its byte `a` looks for locked bytes above it, finds `b`, and draws again.
//!
//! These locks belong to the open file, not to the process: two opens in one process queue like any other two.

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

/// The lock of a store. It is released when this is dropped, or when the process ends.
///
/// A child that was forked without exec shares the open file; it does not keep the lock when this is dropped, but it
/// does if the parent is killed.
#[derive(Debug)]
pub(crate) struct StoreLock {
    file: File,
}

/// Why there is no lock.
#[derive(Debug)]
pub(crate) enum LockError {
    /// The lock was not free in time.
    Late,
    /// The operating system's error.
    Io(io::Error),
}

impl From<io::Error> for LockError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl StoreLock {
    /// Waits for the store lock in the queue `path`, at most `wait`; `open` opens that file for reading and writing.
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
            // Somebody may have moved the folder away while we waited, and then this is another store's queue.
            if is_same_file(&lock.file, path)? {
                return Ok(lock);
            }
        }
    }
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        // Closing would do it too, but not as long as a forked child shares the open file.
        let _ = set(&self.file, LockMode::None, ByteRange::ALL);
    }
}

/// Takes the first ticket above all others.
fn draw(file: &File) -> io::Result<i64> {
    let mut from = 0;
    loop {
        let ticket = first_free(file, from)?;
        if claim(file, ticket)? {
            return Ok(ticket);
        }
        // Somebody else was quicker.
        from = ticket;
    }
}

/// Takes a ticket that seemed free, if it still is and if there is none above it.
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

/// The first byte at or above `from` such that neither it nor any byte above it is locked.
fn first_free(file: &File, mut from: i64) -> io::Result<i64> {
    while let Some(end) = locked_until(file, from)? {
        from = end;
    }
    Ok(from)
}

/// Waits until all bytes before `ticket` are free.
///
/// The kernel's wait has no time limit, so it is done by a thread of its own, which shares the open file and with it
/// the locks. If we give up first, dropping the lock frees our ticket at once; the thread, when it gets through, holds
/// nothing but read locks on bytes that others have left, and closes the file.
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

/// Waits first for the ticket just before ours, then for all before ours.
///
/// All would be enough. But then every waiter would wait for the holder's byte, and the kernel would wake them all at
/// the end of each hold.
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

/// A range of bytes; a length of 0 means without end, and is never wanted for "no bytes".
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

/// Where the first range that ends above `from` and that somebody else has locked ends, if there is one.
fn locked_until(file: &File, from: i64) -> io::Result<Option<i64>> {
    let mut probe = flock(LockMode::Write, ByteRange::from(from));
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut probe))?;
    if i32::from(probe.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    match probe.l_start.checked_add(probe.l_len) {
        Some(end) if probe.l_len > 0 && end < i64::MAX => Ok(Some(end)),
        // No ticket looks like this: another program has locked the file to its end.
        _ => Err(io::Error::other("another program has locked the whole file")),
    }
}

/// The tickets that are drawn, ascending, `file`'s own left out. The first has the lock, the others wait. A process
/// that is just drawing its ticket may be counted, or not.
pub(crate) fn tickets(file: &File) -> io::Result<Vec<i64>> {
    let mut tickets = Vec::new();
    let mut spans = vec![(0, i64::MAX)];
    while let Some((from, to)) = spans.pop() {
        // Read locks are in nobody's way here: what is found is a ticket.
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
        // No bytes would mean all the rest.
        spans.extend([(from, ticket), (ticket + 1, to)].into_iter().filter(|(from, to)| from < to));
    }
    tickets.sort_unstable();
    Ok(tickets)
}

/// Locks the bytes if nobody is in the way. No bytes are always free.
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

/// Locks the bytes as soon as nobody is in the way.
fn lock(file: &File, lock: LockMode, bytes: ByteRange) -> io::Result<()> {
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLKW(&flock(lock, bytes))) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// How long to look: a host may run thousands of processes, and the caller has waited enough.
const HOLDER_NAME_TIMEOUT: Duration = Duration::from_millis(300);

/// The process that has the lock in the queue `path`, as `12345 (margay-ipam)`, if it can be found.
///
/// The kernel's lock list does not name the owner of such a lock, but each open file's page under /proc shows the
/// locks that it holds. The holder is the one with the lowest write lock. Other users' processes are only seen by root.
pub(crate) fn find_holder(path: &Path) -> Option<String> {
    find_holder_among(Path::new("/proc"), path)
}

fn find_holder_among(processes: &Path, path: &Path) -> Option<String> {
    let queue = fs::metadata(path).ok()?;
    let started = Instant::now();
    let (mut lowest, mut first) = (u64::MAX, Vec::new());
    for process in fs::read_dir(processes).ok()?.flatten() {
        if started.elapsed() > HOLDER_NAME_TIMEOUT {
            // The process found so far may only be waiting, and nobody must end the wrong process.
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
    // A process that was just being started shared its parent's open files, and is somebody else by now.
    first.into_iter().find_map(|(pid, process)| {
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        (ticket_of(&process, path, &queue) == Some(lowest)).then(|| format!("{pid} ({})", name.trim()))
    })
}

/// The lowest ticket that a process has in a queue.
fn ticket_of(process: &Path, path: &Path, queue: &Metadata) -> Option<u64> {
    let files = fs::read_dir(process.join("fd")).ok()?.flatten();
    let tickets = files.filter_map(|file| {
        // The name first: asking for more may hang on a file of a dead network file system.
        let is_queue = fs::read_link(file.path()).is_ok_and(|link| link.file_name() == path.file_name())
            && fs::metadata(file.path()).is_ok_and(|file| (file.dev(), file.ino()) == (queue.dev(), queue.ino()));
        let info = || fs::read_to_string(process.join("fdinfo").join(file.file_name())).ok();
        if is_queue { parse_ticket(&info()?) } else { None }
    });
    tickets.min()
}

/// The byte on which an open file holds a write lock, from lines such as
/// `lock: 1: OFDLCK ADVISORY  WRITE -1 fe:00:131 7 7`.
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
