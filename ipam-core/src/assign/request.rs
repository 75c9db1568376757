//! Defines the request of an assignment, and its answer.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::attachment::{Attachment, AttributeNames};
use crate::model::{HostReserved, Labels, Owner, Pool, PoolUse};
use crate::net::{Family, nth};
use crate::sticky::Sticky;

/// Maximum number of blocks of a family that are prefetched because an address may come from them.
const MAX_LIKELY_BLOCKS: usize = 4;

/// The requested addresses: specific addresses, and a number of any other addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedAddresses {
    /// The specifically requested addresses.
    pub these: Vec<IpAddr>,
    /// The number of requested IPv4 addresses besides the specific ones.
    pub any_v4: usize,
    /// The number of requested IPv6 addresses besides the specific ones.
    pub any_v6: usize,
}

impl RequestedAddresses {
    /// Requests any addresses, the given number of each family.
    pub fn any(v4: usize, v6: usize) -> Self {
        Self { these: Vec::new(), any_v4: v4, any_v6: v6 }
    }

    /// Requests these specific addresses.
    pub fn these(addresses: impl Into<Vec<IpAddr>>) -> Self {
        Self { these: addresses.into(), ..Self::default() }
    }

    pub(super) fn add(&mut self, more: &Self) {
        self.these.extend(&more.these);
        self.any_v4 += more.any_v4;
        self.any_v6 += more.any_v6;
    }

    /// Returns the number of requested addresses of a family, including the addresses in `these`.
    pub(super) fn all_of(&self, family: Family) -> usize {
        self.any_of(family) + self.these.iter().filter(|ip| Family::of(**ip) == family).count()
    }

    pub(super) fn any_of(&self, family: Family) -> usize {
        match family {
            Family::V4 => self.any_v4,
            Family::V6 => self.any_v6,
        }
    }
}

/// The answer to an attachment that requests a specific address that the attachment already holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepeatPolicy {
    /// The attachment gets the same answer again.
    #[default]
    SameAnswer,
    /// The request is refused, as in Calico.
    Refused,
}

/// Whether the labels of the container's namespace are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceLabels {
    /// The request contains the labels of the namespace. A namespace that does not exist has no labels.
    #[default]
    Known,
    /// The labels of the namespace have not been read yet. If a pool selects by namespace labels, the assignment fails
    /// with [`Error::NamespaceWanted`](crate::Error::NamespaceWanted). The caller must then read the labels and repeat
    /// the request.
    NotYetRead,
}

/// The gateway that a bridged network requests in the pool of one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gateway {
    /// The recorded gateway, if a gateway is recorded.
    #[default]
    Recorded,
    /// The recorded gateway, or else the pool's first host address.
    First,
    /// The gateway is this configured address.
    At(IpAddr),
}

/// The gateways that a bridged network requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// The gateway in the network's IPv4 pool.
    pub v4: Gateway,
    /// The gateway in the network's IPv6 pool.
    pub v6: Gateway,
}

impl Bridge {
    pub(super) fn gateway(self, family: Family) -> Gateway {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }
}

/// A pool that the network's configuration defines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolDefinition {
    /// The name of the pool.
    pub name: String,
    /// The network of the pool.
    pub cidr: IpNet,
    /// The assignable addresses of the pool, as inclusive ranges of first and last address. If empty, all addresses of
    /// the pool's network are assignable.
    pub ranges: Vec<(IpAddr, IpAddr)>,
    /// The number of the set of ranges to which the pool belongs. The attachment gets one address from each set of a
    /// family, from the first pool of the set with a free address.
    #[serde(default)]
    pub set: usize,
    /// If `free_of` is present, any pool of this name and family is used, regardless of its network. A new pool gets a
    /// free private network of the family and size of `cidr` that overlaps with no pool and with none of the networks
    /// in `free_of`.
    #[serde(default)]
    pub free_of: Option<Vec<IpNet>>,
    /// The gateway that the configuration names for this pool.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
}

impl PoolDefinition {
    /// True if the address is in the pool's ranges.
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        let is_of_range = |(first, last): &(IpAddr, IpAddr)| *first <= ip && ip <= *last;
        self.cidr.contains(&ip) && (self.ranges.is_empty() || self.ranges.iter().any(is_of_range))
    }
}

/// The request of an assignment. All addresses of the request are assigned in one commit, or none.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AssignRequest {
    /// The attachment that gets the addresses. The handle and the attributes of the attachment are recorded.
    pub attachment: Attachment,
    /// Further attributes to record: `pod`, `namespace`, `timestamp`. The attributes in a request have Calico's names.
    /// On a secondary network Margay's names are recorded instead; see [`AttributeNames`].
    pub attributes: BTreeMap<String, String>,
    /// The requested addresses.
    pub wanted: RequestedAddresses,
    /// The answer if the attachment already holds a requested address.
    pub repeated: RepeatPolicy,
    /// The pools from which IPv4 addresses are taken, by name or network. If empty, the pools that select the node are
    /// used.
    pub v4_pools: Vec<String>,
    /// The pools from which IPv6 addresses are taken, by name or network. If empty, the pools that select the node are
    /// used.
    pub v6_pools: Vec<String>,
    /// The use of the requested addresses.
    pub usage: PoolUse,
    /// The labels of the namespace, for pools with a namespace selector.
    pub namespace_labels: Labels,
    /// Whether the labels of the namespace are known.
    pub namespace: NamespaceLabels,
    /// Maximum number of blocks of the host, in addition to the limit in the settings; 0 for no additional limit.
    pub max_blocks: u32,
    /// The addresses that the host reserves for itself in each new block.
    pub host_reserved: Option<HostReserved>,
    /// The gateways that a bridged network requests; `None` for a routed network.
    pub bridge: Option<Bridge>,
    /// The configured gateways of a bridged network with several pools of a family. Each configured gateway applies to
    /// the pool that contains it, and takes precedence over the gateway in the pool's definition.
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
    /// The pools that the network's configuration defines. Missing pools are created before the assignment.
    pub define: Vec<PoolDefinition>,
    /// The workload that keeps the addresses, if any.
    #[serde(default)]
    pub sticky: Option<Sticky>,
}

impl AssignRequest {
    /// Creates a request of these addresses for an attachment on a routed network, for use by a workload.
    pub fn new(attachment: Attachment, wanted: RequestedAddresses) -> Self {
        Self {
            attachment,
            attributes: BTreeMap::new(),
            wanted,
            repeated: RepeatPolicy::SameAnswer,
            v4_pools: Vec::new(),
            v6_pools: Vec::new(),
            usage: PoolUse::Workload,
            namespace_labels: Labels::new(),
            namespace: NamespaceLabels::Known,
            max_blocks: 0,
            host_reserved: None,
            bridge: None,
            gateways: Vec::new(),
            define: Vec::new(),
            sticky: None,
        }
    }

    /// Creates a request for an owner of blocks. The attachment of the request is empty and not read. Addresses of a
    /// virtual owner are for a load balancer, unless the caller sets another use.
    pub(super) fn of_owner(owner: &Owner, wanted: RequestedAddresses) -> Self {
        let empty = String::new;
        let (network, container, interface, node) = (empty(), empty(), empty(), empty());
        let mut terms = Self::new(Attachment { network, container, interface, node, boot: None }, wanted);
        if matches!(owner, Owner::Virtual(_)) {
            terms.usage = PoolUse::LoadBalancer;
        }
        terms
    }

    pub(super) fn set_pools(&mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) {
        let pools = pools.into_iter().map(Into::into).collect();
        match family {
            Family::V4 => self.v4_pools = pools,
            Family::V6 => self.v6_pools = pools,
        }
    }

    /// Returns the sets of pools of a family that the request defines.
    pub(super) fn sets(&self, family: Family) -> Vec<Vec<&PoolDefinition>> {
        let mut sets: BTreeMap<usize, Vec<&PoolDefinition>> = BTreeMap::new();
        for one in self.define.iter().filter(|one| Family::of_net(one.cidr) == family) {
            sets.entry(one.set).or_default().push(one);
        }
        sets.into_values().collect()
    }

    /// Returns the pools of a family that the request defines, each with its ranges of all sets.
    pub(super) fn definitions(&self, family: Family) -> Vec<PoolDefinition> {
        let mut pools: Vec<PoolDefinition> = Vec::new();
        for one in self.sets(family).into_iter().flatten() {
            match pools.iter_mut().find(|other| other.cidr == one.cidr) {
                Some(same) if same.ranges.is_empty() || one.ranges.is_empty() => same.ranges.clear(),
                Some(same) => same.ranges.extend(&one.ranges),
                None => pools.push(one.clone()),
            }
        }
        pools
    }

    /// Returns the number of blocks of a family from which the request's addresses usually come: one, or one per pool
    /// on a bridged network, at most [`MAX_LIKELY_BLOCKS`].
    pub(super) fn likely_blocks(&self, family: Family) -> usize {
        let defined = self.define.iter().filter(|one| Family::of_net(one.cidr) == family).count();
        let pools = if self.bridge.is_some() { self.pools(family).len().max(defined) } else { 1 };
        pools.clamp(1, MAX_LIKELY_BLOCKS)
    }

    /// Returns the attribute names under which the node, the pod and its namespace are recorded: Calico's names on a
    /// routed network, otherwise Margay's names.
    pub(super) fn names(&self) -> AttributeNames {
        if self.bridge.is_some() { AttributeNames::Own } else { AttributeNames::Calicos }
    }

    pub(super) fn pools(&self, family: Family) -> &[String] {
        match family {
            Family::V4 => &self.v4_pools,
            Family::V6 => &self.v6_pools,
        }
    }
}

/// An assigned address or prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedAddress {
    /// The assigned address, or the first address of the assigned prefix.
    pub ip: IpAddr,
    /// The length of the assigned prefix, or `None` for an address.
    #[serde(default)]
    pub prefix_length: Option<u8>,
    /// The block of the assigned address.
    pub block: IpNet,
    /// The network of the address's pool.
    pub pool: IpNet,
    /// The gateway of the pool, for a bridged network that requests one.
    pub gateway: Option<IpAddr>,
}

impl AssignedAddress {
    /// Returns the address for the interface. In a prefix, the interface gets the second address, because the first
    /// address belongs to no host (in IPv6 it is the routers' anycast address).
    pub fn interface_ip(&self) -> IpAddr {
        let second = |length| nth(IpNet::new(self.ip, length).ok()?, 1);
        self.prefix_length.and_then(second).unwrap_or(self.ip)
    }
}

impl AssignedAddress {
    pub(super) fn of(pool: &Pool, ip: IpAddr, block: IpNet, gateway: Option<IpAddr>) -> Self {
        Self { ip, prefix_length: pool.prefix_length(), block, pool: pool.cidr(), gateway }
    }

    /// Returns the length of the assigned prefix, or the length of a single address.
    pub(super) fn length(&self) -> u8 {
        self.prefix_length.unwrap_or(Family::of(self.ip).bits())
    }
}
