//! A daemon that runs.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use wire::{DaemonConnection, FROZEN_TIMEOUT, Hello};

use crate::lab::Lab;
use crate::programs::{Ended, Running, margay, signal, wait_until};

/// `margay serve`, with all of its log in a file. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Daemon {
    running: Option<Running>,
    log: PathBuf,
    /// The bytes of the log that an earlier daemon has written.
    earlier: usize,
}

impl Daemon {
    /// A daemon of the lab's store, once it greets.
    pub(crate) fn start(lab: &Lab) -> Self {
        let daemon = Self::start_as(lab, margay(["--store", &lab.url(), "--log-level", "debug", "serve"]));
        daemon.wait_to_greet(lab);
        daemon
    }

    /// This command, which is not waited for.
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

    /// Waits until as many plugins as this have their request in the daemon, beside the connections that were there before.
    pub(crate) fn wait_for_requests(&self, count: usize, before: usize) {
        // A connection is one file, and a request another handle to it.
        wait_until("the daemon has all requests", || self.sockets() >= before + 2 * count);
    }

    /// How many handles to sockets it has open.
    pub(crate) fn sockets(&self) -> usize {
        let files = fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let links = files.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    }

    pub(crate) fn wait_to_greet(&self, lab: &Lab) {
        wait_until("the daemon greets", || greeting(lab).is_some_and(|hello| hello.process == self.pid()));
    }

    /// Waits until it listens, in whatever version of the frames.
    pub(crate) fn wait_to_listen(&self, lab: &Lab) {
        wait_until("the daemon listens", || UnixStream::connect(lab.socket()).is_ok());
    }

    pub(crate) fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    /// Kills it at once.
    pub(crate) fn kill(mut self) {
        self.running.take().unwrap().kill();
    }

    /// Asks it to end, and waits for that.
    pub(crate) fn end(mut self) -> Ended {
        self.signal(Signal::SIGTERM);
        self.running.take().unwrap().end()
    }

    /// Waits until it has ended by itself.
    pub(crate) fn wait(mut self) -> Ended {
        self.running.take().unwrap().end()
    }

    /// Checks that it runs.
    #[track_caller]
    pub(crate) fn runs(&mut self) {
        let is_over = self.running.as_mut().unwrap().is_over();
        assert!(!is_over, "the daemon has ended: {}", self.log());
    }

    /// All that it has logged, without the log of an earlier daemon.
    pub(crate) fn own_log(&self) -> String {
        self.log().split_off(self.earlier)
    }

    /// The log of all daemons so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

/// A connection to the daemon of a store.
pub(crate) fn connect(lab: &Lab) -> Option<DaemonConnection> {
    DaemonConnection::open(&lab.socket(), FROZEN_TIMEOUT, |_| true).ok()
}

/// The greeting of the daemon of a store.
pub(crate) fn greeting(lab: &Lab) -> Option<Hello> {
    connect(lab).map(|connection| connection.hello)
}

/// Checks that a daemon answers ADD and DEL of a container for at most so long until it does.
#[track_caller]
pub(crate) fn serves_again(lab: &Lab, container: &str, within: Duration) {
    let end = Instant::now() + within;
    loop {
        let add = lab.add(container).ok();
        let by_daemon = !["opening the store directly", "has another store", "leaves it to the plugin"]
            .iter()
            .any(|words| add.err.contains(words));
        lab.del(container).ok();
        if by_daemon {
            return;
        }
        assert!(Instant::now() < end, "the daemon does not serve: {add:?}");
    }
}
