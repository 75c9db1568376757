//! Addresses that a workload keeps, see [`crate::sticky`].
//!
//! Guards: the record of the workload, and the block of each address that is taken, assigned to others or released.

use std::net::IpAddr;

use ipnet::IpNet;

use super::assignment::Assignment;
use super::auto::FamilyAssigner;
use super::request::AssignRequest;
use crate::assign_context::pool_holding;
use crate::attachment::{BOOT, INTERFACE, NETWORK};
use crate::error::Result;
use crate::ipam::Nodes;
use crate::model::{Attribute, Block, Pool, StickyAddress, StickyRecord};
use crate::net::Family;
use crate::pools;
use crate::sticky::{STICKY, is_pinned, waits_until};
use crate::workloads::{forget, read_record, write_record};
use crate::write_set::{BlockSlot, WriteSet};

/// The addresses that the workload of a request keeps.
#[derive(Debug)]
pub(super) struct WorkloadAddresses {
    /// The workload's name.
    name: String,
    record: StickyRecord,
    is_changed: bool,
    /// The holder of an address that the workload does not keep.
    plain: Attribute,
    /// The families in which the workload cannot have its own address now: it gets another one, and does not keep it.
    elsewhere: Vec<Family>,
}

/// The state of an address on a workload's record.
enum StickyState {
    /// It waits for the workload.
    Waits,
    /// The same, pinned by an operator.
    Pinned,
    /// A container of an earlier boot of this machine has it, under this handle.
    Leftover(String),
    /// Another container of the same name has it.
    InUse,
    /// The workload has it in another network, or on another interface.
    OnOther,
    /// It is the workload's no more.
    Gone,
}

impl WorkloadAddresses {
    /// Reads the record of the workload of a request, if it keeps its addresses. `plain` is the holder of others.
    pub(super) async fn read(
        work: &mut WriteSet<'_>,
        request: &AssignRequest,
        plain: Attribute,
    ) -> Result<Option<Self>> {
        let Some(sticky) = &request.sticky else { return Ok(None) };
        let record = read_record(work.tx, &sticky.name).await?;
        Ok(Some(Self { name: sticky.name.clone(), record, is_changed: false, plain, elsewhere: Vec::new() }))
    }

    /// Writes the record, if it has changed.
    pub(super) fn write(&self, work: &mut WriteSet<'_>) -> Result<()> {
        if self.is_changed { write_record(work.tx, &self.name, &self.record) } else { Ok(()) }
    }

    fn state(&self, block: &Block, ip: IpAddr, request: &AssignRequest, nodes: Nodes) -> StickyState {
        let Some(entry) = block.attributes_of(ip) else { return StickyState::Gone };
        if entry.get(STICKY) != Some(&self.name) {
            return StickyState::Gone;
        }
        if waits_until(entry).is_some() {
            return if is_pinned(entry) { StickyState::Pinned } else { StickyState::Waits };
        }
        // On a store of one machine, a container of an earlier boot is dead. In a cluster a machine of the same name may be
        // another one; there the DEL of the old container comes first.
        let boots = (entry.get(BOOT), request.attachment.boot.as_deref());
        let is_earlier = matches!(boots, (Some(then), Some(now)) if then != now);
        match entry.handle().filter(|_| is_earlier && nodes == Nodes::FirstSeen) {
            Some(handle) => StickyState::Leftover(handle.to_owned()),
            None => {
                let own = [(NETWORK, &request.attachment.network), (INTERFACE, &request.attachment.interface)];
                let is_here = own.into_iter().all(|(name, own)| entry.get(name) == Some(own));
                if is_here { StickyState::InUse } else { StickyState::OnOther }
            }
        }
    }
}

impl Assignment<'_> {
    /// The holder of a new address of a family.
    pub(super) fn holder_in(&self, family: Family) -> &Attribute {
        match &self.kept {
            Some(kept) if kept.elsewhere.contains(&family) => &kept.plain,
            _ => &self.holder,
        }
    }

    /// The holder of an address that the request names itself: the workload does not keep it.
    pub(super) fn plain_holder(&self) -> &Attribute {
        self.kept.as_ref().map_or(&self.holder, |kept| &kept.plain)
    }

    /// Takes the address of a family that the workload keeps, if it is in one of these pools and to be had. Addresses that
    /// are none of the wanted ones stay as they are.
    pub(super) async fn take_kept(
        &mut self,
        work: &mut WriteSet<'_>,
        family: Family,
        pools: &[Pool],
        is_wanted: impl Fn(IpAddr) -> bool,
    ) -> Result<Option<(IpAddr, IpNet)>> {
        let Some(mut kept) = self.kept.take() else { return Ok(None) };
        let attachment = &self.request.attachment;
        let mut taken = None;
        for one in kept.record.of(family, &attachment.network, &attachment.interface) {
            let ip = one.address;
            if !is_wanted(ip) || self.answer.iter().any(|assigned| assigned.ip == ip) {
                continue;
            }
            let pool = self.context.pools.iter().find(|pool| pool.cidr().contains(&ip));
            let Some(cidr) = pool.and_then(|pool| pools::block_of(pool, ip)) else {
                kept.is_changed |= kept.record.remove(ip);
                continue;
            };
            let state = match work.find(cidr).await? {
                BlockSlot::There(block) => kept.state(block, ip, self.request, self.ipam.nodes()),
                BlockSlot::Absent => StickyState::Gone,
                BlockSlot::Damaged => StickyState::InUse,
            };
            let is_reserved = || pool.is_some_and(|pool| self.context.reservations.touches(pool.unit_of(ip)));
            let is_in_pools = pool_holding(pools, cidr).is_some();
            let may_have = is_in_pools && !is_reserved();
            let former = match state {
                StickyState::Gone => {
                    kept.is_changed |= kept.record.remove(ip);
                    continue;
                }
                // It is for any network of the workload, and this one is not where it can be used.
                StickyState::OnOther => continue,
                _ if one.network.is_none() && !is_in_pools => continue,
                // Its pool is out of service, perhaps for a while: the address waits on.
                _ if pool.is_some_and(|pool| !pool.is_enabled()) => {
                    kept.elsewhere.push(family);
                    continue;
                }
                // The network has other pools by now, or the address is reserved.
                StickyState::Waits if !may_have => {
                    let (now, cooldown) = (self.ipam.now(), self.context.config.cooldown_seconds());
                    let request = [crate::model::ReleaseRequest::new(ip)];
                    work.change(cidr, |block| block.release_addresses(&request, now, cooldown)).await?;
                    kept.is_changed |= kept.record.remove(ip);
                    continue;
                }
                StickyState::Waits | StickyState::Pinned if may_have => None,
                StickyState::Leftover(handle) if may_have => Some(handle),
                StickyState::Waits | StickyState::Pinned | StickyState::Leftover(_) | StickyState::InUse => {
                    kept.elsewhere.push(family);
                    continue;
                }
            };
            if !self.family_assigner(family, 1, &[]).is_apart(work, cidr).await? {
                kept.elsewhere.push(family);
                continue;
            }
            if work.block(cidr).await?.is_some_and(|block| block.owner().is_none()) {
                // A block that came to be for a pinned address is the first user's.
                let owner = self.owner();
                work.change(cidr, |block| block.set_owner(&owner, self.ipam.now())).await?;
                work.confirm_affinity(&owner, cidr).await?;
            } else if !self.family_assigner(family, 1, &[]).may_take_from(work, cidr).await? {
                kept.elsewhere.push(family);
                continue;
            }
            work.change(cidr, |block| block.assign_kept(ip, &self.holder)).await?;
            for handle in former.iter().chain([&self.handle]) {
                work.touch_handle(handle, cidr);
            }
            taken = Some((ip, cidr));
            break;
        }
        if taken.is_none() && kept.elsewhere.contains(&family) {
            tracing::warn!(
                workload = kept.name,
                "the address that the workload keeps cannot be had now; it gets another one"
            );
        }
        self.kept = Some(kept);
        Ok(taken)
    }

    /// Puts the full blocks from which kept addresses came last among the hints: the next container finds nothing there.
    pub(super) async fn set_back_full(&self, work: &mut WriteSet<'_>, used: &mut Vec<IpNet>) -> Result<()> {
        if self.kept.is_none() {
            return Ok(());
        }
        for assigned in &self.answer {
            let BlockSlot::There(block) = work.find(assigned.block).await? else { continue };
            if block.free_count(&self.context.reservations) == 0 {
                used.retain(|cidr| *cidr != assigned.block);
                used.push(assigned.block);
            }
        }
        Ok(())
    }

    /// Records new addresses of a family as the workload's.
    pub(super) fn keep_new(&mut self, family: Family, new: &[(IpAddr, IpNet)]) {
        let Some(kept) = self.kept.as_mut().filter(|kept| !kept.elsewhere.contains(&family)) else { return };
        let attachment = &self.request.attachment;
        for (address, _) in new {
            let (network, interface) = (Some(attachment.network.clone()), Some(attachment.interface.clone()));
            kept.record.add(StickyAddress { address: *address, network, interface });
            kept.is_changed = true;
        }
    }

    /// True if an address that the request names waits for its workload.
    pub(super) async fn is_kept(&self, work: &mut WriteSet<'_>, ip: IpAddr, cidr: IpNet) -> Result<bool> {
        let Some(kept) = &self.kept else { return Ok(false) };
        let BlockSlot::There(block) = work.find(cidr).await? else { return Ok(false) };
        let waits =
            matches!(kept.state(block, ip, self.request, self.ipam.nodes()), StickyState::Waits | StickyState::Pinned);
        Ok(waits && self.family_assigner(Family::of(ip), 1, &[]).is_apart(work, cidr).await?)
    }
}

impl FamilyAssigner<'_> {
    /// True if an address that a workload keeps may come from a block: the owner's own, or one to borrow from.
    async fn may_take_from(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<bool> {
        if !self.is_apart(work, cidr).await? {
            return Ok(false);
        }
        let BlockSlot::There(block) = work.find(cidr).await? else { return Ok(false) };
        Ok(match block.owner() {
            Some(owner) if owner == self.owner => true,
            None => true,
            Some(_) if self.context.config.strict_affinity() => false,
            Some(owner) => self.may_borrow(block, &owner),
        })
    }

    /// Assigns addresses that wait for a workload whose time is over, among the blocks that were read: first those in
    /// blocks of the owner's, so that nodes do not all take from one block, and of each kind the longest overdue first.
    /// Nothing else is free.
    pub(super) async fn take_overdue(&self, work: &mut WriteSet<'_>, taken: &mut Vec<(IpAddr, IpNet)>) -> Result<()> {
        let in_pools = |block: &&Block| pool_holding(self.pools.iter().copied(), block.cidr()).is_some();
        let mut found = Vec::new();
        for block in work.blocks().filter(in_pools) {
            let is_others = !block.is_owned_by(&self.owner);
            let free = block.overdue(self.now).filter(|(_, ip)| !block.is_reserved(*ip, &self.context.reservations));
            for (since, ip) in free {
                let name = block.attributes_of(ip).and_then(|entry| entry.get(STICKY)).unwrap_or_default();
                found.push((is_others, since, ip, block.cidr(), name.to_owned()));
            }
        }
        found.sort_unstable();
        for (_, _, ip, cidr, name) in found {
            if taken.len() == self.wanted {
                break;
            }
            if !self.may_take_from(work, cidr).await? {
                continue;
            }
            self.move_for(work, cidr).await?;
            let has_owner = work.block(cidr).await?.is_some_and(|block| block.owner().is_some());
            if !has_owner && self.context.config.strict_affinity() {
                self.take_over(work, cidr, None).await?;
            }
            forget(work.tx, &name, ip).await?;
            tracing::info!(%ip, workload = name, "the workload's time is over: its address is assigned anew");
            work.change(cidr, |block| block.keep(ip, self.holder)).await?;
            work.touch_handle(self.handle, cidr);
            taken.push((ip, cidr));
        }
        Ok(())
    }
}
