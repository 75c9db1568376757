//! Defines the verbs of plugins with their requests and answers, and carries out each verb on an open store. The
//! daemon's socket carries the same requests and answers.

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

/// A verb for the daemon, and its time limit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VerbRequest {
    /// Time limit of the verb. After this time, the daemon starts no work for the verb.
    pub within: Duration,
    /// The file that Calico's plugins on this host lock while they work on a cluster's store.
    pub lock_file: PathBuf,
    /// The verb to carry out.
    pub verb: Verb,
}

/// A verb with its request. The protocol layer has already made all checks of the request that need no store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Verb {
    /// Assigns all requested addresses, or none of them.
    ///
    /// If an attachment repeats its request, the answer is the same. Only on a Calico network a repeated request for a
    /// specific address is an error, as with Calico's plugin. The returned addresses are committed: the addresses stay
    /// assigned until a DEL, even if the result never reaches the runtime.
    Add(Box<Add>),
    /// Releases the addresses that the attachment holds. The release succeeds even if the attachment holds no address
    /// or there is no store.
    Del(Del),
    /// Compares the addresses that the attachment expects with the recorded addresses, without changing the store.
    /// Differing or missing addresses are part of the answer, not an error. If other processes keep the store locked,
    /// the answer is [`CheckAnswer::Unknown`].
    Check(Check),
    /// Checks whether this ADD could be carried out, without changing the store. The check succeeds even if other
    /// processes keep the store locked or no address is free.
    Status(Box<Add>),
    /// Releases the addresses that the node holds in the network for attachments that are not in the list. The release
    /// succeeds even if there is no such address or no store. Addresses that are too young, of unknown age or without
    /// Margay's attributes are kept and counted.
    Gc(Gc),
    /// Releases addresses of an attachment that devices on the wire use, and quarantines the addresses in the same
    /// commit. An ADD sends this verb after its probe has found such devices.
    Quarantine(Quarantine),
}

/// The request of an ADD.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Add {
    /// The addresses to assign, and the attachment that gets the addresses.
    pub request: AssignRequest,
    /// The virtual machine whose address the pod gets, on a Calico network. Only the plugin itself serves pods of
    /// virtual machines.
    #[serde(skip)]
    pub vm: Option<VmPod>,
}

/// The request of a DEL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Del {
    /// The attachment whose addresses are released.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the container: `<namespace>.<pod>`, or the bare container
    /// id.
    pub old_handle: String,
    /// The addresses that the runtime reports for the attachment, if any. The blocks of these addresses are read first.
    /// A DEL releases all addresses of the attachment, including addresses that are not in this list.
    pub addresses: Vec<IpAddr>,
    /// The stored endpoint to delete. The endpoint is deleted in the commit that releases the addresses, unless the pod
    /// has a virtual machine.
    pub endpoint: Option<EndpointToDelete>,
    /// The pod's namespace, if the runtime names it.
    pub namespace: Option<String>,
    /// The virtual machine whose address the pod had, on a Calico network. Only the plugin itself serves pods of
    /// virtual machines.
    #[serde(skip)]
    pub vm: Option<VmPod>,
}

/// The request of a CHECK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// The attachment whose addresses are compared.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the container: see [`Del::old_handle`].
    pub old_handle: String,
    /// The addresses that the attachment expects to have.
    pub addresses: Vec<IpAddr>,
}

/// The request of a GC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gc {
    /// The network's name.
    pub network: String,
    /// The node's name.
    pub node: String,
    /// The attachments that exist, as container ids and interfaces. An empty list means that no attachment exists.
    pub valid: BTreeSet<(String, String)>,
    /// The time of the call, in nanoseconds since 1970.
    pub now: i128,
}

/// The request of a quarantine: addresses of an attachment that other devices on the wire use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// The attachment to which an ADD has just assigned the addresses.
    pub attachment: Attachment,
    /// The addresses to quarantine, each with the reason for its quarantine.
    pub found: Vec<(IpAddr, String)>,
}

/// The answer to a verb.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The addresses that an ADD has assigned.
    Assigned(Vec<AssignedAddress>),
    /// The addresses that a DEL or a quarantine has released.
    Released(Vec<IpAddr>),
    /// The result of a CHECK.
    Checked(CheckAnswer),
    /// The answer to a STATUS whose ADD could be carried out.
    Ready,
    /// The result of a GC.
    Collected(GcSummary),
    /// The labels of the pod's namespace choose a pool. The plugin looks these labels up and sends the request again.
    NamespaceWanted,
    /// The reason why the daemon cannot carry out the verb. The plugin then opens the store itself.
    Declined(String),
    /// The error with which the verb has failed.
    Refused(CniError),
}

/// The result of a CHECK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckAnswer {
    /// The comparison of the expected with the recorded addresses.
    Compared(CheckResult),
    /// The reason why the store was not queried or could not answer.
    Unknown(String),
}

/// The result of a GC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcSummary {
    /// The released addresses.
    pub released: Vec<IpAddr>,
    /// Number of addresses that other calls released or reassigned during the GC.
    pub changed: usize,
    /// Number of addresses that were kept because they are younger than a minute: the list of attachments may be older
    /// than the assignment.
    pub young: usize,
    /// Number of addresses that were kept because their assignment time is unreadable or in the future.
    pub undated: usize,
    /// Number of the node's addresses without Margay's attributes.
    pub unmarked: usize,
}

impl From<AssignRequest> for Add {
    fn from(request: AssignRequest) -> Self {
        Self { request, vm: None }
    }
}

impl Add {
    /// Returns whether the ADD creates a missing store and missing pools.
    pub fn makes_store(&self) -> bool {
        !self.request.define.is_empty()
    }

    fn rules(&self) -> NetworkRules {
        if self.request.bridge.is_some() { NetworkRules::Bridged } else { NetworkRules::Calico }
    }
}

impl Verb {
    /// Returns the name of the verb in CNI's spelling.
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

    /// Returns the purpose of the verb's writes. DEL and GC may use the space on the disk that is reserved for
    /// releases.
    pub fn purpose(&self) -> Purpose {
        if matches!(self, Self::Del(_) | Self::Gc(_)) { Purpose::Release } else { Purpose::Any }
    }

    /// Returns whether the verb writes for one attachment. Calico's plugin holds the host lock while it writes for one
    /// attachment.
    pub fn takes_host_lock(&self) -> bool {
        matches!(self, Self::Add(_) | Self::Del(_) | Self::Quarantine(_))
    }

    /// Returns whether only the plugin itself, not the daemon, can carry out the verb.
    pub(crate) fn needs_the_plugin(&self) -> bool {
        match self {
            Self::Add(add) => add.vm.is_some(),
            Self::Del(del) => del.vm.is_some(),
            Self::Check(_) | Self::Status(_) | Self::Gc(_) | Self::Quarantine(_) => false,
        }
    }

    /// Returns whether an answer belongs to this verb and ends the call.
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

    /// Carries out the verb on the open store at a location. Three callers use this function: a plugin without a
    /// daemon, the session of the main plugin, and the daemon.
    ///
    /// # Errors
    /// [`VerbFailure::Store`] for any store error; otherwise the error that the plugin prints for the runtime.
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
                // If addresses of virtual machines are not kept, the pod gets addresses like any other pod.
                VmAnswer::Off => {}
                VmAnswer::First(assigned) => return Ok(assigned),
                // The result reports the addresses that a virtual machine keeps as /32 or /128.
                VmAnswer::Kept(kept) => {
                    return Ok(kept.into_iter().map(|one| AssignedAddress { block: one.ip.into(), ..one }).collect());
                }
            }
        }
        ipam.assign(&self.request, deadline).await.map_err(|error| explain(error, self.rules()))
    }

    /// Checks whether the ADD could be carried out. A full pool is no failure: a runtime evicts the pods of a node
    /// whose STATUS fails, but a pod without a free address only has to wait.
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
            // A malformed document was written by another program and proves nothing about the addresses.
            Err(ipam_core::Error::Malformed(error)) => Ok(CheckAnswer::Unknown(error.to_string())),
            Err(error) => Err(explain(error, NetworkRules::Calico)),
            Ok(comparison) => Ok(CheckAnswer::Compared(comparison)),
        }
    }
}

impl Gc {
    /// Releases the addresses of attachments that no longer exist, in one commit for each block.
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

/// Converts the result of a verb into the daemon's answer. After a store error the plugin opens the store itself, for
/// two reasons. Only the plugin decides which store errors count as success for a verb. On an embedded store, a DEL of
/// the plugin may use reserved space when the disk is full. The plugin also repeats an ADD that found no free address:
/// only the plugin scans the machine, and the scan may permit the release of addresses that are left from earlier
/// boots.
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
