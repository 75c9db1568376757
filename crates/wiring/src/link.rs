//! Looks up, lists and removes network interfaces, checks interface names, and formats MAC addresses.

use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

use crate::error::{Errno, Error};
use crate::messages::{self, Link};
use crate::namespace::{NetNamespace, run_in_thread};
use crate::netlink::NetlinkSocket;

/// Maximum length of an interface name in bytes (`IFNAMSIZ` without the terminating zero).
const MAX_NAME_BYTES: usize = 15;

/// Returns an error for an interface name that the kernel would reject or replace. The kernel replaces an empty name,
/// or a name with `%`, by a name of its own choice.
pub(crate) fn check_name(name: &str) -> Result<(), Errno> {
    let strange = |letter: char| matches!(letter, '/' | ':' | '%') || letter.is_whitespace() || letter.is_control();
    if name.len() > MAX_NAME_BYTES {
        Err(Errno::TOO_LONG)
    } else if matches!(name, "" | "." | "..") || name.contains(strange) {
        Err(Errno::WRONG)
    } else {
        Ok(())
    }
}

/// Looks up the interface with this name in the network namespace of a socket.
pub(crate) fn look_up(socket: &NetlinkSocket, name: &str) -> Result<Link, Errno> {
    messages::read_link(&socket.one(messages::look_up(name))?)
}

/// Returns the error for an interface that should exist but was not found.
pub(crate) fn not_found(name: &str, errno: Errno) -> Error {
    // The netlink library of Calico's plugin also reports "Link not found" for a missing interface.
    let reason = if errno == Errno::NO_DEVICE { "Link not found".to_owned() } else { errno.to_string() };
    Error::failed(&format!("failed to lookup {name:?}"), reason)
}

/// Formats a MAC address in lower case with colons.
pub(crate) fn mac_text(mac: &[u8]) -> String {
    let mut text = String::with_capacity(mac.len() * 3);
    for byte in mac {
        let colon = if text.is_empty() { "" } else { ":" };
        // Writing to a `String` cannot fail.
        let _ = write!(text, "{colon}{byte:02x}");
    }
    text
}

/// Returns whether a network namespace contains an interface with this name.
///
/// # Errors
///
/// The network namespace cannot be entered, the kernel does not answer the lookup, or the deadline passes.
pub fn has_interface(namespace: &Path, name: &str, deadline: Instant) -> Result<bool, Error> {
    let container = NetNamespace::open(namespace)?;
    let name = name.to_owned();
    let late = || Error::TimedOut("timed out looking for an interface in netns".to_owned());
    run_in_thread(deadline, late, move |outcome| {
        let found =
            container.enter().and_then(|()| NetlinkSocket::route()).and_then(|socket| match look_up(&socket, &name) {
                Ok(_) => Ok(true),
                Err(Errno::NO_DEVICE) => Ok(false),
                Err(errno) => Err(Error::failed("failed to look for an interface in netns", errno)),
            });
        drop(outcome.send(found));
    })
}

/// The host's end of a pair of interfaces (veth or netkit).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInterface {
    /// The name of the host's interface.
    pub name: String,
    /// The kernel's index of the interface. A new interface of the same name gets another index.
    pub index: u32,
}

/// Removes both ends of an interface pair, given the host's end. It is no error if the interface does not exist.
///
/// # Errors
///
/// The kernel refuses to remove the interface.
pub fn remove_host_interface(interface: &HostInterface) -> Result<(), Error> {
    match NetlinkSocket::route()?.one(messages::remove(interface.index)) {
        Ok(_) | Err(Errno::NO_DEVICE) => Ok(()),
        Err(errno) => Err(Error::failed(&format!("failed to delete {:?}", interface.name), errno)),
    }
}

/// Lists the host's interfaces that belong to veth or netkit pairs.
///
/// # Errors
///
/// The kernel refuses to list the host's interfaces.
pub fn host_interfaces() -> Result<Vec<HostInterface>, Error> {
    let host = NetlinkSocket::route()?;
    let failed = |errno: Errno| Error::failed("failed to list the interfaces of the host", errno);
    let mut interfaces = Vec::new();
    for payload in host.list(&messages::interfaces()).map_err(failed)? {
        let link = messages::read_link(&payload).map_err(failed)?;
        if link.is_of_a_pair() {
            interfaces.push(HostInterface { name: link.name, index: link.index });
        }
    }
    Ok(interfaces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_names_are_those_that_kernel_takes() {
        for good in ["eth0", "calic1", "a", "ETH_0.1", "fifteen-letters", "é"] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a:b", "a b", "a\tb", "eth%d", "a\0b", "a\n"] {
            assert_eq!(check_name(bad), Err(Errno::WRONG), "{bad:?}");
        }
        assert_eq!(check_name("sixteen-letters-"), Err(Errno::TOO_LONG));
    }

    #[test]
    fn mac_addresses_are_written_in_lower_case_with_colons() {
        assert_eq!(mac_text(&[0xca, 0xfe, 0, 1, 0x0a, 0xff]), "ca:fe:00:01:0a:ff");
        assert_eq!(mac_text(&[]), "");
    }
}
