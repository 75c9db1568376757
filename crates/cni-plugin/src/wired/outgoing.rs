//! On a store of one machine the plugin enables forwarding on the host, and masquerades the pools with `natOutgoing`.
//! On etcd, and on a machine where calico-node runs, Felix does both, and the plugin does nothing.

use std::net::IpAddr;

use agent::{CniError, Result};
use datastore::{Location, served};
use ipam_core::model::Pool;
use ipnet::IpNet;
use wiring::{ensure_forwarding, masquerade};

use super::told;

/// The rules for packets that leave the machine; `None` where Felix makes them.
pub(super) struct Outgoing(Option<Networks>);

/// The pools of a store.
struct Networks {
    /// The store, as its daemon is named.
    store: String,
    masqueraded: Vec<IpNet>,
    /// Disabled ones as well: containers that run on keep their addresses.
    all: Vec<IpNet>,
}

impl Outgoing {
    /// The plugin makes the rules, for these pools: all of the store at this location.
    pub(super) fn by_us(location: &Location, pools: &[Pool]) -> Self {
        let store = served::instance(location).unwrap_or_default();
        let masqueraded = pools.iter().filter(|pool| pool.is_nat_outgoing()).map(Pool::cidr).collect();
        Self(Some(Networks { store, masqueraded, all: pools.iter().map(Pool::cidr).collect() }))
    }

    /// Felix makes the rules.
    pub(super) fn by_calico() -> Self {
        Self(None)
    }

    /// Opens the way for a container with these addresses.
    ///
    /// The rules are those of all pools as they are now, so that rules of a pool that has been changed or deleted go with the
    /// next container of whatever pool. That something fails counts only for a container that needs it.
    ///
    /// # Errors
    /// The text of [`wiring::Error`], with what needs it in front.
    pub(super) fn ensure(&self, addresses: &[IpAddr]) -> Result<()> {
        let Some(Networks { store, masqueraded, all }) = &self.0 else { return Ok(()) };
        let is_masqueraded = |address: &IpAddr| masqueraded.iter().any(|network| network.contains(address));
        let needed = addresses.iter().find(|address| is_masqueraded(address));
        match (masquerade::ensure(store, masqueraded, all), needed) {
            (Ok(()), _) => {}
            (Err(error), Some(address)) => {
                let text =
                    format!("the pool of {address} has natOutgoing, but its packets cannot be masqueraded: {error}");
                return Err(CniError::internal(text));
            }
            (Err(error), None) => tracing::warn!(%error, "the rules for pools with natOutgoing stay as they are"),
        }
        // Among themselves, containers need it for IPv6 alone.
        let forwarded: Vec<IpAddr> =
            addresses.iter().filter(|address| address.is_ipv6() || is_masqueraded(address)).copied().collect();
        ensure_forwarding(&forwarded).map_err(told)
    }
}
