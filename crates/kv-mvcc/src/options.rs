//! Defines the options with which a store is opened.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kv::{ErrorKind, Purpose};
use tokio::task::{JoinError, spawn_blocking};
use uuid::Uuid;

use crate::codec::FORMAT;

/// Disk space that a store reserves for releasing addresses when the disk is full.
pub trait SpaceReserve: fmt::Debug + Send + Sync {
    /// Allocates the freed parts of the disk reserve again.
    ///
    /// # Errors
    /// If the disk has too little space, the error's text tells the user what to do.
    fn restore(&self) -> Result<(), String>;

    /// Checks that the disk is writable, and has space for a usual commit without using the reserve.
    ///
    /// # Errors
    /// The error kind that a commit would return now, and advice for the user.
    fn check_room(&self) -> Result<(), (ErrorKind, String)>;

    /// True if a part of the reserved space has been freed and not yet allocated again.
    fn is_short(&self) -> bool;

    /// Frees a part of the reserved disk space. Returns false if all reserved space was already freed.
    fn release_part(&self) -> bool;
}

/// Options of [`MvccStore::open`](crate::MvccStore::open). Only the store's name must be set; the defaults of the other
/// options suit all callers.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the store in error messages, usually the engine's name.
    pub name: &'static str,
    /// The limits on the history that the store keeps.
    pub retention: Retention,
    /// The clock from which commits take the times of their revisions.
    pub clock: Clock,
    /// The threads on which the store runs blocking work.
    pub blocking: Blocking,
    /// The id that the store in the table must have. If `expected_id` is set, opening a table without rows fails with
    /// `Corrupt` instead of creating a store.
    pub expected_id: Option<Uuid>,
    /// The extent to which the store's rows are checked when it is opened.
    pub inspection: Inspection,
    /// What the writes through the store handle are for, for example releasing addresses. Only writes for some purposes
    /// may use reserved disk space.
    pub purpose: Purpose,
    /// The disk space that is reserved for releasing addresses.
    pub reserve: Option<Arc<dyn SpaceReserve>>,
    /// The format in which a new store is created.
    pub format: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "store",
            retention: Retention::default(),
            clock: Clock::system(),
            blocking: Blocking::default(),
            expected_id: None,
            inspection: Inspection::default(),
            purpose: Purpose::default(),
            reserve: None,
            format: FORMAT,
        }
    }
}

/// The threads that run blocking work, such as file I/O or waiting for the write queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blocking {
    /// Blocking work runs on the runtime's blocking threads, so the calling thread can continue with other tasks.
    #[default]
    OnThreads,
    /// Runs blocking work on the calling thread, for short-lived processes that do only one thing. A CNI plugin, for
    /// example, does nothing else during a store call, and starting threads for the call would take a tenth of the
    /// plugin's run time.
    InPlace,
}

impl Blocking {
    /// Runs blocking work on the threads that this [`Blocking`] value selects.
    ///
    /// # Errors
    /// [`JoinError`] if the runtime shuts down before the blocking work is done.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
        match self {
            Self::OnThreads => spawn_blocking(work).await,
            Self::InPlace => Ok(work()),
        }
    }
}

/// How thoroughly a store is checked when it is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inspection {
    /// Checks that the newest revision exists, and in a store of at most 4,096 keys, also that all keys exist.
    #[default]
    Entries,
    /// Checks only that the newest revision exists in the log, which suffices if the table was checked and closed
    /// before and has not changed since.
    Newest,
}

/// Limits on the history that a store keeps. Each commit removes a few of the revisions that exceed a limit. The state
/// at the newest revision is always kept.
///
/// A store of format 2 can also store limits in its table
/// ([`MvccStore::set_retention`](crate::MvccStore::set_retention)), which override the limits in the [`Options`] of
/// every program that opens the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Maximum number of readable revisions; `None` means unlimited.
    pub revisions: Option<u64>,
    /// Maximum age of a revision; `None` means unlimited. To guard against clock jumps, the age limit applies only if
    /// the store's clock is at most a day away from the time of the newest revision. The age limit also requires that
    /// the last expired and the first kept revision were made at most a day apart. After more than a day without
    /// writes, revisions from before the pause are removed only once the maximum age has passed since the end of the
    /// pause.
    pub age: Option<Duration>,
    /// Maximum total size in bytes of the log rows and the superseded values; `None` means unlimited.
    pub bytes: Option<u64>,
    /// Minimum age before the limit `revisions` may remove a revision; `None` means no minimum. Without a minimum age,
    /// a short burst of writes would push out the history of a whole day.
    pub min_age: Option<Duration>,
}

impl Retention {
    /// Keeps all history until the store is compacted.
    pub const UNBOUNDED: Self = Self { revisions: None, age: None, bytes: None, min_age: None };

    /// Limits for a store to which clients of etcd's API write. Clients of etcd's API write more than IPAM does, in
    /// bursts, and read revisions that are minutes old.
    pub const WITH_CLIENTS: Self = Self {
        revisions: Some(10_000),
        age: Some(Duration::from_secs(7 * 24 * 60 * 60)),
        bytes: Some(64 * 1024 * 1024),
        min_age: Some(Duration::from_secs(5 * 60)),
    };
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            revisions: Some(10_000),
            age: Some(Duration::from_secs(7 * 24 * 60 * 60)),
            bytes: Some(16 * 1024 * 1024),
            min_age: None,
        }
    }
}

/// A source of the current time; tests replace it.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl Clock {
    /// The system clock.
    pub fn system() -> Self {
        Self::new(SystemTime::now)
    }

    /// Creates a clock that takes the current time from `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The current time in microseconds since 1970; 0 before 1970.
    pub(crate) fn micros(&self) -> u64 {
        let since = (self.0)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// Converts a duration to microseconds, the unit of all durations in rows.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Converts a time in microseconds since 1970, as stored in rows, to a [`SystemTime`].
pub(crate) fn time(micros: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}
