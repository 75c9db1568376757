//! The verbs on an open store: the work that a plugin by itself and the daemon do alike.

use std::collections::BTreeSet;
use std::net::IpAddr;

use datastore::Location;
use ipam_core::assign::{AssignRequest, Assigned};
use ipam_core::attachment::Attachment;
use ipam_core::endpoints::EndpointOf;
use ipam_core::{CheckResult, Ipam, gc};
use kv::Deadline;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::allocator::failure::{Failure, advice, explain};
use crate::allocator::rights::Rights;
use crate::request::{CheckRequest, Checked, Collected, DelRequest, GcRequest, Quarantine};
use crate::run::Rules;

/// The request of a DEL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Del {
    /// The attachment whose addresses are released.
    pub attachment: Attachment,
    /// The handle under which old versions of Calico recorded the same container.
    pub old_handle: String,
    /// The addresses that the runtime reports for it.
    pub addresses: Vec<IpAddr>,
    /// The stored endpoint to delete in the same commit.
    pub endpoint: Option<EndpointOf>,
    /// The pod's namespace, where the runtime names it.
    pub namespace: Option<String>,
}

impl Del {
    pub(crate) fn of(request: &DelRequest) -> Self {
        let DelRequest { attachment, old_handle, addresses, endpoint, namespace, .. } = request.clone();
        Self { attachment, old_handle, addresses, endpoint, namespace }
    }
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

impl Check {
    pub(crate) fn of(request: &CheckRequest) -> Self {
        let CheckRequest { attachment, old_handle, addresses, .. } = request.clone();
        Self { attachment, old_handle, addresses }
    }
}

/// The request of a GC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gc {
    /// The network's name.
    pub network: String,
    /// The node's name.
    pub node: String,
    /// The attachments that there are, as container ids and interfaces.
    pub valid: BTreeSet<(String, String)>,
    /// The time of the call, in nanoseconds since 1970.
    pub now: i128,
}

impl Gc {
    pub(crate) fn of(request: &GcRequest) -> Self {
        let GcRequest { network, node, valid, now, .. } = request.clone();
        Self { network, node, valid, now: now.unix_timestamp_nanos() }
    }
}

/// The rules of the request's network.
pub(crate) fn rules(request: &AssignRequest) -> Rules {
    if request.bridge.is_some() { Rules::Bridged } else { Rules::Calico }
}

/// ADD.
pub(crate) async fn assign(ipam: &Ipam, request: &AssignRequest, deadline: Deadline) -> Result<Vec<Assigned>, Failure> {
    ipam.assign(request, deadline).await.map_err(|error| explain(error, rules(request)))
}

/// DEL. The addresses that were released.
pub(crate) async fn release(ipam: &Ipam, del: &Del, deadline: Deadline) -> Result<Vec<IpAddr>, Failure> {
    let Del { attachment, old_handle, addresses, endpoint, namespace } = del;
    let (old_handles, endpoint, namespace) =
        (std::slice::from_ref(old_handle), endpoint.as_ref(), namespace.as_deref());
    let released = ipam.release_attachment_of(attachment, old_handles, addresses, endpoint, namespace, deadline).await;
    released.map_err(|error| explain(error, Rules::Calico))
}

/// A step of an ADD with a probe. The addresses that are quarantined.
pub(crate) async fn quarantine(ipam: &Ipam, what: &Quarantine, deadline: Deadline) -> Result<Vec<IpAddr>, Failure> {
    let done = ipam.quarantine(&what.attachment, &what.found, deadline).await;
    done.map_err(|error| explain(error, Rules::Bridged))
}

/// CHECK.
pub(crate) async fn compare(ipam: &Ipam, check: &Check, deadline: Deadline) -> Result<Checked, Failure> {
    let Check { attachment, old_handle, addresses } = check;
    let compared: ipam_core::Result<CheckResult> =
        ipam.compare(attachment, std::slice::from_ref(old_handle), addresses, deadline).await;
    match compared {
        // A foreign writer's document, which proves nothing.
        Err(ipam_core::Error::Malformed(error)) => Ok(Checked::Unknown(error.to_string())),
        Err(error) => Err(explain(error, Rules::Calico)),
        Ok(comparison) => Ok(Checked::Compared(comparison)),
    }
}

/// STATUS. A full pool is no failure: a node that is out of service has its pods evicted, and a pod without a free address
/// has only to wait.
pub(crate) async fn would_assign(
    ipam: &Ipam,
    location: &Location,
    request: &AssignRequest,
    deadline: Deadline,
) -> Result<(), Failure> {
    match ipam.would_assign(request, deadline).await {
        Ok(trial) => match Rights::of(location, &request.attachment.network, &request.attachment.node) {
            Some(rights) => rights.check(&**ipam.store(), trial.keys).await,
            None => Ok(()),
        },
        Err(error) if error.is_exhaustion() => {
            let advice = advice(&error).unwrap_or_default();
            tracing::warn!(%error, advice, "no address is free for the next container");
            Ok(())
        }
        Err(error) => Err(explain(error, rules(request))),
    }
}

/// GC. Releases the addresses of attachments that the list does not have, with a commit for each block.
pub(crate) async fn collect(ipam: &Ipam, request: &Gc, deadline: Deadline) -> Result<Collected, Failure> {
    let failed = |error| explain(error, Rules::Calico);
    let Ok(now) = OffsetDateTime::from_unix_timestamp_nanos(request.now) else { return Ok(Collected::default()) };
    let holdings = ipam.holdings_within(&request.node, &ipam.reach_of(&request.node), deadline).await;
    let (holdings, _) = holdings.map_err(failed)?;
    let stale = gc::stale(&holdings, &request.network, &request.valid, now);
    let mut collected =
        Collected { young: stale.young, undated: stale.undated, unmarked: holdings.unmarked, ..Collected::default() };
    for batch in gc::batches(&stale.gone) {
        let freed = ipam.free(&batch, deadline).await.map_err(failed)?;
        collected.released.extend(freed.released);
        collected.changed += freed.changed.len();
    }
    Ok(collected)
}
