//! Stops, inspects and kills a running call of the plugin.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use crate::process::{Call, Outcome};
use crate::programs::drivers;

/// The progress of a plugin process, judged by its open files and its traces on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The process has not reached the store's queue yet.
    Starting,
    /// The process waits in the queue for the store lock, or has the lock and has not opened the engine.
    AtTheQueue,
    /// The process is creating the store.
    Making,
    /// The process has the store open and has not committed.
    Open,
    /// The process has the store open and has committed.
    Committed,
    /// The process has committed and closed the store.
    Leaving,
    /// The process has ended.
    Ended,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::AtTheQueue => "at the queue",
            Self::Making => "making the store",
            Self::Open => "the store open, nothing committed",
            Self::Committed => "committed, the store still open",
            Self::Leaving => "the store closed again",
            Self::Ended => "over",
        }
    }

    /// True if the process has the store open.
    pub fn is_inside(self) -> bool {
        matches!(self, Self::Open | Self::Committed)
    }
}

/// A running call of the plugin. Dropping this value kills the process.
#[derive(Debug)]
pub struct Victim {
    pub call: Call,
    store: PathBuf,
    /// The content of the file `head`, which is the newest revision, when the call started.
    head: Vec<u8>,
    child: Option<Child>,
}

/// Returns the newest revision of the store, read from the file beside the engine. Empty if the store does not exist.
pub fn head(store: &Path) -> Vec<u8> {
    fs::read(store.join("head")).unwrap_or_default()
}

impl Victim {
    pub fn start(call: Call, store: &Path) -> Self {
        let head = head(store);
        let child = call.start(call.command());
        Self { call, store: store.to_owned(), head, child: Some(child) }
    }

    fn child(&mut self) -> &mut Child {
        self.child.as_mut().unwrap()
    }

    pub fn pid(&mut self) -> Pid {
        Pid::from_raw(self.child().id().try_into().unwrap())
    }

    /// Stops the call's process and returns its phase.
    pub fn stop(&mut self) -> Phase {
        let pid = self.pid();
        kill(pid, Signal::SIGSTOP).unwrap();
        // WNOWAIT does not reap the process, so the process id and the answer stay available.
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(pid), flags).unwrap() {
            WaitStatus::Stopped(..) => self.scan(),
            _ => Phase::Ended,
        }
    }

    /// Returns the phase of the process. A running process may have progressed further when this function returns.
    pub fn scan(&mut self) -> Phase {
        let open = fs::read_dir(format!("/proc/{}/fd", self.pid()));
        let open: Vec<PathBuf> = open.unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).collect();
        let has = |name: &str| open.iter().any(|path| path.starts_with(self.store.join(name)));
        let engine = drivers().local().filter_map(|driver| driver.engine()).any(|engine| has(engine.entry()));
        let committed = head(&self.store) != self.head;
        match () {
            () if open.is_empty() => Phase::Ended,
            () if self.store.join("creating").exists() => Phase::Making,
            () if engine && committed => Phase::Committed,
            () if engine => Phase::Open,
            () if has("queue") && !committed => Phase::AtTheQueue,
            () if committed => Phase::Leaving,
            () => Phase::Starting,
        }
    }

    /// Resumes the stopped process.
    pub fn go_on(&mut self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }

    /// True if the call's process has ended.
    pub fn is_over(&mut self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        !matches!(waitid(Id::Pid(self.pid()), flags).unwrap(), WaitStatus::StillAlive)
    }

    /// Kills the process. Returns the call's answer if the process had ended before.
    pub fn kill(mut self) -> Option<Outcome> {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        match output.status.signal() {
            Some(_) => None,
            None => Some(Outcome::new(output, &self.call)),
        }
    }

    /// Waits for the call's answer. Panics unless the call succeeded.
    pub fn end(mut self) -> Outcome {
        let outcome = self.call.wait(self.child.take().unwrap());
        assert_eq!(outcome.exit, 0, "{:?}: {outcome:?}", self.call);
        outcome
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
