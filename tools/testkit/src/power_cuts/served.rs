//! Runs `margay serve` on a simulated disk whose power is cut.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ::power::Disk;
use conformance::patient;
use datastore::Location;
use datastore::served::socket;

use crate::programs::command;

/// Maximum time from starting the daemon until it listens.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Strings that the plugin logs when the daemon has not served its call.
const WITHOUT: [&str; 3] = ["opening the store directly", "does not serve this store", "declined the CNI call"];

/// A running daemon. Dropping this value kills the daemon, as a power cut would.
#[derive(Debug)]
pub struct Daemon(Child);

impl Daemon {
    /// Starts the daemon on a store, and waits until the daemon listens or the power is cut.
    pub fn start(store: &Location, disk: &Disk) -> Self {
        Self::start_with(store, disk, &[])
    }

    /// Starts the daemon as [`Daemon::start`] does, with additional options of `margay serve`.
    pub fn start_with(store: &Location, disk: &Disk, options: &[&str]) -> Self {
        let mut serve = Command::new(command());
        serve.args(["--store", &store.to_string(), "serve"]).args(options).env_clear();
        serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let daemon = Self(serve.spawn().unwrap());
        let (socket, begun) = (socket(store).unwrap(), Instant::now());
        while UnixStream::connect(&socket).is_err() && !disk.is_cut() {
            assert!(begun.elapsed() < patient(TEST_TIMEOUT), "the daemon of {store} does not come up");
            thread::sleep(Duration::from_millis(1));
        }
        daemon
    }

    /// True if the daemon answered the plugin call that has written the log `log`.
    pub fn has_answered(log: &str) -> bool {
        !WITHOUT.iter().any(|words| log.contains(words))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
