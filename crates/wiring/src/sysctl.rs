//! Reads and writes kernel settings (sysctls) under `/proc/sys/net`, and makes the host forward packets.
//!
//! A thread that reads `/proc/sys/net` sees the settings of the thread's own network namespace.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;

use crate::error::{Errno, Error};

const FOLDER: &str = "/proc/sys/net";

/// Writes a kernel setting (sysctl), for example `ipv4/ip_forward`. Fails if the kernel has no setting with the name
/// `key`.
///
/// # Errors
///
/// The error message, for example `open /proc/sys/net/ipv4/ip_forward: permission denied`.
pub(crate) fn write(key: &str, value: &str) -> Result<(), String> {
    let path = format!("{FOLDER}/{key}");
    let failed = |what, error| format!("{what} {path}: {}", Errno::from(&error));
    let mut file = OpenOptions::new().write(true).open(&path).map_err(|error| failed("open", error))?;
    file.write_all(value.as_bytes()).map_err(|error| failed("write", error))
}

/// Writes a kernel setting like [`write()`], but the error message begins with the setting's name, as in `failed to set
/// net.ipv4.conf.calic1.proxy_arp=1: ..`.
pub(crate) fn set(key: &str, value: &str) -> Result<(), String> {
    write(key, value).map_err(|reason| format!("failed to set net.{}={value}: {reason}", key.replace('/', ".")))
}

/// Returns the value of a kernel setting (sysctl), or `None` if the setting cannot be read.
pub(crate) fn read(key: &str) -> Option<String> {
    Some(fs::read_to_string(format!("{FOLDER}/{key}")).ok()?.trim().to_owned())
}

/// Makes the host forward packets of the address families that occur in the given addresses. Sets `net.ipv4.ip_forward`
/// and `net.ipv6.conf.all.forwarding` to 1 unless they already are 1.
///
/// IPv4 between containers of this host works even without `net.ipv4.ip_forward`. For IPv4, the kernel checks the
/// forwarding setting of the interface by which a packet arrives. `connect` turns forwarding on for each container's
/// host interface. Packets from outside of the host arrive by other interfaces, which `connect` does not change; for
/// them, `net.ipv4.ip_forward` is needed. For IPv6, the kernel checks only the setting of the whole host, so even IPv6
/// between containers needs `net.ipv6.conf.all.forwarding`. With `net.ipv6.conf.all.forwarding`, the host no longer
/// accepts a default route from router advertisements, except on interfaces with `accept_ra=2`.
///
/// # Errors
///
/// A kernel setting cannot be written, for example `failed to set net.ipv4.ip_forward=1: ..`.
pub fn ensure_forwarding(addresses: &[IpAddr]) -> Result<(), Error> {
    let families = [
        (addresses.iter().any(IpAddr::is_ipv4), "ipv4/ip_forward"),
        (addresses.iter().any(IpAddr::is_ipv6), "ipv6/conf/all/forwarding"),
    ];
    for (_, key) in families.into_iter().filter(|(wanted, _)| *wanted) {
        if read(key).as_deref() != Some("1") {
            set(key, "1").map_err(Error::Failed)?;
            tracing::info!(setting = key, "enabled packet forwarding on the host");
        }
    }
    Ok(())
}
