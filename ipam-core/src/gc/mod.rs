//! Frees addresses that are not used any more.
//!
//! Runtimes fail to release addresses: at a reboot they release none, and after a crash some remain. Three kinds of
//! evidence show that an address is unused. It was assigned in an earlier boot. Or its network namespace is gone, and
//! no interface has the address. Or the runtime's list of containers does not contain it. A missing interface alone is
//! no evidence, because virtual machines and programs with a network card of their own use addresses without an
//! interface.
//!
//! The evidence comes from outside. [`judge`], [`find_stale`] and [`find_unlisted`] decide on it without any I/O. The
//! order matters: holdings are read first, and evidence is gathered after that, so that an address that is assigned
//! meanwhile is no candidate.
//!
//! Only allocations with our attributes are candidates, and only those of the requesting node. Addresses of tunnels and
//! load balancers, and those that Windows hosts keep, lack these attributes; they are counted and left alone. A node
//! that is gone for good is different: all its holdings belong to its [`DepartedNode`], whichever program assigned
//! them.
//!
//! Leftovers are freed in one commit per block, and only if handle, attributes and sequence number are unchanged. Each
//! assignment changes the sequence number, even one that assigns the same address again. That commit also deletes the
//! container's workload endpoint, if one exists.

mod decide;
mod departed;
mod evidence;
mod hold;

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Content, Deadline, Key, Kv, Pages, Range, Revision, TxnRange};
use time::OffsetDateTime;

use crate::attachment::{BOOT, INTERFACE, NETNS, NETWORK, TIMESTAMP};
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

/// Calico's attribute for addresses that no workload holds, for example those of tunnels.
pub const TYPE: &str = "type";

/// An address that a node holds for an attachment, with our attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The address, or the first address of the prefix.
    pub address: IpAddr,
    /// The address as a network, or the whole prefix.
    pub unit: IpNet,
    /// The block that contains the address.
    pub block: IpNet,
    /// The handle that holds the address.
    pub handle: String,
    /// The sequence number, which each assignment of the address changes.
    pub sequence_number: u64,
    /// The network's name.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the container.
    pub interface: String,
    /// The boot in which it was assigned, if recorded.
    pub boot: Option<String>,
    /// The network namespace for which it was assigned, if recorded.
    pub netns: Option<String>,
    /// The time of the assignment, as recorded.
    pub timestamp: Option<String>,
    /// All attributes of the address.
    entry: Attribute,
}

/// The relation of an address to a node.
#[derive(Debug)]
enum EntryRelation {
    /// The node holds the address, with our attributes.
    Ours(Box<Allocation>),
    /// The node holds the address, without our attributes.
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
        // An entry that names no node counts for the owner of the block.
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
            (entry.get(NETWORK), entry.get(INTERFACE), entry.handle(), entry.node())
        else {
            return EntryRelation::Unmarked;
        };
        // The network is known, so the rest of the handle is the container id. Splitting at a dot would be ambiguous.
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

    /// The time of the assignment, if it can be parsed.
    pub fn assigned_at(&self) -> Option<OffsetDateTime> {
        self.timestamp.as_deref().and_then(parse_go_string)
    }

    /// Handle and interface, which identify the attachment. All addresses of an attachment are freed together.
    pub fn attachment(&self) -> (&str, &str) {
        (&self.handle, &self.interface)
    }
}

/// The holdings of a node, as of one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// The store's name for the node.
    pub node: String,
    /// The allocations with our attributes, by block and address.
    pub allocations: Vec<Allocation>,
    /// The number of addresses of the node without our attributes, which Calico assigned.
    pub unmarked: usize,
    /// The number of addresses of the node that no container holds: those of tunnels, load balancers, Windows and
    /// virtual machines, and those that wait for a workload.
    pub special: usize,
}

impl Holdings {
    /// Adds the node's addresses in a block.
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
    /// Reads all holdings of a node, in its own blocks and in other blocks, in pages of one revision.
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

    /// Judges a node's holdings by the evidence; see [`judge`].
    pub fn judge(&self, holdings: &Holdings, evidence: &Evidence) -> JudgedAllocations {
        judge(holdings, evidence, self.boot_time(evidence))
    }

    /// The time of the machine's boot, for a store that other machines use too. In such a store, a node with the same
    /// name on another machine must not be mistaken for an earlier boot of this one.
    fn boot_time(&self, evidence: &Evidence) -> Option<OffsetDateTime> {
        (self.nodes() == Nodes::Registered).then(|| self.now() - evidence.up)
    }
}

/// Number of blocks read in one request.
const BLOCKS_PER_READ: usize = 32;

/// The part of a cluster's store that is read to find a node's addresses. The store of a single machine is always read
/// as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadScope {
    /// Blocks in which the node may hold addresses, besides those to which it has an affinity.
    pub blocks: BTreeSet<IpNet>,
    /// Which other blocks are read too.
    pub scan: ScanScope,
}

/// Which blocks are scanned besides the node's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanScope {
    /// No others.
    #[default]
    None,
    /// All blocks written after this revision, or all blocks if it is unset. If the store is behind this revision, all
    /// blocks.
    Since(Revision),
}

impl ReadScope {
    /// The node's own blocks and these.
    pub fn near(blocks: impl IntoIterator<Item = IpNet>) -> Self {
        Self { blocks: blocks.into_iter().map(|cidr| cidr.trunc()).collect(), scan: ScanScope::None }
    }
}

impl Ipam {
    /// The blocks to read for the addresses of a node: its own, and the remembered ones of other owners.
    pub fn read_scope_of(&self, node: &str) -> ReadScope {
        ReadScope::near(self.hints().map(|hints| hints.held(node)).unwrap_or_default())
    }

    /// Reads the addresses that a node holds within a scope. For a scan, also returns the revision up to which all
    /// blocks were scanned. Blocks are read at their current state, a few dozen per request. Freeing addresses does not
    /// depend on all blocks being read at one revision.
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

    /// Passes each well-formed block in the scope of a cluster's node to `see`, once. Returns the revision at or after
    /// which the blocks were read.
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

    /// Passes blocks at their current state to `see`.
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

    /// Scans all blocks except the seen ones, and returns the revision of the scan.
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

    /// The blocks that were written after a revision, found by their keys.
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
            tracing::warn!(%error, "skipping a damaged block");
            None
        }
    }
}
