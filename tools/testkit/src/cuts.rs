//! Runs the power-cut case of the conformance suite on an engine, on a simulated disk that loses unsynced data.
//!
//! The power fails while the store is open and committing, or while it is being opened. The store is never closed
//! before the power cut.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness, RunOptions, Verdict};
use kv::Store;
use kv_local::{Create, Engine, OpenOptions};
use kv_mvcc::MvccStore;
use power::{Cut, Disk, Folders, Image, Mounted, Syncs};
use tempfile::TempDir;

/// Runs the power-cut case, and checks that the case fails on a disk that ignores syncs. If the power-cut case fails
/// with an error that contains `known`, the failure is accepted.
pub fn main(engine: impl Engine + Copy + std::fmt::Debug + 'static, known: Option<&'static str>) -> ExitCode {
    let judged = move || match (judge(engine, Syncs::Kept), known) {
        (Err(error), Some(known)) if error.contains(known) => {}
        (judged, _) => judged.unwrap(),
    };
    power::main(vec![
        ("power_cuts_lose_nothing".to_owned(), Box::new(judged)),
        (
            "lying_disk_is_found_out".to_owned(),
            Box::new(move || assert!(judge(engine, Syncs::Ignored).is_err(), "nothing was lost")),
        ),
    ])
}

fn judge(engine: impl Engine + Copy + std::fmt::Debug + 'static, syncs: Syncs) -> Result<(), String> {
    let options = RunOptions::new().with_filter("D10_power_cuts");
    let reports = conformance::run(OnDisk(engine, syncs), &options).unwrap();
    match &reports[..] {
        [report] => match &report.verdict {
            Verdict::Passed => Ok(()),
            verdict => Err(format!("{verdict:?}")),
        },
        _ => panic!("there is one case about power cuts: {reports:?}"),
    }
}

struct OnDisk<E>(E, Syncs);

#[derive(Debug)]
struct Held<E> {
    engine: E,
    syncs: Syncs,
    store: Arc<MvccStore>,
    disk: Disk,
    // The mount point is in `folder`, so the disk must be unmounted before `folder` is dropped.
    _mounted: Mounted,
    folder: TempDir,
}

impl<E: Engine + Copy + 'static> Held<E> {
    async fn on(engine: E, syncs: Syncs, image: Image, create: Create) -> Result<Self, BoxError> {
        let (disk, folder) = (Disk::new(image, syncs), tempfile::tempdir()?);
        let mounted = disk.mount(folder.path())?;
        let store = open(engine, folder.path(), create).await?;
        Ok(Self { engine, syncs, store, disk, _mounted: mounted, folder })
    }
}

async fn open(engine: impl Engine + 'static, disk: &Path, create: Create) -> kv::Result<Arc<MvccStore>> {
    let options = OpenOptions::default().with_create(create);
    Ok(Arc::new(kv_local::open(engine, &disk.join("store"), &options).await?))
}

#[async_trait]
impl<E: Engine + Copy + std::fmt::Debug + 'static> Harness for OnDisk<E> {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::PowerLoss, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(Held::on(self.0, self.1, Image::default(), Create::IfMissing).await?))
    }
}

#[async_trait]
impl<E: Engine + Copy + std::fmt::Debug + 'static> Fixture for Held<E> {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(self.engine, self.folder.path(), Create::Never).await?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        self.disk.cut_after(operations.into());
        Ok(())
    }

    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        self.disk.cut();
        // The simulated disk has no power any more, so closing the store fails.
        let _ = self.store.close().await;
        let folders = if seed.is_multiple_of(2) { Folders::Strict } else { Folders::Prefix };
        let left = self.disk.after_cut(Cut { seed, folders });
        *self = Self::on(self.engine, self.syncs, left, Create::Never).await?;
        Ok(())
    }
}
