//! DEL of a virtual machine's pod: it is no owner any more; the machine's addresses are released with the machine.
//!
//! Guards: the blocks that change and the handles of what is released. That no other pod is an owner is true of the
//! blocks as they were read, and each of them is written.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::Deadline;

use super::prefetch;
use super::renamed::Renamed;
use crate::attachment::Attachment;
use crate::boxed;
use crate::error::Result;
use crate::hints;
use crate::ipam::{Ipam, transact};
use crate::model::{OwnerChange, OwnerUpdate, keys};
use crate::surroundings::read_config;
use crate::vm::{Fate, VmHolds, VmPod, is_off, switch_key};
use crate::workset::{Workset, likely_counters};

impl Ipam {
    /// Removes a pod from the owners of its virtual machine's addresses. If no owner is left and the machine is being
    /// deleted, or addresses of machines are not kept, all that the machine holds is released. The same commit releases
    /// the container's own addresses, as [`release_attachment_of`](Self::release_attachment_of) finds them. Finding
    /// nothing is not an error, so that the call can be repeated.
    ///
    /// # Errors
    /// Those of the store, and damaged documents that stand in the way.
    #[boxed]
    pub async fn release_vm_pod(
        &self,
        vm: &VmPod,
        attachment: &Attachment,
        old_handles: &[String],
        addresses: &[IpAddr],
        deadline: Deadline,
    ) -> Result<Vec<IpAddr>> {
        self.settle_intents(attachment, deadline).await?;
        let likely = hints::blocks_to_release(&self.recall(attachment), addresses);
        let own_handles: Vec<String> = [attachment.handle()].into_iter().chain(old_handles.iter().cloned()).collect();
        let all_handles: Vec<String> = own_handles.iter().chain([&vm.handle]).cloned().collect();
        transact!(self, deadline, |tx| {
            let more = likely.iter().map(|cidr| keys::block(*cidr)).chain([switch_key()]);
            let more = more.chain(likely_counters(&attachment.network, &attachment.node, Some(&vm.namespace)));
            prefetch(self, tx, &attachment.node, &all_handles, more).await?;
            let mut own = attachment.clone();
            own.node = self.known_name(tx, &attachment.node).await?;
            let is_off = is_off(tx).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = Workset::new(tx, self.now(), cooldown);
            let (mut gone, renamed) = self.release_own(&mut work, &own, &own_handles, cooldown).await?;

            let holds = VmHolds::read(&mut work, &vm.handle).await?;
            let (owned, has_others) = owned_by(&mut work, vm, &holds).await?;
            if has_others || (vm.fate == Fate::Stays && !is_off) {
                for (ip, cidr, update) in owned {
                    work.change(cidr, |block| block.set_owners(ip, &vm.handle, &update)).await?.transpose()?;
                }
                holds.mend(&mut work, &vm.handle).await?;
            } else {
                let handle = [vm.handle.clone()];
                let more = self.release_from_handles(&mut work, &handle, usize::MAX, cooldown, |_| true).await?;
                gone.released.extend(more.released);
                gone.emptied.extend(more.emptied);
            }
            Ok((gone.write(work, &own.node).await?, renamed))
        })
        .map(Renamed::reported)
    }
}

/// The addresses of which the pod is an owner, each with the change that removes it; and whether another pod is an owner.
async fn owned_by(
    work: &mut Workset<'_>,
    vm: &VmPod,
    holds: &VmHolds,
) -> Result<(Vec<(IpAddr, IpNet, OwnerUpdate)>, bool)> {
    let (mut owned, mut has_others) = (Vec::new(), false);
    for (ip, cidr) in &holds.addresses {
        let Some(entry) = work.block(*cidr).await?.and_then(|block| block.attributes_of(*ip)) else { continue };
        let owners = [entry.attributes(), entry.alternate_attributes()];
        let [active, alternate] = owners.map(|owner| vm.is_named_by(owner).then(OwnerChange::clear));
        has_others |= owners.iter().any(|owner| !owner.is_empty() && !vm.is_named_by(owner));
        if active.is_some() || alternate.is_some() {
            owned.push((*ip, *cidr, OwnerUpdate { active, alternate }));
        }
    }
    Ok((owned, has_others))
}
