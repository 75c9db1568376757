//! The kernel's settings below `/proc/sys/net`, and the host's setting for forwarding packets.
//!
//! The kernel shows the settings of the current thread's network namespace.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;

use crate::error::{Errno, Error};

const FOLDER: &str = "/proc/sys/net";

/// Writes a setting, for example `ipv4/ip_forward`. Does not create a missing one.
///
/// # Errors
///
/// A text, for example `open /proc/sys/net/ipv4/ip_forward: permission denied`.
pub(crate) fn write(key: &str, value: &str) -> Result<(), String> {
    let path = format!("{FOLDER}/{key}");
    let failed = |what, error| format!("{what} {path}: {}", Errno::from(&error));
    let mut file = OpenOptions::new().write(true).open(&path).map_err(|error| failed("open", error))?;
    file.write_all(value.as_bytes()).map_err(|error| failed("write", error))
}

/// [`write()`], but the error begins with the name of the setting: `failed to set net.ipv4.conf.calic1.proxy_arp=1: ..`.
pub(crate) fn set(key: &str, value: &str) -> Result<(), String> {
    write(key, value).map_err(|reason| format!("failed to set net.{}={value}: {reason}", key.replace('/', ".")))
}

/// Returns the value of a setting, or `None` if it cannot be read.
pub(crate) fn read(key: &str) -> Option<String> {
    Some(fs::read_to_string(format!("{FOLDER}/{key}")).ok()?.trim().to_owned())
}

/// Makes the host forward packets for the families of these addresses: sets `net.ipv4.ip_forward` and
/// `net.ipv6.conf.all.forwarding` to 1 if they differ.
///
/// Containers reach each other over IPv4 without these settings: the kernel checks the setting of the interface by
/// which a packet arrives, and `connect` sets it for the host's ends. An answer from the world arrives by an interface
/// without that setting. For IPv6 the kernel checks only the setting of the whole host, so containers need it even to
/// reach each other. With that setting, a host accepts no default route from router advertisements any more, unless its
/// interface has `accept_ra=2`.
///
/// # Errors
///
/// The setting cannot be written: `failed to set net.ipv4.ip_forward=1: ..`.
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
