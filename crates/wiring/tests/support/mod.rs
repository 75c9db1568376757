//! Creates the test hosts and containers, which are network namespaces.

#![allow(dead_code)] // Each test program uses only a part of this module.

use std::any::Any;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns, unshare};

/// Runs a test function on a thread in a new network namespace. If the test function panics, returns the panic's
/// message as the error.
pub(crate) fn on_a_host(test: fn()) -> Result<(), String> {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        shell("ip link set lo up");
        test();
    };
    thread::scope(|scope| scope.spawn(run).join()).map_err(|panic| said(&*panic))
}

pub(crate) fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// A network namespace that a sleeping child process keeps alive.
pub(crate) struct Netns(pub(crate) Child);

impl Netns {
    pub(crate) fn new() -> Self {
        let child = Command::new("unshare").args(["--net", "sleep", "1000"]).spawn().unwrap();
        let netns = Self(child);
        let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
        let begun = Instant::now();
        while fs::read_link(netns.path()).unwrap() == own {
            assert!(begun.elapsed() < Duration::from_secs(120), "unshare does not come to its end");
            thread::sleep(Duration::from_millis(2));
        }
        netns.inside(|| shell("ip link set lo up"));
        netns
    }

    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }

    /// Runs `work` on a new thread in this network namespace.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(self.path()).unwrap();
        let run = || {
            setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| panic!("{}", said(&*panic)))
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

pub(crate) fn shell(script: &str) {
    let done = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
}
