//! Seeing that another process wants the store, without looking again and again.
//!
//! A process that wants the store opens the file `queue` of its folder, and the kernel tells the daemon so (inotify). Where the
//! kernel cannot, the daemon looks every 15 ms.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

/// How often the daemon looks where the kernel does not tell.
const LOOK: Duration = Duration::from_millis(15);
/// How often it looks anyway: a folder above the store's may be moved, which the kernel does not tell.
const SELDOM: Duration = Duration::from_secs(1);

/// The eyes of the daemon on the folder of a store.
#[derive(Debug)]
pub(crate) struct Eyes {
    told: Option<AsyncFd<OwnedFd>>,
}

impl Eyes {
    /// Eyes on this folder.
    pub(crate) fn on(folder: &Path) -> Self {
        let told = watch(folder);
        if let Err(error) = &told {
            tracing::debug!(%error, "the kernel does not tell who opens the queue, so the daemon looks");
        }
        Self { told: told.ok() }
    }

    /// Waits until a process may want the store, or it is time to look.
    pub(crate) async fn blink(&self) {
        let Some(told) = &self.told else { return sleep(LOOK).await };
        if let Ok(Ok(mut ready)) = timeout(SELDOM, told.readable()).await {
            // What is told does not matter; it only has to be taken away.
            let mut bytes = [MaybeUninit::uninit(); 1024];
            while Reader::new(told.get_ref(), &mut bytes).next().is_ok() {}
            ready.clear_ready();
        }
    }
}

fn watch(folder: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let told = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    add_watch(&told, folder.join("queue"), WatchFlags::OPEN | WatchFlags::MOVE_SELF | WatchFlags::DELETE_SELF)?;
    add_watch(&told, folder, WatchFlags::MOVE_SELF | WatchFlags::DELETE_SELF | WatchFlags::ONLYDIR)?;
    Ok(AsyncFd::register(told)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn what_opens_the_queue_or_moves_the_folder_is_seen() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("store");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("queue"), "").unwrap();
        let eyes = Eyes::on(&folder);
        assert!(eyes.told.is_some());
        let begun = Instant::now();
        eyes.blink().await;
        assert!(begun.elapsed() >= SELDOM, "nothing has happened");
        for happen in [&(|| drop(File::open(folder.join("queue")).unwrap())) as &dyn Fn(), &|| {
            fs::rename(&folder, root.path().join("elsewhere")).unwrap()
        }] {
            happen();
            let begun = Instant::now();
            eyes.blink().await;
            assert!(begun.elapsed() < SELDOM);
        }
    }

    #[tokio::test]
    async fn without_the_kernel_the_daemon_looks_often() {
        let eyes = Eyes::on(Path::new("/no/such/folder"));
        let begun = Instant::now();
        eyes.blink().await;
        assert!(begun.elapsed() < SELDOM);
    }
}
