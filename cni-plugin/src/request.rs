//! The requests of the verbs to an allocator, and its answers.
//!
//! Everything here was checked by the protocol layer as far as that goes without a store. An allocator gets each setting
//! through its request, and reads none from the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use datastore::Location;
use ipam_core::CheckResult;
pub use ipam_core::assign::Gateway;
pub use ipam_core::attachment::Attachment;
use ipam_core::endpoints::EndpointOf;
use ipam_core::sticky::Sticky;
pub use ipam_core::vm::VmPod;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::error::Result;
use crate::kubernetes::Kubernetes;

/// The least time for a later step of a call.
pub(crate) const LEAST: Duration = Duration::from_secs(1);

/// Keeps the books of addresses: the work of the verbs once the protocol is settled.
///
/// Calls are synchronous and come one per process. An implementation opens the store at the request's location and closes
/// it before it returns: the process may end right after.
pub trait Allocator {
    /// Assigns all that is requested, or nothing: the wanted addresses, and as many others of each family as are
    /// requested.
    ///
    /// An attachment that repeats its request gets the same answer; only on a Calico network a repeated wanted address
    /// is an error, as it is for Calico. The returned addresses are committed: they stay assigned until a DEL, even if
    /// the result never reaches the runtime.
    ///
    /// # Errors
    /// The error is printed as it is. On a Calico network its texts are Calico's, with code 999.
    fn add(&self, request: &AddRequest) -> Result<Vec<Assigned>>;

    /// Releases the addresses that the attachment holds. If there are none, or not even a store, that is success.
    ///
    /// # Errors
    /// The error is printed as it is; the runtime will call again.
    fn del(&self, request: &DelRequest) -> Result<()>;

    /// Compares the addresses that the attachment expects to have with the recorded ones; changes nothing. Other
    /// addresses, or none at all, are not an error here, and neither is a store that other processes keep locked.
    ///
    /// # Errors
    /// The error is printed as it is; code 11 if the store could not be reached.
    fn check(&self, request: &CheckRequest) -> Result<Checked>;

    /// Checks whether such an ADD can be served; changes nothing. Neither a store that other processes keep locked nor
    /// the lack of a free address is an error.
    ///
    /// # Errors
    /// The reason why no ADD can be served: the store, or the configuration. It is printed with code 50.
    fn status(&self, request: &AddRequest) -> Result<()>;

    /// Releases addresses of an attachment that devices on the wire have, and puts them into quarantine, at once.
    ///
    /// # Errors
    /// The error is printed as it is.
    fn quarantine(&self, at: &StoreAt, what: &Quarantine) -> Result<()>;

    /// Releases the addresses that the node holds in the network for attachments that are not in the list. If there are
    /// none, or not even a store, that is success. An address that is too young, of unknown age or not ours stays, and
    /// is counted.
    ///
    /// # Errors
    /// The error is printed as it is; the runtime will call again.
    fn gc(&self, request: &GcRequest) -> Result<Collected>;
}

/// The location of the store, and the lock that goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAt {
    /// The store.
    pub location: Location,
    /// `ipam_lock_file`, else Calico's own: the file that all of Calico's plugins on this host lock while they work on a
    /// cluster's store. Embedded stores have a lock of their own.
    pub lock_file: PathBuf,
    /// How long a call on a cluster's store may take: `datastore_timeout`, or 10 s.
    pub patience: Duration,
    /// The part of the call's time that earlier steps have used, where the store is embedded.
    pub spent: Duration,
}

impl StoreAt {
    /// The store, with what is left of the time for a call: one clock covers all steps of the call. There is
    /// always enough to hear that nothing can be done.
    pub(crate) fn with_time_left(&self, begun: Instant) -> Self {
        let left = self.patience.saturating_sub(begun.elapsed()).max(LEAST);
        Self { patience: left.min(self.patience), spent: self.spent + begun.elapsed(), ..self.clone() }
    }
}

/// Addresses of an attachment that devices have, each with the reason for its quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// The attachment that has just got them.
    pub attachment: Attachment,
    /// The addresses.
    pub found: Vec<(IpAddr, String)>,
}

/// The request of an ADD.
#[derive(Clone, Debug)]
pub struct AddRequest {
    /// The store.
    pub store: StoreAt,
    /// The attachment that gets the addresses.
    pub attachment: Attachment,
    /// The attributes to record with each address: Calico's `node`, `timestamp`, for a pod `pod` and `namespace`, and
    /// our own `margay.io/net`, `margay.io/ifname` and, if known, `margay.io/boot`. The timestamp is that of this call,
    /// so an equal request made later differs in it.
    pub attributes: BTreeMap<String, String>,
    /// The namespace for selectors: the pod's, else `default`.
    pub namespace: String,
    /// The API in which the labels of that namespace are looked up if a pool is chosen by them; `None` if it has none.
    pub namespaces: Option<Kubernetes>,
    /// Addresses that must be assigned, each once. On a Calico network, if there are any, nothing else is requested.
    pub wanted: Vec<IpAddr>,
    /// How many IPv4 addresses to choose beside the wanted ones: 0 or 1.
    pub count_v4: u32,
    /// How many IPv6 addresses to choose beside the wanted ones: 0 or 1.
    pub count_v6: u32,
    /// `ipv4_pools` as configured: names or CIDRs, not checked; empty for any pool.
    pub pools_v4: Vec<String>,
    /// `ipv6_pools` as configured.
    pub pools_v6: Vec<String>,
    /// The most blocks of a family that this host may have for this request; `None` leaves it to the store's settings.
    pub max_blocks: Option<u32>,
    /// The kind of network.
    pub network: Network,
    /// The virtual machine whose address the pod gets, on a Calico network.
    pub vm: Option<VmPod>,
    /// The workload that keeps the addresses.
    pub sticky: Option<Sticky>,
}

/// The kind of network that the addresses are for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Network {
    /// Routed, with Calico's rules and errors.
    Calico,
    /// IP subnets on a wire: pools in which network, broadcast and gateway address are never assigned to a container.
    Bridged(Bridged),
}

/// The settings of a secondary network for its pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridged {
    /// The gateway of the IPv4 pool.
    pub gateway_v4: Gateway,
    /// The gateway of the IPv6 pool.
    pub gateway_v6: Gateway,
    /// Gateways where there are several pools of a family: each is that of the pool in which it lies, before the pool's own.
    pub gateways: Vec<IpAddr>,
    /// Pools that the configuration itself defines with the keys of host-local or whereabouts. If there is any, the
    /// request names no others, and the store and the pools are made if they are missing.
    pub own_pools: Vec<OwnPool>,
    /// How often each pool comes first, by its name or subnet; 1 for those that are not there.
    pub weights: BTreeMap<String, u32>,
}

impl Bridged {
    /// The number of the set of ranges that an address is of; the last one if it is of none.
    pub(crate) fn set_of(&self, address: IpAddr) -> usize {
        let by_range = self.own_pools.iter().find(|pool| pool.has(address));
        let pool = by_range.or_else(|| self.own_pools.iter().find(|pool| pool.subnet.contains(&address)));
        pool.map_or(usize::MAX, |pool| pool.set)
    }
}

/// A pool that a network's configuration defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPool {
    /// The name after which a new pool is called; `None` for the network's.
    pub name: Option<String>,
    /// The subnet, without host bits; at most /30 or /126.
    pub subnet: IpNet,
    /// The assignable addresses: first and last address of each range, in ascending order, apart from each other,
    /// inside the subnet. Empty for all of it.
    pub ranges: Vec<(IpAddr, IpAddr)>,
    /// The number of its set: an attachment gets one address of each set.
    pub set: usize,
    /// Its number among the subnets of its family.
    pub number: usize,
    /// True for `"subnet": "auto"`: the pool is the one of its name, and a new one gets a free network of the size of
    /// `subnet`.
    pub is_auto: bool,
    /// The gateway that its ranges name.
    pub gateway: Option<IpAddr>,
}

impl OwnPool {
    /// All of a subnet.
    pub(crate) fn of(subnet: IpNet) -> Self {
        Self { name: None, subnet, ranges: Vec::new(), set: 0, number: 0, is_auto: false, gateway: None }
    }

    /// True if the address is of the pool's ranges.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|(first, last)| *first <= address && address <= *last)
    }

    /// True for IPv4.
    pub(crate) fn is_v4(&self) -> bool {
        self.subnet.addr().is_ipv4()
    }

    /// The subnet as text.
    pub(crate) fn text(&self) -> String {
        self.subnet.to_string()
    }
}

/// The request of a DEL.
#[derive(Clone, Debug)]
pub struct DelRequest {
    /// The store.
    pub store: StoreAt,
    /// The attachment whose addresses are released.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the same container: `<namespace>.<pod>`, or the bare
    /// container id.
    pub old_handle: String,
    /// The addresses that the runtime reports for it, if it does: their blocks are read first. All that it has is
    /// released.
    pub addresses: Vec<IpAddr>,
    /// The virtual machine whose address the pod had, on a Calico network.
    pub vm: Option<VmPod>,
    /// The stored endpoint to delete along with the release.
    pub endpoint: Option<EndpointOf>,
    /// The pod's namespace, where the runtime names it.
    pub namespace: Option<String>,
}

/// The request of a CHECK.
#[derive(Clone, Debug)]
pub struct CheckRequest {
    /// The store.
    pub store: StoreAt,
    /// The attachment whose addresses are compared.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the same container.
    pub old_handle: String,
    /// The addresses that it expects to have.
    pub addresses: Vec<IpAddr>,
}

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checked {
    /// The comparison with the recorded addresses.
    Compared(CheckResult),
    /// The store was not queried, or could not answer, for this reason.
    Unknown(String),
}

/// The request of a GC.
#[derive(Clone, Debug)]
pub struct GcRequest {
    /// The store.
    pub store: StoreAt,
    /// The network's name.
    pub network: String,
    /// The node's name.
    pub node: String,
    /// The attachments that there are, as container ids and interfaces; an empty list counts, too.
    pub valid: BTreeSet<(String, String)>,
    /// The time of the call.
    pub now: OffsetDateTime,
}

/// The outcome of a GC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// The addresses that were released.
    pub released: Vec<IpAddr>,
    /// How many were assigned anew or released meanwhile.
    pub changed: usize,
    /// How many are younger than a minute: the list may be older.
    pub young: usize,
    /// How many have no readable age, or are dated ahead.
    pub undated: usize,
    /// How many of the node's addresses carry no attributes of ours.
    pub unmarked: usize,
}

/// An address that was assigned, or a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// The address; of a prefix the one for the interface.
    pub address: IpAddr,
    /// The length of the prefix; `None` for an address.
    pub prefix_length: Option<u8>,
    /// The prefix length of the block that it is in; that of a single address if a virtual machine has it already.
    pub block_prefix: u8,
    /// The prefix length of the pool that it is in.
    pub pool_prefix: u8,
    /// The pool's gateway, on a secondary network that has one.
    pub gateway: Option<IpAddr>,
}
