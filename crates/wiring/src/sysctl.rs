//! The kernel's settings below `/proc/sys/net`, and the host's own setting for passing packets on.
//!
//! The kernel shows the settings of the network namespace in which the thread is.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::IpAddr;

use crate::error::{Errno, Error};

const FOLDER: &str = "/proc/sys/net";

/// Sets a setting, for example `ipv4/ip_forward`. One that is not there is not made.
///
/// # Errors
///
/// A text: `open /proc/sys/net/ipv4/ip_forward: permission denied`.
pub(crate) fn write(key: &str, value: &str) -> Result<(), String> {
    let path = format!("{FOLDER}/{key}");
    let failed = |what, error| format!("{what} {path}: {}", Errno::from(&error));
    let mut file = OpenOptions::new().write(true).open(&path).map_err(|error| failed("open", error))?;
    file.write_all(value.as_bytes()).map_err(|error| failed("write", error))
}

/// The same with the setting's own name in front of the reason: `failed to set net.ipv4.conf.calic1.proxy_arp=1: ..`.
pub(crate) fn set(key: &str, value: &str) -> Result<(), String> {
    write(key, value).map_err(|reason| format!("failed to set net.{}={value}: {reason}", key.replace('/', ".")))
}

/// The value of a setting; `None` if it cannot be read.
pub(crate) fn read(key: &str) -> Option<String> {
    Some(fs::read_to_string(format!("{FOLDER}/{key}")).ok()?.trim().to_owned())
}

/// Lets the host pass packets on for the families of these addresses: `net.ipv4.ip_forward` and
/// `net.ipv6.conf.all.forwarding` become 1, unless they are.
///
/// Containers reach each other over IPv4 without that: the kernel looks at the setting of the interface from which a packet
/// comes, and the host's ends have theirs. An answer of the world comes from an interface that has not. For IPv6 the kernel
/// looks at the setting of the whole host alone, so containers need it even among themselves. A host with that setting takes
/// no default route from router advertisements any more, unless its interface has `accept_ra=2`.
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
            tracing::info!(setting = key, "the host passes packets on from now on");
        }
    }
    Ok(())
}
