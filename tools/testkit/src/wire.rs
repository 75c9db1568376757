//! Creates a network link to a simulated device: a veth pair with one end in its own network namespace. This needs
//! root.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::namespace;
use crate::process::wait_until;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A veth pair. Dropping this value removes the veth pair, the bridge and the network namespace.
#[derive(Debug)]
pub struct Wire {
    /// The name of the veth end that is in this process's network namespace.
    pub interface: String,
    /// The name of the bridge that [`Wire::bridged`] creates.
    bridge: String,
    namespace: String,
}

impl Wire {
    /// Creates a veth pair with one end in a new network namespace. The far end of the veth pair, which is the
    /// simulated device, gets the given addresses with their prefix lengths.
    pub fn new(addresses: &[&str]) -> Self {
        let name = format!("w{}x{}", std::process::id() % 1_000_000, NEXT.fetch_add(1, Ordering::Relaxed));
        let wire = Self { interface: format!("{name}h"), bridge: format!("{name}b"), namespace: name };
        let Self { interface, namespace, .. } = &wire;
        ip(&format!("netns add {namespace}"));
        ip(&format!("link add {interface} type veth peer name dev0 netns {namespace}"));
        ip(&format!("-n {namespace} link set dev0 up"));
        ip(&format!("link set {interface} up"));
        addresses.iter().for_each(|address| wire.device("add", address));
        until_up(interface);
        wire
    }

    /// Adds an address to the simulated device if `what` is "add", or removes it if `what` is "del".
    pub fn device(&self, what: &str, address: &str) {
        let nodad = if what == "add" && address.contains(':') { " nodad" } else { "" };
        ip(&format!("-n {} address {what} {address} dev dev0{nodad}", self.namespace));
    }

    /// Attaches the near end of the veth pair to a new bridge of this machine. Returns the bridge's name.
    pub fn bridged(&self) -> &str {
        ip(&format!("link add {} type bridge", self.bridge));
        ip(&format!("link set {} master {}", self.interface, self.bridge));
        ip(&format!("link set {} up", self.bridge));
        until_up(&self.bridge);
        &self.bridge
    }

    /// Returns the MAC address of the simulated device.
    pub fn mac(&self) -> String {
        let said = ip(&format!("-n {} -o link show dev dev0", self.namespace));
        said.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap().to_owned()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for words in [["netns", "del", &self.namespace], ["link", "del", &self.bridge]] {
            let _ = Command::new("ip").args(words).output();
        }
    }
}

/// Waits until the kernel reports the link as up, which may take up to a second.
fn until_up(interface: &str) {
    let state = format!("/sys/class/net/{interface}/operstate");
    wait_until(&format!("{interface} is up"), Duration::from_secs(20), || {
        std::fs::read_to_string(&state).unwrap().trim() == "up"
    });
}

fn ip(words: &str) -> String {
    namespace::ip(words).unwrap_or_else(|error| panic!("{error} (this test needs root)"))
}
