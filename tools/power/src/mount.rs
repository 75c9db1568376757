//! A disk that is mounted.

use std::io;
use std::path::{Path, PathBuf};

use fuser::{BackgroundSession, Config, MountOption};
use nix::mount::{MntFlags, umount2};

use crate::disk::Disk;
use crate::serve::Served;

/// A disk that is mounted; dropping it unmounts the disk, also if a program still has something open there.
#[derive(Debug)]
pub struct Mounted {
    disk: Disk,
    at: PathBuf,
    session: Option<BackgroundSession>,
}

impl Mounted {
    pub(crate) fn new(disk: &Disk, at: &Path) -> io::Result<Self> {
        let mut config = Config::default();
        let name = MountOption::FSName("margay-power".to_owned());
        config.mount_options = vec![name, MountOption::DefaultPermissions, MountOption::NoAtime];
        config.acl = fuser::SessionACL::All;
        let session = fuser::spawn_mount(Served::new(disk.clone()), at, &config)?;
        Ok(Self { disk: disk.clone(), at: at.to_owned(), session: Some(session) })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that still has a file open there gets errors instead of waiting.
        self.disk.cut();
        let _ = umount2(&self.at, MntFlags::MNT_DETACH);
        drop(self.session.take());
    }
}
