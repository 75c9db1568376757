//! Stops, inspects and kills a running plugin call.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use crate::process::{Call, Outcome};
use crate::programs::drivers;

/// How far a plugin process has got, judged by its open files and its changes on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The plugin process has not yet reached the queue for the store lock.
    Starting,
    /// The plugin process waits for the store lock, or holds the lock but has not opened the engine yet.
    AtTheQueue,
    /// The plugin process is creating the store.
    Making,
    /// The plugin process has the store open, but has not committed yet.
    Open,
    /// The plugin process has the store open and has committed.
    Committed,
    /// The plugin process has committed and has closed the store.
    Leaving,
    /// The plugin process has ended.
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

    /// True if the plugin process has the store open in this phase.
    pub fn is_inside(self) -> bool {
        matches!(self, Self::Open | Self::Committed)
    }
}

/// A running plugin call that a test may stop or kill. Dropping this value kills the plugin process.
#[derive(Debug)]
pub struct Victim {
    pub call: Call,
    store: PathBuf,
    /// The content of the store's file `head`, which records the newest revision, when the call started.
    head: Vec<u8>,
    child: Option<Child>,
}

/// Returns the content of the store's file `head`, which records the newest revision; empty if there is no store.
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

    /// Stops the plugin process and returns the phase in which it stopped.
    pub fn stop(&mut self) -> Phase {
        let pid = self.pid();
        kill(pid, Signal::SIGSTOP).unwrap();
        // WNOWAIT does not reap the process, so its process id and exit status stay available.
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(pid), flags).unwrap() {
            WaitStatus::Stopped(..) => self.scan(),
            _ => Phase::Ended,
        }
    }

    /// Returns the phase that the plugin process has reached. A running plugin process may have reached a later phase
    /// when this function returns.
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

    /// Lets the stopped plugin process continue.
    pub fn go_on(&mut self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }

    /// True if the plugin process has ended.
    pub fn is_over(&mut self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        !matches!(waitid(Id::Pid(self.pid()), flags).unwrap(), WaitStatus::StillAlive)
    }

    /// Kills the plugin process of this call. Returns the call's outcome if the process had already ended by itself.
    pub fn kill(mut self) -> Option<Outcome> {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        match output.status.signal() {
            Some(_) => None,
            None => Some(Outcome::new(output, &self.call)),
        }
    }

    /// Waits until the plugin call has ended, and returns its outcome. Panics if the plugin call failed.
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
