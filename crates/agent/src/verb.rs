//! The verbs: their requests and answers, as plugins make them and the daemon's socket carries them, and the work of each on an
//! open store.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use datastore::Location;
use ipam_core::assign::{AssignRequest, AssignedAddress};
use ipam_core::attachment::Attachment;
use ipam_core::endpoints::EndpointToDelete;
use ipam_core::vm::{VmAnswer, VmPod};
use ipam_core::{CheckResult, Ipam, gc};
use kv::{Deadline, Purpose};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::error::{CniError, NetworkRules, VerbFailure, advice, explain};
use crate::rights::WriteRights;

/// A verb for the daemon, and the time for which its answer is of use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VerbRequest {
    /// After that time no work is begun for it.
    pub within: Duration,
    /// The file that Calico's plugins on this host lock while they work on a cluster.
    pub lock_file: PathBuf,
    /// The verb.
    pub verb: Verb,
}

/// A verb, with its request. The protocol layer has checked it as far as that goes without a store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Verb {
    /// Assigns all that is requested, or nothing.
    ///
    /// An attachment that repeats its request gets the same answer; only on a Calico network a repeated wanted address
    /// is an error, as it is for Calico. The returned addresses are committed: they stay assigned until a DEL, even if
    /// the result never reaches the runtime.
    Add(Box<Add>),
    /// Releases the addresses that the attachment holds. If there are none, or not even a store, that is success.
    Del(Del),
    /// Compares the addresses that the attachment expects to have with the recorded ones; changes nothing. Other
    /// addresses, or none at all, are not an error here, and neither is a store that other processes keep locked.
    Check(Check),
    /// Checks whether such an ADD can be served; changes nothing. Neither a store that other processes keep locked nor
    /// the lack of a free address is an error.
    Status(Box<Add>),
    /// Releases the addresses that the node holds in the network for attachments that are not in the list. If there are
    /// none, or not even a store, that is success. An address that is too young, of unknown age or not ours stays, and
    /// is counted.
    Gc(Gc),
    /// Releases addresses of an attachment that devices on the wire have, and puts them into quarantine, at once: a step of
    /// an ADD with a probe.
    Quarantine(Quarantine),
}

/// The request of an ADD.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Add {
    /// The assignment.
    pub request: AssignRequest,
    /// The virtual machine whose address the pod gets, on a Calico network. Only the plugin itself serves its pods.
    #[serde(skip)]
    pub vm: Option<VmPod>,
}

/// The request of a DEL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Del {
    /// The attachment whose addresses are released.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the same container: `<namespace>.<pod>`, or the bare
    /// container id.
    pub old_handle: String,
    /// The addresses that the runtime reports for it, if it does: their blocks are read first. All that it has is
    /// released.
    pub addresses: Vec<IpAddr>,
    /// The stored endpoint to delete in the same commit.
    pub endpoint: Option<EndpointToDelete>,
    /// The pod's namespace, where the runtime names it.
    pub namespace: Option<String>,
    /// The virtual machine whose address the pod had, on a Calico network. Only the plugin itself serves its pods.
    #[serde(skip)]
    pub vm: Option<VmPod>,
}

/// The request of a CHECK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// The attachment whose addresses are compared.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the same container.
    pub old_handle: String,
    /// The addresses that it expects to have.
    pub addresses: Vec<IpAddr>,
}

/// The request of a GC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gc {
    /// The network's name.
    pub network: String,
    /// The node's name.
    pub node: String,
    /// The attachments that there are, as container ids and interfaces; an empty list counts, too.
    pub valid: BTreeSet<(String, String)>,
    /// The time of the call, in nanoseconds since 1970.
    pub now: i128,
}

/// Addresses of an attachment that devices have, each with the reason for its quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// The attachment that has just got them.
    pub attachment: Attachment,
    /// The addresses.
    pub found: Vec<(IpAddr, String)>,
}

/// The answer to a verb.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// ADD is done.
    Assigned(Vec<AssignedAddress>),
    /// DEL is done, or a device's addresses are in quarantine.
    Released(Vec<IpAddr>),
    /// CHECK is done.
    Checked(CheckAnswer),
    /// An ADD can be served.
    Ready,
    /// GC is done.
    Collected(GcSummary),
    /// A pool is chosen by the labels of the namespace. The plugin looks them up and sends the request again.
    NamespaceWanted,
    /// The daemon cannot do it, for this reason. The plugin does it by itself.
    Declined(String),
    /// The verb fails.
    Refused(CniError),
}

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckAnswer {
    /// The comparison with the recorded addresses.
    Compared(CheckResult),
    /// The store was not queried, or could not answer, for this reason.
    Unknown(String),
}

/// The outcome of a GC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcSummary {
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

impl From<AssignRequest> for Add {
    fn from(request: AssignRequest) -> Self {
        Self { request, vm: None }
    }
}

impl Add {
    /// True if the store and the pools are made where they are missing.
    pub fn makes_store(&self) -> bool {
        !self.request.define.is_empty()
    }

    fn rules(&self) -> NetworkRules {
        if self.request.bridge.is_some() { NetworkRules::Bridged } else { NetworkRules::Calico }
    }
}

impl Verb {
    /// The name of the verb, as CNI spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Add(_) => "ADD",
            Self::Del(_) => "DEL",
            Self::Check(_) => "CHECK",
            Self::Status(_) => "STATUS",
            Self::Gc(_) => "GC",
            Self::Quarantine(_) => "QUARANTINE",
        }
    }

    /// The purpose of its writes: DEL and GC may use what a full disk has left for releases.
    pub fn purpose(&self) -> Purpose {
        if matches!(self, Self::Del(_) | Self::Gc(_)) { Purpose::Release } else { Purpose::Any }
    }

    /// True if it writes for one attachment: during such a verb Calico's plugin holds the host's lock.
    pub fn takes_host_lock(&self) -> bool {
        matches!(self, Self::Add(_) | Self::Del(_) | Self::Quarantine(_))
    }

    /// True if only the plugin itself can do it.
    pub(crate) fn needs_the_plugin(&self) -> bool {
        match self {
            Self::Add(add) => add.vm.is_some(),
            Self::Del(del) => del.vm.is_some(),
            Self::Check(_) | Self::Status(_) | Self::Gc(_) | Self::Quarantine(_) => false,
        }
    }

    /// True if it is an answer to this verb that ends the call.
    pub(crate) fn is_answered_by(&self, answer: &Answer) -> bool {
        matches!(
            (self, answer),
            (Self::Add(_), Answer::Assigned(_))
                | (Self::Add(_) | Self::Status(_), Answer::NamespaceWanted)
                | (Self::Del(_) | Self::Quarantine(_), Answer::Released(_))
                | (Self::Check(_), Answer::Checked(_))
                | (Self::Status(_), Answer::Ready)
                | (Self::Gc(_), Answer::Collected(_))
        )
    }

    /// Does the verb on the open store at a location: the one place for the plugin by itself, the session of the main plugin, and
    /// the daemon.
    ///
    /// # Errors
    /// The store's, and what the runtime gets to read.
    pub async fn carry_out(&self, ipam: &Ipam, location: &Location, deadline: Deadline) -> Result<Answer, VerbFailure> {
        match self {
            Self::Add(add) => add.assign(ipam, deadline).await.map(Answer::Assigned),
            Self::Del(del) => del.release(ipam, deadline).await.map(Answer::Released),
            Self::Check(check) => check.compare(ipam, deadline).await.map(Answer::Checked),
            Self::Status(add) => add.would_assign(ipam, location, deadline).await.map(|()| Answer::Ready),
            Self::Gc(gc) => gc.collect(ipam, deadline).await.map(Answer::Collected),
            Self::Quarantine(what) => {
                let done = ipam.quarantine(&what.attachment, &what.found, deadline).await;
                done.map(Answer::Released).map_err(|error| explain(error, NetworkRules::Bridged))
            }
        }
    }
}

impl Add {
    async fn assign(&self, ipam: &Ipam, deadline: Deadline) -> Result<Vec<AssignedAddress>, VerbFailure> {
        if let Some(vm) = &self.vm {
            let answer = Box::pin(ipam.assign_to_vm(&self.request, vm, deadline)).await;
            match answer.map_err(|error| explain(error, NetworkRules::Calico))? {
                // The pod is served like any other.
                VmAnswer::Off => {}
                VmAnswer::First(assigned) => return Ok(assigned),
                // The result shows them as single addresses.
                VmAnswer::Kept(kept) => {
                    return Ok(kept.into_iter().map(|one| AssignedAddress { block: one.ip.into(), ..one }).collect());
                }
            }
        }
        ipam.assign(&self.request, deadline).await.map_err(|error| explain(error, self.rules()))
    }

    /// A full pool is no failure: a node that is out of service has its pods evicted, and a pod without a free address has
    /// only to wait.
    async fn would_assign(&self, ipam: &Ipam, location: &Location, deadline: Deadline) -> Result<(), VerbFailure> {
        match ipam.would_assign(&self.request, deadline).await {
            Ok(trial) => {
                let Attachment { network, node, .. } = &self.request.attachment;
                match WriteRights::of(location, network, node) {
                    Some(rights) => rights.check(&**ipam.store(), trial.keys).await,
                    None => Ok(()),
                }
            }
            Err(error) if error.is_exhaustion() => {
                let advice = advice(&error).unwrap_or_default();
                tracing::warn!(%error, advice, "no address is free for the next container");
                Ok(())
            }
            Err(error) => Err(explain(error, self.rules())),
        }
    }
}

impl Del {
    async fn release(&self, ipam: &Ipam, deadline: Deadline) -> Result<Vec<IpAddr>, VerbFailure> {
        let Self { attachment, old_handle, addresses, endpoint, namespace, vm } = self;
        let (old_handles, endpoint) = (std::slice::from_ref(old_handle), endpoint.as_ref());
        let failed = |error| explain(error, NetworkRules::Calico);
        let Some(vm) = vm else {
            let namespace = namespace.as_deref();
            let done =
                ipam.release_attachment_of(attachment, old_handles, addresses, endpoint, namespace, deadline).await;
            return done.map_err(failed);
        };
        let released = Box::pin(ipam.release_vm_pod(vm, attachment, old_handles, addresses, deadline)).await;
        let released = released.map_err(failed)?;
        if let Some(endpoint) = endpoint {
            ipam.delete_endpoint(endpoint, deadline).await.map_err(failed)?;
        }
        Ok(released)
    }
}

impl Check {
    async fn compare(&self, ipam: &Ipam, deadline: Deadline) -> Result<CheckAnswer, VerbFailure> {
        let Self { attachment, old_handle, addresses } = self;
        match ipam.compare(attachment, std::slice::from_ref(old_handle), addresses, deadline).await {
            // A foreign writer's document, which proves nothing.
            Err(ipam_core::Error::Malformed(error)) => Ok(CheckAnswer::Unknown(error.to_string())),
            Err(error) => Err(explain(error, NetworkRules::Calico)),
            Ok(comparison) => Ok(CheckAnswer::Compared(comparison)),
        }
    }
}

impl Gc {
    /// Has a commit for each block.
    async fn collect(&self, ipam: &Ipam, deadline: Deadline) -> Result<GcSummary, VerbFailure> {
        let failed = |error| explain(error, NetworkRules::Calico);
        let Ok(now) = OffsetDateTime::from_unix_timestamp_nanos(self.now) else { return Ok(GcSummary::default()) };
        let holdings = ipam.holdings_within(&self.node, &ipam.read_scope_of(&self.node), deadline).await;
        let (holdings, _) = holdings.map_err(failed)?;
        let stale = gc::find_stale(&holdings, &self.network, &self.valid, now);
        let mut collected = GcSummary {
            young: stale.young,
            undated: stale.undated,
            unmarked: holdings.unmarked,
            ..GcSummary::default()
        };
        for batch in gc::batches(&stale.gone) {
            let freed = ipam.free(&batch, deadline).await.map_err(failed)?;
            collected.released.extend(freed.released);
            collected.changed += freed.changed.len();
        }
        Ok(collected)
    }
}

/// The daemon's answer. After an error of the store the plugin tries by itself: it knows which errors count as success, and on
/// an embedded store a DEL has room on a full disk. The daemon does not scan the machine: an ADD that finds no room is the
/// plugin's, too, which may release the leftovers of earlier boots.
impl From<Result<Self, VerbFailure>> for Answer {
    fn from(done: Result<Self, VerbFailure>) -> Self {
        match done {
            Ok(answer) => answer,
            Err(VerbFailure::Store(error)) => Self::Declined(error.to_string()),
            Err(VerbFailure::NoRoom(error)) => Self::Declined(error.to_string()),
            Err(VerbFailure::NamespaceWanted) => Self::NamespaceWanted,
            Err(VerbFailure::Cni(error)) => Self::Refused(error),
        }
    }
}
