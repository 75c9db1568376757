//! Acquires the file lock that Calico's plugins on this host hold while they work on an etcd cluster.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use futures::future::{Either, select};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// A lock on a file (`flock`) that is released when this value is dropped or the process ends.
///
/// The host lock keeps Margay and Calico's plugins on this host from making conflicting commits, which they would have
/// to repeat. A plugin call waits only a short time for the host lock, because correctness does not depend on it: every
/// commit compares the revisions of the keys that it changes. Waiting plugin calls get the host lock in the order of
/// their arrival.
#[derive(Debug)]
pub struct HostLock {
    _file: File,
}

impl HostLock {
    /// Acquires the host lock. Returns `None` if the lock file cannot be used, or if the lock is not free within 2 s or
    /// a fifth of `budget`, whichever is shorter. Before it returns `None`, the function logs the reason; the caller
    /// continues without the host lock. If another process holds the host lock, the future `meanwhile` runs during the
    /// wait.
    pub async fn take(path: &Path, budget: Duration, meanwhile: impl Future<Output = ()>) -> Option<Self> {
        match lock(path, LOCK_TIMEOUT.min(budget / 5), meanwhile).await {
            Ok(Some(file)) => return Some(Self { _file: file }),
            Ok(None) => {
                tracing::warn!(
                    path = %path.display(),
                    "another process holds the IPAM lock file of this host; continuing without the lock"
                );
            }
            Err(error) => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "cannot lock the IPAM lock file of this host; continuing without the lock"
                );
            }
        }
        None
    }
}

/// Locks the file at `path`, or returns `None` if other processes hold the file lock during the whole waiting time.
async fn lock(path: &Path, wait: Duration, meanwhile: impl Future<Output = ()>) -> io::Result<Option<File>> {
    // Like Calico's plugin, this function creates a missing lock file, and opens the file for writing.
    let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o750).open(path);
    let file = match (open(), path.parent()) {
        (Err(error), Some(folder)) if error.kind() == ErrorKind::NotFound => {
            DirBuilder::new().recursive(true).mode(0o777).create(folder)?;
            open()?
        }
        (opened, _) => opened?,
    };
    match file.try_lock() {
        Ok(()) => return Ok(Some(file)),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    tracing::debug!(path = %path.display(), "waiting until another process releases the IPAM lock file of this host");
    // The kernel grants the file lock to waiting processes in their order of arrival. A blocked `flock` cannot be
    // cancelled: after the timeout, the helper thread may stay blocked in it until the process ends.
    let locked = pin!(timeout(wait, spawn_blocking(move || file.lock().map(|()| file))));
    let locked = match select(locked, pin!(meanwhile)).await {
        Either::Left((locked, _)) => locked,
        Either::Right(((), locked)) => locked.await,
    };
    locked.ok().map(|locked| locked.map_err(io::Error::other)?).transpose()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::{pending, ready};
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn host_lock_is_given_in_turn_and_within_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/lock");
        let done = Cell::new(0);
        let meanwhile = async || done.update(|done| done + 1);
        let held = lock(&path, Duration::ZERO, meanwhile()).await.unwrap().unwrap();
        assert_eq!(done.get(), 0, "the lock was free");
        let begun = Instant::now();
        assert!(lock(&path, Duration::from_millis(50), meanwhile()).await.unwrap().is_none());
        assert!(begun.elapsed() >= Duration::from_millis(50));
        assert_eq!(done.get(), 1);
        let waiting = tokio::spawn(async move { lock(&path, Duration::from_secs(60), pending()).await.unwrap() });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        drop(held);
        assert!(waiting.await.unwrap().is_some());
    }

    #[tokio::test]
    async fn host_lock_is_skipped_when_it_cannot_be_taken() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        assert!(HostLock::take(&folder.path().join("file/lock"), Duration::from_secs(10), ready(())).await.is_none());
    }
}
