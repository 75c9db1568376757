//! Makes the store at a URL available to the conformance test cases.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use datastore::{Create, Drivers, Location, OpenStore};
use kv::{ErrorKind, Operation, Store};
use tokio::sync::Mutex;

/// Time limit of the wait for the store lock when a conformance case opens a store. Plugins hold the store lock for
/// milliseconds.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The store at a URL, on which conformance cases run. Each conformance case opens and closes the store, so that other
/// processes can open the store between two cases.
#[derive(Clone, Debug)]
pub(super) struct UrlHarness(pub(super) Location);

impl UrlHarness {
    pub(super) async fn open(&self) -> kv::Result<StoreFixture> {
        StoreFixture::new(self.0.clone(), Create::Never, LOCK_TIMEOUT).await
    }
}

#[async_trait]
impl Harness for UrlHarness {
    fn abilities(&self) -> &[Ability] {
        match self.0.path() {
            Some(_) => &[Ability::Reopen, Ability::Close, Ability::Measure, Ability::Progress],
            // A store server cannot be stopped or measured through its URL.
            None => &[Ability::Close],
        }
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(self.open().await?))
    }
}

/// A new store for each conformance case, in memory or in a folder.
#[derive(Debug)]
pub(super) enum NewStoresHarness {
    Memory(Location),
    Below(StoreFolder),
}

/// The folder in which a conformance run creates its stores.
#[derive(Debug)]
pub(super) struct StoreFolder {
    path: PathBuf,
    /// The store location from the command line; no store exists there.
    location: Location,
    /// True if the conformance run created the folder and must remove it; an empty folder that existed before the run
    /// is kept.
    ours: bool,
    made: AtomicU64,
}

impl StoreFolder {
    /// Creates the folder for the stores of a conformance run, if the folder does not exist. Returns `None` for a
    /// location without a path.
    pub(super) fn create(location: &Location) -> io::Result<Option<Self>> {
        let Some(path) = location.path() else { return Ok(None) };
        let ours = match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        Ok(Some(Self { path: path.to_owned(), location: location.clone(), ours, made: AtomicU64::new(0) }))
    }

    fn place(&self, number: u64) -> PathBuf {
        self.path.join(format!("case-{number}"))
    }

    /// Removes the stores of the conformance run, and their folder if the run has created the folder.
    fn remove(&self) -> io::Result<()> {
        retry_until_empty(LOCK_TIMEOUT, || self.remove_once())
    }

    fn remove_once(&self) -> io::Result<()> {
        for number in 0..self.made.load(Ordering::SeqCst) {
            remove_store(&self.place(number))?;
        }
        if self.ours { fs::remove_dir(&self.path) } else { Ok(()) }
    }
}

impl NewStoresHarness {
    pub(super) fn clear_up(&self) -> io::Result<()> {
        match self {
            Self::Memory(_) => Ok(()),
            Self::Below(folder) => folder.remove(),
        }
    }
}

/// Repeats the removal of a folder while the removal fails because the folder is not empty, for at most `limit`. After
/// a conformance case was stopped, sled's threads may still write files into the folder.
fn retry_until_empty(limit: Duration, mut remove: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match remove() {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && started.elapsed() < limit => {}
            done => return done,
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn remove_store(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[async_trait]
impl Harness for NewStoresHarness {
    fn abilities(&self) -> &[Ability] {
        match self {
            Self::Memory(_) => &[Ability::New, Ability::Close, Ability::Progress],
            Self::Below(_) => {
                use Ability::{Close, Embedded, Folder, Measure, New, Processes, Progress, Reopen};
                &[New, Reopen, Close, Measure, Processes, Embedded, Folder, Progress]
            }
        }
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let location = match self {
            Self::Memory(location) => location.clone(),
            Self::Below(folder) => {
                let number = folder.made.fetch_add(1, Ordering::SeqCst);
                folder.location.moved_to(folder.place(number))
            }
        };
        let opened = StoreFixture::new(location, Create::IfMissing, LOCK_TIMEOUT).await?;
        Ok(Box::new(TemporaryFixture(opened)))
    }

    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let location = match self {
            Self::Memory(location) => location,
            Self::Below(below) => &below.location,
        };
        JoiningHarness(location.drivers().clone()).join(address, wait).await
    }

    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        match self {
            Self::Memory(_) => Err("a store in memory has no address".into()),
            Self::Below(below) => address(&below.location.moved_to(folder.join("store"))),
        }
    }
}

/// Opens the store at a location `ENGINE:PATH`, in a child process that a conformance case has started. Creates the
/// store if it does not exist yet.
#[derive(Debug)]
pub(crate) struct JoiningHarness(pub(crate) Drivers);

#[async_trait]
impl Harness for JoiningHarness {
    fn abilities(&self) -> &[Ability] {
        &[Ability::Processes]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Err("it only joins stores that others have made".into())
    }

    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let location = address.split_once(':').and_then(|(engine, path)| self.0.of_engine(engine, path).ok());
        let unknown = || kv::Error::new(ErrorKind::Unsupported, Operation::Open, address.to_owned());
        let location = location.ok_or_else(unknown)?;
        Ok(Box::new(StoreFixture::new(location, Create::IfMissing, wait).await?))
    }
}

/// Returns the address by which [`JoiningHarness`] finds a store: the engine and the path. The path may be relative,
/// unlike the path in a store URL.
fn address(location: &Location) -> Result<String, BoxError> {
    let path = location.path().ok_or("only a store in a folder has an address")?;
    Ok(format!("{}:{}", location.facts().name, path.to_str().ok_or("a path that is no text")?))
}

/// An open store of a test case, and further handles on the same store.
#[derive(Debug)]
pub(super) struct StoreFixture {
    location: Location,
    store: Arc<dyn Store>,
    // The open store; `None` while the conformance case has closed the store.
    open: Option<OpenStore>,
    others: Mutex<Vec<OpenStore>>,
}

impl StoreFixture {
    async fn new(location: Location, create: Create, wait: Duration) -> kv::Result<Self> {
        let open = datastore::open(&location, &create.with_wait(wait)).await?;
        Ok(Self { location, store: open.store(), open: Some(open), others: Mutex::default() })
    }

    pub(super) async fn close_all(&mut self) -> kv::Result<()> {
        for other in std::mem::take(self.others.get_mut()) {
            other.close().await?;
        }
        match self.open.take() {
            Some(open) => open.close().await,
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Fixture for StoreFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        if !self.location.is_shared() {
            return Ok(self.store());
        }
        let other = datastore::open(&self.location, &Create::Never.with_wait(LOCK_TIMEOUT)).await?;
        let store = other.store();
        self.others.lock().await.push(other);
        Ok(store)
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.close_all().await?;
        let open = datastore::open(&self.location, &Create::Never.with_wait(LOCK_TIMEOUT)).await?;
        self.store = open.store();
        self.open = Some(open);
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.close_all().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        let path = self.location.path().ok_or("the store is not in a folder")?.to_owned();
        Ok(tokio::task::spawn_blocking(move || bytes_below(&path)).await??)
    }

    fn address(&self) -> Result<String, BoxError> {
        address(&self.location)
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        Ok(self.close_all().await?)
    }
}

/// A store that is created for one conformance case, and removed when the case ends.
#[derive(Debug)]
struct TemporaryFixture(StoreFixture);

#[async_trait]
impl Fixture for TemporaryFixture {
    fn store(&self) -> Arc<dyn Store> {
        self.0.store()
    }

    async fn another(&self) -> Result<Arc<dyn Store>, BoxError> {
        self.0.another().await
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.0.reopen().await
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        self.0.close().await
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        self.0.stored_bytes().await
    }

    fn address(&self) -> Result<String, BoxError> {
        self.0.address()
    }

    async fn finish(&mut self) -> Result<(), BoxError> {
        self.0.finish().await?;
        if let Some(path) = self.0.location.path().map(Path::to_owned) {
            tokio::task::spawn_blocking(move || remove_store(&path)).await??;
        }
        Ok(())
    }
}

/// Returns the total size in bytes of the file `path`, or of all files in the folder `path` and its subfolders.
fn bytes_below(path: &Path) -> io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    path.read_dir()?.map(|entry| bytes_below(&entry?.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_files_are_removed_again() {
        let mut left = 2;
        let remove = || {
            left -= 1;
            if left >= 0 { Err(io::ErrorKind::DirectoryNotEmpty.into()) } else { Ok(()) }
        };
        retry_until_empty(LOCK_TIMEOUT, remove).unwrap();
        let never = retry_until_empty(Duration::ZERO, || Err(io::ErrorKind::DirectoryNotEmpty.into()));
        assert_eq!(never.unwrap_err().kind(), io::ErrorKind::DirectoryNotEmpty);
        let refused = retry_until_empty(LOCK_TIMEOUT, || Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
