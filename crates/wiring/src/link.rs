//! Interfaces: their names and MAC addresses as texts, and finding them.

use std::fmt::Write;

use crate::error::{Errno, Error};
use crate::messages;
use crate::netlink::Socket;
use crate::replies::{self, Link};

/// The longest name of an interface in bytes (`IFNAMSIZ` without the zero).
const LONGEST_NAME: usize = 15;

/// Refuses a name that the kernel refuses, and one that it does not take as it is: for an empty name, and for one with a
/// `%`, it chooses another one.
pub(crate) fn check_name(name: &str) -> Result<(), Errno> {
    let strange = |letter: char| matches!(letter, '/' | ':' | '%') || letter.is_whitespace() || letter.is_control();
    if name.len() > LONGEST_NAME {
        Err(Errno::TOO_LONG)
    } else if matches!(name, "" | "." | "..") || name.contains(strange) {
        Err(Errno::WRONG)
    } else {
        Ok(())
    }
}

/// The interface with a name in the namespace of a socket.
pub(crate) fn look_up(socket: &Socket, name: &str) -> Result<Link, Errno> {
    replies::link(&socket.one(messages::look_up(name))?)
}

/// The error for an interface that must be there and is not found.
pub(crate) fn not_found(name: &str, errno: Errno) -> Error {
    // Calico's library has a text of its own for this.
    let reason = if errno == Errno::NO_DEVICE { "Link not found".to_owned() } else { errno.to_string() };
    Error::failed(&format!("failed to lookup {name:?}"), reason)
}

/// A MAC address in lower case with colons.
pub(crate) fn mac_text(mac: &[u8]) -> String {
    let mut text = String::with_capacity(mac.len() * 3);
    for byte in mac {
        let colon = if text.is_empty() { "" } else { ":" };
        // Writing to a text cannot fail.
        let _ = write!(text, "{colon}{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_kernel_takes_as_they_are() {
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
