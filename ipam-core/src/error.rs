//! Defines the errors of the allocator.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::import_lock::ImportLocked;
use crate::model::spec::DocumentError;
use crate::model::{
    ContradictorySettings, InvalidPool, Malformed, NotOwner, OwnerRefusal, QuotaSubject, ReleaseConflict, UnusableBlock,
};
use crate::net::Family;
use crate::pools::PoolError;

/// The result of an operation of the allocator.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the allocator. If Calico has the same error, the error message is Calico's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the store.
    #[error("{0}")]
    Store(#[from] kv::Error),
    /// A stored document that the verb needs is damaged.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// No pool can serve the request.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A pool selects by namespace labels, and the caller did not supply these labels.
    #[error("a pool is chosen by the labels of the namespace, and they are not known")]
    NamespaceWanted,
    /// The node is not registered, but other nodes are.
    #[error("resource does not exist: Node({0}) with error: <nil>")]
    UnknownNode(String),
    /// A requested address is in use or in cooldown.
    #[error("resource already exists: {0} with error: Address already assigned in block")]
    AlreadyAssigned(IpAddr),
    /// A requested address of a bridged network is reserved.
    #[error("address {0} is reserved, so that no container of a bridged network can have it")]
    Reserved(IpAddr),
    /// A network of Calico's requests a pool of prefixes, and Calico also reads the store.
    #[error(
        "pool {0} has prefixes, and Calico's routing knows single addresses only; name the pool in a secondary network"
    )]
    PrefixesBesideCalico(String),
    /// A requested address lies in a block of another owner, and affinity is strict.
    #[error(transparent)]
    NotOwner(#[from] NotOwner),
    /// The host has reached its block limit, and there is no free address in its own blocks or in other owners' blocks.
    #[error("cannot allocate new block due to per host block limit")]
    BlockLimit,
    /// No block can be claimed (claiming is off, or no block is available), and no stored block has a free address.
    #[error("failed to find or claim a block")]
    NoNewBlocks,
    /// Fewer addresses are free than were requested.
    #[error(
        "failed to request {family} addresses: Assigned {assigned} out of {requested} requested {family} addresses{}",
        .messages.iter().map(|message| format!("; {message}")).collect::<String>()
    )]
    Exhausted {
        /// The address family in which too few addresses are free.
        family: Family,
        /// How many addresses of the family could have been assigned.
        assigned: usize,
        /// How many addresses of the family were requested.
        requested: usize,
        /// The obstacles to the assignment, one message per pool.
        messages: Vec<String>,
    },
    /// A bridged network cannot be served.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// A network whose blocks a caller claims or releases is in no pool.
    #[error("The requested CIDR ({0}) is not within any configured pools.")]
    OutsidePools(IpNet),
    /// A network whose blocks a caller claims or releases is smaller than a block.
    #[error("The requested CIDR ({0}) is smaller than the minimum.")]
    SmallerThanBlock(IpNet),
    /// A released address is held by another handle than the request names, or has another sequence number.
    #[error(transparent)]
    ReleaseConflict(#[from] ReleaseConflict),
    /// An address that should have a holder has none.
    #[error("resource does not exist: {0} with error: IP is unassigned")]
    Unassigned(IpAddr),
    /// The requested address was released and is in cooldown.
    #[error("address {0} is in cooldown")]
    CoolingDown(IpAddr),
    /// The owner of an address cannot be changed: the address is not held under the handle, or its owner is not the
    /// expected one.
    #[error(transparent)]
    Owner(#[from] OwnerRefusal),
    /// The request would exceed the handle's limit of addresses of a family.
    #[error(
        "handle {handle} may hold {most} {family} addresses and holds {held}, so it cannot have {requested} more; release what it \
         does not need, or raise its limit"
    )]
    HandleLimit {
        /// The id of the handle.
        handle: String,
        /// The family of the requested addresses.
        family: Family,
        /// The maximum number of addresses of the family that the handle may hold.
        most: usize,
        /// The number of addresses of the family that the handle holds.
        held: usize,
        /// The number of further addresses that were requested.
        requested: usize,
    },
    /// A namespace, a network or a node has reached its quota.
    #[error(transparent)]
    Quota(#[from] QuotaReached),
    /// A pod of a virtual machine gets no address.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// Two blocks overlap, so no address is assigned.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// The settings contradict each other.
    #[error(transparent)]
    Settings(#[from] ContradictorySettings),
    /// The resource to create exists already.
    #[error("{kind} {name} exists already")]
    Exists {
        /// The kind of the resource that exists already or is missing.
        kind: ErrorSubject,
        /// The name of the resource.
        name: String,
    },
    /// The requested resource does not exist.
    #[error("{kind} {name} does not exist")]
    NotFound {
        /// The kind of the resource.
        kind: ErrorSubject,
        /// The name of the resource.
        name: String,
    },
    /// The endpoint was created by another writer while the container's interface was being set up.
    #[error("resource already exists: {0} with error: <nil>")]
    EndpointExists(String),
    /// The endpoint was changed by another writer while the container's interface was being set up.
    #[error("update conflict: {0}")]
    EndpointChanged(String),
    /// The definition of a pool is invalid.
    #[error(transparent)]
    InvalidPool(#[from] InvalidPool),
    /// A network cannot be a block.
    #[error(transparent)]
    UnusableBlock(#[from] UnusableBlock),
    /// The request is invalid, independent of the content of the store.
    #[error("{0}")]
    Invalid(String),
    /// An import or a migration fills the store, so no address may be assigned or released.
    #[error("{0}")]
    ImportLocked(ImportLocked),
    /// A pool still has addresses in use.
    #[error(
        "pool {pool} still has {} in use{}{}",
        if *.addresses == 1 { "1 address".to_owned() } else { format!("{addresses} addresses") },
        PlaceList(.places),
        .gateway.iter().map(|gateway| format!("; it is the pool of a bridged network with gateway {gateway}")).collect::<String>()
    )]
    PoolInUse {
        /// The pool's name.
        pool: String,
        /// The number of addresses of the pool in use.
        addresses: usize,
        /// The blocks with addresses in use.
        places: Vec<BlockInUse>,
        /// The address of the gateway, if a bridged network uses the pool.
        gateway: Option<String>,
    },
    /// A document could not be written, deleted or found.
    #[error(transparent)]
    Document(#[from] DocumentError),
}

/// A kind of resource, for errors about missing or existing resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorSubject {
    /// A pool that is identified by its name.
    Pool,
    /// A pool that is identified by its network.
    PoolOfCidr,
    /// A reservation that is identified by its name.
    Reservation,
    /// A handle that is identified by its id.
    Handle,
    /// An address that a container holds, identified by the container's id.
    AddressOfContainer,
    /// A quota that is identified by its kind and the name of its subject.
    Quota,
}

impl ErrorSubject {
    /// Returns the error for a missing resource of this kind.
    pub fn not_found(self, name: impl fmt::Display) -> Error {
        Error::NotFound { kind: self, name: name.to_string() }
    }
}

impl fmt::Display for ErrorSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pool => "pool",
            Self::PoolOfCidr => "a pool of exactly",
            Self::Reservation => "reservation",
            Self::Handle => "handle",
            Self::AddressOfContainer => "an address of container",
            Self::Quota => "quota of",
        })
    }
}

/// The reason why a bridged network cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// More than one pool could serve a family, and the network's configuration names no pool.
    #[error(
        "a bridged network needs exactly one {family} pool, and {} could serve it: {}; name one of them in {}",
        .candidates.len(),
        .candidates.join(", "),
        if *.family == Family::V4 { "ipv4_pools" } else { "ipv6_pools" }
    )]
    SeveralPools {
        /// The family that several pools could serve.
        family: Family,
        /// The names of the pools that could serve the family.
        candidates: Vec<String>,
    },
    /// Calico also assigns addresses from the pool, so the pool cannot serve a network that is not Calico's.
    #[error(
        "pool {pool} is Calico's, too (assignmentMode Automatic), and Calico's routing drops what is sent to the \
         addresses of other networks; make a pool for this network with: margay pool create NAME CIDR --manual, \
         and name it in ipv4_pools or ipv6_pools; or keep Calico from this one with: margay get ippool {pool} \
         -o yaml | sed s/Automatic/Manual/ | margay apply -f -"
    )]
    CalicosPool {
        /// The pool's name.
        pool: String,
    },
    /// A requested address is in a block that also contains addresses of Calico's networks.
    #[error(
        "address {ip} is in block {block} of node {node}, which has addresses of Calico's networks, and Calico's \
         routing drops what is sent to others there; want an address of another block, or end the containers \
         of one kind; see which with: margay ipam check --show-all-ips"
    )]
    CalicosBlock {
        /// The requested address.
        ip: IpAddr,
        /// The block that contains the requested address.
        block: IpNet,
        /// The node that owns the block.
        node: String,
    },
    /// The network requests a gateway, but the pool has prefixes instead of addresses.
    #[error(
        "pool {pool} has prefixes, and each is a network of its own without a gateway; take isGateway, isDefaultGateway \
         and gateway out of the network's configuration, or name a pool of addresses (ptp needs one)"
    )]
    NoGateway {
        /// The pool's name.
        pool: String,
    },
    /// The pool has too few addresses for a gateway.
    #[error("pool {pool} ({cidr}) has a single address, which leaves no room for a gateway; use a larger pool")]
    PoolTooSmall {
        /// The pool's name.
        pool: String,
        /// The network of the pool.
        cidr: IpNet,
    },
    /// The configured gateway lies outside the pool.
    #[error(
        "gateway {gateway} is outside of {cidr}; {}",
        if .gateway.is_ipv4() && .cidr.addr().is_ipv4() {
            format!(
                "name one inside, or leave it out and name it in the network's routes: \
                 {{\"dst\": \"0.0.0.0/0\", \"gw\": \"{gateway}\"}}"
            )
        } else {
            "leave it out, and name it as gateway in the configuration of an IPv6 network".to_owned()
        }
    )]
    GatewayOutside {
        /// The configured address of the gateway.
        gateway: IpAddr,
        /// The pool's network.
        cidr: IpNet,
    },
    /// The configured gateway is the pool's network or broadcast address.
    #[error("gateway {gateway} is not a host address of {cidr}; name another one, or \"first\"")]
    BadGateway {
        /// The configured address of the gateway.
        gateway: IpAddr,
        /// The pool's network.
        cidr: IpNet,
    },
    /// The network already uses another gateway.
    #[error(
        "gateway {wanted} was asked for, but the network uses {recorded} (recorded in reservation {reservation}); \
         use that one, or delete the reservation when no container is left"
    )]
    OtherGateway {
        /// The configured address of the gateway.
        wanted: IpAddr,
        /// The gateway that the network already uses.
        recorded: IpAddr,
        /// The name of the reservation that records the network's gateway.
        reservation: String,
    },
    /// A container holds the gateway's address.
    #[error("gateway {gateway} is in use as the address of {handle}; release that address, or name another gateway")]
    GatewayInUse {
        /// The address of the gateway that a container holds.
        gateway: IpAddr,
        /// The handle that holds the gateway's address.
        handle: String,
    },
    /// The ranges of host-local's keys do not fit the existing pools.
    #[error("{0}")]
    BadRanges(String),
}

impl Error {
    /// True if an assignment failed because no address that the node may use is free, or because a quota is used up.
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::Exhausted { .. } | Self::BlockLimit | Self::NoNewBlocks | Self::Quota(_))
    }
}

/// Blocks overlap, so that an address could be assigned twice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverlapError {
    /// A stored block overlaps with the block of the requested address.
    #[error(
        "block {other}, which is stored, has addresses of block {block}, so nothing is assigned from block {block}; see \
         what is in use with: margay ipam check --show-all-ips, end the containers there, then: margay ipam check --repair \
         --apply"
    )]
    Block {
        /// The block from which an address was requested.
        block: IpNet,
        /// The stored block that overlaps with it.
        other: IpNet,
    },
    /// A commit cannot guard against every block that could overlap, because too many are stored.
    #[error(
        "block {block} cannot be made: more than 4,096 other blocks are stored around it; delete the empty ones with: \
         margay ipam check --repair --apply, or make the pool anew with blocks of /122 or smaller, which have no such limit"
    )]
    TooManyAround {
        /// The block that cannot be created.
        block: IpNet,
    },
}

/// The error of an assignment that would exceed a quota.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the quota of {subject} is used up: {used} of {limit} addresses are in use; end containers there, or raise it with: \
     margay quota set --{} {} N",
    .subject.kind.as_str(),
    .subject.name
)]
pub struct QuotaReached {
    /// The namespace, network or node to which the quota applies.
    pub subject: QuotaSubject,
    /// The maximum number of addresses that the subject may hold.
    pub limit: u64,
    /// The number of addresses that the subject holds.
    pub used: u64,
    /// True if the node holds leftover addresses of earlier boots that an assignment by the plugin can free.
    pub over_leftovers: bool,
}

/// The reason why a virtual machine's pod gets no address. The error messages for virtual machines are Calico's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The pod is the target of a migration, but keeping addresses of virtual machines is turned off.
    #[error("live migration target pod is not allowed when KubeVirtVMAddressPersistence is disabled")]
    TargetWhileOff,
    /// The pod is the target of a migration, and the virtual machine with this handle has no address.
    #[error("migration target pod but no IP allocated to VM handle {0}")]
    NothingToTake(String),
    /// The virtual machine's address is no longer in any pool.
    #[error("failed to set owner attributes for IP {0}: the provided IP address {0} is not in a configured pool")]
    OutsidePools(IpAddr),
}

/// A block in which addresses of a pool are in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockInUse {
    /// The network of the block.
    pub block: IpNet,
    /// The number of addresses in use in the block.
    pub addresses: usize,
    /// The names of the nodes that hold the block's addresses.
    pub nodes: Vec<String>,
}

impl fmt::Display for BlockInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.addresses, self.block)?;
        if self.nodes.is_empty() { Ok(()) } else { write!(f, " ({})", self.nodes.join(", ")) }
    }
}

/// Displays the first few blocks in use and the number of further blocks.
struct PlaceList<'a>(&'a [BlockInUse]);

impl fmt::Display for PlaceList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_SHOWN_PLACES: usize = 8;
        for (at, place) in self.0.iter().take(MAX_SHOWN_PLACES).enumerate() {
            write!(f, "{} {place}", if at == 0 { ":" } else { "," })?;
        }
        match self.0.len().saturating_sub(MAX_SHOWN_PLACES) {
            0 => Ok(()),
            1 => f.write_str(", and in 1 more block"),
            more => write!(f, ", and in {more} more blocks"),
        }
    }
}
