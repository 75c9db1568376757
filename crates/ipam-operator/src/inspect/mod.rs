//! Checks all IPAM documents and the workload endpoints, and repairs faults that can be repaired without guessing.
//!
//! An inspection reads all keys at one revision. An inspection takes no lock and changes nothing, so inspections can
//! run at any time. If another program makes a change in several commits, an inspection may see only the first of these
//! commits. Before a repair, [`Operator::mend`] reads the documents again. A repair is committed only if the finding
//! still exists and no key on which the finding depends has changed meanwhile.
//!
//! Each fault in the store is reported as a [`Finding`] with a [`Code`]. An inspection never guesses who uses an
//! address, so no repair frees an allocated address.

mod block_facts;
mod cluster_documents;
mod endpoints;
mod finding;
mod handles;
mod mend;
mod workloads;

use std::net::IpAddr;

use ipam_core::Result;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Attribute, Block, BlockFlaws, Owner, StoredBlock};
use ipam_core::sticky::waits_until;
use ipam_core::usage::{SnapshotReader, reread};
use ipnet::IpNet;
use kv::{Content, Deadline, Key, Kv, Range, Revision};
use time::{Duration, OffsetDateTime};

use crate::Operator;

use block_facts::{BlockFacts, BlockSummary, SecondaryBlocks};
use cluster_documents::ClusterDocuments;
use endpoints::Endpoints;
use finding::addresses;
pub use finding::{
    AllocatedAddress, ClusterFacts, Code, Finding, Inspection, LeakedHandle, Severity, StoreCounts, Subject,
    UnknownCode,
};
use handles::Handles;
pub use mend::{HandleRevision, ReclaimResult, RepairResult};
use workloads::Workloads;

/// Whether an inspection returns a list of every address that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressReporting {
    /// With this setting, an inspection returns findings and counts, but no list of addresses.
    Findings,
    /// With this setting, an inspection returns findings, counts, and a list of every address that is not free. The
    /// list of addresses takes far more memory than the findings and the counts.
    Addresses,
}

/// An inspection in progress, to which the caller adds the keys of the store. The caller reads all ranges of
/// [`Inspector::ranges`] at one revision, in the given order. The caller adds every key in [`Inspector::ranges`], with
/// its value, in ascending key order. An inspector keeps only a small part of the added data in memory.
#[derive(Debug)]
pub struct Inspector {
    now: OffsetDateTime,
    keep: AddressReporting,
    around: ClusterDocuments,
    blocks: BlockFacts,
    handles: Handles,
    secondary: SecondaryBlocks,
    endpoints: Endpoints,
    workloads: Workloads,
    done: Inspection,
}

impl Inspector {
    /// Starts an inspection, which computes the ages of addresses and the remaining cooldowns for the time `now`.
    pub fn new(now: OffsetDateTime, keep: AddressReporting) -> Self {
        Self {
            now,
            keep,
            around: ClusterDocuments::default(),
            blocks: BlockFacts::default(),
            handles: Handles::default(),
            secondary: SecondaryBlocks::default(),
            endpoints: Endpoints::default(),
            workloads: Workloads::default(),
            done: Inspection::default(),
        }
    }

    /// The key ranges that the caller must read and add to the inspector, in this order.
    pub fn ranges() -> Vec<Range> {
        let resources = [ResourceKind::IpPool, ResourceKind::IpReservation, ResourceKind::Node];
        let mut ranges = vec![Range::Key(keys::config()), Range::Key(keys::cluster_information())];
        ranges.extend(resources.map(|kind| Range::Prefix(keys::resources_prefix(kind))));
        ranges.push(Range::Prefix(keys::workload_endpoints_prefix()));
        // The common prefix of all IPAM keys covers the blocks, handles and affinities; it also covers the settings,
        // which are therefore read twice.
        ranges.push(Range::Prefix(keys::ipam_prefix()));
        ranges.push(Range::Prefix(keys::sticky_prefix()));
        ranges
    }

    /// Adds the next key of [`Inspector::ranges`] with its value.
    pub fn add(&mut self, kv: &Kv) {
        let (key, value) = (&kv.key, kv.value.as_bytes());
        if self.around.add(kv, &mut self.done) {
            return;
        }
        if let Some(cidr) = keys::parse_block(key) {
            self.add_block(cidr, key, value);
        } else if let Some(id) = keys::parse_handle(key) {
            self.done.counts.handles += 1;
            self.handles.compare(id, kv, &self.blocks, &mut self.done);
        } else if let Some((owner, cidr)) = keys::parse_affinity(key) {
            self.done.counts.affinities += 1;
            let pool = self.around.pool_of(cidr);
            self.blocks.compare_affinity((&owner, cidr), pool, kv, &mut self.done.findings);
        } else if let Some(name) = keys::parse_sticky(key) {
            self.workloads.compare(name, kv, &self.blocks, &mut self.done);
        } else if !self.endpoints.add(kv, &self.around, &mut self.done) && keys::parse_legacy_host(key).is_none() {
            self.done.findings.push(unknown(key));
        }
    }

    /// Finishes the inspection, after the caller has added all keys of the store at `revision`.
    pub fn finish(mut self, revision: Revision) -> Inspection {
        self.around.finish(&mut self.done);
        self.blocks.finish(&mut self.done);
        self.handles.finish(&self.blocks, &mut self.done);
        self.workloads.finish(&self.blocks, &mut self.done);
        self.secondary.finish(&mut self.done.findings);
        self.endpoints.finish(&self.around, &mut self.done.findings);
        self.done.revision = revision;
        self.done.findings.sort_unstable();
        self.done
    }
}

fn unknown(key: &Key) -> Finding {
    Finding::new(Code::UnknownKey, Subject::Key(key.to_string()), "nothing of IPAM is kept under this key")
}

impl Operator {
    /// Inspects the whole store at one revision, reading the keys in pages.
    ///
    /// # Errors
    /// `Timeout` after the deadline; any store error.
    pub async fn inspect(&self, keep: AddressReporting, deadline: Deadline) -> Result<Inspection> {
        Ok(reread(|| self.read_for_inspection(keep, deadline)).await?)
    }

    /// Starts an inspection for a caller that reads the store itself and adds the keys to the inspector.
    pub fn inspector(&self, keep: AddressReporting) -> Inspector {
        Inspector::new(self.ipam().now(), keep)
    }

    async fn read_for_inspection(&self, keep: AddressReporting, deadline: Deadline) -> kv::Result<Inspection> {
        let mut inspector = self.inspector(keep);
        let mut reading = SnapshotReader::new(deadline);
        for range in Inspector::ranges() {
            self.ipam().each(range, Content::Full, &mut reading, |kv| inspector.add(kv)).await?;
        }
        Ok(inspector.finish(reading.at))
    }
}

/// Tolerated lead of other machines' clocks over this machine's clock, if the settings have no cooldown. An inspection
/// reports an address whose recorded release time is in the future by more than this tolerance.
const MAX_CLOCK_LEAD: Duration = Duration::MINUTE;

impl Inspector {
    /// Decodes a stored block and checks the block.
    fn add_block(&mut self, cidr: IpNet, key: &Key, value: &[u8]) {
        self.done.counts.blocks += 1;
        let read = StoredBlock::read(key, value);
        let wrong = match &read {
            Err(error) => Some((Code::UnreadableBlock, error.reason().to_owned())),
            Ok(stored) if stored.block().cidr() != cidr => {
                Some((Code::MisplacedBlock, format!("the block inside is {}", stored.block().cidr())))
            }
            Ok(_) => None,
        };
        if let Some((code, what)) = wrong {
            self.done.findings.push(Finding::new(code, Subject::Block(cidr), what));
            self.blocks.note(cidr, None);
        } else if let Ok(stored) = read {
            self.inspect(cidr, &stored);
        }
    }

    fn inspect(&mut self, cidr: IpNet, stored: &StoredBlock) {
        let (block, flaws) = (stored.block(), stored.flaws());
        let is_sound = flaws.dangling.is_empty();
        tell_flaws(block, &flaws, &mut self.done.findings);
        let owner = block.owner();
        let owner_is_gone = owner.as_ref().and_then(Owner::node).is_some_and(|node| self.around.is_gone(node));
        self.find_place(cidr, block.length(), is_sound && block.is_empty());
        self.find_owner(block, owner.as_ref(), owner_is_gone, is_sound);
        let about = BlockSummary::of(block, owner_is_gone);
        let index = self.blocks.note(cidr, Some(about));
        self.inspect_addresses(block, index);
        if self.done.cluster.is_some() {
            let is_bridged = self.around.pool_of(cidr).is_some_and(|pool| self.around.is_bridged(pool));
            self.secondary.add(block, is_bridged);
        }
    }

    /// Reports a block that lies in no pool, or whose size differs from the pool's block size.
    fn find_place(&mut self, cidr: IpNet, length: u8, is_empty: bool) {
        let (code, what) = match self.around.pool_of(cidr) {
            None => (Code::BlockOutsidePools, "no pool has it".to_owned()),
            Some(pool) if pool.prefix_length().is_some() && pool.length() != length => (
                Code::BlockOfOtherSize,
                format!("pool {} has prefixes of /{}, and the block of /{length}", pool.name(), pool.length()),
            ),
            Some(pool) if pool.block_size() != cidr.prefix_len() => {
                (Code::BlockOfOtherSize, format!("pool {} has blocks of /{}", pool.name(), pool.block_size()))
            }
            Some(_) => return,
        };
        let what = if is_empty { format!("{what}; it is empty") } else { format!("{what}; it is in use") };
        self.done.findings.push(Finding::new(code, Subject::Block(cidr), what).mendable(is_empty));
    }

    fn find_owner(&mut self, block: &Block, owner: Option<&Owner>, is_gone: bool, is_sound: bool) {
        let is_empty = is_sound && block.is_empty();
        let (code, what, mendable) = match owner {
            None if is_empty => (Code::EmptyBlock, "it has no owner, and no address of it is held".to_owned(), true),
            Some(owner) if is_gone => (Code::OwnerGone, format!("{owner} is not registered"), is_empty),
            Some(Owner::Other(text)) => (Code::OddOwner, format!("its owner is {text:?}"), is_sound),
            Some(Owner::Host(name) | Owner::Virtual(name)) if name.is_empty() => {
                (Code::OddOwner, "its owner has no name".to_owned(), is_sound)
            }
            _ => return,
        };
        let finding = Finding::new(code, Subject::Block(block.cidr()), what);
        self.done.findings.push(finding.mendable(mendable));
    }

    /// Checks all addresses of a block that are not free.
    fn inspect_addresses(&mut self, block: &Block, index: u32) {
        let mut seen = AddressFaults::default();
        let rest = Duration::seconds(self.around.cooldown_seconds().max(0));
        let ahead = if rest.is_zero() { MAX_CLOCK_LEAD } else { rest };
        for (ip, entry) in block.allocated() {
            self.endpoints.see(block.unit_of(ip), entry);
            let cooling = entry.released_at();
            if cooling.is_some_and(|at| at - self.now > ahead) {
                seen.future.note(ip);
            }
            let (borrowed, node_gone) = match cooling {
                Some(_) => {
                    self.done.counts.cooling += 1;
                    (false, false)
                }
                None => self.inspect_held(block, index, ip, entry, &mut seen),
            };
            if self.keep == AddressReporting::Addresses {
                let allocated = allocated(block, ip, entry, borrowed, node_gone);
                self.done.allocations.push(allocated);
            }
        }
        seen.add_findings(block.cidr(), &mut self.done.findings);
    }

    /// Checks a held address, and returns two flags: whether it is borrowed, and whether its holder's node is gone.
    fn inspect_held(
        &mut self,
        block: &Block,
        index: u32,
        ip: IpAddr,
        entry: &Attribute,
        seen: &mut AddressFaults,
    ) -> (bool, bool) {
        self.done.counts.held += 1;
        self.workloads.note(ip, entry, index);
        match entry.handle().filter(|id| !id.is_empty()) {
            Some(id) => self.handles.note(id, index),
            // A sticky address that waits for its workload has no handle.
            None if waits_until(entry).is_some() => {}
            None => seen.without_handle.note(ip),
        }
        if block.is_reserved(ip, self.around.reserved()) {
            seen.reserved.note(ip);
        }
        let Some(node) = entry.node() else { return (false, false) };
        let borrowed = block.owner().as_ref().and_then(Owner::node).is_some_and(|owner| owner != node);
        let gone = self.around.is_gone(node);
        self.done.counts.borrowed += usize::from(borrowed);
        if gone {
            self.done.counts.of_gone_nodes += 1;
            self.blocks.note_gone(node, ip);
        } else {
            self.endpoints.find_lack(ip, entry, self.now);
        }
        (borrowed, gone)
    }
}

/// The number of addresses of a block that have a certain fault, and the first of these addresses.
#[derive(Default)]
struct AddressSample {
    count: u64,
    first: Option<IpAddr>,
}

impl AddressSample {
    fn note(&mut self, ip: IpAddr) {
        self.count += 1;
        self.first.get_or_insert(ip);
    }
}

/// Faults of a block's addresses, each kind with the number of affected addresses and the first of them.
#[derive(Default)]
struct AddressFaults {
    future: AddressSample,
    without_handle: AddressSample,
    reserved: AddressSample,
}

impl AddressFaults {
    fn add_findings(self, cidr: IpNet, findings: &mut Vec<Finding>) {
        let kinds = [
            (Code::ReleasedInFuture, self.future, "in cooldown since a time to come", true),
            (Code::NoHandle, self.without_handle, "held without a handle", false),
            (Code::ReservedInUse, self.reserved, "reserved and held", false),
        ];
        for (code, some, what, mendable) in kinds {
            if let Some(first) = some.first {
                let what = format!("{} {what}, the first is {first}", addresses(some.count));
                findings.push(Finding::new(code, Subject::Block(cidr), what).mendable(mendable));
            }
        }
    }
}

fn allocated(block: &Block, ip: IpAddr, entry: &Attribute, borrowed: bool, node_gone: bool) -> AllocatedAddress {
    AllocatedAddress {
        ip,
        handle: entry.handle().map(str::to_owned),
        sequence_number: block.sequence_number_of(ip),
        attributes: entry.attributes_with_network(),
        alternate_attributes: entry.alternate_attributes().clone(),
        cooling: entry.released_at().is_some(),
        borrowed,
        node_gone,
    }
}

fn tell_flaws(block: &Block, flaws: &BlockFlaws, findings: &mut Vec<Finding>) {
    let cidr = block.cidr();
    let is_sound = flaws.dangling.is_empty();
    let lists = [
        (Code::DanglingAllocation, &flaws.dangling, "assigned to a holder that is not on record"),
        (Code::QueuedTwice, &flaws.twice, "in the queue more than once"),
        (Code::NotQueued, &flaws.lost, "free and not in the queue"),
        (Code::QueuedButHeld, &flaws.taken, "held and in the queue"),
    ];
    for (code, ordinals, what) in lists {
        if let Some(first) = ordinals.first().and_then(|ordinal| block.address(*ordinal)) {
            let what = format!("{} {what}, the first is {first}", addresses(ordinals.len() as u64));
            findings.push(Finding::new(code, Subject::Block(cidr), what).mendable(is_sound));
        }
    }
    let numbers = flaws.outside.iter().map(ToString::to_string).collect::<Vec<_>>();
    let texts = [
        (Code::QueuedOutside, numbers.len(), format!("the queue has {}", numbers.join(", "))),
        (Code::StraySequenceNumber, flaws.numbers.len(), format!("there are numbers for {}", flaws.numbers.join(", "))),
        (Code::UnusedAttribute, flaws.unused, format!("{} of its entries are not used", flaws.unused)),
    ];
    for (code, count, what) in texts {
        if count > 0 {
            findings.push(Finding::new(code, Subject::Block(cidr), what).mendable(is_sound));
        }
    }
}
