//! Taking back what nobody uses any more.
//!
//! Runtimes forget to release addresses: at a reboot they never do, and a crash leaves some behind. Three kinds of
//! evidence tell that an address is not in use: it was given in an earlier boot; the network namespace that it was
//! given for is gone, and no interface holds it; the runtime's list of what there is does not have it. That no
//! interface holds an address is no evidence by itself: virtual machines and programs that have a network card to
//! themselves use addresses without one. Evidence comes from outside, and [`judge`], [`find_stale`] and [`find_unlisted`] decide
//! on it without any I/O. The order matters: what is held is read first, and evidence is gathered after that, so that
//! an address that is given meanwhile is no candidate.
//!
//! Only allocations that carry attributes of ours are ever candidates, and only those of the node that asks. Tunnel
//! addresses, those of load balancers and what Windows hosts keep have none; they are counted and left. The holdings of
//! a node that is gone for good are another matter: they are its [`DepartedNode`], whichever writer has assigned them.
//!
//! Leftovers are freed block by block, a commit for each, and only where handle, attributes and sequence number are
//! still what they were: each assignment changes the sequence number, also one that gives the same address once more.
//! The container's workload endpoint goes in that commit, too, where there is one.

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

/// Calico's attribute by which it tells addresses that are no workload's: those of tunnels, for one.
pub const TYPE: &str = "type";

/// An address that a node holds for an attachment, with our attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The address; of a prefix the first one.
    pub address: IpAddr,
    /// The address as a network, or the whole prefix.
    pub unit: IpNet,
    /// The block that it is in.
    pub block: IpNet,
    /// The handle that it is held under.
    pub handle: String,
    /// The number that each assignment of the address changes.
    pub sequence_number: u64,
    /// The network's name.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the container.
    pub interface: String,
    /// The boot that it was given in, where that is recorded.
    pub boot: Option<String>,
    /// The network namespace that it was given for, where that is recorded.
    pub netns: Option<String>,
    /// When it was given, as it is recorded.
    pub timestamp: Option<String>,
    /// All that is recorded with it.
    entry: Attribute,
}

/// The relation of an entry of a block to a node.
#[derive(Debug)]
enum EntryRelation {
    /// It is held by the node, with our attributes.
    Ours(Box<Allocation>),
    /// It is the node's, but without our attributes.
    Unmarked,
    /// It is the node's, but no workload's.
    Special,
    /// It rests, or is another node's.
    Other,
}

impl Allocation {
    /// The relation of an address to a node.
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
        // The network is known, so what is left of the handle is the container: nothing is split at a dot.
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

    /// When it was given, if that can be read.
    pub fn assigned_at(&self) -> Option<OffsetDateTime> {
        self.timestamp.as_deref().and_then(parse_go_string)
    }

    /// The unit that is freed as a whole: handle and interface.
    pub fn attachment(&self) -> (&str, &str) {
        (&self.handle, &self.interface)
    }
}

/// The holdings of a node, as of one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// The name under which the store knows the node.
    pub node: String,
    /// The allocations with our attributes, by block and address.
    pub allocations: Vec<Allocation>,
    /// How many addresses of the node carry no attributes of ours: what Calico itself assigned.
    pub unmarked: usize,
    /// How many addresses of the node are no container's: those of tunnels, load balancers, Windows, virtual machines, and
    /// those that wait for a workload.
    pub special: usize,
}

impl Holdings {
    /// Adds what a block has of the node's.
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
    /// All that a node holds, in its own blocks and in those of others, as of one revision. Read in pages.
    ///
    /// # Errors
    /// Those of the store. Damaged blocks are passed over, and the log says so.
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

    /// The verdict of the evidence on a node's holdings; see [`judge`].
    pub fn judge(&self, holdings: &Holdings, evidence: &Evidence) -> JudgedAllocations {
        judge(holdings, evidence, self.boot_time(evidence))
    }

    /// When the machine's boot began, on a store that other machines use too. There a node of the same name on another
    /// machine must not be taken for this one in an earlier boot.
    fn boot_time(&self, evidence: &Evidence) -> Option<OffsetDateTime> {
        (self.nodes() == Nodes::Registered).then(|| self.now() - evidence.up)
    }
}

/// How many blocks are read in one request.
const BLOCKS_PER_READ: usize = 32;

/// The part of a cluster's store that is read to find the addresses of a node. A store of one machine is read as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadScope {
    /// Blocks in which the node may hold something, besides those that it has an affinity to.
    pub blocks: BTreeSet<IpNet>,
    /// Whether all other blocks are gone through, too.
    pub scan: ScanScope,
}

/// Whether all blocks are gone through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScanScope {
    /// They are not.
    #[default]
    None,
    /// Those are that were written after this revision; unset for all. In a store that is behind this revision, all are.
    Since(Revision),
}

impl ReadScope {
    /// The node's own blocks and these.
    pub fn near(blocks: impl IntoIterator<Item = IpNet>) -> Self {
        Self { blocks: blocks.into_iter().map(|cidr| cidr.trunc()).collect(), scan: ScanScope::None }
    }
}

impl Ipam {
    /// The blocks that are read to find the addresses of a node: its own, and those that are remembered.
    pub fn read_scope_of(&self, node: &str) -> ReadScope {
        ReadScope::near(self.hints().map(|hints| hints.held(node)).unwrap_or_default())
    }

    /// The addresses that a node holds as far as they are in reach, and for a pass the revision up to which all blocks were gone through.
    /// Blocks are read as they are now, a few dozen in a request; nothing that is freed because of it depends on that they
    /// are of one revision.
    ///
    /// # Errors
    /// Those of the store. Damaged blocks are passed over, and the log says so.
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

    /// Shows each well-formed block in reach of a node of a cluster, once, and returns the revision from which on the blocks
    /// are.
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

    /// Shows blocks as they are now.
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

    /// Goes through all blocks but those that were seen, and returns the revision at which it did.
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

    /// Which blocks were written after a revision, by their keys.
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
            tracing::warn!(%error, "passing over a damaged block");
            None
        }
    }
}
