//! The findings of an inspection.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipam_core::model::Owner;
use ipnet::IpNet;
use kv::Revision;
use serde::{Serialize, Serializer};

use super::code::{Code, Severity};

/// The subject of a finding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Subject {
    /// A block.
    Block(IpNet),
    /// An owner's affinity to a block.
    Affinity(Owner, IpNet),
    /// A handle, by its id.
    Handle(String),
    /// A node, by its name.
    Node(String),
    /// A pool, by its name.
    Pool(String),
    /// A reservation, by its name.
    Reservation(String),
    /// An address.
    Address(IpAddr),
    /// A network that somebody has configured.
    Network(String),
    /// A workload endpoint, by its namespace and its name.
    Endpoint(String, String),
    /// A workload that keeps its addresses, by its name.
    Workload(String),
    /// A key.
    Key(String),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(cidr) => write!(f, "block {cidr}"),
            Self::Affinity(owner, cidr) => write!(f, "affinity of {owner} to {cidr}"),
            Self::Handle(id) => write!(f, "handle {id}"),
            Self::Node(name) => write!(f, "node {name}"),
            Self::Pool(name) => write!(f, "pool {name}"),
            Self::Reservation(name) => write!(f, "reservation {name}"),
            Self::Address(ip) => write!(f, "address {ip}"),
            Self::Network(name) => write!(f, "network {name}"),
            Self::Endpoint(namespace, name) => write!(f, "endpoint {namespace}/{name}"),
            Self::Workload(name) => write!(f, "workload {name}"),
            Self::Key(key) => write!(f, "key {key}"),
        }
    }
}

impl Serialize for Subject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Something that is wrong, or worth knowing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Its kind.
    pub code: Code,
    /// The subject.
    pub subject: Subject,
    /// The finding, in a sentence. It may hold text from the store.
    pub what: String,
    /// Whether [`mend`](crate::Operator::mend) can mend it.
    pub mendable: bool,
    /// The blocks that have to be looked at to mend it.
    pub(super) blocks: Vec<IpNet>,
    /// The networks that are known not to be Calico's, of those that have addresses in the block.
    pub(super) networks: Vec<String>,
}

impl Finding {
    /// A finding that nobody can mend but a person.
    pub fn new(code: Code, subject: Subject, what: impl Into<String>) -> Self {
        Self { code, subject, what: what.into(), mendable: false, blocks: Vec::new(), networks: Vec::new() }
    }

    pub(super) fn mendable(mut self, mendable: bool) -> Self {
        self.mendable = mendable && self.code.repair().is_some();
        self
    }

    pub(super) fn with_blocks(mut self, blocks: Vec<IpNet>) -> Self {
        self.blocks = blocks;
        self
    }

    pub(super) fn with_networks(mut self, networks: Vec<String>) -> Self {
        self.networks = networks;
        self
    }

    /// The repair.
    pub fn mend(&self) -> &'static str {
        match self.code.repair() {
            Some(repair) if self.mendable => repair,
            _ => self.code.advice(),
        }
    }

    /// True if it is a problem.
    pub fn is_problem(&self) -> bool {
        self.code.severity() == Severity::Problem
    }
}

/// How much there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Pools that can be read.
    pub pools: usize,
    /// Reservations that can be read.
    pub reservations: usize,
    /// Registered nodes.
    pub nodes: usize,
    /// Blocks, also those that cannot be read.
    pub blocks: usize,
    /// Affinities.
    pub affinities: usize,
    /// Handles.
    pub handles: usize,
    /// Workload endpoints, also those that cannot be read.
    pub endpoints: usize,
    /// Addresses that somebody holds.
    pub held: usize,
    /// Addresses in cooldown.
    pub cooling: usize,
    /// Addresses that are held for another node than the one that owns the block: no problem.
    pub borrowed: usize,
    /// Addresses that are held for nodes that are not registered any more.
    pub of_gone_nodes: usize,
}

/// Calico's documents about the cluster as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Its unique id.
    pub guid: String,
    /// Of what kind it is.
    pub kind: String,
    /// True if Calico's operators have locked the datastore.
    pub locked: bool,
    /// The revision that last wrote this.
    pub revision: Revision,
}

/// An address that is not free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedAddress {
    /// The address.
    pub ip: IpAddr,
    /// The handle that it is held under.
    pub handle: Option<String>,
    /// Its sequence number.
    pub sequence_number: u64,
    /// The attributes of the holder.
    pub attributes: BTreeMap<String, String>,
    /// The attributes of the other holder, if it has two.
    pub alternate_attributes: BTreeMap<String, String>,
    /// True if it is in cooldown.
    pub cooling: bool,
    /// True if its block is another node's.
    pub borrowed: bool,
    /// True if it is held for a node that is not registered any more.
    pub node_gone: bool,
}

/// A handle under which nobody holds an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeakedHandle {
    /// Its id.
    pub id: String,
    /// The revision that last wrote it.
    pub revision: Revision,
}

/// Everything that an inspection found, as of one revision.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Inspection {
    /// The revision.
    pub revision: Revision,
    /// The findings, by code and subject.
    pub findings: Vec<Finding>,
    /// How much there is.
    pub counts: Counts,
    /// The networks of the pools, by name.
    pub pools: Vec<(String, IpNet)>,
    /// The lengths of the prefixes of those pools that have some.
    pub prefix_lengths: BTreeMap<IpNet, u8>,
    /// The cluster; `None` where Calico has not noted anything.
    pub cluster: Option<Cluster>,
    /// The addresses that are not free, block by block, if they were asked for.
    pub allocations: Vec<AllocatedAddress>,
    /// The handles that hold nothing.
    pub leaked_handles: Vec<LeakedHandle>,
}

impl Inspection {
    /// How many problems there are.
    pub fn problems(&self) -> usize {
        self.findings.iter().filter(|finding| finding.is_problem()).count()
    }
}

/// A number of addresses, with its verb.
pub(super) fn addresses(count: u64) -> String {
    if count == 1 { "1 address is".to_owned() } else { format!("{count} addresses are") }
}
