//! Inspects a store without the store lock, shrinks, creates and upgrades stores, and replaces a store with a new one.
//! All maintenance operations use the driver of the store. Maintenance operations add configuration-dependent advice to
//! an engine's error.

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

/// Inspects an embedded store without waiting for the store lock (see [`kv_local::peek`]).
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::peek`].
pub async fn peek(location: &Location) -> Result<StorePeek> {
    on_engine(location, kv_local::peek).await
}

/// Returns the number of processes that wait for the lock of an embedded store; 0 for a store that is not embedded.
///
/// # Errors
/// See [`kv_local::waiting`].
pub async fn waiting(location: &Location) -> Result<usize> {
    if location.path().is_none() {
        return Ok(0);
    }
    on_engine(location, kv_local::waiting).await
}

/// Opens the queue file of an embedded store, for a process that polls the queue; blocks the calling thread meanwhile.
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::QueueFile::open`].
pub fn queued(location: &Location) -> Result<QueueFile> {
    let (engine, path) = embedded(location)?;
    QueueFile::open(engine, path).map_err(|error| explained(location, error))
}

/// Returns an error if an embedded store is missing and could not be created (see [`kv_local::check_creatable`]). For a
/// store that is not embedded, `check_creatable` always succeeds.
///
/// # Errors
/// See [`kv_local::check_creatable`].
pub async fn check_creatable(location: &Location) -> Result<()> {
    if location.path().is_none() {
        return Ok(());
    }
    on_engine(location, kv_local::check_creatable).await
}

/// Reads the newest revision of an embedded store without the store lock (see [`kv_local::newest`]).
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::newest`].
pub async fn newest(location: &Location) -> Result<Option<Revision>> {
    on_engine(location, kv_local::newest).await
}

/// Shrinks the files of an embedded store as far as its engine can.
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::shrink_blocking`].
pub async fn shrink(location: &Location, wait: Duration) -> Result<SpareSpace> {
    on_engine(location, move |engine, path| kv_local::shrink_blocking(engine, path, &waiting_for(wait))).await
}

/// Creates an empty embedded store whose rows have the format `format`; returns false if a store exists at the
/// location.
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::create_blocking`].
pub async fn create(location: &Location, format: u32, wait: Duration) -> Result<bool> {
    on_engine(location, move |engine, path| {
        kv_local::create_blocking(engine, path, &waiting_for(wait).with_format(format))
    })
    .await
}

/// Upgrades an embedded store to the newest format of its rows.
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::upgrade_blocking`].
pub async fn upgrade(location: &Location, wait: Duration) -> Result<FormatUpgrade> {
    on_engine(location, move |engine, path| kv_local::upgrade_blocking(engine, path, &waiting_for(wait))).await
}

/// Returns what [`upgrade`] would return, without writing anything.
///
/// # Errors
/// `Unsupported` if the store is not embedded; any error of [`kv_local::preview_upgrade_blocking`].
pub async fn preview_upgrade(location: &Location, wait: Duration) -> Result<FormatUpgrade> {
    on_engine(location, move |engine, path| kv_local::preview_upgrade_blocking(engine, path, &waiting_for(wait))).await
}

/// A folder beside an embedded store, in which a program builds the replacement store (see
/// [`kv_local::FolderStaging`]).
#[derive(Debug)]
pub struct StoreStaging {
    staging: kv_local::FolderStaging,
    replaced: Location,
}

/// The store that will be replaced, with its lock held.
#[derive(Debug)]
pub struct StoreReplacement(kv_local::FolderReplacement);

impl StoreStaging {
    /// Creates the staging folder for a store that will replace the store at `location`.
    ///
    /// # Errors
    /// `Unsupported` if the store is not embedded; any error of [`kv_local::FolderStaging::begin`].
    pub async fn begin(location: &Location) -> Result<Self> {
        let staging = on_engine(location, kv_local::FolderStaging::begin).await?;
        Ok(Self { staging, replaced: location.clone() })
    }

    /// Returns the location in the staging folder at which the caller must create the replacement store. No replacement
    /// store exists in the staging folder yet.
    pub fn location(&self) -> Location {
        self.replaced.moved_to(self.staging.store())
    }

    /// Waits for the store lock of the store that will be replaced. The returned `StoreReplacement` is `None` if there
    /// is no store to replace.
    ///
    /// # Errors
    /// See [`kv_local::FolderStaging::hold`].
    pub async fn hold(self, wait: Duration) -> Result<(Self, Option<StoreReplacement>)> {
        let replaced = self.replaced.clone();
        on_engine(&replaced, move |engine, _| {
            let held = self.staging.hold(engine, wait)?;
            Ok((self, held.map(StoreReplacement)))
        })
        .await
    }

    /// Renames the folder of the replacement store to the old store's location, and returns the path that the old store
    /// has now.
    ///
    /// # Errors
    /// See [`kv_local::FolderStaging::finish`].
    pub async fn finish(self, old: Option<StoreReplacement>) -> Result<Option<PathBuf>> {
        let replaced = self.replaced.clone();
        on_engine(&replaced, move |_, _| self.staging.finish(old.map(|old| old.0))).await
    }
}

impl StoreReplacement {
    /// Returns the newest revision of the old store that will be replaced; 0 if unknown.
    ///
    /// # Errors
    /// See [`kv_local::FolderReplacement::newest_revision`].
    pub fn newest_revision(&self) -> Result<u64> {
        self.0.newest_revision()
    }
}

fn waiting_for(wait: Duration) -> OpenOptions {
    OpenOptions::default().with_wait(wait)
}

/// Runs blocking work on the engine of an embedded store, on a thread for blocking tasks.
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

pub(crate) async fn open_here(location: &Location, options: &OpenOptions) -> Result<Box<dyn Opened>> {
    location.driver().open(location.place(), options).await.map_err(|error| explained(location, error))
}

/// Adds advice that an engine cannot know to the error about a store in a folder. If the store is missing, the error
/// suggests the command that creates a store, or names the other engine whose files are in the folder.
fn explained(location: &Location, error: Error) -> Error {
    let Some(folder) = location.path() else { return error };
    match (error.kind(), error.detail()) {
        (ErrorKind::Missing, Some(detail)) => {
            let detail = format!("{detail}; `margay --store {} pool create NAME CIDR` makes it", error.store());
            error.with_detail(detail)
        }
        // If the folder has a file `store.id`, the engine reads from `store.id` which engine created the store. Without
        // a file `store.id`, each driver can recognize the files of its own engine.
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
