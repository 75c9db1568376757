//! Reads and writes the kernel's settings under `/proc/sys/net`, and makes the host forward packets.
//!
//! Under `/proc/sys/net`, the kernel shows the settings of the current thread's network namespace.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;

use crate::error::{Errno, Error};

const FOLDER: &str = "/proc/sys/net";

/// Writes a kernel setting, for example `ipv4/ip_forward`. The setting must exist.
///
/// # Errors
///
/// The text of the failure, for example `open /proc/sys/net/ipv4/ip_forward: permission denied`.
pub(crate) fn write(key: &str, value: &str) -> Result<(), String> {
    let path = format!("{FOLDER}/{key}");
    let failed = |what, error| format!("{what} {path}: {}", Errno::from(&error));
    let mut file = OpenOptions::new().write(true).open(&path).map_err(|error| failed("open", error))?;
    file.write_all(value.as_bytes()).map_err(|error| failed("write", error))
}

/// Writes a kernel setting like [`write()`], but the error begins with the name of the setting: `failed to set
/// net.ipv4.conf.calic1.proxy_arp=1: ..`.
pub(crate) fn set(key: &str, value: &str) -> Result<(), String> {
    write(key, value).map_err(|reason| format!("failed to set net.{}={value}: {reason}", key.replace('/', ".")))
}

/// Returns the value of a kernel setting, or `None` if the setting cannot be read.
pub(crate) fn read(key: &str) -> Option<String> {
    Some(fs::read_to_string(format!("{FOLDER}/{key}")).ok()?.trim().to_owned())
}

/// Makes the host forward packets for the families of these addresses: sets `net.ipv4.ip_forward` and
/// `net.ipv6.conf.all.forwarding` to 1 unless they already are 1.
///
/// Containers of this host reach each other over IPv4 even without `net.ipv4.ip_forward`. For IPv4, the kernel checks
/// the forwarding setting of the interface by which a packet arrives, and `connect` enables forwarding for the host's
/// ends. An answer from outside the host arrives by an interface whose forwarding is not enabled by `connect`. For
/// IPv6, the kernel checks only the setting of the whole host, so containers need `net.ipv6.conf.all.forwarding` even
/// to reach each other. With `net.ipv6.conf.all.forwarding`, the host no longer accepts a default route from router
/// advertisements, unless the interface has `accept_ra=2`.
///
/// # Errors
///
/// A setting cannot be written, for example `failed to set net.ipv4.ip_forward=1: ..`.
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
