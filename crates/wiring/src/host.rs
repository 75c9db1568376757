//! The interfaces of the host.

use crate::error::{Errno, Error};
use crate::messages;
use crate::netlink::Socket;
use crate::replies;

/// The host's end of a pair (veth or netkit).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInterface {
    /// The name.
    pub name: String,
    /// The number by which the kernel knows this interface and no later one of the same name.
    pub index: u32,
}

/// Removes the host's end of a pair, and with it the whole pair. An interface that is gone is fine.
///
/// # Errors
///
/// The kernel refuses the removal.
pub fn remove_host_interface(interface: &HostInterface) -> Result<(), Error> {
    match Socket::route()?.one(messages::remove(interface.index)) {
        Ok(_) | Err(Errno::NO_DEVICE) => Ok(()),
        Err(errno) => Err(Error::failed(&format!("failed to delete {:?}", interface.name), errno)),
    }
}

/// The interfaces of the host that are ends of pairs.
///
/// # Errors
///
/// The kernel refuses to list them.
pub fn host_interfaces() -> Result<Vec<HostInterface>, Error> {
    let host = Socket::route()?;
    let failed = |errno: Errno| Error::failed("failed to list the interfaces of the host", errno);
    let mut interfaces = Vec::new();
    for payload in host.list(&messages::interfaces()).map_err(failed)? {
        let link = replies::link(&payload).map_err(failed)?;
        if link.is_of_a_pair() {
            interfaces.push(HostInterface { name: link.name, index: link.index });
        }
    }
    Ok(interfaces)
}
