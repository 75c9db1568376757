//! ADD of a virtual machine's pod on an open store.

use ipam_core::Ipam;
use ipam_core::assign::{AssignRequest, Assigned};
use ipam_core::vm::{VmAnswer, VmPod};
use kv::Deadline;

use super::{Failure, explain};
use crate::run::Rules;

/// Carries it out; `None` for a pod that is served like any other.
pub(super) async fn assign(
    ipam: &Ipam,
    request: &AssignRequest,
    vm: &VmPod,
    deadline: Deadline,
) -> Result<Option<Vec<Assigned>>, Failure> {
    let answer = Box::pin(ipam.assign_to_vm(request, vm, deadline)).await;
    Ok(match answer.map_err(|error| explain(error, Rules::Calico))? {
        VmAnswer::Off => None,
        VmAnswer::First(assigned) => Some(assigned),
        // The result shows them as single addresses.
        VmAnswer::Kept(kept) => Some(kept.into_iter().map(|one| Assigned { block: one.ip.into(), ..one }).collect()),
    })
}
