//! Compares the address counts in the stored handles with the addresses in the blocks, and repairs handles with wrong
//! counts.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ipam_core::Result;
use ipam_core::assign_context::read_config;
use ipam_core::model::{Block, Document, Handle, WINDOWS_RESERVED_HANDLE, keys};
use ipam_core::write_set::WriteSet;
use ipnet::IpNet;
use kv::{Kv, Transaction};

use super::block_facts::{BlockFacts, BlockPresence};
use super::finding::{Code, Finding, Inspection, LeakedHandle, Subject, addresses};
use super::mend::{RepairResult, is_newer};
use crate::Operator;

/// The number of addresses by handle and block, for each handle whose document was not compared yet. A store can have
/// half a million handles, and nearly all of them have addresses in one block only. To save memory, the first block of
/// each handle is stored in a map whose values are not `Vec`s.
#[derive(Debug, Default)]
pub(super) struct Handles {
    /// For each handle, the first block with addresses of the handle, and how many addresses the handle has in this
    /// block.
    first: HashMap<Box<str>, HandleBlockCount>,
    /// For each of the few handles with addresses in several blocks: the blocks after the handle's first block.
    others: HashMap<Box<str>, Vec<HandleBlockCount>>,
}

/// The index of a block, and the number of addresses that a handle has in the block.
type HandleBlockCount = (u32, u32);

impl Handles {
    /// Counts an address of a block for the handle under which it is held. The caller must pass all addresses of a
    /// block before those of the next block.
    pub(super) fn note(&mut self, id: &str, block: u32) {
        // A Windows host reserves addresses under the id [`WINDOWS_RESERVED_HANDLE`], but stores no handle of that id.
        if id.eq_ignore_ascii_case(WINDOWS_RESERVED_HANDLE) {
            return;
        }
        match self.first.get_mut(id) {
            Some((of, count)) if *of == block => *count += 1,
            Some(_) => {
                let others = self.others.entry(id.into()).or_default();
                match others.last_mut() {
                    Some((of, count)) if *of == block => *count += 1,
                    _ => others.push((block, 1)),
                }
            }
            None => drop(self.first.insert(id.into(), (block, 1))),
        }
    }

    /// Removes and returns the address counts of a handle. The result is empty if the handle holds no address, or if an
    /// earlier call has already removed and returned its counts.
    fn take(&mut self, id: &str) -> Vec<HandleBlockCount> {
        let first = self.first.remove(id);
        let others = if self.others.is_empty() { None } else { self.others.remove(id) };
        first.into_iter().chain(others.into_iter().flatten()).collect()
    }

    /// Compares the counts in a stored handle with the numbers of addresses that the blocks record for this handle.
    /// Must be called after all blocks have been added.
    pub(super) fn compare(&mut self, id: &str, kv: &Kv, blocks: &BlockFacts, done: &mut Inspection) {
        // The text after a carriage return is ignored, because an old migration of Calico appended such text to some
        // handle ids.
        let plain = id.split('\r').next().unwrap_or(id);
        let held = self.take(plain);
        if held.is_empty() && plain != id {
            // An old Calico migration appended text to some handle ids. The handle with the original id sorts first, so
            // it has already been compared.
            return;
        }
        let held: BTreeMap<IpNet, i64> =
            held.into_iter().map(|(block, count)| (blocks.cidr(block), count.into())).collect();
        let finding = |code, what| Finding::new(code, Subject::Handle(id.to_owned()), what);
        let handle = match Handle::decode(&kv.key, kv.value.as_bytes()) {
            Ok(handle) => handle,
            Err(error) => {
                let finding = finding(Code::UnreadableHandle, error.reason().to_owned());
                done.findings.push(finding.mendable(true).with_blocks(held.into_keys().collect()));
                return;
            }
        };
        let difference = HandleDifference::between(&handle, &held, blocks);
        if held.is_empty() && !difference.is_doubtful {
            done.leaked_handles.push(LeakedHandle { id: id.to_owned(), revision: kv.mod_revision });
        }
        let mendable = !difference.is_doubtful;
        for (code, what) in difference.reported() {
            let finding = finding(code, what).mendable(mendable);
            done.findings.push(finding.with_blocks(held.keys().copied().collect()));
        }
        if held.is_empty() && handle.odd_entries() == 0 && handle.blocks().all(|(_, count)| count <= 0) {
            done.findings.push(finding(Code::EmptyHandle, "it counts no address".to_owned()).mendable(true));
        }
    }

    /// Reports handles that hold addresses but are not stored.
    pub(super) fn finish(mut self, blocks: &BlockFacts, done: &mut Inspection) {
        for (id, first) in std::mem::take(&mut self.first) {
            let others = self.others.remove(&id).unwrap_or_default();
            let held = || std::iter::once(&first).chain(&others);
            let count: u64 = held().map(|(_, count)| u64::from(*count)).sum();
            let named: Vec<IpNet> = held().map(|(block, _)| blocks.cidr(*block)).collect();
            let what = format!("{} held under it, in {}", addresses(count), join(&named));
            let finding = Finding::new(Code::HandleMissing, Subject::Handle(id.into()), what);
            done.findings.push(finding.mendable(named.len() <= MAX_BLOCKS_OF_HANDLE).with_blocks(named));
        }
    }
}

/// Maximum number of a handle's blocks that one commit can guard.
pub(super) const MAX_BLOCKS_OF_HANDLE: usize = 50;

/// Texts that describe each block in which the handle's count differs from the number of the handle's addresses.
#[derive(Default)]
struct HandleDifference {
    more: Vec<String>,
    less: Vec<String>,
    no_block: Vec<String>,
    /// True if the handle names unreadable blocks, or more blocks than one commit can guard.
    is_doubtful: bool,
}

impl HandleDifference {
    fn between(handle: &Handle, held: &BTreeMap<IpNet, i64>, blocks: &BlockFacts) -> Self {
        let mut found = Self::default();
        let mut named = Vec::new();
        for (cidr, counted) in handle.blocks() {
            named.push(cidr);
            let holds = held.get(&cidr).copied().unwrap_or_default();
            match blocks.find(cidr) {
                BlockPresence::Absent if counted > 0 => found.no_block.push(cidr.to_string()),
                BlockPresence::Absent => {}
                BlockPresence::Unreadable => found.is_doubtful = true,
                BlockPresence::Readable if counted > holds => found.more.push(reported(cidr, counted, holds)),
                BlockPresence::Readable if counted < holds => found.less.push(reported(cidr, counted, holds)),
                BlockPresence::Readable => {}
            }
        }
        for (cidr, holds) in held.iter().filter(|(cidr, _)| !named.contains(cidr)) {
            found.less.push(reported(*cidr, 0, *holds));
        }
        if handle.odd_entries() > 0 {
            found.no_block.push("what is no network".to_owned());
        }
        found.is_doubtful |= named.len() + held.len() > MAX_BLOCKS_OF_HANDLE;
        found
    }

    fn reported(self) -> impl Iterator<Item = (Code, String)> {
        let Self { more, less, no_block, .. } = self;
        let kinds =
            [(Code::HandleCountsMore, more), (Code::HandleCountsLess, less), (Code::HandleNamesNoBlock, no_block)];
        let named = |(code, blocks): (Code, Vec<String>)| match (code, blocks.join(", ")) {
            (_, blocks) if blocks.is_empty() => None,
            (Code::HandleNamesNoBlock, blocks) => {
                Some((code, format!("it names {blocks}, and there is no such block")))
            }
            reported => Some(reported),
        };
        kinds.into_iter().filter_map(named)
    }
}

fn reported(cidr: IpNet, counted: i64, holds: i64) -> String {
    format!("{cidr} holds {holds}, and {counted} are counted")
}

/// Joins the first few networks or addresses with commas, followed by the number of omitted ones.
pub(super) fn join(nets: &[impl ToString]) -> String {
    const MAX_SHOWN_BLOCKS: usize = 3;
    let mut text = nets.iter().take(MAX_SHOWN_BLOCKS).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if nets.len() > MAX_SHOWN_BLOCKS {
        text.push_str(&format!(" and {} more", nets.len() - MAX_SHOWN_BLOCKS));
    }
    text
}

impl Operator {
    /// Recomputes the address counts of a handle. The repair counts the handle's addresses in two groups of blocks:
    /// those that the handle names, and those where the inspection found addresses of the handle.
    ///
    /// The repair recounts addresses in several blocks, and its commit guards all of these blocks. If the handle's
    /// count for a block is too high, the commit also rewrites the block, because Calico may be in the middle of an
    /// assignment. In an assignment, Calico first raises the handle's count for a block, and then writes the block.
    /// After Margay's rewrite of the block, Calico's write of the block fails, and Calico retries the assignment.
    pub(super) async fn mend_handle(
        &self,
        tx: &mut Transaction,
        id: &str,
        found: &[IpNet],
        at: kv::Revision,
    ) -> Result<RepairResult> {
        let key = keys::handle(id);
        let mut needed = vec![key.clone(), keys::config()];
        needed.extend(found.iter().map(|cidr| keys::block(*cidr)));
        tx.prefetch(needed, Vec::new()).await?;
        let stored = tx.get(&key).await?;
        if is_newer(tx, &key, at) {
            return Ok(RepairResult::Changed);
        }
        let read = stored.as_ref().map(|value| Handle::decode(&key, value.as_bytes()));
        let was_unreadable = matches!(read, Some(Err(_)));
        let mut handle = read.and_then(Result::ok).unwrap_or_else(Handle::new);
        let named = handle.blocks().map(|(cidr, _)| cidr);
        let blocks: BTreeSet<IpNet> = named.chain(found.iter().copied()).collect();
        let rest = read_config(tx).await?.cooldown_seconds();
        let mut work = WriteSet::new(tx, self.ipam().now(), rest);
        work.read_ahead(&blocks.iter().copied().collect::<Vec<_>>()).await?;

        let (mut counts, mut differs) = (Vec::new(), was_unreadable || handle.odd_entries() > 0);
        for cidr in blocks {
            work.tx.get(&keys::block(cidr)).await?;
            let of = |block: &Block| i64::try_from(block.ips_by_handle(id).len()).unwrap_or(i64::MAX);
            let holds = work.block(cidr).await?.map(of);
            let counted = handle.count(cidr);
            let is_named = handle.blocks().any(|(named, _)| named == cidr);
            differs |= counted != holds.unwrap_or_default() || (is_named && counted <= 0);
            if holds.is_some_and(|holds| counted > holds) {
                work.change(cidr, |_| ()).await?;
            }
            counts.push((cidr, holds.unwrap_or_default()));
        }
        let is_stored_for_nothing = stored.is_some() && counts.iter().all(|(_, count)| *count == 0);
        if !differs && !is_stored_for_nothing {
            return Ok(RepairResult::Changed);
        }
        handle.set_all(counts);
        if !handle.is_empty() {
            work.tx.put(&key, handle.encode()?)?;
        } else if stored.is_some() {
            work.tx.delete(&key)?;
        } else {
            return Ok(RepairResult::Changed);
        }
        work.write().await?;
        Ok(RepairResult::Done)
    }
}
