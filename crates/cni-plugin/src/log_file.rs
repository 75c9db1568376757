//! The log file, which many processes write at once, each for a few milliseconds; and its rotation.
//!
//! Name, limits and rotated names (`cni-2026-11-21T02-41-03.956.log`) are those of Calico's plugins, which may have the
//! same file. Go's library lumberjack does it there. It is made for one process, and so are the Rust libraries: each
//! keeps the size of the file that it has open, and renames without a lock. So the rotation here is our own.
//!
//! A line is one write at the end of the file, under a lock (`flock`) on that very file. A process that got the lock
//! checks whether the file still has its name. If not, another process has rotated it meanwhile, and the process opens
//! the new file. So only the holder of the lock on the named file renames it: no file is renamed twice, and no line
//! goes into a file that was rotated. The lock ends with its process. A lock that somebody holds for longer than a
//! second costs the rotation, not the line.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

/// When a file was rotated, in UTC, as its name says it. These texts are in the order of the times.
const STAMP: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]-[minute]-[second].[subsecond digits:3]");
/// The shape of every such text, with zeros for its digits.
const STAMP_SHAPE: &str = "0000-00-00T00-00-00.000";

const MEGABYTE: u64 = 1024 * 1024;
const DAY: i64 = 24 * 60 * 60;

/// How long a process waits for the lock. Once it has waited in vain, it waits no more.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a process waits before it tries the lock again: a line takes less.
const PAUSE: Duration = Duration::from_millis(1);
/// How often a line may find that another process has just rotated the file.
const ATTEMPTS: usize = 100;
/// By how many milliseconds the name of a rotated file may be ahead of the clock, so that it is the last one.
const MOST_AT_ONCE: u64 = 1000;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The most bytes that a file has, but for a line that is longer.
    bytes: Option<u64>,
    /// For how many seconds a rotated file is kept.
    seconds: Option<i64>,
    /// How many rotated files are kept.
    count: Option<usize>,
}

impl Limits {
    /// Megabytes, days and a number, as a configuration has them: 0 is the default, less than 0 is no limit.
    pub(crate) fn new(size: i64, age: i64, count: i64) -> Self {
        let given =
            |value: i64, default: i64| Some(if value == 0 { default } else { value }).filter(|value| *value > 0);
        Self {
            bytes: given(size, 100).and_then(|size| u64::try_from(size).ok()).map(|size| size.saturating_mul(MEGABYTE)),
            seconds: given(age, 30).map(|days| days.saturating_mul(DAY)),
            count: given(count, 10).and_then(|count| usize::try_from(count).ok()),
        }
    }
}

/// A file that lines are added to.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The file that had the name last.
    file: Option<File>,
    patience: Duration,
}

impl LogFile {
    /// Opens the file (mode 0600), in a folder that is made if it is missing (0755), and removes rotated files that are too
    /// old or too many.
    ///
    /// # Errors
    /// An error of opening the file.
    pub(crate) fn open(path: impl Into<PathBuf>, limits: Limits) -> io::Result<Self> {
        let path = path.into();
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        }
        let state = Mutex::new(State { file: Some(append_to(&path)?), patience: PATIENCE });
        let log = Self { path, limits, state };
        log.remove_old(OffsetDateTime::now_utc());
        Ok(log)
    }

    /// Adds a line.
    ///
    /// # Errors
    /// An error of writing the line.
    pub(crate) fn write(&self, line: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..ATTEMPTS {
            let file = match state.file.take() {
                Some(file) => file,
                None => append_to(&self.path)?,
            };
            let is_locked = lock(&file, &mut state.patience);
            let metadata = file.metadata()?;
            if !has_name(&self.path, &metadata) {
                continue;
            }
            // A device is never renamed.
            let is_full = is_locked && metadata.is_file() && self.is_full(metadata.len(), line);
            if is_full && self.rotate(OffsetDateTime::now_utc()).is_ok() {
                continue;
            }
            let written = (&file).write_all(line);
            if is_locked {
                // Otherwise it ends with the file.
                let _ = file.unlock();
            }
            state.file = Some(file);
            return written;
        }
        append_to(&self.path)?.write_all(line)
    }

    fn is_full(&self, length: u64, line: &[u8]) -> bool {
        let with_line = length.saturating_add(line.len() as u64);
        length > 0 && self.limits.bytes.is_some_and(|most| with_line > most)
    }

    /// Renames the file, of which the lock is ours, to a rotated one.
    fn rotate(&self, now: OffsetDateTime) -> io::Result<()> {
        let rotated = self.rotated();
        let times = (0..MOST_AT_ONCE).map(|later| stamp(now + Duration::from_millis(later)));
        // The newest file has the last name, also if several are rotated in a millisecond; unless a clock was far ahead.
        let is_last = |stamp: &String| rotated.last().is_none_or(|newest| stamp > newest);
        let free = times.clone().find(is_last).or_else(|| times.clone().find(|stamp| !rotated.contains(stamp)));
        let free = free.ok_or(io::ErrorKind::AlreadyExists)?;
        fs::rename(&self.path, self.at(&free))?;
        self.remove_old(now);
        Ok(())
    }

    /// When the files were rotated that are there.
    fn rotated(&self) -> BTreeSet<String> {
        let (prefix, suffix) = self.around_stamp();
        let stamp = |name: String| Some(name.strip_prefix(&prefix)?.strip_suffix(&suffix)?.to_owned());
        names_beside(&self.path).filter_map(stamp).filter(|text| is_stamp(text)).collect()
    }

    /// The file that was rotated then.
    fn at(&self, stamp: &str) -> PathBuf {
        let (prefix, suffix) = self.around_stamp();
        self.path.with_file_name(format!("{prefix}{stamp}{suffix}"))
    }

    /// The text before and behind the time in the name of a rotated file.
    fn around_stamp(&self) -> (String, String) {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let (stem, suffix) = name.split_at(name.rfind('.').unwrap_or(name.len()));
        (format!("{stem}-"), suffix.to_owned())
    }

    /// Removes rotated files that are too old or too many. Several processes may do so at once.
    fn remove_old(&self, now: OffsetDateTime) {
        let Limits { seconds, count, .. } = self.limits;
        let oldest = seconds.and_then(|seconds| now.checked_sub(time::Duration::seconds(seconds))).map(stamp);
        for (place, stamp) in self.rotated().iter().rev().enumerate() {
            let is_surplus = count.is_some_and(|count| place >= count);
            let is_old = oldest.as_ref().is_some_and(|oldest| stamp < oldest);
            if is_surplus || is_old {
                // Another process may have been faster, and what stays is found again.
                let _ = fs::remove_file(self.at(stamp));
            }
        }
    }
}

/// Opens a file to add to it, and makes it if it is missing.
fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Locks a file, unless somebody holds the lock for too long, or files cannot be locked there.
fn lock(file: &File, patience: &mut Duration) -> bool {
    let mut left = *patience;
    loop {
        match file.try_lock() {
            Ok(()) => return true,
            Err(TryLockError::WouldBlock) if !left.is_zero() => {
                sleep(PAUSE);
                left = left.saturating_sub(PAUSE);
            }
            Err(_) => {
                *patience = Duration::ZERO;
                return false;
            }
        }
    }
}

/// True if the file with this name is that one.
fn has_name(path: &Path, file: &fs::Metadata) -> bool {
    fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (file.dev(), file.ino()))
}

fn names_beside(path: &Path) -> impl Iterator<Item = String> {
    let entries = path.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

fn stamp(at: OffsetDateTime) -> String {
    // The format names only parts that every time has, so writing it cannot fail.
    at.format(STAMP).unwrap_or_default()
}

fn is_stamp(text: &str) -> bool {
    text.len() == STAMP_SHAPE.len()
        && text.bytes().zip(STAMP_SHAPE.bytes()).all(
            |(byte, shape)| {
                if shape == b'0' { byte.is_ascii_digit() } else { byte == shape }
            },
        )
}

#[cfg(test)]
#[path = "log_file_tests.rs"]
mod tests;
