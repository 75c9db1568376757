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

/// The result of an allocator operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of an allocator operation. If Calico has the same error, the error message equals Calico's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store returned an error.
    #[error("{0}")]
    Store(#[from] kv::Error),
    /// A stored document that the operation needs cannot be decoded.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// No pool can be used for the requested addresses.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A pool has a namespace selector, and the request does not contain the labels of the namespace.
    #[error("a pool is chosen by the labels of the namespace, and they are not known")]
    NamespaceWanted,
    /// The requesting node is not registered.
    #[error("resource does not exist: Node({0}) with error: <nil>")]
    UnknownNode(String),
    /// A specifically requested address is in use or in cooldown.
    #[error("resource already exists: {0} with error: Address already assigned in block")]
    AlreadyAssigned(IpAddr),
    /// A specifically requested address of a bridged network is reserved.
    #[error("address {0} is reserved, so that no container of a bridged network can have it")]
    Reserved(IpAddr),
    /// A network of Calico was to get addresses from a pool of prefixes, in a store that Calico also uses.
    #[error(
        "pool {0} has prefixes, and Calico's routing knows single addresses only; name the pool in a secondary network"
    )]
    PrefixesBesideCalico(String),
    /// A specifically requested address lies in a block of another owner, and the settings require strict affinity.
    #[error(transparent)]
    NotOwner(#[from] NotOwner),
    /// The host has reached its block limit, has no free address in its own blocks, and cannot borrow an address.
    #[error("cannot allocate new block due to per host block limit")]
    BlockLimit,
    /// No address is free in a stored block, and no block can be claimed because the settings forbid new blocks or no
    /// block is available.
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
        /// Number of addresses of the family that could have been assigned when the request failed.
        assigned: usize,
        /// Number of addresses of the family that were requested.
        requested: usize,
        /// Messages that explain why no more addresses could be assigned.
        messages: Vec<String>,
    },
    /// An address or a gateway of a bridged network cannot be assigned.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// A CIDR whose blocks were to be claimed or released lies in no pool.
    #[error("The requested CIDR ({0}) is not within any configured pools.")]
    OutsidePools(IpNet),
    /// A CIDR whose blocks were to be claimed or released is smaller than a block of its pool.
    #[error("The requested CIDR ({0}) is smaller than the minimum.")]
    SmallerThanBlock(IpNet),
    /// An address was not released, because its handle or sequence number differs from that of the release request.
    #[error(transparent)]
    ReleaseConflict(#[from] ReleaseConflict),
    /// The operation needs an assigned address, but the address in this error is not assigned.
    #[error("resource does not exist: {0} with error: IP is unassigned")]
    Unassigned(IpAddr),
    /// The operation needs an assigned address, but the address in this error was released and is in cooldown.
    #[error("address {0} is in cooldown")]
    CoolingDown(IpAddr),
    /// The owner of an address was not changed, because the address is not held under the given handle or has another
    /// owner than expected.
    #[error(transparent)]
    Owner(#[from] OwnerRefusal),
    /// The request would exceed the maximum number of addresses that the handle may hold in a family.
    #[error(
        "handle {handle} may hold {most} {family} addresses and holds {held}, so it cannot have {requested} more; release what it \
         does not need, or raise its limit"
    )]
    HandleLimit {
        /// The id of the handle that would exceed its maximum.
        handle: String,
        /// The family of the requested addresses.
        family: Family,
        /// Maximum number of addresses of the family that the handle may hold.
        most: usize,
        /// Number of addresses of the family that the handle already holds.
        held: usize,
        /// Number of addresses of the family that the failed request asked for.
        requested: usize,
    },
    /// The assignment would exceed the quota of a namespace, a network or a node.
    #[error(transparent)]
    Quota(#[from] QuotaReached),
    /// No address of a virtual machine can be assigned to its pod.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// An address was not assigned, because its block overlaps with another block.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// Two IPAM settings contradict each other.
    #[error(transparent)]
    Settings(#[from] ContradictorySettings),
    /// A resource that was to be created exists already.
    #[error("{kind} {name} exists already")]
    Exists {
        /// The kind of the resource that exists already.
        kind: ErrorSubject,
        /// The name by which the error message identifies the resource.
        name: String,
    },
    /// A resource that the operation needs does not exist.
    #[error("{kind} {name} does not exist")]
    NotFound {
        /// The kind of the resource that does not exist.
        kind: ErrorSubject,
        /// The name by which the error message identifies the resource.
        name: String,
    },
    /// Another writer created the workload endpoint while the container's interface was being set up.
    #[error("resource already exists: {0} with error: <nil>")]
    EndpointExists(String),
    /// Another writer changed the workload endpoint while the container's interface was being set up.
    #[error("update conflict: {0}")]
    EndpointChanged(String),
    /// The definition of a pool is invalid.
    #[error(transparent)]
    InvalidPool(#[from] InvalidPool),
    /// A CIDR cannot be a block, for example because of its size.
    #[error(transparent)]
    UnusableBlock(#[from] UnusableBlock),
    /// The request is invalid; the message explains why.
    #[error("{0}")]
    Invalid(String),
    /// An unfinished import or migration has locked the store, so no address may be assigned or released.
    #[error("{0}")]
    ImportLocked(ImportLocked),
    /// A pool was not deleted, because some of its addresses are in use.
    #[error(
        "pool {pool} still has {} in use{}{}",
        if *.addresses == 1 { "1 address".to_owned() } else { format!("{addresses} addresses") },
        PlaceList(.places),
        .gateway.iter().map(|gateway| format!("; it is the pool of a bridged network with gateway {gateway}")).collect::<String>()
    )]
    PoolInUse {
        /// The pool's name.
        pool: String,
        /// Number of addresses of the pool that are in use.
        addresses: usize,
        /// The blocks of the pool in which addresses are in use.
        places: Vec<BlockInUse>,
        /// The address of the pool's gateway, if the pool belongs to a bridged network.
        gateway: Option<String>,
    },
    /// A document that operators edit, such as a pool or a reservation, could not be written, deleted or found.
    #[error(transparent)]
    Document(#[from] DocumentError),
}

/// The kind of the resource in [`Error::Exists`] and [`Error::NotFound`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorSubject {
    /// A pool that is identified by its name.
    Pool,
    /// A pool that is identified by its CIDR.
    PoolOfCidr,
    /// A reservation that is identified by its name.
    Reservation,
    /// A handle that is identified by its id.
    Handle,
    /// An address that is identified by the id of the container that holds the address.
    AddressOfContainer,
    /// A quota that is identified by its kind and the name of its subject.
    Quota,
}

impl ErrorSubject {
    /// Returns [`Error::NotFound`] for a resource of this kind and name.
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

/// The reason why an address or a gateway of a bridged network cannot be assigned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// More than one pool of a family could be used, and the CNI network's configuration names none of these pools.
    #[error(
        "a bridged network needs exactly one {family} pool, and {} could serve it: {}; name one of them in {}",
        .candidates.len(),
        .candidates.join(", "),
        if *.family == Family::V4 { "ipv4_pools" } else { "ipv6_pools" }
    )]
    SeveralPools {
        /// The address family of the candidate pools.
        family: Family,
        /// The names of the pools between which the CNI network's configuration must choose.
        candidates: Vec<String>,
    },
    /// The pool cannot be used for a secondary network, because Calico also assigns addresses from the pool.
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
    /// A specifically requested address lies in a block that also has addresses of Calico's networks.
    #[error(
        "address {ip} is in block {block} of node {node}, which has addresses of Calico's networks, and Calico's \
         routing drops what is sent to others there; want an address of another block, or end the containers \
         of one kind; see which with: margay ipam check --show-all-ips"
    )]
    CalicosBlock {
        /// The requested address.
        ip: IpAddr,
        /// The block that contains the specifically requested address.
        block: IpNet,
        /// The node that owns the block.
        node: String,
    },
    /// The CNI network requests a gateway, but its pool is a pool of prefixes, which have no gateways.
    #[error(
        "pool {pool} has prefixes, and each is a network of its own without a gateway; take isGateway, isDefaultGateway \
         and gateway out of the network's configuration, or name a pool of addresses (ptp needs one)"
    )]
    NoGateway {
        /// The pool's name.
        pool: String,
    },
    /// The pool has a single address, and so no address for a gateway.
    #[error("pool {pool} ({cidr}) has a single address, which leaves no room for a gateway; use a larger pool")]
    PoolTooSmall {
        /// The pool's name.
        pool: String,
        /// The pool's CIDR.
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
        /// The gateway address in the network's configuration.
        gateway: IpAddr,
        /// The pool's CIDR.
        cidr: IpNet,
    },
    /// The configured gateway is not a host address of the pool, but for example the pool's network address or
    /// broadcast address.
    #[error("gateway {gateway} is not a host address of {cidr}; name another one, or \"first\"")]
    BadGateway {
        /// The gateway address in the network's configuration.
        gateway: IpAddr,
        /// The pool's CIDR.
        cidr: IpNet,
    },
    /// The configured gateway differs from the gateway that the CNI network already uses.
    #[error(
        "gateway {wanted} was asked for, but the network uses {recorded} (recorded in reservation {reservation}); \
         use that one, or delete the reservation when no container is left"
    )]
    OtherGateway {
        /// The gateway address in the network's configuration.
        wanted: IpAddr,
        /// The gateway that the CNI network already uses.
        recorded: IpAddr,
        /// The name of the reservation that records the CNI network's gateway.
        reservation: String,
    },
    /// The address of the gateway is assigned to a container.
    #[error("gateway {gateway} is in use as the address of {handle}; release that address, or name another gateway")]
    GatewayInUse {
        /// The gateway address in the network's configuration.
        gateway: IpAddr,
        /// The handle that holds the gateway's address.
        handle: String,
    },
    /// The pools that the CNI network's configuration defines by ranges conflict with existing pools, as the message
    /// explains.
    #[error("{0}")]
    BadRanges(String),
}

impl Error {
    /// True if an assignment failed because the node can get no free address, or because a quota is used up.
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::Exhausted { .. } | Self::BlockLimit | Self::NoNewBlocks | Self::Quota(_))
    }
}

/// A block cannot be used or created, because an address that two overlapping blocks contain could be assigned twice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverlapError {
    /// Another stored block overlaps with the block of the requested address.
    #[error(
        "block {other}, which is stored, has addresses of block {block}, so nothing is assigned from block {block}; see \
         what is in use with: margay ipam check --show-all-ips, end the containers there, then: margay ipam check --repair \
         --apply"
    )]
    Block {
        /// The block that contains the specifically requested address.
        block: IpNet,
        /// The stored block that overlaps with `block`.
        other: IpNet,
    },
    /// A block was not created, because one commit cannot guard the keys of all stored blocks that might overlap with
    /// the new block.
    #[error(
        "block {block} cannot be made: more than 4,096 other blocks are stored near it; delete the empty ones with: \
         margay ipam check --repair --apply, or make the pool anew with blocks of /122 or smaller, which have no such limit"
    )]
    TooManyAround {
        /// The block that cannot be created.
        block: IpNet,
    },
}

/// The error for an assignment that would exceed a quota.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the quota of {subject} is used up: {used} of {limit} addresses are in use; end containers there, or raise it with: \
     margay quota set --{} {} N",
    .subject.kind.as_str(),
    .subject.name
)]
pub struct QuotaReached {
    /// The namespace, CNI network or node to which the quota applies.
    pub subject: QuotaSubject,
    /// Maximum number of addresses that the quota's subject may hold.
    pub limit: u64,
    /// Number of addresses that the quota's subject already holds.
    pub used: u64,
    /// True if the node holds leftover addresses of earlier boots, which a repeated assignment may be able to free.
    pub over_leftovers: bool,
}

/// The reason why no address of a virtual machine can be assigned to its pod. The messages of [`VmError`] equal
/// Calico's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The pod is the target of a migration, but the setting by which virtual machines keep their addresses is off.
    #[error("live migration target pod is not allowed when KubeVirtVMAddressPersistence is disabled")]
    TargetWhileOff,
    /// The pod is the target of a migration, and the virtual machine with this handle has no address.
    #[error("migration target pod but no IP allocated to VM handle {0}")]
    NothingToTake(String),
    /// An address of the virtual machine no longer lies in any pool.
    #[error("failed to set owner attributes for IP {0}: the provided IP address {0} is not in a configured pool")]
    OutsidePools(IpAddr),
}

/// A block with addresses in use, of a pool that was to be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockInUse {
    /// The block's CIDR.
    pub block: IpNet,
    /// Number of the block's addresses that are in use.
    pub addresses: usize,
    /// The names of the nodes that hold addresses of the block.
    pub nodes: Vec<String>,
}

impl fmt::Display for BlockInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.addresses, self.block)?;
        if self.nodes.is_empty() { Ok(()) } else { write!(f, " ({})", self.nodes.join(", ")) }
    }
}

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
