//! Evidence of the addresses and network namespaces in use on the machine.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;
use ipnet::IpNet;

/// The state of the machine, gathered after [`Holdings`](super::Holdings) were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// The first 8 characters of the boot id.
    pub boot: String,
    /// The time since the machine booted.
    pub up: Duration,
    /// The addresses of all interfaces in the network namespaces that were scanned.
    pub live: BTreeSet<IpAddr>,
    /// The names of all network namespaces that were scanned, without the part after a slash; see
    /// [`NETNS`](crate::attachment::NETNS). `None` if the name of one is unknown.
    pub namespaces: Option<BTreeSet<String>>,
    /// The process id namespace in which the scan ran, if it is not the machine's initial one. Such a scan does not see
    /// anything outside it.
    pub within: Option<String>,
}

impl Evidence {
    /// True if an interface has the address, or an address of the prefix.
    pub fn is_on_an_interface(&self, unit: IpNet) -> bool {
        self.live.range(unit.network()..=unit.broadcast()).next().is_some()
    }
}

/// A source of evidence. Only an assignment that finds no room queries it.
#[async_trait]
pub trait LivenessSource: Send + Sync {
    /// The current state, or `None` if a part of the machine cannot be scanned. Nothing is freed then.
    async fn evidence(&self) -> Option<Evidence>;
}
