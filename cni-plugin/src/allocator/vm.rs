//! ADD of a virtual machine's pod on a store.

use ipam_core::assign::{AssignRequest, Assigned};
use ipam_core::vm::{VmAnswer, VmPod};

use super::{Failure, StoreAllocator, Use, explain};
use crate::request::{Network, StoreAt};

impl StoreAllocator {
    /// Carries out the ADD of a virtual machine's pod; `None` if the pod is to be served like any other.
    pub(super) fn assign_to_vm(
        &self,
        vm: &VmPod,
        at: &StoreAt,
        assign: &AssignRequest,
    ) -> Result<Option<Vec<Assigned>>, Failure> {
        let answer = self.with_store(at, Use::Assign, async |ipam, deadline| {
            let answer = Box::pin(ipam.assign_to_vm(assign, vm, deadline)).await;
            answer.map_err(|error| explain(error, &Network::Calico))
        })?;
        Ok(match answer {
            VmAnswer::Off => None,
            VmAnswer::First(assigned) => Some(assigned),
            // The result shows them as single addresses.
            VmAnswer::Kept(kept) => {
                Some(kept.into_iter().map(|one| Assigned { block: one.ip.into(), ..one }).collect())
            }
        })
    }
}
