//! Errors of the allocator.

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

/// A result of the allocator.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the allocator. Where Calico has the same error, the text is Calico's.
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
    /// A pool selects by namespace labels, and the caller did not supply them.
    #[error("a pool is chosen by the labels of the namespace, and they are not known")]
    NamespaceWanted,
    /// The node is not registered, while others are.
    #[error("resource does not exist: Node({0}) with error: <nil>")]
    UnknownNode(String),
    /// A requested address is in use or in cooldown.
    #[error("resource already exists: {0} with error: Address already assigned in block")]
    AlreadyAssigned(IpAddr),
    /// A requested address of a bridged network is reserved.
    #[error("address {0} is reserved, so that no container of a bridged network can have it")]
    Reserved(IpAddr),
    /// A network of Calico's names a pool of prefixes, in a store that Calico also reads.
    #[error(
        "pool {0} has prefixes, and Calico's routing knows single addresses only; name the pool in a secondary network"
    )]
    PrefixesBesideCalico(String),
    /// A requested address lies in a block of another owner, and affinity is strict.
    #[error(transparent)]
    NotOwner(#[from] NotOwner),
    /// The host has reached its block limit, and neither its blocks nor others have a free address.
    #[error("cannot allocate new block due to per host block limit")]
    BlockLimit,
    /// No block can be claimed (claiming is off, or no block is available), and no address is free.
    #[error("failed to find or claim a block")]
    NoNewBlocks,
    /// Fewer addresses are free than were requested.
    #[error(
        "failed to request {family} addresses: Assigned {assigned} out of {requested} requested {family} addresses{}",
        .messages.iter().map(|message| format!("; {message}")).collect::<String>()
    )]
    Exhausted {
        /// The family that ran short.
        family: Family,
        /// How many addresses could have been assigned.
        assigned: usize,
        /// How many addresses were requested.
        requested: usize,
        /// The obstacles, one message per pool.
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
    /// A released address is held by another handle, or has another sequence number, than the request says.
    #[error(transparent)]
    ReleaseConflict(#[from] ReleaseConflict),
    /// An address that should have a holder has none.
    #[error("resource does not exist: {0} with error: IP is unassigned")]
    Unassigned(IpAddr),
    /// The address was released and is in cooldown.
    #[error("address {0} is in cooldown")]
    CoolingDown(IpAddr),
    /// The owner of an address cannot be changed: the address is not held under the handle, or its owner is not the
    /// expected one.
    #[error(transparent)]
    Owner(#[from] OwnerRefusal),
    /// The handle would exceed its limit of addresses of a family.
    #[error(
        "handle {handle} may hold {most} {family} addresses and holds {held}, so it cannot have {requested} more; release what it \
         does not need, or raise its limit"
    )]
    HandleLimit {
        /// The handle.
        handle: String,
        /// The family.
        family: Family,
        /// How many addresses of the family it may hold.
        most: usize,
        /// How many addresses of the family it holds.
        held: usize,
        /// How many more were requested.
        requested: usize,
    },
    /// A namespace, a network or a node has reached its quota.
    #[error(transparent)]
    Quota(#[from] QuotaReached),
    /// A virtual machine's pod gets no address.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// Two blocks overlap.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// Settings contradict each other.
    #[error(transparent)]
    Settings(#[from] ContradictorySettings),
    /// The resource exists already.
    #[error("{kind} {name} exists already")]
    Exists {
        /// The kind of the resource.
        kind: ErrorSubject,
        /// The name of the resource.
        name: String,
    },
    /// The resource does not exist.
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
    /// The request is invalid, whatever is stored.
    #[error("{0}")]
    Invalid(String),
    /// An import fills the store, so nothing may be assigned or released.
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
        /// How many of its addresses are in use.
        addresses: usize,
        /// The blocks that have them.
        places: Vec<BlockInUse>,
        /// The gateway, if a bridged network uses the pool.
        gateway: Option<String>,
    },
    /// A document could not be written, deleted or found.
    #[error(transparent)]
    Document(#[from] DocumentError),
}

/// A kind of resource, in errors about a missing or an existing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorSubject {
    /// A pool, by its name.
    Pool,
    /// A pool, by its network.
    PoolOfCidr,
    /// A reservation, by its name.
    Reservation,
    /// A handle, by its id.
    Handle,
    /// An address that a container holds, by the container's id.
    AddressOfContainer,
    /// A quota, by its kind and the name of its subject.
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
    /// More than one pool could serve a family, and the network names none.
    #[error(
        "a bridged network needs exactly one {family} pool, and {} could serve it: {}; name one of them in {}",
        .candidates.len(),
        .candidates.join(", "),
        if *.family == Family::V4 { "ipv4_pools" } else { "ipv6_pools" }
    )]
    SeveralPools {
        /// The family.
        family: Family,
        /// The pools, by name.
        candidates: Vec<String>,
    },
    /// Calico assigns addresses from the pool as well, so it cannot serve a network that is not Calico's.
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
    /// A requested address is in a block that also has addresses of Calico's networks.
    #[error(
        "address {ip} is in block {block} of node {node}, which has addresses of Calico's networks, and Calico's \
         routing drops what is sent to others there; want an address of another block, or end the containers \
         of one kind; see which with: margay ipam check --show-all-ips"
    )]
    CalicosBlock {
        /// The address.
        ip: IpAddr,
        /// The block of the address.
        block: IpNet,
        /// The node that owns the block.
        node: String,
    },
    /// The network wants a gateway, and the pool has prefixes.
    #[error(
        "pool {pool} has prefixes, and each is a network of its own without a gateway; take isGateway, isDefaultGateway \
         and gateway out of the network's configuration, or name a pool of addresses (ptp needs one)"
    )]
    NoGateway {
        /// The pool's name.
        pool: String,
    },
    /// A pool of one address has no room for a gateway.
    #[error("pool {pool} ({cidr}) has a single address, which leaves no room for a gateway; use a larger pool")]
    PoolTooSmall {
        /// The pool's name.
        pool: String,
        /// The network of the pool.
        cidr: IpNet,
    },
    /// The gateway lies outside the pool.
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
        /// The configured address.
        gateway: IpAddr,
        /// The pool's network.
        cidr: IpNet,
    },
    /// The configured gateway is the pool's network or broadcast address.
    #[error("gateway {gateway} is not a host address of {cidr}; name another one, or \"first\"")]
    BadGateway {
        /// The configured address.
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
        /// The configured address.
        wanted: IpAddr,
        /// The recorded gateway.
        recorded: IpAddr,
        /// The reservation that records it.
        reservation: String,
    },
    /// A container holds the gateway's address.
    #[error("gateway {gateway} is in use as the address of {handle}; release that address, or name another gateway")]
    GatewayInUse {
        /// The address.
        gateway: IpAddr,
        /// The handle that holds the address.
        handle: String,
    },
    /// The ranges of host-local's keys do not fit the existing pools.
    #[error("{0}")]
    BadRanges(String),
}

impl Error {
    /// True if an assignment failed for lack of room: no address is free where the node may take one, or a quota is
    /// used up.
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::Exhausted { .. } | Self::BlockLimit | Self::NoNewBlocks | Self::Quota(_))
    }
}

/// Blocks overlap, so that an address could be assigned twice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverlapError {
    /// A stored block contains the block or lies in it.
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
        /// The block.
        block: IpNet,
    },
}

/// A quota that is used up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the quota of {subject} is used up: {used} of {limit} addresses are in use; end containers there, or raise it with: \
     margay quota set --{} {} N",
    .subject.kind.as_str(),
    .subject.name
)]
pub struct QuotaReached {
    /// The subject.
    pub subject: QuotaSubject,
    /// The number of addresses that the subject may have.
    pub limit: u64,
    /// The number of addresses that the subject has.
    pub used: u64,
    /// True if the node has leftovers of earlier boots that an assignment by the plugin can free.
    pub over_leftovers: bool,
}

/// The reason why a virtual machine's pod gets no address. The texts are Calico's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The pod is the target of a migration, and addresses of virtual machines are not kept.
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
    /// The block.
    pub block: IpNet,
    /// The number of its addresses in use.
    pub addresses: usize,
    /// The names of the nodes that have them.
    pub nodes: Vec<String>,
}

impl fmt::Display for BlockInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.addresses, self.block)?;
        if self.nodes.is_empty() { Ok(()) } else { write!(f, " ({})", self.nodes.join(", ")) }
    }
}

/// Displays the first few blocks in use and the number of the others.
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
