//! Compares the blocks with the records of workloads that keep their addresses. A block is the source of truth for
//! which workload keeps an address. A workload's record is only an index that tells an assignment which blocks to
//! search, so the record can be rebuilt from the blocks.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use ipam_core::Result;
use ipam_core::assign_context::{decode_all, read_config};
use ipam_core::attachment::INTERFACE;
use ipam_core::block_lookup::group_by_block;
use ipam_core::model::{Attribute, Block, Document, Pool, ReleaseRequest, StickyAddress, StickyRecord, keys};
use ipam_core::sticky::{STICKY, is_pinned};
use ipam_core::workloads::write_record;
use ipam_core::write_set::{BlockSlot, WriteSet};
use ipnet::IpNet;
use kv::{Kv, Revision, Transaction};

use super::block_facts::BlockFacts;
use super::finding::{Code, Finding, Inspection, Subject};
use super::handles::{MAX_BLOCKS_OF_HANDLE, join};
use super::mend::{RepairResult, is_newer, pools_range};
use crate::Operator;

/// For each workload, the addresses that blocks keep for it, each with the index of its block. A workload is removed
/// from `kept` when its stored record has been compared.
#[derive(Debug, Default)]
pub(super) struct Workloads {
    kept: HashMap<Box<str>, Vec<(IpAddr, u32)>>,
}

impl Workloads {
    /// If a workload keeps the address, records the address for this workload.
    pub(super) fn note(&mut self, ip: IpAddr, entry: &Attribute, block: u32) {
        if let Some(name) = entry.get(STICKY) {
            self.kept.entry(name.into()).or_default().push((ip, block));
        }
    }

    /// Compares a workload's stored record with the addresses that blocks keep for it. Must be called after all blocks
    /// have been added.
    pub(super) fn compare(&mut self, name: &str, kv: &Kv, blocks: &BlockFacts, done: &mut Inspection) {
        let kept = self.kept.remove(name).unwrap_or_default();
        let record = match StickyRecord::decode(&kv.key, kv.value.as_bytes()) {
            Ok(record) => record,
            Err(error) => {
                let what = error.reason().to_owned();
                return done.findings.push(finding(Code::UnreadableRecord, name, what, &kept, blocks));
            }
        };
        let is_recorded = |ip: IpAddr| record.addresses.iter().any(|one| one.address == ip);
        let missing: Vec<IpAddr> = kept.iter().map(|(ip, _)| *ip).filter(|ip| !is_recorded(*ip)).collect();
        if !missing.is_empty() {
            done.findings.push(finding(Code::KeptUnrecorded, name, lacks(&missing), &kept, blocks));
        }
        let is_kept = |ip: IpAddr| kept.iter().any(|(kept, _)| *kept == ip);
        let recorded = record.addresses.iter().map(|one| one.address);
        let stray: Vec<IpAddr> = recorded.filter(|ip| !is_kept(*ip) && !blocks.has_unreadable(*ip)).collect();
        if !stray.is_empty() {
            let what = format!("it has {}, which the blocks do not keep for it", join(&stray));
            done.findings.push(finding(Code::RecordedNotKept, name, what, &kept, blocks));
        }
    }

    /// Reports addresses that blocks keep for a workload without a stored record.
    pub(super) fn finish(&mut self, blocks: &BlockFacts, done: &mut Inspection) {
        for (name, kept) in std::mem::take(&mut self.kept) {
            let missing: Vec<IpAddr> = kept.iter().map(|(ip, _)| *ip).collect();
            done.findings.push(finding(Code::KeptUnrecorded, &name, lacks(&missing), &kept, blocks));
        }
    }
}

fn finding(code: Code, name: &str, what: String, kept: &[(IpAddr, u32)], blocks: &BlockFacts) -> Finding {
    let named: BTreeSet<IpNet> = kept.iter().map(|(_, block)| blocks.cidr(*block)).collect();
    let finding = Finding::new(code, Subject::Workload(name.to_owned()), what);
    finding.mendable(named.len() <= MAX_BLOCKS_OF_HANDLE).with_blocks(named.into_iter().collect())
}

fn lacks(missing: &[IpAddr]) -> String {
    format!("its record lacks {}", join(missing))
}

impl Operator {
    /// Rewrites a workload's record from the blocks. Reads the blocks in which the inspection found addresses kept for
    /// the workload, and the blocks of the addresses in the workload's record.
    ///
    /// The commit of the repair guards the workload's record and the blocks that keep an address for the workload.
    pub(super) async fn mend_record(
        &self,
        tx: &mut Transaction,
        name: &str,
        found: &[IpNet],
        at: Revision,
    ) -> Result<RepairResult> {
        let key = keys::sticky(name);
        let blocks = found.iter().map(|cidr| keys::block(*cidr));
        let needed = blocks.chain([key.clone(), keys::config()]).collect();
        tx.prefetch(needed, vec![pools_range().into()]).await?;
        let stored = tx.get(&key).await?;
        if is_newer(tx, &key, at) {
            return Ok(RepairResult::Changed);
        }
        let read = stored.map(|value| StickyRecord::decode(&key, value.as_bytes()));
        let was_unreadable = matches!(read, Some(Err(_)));
        let before = read.and_then(std::result::Result::ok).unwrap_or_default();
        let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&pools_range()).await?);
        let recorded: Vec<_> = before.addresses.iter().map(|one| ReleaseRequest::new(one.address)).collect();
        let of_recorded = group_by_block(tx, &pools, &recorded).await?.into_keys();
        let all: BTreeSet<IpNet> = found.iter().copied().chain(of_recorded).collect();

        let cooldown = read_config(tx).await?.cooldown_seconds();
        let mut work = WriteSet::new(tx, self.ipam().now(), cooldown);
        let (mut kept, mut damaged) = (Vec::new(), Vec::new());
        for cidr in all {
            match work.find(cidr).await? {
                BlockSlot::Absent => {}
                BlockSlot::Damaged => damaged.push(cidr),
                BlockSlot::There(block) => {
                    let of_block = kept_for(block, name);
                    if !of_block.is_empty() {
                        work.tx.get(&keys::block(cidr)).await?;
                    }
                    kept.extend(of_block);
                }
            }
        }
        let after = brought_together(&before, kept, &damaged);
        if after == before && !was_unreadable {
            return Ok(RepairResult::Changed);
        }
        write_record(work.tx, name, &after)?;
        Ok(RepairResult::Done)
    }
}

/// The addresses that a block keeps for a workload, each with a flag that is true if the address is pinned.
fn kept_for(block: &Block, name: &str) -> Vec<(StickyAddress, bool)> {
    let of_workload = |entry: &Attribute| entry.released_at().is_none() && entry.get(STICKY) == Some(name);
    let kept = block.allocated().filter(|(_, entry)| of_workload(entry));
    kept.map(|(address, entry)| {
        let (network, interface) = (entry.network().map(str::to_owned), entry.get(INTERFACE).map(str::to_owned));
        (StickyAddress { address, network, interface }, is_pinned(entry))
    })
    .collect()
}

/// Corrects a workload's record: removes addresses that no block keeps, and adds missing addresses that blocks keep.
/// Pinned addresses are added at the front of the record, as in [`Operator::pin`]. Recorded addresses inside damaged
/// blocks stay in the record, since the damaged blocks may keep these addresses.
fn brought_together(before: &StickyRecord, kept: Vec<(StickyAddress, bool)>, damaged: &[IpNet]) -> StickyRecord {
    let mut after = before.clone();
    after.addresses.retain(|one| {
        let is_kept = kept.iter().any(|(kept, _)| kept.address == one.address);
        is_kept || damaged.iter().any(|cidr| cidr.contains(&one.address))
    });
    for (one, is_pinned) in kept {
        if after.addresses.iter().all(|recorded| recorded.address != one.address) {
            let place = if is_pinned { 0 } else { after.addresses.len() };
            after.addresses.insert(place, one);
        }
    }
    after
}
