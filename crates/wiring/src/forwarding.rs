//! The host's own setting for passing packets on.

use std::net::IpAddr;

use crate::error::Error;
use crate::sysctl;

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
        if sysctl::read(key).as_deref() != Some("1") {
            sysctl::set(key, "1").map_err(Error::Failed)?;
            tracing::info!(setting = key, "the host passes packets on from now on");
        }
    }
    Ok(())
}
