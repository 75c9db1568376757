//! Frees addresses that are no longer in use.
//!
//! Container runtimes fail to release some addresses: at a reboot they release none, and after a crash some remain. An
//! address assigned in an earlier boot of the machine is regarded as unused. Besides such an address, an address counts
//! as unused if its network namespace is gone and no interface has it, or if the container runtime does not list its
//! container. A missing interface alone is not enough evidence, because virtual machines and programs with a network
//! card of their own use addresses without an interface.
//!
//! The callers of `gc` gather the evidence of what is in use on the machine. [`judge`], [`find_stale`] and
//! [`find_unlisted`] decide on the evidence without any I/O. Callers must read a node's holdings before they gather the
//! evidence. If the evidence were gathered first, an address that was assigned before the holdings are read could be
//! freed.
//!
//! Only allocations that have Margay's attributes and belong to the requesting node can be freed. Addresses of tunnels
//! and load balancers, and addresses that Windows hosts reserve for themselves, lack Margay's attributes, so they are
//! counted, but not freed. For a permanently removed node, [`DepartedNode`] contains all holdings, regardless of the
//! program that assigned the addresses.
//!
//! Leftover addresses are freed in one commit per block, and only if their handle, attributes and sequence number are
//! unchanged. Each assignment changes the sequence number, even an assignment of the same address to the same holder.
//! The commit that frees an address also deletes the workload endpoint, if any, of the address's container.

mod decide;
mod departed;
mod evidence;
mod hold;

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Content, Deadline, Key, Kv, Pages, Range, Revision, TxnRange};
use time::OffsetDateTime;

use crate::attachment::{BOOT, INTERFACE, NETNS, TIMESTAMP};
use crate::boxed_future;
use crate::error::Result;
use crate::ipam::{Ipam, Nodes, transact};
use crate::model::{Attribute, Block, Document, Owner, WINDOWS_RESERVED_HANDLE, handle_id, keys};
use crate::sticky::waits_until;
use crate::timestamps::parse_go_string;
use crate::usage::{SnapshotReader, in_time, reread};
use crate::vm::is_vms;

pub use decide::{
    JudgedAllocations, ListedAttachment, MIN_STALE_AGE, RuntimeList, StaleAllocations, UnlistedAllocations, find_stale,
    find_unlisted, judge,
};
pub use departed::{BlockPart, DepartedNode, DepartedNodes, HandOverResult, KnownNodes};
pub use evidence::{Evidence, LivenessSource};
pub use hold::{
    FreeResult, Hold, MAX_ENDPOINTS_MOVED_PER_COMMIT, MAX_ENDPOINTS_PER_COMMIT, NodeEndpoint, batches, with_endpoints,
};
pub(crate) use hold::{Leftover, Leftovers, is_short};

/// Calico's attribute that marks addresses that no workload holds, for example addresses of tunnels.
pub const TYPE: &str = "type";

/// An address that a node holds for an attachment, with Margay's attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The held address, or the first address of the held prefix.
    pub address: IpAddr,
    /// The held address or prefix as a CIDR.
    pub unit: IpNet,
    /// The block that contains the address.
    pub block: IpNet,
    /// The handle that holds the address.
    pub handle: String,
    /// The sequence number of the address, which changes with each assignment of the address.
    pub sequence_number: u64,
    /// The name of the attachment's CNI network.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The name of the container's interface.
    pub interface: String,
    /// The boot in which the address was assigned, if recorded.
    pub boot: Option<String>,
    /// The network namespace for which the address was assigned, if recorded.
    pub netns: Option<String>,
    /// The recorded time of the address's assignment.
    pub timestamp: Option<String>,
    /// The stored block entry of the address, with all attributes.
    entry: Attribute,
}

/// Whether the node whose holdings are being collected holds an address of a block.
#[derive(Debug)]
enum EntryRelation {
    Ours(Box<Allocation>),
    Unmarked,
    /// The node holds the address, but not for a workload.
    Special,
    /// The address is in cooldown, or another node holds it.
    Other,
}

impl Allocation {
    fn of(block: &Block, address: IpAddr, entry: &Attribute, node: &str) -> EntryRelation {
        if entry.released_at().is_some() {
            return EntryRelation::Other;
        }
        // An address whose entry names no node counts as held by the owner of the block.
        let owner = || block.owner().as_ref().and_then(Owner::node) == Some(node);
        if !entry.node().map_or_else(owner, |named| named == node) {
            return EntryRelation::Other;
        }
        let windows = entry.handle_id().is_some_and(|id| id.eq_ignore_ascii_case(WINDOWS_RESERVED_HANDLE));
        if windows
            || is_vms(entry)
            || waits_until(entry).is_some()
            || entry.get(TYPE).is_some()
            || !entry.alternate_attributes().is_empty()
        {
            return EntryRelation::Special;
        }
        let (Some(network), Some(interface), Some(handle), Some(_)) =
            (entry.network(), entry.get(INTERFACE), entry.handle(), entry.node())
        else {
            return EntryRelation::Unmarked;
        };
        // The block entry records the network's name; removing this name from the handle leaves the container id.
        // Splitting the handle at a dot would be ambiguous, because network names and container ids may contain dots.
        let Some(container) = handle.strip_prefix(&handle_id(network, "")).filter(|id| !id.is_empty()) else {
            return EntryRelation::Unmarked;
        };
        EntryRelation::Ours(Box::new(Self {
            address,
            unit: block.unit_of(address),
            block: block.cidr(),
            handle: handle.to_owned(),
            sequence_number: block.sequence_number_of(address),
            network: network.to_owned(),
            container: container.to_owned(),
            interface: interface.to_owned(),
            boot: entry.get(BOOT).map(str::to_owned),
            netns: entry.get(NETNS).map(str::to_owned),
            timestamp: entry.get(TIMESTAMP).map(str::to_owned),
            entry: entry.clone(),
        }))
    }

    /// Returns the time at which the address was assigned, if the recorded time can be parsed.
    pub fn assigned_at(&self) -> Option<OffsetDateTime> {
        self.timestamp.as_deref().and_then(parse_go_string)
    }

    /// Returns the handle and the interface of the allocation, which identify its attachment. All addresses of an
    /// attachment are freed together.
    pub fn attachment(&self) -> (&str, &str) {
        (&self.handle, &self.interface)
    }
}

/// The addresses that a node holds, at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// The name by which the store knows the node.
    pub node: String,
    /// The allocations with Margay's attributes, ordered by block and address.
    pub allocations: Vec<Allocation>,
    /// The number of the node's addresses without Margay's attributes, which Calico assigned.
    pub unmarked: usize,
    /// The number of the node's addresses that no container holds: addresses of tunnels, load balancers, Windows hosts
    /// and virtual machines, and waiting sticky addresses.
    pub special: usize,
}

impl Holdings {
    /// Adds the addresses that the node holds in a block to the holdings.
    fn add(&mut self, block: &Block) {
        for (address, entry) in block.allocated() {
            match Allocation::of(block, address, entry, &self.node) {
                EntryRelation::Ours(allocation) => self.allocations.push(*allocation),
                EntryRelation::Unmarked => self.unmarked += 1,
                EntryRelation::Special => self.special += 1,
                EntryRelation::Other => {}
            }
        }
    }
}

impl Ipam {
    /// Reads all addresses that a node holds at one revision, page by page, both in the node's own blocks and in other
    /// blocks.
    ///
    /// # Errors
    /// Any store error. Damaged blocks are logged and skipped.
    #[boxed_future]
    pub async fn holdings(&self, node: &str, deadline: Deadline) -> Result<Holdings> {
        let known = transact!(self, deadline, |tx| self.known_name(tx, node).await)?;
        let read = || async {
            let mut holdings = Holdings { node: known.clone(), ..Holdings::default() };
            let blocks = Range::Prefix(keys::blocks_prefix(None));
            self.for_each(blocks, &mut SnapshotReader::new(deadline), |block: Block| holdings.add(&block)).await?;
            Ok(holdings)
        };
        Ok(reread(read).await?)
    }

    /// Judges a node's holdings by evidence of the machine; see [`judge`].
    pub fn judge(&self, holdings: &Holdings, evidence: &Evidence) -> JudgedAllocations {
        judge(holdings, evidence, self.boot_time(evidence))
    }

    /// Returns the boot time of this machine, or `None` if no other machine uses the store. In a shared store, another
    /// machine with the same node name must not be mistaken for an earlier boot of this machine.
    fn boot_time(&self, evidence: &Evidence) -> Option<OffsetDateTime> {
        (self.nodes() == Nodes::Registered).then(|| self.now() - evidence.up)
    }
}

const BLOCKS_PER_READ: usize = 32;

/// Which blocks of a cluster's store are read to find a node's addresses. In the store of a single machine, all blocks
/// are read regardless of the read scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadScope {
    /// Blocks in which the node may hold addresses, besides the blocks to which the node has an affinity.
    pub blocks: BTreeSet<IpNet>,
    /// Which other blocks to scan, in addition to the node's own blocks and `blocks`.
    pub scan: ScanScope,
}

/// Which blocks are read besides the node's own blocks and [`ReadScope::blocks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanScope {
    /// Only the node's own blocks and [`ReadScope::blocks`] are read.
    #[default]
    None,
    /// Reads all blocks that were written after the given revision. All blocks are read if the revision is unset, or is
    /// newer than the store's revision, for example after a restored backup.
    Since(Revision),
}

impl ReadScope {
    /// Creates a read scope of the node's own blocks and the given blocks, without a scan.
    pub fn near(blocks: impl IntoIterator<Item = IpNet>) -> Self {
        Self { blocks: blocks.into_iter().map(|cidr| cidr.trunc()).collect(), scan: ScanScope::None }
    }
}

impl Ipam {
    /// Returns the read scope for the addresses of a node: the node's own blocks, and the blocks of other owners that
    /// the hints remember.
    pub fn read_scope_of(&self, node: &str) -> ReadScope {
        ReadScope::near(self.hints().map(|hints| hints.held(node)).unwrap_or_default())
    }

    /// Reads the addresses that a node holds within a read scope. If the read scope includes a scan of all blocks, also
    /// returns the revision up to which all blocks were scanned. Each block is read in its current state, a few dozen
    /// per request. A scan that looks for addresses to free need not read all blocks at one revision.
    ///
    /// # Errors
    /// Any store error. Damaged blocks are logged and skipped.
    #[boxed_future]
    pub async fn holdings_within(
        &self,
        node: &str,
        reach: &ReadScope,
        deadline: Deadline,
    ) -> Result<(Holdings, Option<Revision>)> {
        if self.nodes() == Nodes::FirstSeen {
            return Ok((self.holdings(node, deadline).await?, None));
        }
        let mut holdings = Holdings { node: node.to_owned(), ..Holdings::default() };
        let revision = self.read_near(node, reach, deadline, |block| holdings.add(&block)).await?;
        Ok((holdings, matches!(reach.scan, ScanScope::Since(_)).then_some(revision)))
    }

    /// Calls `see` once for each well-formed block in the read scope of a cluster's node. Returns a store revision; all
    /// blocks were read at this revision or later.
    pub(crate) async fn read_near(
        &self,
        node: &str,
        reach: &ReadScope,
        deadline: Deadline,
        mut see: impl FnMut(Block) + Send,
    ) -> Result<Revision> {
        let prefixes = Owner::all_of(node).into_iter().filter_map(|owner| keys::affinities_prefix(&owner, None));
        let affinities: Vec<Range> = prefixes.map(Range::Prefix).collect();
        let (own, mut revision) = transact!(self, deadline, |tx| {
            tx.prefetch(Vec::new(), affinities.iter().cloned().map(TxnRange::keys_of).collect()).await?;
            let mut own = BTreeSet::new();
            for range in &affinities {
                let affine = tx.snapshot_keys(range).await?;
                own.extend(affine.iter().filter_map(keys::parse_affinity).map(|(_, cidr)| cidr));
            }
            Ok((own, tx.revision()))
        })?;
        let near: BTreeSet<IpNet> = own.into_iter().chain(reach.blocks.iter().copied()).collect();
        self.scan_blocks(near.iter().copied().collect(), deadline, &mut see).await?;
        if let ScanScope::Since(since) = reach.scan {
            revision = self.scan_blocks_written_since(since, &near, deadline, &mut see).await?;
        }
        Ok(revision)
    }

    /// Calls `see` with the current state of each given block.
    async fn scan_blocks(
        &self,
        blocks: Vec<IpNet>,
        deadline: Deadline,
        see: &mut (impl FnMut(Block) + Send),
    ) -> Result<()> {
        for some in blocks.chunks(BLOCKS_PER_READ) {
            let names: Vec<Key> = some.iter().map(|cidr| keys::block(*cidr)).collect();
            let found = transact!(self, deadline, |tx| Ok(tx.peek(&names, Content::Full).await?))?;
            found.iter().flatten().filter_map(decode).for_each(&mut *see);
            in_time(deadline)?;
        }
        Ok(())
    }

    /// Calls `see` with each block that was written after a revision, except blocks that were already seen. Returns the
    /// revision up to which the blocks were scanned.
    async fn scan_blocks_written_since(
        &self,
        since: Revision,
        seen: &BTreeSet<IpNet>,
        deadline: Deadline,
        see: &mut (impl FnMut(Block) + Send),
    ) -> Result<Revision> {
        let (written, at) = reread(|| self.written_since(since, seen, deadline)).await?;
        self.scan_blocks(written, deadline, see).await?;
        Ok(at)
    }

    /// Returns the blocks that were written after a revision and not seen yet. Reads only the keys of the blocks, not
    /// their values.
    async fn written_since(
        &self,
        since: Revision,
        seen: &BTreeSet<IpNet>,
        deadline: Deadline,
    ) -> kv::Result<(Vec<IpNet>, Revision)> {
        let mut pages = Pages::new(Range::Prefix(keys::blocks_prefix(None)), Revision::UNSET);
        pages = pages.with_content(Content::KeysOnly);
        let mut written = Vec::new();
        while let Some(page) = pages.next(&**self.store()).await? {
            let is_behind = pages.revision() < since;
            let is_new = |kv: &&Kv| is_behind || kv.mod_revision > since;
            let new = page.iter().filter(is_new).filter_map(|kv| keys::parse_block(&kv.key));
            written.extend(new.filter(|cidr| !seen.contains(cidr)));
            in_time(deadline)?;
        }
        Ok((written, pages.revision()))
    }
}

fn decode(kv: &Kv) -> Option<Block> {
    match Block::decode(&kv.key, kv.value.as_bytes()) {
        Ok(block) => Some(block),
        Err(error) => {
            tracing::warn!(%error, "skipping a stored block that cannot be decoded");
            None
        }
    }
}
