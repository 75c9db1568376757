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
    /// The finding concerns the member of an etcd cluster with this endpoint.
    Member(String),
    /// The finding concerns the history of a cluster's store.
    History,
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
            Self::Member(endpoint) => write!(f, "member {endpoint}"),
            Self::History => f.write_str("history"),
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
    /// The blocks that [`mend`](crate::Operator::mend) must read before it repairs the finding.
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
    /// Number of addresses held for a node in blocks that the node does not own. Borrowed addresses are not a problem.
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

/// An address that is held, in cooldown, or kept for a workload.
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
    /// True if the owner of the address's block is not the holder's node.
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

/// The result of an inspection of a store at one revision.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Inspection {
    /// The revision that was inspected.
    pub revision: Revision,
    /// The findings, sorted by code and subject.
    pub findings: Vec<Finding>,
    /// The number of documents and addresses in the store.
    pub counts: StoreCounts,
    /// The names and CIDRs of the pools, sorted by name.
    pub pools: Vec<(String, IpNet)>,
    /// The length of the assigned prefixes for each pool of prefixes, by the pool's CIDR.
    pub prefix_lengths: BTreeMap<IpNet, u8>,
    /// Facts about the cluster; `None` if Calico has stored no `ClusterInformation`.
    pub cluster: Option<ClusterFacts>,
    /// The addresses that are not free, in the order of their blocks; empty unless the inspection was started with
    /// [`AddressReporting::Addresses`](super::AddressReporting::Addresses).
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
/// a person, and a description of the automatic repair. The description of the repair is empty if only a person can
/// repair the finding.
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

            /// The code as text, such as `BLK-01`, which is the same in all versions of Margay.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $text),+ }
            }

            /// The severity of findings with this code.
            pub fn severity(self) -> Severity {
                match self { $(Self::$kind => Severity::$severity),+ }
            }

            /// The meaning of findings with this code, in one sentence.
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
    AffinityWithoutBlock = "AFF-01", Problem, "An affinity names a block that does not exist.", "",
        "deletes the affinity";
    AffinityPending = "AFF-02", Problem, "A node began to claim a block and did not finish.", "",
        "finishes the claim, or deletes the affinity if the block has another owner or none";
    AffinityPendingDeletion = "AFF-03", Problem, "A node began to release a block and did not finish.", "",
        "finishes the release, or confirms the affinity if the block is in use";
    AffinityUnknown = "AFF-04", Problem, "An affinity has a state that this version of Margay does not know.", "",
        "confirms the affinity, or deletes the affinity if the block has another owner or none";
    UnreadableAffinity = "AFF-05", Problem, "A stored affinity cannot be decoded.", "",
        "rewrites the affinity, or deletes the affinity if the block has another owner or none";
    AffinityOfOther = "AFF-06", Problem, "An affinity names a block that has another owner or no owner.", "",
        "deletes the affinity";
    AffinityOfOtherSize = "AFF-07", Problem,
        "An affinity names a block that does not exist and differs in size from its pool's blocks: Calico could create this block over other blocks.",
        "", "deletes the affinity";
    DanglingAllocation = "ALC-01", Problem,
        "An allocation in a block points at a missing attribute entry, so that no address of the block can be assigned.",
        "restore the block from a backup: the store does not say which container has the address", "";
    UnusedAttribute = "ALC-02", Problem, "A block has attribute entries that no allocation uses.", "",
        "deletes the unused entries";
    AddressTwice = "ALC-03", Problem, "An address is assigned in two blocks that overlap.",
        "find out which container uses the address, then stop the other container", "";
    NoHandle = "ALC-04", Information, "Addresses are assigned without a handle, so that no DEL releases the addresses.",
        "release each address that no container uses: margay ipam release --ip ADDRESS", "";
    HolderGone = "ALC-05", Problem, "Addresses are assigned to a node that is no longer registered.",
        "if the node is gone for good: margay ipam check --report FILE, then margay ipam release --from-report FILE",
        "";
    CalicosNames = "ALC-06", Problem,
        "Addresses of secondary networks (not Calico's) carry Calico's attributes for node and pod, so that Calico's kube-controllers releases the addresses.",
        "", "renames the attributes to Margay's names";
    NoEndpoint = "ALC-07", Problem,
        "An address of a Calico network is assigned to a container that has no workload endpoint.",
        "if the container is gone: margay gc on its node, or margay ipam release --ip ADDRESS", "";
    UnreadableBlock = "BLK-01", Problem,
        "A stored block cannot be decoded, so that its addresses are neither assigned nor released.",
        "restore the block from a backup", "";
    MisplacedBlock = "BLK-02", Problem, "The network in the content of a block differs from the network in its key.",
        "restore the block from a backup", "";
    BlockOutsidePools = "BLK-03", Problem, "A block is in no pool.",
        "create a pool for the block again, or release the addresses of the block", "deletes the empty block";
    BlockOfOtherSize = "BLK-04", Problem,
        "A block differs in size from its pool's blocks, so that lookups do not find the block.",
        "release the addresses of the block when no container uses them", "deletes the empty block";
    OverlappingBlocks = "BLK-05", Problem,
        "Two blocks have addresses in common, so that an address could be assigned twice.",
        "stop the containers that have addresses in one of the blocks, then check again", "";
    OwnerWithoutAffinity = "BLK-06", Problem, "A block has an owner that has no affinity to the block.", "",
        "writes the missing affinity";
    OwnerGone = "BLK-07", Problem, "The owner of a block is a node that is no longer registered.",
        "if the node is gone for good, release the addresses of the block", "releases the empty block";
    EmptyBlock = "BLK-08", Problem, "A block is empty and has no owner.", "", "deletes the block";
    OddOwner = "BLK-09", Problem,
        "The owner of a block is neither a node nor a virtual owner, so that no node uses the block as its own.",
        "", "removes the owner from the block";
    SecondaryOfNode = "BLK-10", Problem,
        "A block of secondary networks (not Calico's) is affine to a node, so that Calico's routing drops packets to the block.",
        "start a container on each network of the block on that node, then check again",
        "changes the owner of the block to the secondary networks of the node";
    MixedBlock = "BLK-11", Problem,
        "A node's own block has addresses of Calico's networks and of secondary networks; Calico's routing drops packets to the secondary networks.",
        "restart the block's containers on Calico's networks, or those on secondary networks, then check again", "";
    UnreadableConfig = "CFG-01", Problem,
        "The stored IPAM configuration cannot be decoded, so that every ADD and every DEL fails.",
        "restore the configuration from a backup, or delete its key to use the defaults", "";
    ContradictoryConfig = "CFG-02", Problem, "Settings of the IPAM configuration contradict each other.",
        "correct the settings with: margay ipam configure", "";
    ClusterAlarm = "CLU-01", Problem, "An etcd member has raised an alarm, so that etcd refuses changes.",
        "for NOSPACE: margay etcd compact --keep 0s, etcdctl defrag --cluster, etcdctl alarm disarm; else: margay etcd status", "";
    QuotaNearlyUsed = "CLU-02", Problem, "More than 60 % of an etcd member's quota is in use. At 100 % etcd refuses changes.",
        "margay etcd status; then margay etcd compact, or a larger --quota-backend-bytes", "";
    NobodyCompacts = "CLU-03", Problem, "No program has deleted etcd's history for a day, and more than 10 % of the quota is in use.",
        "on one or more nodes: systemctl enable --now margay-compact.timer", "";
    ReleasedInFuture = "COO-01", Problem, "Addresses are in cooldown since a time in the future.", "",
        "restarts the cooldown of the addresses";
    HandleMissing = "HND-01", Problem,
        "Addresses are assigned under a handle that does not exist, so that no DEL releases the addresses.",
        "", "writes the missing handle";
    HandleCountsMore = "HND-02", Problem,
        "A handle counts more addresses in a block than the block has under the handle.",
        "", "sets the count to the number of addresses in the block";
    HandleCountsLess = "HND-03", Problem,
        "A handle counts fewer addresses in a block than the block has under the handle.",
        "", "sets the count to the number of addresses in the block";
    HandleNamesNoBlock = "HND-04", Problem, "A handle names a block that does not exist.", "",
        "removes the block from the handle";
    UnreadableHandle = "HND-05", Problem, "A stored handle cannot be decoded.", "",
        "rewrites the handle from the content of the blocks";
    EmptyHandle = "HND-06", Problem, "A handle counts no addresses.", "", "deletes the handle";
    UnknownKey = "KEY-01", Problem, "A key below /calico/ipam/v2/ is of no kind that IPAM knows.",
        "delete the key if no other program needs it", "";
    NetworksOverlap = "NET-01", Problem, "Two networks of this machine assign the same addresses from two stores.",
        "configure another subnet for one network, or the same store for both networks", "";
    RouteOverlaps = "NET-02", Information,
        "A route of this machine, other than the pool's own route, covers addresses of a pool.",
        "change the range of the pool, or check with `ip route` whether the route is intended", "";
    UnreadableNode = "NOD-01", Problem, "A stored node cannot be decoded, so that every ADD on the node fails.",
        "register the node again", "";
    UnreadablePool = "POL-01", Problem, "A stored pool cannot be decoded and is ignored.",
        "delete the pool, and create the pool again", "";
    BrokenPool = "POL-02", Problem, "The block size of a pool is impossible.",
        "delete the pool, and create the pool again", "";
    PoolsOverlap = "POL-03", Problem, "Two pools have addresses in common, so that an address could be assigned twice.",
        "delete one of the pools", "";
    BrokenSelector = "POL-04", Problem,
        "A selector of a pool cannot be parsed, so that no address is assigned from the pool.",
        "correct the selector of the pool", "";
    UnmanageablePool = "POL-05", Problem,
        "Settings of a pool contradict each other, so that Calico's tools and margay apply refuse every change of the pool.",
        "change the settings with: margay get ippool NAME -o yaml >FILE, an editor, and margay apply -f FILE",
        "removes the use Tunnel from a pool with a namespace selector";
    QueuedTwice = "QUE-01", Problem, "A block's queue of free addresses contains addresses more than once.", "",
        "rewrites the queue of free addresses";
    NotQueued = "QUE-02", Problem,
        "A block's queue of free addresses lacks free addresses, which Calico therefore never assigns.",
        "", "rewrites the queue of free addresses";
    QueuedButHeld = "QUE-03", Problem,
        "A block's queue of free addresses contains assigned addresses, which Calico could assign again.",
        "", "rewrites the queue of free addresses";
    QueuedOutside = "QUE-04", Problem,
        "A block's queue of free addresses contains numbers that are not addresses of the block.",
        "", "rewrites the queue of free addresses";
    UnreadableReservation = "RES-01", Problem,
        "A stored reservation cannot be decoded, so that the reservation reserves no address.",
        "delete the reservation, and create the reservation again", "";
    OddReservation = "RES-02", Problem,
        "An entry of a reservation is neither a network nor an address, so that the entry reserves no address.",
        "correct the entry of the reservation", "";
    ReservedInUse = "RES-03", Information,
        "Assigned addresses are reserved: they were assigned before the reservation, or requested explicitly.",
        "do nothing: this is no problem", "";
    BridgeUnreserved = "RES-04", Problem,
        "The network and gateway addresses of a bridged network's pool are not reserved.",
        "start a container on the network, or reserve the addresses with: margay reservation create", "";
    BridgeHalfReserved = "RES-05", Problem,
        "The reservation of a bridged network lacks its network or gateway addresses.",
        "", "adds the missing addresses to the reservation";
    StraySequenceNumber = "SEQ-01", Problem, "A block has sequence numbers for addresses that are not assigned.", "",
        "deletes these sequence numbers";
    KeptUnrecorded = "STK-01", Problem,
        "The sticky address record of a workload lacks an address that a block keeps for the workload, so that the workload gets another address.",
        "", "rewrites the record from the content of the blocks";
    RecordedNotKept = "STK-02", Problem,
        "The sticky address record of a workload has an address that no block keeps for the workload.",
        "", "removes the address from the record";
    UnreadableRecord = "STK-03", Problem,
        "The stored sticky address record of a workload cannot be decoded, so that the workload gets other addresses.",
        "", "rewrites the record from the content of the blocks";
    UnreadableEndpoint = "WEP-01", Problem, "A stored workload endpoint cannot be decoded and is ignored.",
        "delete the workload endpoint, and restart its container", "";
    EndpointAddress = "WEP-02", Problem,
        "A workload endpoint has an address that is free or assigned to another container.",
        "if the container of the endpoint is gone: margay delete wep; if the container runs: restart the container", "";
    EndpointOfGoneNode = "WEP-03", Problem, "A workload endpoint belongs to a node that is no longer registered.", "",
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
