//! Assigns the sticky addresses that a workload keeps; see [`crate::sticky`].
//!
//! The commit guards the workload's sticky record, and the block of each sticky address that it assigns or releases.

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

/// The sticky addresses of a request's workload.
#[derive(Debug)]
pub(super) struct WorkloadAddresses {
    name: String,
    record: StickyRecord,
    is_changed: bool,
    /// The block entry for an assigned address that the workload does not keep.
    plain: Attribute,
    /// The families in which the workload cannot get its sticky address now, so that it gets another address, which it
    /// does not keep.
    elsewhere: Vec<Family>,
}

/// The state of a sticky address that a workload's sticky record lists.
enum StickyState {
    /// The address waits for the workload to start again.
    Waits,
    /// The address is pinned by an operator, and waits for the workload without a time limit.
    Pinned,
    /// A container of an earlier boot of the machine holds the address; the value is the container's handle.
    Leftover(String),
    /// Another container of the workload holds the sticky address.
    InUse,
    /// A container of the workload holds the address in another network or on another interface.
    OnOther,
    /// No block keeps the address for the workload any more.
    Gone,
}

impl WorkloadAddresses {
    /// Reads the sticky record of the request's workload; returns `None` if the request names no workload. `plain` is
    /// the block entry for addresses that the workload does not keep.
    pub(super) async fn read(
        work: &mut WriteSet<'_>,
        request: &AssignRequest,
        plain: Attribute,
    ) -> Result<Option<Self>> {
        let Some(sticky) = &request.sticky else { return Ok(None) };
        let record = read_record(work.tx, &sticky.name).await?;
        Ok(Some(Self { name: sticky.name.clone(), record, is_changed: false, plain, elsewhere: Vec::new() }))
    }

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
        // If the store belongs to a single machine, a container of an earlier boot has certainly ended. In a cluster,
        // the container that holds the address may still run on another machine, so the address is reassigned only
        // after that container's DEL.
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
    /// Returns the block entry to record for a newly assigned address of a family.
    pub(super) fn holder_in(&self, family: Family) -> &Attribute {
        match &self.kept {
            Some(kept) if kept.elsewhere.contains(&family) => &kept.plain,
            _ => &self.holder,
        }
    }

    /// Returns the block entry to record for a specifically requested address, which the workload does not keep.
    pub(super) fn plain_holder(&self) -> &Attribute {
        self.kept.as_ref().map_or(&self.holder, |kept| &kept.plain)
    }

    /// Assigns the workload's sticky address of a family, if the address is available in one of the pools. Ignores
    /// sticky addresses that `is_wanted` rejects.
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
                // A sticky address without a recorded network stays in the sticky record, because another network of
                // the workload may use it.
                StickyState::OnOther => continue,
                _ if one.network.is_none() && !is_in_pools => continue,
                // The pool of the address may be disabled only temporarily, so the address continues to wait for the
                // workload.
                _ if pool.is_some_and(|pool| !pool.is_enabled()) => {
                    kept.elsewhere.push(family);
                    continue;
                }
                // The network can no longer use the address, because its pools changed or because the address is now
                // reserved.
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
                // A block that was created when an operator pinned the address has no owner. The first node that uses
                // the pinned address becomes the block's owner.
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
                "the sticky address of the workload is not available now; assigning another address"
            );
        }
        self.kept = Some(kept);
        Ok(taken)
    }

    /// Moves full blocks from which sticky addresses were assigned to the end of the hints, because the next container
    /// will find no free address in full blocks.
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

    /// Adds newly assigned addresses of a family to the workload's sticky record.
    pub(super) fn keep_new(&mut self, family: Family, new: &[(IpAddr, IpNet)]) {
        let Some(kept) = self.kept.as_mut().filter(|kept| !kept.elsewhere.contains(&family)) else { return };
        let attachment = &self.request.attachment;
        for (address, _) in new {
            let (network, interface) = (Some(attachment.network.clone()), Some(attachment.interface.clone()));
            kept.record.add(StickyAddress { address: *address, network, interface });
            kept.is_changed = true;
        }
    }

    /// True if a specifically requested address waits for the request's workload.
    pub(super) async fn is_kept(&self, work: &mut WriteSet<'_>, ip: IpAddr, cidr: IpNet) -> Result<bool> {
        let Some(kept) = &self.kept else { return Ok(false) };
        let BlockSlot::There(block) = work.find(cidr).await? else { return Ok(false) };
        let waits =
            matches!(kept.state(block, ip, self.request, self.ipam.nodes()), StickyState::Waits | StickyState::Pinned);
        Ok(waits && self.family_assigner(Family::of(ip), 1, &[]).is_apart(work, cidr).await?)
    }
}

impl FamilyAssigner<'_> {
    /// True if the request's owner has the block or may borrow from it, so that a sticky address in the block may be
    /// assigned.
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

    /// Assigns overdue sticky addresses, whose wait for their workload has ended, from the blocks that the transaction
    /// has read. Sticky addresses whose wait has ended are assigned only when no other address is free. Addresses in
    /// the owner's own blocks are tried first, so that different nodes use different blocks. Among the owner's blocks,
    /// and then among other blocks, the address whose wait ended first is assigned first.
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
            tracing::info!(
                %ip,
                workload = name,
                "the workload of a sticky address did not return in time; assigning the address to another container"
            );
            work.change(cidr, |block| block.keep(ip, self.holder)).await?;
            work.touch_handle(self.handle, cidr);
            taken.push((ip, cidr));
        }
        Ok(())
    }
}
