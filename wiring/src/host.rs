//! The interfaces of the host.

use crate::error::{Errno, Error};
use crate::link::{check_name, look_up};
use crate::messages;
use crate::netlink::Socket;
use crate::replies;

/// Removes the host's end of a pair, and with it the whole pair. An interface that is not there, or that is not of a pair
/// (veth or netkit), is left alone.
///
/// # Errors
///
/// The kernel refuses it.
pub fn remove_host_interface(name: &str) -> Result<(), Error> {
    if check_name(name).is_err() {
        return Ok(());
    }
    let host = Socket::route()?;
    let removed = look_up(&host, name)
        .and_then(|link| if link.is_of_a_pair() { host.one(messages::remove(link.index)).map(drop) } else { Ok(()) });
    match removed {
        Ok(()) | Err(Errno::NO_DEVICE) => Ok(()),
        Err(errno) => Err(Error::failed(&format!("failed to delete {name:?}"), errno)),
    }
}

/// The names of the host's interfaces that begin with a prefix and are of a pair (veth or netkit).
///
/// # Errors
///
/// The kernel refuses to list them.
pub fn host_interfaces(prefix: &str) -> Result<Vec<String>, Error> {
    let host = Socket::route()?;
    let failed = |errno: Errno| Error::failed("failed to list the interfaces of the host", errno);
    let mut names = Vec::new();
    for payload in host.list(&messages::interfaces()).map_err(failed)? {
        let link = replies::link(&payload).map_err(failed)?;
        if link.is_of_a_pair() && link.name.starts_with(prefix) {
            names.push(link.name);
        }
    }
    Ok(names)
}
