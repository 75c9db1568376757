//! Defines the request for an assignment, and the answer to such a request.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::attachment::{Attachment, AttributeNames};
use crate::model::{HostReserved, Labels, Owner, Pool, PoolUse};
use crate::net::{Family, nth};
use crate::sticky::Sticky;

/// Maximum number of recently used blocks of a family that an assignment prefetches.
const MAX_LIKELY_BLOCKS: usize = 4;

/// The requested addresses: specific addresses, and a number of additional addresses that the allocator chooses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedAddresses {
    /// The specific addresses that are requested.
    pub these: Vec<IpAddr>,
    /// The number of IPv4 addresses that the allocator chooses, in addition to the specific addresses.
    pub any_v4: usize,
    /// The number of IPv6 addresses that the allocator chooses, in addition to the specific addresses.
    pub any_v6: usize,
}

impl RequestedAddresses {
    /// Requests the given numbers of IPv4 and IPv6 addresses; the allocator chooses the addresses.
    pub fn any(v4: usize, v6: usize) -> Self {
        Self { these: Vec::new(), any_v4: v4, any_v6: v6 }
    }

    /// Requests only the specific addresses in `addresses`.
    pub fn these(addresses: impl Into<Vec<IpAddr>>) -> Self {
        Self { these: addresses.into(), ..Self::default() }
    }

    pub(super) fn add(&mut self, more: &Self) {
        self.these.extend(&more.these);
        self.any_v4 += more.any_v4;
        self.any_v6 += more.any_v6;
    }

    /// Returns how many addresses of a family are requested in total: the specific addresses in `these`, and the number
    /// of addresses to choose.
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

/// The answer to a request for a specific address that the requesting attachment already holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepeatPolicy {
    /// The request succeeds, and the answer contains the address that the attachment already holds.
    #[default]
    SameAnswer,
    /// As in Calico, a request for an address that the attachment already holds fails.
    Refused,
}

/// Whether a request contains the labels of the container's namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceLabels {
    /// The request contains the labels of the container's namespace. A namespace that does not exist counts as a
    /// namespace without labels.
    #[default]
    Known,
    /// The labels of the container's namespace have not been read yet. If a pool's namespace selector needs the labels,
    /// the assignment fails with [`Error::NamespaceWanted`](crate::Error::NamespaceWanted), and the caller must read
    /// the labels and repeat the request.
    NotYetRead,
}

/// The gateway that a bridged network requests in its pool of one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gateway {
    /// The gateway that the pool's reservation records, or no gateway if none is recorded.
    #[default]
    Recorded,
    /// The gateway that the pool's reservation records, or the pool's first host address if none is recorded.
    First,
    /// The gateway address that the network's configuration names.
    At(IpAddr),
}

/// The gateways that a bridged network requests for both families.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// The gateway that is requested in the network's IPv4 pool.
    pub v4: Gateway,
    /// The gateway that is requested in the network's IPv6 pool.
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

/// A pool that a CNI network configuration defines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolDefinition {
    /// The name of the defined pool.
    pub name: String,
    /// The pool's CIDR.
    pub cidr: IpNet,
    /// The assignable addresses of the pool, as ranges from a first to a last address (inclusive). If the list of
    /// ranges is empty, all addresses of the pool are assignable.
    pub ranges: Vec<(IpAddr, IpAddr)>,
    /// The index of the set of ranges to which the pool belongs. An attachment gets one address from each set of
    /// ranges, from the first pool in the set that has a free address.
    #[serde(default)]
    pub set: usize,
    /// If `free_of` is set, the pool is found by its name and family, regardless of its CIDR. If the pool does not
    /// exist, it is created with a private CIDR of the family and size of `cidr`, which overlaps neither with another
    /// pool nor with the CIDRs in `free_of`.
    #[serde(default)]
    pub free_of: Option<Vec<IpNet>>,
    /// The gateway that the CNI network configuration names for this pool.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
}

impl PoolDefinition {
    /// True if the address lies in one of the pool's assignable ranges.
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        let is_of_range = |(first, last): &(IpAddr, IpAddr)| *first <= ip && ip <= *last;
        self.cidr.contains(&ip) && (self.ranges.is_empty() || self.ranges.iter().any(is_of_range))
    }
}

/// A request for an assignment to an attachment. Either all requested addresses are assigned, in one commit, or none
/// is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AssignRequest {
    /// The attachment that gets the addresses, and whose handle and attributes are recorded with each address.
    pub attachment: Attachment,
    /// Additional attributes that are recorded with each address, such as `pod`, `namespace` and `timestamp`, under
    /// Calico's attribute names. For a secondary network, the assignment records the node, the pod and its namespace
    /// under Margay's names; see [`AttributeNames`].
    pub attributes: BTreeMap<String, String>,
    /// The requested addresses.
    pub wanted: RequestedAddresses,
    /// Whether a request for a specific address fails if the attachment already holds this address.
    pub repeated: RepeatPolicy,
    /// The pools from which IPv4 addresses are assigned, by name or CIDR. If no IPv4 pools are given, the pools that
    /// select the node are used.
    pub v4_pools: Vec<String>,
    /// The pools from which IPv6 addresses are assigned, by name or CIDR. If no IPv6 pools are given, the pools that
    /// select the node are used.
    pub v6_pools: Vec<String>,
    /// What the requested addresses are for, for example workloads or tunnels.
    pub usage: PoolUse,
    /// The labels of the container's namespace, which are matched against the namespace selectors of pools.
    pub namespace_labels: Labels,
    /// Whether `namespace_labels` contains the labels of the container's namespace.
    pub namespace: NamespaceLabels,
    /// A limit of blocks that the node may own, besides the limit in the settings; 0 for no additional limit.
    pub max_blocks: u32,
    /// The addresses that are reserved for the node itself in each new block.
    pub host_reserved: Option<HostReserved>,
    /// The gateways that a bridged network requests; `None` for a routed network.
    pub bridge: Option<Bridge>,
    /// The gateways in the configuration of a bridged network with several pools of a family. If `gateways` contains an
    /// address of a pool, this address is the pool's gateway, instead of the gateway in the pool's definition.
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
    /// The pools that the network's configuration defines. The assignment creates the defined pools that do not exist.
    pub define: Vec<PoolDefinition>,
    /// The workload that keeps the addresses over restarts, if any.
    #[serde(default)]
    pub sticky: Option<Sticky>,
}

impl AssignRequest {
    /// Creates a request for `wanted` addresses for an attachment on a routed network.
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

    /// Creates a request for addresses from an owner's blocks. A request by owner needs no attachment, so its
    /// `attachment` is empty. The request's `usage` is `LoadBalancer` for a virtual owner, and `Workload` for any other
    /// owner.
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

    /// Returns the pools of a family that the request defines, grouped by the set of ranges to which they belong.
    pub(super) fn sets(&self, family: Family) -> Vec<Vec<&PoolDefinition>> {
        let mut sets: BTreeMap<usize, Vec<&PoolDefinition>> = BTreeMap::new();
        for one in self.define.iter().filter(|one| Family::of_net(one.cidr) == family) {
            sets.entry(one.set).or_default().push(one);
        }
        sets.into_values().collect()
    }

    /// Returns the pools of a family that the request defines. A pool that belongs to several sets of ranges is
    /// returned once, with the ranges of all these sets.
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

    /// Returns the number of recently used blocks to prefetch for a family: one, or one per pool on a bridged network,
    /// at most [`MAX_LIKELY_BLOCKS`].
    pub(super) fn likely_blocks(&self, family: Family) -> usize {
        let defined = self.define.iter().filter(|one| Family::of_net(one.cidr) == family).count();
        let pools = if self.bridge.is_some() { self.pools(family).len().max(defined) } else { 1 };
        pools.clamp(1, MAX_LIKELY_BLOCKS)
    }

    /// Returns the attribute names under which the node, the pod and the pod's namespace are recorded. A routed network
    /// has Calico's attribute names, and a bridged network has Margay's.
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
    /// The length of the assigned prefix; `None` if a single address is assigned.
    #[serde(default)]
    pub prefix_length: Option<u8>,
    /// The block that contains the assigned address.
    pub block: IpNet,
    /// The CIDR of the pool that contains the assigned address.
    pub pool: IpNet,
    /// The gateway of the pool, if a bridged network requests a gateway.
    pub gateway: Option<IpAddr>,
}

impl AssignedAddress {
    /// Returns the address that the container's interface gets. From an assigned prefix, the interface gets the second
    /// address, because the first address must not be a host's address (in IPv6, it is the routers' anycast address).
    pub fn interface_ip(&self) -> IpAddr {
        let second = |length| nth(IpNet::new(self.ip, length).ok()?, 1);
        self.prefix_length.and_then(second).unwrap_or(self.ip)
    }
}

impl AssignedAddress {
    pub(super) fn of(pool: &Pool, ip: IpAddr, block: IpNet, gateway: Option<IpAddr>) -> Self {
        Self { ip, prefix_length: pool.prefix_length(), block, pool: pool.cidr(), gateway }
    }

    /// Returns the length of the assigned prefix; for a single address, 32 (IPv4) or 128 (IPv6).
    pub(super) fn length(&self) -> u8 {
        self.prefix_length.unwrap_or(Family::of(self.ip).bits())
    }
}
