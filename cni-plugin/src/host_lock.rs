//! The lock that Calico's plugins on this host take while they work on the cluster's store.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::pin::{Pin, pin};
use std::task::{Poll, ready};
use std::time::Duration;

use rustix::process::setpriority_process;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long the lock is waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// How urgent who has the lock is (`nice`): before what is usual, behind what keeps a machine running.
const URGENCY: i32 = -10;

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
    /// `meanwhile` runs, and once it ends nobody waits any more.
    ///
    /// Who has it is urgent from then on, where that is allowed: all others wait for it, and it has little to compute.
    pub(crate) async fn take(path: &Path, budget: Duration, meanwhile: impl AsyncFnOnce()) -> Self {
        let file = match lock(path, LONGEST_WAIT.min(budget / 5), meanwhile).await {
            Ok(Waited::Locked(file)) => {
                if let Err(error) = setpriority_process(None, URGENCY) {
                    tracing::debug!(%error, "as urgent as any other process");
                }
                Some(file)
            }
            Ok(Waited::Needless) => None,
            Ok(Waited::InVain) => {
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

/// How it ended.
#[derive(Debug)]
enum Waited {
    /// The lock is ours.
    Locked(File),
    /// It is not needed any more.
    Needless,
    /// Others have it all the time.
    InVain,
}

async fn lock(path: &Path, wait: Duration, meanwhile: impl AsyncFnOnce()) -> io::Result<Waited> {
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
        Ok(()) => return Ok(Waited::Locked(file)),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    tracing::debug!(path = %path.display(), "waiting for the lock of this host");
    let mut meanwhile = pin!(meanwhile());
    // What has to be done before waiting is done before that.
    let mut is_needless = poll_fn(|context| Poll::Ready(meanwhile.as_mut().poll(context).is_ready())).await;
    // Who waits in the kernel gets it in turn. If the wait is over first, that thread ends with the process.
    let mut locked = spawn_blocking(move || file.lock().map(|()| file));
    let waited = poll_fn(|context| {
        is_needless = is_needless || meanwhile.as_mut().poll(context).is_ready();
        if is_needless {
            return Poll::Ready(Ok(Waited::Needless));
        }
        let locked = ready!(Pin::new(&mut locked).poll(context)).map_err(io::Error::other);
        Poll::Ready(locked.and_then(|locked| locked.map(Waited::Locked)))
    });
    timeout(wait, waited).await.unwrap_or(Ok(Waited::InVain))
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Instant;

    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn who_waits_gets_it_in_turn_and_nobody_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/lock");
        let held = lock(&path, Duration::ZERO, async || panic!("nobody has it")).await.unwrap();
        assert!(matches!(held, Waited::Locked(_)));
        let begun = Instant::now();
        let needless =
            lock(&path, Duration::from_secs(60), async || tokio::time::sleep(Duration::from_millis(1)).await);
        assert!(matches!(needless.await.unwrap(), Waited::Needless));
        assert!(matches!(lock(&path, Duration::from_millis(50), pending).await.unwrap(), Waited::InVain));
        assert!(begun.elapsed() >= Duration::from_millis(50));
        let waiting = tokio::spawn(async move { lock(&path, Duration::from_secs(60), pending).await.unwrap() });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        drop(held);
        assert!(matches!(waiting.await.unwrap(), Waited::Locked(_)));
    }

    #[tokio::test]
    async fn what_cannot_be_locked_is_gone_without() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let lock = HostLock::take(&folder.path().join("file/lock"), Duration::from_secs(10), pending).await;
        assert!(!lock.is_held());
    }

    #[tokio::test]
    async fn who_has_it_is_urgent() {
        // Of this thread; not everybody may.
        let is_allowed = setpriority_process(None, -1).is_ok();
        let before = getpriority_process(None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock(&path, Duration::ZERO, pending).await.unwrap();
        let in_vain = HostLock::take(&path, Duration::from_millis(50), pending).await;
        assert_eq!((in_vain.is_held(), getpriority_process(None).unwrap()), (false, before));
        drop(held);
        let lock = HostLock::take(&path, Duration::from_secs(10), pending).await;
        let urgency = if is_allowed { URGENCY } else { before };
        assert_eq!((lock.is_held(), getpriority_process(None).unwrap()), (true, urgency));
    }
}
