//! The lock that Calico's plugins on this host take while they work on the cluster's store.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long the lock is waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// A lock on a file (`flock`) that ends when this is dropped, or with the process.
///
/// It keeps Calico's plugins on this host from disturbing each other and us, which saves repetitions. Nothing depends on
/// it, since every commit is guarded: so it is waited for in a fair queue, but not for long.
#[derive(Debug)]
pub(crate) struct HostLock {
    file: Option<File>,
}

impl HostLock {
    /// Takes the lock, or goes on without it after 2 s or a fifth of `budget`. Why is logged. If somebody else has it,
    /// `before_waiting` is called first.
    pub(crate) async fn take(path: &Path, budget: Duration, before_waiting: impl FnOnce()) -> Self {
        let file = match lock(path, LONGEST_WAIT.min(budget / 5), before_waiting).await {
            Ok(Some(file)) => Some(file),
            Ok(None) => {
                tracing::warn!(path = %path.display(), "somebody holds the lock of this host; going on without it");
                None
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot lock this host; going on without it");
                None
            }
        };
        Self { file }
    }

    /// True if it was taken.
    pub(crate) fn is_held(&self) -> bool {
        self.file.is_some()
    }
}

/// `None` if others have it all the time.
async fn lock(path: &Path, wait: Duration, before_waiting: impl FnOnce()) -> io::Result<Option<File>> {
    // Calico's plugin makes it, too, and opens it for writing.
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
    tracing::debug!(path = %path.display(), "waiting for the lock of this host");
    before_waiting();
    // Who waits in the kernel gets it in turn. If the wait is over first, that thread ends with the process.
    let locked = timeout(wait, spawn_blocking(move || file.lock().map(|()| file))).await;
    locked.ok().map(|locked| locked.map_err(io::Error::other)?).transpose()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn who_waits_gets_it_in_turn_and_nobody_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/lock");
        let held = lock(&path, Duration::ZERO, || panic!("nobody has it")).await.unwrap().unwrap();
        let begun = Instant::now();
        let mut was_called = false;
        assert!(lock(&path, Duration::from_millis(50), || was_called = true).await.unwrap().is_none());
        assert!(was_called);
        assert!(begun.elapsed() >= Duration::from_millis(50));
        let waiting = tokio::spawn(async move { lock(&path, Duration::from_secs(60), || ()).await.unwrap() });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        drop(held);
        assert!(waiting.await.unwrap().is_some());
    }

    #[tokio::test]
    async fn what_cannot_be_locked_is_gone_without() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let lock = HostLock::take(&folder.path().join("file/lock"), Duration::from_secs(10), || ()).await;
        assert!(!lock.is_held());
    }
}
