//! The options of an open store.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kv::{ErrorKind, Purpose};
use tokio::task::{JoinError, spawn_blocking};
use uuid::Uuid;

use crate::codec::FORMAT;

/// Room that a store keeps on its disk for releases.
pub trait SpaceReserve: fmt::Debug + Send + Sync {
    /// Puts back what was given up.
    ///
    /// # Errors
    /// The advice for a user, if there is no room for that.
    fn restore(&self) -> Result<(), String>;

    /// Checks that the disk can be written to and has room for a usual commit besides.
    ///
    /// # Errors
    /// The kind of error that a commit would have, and the advice for a user.
    fn check_room(&self) -> Result<(), (ErrorKind, String)>;

    /// Gives up a part. False if there was nothing left.
    fn release_part(&self) -> bool;
}

/// How a store behaves, and what it must be. `Default` suits every caller but for the name.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the store in errors: the engine's.
    pub name: &'static str,
    /// How much history is kept.
    pub retention: Retention,
    /// Where the times of revisions come from.
    pub clock: Clock,
    /// Where work that blocks is done.
    pub blocking: Blocking,
    /// The id that the store must have. With one, a table without rows is a damaged store rather than a new one.
    pub expected_id: Option<Uuid>,
    /// How closely it is looked at.
    pub inspection: Inspection,
    /// The purpose for which the store is opened.
    pub purpose: Purpose,
    /// Room on the disk that is kept for releases, if there is any.
    pub reserve: Option<Arc<dyn SpaceReserve>>,
    /// The format that a new store gets.
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

/// Where work that blocks is done: reading and writing files, waiting for a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blocking {
    /// On threads of the runtime that may block. The thread that asks goes on with other tasks.
    #[default]
    OnThreads,
    /// On the thread that asks. For a process that does one thing and ends, like a CNI plugin: it has no other tasks, and
    /// threads cost it a tenth of its life.
    InPlace,
}

impl Blocking {
    /// Does the work.
    ///
    /// # Errors
    /// If the runtime shuts down before it is done.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
        match self {
            Self::OnThreads => spawn_blocking(work).await,
            Self::InPlace => Ok(work()),
        }
    }
}

/// How closely a store is looked at when it is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inspection {
    /// The newest revision is there, and in a store of ordinary size all keys are.
    #[default]
    Entries,
    /// The newest revision is there: for a table that nobody has touched since it was looked at and closed.
    Newest,
}

/// How much history is kept: what lies beyond any of the bounds is given up, a few revisions with each commit.
/// The state at the newest revision is always there, whatever the bounds.
///
/// A store of format 2 can have bounds of its own ([`MvccStore::set_retention`](crate::MvccStore::set_retention)); every program
/// that opens it goes by these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// How many revisions can be read; `None` is unbounded.
    pub revisions: Option<u64>,
    /// How old a revision may be; `None` is unbounded. Applied only while the clock is within a day of the newest
    /// revision, and where no two revisions around the bound lie more than a day apart: a clock that jumps does not take
    /// the history with it. After a pause, what is older goes once its age has passed since then.
    pub age: Option<Duration>,
    /// How many bytes the log and the superseded values may have; `None` is unbounded.
    pub bytes: Option<u64>,
    /// How old a revision must be before it goes because of `revisions`; `None`: it goes at once. Without it a writer that is
    /// fast for a second would end the history of a day.
    pub min_age: Option<Duration>,
}

impl Retention {
    /// Everything is kept until somebody compacts.
    pub const UNBOUNDED: Self = Self { revisions: None, age: None, bytes: None, min_age: None };

    /// For a store that clients of etcd's API write to: they write more than IPAM alone, in bursts, and read what is
    /// minutes old.
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
    /// The system's clock.
    pub fn system() -> Self {
        Self::new(SystemTime::now)
    }

    /// A clock that calls `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Microseconds since 1970; 0 for anything before.
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

/// A duration as rows record it.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The time that a row records.
pub(crate) fn time(micros: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}
