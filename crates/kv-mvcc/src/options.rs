//! Defines the options with which a store is opened.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kv::{ErrorKind, Purpose};
use tokio::task::{JoinError, spawn_blocking};
use uuid::Uuid;

use crate::codec::FORMAT;

/// Disk space that a store reserves for releases.
pub trait SpaceReserve: fmt::Debug + Send + Sync {
    /// Reserves again the space that was released.
    ///
    /// # Errors
    /// Advice for the user, if the disk does not have enough space.
    fn restore(&self) -> Result<(), String>;

    /// Checks that the disk is writable and has space for a usual commit in addition to the reserve.
    ///
    /// # Errors
    /// The error kind that a commit would get, and advice for the user.
    fn check_room(&self) -> Result<(), (ErrorKind, String)>;

    /// True if a part of the reserved space was freed and is not reserved again.
    fn is_short(&self) -> bool;

    /// Frees a part of the reserved space. Returns false if no reserved space was left.
    fn release_part(&self) -> bool;
}

/// Options of [`MvccStore::open`](crate::MvccStore::open). The default options suit every caller, except for the name.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the store in errors, usually the engine's name.
    pub name: &'static str,
    /// The limits on the history that the store keeps.
    pub retention: Retention,
    /// The clock that sets the times of revisions.
    pub clock: Clock,
    /// The threads on which blocking work runs.
    pub blocking: Blocking,
    /// The id that the store must have. If an id is set, a table without rows counts as a damaged store and not as a
    /// new store.
    pub expected_id: Option<Uuid>,
    /// The extent to which opening a store checks its rows.
    pub inspection: Inspection,
    /// The purpose of the writes through this handle.
    pub purpose: Purpose,
    /// The disk space that is reserved for releases.
    pub reserve: Option<Arc<dyn SpaceReserve>>,
    /// The format of a new store.
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

/// The threads on which blocking work runs, for example reading and writing files, or waiting for the write queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blocking {
    /// Blocking work runs on the blocking threads of the runtime, and the calling thread continues with other tasks.
    #[default]
    OnThreads,
    /// Blocking work runs on the calling thread. This mode is for a process that does one thing and exits, for example
    /// a CNI plugin: a plugin has no other tasks, and starting threads would take a tenth of its run time.
    InPlace,
}

impl Blocking {
    /// Runs blocking work on the selected threads.
    ///
    /// # Errors
    /// If the runtime shuts down before the work is done.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
        match self {
            Self::OnThreads => spawn_blocking(work).await,
            Self::InPlace => Ok(work()),
        }
    }
}

/// The extent to which a store is checked when it is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inspection {
    /// Checks that the newest revision exists, and, in a store of ordinary size, that all keys exist.
    #[default]
    Entries,
    /// Checks only that the newest revision exists. This check suffices for a table that has not changed since the
    /// table was last checked and closed.
    Newest,
}

/// Limits on the history that a store keeps. Revisions beyond any limit are removed, a few with each commit. The state
/// at the newest revision is always kept.
///
/// A store of format 2 can have its own limits ([`MvccStore::set_retention`](crate::MvccStore::set_retention)). The
/// store's own limits override the limits from [`Options`] in every program that opens the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Maximum number of readable revisions; `None` means unlimited.
    pub revisions: Option<u64>,
    /// Maximum age of a revision; `None` means unlimited. The limit applies only while the clock is within a day of
    /// the newest revision, and only where the revisions around the limit are at most a day apart. Because of these
    /// conditions, a clock that jumps does not remove history. After a pause of more than a day, older revisions are
    /// removed once this age has passed since the pause.
    pub age: Option<Duration>,
    /// Maximum size of the log and the superseded values in bytes; `None` means unlimited.
    pub bytes: Option<u64>,
    /// Minimum age at which the limit `revisions` removes a revision; `None` means no minimum. Without a minimum age,
    /// a short burst of writes would remove the history of a whole day.
    pub min_age: Option<Duration>,
}

impl Retention {
    /// Keeps all history until a compaction.
    pub const UNBOUNDED: Self = Self { revisions: None, age: None, bytes: None, min_age: None };

    /// Limits for a store that clients of etcd's API write to. Clients of etcd's API write more than IPAM does, in
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

/// A source of time.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl Clock {
    /// The system clock.
    pub fn system() -> Self {
        Self::new(SystemTime::now)
    }

    /// Creates a clock that calls `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The current time in microseconds since 1970; 0 for earlier times.
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

/// Converts a duration to microseconds, as rows record durations.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Converts the microseconds since 1970 in a row to a time.
pub(crate) fn time(micros: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}
