//! Runs `margay serve` as a process and inspects it.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use wire::{DaemonConnection, FROZEN_TIMEOUT, Hello};

use crate::lab::Lab;
use crate::programs::{Ended, Running, margay, signal, wait_until};

/// A `margay serve` process that logs to a file; dropping a [`Daemon`] kills the process.
#[derive(Debug)]
pub(crate) struct Daemon {
    running: Option<Running>,
    log: PathBuf,
    /// The length in bytes of the part of the log file that earlier daemons have written.
    earlier: usize,
}

impl Daemon {
    /// Starts a daemon of the test's store, and waits for its greeting.
    pub(crate) fn start(lab: &Lab) -> Self {
        let daemon = Self::start_as(lab, margay(["--store", &lab.url(), "--log-level", "debug", "serve"]));
        daemon.wait_to_greet(lab);
        daemon
    }

    /// Starts a daemon with the given command, without waiting until the daemon is ready.
    pub(crate) fn start_as(lab: &Lab, mut command: Command) -> Self {
        let log = lab.root().join("daemon.log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let earlier = usize::try_from(file.metadata().unwrap().len()).unwrap();
        command.stdout(Stdio::null()).stderr(file);
        Self { running: Some(Running::start(command, "")), log, earlier }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running.as_ref().unwrap().pid()
    }

    /// Waits until the daemon has received the requests of `count` plugins; `before` is the number of sockets that the
    /// daemon had open before the plugins connected.
    pub(crate) fn wait_for_requests(&self, count: usize, before: usize) {
        // Each connection uses one file descriptor, and its request uses a second descriptor of the same socket.
        wait_until("the daemon has all requests", || self.sockets() >= before + 2 * count);
    }

    /// The number of sockets that the daemon has open.
    pub(crate) fn sockets(&self) -> usize {
        let files = fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let links = files.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    }

    pub(crate) fn wait_to_greet(&self, lab: &Lab) {
        wait_until("the daemon greets", || greeting(lab).is_some_and(|hello| hello.process == self.pid()));
    }

    /// Waits until the daemon, which may have any frame version, listens.
    pub(crate) fn wait_to_listen(&self, lab: &Lab) {
        wait_until("the daemon listens", || UnixStream::connect(lab.socket()).is_ok());
    }

    pub(crate) fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    pub(crate) fn kill(mut self) {
        self.running.take().unwrap().kill();
    }

    /// Stops the daemon with SIGTERM and waits until it has ended.
    pub(crate) fn end(mut self) -> Ended {
        self.signal(Signal::SIGTERM);
        self.running.take().unwrap().end()
    }

    /// Waits until the daemon has ended on its own.
    pub(crate) fn wait(mut self) -> Ended {
        self.running.take().unwrap().end()
    }

    #[track_caller]
    pub(crate) fn runs(&mut self) {
        let is_over = self.running.as_mut().unwrap().is_over();
        assert!(!is_over, "the daemon has ended: {}", self.log());
    }

    /// Returns what this daemon has logged, without the log of earlier daemons.
    pub(crate) fn own_log(&self) -> String {
        self.log().split_off(self.earlier)
    }

    /// Returns the log of all daemons that have served the test's store.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

/// Connects to the daemon of the test's store.
pub(crate) fn connect(lab: &Lab) -> Option<DaemonConnection> {
    DaemonConnection::open(&lab.socket(), FROZEN_TIMEOUT, |_| true).ok()
}

/// Returns the greeting of the test store's daemon.
pub(crate) fn greeting(lab: &Lab) -> Option<Hello> {
    connect(lab).map(|connection| connection.hello)
}

/// Repeats ADD and DEL of a container until a daemon carries out the calls. Fails if no daemon carries out the calls
/// before the time `within` is over.
#[track_caller]
pub(crate) fn serves_again(lab: &Lab, container: &str, within: Duration) {
    let end = Instant::now() + within;
    loop {
        let add = lab.add(container).ok();
        let by_daemon = !["opening the store directly", "does not serve this store", "declined the CNI call"]
            .iter()
            .any(|words| add.err.contains(words));
        lab.del(container).ok();
        if by_daemon {
            return;
        }
        assert!(Instant::now() < end, "the daemon does not serve: {add:?}");
    }
}
