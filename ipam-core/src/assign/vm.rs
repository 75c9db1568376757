//! Assigns the addresses of a virtual machine to its pods. The machine's first pod gets new addresses; every later pod
//! gets the machine's existing addresses.
//!
//! The commit of an assignment guards the blocks that it changes. When a machine gets its first addresses, the commit
//! also guards the machine's handle, so that two pods that start at the same time get the same addresses. All the
//! machine's addresses, of both families, get their new owner in one commit.

use ipnet::IpNet;
use kv::{Deadline, Key, Transaction};

use super::{AssignRequest, AssignedAddress, Assignment, RequestedAddresses};
use crate::assign_context::AssignContext;
use crate::attachment::{NODE, TIMESTAMP};
use crate::boxed_future;
use crate::error::{Error, Result, VmError};
use crate::hints;
use crate::ipam::{Ipam, transact};
use crate::model::{Attribute, Block, Owner, OwnerChange, OwnerUpdate, keys};
use crate::net::Family;
use crate::vm::{PodRole, VmAnswer, VmHoldings, VmPod, is_off, switch_key};
use crate::write_set::WriteSet;

impl Ipam {
    /// Makes a pod the active owner of its virtual machine's addresses, or the alternate owner if the pod is the target
    /// of a migration. A machine without addresses gets the requested addresses, at most one of each family. If a
    /// machine has addresses of only one family, a specifically requested address of the other family is assigned in
    /// addition.
    ///
    /// The attributes of a virtual machine's addresses are recorded under Calico's names. Of the request's attributes,
    /// only the timestamp is recorded; the pod's container and interface are not, because the addresses belong to the
    /// machine.
    ///
    /// # Errors
    /// [`VmError`] if the pod cannot get the machine's addresses. Any error of [`assign`](Self::assign).
    #[boxed_future]
    pub async fn assign_to_vm(&self, request: &AssignRequest, vm: &VmPod, deadline: Deadline) -> Result<VmAnswer> {
        let attachment = &request.attachment;
        self.settle_pending_commits(attachment, deadline).await?;
        let recalled = self.recall(attachment);
        let store = self.recording_store(attachment);
        let mut misdated = Vec::new();
        let done = transact!(on store, deadline, |tx| {
            let likely = [Family::V4, Family::V6].into_iter().filter_map(|family| hints::latest_of(&recalled, family).next());
            let owner = Owner::host(&attachment.node);
            let mut first = vec![switch_key(), keys::handle(&vm.handle)];
            for cidr in likely {
                first.push(keys::block(cidr));
                first.extend(keys::affinity(&owner, cidr));
            }
            self.assign_to_vm_in(tx, request, vm, first, &mut misdated).await
        });
        match &done {
            Ok(VmAnswer::First(given)) => {
                let used = hints::with_used(&recalled, given.iter().map(|one| one.block));
                self.remember(attachment, &recalled, &used);
            }
            Err(_) if !misdated.is_empty() => self.redate(&misdated, deadline).await?,
            _ => {}
        }
        done
    }

    async fn assign_to_vm_in(
        &self,
        tx: &mut Transaction,
        request: &AssignRequest,
        vm: &VmPod,
        first: Vec<Key>,
        misdated: &mut Vec<IpNet>,
    ) -> Result<VmAnswer> {
        let owner = Owner::host(&request.attachment.node);
        let mut context = self.read_context(tx, &owner, &request.wanted, first, Vec::new()).await?;
        if is_off(tx).await? {
            return match vm.role {
                PodRole::Source => Ok(VmAnswer::Off),
                PodRole::Target => Err(VmError::TargetWhileOff.into()),
            };
        }
        let mut attributes = vm.attributes.clone();
        let known = [("namespace", &vm.namespace), ("pod", &vm.name), (NODE, &context.host.name)];
        let asked_at = request.attributes.get(TIMESTAMP).map(|at| (TIMESTAMP, at));
        attributes.extend(known.into_iter().chain(asked_at).map(|(name, value)| (name.to_owned(), value.clone())));

        let mut work = WriteSet::new(tx, self.now(), context.config.cooldown_seconds());
        work.heed_quotas().await?;
        let holds = VmHoldings::read(&mut work, &vm.handle).await?;
        holds.mend(&mut work, &vm.handle).await?;
        let mut kept = Vec::new();
        for (ip, block) in &holds.addresses {
            let pool = context.pools.iter().find(|pool| pool.cidr().contains(ip));
            let answer = AssignedAddress::of(pool.ok_or(VmError::OutsidePools(*ip))?, *ip, *block, None);
            let own = OwnerChange::to(attributes.clone());
            let set = |block: &mut Block| {
                let is_active = block.attributes_of(*ip).is_some_and(|entry| vm.is_named_by(entry.attributes()));
                // If the target of a migration is already the active owner, it does not become the alternate owner.
                let update = match vm.role {
                    PodRole::Target if !is_active => OwnerUpdate { active: None, alternate: Some(own) },
                    _ => OwnerUpdate { active: Some(own), alternate: None },
                };
                block.set_owners(*ip, &vm.handle, &update)
            };
            work.change(*block, set).await?.transpose()?;
            kept.push(answer);
        }
        let answer = match (still_wanted(&request.wanted, &kept), vm.role) {
            (_, PodRole::Target) if kept.is_empty() => return Err(VmError::NothingToTake(vm.handle.clone()).into()),
            (_, PodRole::Target) => VmAnswer::Kept(of_wanted_families(&request.wanted, kept)),
            (wanted, PodRole::Source) => {
                let holder = Attribute::new(Some(&vm.handle), attributes);
                let given = self.first_of_vm(&mut work, &mut context, request, wanted, (&vm.handle, holder)).await;
                *misdated = work.misdated().to_vec();
                let given = given?;
                work.check_quotas(Some(&**self.store())).await?;
                if kept.is_empty() {
                    VmAnswer::First(given)
                } else {
                    kept.extend(given);
                    VmAnswer::Kept(of_wanted_families(&request.wanted, kept))
                }
            }
        };
        work.write().await?;
        Ok(answer)
    }

    async fn first_of_vm(
        &self,
        work: &mut WriteSet<'_>,
        context: &mut AssignContext,
        request: &AssignRequest,
        wanted: RequestedAddresses,
        (handle, holder): (&str, Attribute),
    ) -> Result<Vec<AssignedAddress>> {
        for family in [Family::V4, Family::V6] {
            let requested = wanted.all_of(family);
            if requested > 1 {
                return Err(Error::HandleLimit { handle: handle.to_owned(), family, most: 1, held: 0, requested });
            }
        }
        let terms = AssignRequest { wanted, ..request.clone() };
        let mut given = Assignment::new(self, &terms, context, holder, handle.to_owned());
        given.all(work).await?;
        Ok(given.answer)
    }
}

/// Returns the part of a virtual machine's request that the addresses `kept`, which the virtual machine already has, do
/// not satisfy. Returns the request unchanged if the machine has no addresses. If the machine already has addresses,
/// returns only the specifically requested addresses of the family that the machine lacks.
fn still_wanted(wanted: &RequestedAddresses, kept: &[AssignedAddress]) -> RequestedAddresses {
    if kept.is_empty() {
        return wanted.clone();
    }
    let lacks = |family: Family| kept.iter().all(|one| Family::of(one.ip) != family);
    RequestedAddresses::these(wanted.these.iter().copied().filter(|ip| lacks(Family::of(*ip))).collect::<Vec<_>>())
}

/// Returns the virtual machine's addresses of the requested families, or all its addresses if it has none of these
/// families. Only requested families are returned, because Calico's main CNI plugin makes one request for each address,
/// and fails if two answers contain the same address.
fn of_wanted_families(wanted: &RequestedAddresses, mut kept: Vec<AssignedAddress>) -> Vec<AssignedAddress> {
    let is_wanted = |one: &AssignedAddress| wanted.these.iter().any(|ip| Family::of(*ip) == Family::of(one.ip));
    if kept.iter().any(is_wanted) {
        kept.retain(is_wanted);
    }
    kept
}
