//! Defines the findings of an inspection, and the findings' codes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipam_core::model::Owner;
use ipnet::IpNet;
use kv::Revision;
use serde::{Serialize, Serializer};

/// The document or address that a finding concerns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Subject {
    /// The finding concerns a block.
    Block(IpNet),
    /// The finding concerns an owner's affinity to a block.
    Affinity(Owner, IpNet),
    /// The finding concerns the handle with this id.
    Handle(String),
    /// The finding concerns the node with this name.
    Node(String),
    /// The finding concerns the pool with this name.
    Pool(String),
    /// The finding concerns the reservation with this name.
    Reservation(String),
    /// The finding concerns an address.
    Address(IpAddr),
    /// The finding concerns the CNI network with this name.
    Network(String),
    /// The finding concerns the workload endpoint with this namespace and name.
    Endpoint(String, String),
    /// The finding concerns the sticky workload with this name.
    Workload(String),
    /// The finding concerns a key of the store.
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

/// A problem in the store, or a fact worth knowing about the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The kind of finding.
    pub code: Code,
    /// The document or address that the finding concerns.
    pub subject: Subject,
    /// A description of the finding, which can quote text from the store.
    pub what: String,
    /// Whether [`mend`](crate::Operator::mend) can repair the finding.
    pub mendable: bool,
    /// The blocks that [`mend`](crate::Operator::mend) must read to repair the finding.
    pub(super) blocks: Vec<IpNet>,
    /// The secondary networks that have addresses in the block that the finding concerns.
    pub(super) networks: Vec<String>,
}

impl Finding {
    /// Creates a finding that only a person can repair.
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

    /// A description of the automatic repair if the finding is mendable, or else the advice for a person.
    pub fn mend(&self) -> &'static str {
        match self.code.repair() {
            Some(repair) if self.mendable => repair,
            _ => self.code.advice(),
        }
    }

    /// True if the finding's severity is [`Severity::Problem`].
    pub fn is_problem(&self) -> bool {
        self.code.severity() == Severity::Problem
    }
}

/// The numbers of documents (by kind) and of addresses in a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreCounts {
    /// Number of readable pools.
    pub pools: usize,
    /// Number of readable reservations.
    pub reservations: usize,
    /// Number of registered nodes.
    pub nodes: usize,
    /// Number of blocks, including unreadable blocks.
    pub blocks: usize,
    /// Number of affinities.
    pub affinities: usize,
    /// Number of handles.
    pub handles: usize,
    /// Number of workload endpoints, including unreadable endpoints.
    pub endpoints: usize,
    /// Number of held addresses, without the addresses in cooldown.
    pub held: usize,
    /// Number of addresses in cooldown.
    pub cooling: usize,
    /// Number of addresses held for another node than the block's owner. Borrowing addresses is not a problem.
    pub borrowed: usize,
    /// Number of addresses held for nodes that are no longer registered.
    pub of_gone_nodes: usize,
}

/// Calico's `ClusterInformation` document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// The cluster's unique id.
    pub guid: String,
    /// The cluster type that Calico has stored.
    pub kind: String,
    /// True if the datastore is locked, that is, Calico's field `datastoreReady` is false.
    pub locked: bool,
    /// The revision that last wrote the `ClusterInformation` document.
    pub revision: Revision,
}

/// An address that is not free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedAddress {
    /// The address that is not free.
    pub ip: IpAddr,
    /// The handle under which the address is held.
    pub handle: Option<String>,
    /// The block's sequence number when the address was last assigned or released.
    pub sequence_number: u64,
    /// The attributes of the address's holder.
    pub attributes: BTreeMap<String, String>,
    /// The attributes of the alternate holder, if the address has two holders.
    pub alternate_attributes: BTreeMap<String, String>,
    /// True if the address is in cooldown.
    pub cooling: bool,
    /// True if the owner of the address's block is another node than the holder's node.
    pub borrowed: bool,
    /// True if the address is held for a node that is no longer registered.
    pub node_gone: bool,
}

/// A stored handle under which no address is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeakedHandle {
    /// The handle's id.
    pub id: String,
    /// The revision that last wrote the handle.
    pub revision: Revision,
}

/// The result of an inspection at one revision.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Inspection {
    /// The revision that was inspected.
    pub revision: Revision,
    /// The findings, sorted by code and subject.
    pub findings: Vec<Finding>,
    /// The number of documents and addresses in the store.
    pub counts: StoreCounts,
    /// The pools' names and networks, sorted by name.
    pub pools: Vec<(String, IpNet)>,
    /// The length of the assigned prefixes for each pool of prefixes, by the pool's network.
    pub prefix_lengths: BTreeMap<IpNet, u8>,
    /// Facts about the cluster; `None` if Calico has stored no `ClusterInformation`.
    pub cluster: Option<ClusterFacts>,
    /// The addresses that are not free, in the order of their blocks. The list of addresses is empty unless the
    /// inspection was started with [`AddressReporting::Addresses`](super::AddressReporting::Addresses).
    pub allocations: Vec<AllocatedAddress>,
    /// Stored handles under which no address is held.
    pub leaked_handles: Vec<LeakedHandle>,
}

impl Inspection {
    /// Number of findings whose severity is [`Severity::Problem`].
    pub fn problems(&self) -> usize {
        self.findings.iter().filter(|finding| finding.is_problem()).count()
    }
}

/// Formats a number of addresses with the matching verb, for example `1 address is` or `2 addresses are`.
pub(super) fn addresses(count: u64) -> String {
    if count == 1 { "1 address is".to_owned() } else { format!("{count} addresses are") }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A problem in the store that should be repaired.
    Problem,
    /// A fact about the store that an operator should know, but that needs no repair.
    Information,
}

/// Defines the kinds of findings. Each kind of finding has a code that never changes, a severity, a meaning, advice for
/// a person, and a description of the automatic repair. The description is empty if only a person can repair the
/// finding.
macro_rules! codes {
    ($($kind:ident = $text:literal, $severity:ident, $meaning:literal, $advice:literal, $repair:literal;)+) => {
        /// The kind of a finding.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $meaning] $kind,)+
        }

        impl Code {
            /// All kinds of findings, sorted by code.
            pub const ALL: &[Self] = &[$(Self::$kind),+];

            /// The code as text, such as `BLK-01`. The text of a code is the same in all versions of Margay.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $text),+ }
            }

            /// The severity of findings with this code.
            pub fn severity(self) -> Severity {
                match self { $(Self::$kind => Severity::$severity),+ }
            }

            /// The meaning of this finding code, in one sentence.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$kind => $meaning),+ }
            }

            /// The advice for a person who repairs a finding with this code.
            pub fn advice(self) -> &'static str {
                match self { $(Self::$kind => $advice),+ }
            }

            /// A description of the repair by [`mend`](crate::Operator::mend); `None` if only a person can repair
            /// findings with this code.
            pub fn repair(self) -> Option<&'static str> {
                let text = match self { $(Self::$kind => $repair),+ };
                (!text.is_empty()).then_some(text)
            }
        }
    };
}

codes! {
    AffinityWithoutBlock = "AFF-01", Problem, "An affinity is to a block that is not there.", "", "deletes the affinity";
    AffinityPending = "AFF-02", Problem, "The claim of a block was begun and not finished.", "",
        "finishes the claim, or deletes the affinity if the block is not the owner's";
    AffinityPendingDeletion = "AFF-03", Problem, "The release of a block was begun and not finished.", "",
        "finishes it, or confirms the affinity if the block is in use";
    AffinityUnknown = "AFF-04", Problem, "An affinity has a state that this version does not know.", "",
        "confirms the affinity, or deletes it if the block is not the owner's";
    UnreadableAffinity = "AFF-05", Problem, "What is stored as an affinity cannot be read.", "",
        "writes the affinity anew, or deletes it if the block is not the owner's";
    AffinityOfOther = "AFF-06", Problem, "An affinity is to a block that has another owner, or none.", "",
        "deletes the affinity";
    AffinityOfOtherSize = "AFF-07", Problem, "An affinity is to a block that is not there, of another size than its pool's blocks: Calico could make it over other blocks.",
        "", "deletes the affinity";
    DanglingAllocation = "ALC-01", Problem, "An allocation points at an entry that is not there; nothing can be assigned from its block.",
        "restore the block from a backup: the store does not say which container has the address", "";
    UnusedAttribute = "ALC-02", Problem, "A block has entries that no allocation points at.", "", "drops the entries";
    AddressTwice = "ALC-03", Problem, "An address is assigned in two blocks that overlap.",
        "find out who uses it, then end the other container", "";
    NoHandle = "ALC-04", Information, "Addresses are held without a handle, so that no DEL finds them.",
        "release each that no container uses: margay ipam release --ip", "";
    HolderGone = "ALC-05", Problem, "Addresses are held for a node that is not registered any more.",
        "if the node is gone for good: check with --report, then margay ipam release --from-report", "";
    CalicosNames = "ALC-06", Problem, "Addresses of networks that are not Calico's carry Calico's names of node and pod, so that Calico's kube-controllers releases them.",
        "", "gives them Margay's names";
    NoEndpoint = "ALC-07", Problem, "An address of a Calico network is held for a container that has no endpoint.",
        "if the container is gone: margay gc on its node, or margay ipam release --ip", "";
    UnreadableBlock = "BLK-01", Problem, "What is stored as a block cannot be read; nothing is assigned from it or released.",
        "restore it from a backup", "";
    MisplacedBlock = "BLK-02", Problem, "The network inside a block is not the one in its key.",
        "restore it from a backup", "";
    BlockOutsidePools = "BLK-03", Problem, "A block is in no pool.",
        "make a pool for it again, or release its addresses", "deletes the empty block";
    BlockOfOtherSize = "BLK-04", Problem, "A block does not have the size of its pool's blocks, so that lookups do not find it.",
        "release its addresses when no container uses them", "deletes the empty block";
    OverlappingBlocks = "BLK-05", Problem, "Two blocks have addresses in common, which could be assigned twice.",
        "end the containers in one of them, then check again", "";
    OwnerWithoutAffinity = "BLK-06", Problem, "A block names an owner that has no affinity to it.", "", "writes the affinity";
    OwnerGone = "BLK-07", Problem, "A block's owner is a node that is not registered any more.",
        "if the node is gone for good, release its addresses", "releases the empty block";
    EmptyBlock = "BLK-08", Problem, "A block is empty and has no owner.", "", "deletes the block";
    OddOwner = "BLK-09", Problem, "A block's owner is neither a node nor a virtual one, so that no node has the block as its own.", "",
        "removes the owner from the block";
    SecondaryOfNode = "BLK-10", Problem, "A block of networks that are not Calico's is a node's own, so that Calico's routing drops what is sent there.",
        "start a container on each of its networks on that node, then check again", "makes it the block of the node's secondary networks";
    MixedBlock = "BLK-11", Problem, "A node's own block has addresses of Calico's networks and of others, to which Calico's routing drops what is sent.",
        "start the containers of one kind anew, then check again", "";
    UnreadableConfig = "CFG-01", Problem, "The IPAM configuration cannot be read: no ADD and no DEL succeeds.",
        "restore it from a backup, or delete the key to have the defaults", "";
    ContradictoryConfig = "CFG-02", Problem, "Settings of the IPAM configuration contradict each other.",
        "set them anew", "";
    ReleasedInFuture = "COO-01", Problem, "Addresses are in cooldown since a time that has not come yet.", "",
        "begins their cooldown anew";
    HandleMissing = "HND-01", Problem, "Addresses are held under a handle that is not there, so that no DEL finds them.", "",
        "writes the handle";
    HandleCountsMore = "HND-02", Problem, "A handle counts more addresses than a block holds for it.", "",
        "sets the count to what the block holds";
    HandleCountsLess = "HND-03", Problem, "A handle counts fewer addresses than a block holds for it.", "",
        "sets the count to what the block holds";
    HandleNamesNoBlock = "HND-04", Problem, "A handle names a block that is not there.", "", "drops it from the handle";
    UnreadableHandle = "HND-05", Problem, "What is stored as a handle cannot be read.", "",
        "writes it anew from what the blocks hold";
    EmptyHandle = "HND-06", Problem, "A handle counts no address at all.", "", "deletes the handle";
    UnknownKey = "KEY-01", Problem, "A key below /calico/ipam/v2/ is none that IPAM knows.",
        "delete it if no other program needs it", "";
    NetworksOverlap = "NET-01", Problem, "Two networks of this machine assign the same addresses from two stores.",
        "give one of them another subnet, or both the same store", "";
    RouteOverlaps = "NET-02", Information, "A route of this machine that is not the pool's own leads addresses of the pool elsewhere.",
        "give the pool another range, or see with `ip route` whether the route is meant", "";
    UnreadableNode = "NOD-01", Problem, "What is stored as a node cannot be read: no ADD succeeds there.",
        "register the node again", "";
    UnreadablePool = "POL-01", Problem, "What is stored as a pool cannot be read; it counts as absent.",
        "delete it and make it again", "";
    BrokenPool = "POL-02", Problem, "A pool has blocks of a size that cannot be.", "delete it and make it again", "";
    PoolsOverlap = "POL-03", Problem, "Two pools have addresses in common, which could be assigned twice.",
        "delete one of them", "";
    BrokenSelector = "POL-04", Problem, "A selector of a pool cannot be read, so that no request gets addresses from the pool.",
        "write the selector anew", "";
    UnmanageablePool = "POL-05", Problem, "Settings of a pool do not go together, so that Calico's tools and margay apply refuse each change of it.",
        "change them with: margay get ippool NAME -o yaml >FILE, an editor, and margay apply -f FILE",
        "takes the use Tunnel from a pool with a namespace selector";
    QueuedTwice = "QUE-01", Problem, "A block's queue has free addresses more than once.", "", "writes the queue anew";
    NotQueued = "QUE-02", Problem, "A block's queue lacks free addresses: Calico never assigns them.", "",
        "writes the queue anew";
    QueuedButHeld = "QUE-03", Problem, "A block's queue has addresses that are held: Calico assigns them again.", "",
        "writes the queue anew";
    QueuedOutside = "QUE-04", Problem, "A block's queue has numbers that are no addresses of it.", "",
        "writes the queue anew";
    UnreadableReservation = "RES-01", Problem, "What is stored as a reservation cannot be read; it reserves nothing.",
        "delete it and make it again", "";
    OddReservation = "RES-02", Problem, "An entry of a reservation is neither a network nor an address; it reserves nothing.",
        "write the entry anew", "";
    ReservedInUse = "RES-03", Information, "Addresses are held that are reserved: they were before, or were asked for by name.",
        "nothing has to be done", "";
    BridgeUnreserved = "RES-04", Problem, "A bridged network's pool has no reservation of its network and gateway addresses.",
        "start a container on the network, or reserve them: margay reservation create", "";
    BridgeHalfReserved = "RES-05", Problem, "The reservation of a bridged network lacks its network or gateway addresses.",
        "", "adds them";
    StraySequenceNumber = "SEQ-01", Problem, "A block has sequence numbers of addresses that are not assigned.", "",
        "drops the numbers";
    KeptUnrecorded = "STK-01", Problem, "A workload keeps an address that its record lacks, so that it gets another one.", "",
        "writes the record anew from what the blocks keep";
    RecordedNotKept = "STK-02", Problem, "The record of a workload has an address that the workload does not keep.", "",
        "drops it from the record";
    UnreadableRecord = "STK-03", Problem, "What is stored as the record of a workload cannot be read, so that the workload gets other addresses.",
        "", "writes the record anew from what the blocks keep";
    UnreadableEndpoint = "WEP-01", Problem, "What is stored as a workload endpoint cannot be read; it counts as absent.",
        "delete it, and start its container anew", "";
    EndpointAddress = "WEP-02", Problem, "A workload endpoint has an address that is free, or that another container holds.",
        "if its container is gone: margay delete wep; if it runs, start it anew", "";
    EndpointOfGoneNode = "WEP-03", Problem, "A workload endpoint is of a node that is not registered any more.", "",
        "deletes the endpoint";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The error for a text that is not the text of any [`Code`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no code of a finding; they look like BLK-03")]
pub struct UnknownCode(String);

impl FromStr for Code {
    type Err = UnknownCode;

    fn from_str(text: &str) -> Result<Self, UnknownCode> {
        let found = Self::ALL.iter().find(|code| code.as_str().eq_ignore_ascii_case(text));
        found.copied().ok_or_else(|| UnknownCode(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_codes_are_in_order_and_lead_back() {
        assert!(Code::ALL.windows(2).all(|pair| pair[0].as_str() < pair[1].as_str() && pair[0] < pair[1]));
        for code in Code::ALL {
            assert_eq!(code.as_str().to_lowercase().parse(), Ok(*code));
            assert!(!code.advice().is_empty() || code.repair().is_some(), "{code}");
        }
        assert!("BLK-99".parse::<Code>().is_err());
    }
}
