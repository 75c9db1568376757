//! Defines the CNI verbs with their requests and answers, and carries out each verb on an open store. The plugin and
//! the daemon exchange the same requests and answers over the daemon's socket.

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

/// A request to the daemon: a CNI verb and its time limit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VerbRequest {
    /// Time limit for carrying out the verb, after which the daemon starts no further work for the verb.
    pub within: Duration,
    /// The file that Calico's plugins on this host lock while they work on a cluster's store.
    pub lock_file: PathBuf,
    /// The CNI verb to carry out.
    pub verb: Verb,
}

/// A CNI verb with its request. The plugin has already checked the request, as far as this is possible without the
/// store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Verb {
    /// Assigns all requested addresses, or none of them.
    ///
    /// A repeated ADD for an attachment returns the addresses of its first ADD. On a Calico network, repeating an ADD
    /// that requests a specific address is an error, as in Calico's plugin. The returned addresses stay assigned until
    /// a DEL, even if the CNI result never reaches the runtime.
    Add(Box<Add>),
    /// Releases all addresses that the attachment holds. A DEL succeeds even if the attachment holds no address or the
    /// store does not exist.
    Del(Del),
    /// Compares the addresses that the attachment should have with the addresses in the store, without changing the
    /// store. Addresses that differ or are missing are reported in the answer of the CHECK, not as an error. If other
    /// processes keep the store locked, the answer to the CHECK is [`CheckAnswer::Unknown`].
    Check(Check),
    /// Checks whether this ADD would succeed now, without changing the store. A STATUS succeeds even if other processes
    /// keep the store locked, or if no address is free.
    Status(Box<Add>),
    /// Releases the addresses that the node holds in the network for attachments that are not in the runtime's list. A
    /// GC succeeds even if there is no address to release or the store does not exist. A GC keeps and counts an address
    /// that is too young, is of unknown age, or lacks Margay's attributes.
    Gc(Gc),
    /// Releases those addresses of an attachment that are in use by other devices on the layer-2 segment, and
    /// quarantines these addresses in the same commit. An ADD requests a quarantine after its probe has found addresses
    /// that other devices use.
    Quarantine(Quarantine),
}

/// The request of the verb ADD.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Add {
    /// The addresses to assign, and the attachment that gets the addresses.
    pub request: AssignRequest,
    /// The virtual machine whose address the pod gets (only on a Calico network). Only the plugin itself, not the
    /// daemon, carries out requests for virtual machines.
    #[serde(skip)]
    pub vm: Option<VmPod>,
}

/// The request of the verb DEL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Del {
    /// The attachment whose addresses are released.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the container's addresses, which is `<namespace>.<pod>`,
    /// or only the container id.
    pub old_handle: String,
    /// The addresses that the runtime reports for the attachment; may be empty. The DEL first reads the blocks that
    /// contain the addresses in this list. A DEL releases all addresses of the attachment, including addresses that the
    /// runtime does not report.
    pub addresses: Vec<IpAddr>,
    /// The WorkloadEndpoint to delete from the store. The commit that releases the attachment's addresses also deletes
    /// the WorkloadEndpoint, unless the pod runs a virtual machine.
    pub endpoint: Option<EndpointToDelete>,
    /// The namespace of the pod, if the runtime names the namespace.
    pub namespace: Option<String>,
    /// The virtual machine whose address the pod had (only on a Calico network). Only the plugin itself, not the
    /// daemon, carries out requests for virtual machines.
    #[serde(skip)]
    pub vm: Option<VmPod>,
}

/// The request of the verb CHECK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// The attachment whose addresses are checked.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the container's addresses: see [`Del::old_handle`].
    pub old_handle: String,
    /// The addresses that the attachment should have.
    pub addresses: Vec<IpAddr>,
}

/// The request of the verb GC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gc {
    /// The network's name.
    pub network: String,
    /// The node's name.
    pub node: String,
    /// The attachments that still exist, as pairs of container id and interface name. An empty set of valid attachments
    /// means that no attachment exists.
    pub valid: BTreeSet<(String, String)>,
    /// The time of the GC call, in nanoseconds since 1970.
    pub now: i128,
}

/// A request to quarantine addresses of an attachment, because other devices on the layer-2 segment use these
/// addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// The attachment to which an ADD has just assigned the addresses.
    pub attachment: Attachment,
    /// The addresses to quarantine, each with the reason for its quarantine.
    pub found: Vec<(IpAddr, String)>,
}

/// The answer to a CNI verb.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The addresses that an ADD has assigned.
    Assigned(Vec<AssignedAddress>),
    /// The addresses that a DEL or a quarantine has released.
    Released(Vec<IpAddr>),
    /// The result of a CHECK.
    Checked(CheckAnswer),
    /// The answer to a STATUS whose ADD would succeed now.
    Ready,
    /// The result of a GC.
    Collected(GcSummary),
    /// A pool's selector needs the labels of the pod's namespace. The plugin reads the labels of the pod's namespace
    /// and sends the request again with these labels.
    NamespaceWanted,
    /// The reason why the daemon does not carry out the verb. If the daemon declines the verb, the plugin opens the
    /// store itself and carries out the verb.
    Declined(String),
    /// The error with which the verb has failed.
    Refused(CniError),
}

/// The result of a CHECK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckAnswer {
    /// The result of comparing the addresses that the attachment should have with the addresses in the store.
    Compared(CheckResult),
    /// The reason why CHECK could not read the addresses in the store.
    Unknown(String),
}

/// The result of a GC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcSummary {
    /// The released addresses.
    pub released: Vec<IpAddr>,
    /// Number of addresses that other calls released or reassigned while the GC ran.
    pub changed: usize,
    /// Number of addresses that GC kept because they are younger than a minute. An address younger than a minute may be
    /// missing from the runtime's list of attachments only because the list is older.
    pub young: usize,
    /// Number of addresses that GC kept because their assignment time is unreadable or in the future.
    pub undated: usize,
    /// Number of the node's addresses that GC kept because they lack Margay's attributes.
    pub unmarked: usize,
}

impl From<AssignRequest> for Add {
    fn from(request: AssignRequest) -> Self {
        Self { request, vm: None }
    }
}

impl Add {
    /// Returns whether this ADD creates the store and its pools if they are missing.
    pub fn makes_store(&self) -> bool {
        !self.request.define.is_empty()
    }

    fn rules(&self) -> NetworkRules {
        if self.request.bridge.is_some() { NetworkRules::Bridged } else { NetworkRules::Calico }
    }
}

impl Verb {
    /// Returns the name of the verb as CNI spells it.
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

    /// Returns the purpose for which the verb writes to the store. For DEL and GC, the purpose is to release addresses:
    /// they may use the disk space that is reserved for releases.
    pub fn purpose(&self) -> Purpose {
        if matches!(self, Self::Del(_) | Self::Gc(_)) { Purpose::Release } else { Purpose::Any }
    }

    /// Returns whether the verb writes to the store for a single attachment. Calico's plugin holds the host lock while
    /// it writes for a single attachment.
    pub fn takes_host_lock(&self) -> bool {
        matches!(self, Self::Add(_) | Self::Del(_) | Self::Quarantine(_))
    }

    /// Returns whether only the plugin itself, and not the daemon, can carry out the verb.
    pub(crate) fn needs_the_plugin(&self) -> bool {
        match self {
            Self::Add(add) => add.vm.is_some(),
            Self::Del(del) => del.vm.is_some(),
            Self::Check(_) | Self::Status(_) | Self::Gc(_) | Self::Quarantine(_) => false,
        }
    }

    /// Returns whether `answer` is of a kind that belongs to this verb. [`Answer::Declined`] and [`Answer::Refused`]
    /// belong to no particular verb.
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

    /// Carries out the verb on the open store at this location: in the daemon, in a plugin without a daemon, or in the
    /// session of the main plugin.
    ///
    /// # Errors
    /// An error [`VerbFailure::Store`] for any store error. The plugin prints any error other than
    /// [`VerbFailure::Store`] for the runtime.
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
                // If persistent addresses of virtual machines are turned off, a virtual machine's pod gets an address
                // like any other pod.
                VmAnswer::Off => {}
                VmAnswer::First(assigned) => return Ok(assigned),
                // In the result of an ADD, an address that a virtual machine keeps has the prefix length 32 or 128.
                VmAnswer::Kept(kept) => {
                    return Ok(kept.into_iter().map(|one| AssignedAddress { block: one.ip.into(), ..one }).collect());
                }
            }
        }
        ipam.assign(&self.request, deadline).await.map_err(|error| explain(error, self.rules()))
    }

    /// Checks whether an ADD with the configuration of this STATUS would succeed now. STATUS succeeds even if a pool is
    /// full. A runtime evicts the pods of a node whose STATUS fails, although a pod without a free address would only
    /// have to wait.
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
            // A malformed document in the store was written by another program, and does not show which addresses the
            // attachment has.
            Err(ipam_core::Error::Malformed(error)) => Ok(CheckAnswer::Unknown(error.to_string())),
            Err(error) => Err(explain(error, NetworkRules::Calico)),
            Ok(comparison) => Ok(CheckAnswer::Compared(comparison)),
        }
    }
}

impl Gc {
    /// Releases the addresses of attachments that no longer exist, with one commit for each block.
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

/// Converts the result of a verb into the answer that the daemon sends. If the daemon reports a store error, the plugin
/// opens the store itself, because only the plugin decides which store errors count as success of a verb. On a full
/// disk, a DEL that the plugin itself carries out may use reserved disk space. If the daemon found no free address for
/// an ADD, the plugin repeats the ADD. When the plugin repeats the ADD, it may scan the machine and release leftover
/// addresses of earlier boots; the daemon never scans.
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
