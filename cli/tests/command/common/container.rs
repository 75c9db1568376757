//! A container as far as addresses go: a network namespace with a process in it. Needs root, and `ip`.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// A process in a namespace of its own that has an address; both are gone when this is.
pub(crate) struct Container(Child);

impl Container {
    /// Waits until the address is there.
    pub(crate) fn with(address: &str) -> Self {
        let script = format!("ip address add {address}/32 dev lo && exec sleep 600");
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", &script]).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let container = Self(command.spawn().unwrap());
        let wanted = address.parse().unwrap();
        for _ in 0..200 {
            let seen = host::look().unwrap_or_else(|blind| panic!("{blind} (this test needs root)"));
            if seen.contains(&wanted) {
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
