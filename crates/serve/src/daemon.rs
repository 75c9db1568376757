//! Runs the daemon, which owns one store, the store's write queue, the private socket and the hand-over of the store
//! lock.
//!
//! A process that wants the store opens the file `queue` in the store's folder. The kernel notifies the daemon
//! (inotify) whenever a process opens the file `queue`. Where inotify is unavailable, the daemon polls the store's lock
//! queue every 15 ms.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use datastore::shared_store::{SharedStore, SharedStoreObserver, SharedStoreOptions, YieldAnnouncement};
use datastore::{Create, Location};
use futures::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchMask};
use kv_mvcc::Retention;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use wire::peer;

use crate::accept::{Acceptor, ClientStream, ExcessPolicy, Listener};
use crate::connection;
use crate::metrics::Metrics;
use crate::write_queue::WriteQueue;

/// Time limit for one attempt to take the store lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the daemon checks whether a process that has opened the file `queue` has joined the lock queue.
const DRAW_INTERVAL: Duration = Duration::from_millis(1);
const MAX_DRAW_CHECKS: usize = 5;
/// Maximum number of connected clients; lower if the process's limit on open files requires it. When the maximum number
/// of clients is connected, new clients wait in the socket's backlog until a connected client disconnects.
const MAX_CLIENTS: usize = 1024;
/// Number of open files that the daemon reserves for the store and for checks of the store's lock queue.
const RESERVED_FILES: u64 = 128;

/// The daemon's state, which all connections share.
#[derive(Debug)]
pub struct Daemon {
    /// The store that the daemon serves.
    pub shared_store: SharedStore,
    /// The queue of CNI verbs that write to the store.
    pub write_queue: WriteQueue,
    /// Metrics of the daemon's own work.
    pub metrics: Arc<Metrics>,
    /// Notified when a client is about to wait for the store lock.
    pub(crate) yield_requested: Notify,
}

impl Daemon {
    /// Starts a daemon for the store at this location and limits the store's history to `history`. The daemon's
    /// background tasks run on the calling runtime and end when `tasks` is dropped.
    pub fn start(location: Location, history: Option<Retention>, tasks: &mut JoinSet<()>) -> Arc<Self> {
        let metrics = Arc::new(Metrics::new());
        let observer = Arc::clone(&metrics) as Arc<dyn SharedStoreObserver>;
        let holding = SharedStoreOptions {
            opens_when_full: true,
            history,
            observer,
            ..SharedStoreOptions::new(Create::Never.with_wait(LOCK_TIMEOUT))
        };
        let shared_store = SharedStore::new(location, holding);
        let (write_queue, work) = WriteQueue::new(shared_store.clone(), Arc::clone(&metrics));
        tasks.spawn(work);
        let daemon = Arc::new(Self { shared_store, write_queue, metrics, yield_requested: Notify::new() });
        tasks.spawn(yield_to_waiters(Arc::clone(&daemon)));
        daemon
    }

    /// Accepts and serves the clients of a socket without ever returning.
    pub async fn listen(self: Arc<Self>, listener: UnixListener) {
        let room = Arc::new(Semaphore::new(max_clients()));
        let acceptor = Acceptor::new("the private socket", Listener::Unix(listener), room, ExcessPolicy::Waits);
        loop {
            let (ClientStream::Unix(stream), place) = acceptor.next().await else { continue };
            let daemon = Arc::clone(&self);
            tokio::spawn(async move {
                let _place = place;
                if let Err(error) = daemon.admit(stream).await {
                    tracing::debug!(%error, "lost the connection to a client of the daemon");
                }
            });
        }
    }

    /// Serves a client if the client's user is trusted. The daemon checks the user before it reads the client's first
    /// byte.
    async fn admit(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let uid = peer::uid(&stream)?;
        if !datastore::served::is_trusted(self.shared_store.location(), uid) {
            tracing::warn!(uid, "rejected a client that is neither root nor the store's owner");
            return Ok(());
        }
        let _counted = self.metrics.count_caller();
        connection::serve(self, stream).await
    }
}

/// Returns the maximum number of connected clients. Some file descriptors stay free, because the daemon needs
/// descriptors to see waiting processes and to take the store lock again.
fn max_clients() -> usize {
    let limit = getrlimit(Resource::Nofile);
    // Linux keeps the soft limit on open files low only for programs that use select(2).
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let files = if raised.is_ok() { limit.maximum } else { limit.current };
    // A request duplicates the file descriptor of its connection, so one client may use two file descriptors.
    let room = files.map_or(u64::MAX, |files| files.saturating_sub(RESERVED_FILES) / 2);
    usize::try_from(room).unwrap_or(usize::MAX).clamp(1, MAX_CLIENTS)
}

/// Hands the store over whenever a process waits for the store lock.
async fn yield_to_waiters(daemon: Arc<Daemon>) {
    let shared_store = &daemon.shared_store;
    let Some(folder) = shared_store.location().path().map(Path::to_owned) else { return };
    loop {
        shared_store.wait_until_open().await;
        let mut watcher = QueueWatcher::new(&folder);
        let announced = loop {
            // A process that has opened the file `queue` is about to join the lock queue. A waiting process may have
            // opened the file `queue` before the watcher started.
            if is_wanted_soon(shared_store).await {
                break YieldAnnouncement::No;
            }
            tokio::select! {
                () = daemon.yield_requested.notified() => break YieldAnnouncement::Yes,
                () = watcher.wait_for_change() => {}
            }
        };
        drop(watcher);
        shared_store.hand_over(announced).await;
    }
}

/// Returns whether a process waits for the store lock, or starts to wait within a few milliseconds.
async fn is_wanted_soon(shared_store: &SharedStore) -> bool {
    for _ in 0..MAX_DRAW_CHECKS {
        if shared_store.is_wanted() {
            return true;
        }
        sleep(DRAW_INTERVAL).await;
    }
    shared_store.is_wanted()
}

/// Interval at which the lock queue is polled where inotify is unavailable.
const POLL_INTERVAL: Duration = Duration::from_millis(15);
/// Interval at which the lock queue is polled even with inotify. Inotify does not report that a parent of the store's
/// folder was moved.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);
const EVENT_BUFFER_BYTES: usize = 1024;

/// Watches the queue file and the folder of a store.
struct QueueWatcher {
    reported: Option<EventStream<[u8; EVENT_BUFFER_BYTES]>>,
}

impl QueueWatcher {
    pub(crate) fn new(folder: &Path) -> Self {
        let reported = watch(folder);
        if let Err(error) = &reported {
            tracing::debug!(
                %error,
                "inotify is unavailable; polling the queue of processes that wait for the store lock"
            );
        }
        Self { reported: reported.ok() }
    }

    /// Waits until the queue file or the store's folder changes, or until the polling interval has passed.
    async fn wait_for_change(&mut self) {
        let Some(reported) = &mut self.reported else { return sleep(POLL_INTERVAL).await };
        let mut event = timeout(RECHECK_INTERVAL, reported.next()).await.ok().flatten();
        // The content of an inotify event does not matter, but all pending events must be read.
        while event.is_some_and(|event| event.is_ok()) {
            event = reported.next().now_or_never().flatten();
        }
    }
}

fn watch(folder: &Path) -> io::Result<EventStream<[u8; EVENT_BUFFER_BYTES]>> {
    let reported = Inotify::init()?;
    let moved = WatchMask::MOVE_SELF | WatchMask::DELETE_SELF;
    reported.watches().add(folder.join("queue"), WatchMask::OPEN | moved)?;
    reported.watches().add(folder, WatchMask::ONLYDIR | moved)?;
    reported.into_event_stream([0; EVENT_BUFFER_BYTES])
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn daemon_notices_open_queue_and_moved_folder() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("store");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("queue"), "").unwrap();
        let mut watcher = QueueWatcher::new(&folder);
        assert!(watcher.reported.is_some());
        let begun = Instant::now();
        watcher.wait_for_change().await;
        assert!(begun.elapsed() >= RECHECK_INTERVAL, "nothing has happened");
        for is_moved in [false, true] {
            if is_moved {
                fs::rename(&folder, root.path().join("elsewhere")).unwrap();
            } else {
                drop(File::open(folder.join("queue")).unwrap());
            }
            let begun = Instant::now();
            watcher.wait_for_change().await;
            assert!(begun.elapsed() < RECHECK_INTERVAL);
        }
    }

    #[tokio::test]
    async fn daemon_polls_often_without_kernel_notices() {
        let mut watcher = QueueWatcher::new(Path::new("/no/such/folder"));
        let begun = Instant::now();
        watcher.wait_for_change().await;
        assert!(begun.elapsed() < RECHECK_INTERVAL);
    }
}
