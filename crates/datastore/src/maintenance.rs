//! Caring for a store as a whole: looking at it from outside, making it smaller, putting another in its place. All of it goes through
//! the store's driver, with what is known of its errors beside what the engine says.

use std::path::{Path, PathBuf};
use std::time::Duration;

use driver::{Location, OpenOptions, Opened};
use kv::{Error, ErrorKind, Operation, Result, Revision};
use kv_local::Engine;
use tokio::task::spawn_blocking;

pub use kv_local::{FormatUpgrade, LockHolder, QueueFile, SpareSpace, StorePeek};
pub use kv_mvcc::{
    Changes, FORMAT_WITH_LEASES, HistoryShare, MvccStore, OldestRevision, Retention, StoreStatus, Verification,
};

/// Looks at an embedded store without waiting for the lock; see [`kv_local::peek`].
///
/// # Errors
/// Those of [`kv_local::peek`]; `Unsupported` for any other store.
pub async fn peek(location: &Location) -> Result<StorePeek> {
    on_engine(location, kv_local::peek).await
}

/// How many processes wait for the lock of an embedded store; 0 for any other store.
///
/// # Errors
/// Those of [`kv_local::waiting`].
pub async fn waiting(location: &Location) -> Result<usize> {
    if location.path().is_none() {
        return Ok(0);
    }
    on_engine(location, kv_local::waiting).await
}

/// The queue of an embedded store, for a process that looks at it again and again.
///
/// # Errors
/// Those of [`kv_local::QueueFile::open`]; `Unsupported` for any other store. This blocks for as long as it takes to open a file.
pub fn queued(location: &Location) -> Result<QueueFile> {
    let (engine, path) = embedded(location)?;
    QueueFile::open(engine, path).map_err(|error| explained(location, error))
}

/// Fails where an embedded store that is not there could not be made; see [`kv_local::check_creatable`]. Others are not made.
///
/// # Errors
/// Those of [`kv_local::check_creatable`].
pub async fn check_creatable(location: &Location) -> Result<()> {
    if location.path().is_none() {
        return Ok(());
    }
    on_engine(location, kv_local::check_creatable).await
}

/// The newest revision of an embedded store, without the lock; see [`kv_local::newest`].
///
/// # Errors
/// Those of [`kv_local::newest`]; `Unsupported` for any other store.
pub async fn newest(location: &Location) -> Result<Option<Revision>> {
    on_engine(location, kv_local::newest).await
}

/// Makes the files of an embedded store as small as its engine can.
///
/// # Errors
/// Those of [`kv_local::shrink_blocking`]; `Unsupported` for any other store.
pub async fn shrink(location: &Location, wait: Duration) -> Result<SpareSpace> {
    on_engine(location, move |engine, path| kv_local::shrink_blocking(engine, path, &waiting_for(wait))).await
}

/// Makes an empty embedded store in a format of rows. False if there is a store already.
///
/// # Errors
/// Those of [`kv_local::create_blocking`]; `Unsupported` for any other store.
pub async fn create(location: &Location, format: u32, wait: Duration) -> Result<bool> {
    on_engine(location, move |engine, path| {
        kv_local::create_blocking(engine, path, &waiting_for(wait).with_format(format))
    })
    .await
}

/// Raises an embedded store to the newest format.
///
/// # Errors
/// Those of [`kv_local::upgrade_blocking`]; `Unsupported` for any other store.
pub async fn upgrade(location: &Location, wait: Duration) -> Result<FormatUpgrade> {
    on_engine(location, move |engine, path| kv_local::upgrade_blocking(engine, path, &waiting_for(wait))).await
}

/// Says what [`upgrade`] would do, and writes nothing.
///
/// # Errors
/// Those of [`kv_local::preview_upgrade_blocking`]; `Unsupported` for any other store.
pub async fn preview_upgrade(location: &Location, wait: Duration) -> Result<FormatUpgrade> {
    on_engine(location, move |engine, path| kv_local::preview_upgrade_blocking(engine, path, &waiting_for(wait))).await
}

/// A place beside an embedded store in which its replacement is built; see [`kv_local::FolderStaging`].
#[derive(Debug)]
pub struct StoreStaging {
    staging: kv_local::FolderStaging,
    replaced: Location,
}

/// The lock of a store that is about to be replaced.
#[derive(Debug)]
pub struct StoreReplacement(kv_local::FolderReplacement);

impl StoreStaging {
    /// A place to build what shall be at `location`.
    ///
    /// # Errors
    /// Those of [`kv_local::FolderStaging::begin`]; `Unsupported` for a store that is not embedded.
    pub async fn begin(location: &Location) -> Result<Self> {
        let staging = on_engine(location, kv_local::FolderStaging::begin).await?;
        Ok(Self { staging, replaced: location.clone() })
    }

    /// The path at which the caller builds the store: there is none yet.
    pub fn location(&self) -> Location {
        self.replaced.moved_to(self.staging.store())
    }

    /// Waits for the lock of the replaced store; `None` if there is nothing.
    ///
    /// # Errors
    /// Those of [`kv_local::FolderStaging::hold`].
    pub async fn hold(self, wait: Duration) -> Result<(Self, Option<StoreReplacement>)> {
        let replaced = self.replaced.clone();
        on_engine(&replaced, move |engine, _| {
            let held = self.staging.hold(engine, wait)?;
            Ok((self, held.map(StoreReplacement)))
        })
        .await
    }

    /// Puts what was built in its place; returns where what was there is now.
    ///
    /// # Errors
    /// Those of [`kv_local::FolderStaging::finish`].
    pub async fn finish(self, old: Option<StoreReplacement>) -> Result<Option<PathBuf>> {
        let replaced = self.replaced.clone();
        on_engine(&replaced, move |_, _| self.staging.finish(old.map(|old| old.0))).await
    }
}

impl StoreReplacement {
    /// The newest revision of the replaced store; 0 if it is not known.
    ///
    /// # Errors
    /// Those of [`kv_local::FolderReplacement::newest_revision`].
    pub fn newest_revision(&self) -> Result<u64> {
        self.0.newest_revision()
    }
}

fn waiting_for(wait: Duration) -> OpenOptions {
    OpenOptions::default().with_wait(wait)
}

/// Does blocking work on the files of an embedded store, on another thread.
async fn on_engine<T: Send + 'static>(
    location: &Location,
    work: impl FnOnce(&'static dyn Engine, &Path) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (engine, path) = embedded(location)?;
    let path = path.to_owned();
    spawn_blocking(move || work(engine, &path))
        .await
        .unwrap_or_else(
            |error| Err(Error::new(ErrorKind::Io, Operation::Open, location.to_string()).with_source(error)),
        )
        .map_err(|error| explained(location, error))
}

fn embedded(location: &Location) -> Result<(&'static dyn Engine, &Path)> {
    location.driver().engine().zip(location.path()).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, Operation::Open, location.to_string())
            .with_detail("it has no files on this host")
    })
}

/// Has the driver open a store, for this process alone.
pub(crate) async fn open_here(location: &Location, options: &OpenOptions) -> Result<Box<dyn Opened>> {
    location.driver().open(location.place(), options).await.map_err(|error| explained(location, error))
}

/// Adds to the error of a store in a folder what the engine cannot know: the command that makes a store, or which other engine's
/// files are there.
fn explained(location: &Location, error: Error) -> Error {
    let Some(folder) = location.path() else { return error };
    match (error.kind(), error.detail()) {
        (ErrorKind::Missing, Some(detail)) => {
            let detail = format!("{detail}; `margay --store {} pool create NAME CIDR` makes it", error.store());
            error.with_detail(detail)
        }
        // An engine reads in `store.id` whose store it is; without that file the drivers know.
        (ErrorKind::Unsupported, _) if kv_local::engine_in(folder).is_none() => {
            let mut names = location.drivers().with_files_in(folder).map(|driver| driver.facts().name);
            match names.find(|name| *name != location.facts().name) {
                Some(other) => error.with_detail(kv_local::store_of(folder, other)),
                None => error,
            }
        }
        _ => error,
    }
}
