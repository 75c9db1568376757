//! The request of an assignment, and its answer.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::attachment::{Attachment, AttributeNames};
use crate::model::{HostReserved, Labels, Owner, Pool, PoolUse};
use crate::net::{Family, nth};
use crate::sticky::Sticky;

/// The most blocks of a family that are read ahead because an address may come from them.
const MAX_LIKELY_BLOCKS: usize = 4;

/// The wanted addresses: certain ones, and any others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedAddresses {
    /// These addresses.
    pub these: Vec<IpAddr>,
    /// The number of other IPv4 addresses.
    pub any_v4: usize,
    /// The number of other IPv6 addresses.
    pub any_v6: usize,
}

impl RequestedAddresses {
    /// Any addresses, so many of each family.
    pub fn any(v4: usize, v6: usize) -> Self {
        Self { these: Vec::new(), any_v4: v4, any_v6: v6 }
    }

    /// These addresses.
    pub fn these(addresses: impl Into<Vec<IpAddr>>) -> Self {
        Self { these: addresses.into(), ..Self::default() }
    }

    /// Wants this, too.
    pub(super) fn add(&mut self, more: &Self) {
        self.these.extend(&more.these);
        self.any_v4 += more.any_v4;
        self.any_v6 += more.any_v6;
    }

    /// The number of addresses of a family, those in `these` among them.
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

/// The answer to an attachment that requests a certain address that it has already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepeatPolicy {
    /// It gets the same answer again.
    #[default]
    SameAnswer,
    /// It is refused, as Calico does.
    Refused,
}

/// Whether the labels of the container's namespace are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceLabels {
    /// They are those of the request. A namespace that there is nowhere has none.
    #[default]
    Known,
    /// The labels have not been read yet. Where a pool selects by them, that is an error,
    /// [`Error::NamespaceWanted`](crate::Error::NamespaceWanted), and the caller reads them and repeats the request.
    NotYetRead,
}

/// The gateway that a bridged network wants in the pool of one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gateway {
    /// The one on record, if there is one.
    #[default]
    Recorded,
    /// The one on record, or else the first host address.
    First,
    /// This one.
    At(IpAddr),
}

/// The gateways that a bridged network wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// Of its IPv4 pool.
    pub v4: Gateway,
    /// Of its IPv6 pool.
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

/// A pool that the network's own configuration defines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolDefinition {
    /// Its name.
    pub name: String,
    /// Its network.
    pub cidr: IpNet,
    /// The addresses that may be assigned: first and last ones, both inclusive. None means all of it.
    pub ranges: Vec<(IpAddr, IpAddr)>,
    /// The number of its set. The attachment gets one address of each set of a family, from the first pool of the set
    /// that has room.
    #[serde(default)]
    pub set: usize,
    /// If it is there, the pool of this name counts, whatever its network is. A new pool gets a free private network of
    /// the family and size of `cidr` that overlaps with no pool and with none of these.
    #[serde(default)]
    pub free_of: Option<Vec<IpNet>>,
    /// The gateway that the configuration names for this pool.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
}

impl PoolDefinition {
    /// True if the address is of the pool's ranges.
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        let is_of_range = |(first, last): &(IpAddr, IpAddr)| *first <= ip && ip <= *last;
        self.cidr.contains(&ip) && (self.ranges.is_empty() || self.ranges.iter().any(is_of_range))
    }
}

/// The request of an assignment. It is carried out as a whole, in one commit, or not at all.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AssignRequest {
    /// The attachment that gets the addresses. Its handle and attributes are recorded.
    pub attachment: Attachment,
    /// Further attributes to record: `pod`, `namespace`, `timestamp`. The names are Calico's; on a secondary network
    /// ours are recorded in their place, see [`AttributeNames`].
    pub attributes: BTreeMap<String, String>,
    /// The wanted addresses.
    pub wanted: RequestedAddresses,
    /// The answer if it has them already.
    pub repeated: RepeatPolicy,
    /// The pools to take IPv4 addresses from, by name or network; none means those that select the node.
    pub v4_pools: Vec<String>,
    /// The same for IPv6.
    pub v6_pools: Vec<String>,
    /// The use of the addresses.
    pub usage: PoolUse,
    /// The labels of the namespace, for pools with a namespace selector.
    pub namespace_labels: Labels,
    /// Whether these are known.
    pub namespace: NamespaceLabels,
    /// The most blocks that the host may have, besides the limit in the settings; 0 for no limit of the request's own.
    pub max_blocks: u32,
    /// The addresses that the host keeps for itself in each new block.
    pub host_reserved: Option<HostReserved>,
    /// For a bridged network the gateways that it wants; `None` for a routed one.
    pub bridge: Option<Bridge>,
    /// Gateways of a bridged network with several pools of a family: each is that of the pool in which it lies, before
    /// the one that the pool's definition names.
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
    /// Pools to be made first, if they are not there.
    pub define: Vec<PoolDefinition>,
    /// The workload that keeps the addresses; `None` if none does.
    #[serde(default)]
    pub sticky: Option<Sticky>,
}

impl AssignRequest {
    /// These addresses for this attachment, on a routed network, for a workload.
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

    /// The request of an owner of blocks that is no attachment; the field of the attachment is not read then. The
    /// addresses of a virtual owner are for a load balancer unless the caller sets another use.
    pub(super) fn of_owner(owner: &Owner, wanted: RequestedAddresses) -> Self {
        let nobody = String::new;
        let (network, container, interface, node) = (nobody(), nobody(), nobody(), nobody());
        let mut terms = Self::new(Attachment { network, container, interface, node, boot: None }, wanted);
        if matches!(owner, Owner::Virtual(_)) {
            terms.usage = PoolUse::LoadBalancer;
        }
        terms
    }

    /// Sets the pools of one family.
    pub(super) fn set_pools(&mut self, family: Family, pools: impl IntoIterator<Item = impl Into<String>>) {
        let pools = pools.into_iter().map(Into::into).collect();
        match family {
            Family::V4 => self.v4_pools = pools,
            Family::V6 => self.v6_pools = pools,
        }
    }

    /// The sets of pools of a family that it defines.
    pub(super) fn sets(&self, family: Family) -> Vec<Vec<&PoolDefinition>> {
        let mut sets: BTreeMap<usize, Vec<&PoolDefinition>> = BTreeMap::new();
        for one in self.define.iter().filter(|one| Family::of_net(one.cidr) == family) {
            sets.entry(one.set).or_default().push(one);
        }
        sets.into_values().collect()
    }

    /// The pools of a family that it defines, each with the ranges of all sets.
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

    /// From how many blocks of a family its addresses may come in the steady state: one, unless the network has several
    /// pools.
    pub(super) fn likely_blocks(&self, family: Family) -> usize {
        let defined = self.define.iter().filter(|one| Family::of_net(one.cidr) == family).count();
        let pools = if self.bridge.is_some() { self.pools(family).len().max(defined) } else { 1 };
        pools.clamp(1, MAX_LIKELY_BLOCKS)
    }

    /// The names under which the node, the pod and its namespace are recorded: Calico's names on a routed network only.
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

/// One address of an answer, or one prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedAddress {
    /// The address; of a prefix the first one.
    pub ip: IpAddr,
    /// The length of the prefix; `None` for an address.
    #[serde(default)]
    pub prefix_length: Option<u8>,
    /// Its block.
    pub block: IpNet,
    /// Its pool's network.
    pub pool: IpNet,
    /// The gateway of its pool, for a bridged network that wants one.
    pub gateway: Option<IpAddr>,
}

impl AssignedAddress {
    /// The address for the interface. The first address of a prefix is that of no host (in IPv6 it is the routers' anycast
    /// address), so of a prefix it is the second one.
    pub fn interface_ip(&self) -> IpAddr {
        let second = |length| nth(IpNet::new(self.ip, length).ok()?, 1);
        self.prefix_length.and_then(second).unwrap_or(self.ip)
    }
}

impl AssignedAddress {
    /// An address or a prefix of this pool.
    pub(super) fn of(pool: &Pool, ip: IpAddr, block: IpNet, gateway: Option<IpAddr>) -> Self {
        Self { ip, prefix_length: pool.prefix_length(), block, pool: pool.cidr(), gateway }
    }

    /// The length of the prefix, or that of a single address.
    pub(super) fn length(&self) -> u8 {
        self.prefix_length.unwrap_or(Family::of(self.ip).bits())
    }
}
