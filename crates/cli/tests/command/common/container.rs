//! Runs a process in a separate network namespace, like a container without a file system. Starting a process in a
//! network namespace needs root and the program `ip`.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// A process in its own network namespace; dropping a [`Container`] ends the process and the network namespace.
pub(crate) struct Container {
    process: Child,
    /// The network namespace in the form that the plugin records; set only by [`Container::empty`].
    netns: Option<String>,
}

impl Container {
    /// Starts a process in a network namespace without any address.
    pub(crate) fn empty() -> Self {
        let mut container = Self::start(&["--net", "sleep", "600"]);
        let own = host::network_namespace(Path::new("/proc/self/ns/net"));
        for _ in 0..200 {
            let netns = host::network_namespace(&container.link());
            if netns.is_some() && netns != own {
                container.netns = netns;
                return container;
            }
            sleep(Duration::from_millis(50));
        }
        panic!("the namespace was never made (this test needs root)");
    }

    /// Returns the network namespace in the form that the plugin records.
    pub(crate) fn netns(&self) -> String {
        self.netns.clone().unwrap()
    }

    fn link(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.process.id()))
    }

    fn start(args: &[&str]) -> Self {
        let mut command = Command::new("unshare");
        command.args(args).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { process: command.spawn().unwrap(), netns: None }
    }

    /// Starts a process in a network namespace with this address, and waits until a scan of the machine finds the
    /// address.
    pub(crate) fn with(address: &str) -> Self {
        let script = format!("ip address add {address}/32 dev lo && exec sleep 600");
        let mut container = Self::start(&["--net", "sh", "-c", &script]);
        let wanted = address.parse().unwrap();
        for _ in 0..200 {
            let seen = host::scan().unwrap_or_else(|blind| panic!("{blind} (this test needs root)"));
            if seen.addresses.contains(&wanted) {
                container.netns = host::network_namespace(&container.link());
                return container;
            }
            sleep(Duration::from_millis(50));
        }
        panic!("{address} was never seen (this test needs root and iproute2)");
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.process.id().try_into().unwrap()), Signal::SIGKILL);
        let _ = self.process.wait();
        // A scan in another test may still be inside the ended container's network namespace, which therefore still
        // exists.
        let is_there =
            |netns: &String| host::scan().is_ok_and(|seen| seen.namespaces.is_some_and(|all| all.contains(netns)));
        for _ in 0..200 {
            if !self.netns.as_ref().is_some_and(is_there) {
                return;
            }
            sleep(Duration::from_millis(50));
        }
    }
}
