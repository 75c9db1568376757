//! Runs the conformance suite on an engine's store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness, KnownFailure};
use kv::Store;
use kv_local::{Create, Engine, OpenOptions};
use kv_mvcc::MvccStore;
use tempfile::TempDir;

/// Runs the conformance suite on an engine's store. `known` lists the conformance cases that this engine fails.
pub fn main(engine: impl Engine + Copy + std::fmt::Debug + 'static, known: &[KnownFailure]) -> ExitCode {
    let mut ignored = [conformance::WITHOUT_SERVERS, &["D10_power_cuts"]].concat();
    if !may_mount() {
        ignored.push("D07_full_disk");
    }
    conformance::main_knowing(OnDisk(engine), &ignored, known)
}

/// True if a process with this process's privileges may mount a file system in new namespaces.
fn may_mount() -> bool {
    static MAY: LazyLock<bool> = LazyLock::new(|| {
        let mount = ["--mount", "--map-root-user", "mount", "-t", "tmpfs", "test", "/tmp"];
        let mounted = Command::new("unshare").args(mount).stderr(Stdio::null()).status();
        mounted.is_ok_and(|status| status.success())
    });
    *MAY
}

/// The abilities of a store in a folder, which decide which conformance cases apply. In the list of a conformance
/// store's abilities, `Mount` must be last, because it is cut off where mounting is not permitted.
const ABILITIES: [Ability; 12] = {
    use Ability::{Close, Damage, Embedded, Folder, Format, Measure, Mount, New, Processes, Progress, Reopen, Trace};
    [New, Reopen, Close, Measure, Processes, Embedded, Folder, Damage, Format, Trace, Progress, Mount]
};

struct OnDisk<E>(E);

#[derive(Debug)]
struct Held<E> {
    engine: E,
    path: PathBuf,
    store: Arc<MvccStore>,
    // `None` if another process has created the store's folder and will delete it.
    _folder: Option<TempDir>,
}

async fn open(engine: impl Engine + 'static, path: &Path, wait: Duration) -> kv::Result<Arc<MvccStore>> {
    let options = OpenOptions::default().with_create(Create::IfMissing).with_wait(wait);
    Ok(Arc::new(kv_local::open(engine, path, &options).await?))
}

/// Maximum time to wait until another process has closed the store.
const WAIT: Duration = Duration::from_secs(10);

#[async_trait]
impl<E: Engine + Copy + std::fmt::Debug + 'static> Harness for OnDisk<E> {
    fn abilities(&self) -> &[Ability] {
        if may_mount() { &ABILITIES } else { &ABILITIES[..ABILITIES.len() - 1] }
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("store");
        let store = open(self.0, &path, WAIT).await?;
        Ok(Box::new(Held { engine: self.0, path, store, _folder: Some(folder) }))
    }

    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let store = open(self.0, Path::new(address), wait).await?;
        Ok(Box::new(Held { engine: self.0, path: address.into(), store, _folder: None }))
    }

    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        text(&folder.join("store"))
    }

    fn make_newer(&self, folder: &Path) -> Result<(), BoxError> {
        let identity = folder.join("store/store.id");
        let text = fs::read_to_string(&identity)?;
        Ok(fs::write(identity, text.replace("format 1", "format 2"))?)
    }
}

#[async_trait]
impl<E: Engine + Copy + std::fmt::Debug + 'static> Fixture for Held<E> {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(self.engine, &self.path, WAIT).await?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(size(&self.path)?)
    }

    fn address(&self) -> Result<String, BoxError> {
        text(&self.path)
    }
}

fn text(path: &Path) -> Result<String, BoxError> {
    Ok(path.to_str().ok_or("a path that is no text")?.to_owned())
}

fn size(path: &Path) -> std::io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    path.read_dir()?.map(|entry| size(&entry?.path())).sum()
}
