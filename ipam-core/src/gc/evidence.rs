//! Evidence of what lives on the machine.

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
    /// How long ago the boot began.
    pub up: Duration,
    /// Every address that an interface holds in any network namespace that was seen.
    pub live: BTreeSet<IpAddr>,
    /// The names of all network namespaces that were seen, without what may follow a slash; see
    /// [`NETNS`](crate::attachment::NETNS). `None` if one of them has no known name.
    pub namespaces: Option<BTreeSet<String>>,
    /// The process id namespace in which the look was made, unless that is the machine's first: nothing outside of it was
    /// seen.
    pub within: Option<String>,
}

impl Evidence {
    /// True if an interface has the address, or one of the prefix.
    pub fn is_on_an_interface(&self, unit: IpNet) -> bool {
        self.live.range(unit.network()..=unit.broadcast()).next().is_some()
    }
}

/// A source of evidence, asked only if an assignment finds no room.
#[async_trait]
pub trait LivenessSource: Send + Sync {
    /// The state now; `None` if a part of the machine cannot be seen. Nothing is freed then.
    async fn evidence(&self) -> Option<Evidence>;
}
