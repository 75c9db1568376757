//! Why the allocator did not do what it was asked to.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::documents::DocumentError;
use crate::model::{ContradictorySettings, Malformed, NotOwner, OwnerRefusal, ReleaseConflict};
use crate::moving::Filling;
use crate::net::Family;
use crate::pool_deletion::PlaceInUse;
use crate::pools::PoolError;
use crate::vm::VmError;

/// A result of the allocator.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the allocator. Where Calico has the same error, the text is Calico's.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store.
    Store(kv::Error),
    /// A stored document that has to be read is damaged.
    Malformed(Malformed),
    /// No pool can serve the request.
    Pool(PoolError),
    /// A pool is to be chosen by the labels of the namespace, which nobody has looked up.
    NamespaceWanted,
    /// The node is not registered, and others are.
    UnknownNode(String),
    /// A wanted address is in use, or cooling down.
    AlreadyAssigned(IpAddr),
    /// A wanted address of a bridged network is reserved.
    Reserved(IpAddr),
    /// A wanted address lies in a block that is not the host's, and affinity is strict.
    NotOwner(NotOwner),
    /// The host has as many blocks as it may have, and nothing is free in them or elsewhere.
    BlockLimit,
    /// New blocks must not be claimed, or none is to be had, and nothing is free.
    NoNewBlocks,
    /// Fewer addresses are free than were asked for.
    Exhausted {
        /// The family that ran short.
        family: Family,
        /// How many could have been assigned.
        assigned: usize,
        /// How many were asked for.
        requested: usize,
        /// What stood in the way, pool by pool.
        messages: Vec<String>,
    },
    /// A bridged network needs exactly one pool of each family.
    Bridge(BridgeError),
    /// A network whose blocks are to be claimed or given back is not in a pool.
    OutsidePools(IpNet),
    /// A network whose blocks are to be claimed or given back is smaller than a block.
    SmallerThanBlock(IpNet),
    /// An address is not held by the handle, or not with the sequence number, that a release names.
    ReleaseConflict(ReleaseConflict),
    /// Nobody has an address that somebody should have.
    Unassigned(IpAddr),
    /// An address was given back, and rests.
    CoolingDown(IpAddr),
    /// An address is not held under the handle, or not whose it should be, for its owner to change.
    Owner(OwnerRefusal),
    /// A handle would hold more addresses of a family than it may.
    HandleLimit {
        /// The handle.
        handle: String,
        /// The family.
        family: Family,
        /// How many it may hold.
        most: usize,
        /// How many it holds.
        held: usize,
        /// How many more were asked for.
        requested: usize,
    },
    /// A virtual machine's pod gets no address.
    Vm(VmError),
    /// Settings contradict each other.
    Settings(ContradictorySettings),
    /// A pool, reservation or other resource is there already.
    Exists(String),
    /// A pool, reservation or other resource is not there.
    NotFound(String),
    /// An endpoint came into being while the container was being wired.
    EndpointExists(String),
    /// An endpoint was changed while the container was being wired.
    EndpointChanged(String),
    /// A pool cannot be made like this.
    Invalid(String),
    /// The store is being filled from another one, and nothing may be given or taken back meanwhile.
    Filling(Filling),
    /// A pool still has addresses in use.
    PoolInUse {
        /// The pool's name.
        pool: String,
        /// How many of its addresses are in use.
        addresses: usize,
        /// Where they are.
        places: Vec<PlaceInUse>,
        /// The gateway, if it is the pool of a bridged network.
        gateway: Option<String>,
    },
    /// A document was not written, deleted or found.
    Document(DocumentError),
}

/// Why a bridged network cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BridgeError {
    /// More than one pool could serve a family.
    SeveralPools {
        /// The family.
        family: Family,
        /// The pools, by name.
        candidates: Vec<String>,
    },
    /// A pool from which Calico takes addresses, too, cannot serve a network that is not Calico's.
    CalicosPool {
        /// The pool's name.
        pool: String,
    },
    /// A wanted address is in a block that has addresses of Calico's networks, too.
    CalicosBlock {
        /// The address.
        ip: IpAddr,
        /// Its block.
        block: IpNet,
        /// The node that owns the block.
        node: String,
    },
    /// A pool of one address has no room for a network.
    PoolTooSmall {
        /// The pool's name.
        pool: String,
        /// Its network.
        cidr: IpNet,
    },
    /// The configured gateway lies outside the pool or is its network or broadcast address.
    BadGateway {
        /// The configured address.
        gateway: IpAddr,
        /// The pool's network.
        cidr: IpNet,
    },
    /// The network is in use with another gateway already.
    OtherGateway {
        /// The configured address.
        wanted: IpAddr,
        /// The one on record.
        recorded: IpAddr,
        /// The reservation that records it.
        reservation: String,
    },
    /// The gateway's address is held by a container.
    GatewayInUse {
        /// The address.
        gateway: IpAddr,
        /// Who holds it.
        handle: String,
    },
    /// What host-local's keys describe does not fit the pools that are there.
    BadRanges(String),
}

impl Error {
    /// True if an assignment failed for want of room: nothing is free where the node may take addresses.
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::Exhausted { .. } | Self::BlockLimit | Self::NoNewBlocks)
    }
}

impl fmt::Display for BridgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SeveralPools { family, candidates } => write!(
                f,
                "a bridged network needs exactly one {family} pool, and {} could serve it: {}; name one of them in {}",
                candidates.len(),
                candidates.join(", "),
                if *family == Family::V4 { "ipv4_pools" } else { "ipv6_pools" },
            ),
            Self::CalicosPool { pool } => write!(
                f,
                "pool {pool} is Calico's, too (assignmentMode Automatic), and Calico's routing drops what is sent to the \
                 addresses of other networks; make a pool for this network with: margay pool create NAME CIDR --manual, \
                 and name it in ipv4_pools or ipv6_pools; or keep Calico from this one with: margay get ippool {pool} \
                 -o yaml | sed s/Automatic/Manual/ | margay apply -f -"
            ),
            Self::CalicosBlock { ip, block, node } => write!(
                f,
                "address {ip} is in block {block} of node {node}, which has addresses of Calico's networks, and Calico's \
                 routing drops what is sent to others there; want an address of another block, or end the containers \
                 of one kind; see which with: margay ipam check --show-all-ips"
            ),
            Self::PoolTooSmall { pool, cidr } => write!(
                f,
                "pool {pool} ({cidr}) has a single address, which leaves no room for a gateway; use a larger pool"
            ),
            Self::BadGateway { gateway, cidr } => {
                write!(f, "gateway {gateway} is not a host address of {cidr}; name another one, or \"first\"")
            }
            Self::OtherGateway { wanted, recorded, reservation } => write!(
                f,
                "gateway {wanted} was asked for, but the network uses {recorded} (recorded in reservation {reservation}); \
                 use that one, or delete the reservation when no container is left"
            ),
            Self::GatewayInUse { gateway, handle } => write!(
                f,
                "gateway {gateway} is in use as the address of {handle}; release that address, or name another gateway"
            ),
            Self::BadRanges(what) => f.write_str(what),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => error.fmt(f),
            Self::Malformed(error) => error.fmt(f),
            Self::Pool(error) => error.fmt(f),
            Self::NamespaceWanted => {
                f.write_str("a pool is chosen by the labels of the namespace, and they are not known")
            }
            Self::UnknownNode(name) => write!(f, "resource does not exist: Node({name}) with error: <nil>"),
            Self::AlreadyAssigned(ip) => {
                write!(f, "resource already exists: {ip} with error: Address already assigned in block")
            }
            Self::Reserved(ip) => {
                write!(f, "address {ip} is reserved, so that no container of a bridged network can have it")
            }
            Self::NotOwner(error) => error.fmt(f),
            Self::BlockLimit => f.write_str("cannot allocate new block due to per host block limit"),
            Self::NoNewBlocks => f.write_str("failed to find or claim a block"),
            Self::Exhausted { family, assigned, requested, messages } => {
                write!(
                    f,
                    "failed to request {family} addresses: Assigned {assigned} out of {requested} requested {family} addresses"
                )?;
                messages.iter().try_for_each(|message| write!(f, "; {message}"))
            }
            Self::Bridge(error) => error.fmt(f),
            Self::OutsidePools(cidr) => write!(f, "The requested CIDR ({cidr}) is not within any configured pools."),
            Self::SmallerThanBlock(cidr) => write!(f, "The requested CIDR ({cidr}) is smaller than the minimum."),
            Self::ReleaseConflict(conflict) => conflict.fmt(f),
            Self::Unassigned(ip) => write!(f, "resource does not exist: {ip} with error: IP is unassigned"),
            Self::CoolingDown(ip) => write!(f, "address {ip} is in cooldown"),
            Self::Owner(refusal) => refusal.fmt(f),
            Self::HandleLimit { handle, family, most, held, requested } => write!(
                f,
                "handle {handle} may hold {most} {family} addresses and holds {held}, so it cannot have {requested} more; \
                 release what it does not need, or raise its limit"
            ),
            Self::Vm(error) => error.fmt(f),
            Self::Settings(error) => error.fmt(f),
            Self::Exists(what) => write!(f, "{what} exists already"),
            Self::NotFound(what) => write!(f, "{what} does not exist"),
            Self::EndpointExists(name) => write!(f, "resource already exists: {name} with error: <nil>"),
            Self::EndpointChanged(name) => write!(f, "update conflict: {name}"),
            Self::Invalid(what) => f.write_str(what),
            Self::Filling(filling) => filling.fmt(f),
            Self::PoolInUse { pool, addresses, places, gateway } => {
                let addresses = if *addresses == 1 { "1 address".to_owned() } else { format!("{addresses} addresses") };
                write!(f, "pool {pool} still has {addresses} in use")?;
                write_places(f, places)?;
                match gateway {
                    Some(gateway) => write!(f, "; it is the pool of a bridged network with gateway {gateway}"),
                    None => Ok(()),
                }
            }
            Self::Document(error) => error.fmt(f),
        }
    }
}

/// Where addresses are in use: the first blocks, and how many there are besides.
fn write_places(f: &mut fmt::Formatter<'_>, places: &[PlaceInUse]) -> fmt::Result {
    const SHOWN: usize = 8;
    for (at, place) in places.iter().take(SHOWN).enumerate() {
        write!(f, "{} {place}", if at == 0 { ":" } else { "," })?;
    }
    match places.len().saturating_sub(SHOWN) {
        0 => Ok(()),
        1 => f.write_str(", and in 1 more block"),
        more => write!(f, ", and in {more} more blocks"),
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl From<kv::Error> for Error {
    fn from(error: kv::Error) -> Self {
        Self::Store(error)
    }
}

impl From<Malformed> for Error {
    fn from(error: Malformed) -> Self {
        Self::Malformed(error)
    }
}

impl From<NotOwner> for Error {
    fn from(error: NotOwner) -> Self {
        Self::NotOwner(error)
    }
}

impl From<OwnerRefusal> for Error {
    fn from(error: OwnerRefusal) -> Self {
        Self::Owner(error)
    }
}

impl From<ContradictorySettings> for Error {
    fn from(error: ContradictorySettings) -> Self {
        Self::Settings(error)
    }
}

impl From<ReleaseConflict> for Error {
    fn from(error: ReleaseConflict) -> Self {
        Self::ReleaseConflict(error)
    }
}

impl From<VmError> for Error {
    fn from(error: VmError) -> Self {
        Self::Vm(error)
    }
}

impl From<DocumentError> for Error {
    fn from(error: DocumentError) -> Self {
        Self::Document(error)
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

impl From<BridgeError> for Error {
    fn from(error: BridgeError) -> Self {
        Self::Bridge(error)
    }
}
