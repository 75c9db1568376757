//! A container as far as addresses go: a network namespace with a process in it. Needs root, and `ip`.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// A process in a namespace of its own that has an address; both are gone when this is.
pub(crate) struct Container(Child);

impl Container {
    /// In a namespace without any address.
    pub(crate) fn empty() -> Self {
        let container = Self::start(&["--net", "sleep", "600"]);
        let own = host::network_namespace(Path::new("/proc/self/ns/net"));
        for _ in 0..200 {
            if fs::read_link(container.link()).is_ok() && Some(container.netns()) != own {
                return container;
            }
            sleep(Duration::from_millis(50));
        }
        panic!("the namespace was never made (this test needs root)");
    }

    /// The name of its namespace, as it is recorded.
    pub(crate) fn netns(&self) -> String {
        host::network_namespace(&self.link()).unwrap()
    }

    fn link(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.0.id()))
    }

    fn start(args: &[&str]) -> Self {
        let mut command = Command::new("unshare");
        command.args(args).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    /// Waits until the address is there.
    pub(crate) fn with(address: &str) -> Self {
        let script = format!("ip address add {address}/32 dev lo && exec sleep 600");
        let container = Self::start(&["--net", "sh", "-c", &script]);
        let wanted = address.parse().unwrap();
        for _ in 0..200 {
            let seen = host::look().unwrap_or_else(|blind| panic!("{blind} (this test needs root)"));
            if seen.addresses.contains(&wanted) {
                return container;
            }
            sleep(Duration::from_millis(50));
        }
        panic!("{address} was never seen (this test needs root and iproute2)");
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.0.id().try_into().unwrap()), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}
