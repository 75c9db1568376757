//! The kernel's settings below `/proc/sys/net`. The kernel shows those of the network namespace in which the thread is.

use std::fs::{self, OpenOptions};
use std::io::Write;

use crate::error::Errno;

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
