//! Describes the addresses and network namespaces that are in use on the machine.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;
use ipnet::IpNet;

/// The state of the machine, from which callers conclude which addresses are unused. Callers must gather the evidence
/// after they have read the [`Holdings`](super::Holdings) of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// The first 8 characters of the machine's current boot id.
    pub boot: String,
    /// The time since the machine booted.
    pub up: Duration,
    /// The addresses of all interfaces in the scanned network namespaces.
    pub live: BTreeSet<IpAddr>,
    /// The names of all scanned network namespaces, without the process id namespace after a slash; see
    /// [`NETNS`](crate::attachment::NETNS). `None` if one of the scanned network namespaces has no known name.
    pub namespaces: Option<BTreeSet<String>>,
    /// The process id namespace in which the scan ran, or `None` for the machine's initial process id namespace. A scan
    /// in a container's process id namespace does not see anything outside of the container.
    pub within: Option<String>,
}

impl Evidence {
    /// True if an interface of the machine has the address, or any address of the prefix.
    pub fn is_on_an_interface(&self, unit: IpNet) -> bool {
        self.live.range(unit.network()..=unit.broadcast()).next().is_some()
    }
}

/// A source of evidence about the machine. Assignments ask for the evidence only when they find no free address.
#[async_trait]
pub trait LivenessSource: Send + Sync {
    /// Returns the machine's current state. Returns `None`, so that no address is freed, if a part of the machine
    /// cannot be scanned.
    async fn evidence(&self) -> Option<Evidence>;
}
