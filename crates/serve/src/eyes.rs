//! Seeing that another process wants the store, without looking again and again.
//!
//! A process that wants the store opens the file `queue` of its folder, and the kernel tells the daemon so (inotify). Where the
//! kernel cannot, the daemon looks every 15 ms.

use std::io;
use std::path::Path;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchMask};
use tokio::time::{sleep, timeout};

/// How often the daemon looks where the kernel does not tell.
const INTERVAL: Duration = Duration::from_millis(15);
/// How often it looks anyway: a folder above the store's may be moved, which the kernel does not tell.
const SELDOM: Duration = Duration::from_secs(1);
/// Room for what the kernel tells at once, in bytes.
const ROOM: usize = 1024;

/// The eyes of the daemon on the folder of a store.
pub(crate) struct Eyes {
    reported: Option<EventStream<[u8; ROOM]>>,
}

impl Eyes {
    /// Eyes on this folder.
    pub(crate) fn on(folder: &Path) -> Self {
        let reported = watch(folder);
        if let Err(error) = &reported {
            tracing::debug!(%error, "the kernel does not tell who opens the queue, so the daemon looks");
        }
        Self { reported: reported.ok() }
    }

    /// Waits until a process may want the store, or it is time to look.
    pub(crate) async fn blink(&mut self) {
        let Some(reported) = &mut self.reported else { return sleep(INTERVAL).await };
        let mut event = timeout(SELDOM, reported.next()).await.ok().flatten();
        // The text of an event does not matter; the event only has to be taken away.
        while event.is_some_and(|event| event.is_ok()) {
            event = reported.next().now_or_never().flatten();
        }
    }
}

fn watch(folder: &Path) -> io::Result<EventStream<[u8; ROOM]>> {
    let reported = Inotify::init()?;
    let moved = WatchMask::MOVE_SELF | WatchMask::DELETE_SELF;
    reported.watches().add(folder.join("queue"), WatchMask::OPEN | moved)?;
    reported.watches().add(folder, WatchMask::ONLYDIR | moved)?;
    reported.into_event_stream([0; ROOM])
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
        let mut eyes = Eyes::on(&folder);
        assert!(eyes.reported.is_some());
        let begun = Instant::now();
        eyes.blink().await;
        assert!(begun.elapsed() >= SELDOM, "nothing has happened");
        for is_moved in [false, true] {
            if is_moved {
                fs::rename(&folder, root.path().join("elsewhere")).unwrap();
            } else {
                drop(File::open(folder.join("queue")).unwrap());
            }
            let begun = Instant::now();
            eyes.blink().await;
            assert!(begun.elapsed() < SELDOM);
        }
    }

    #[tokio::test]
    async fn without_the_kernel_the_daemon_looks_often() {
        let mut eyes = Eyes::on(Path::new("/no/such/folder"));
        let begun = Instant::now();
        eyes.blink().await;
        assert!(begun.elapsed() < SELDOM);
    }
}
