//! Keeps facts about blocks in memory during an inspection. The inspection compares affinities, handles, workload
//! records and the blocks with each other. In a store that Calico reads, this module also finds the addresses of
//! secondary networks that Calico would change or release.
//!
//! A network is secondary if any of its addresses has the attribute `margay.io/node`. If all addresses of a secondary
//! network were assigned by a version of Margay without the attribute `margay.io/node`, the network is not recognized
//! as secondary.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipam_core::attachment::{NAMESPACE, NODE, OWN_NODE, POD};
use ipam_core::model::{Affinity, AffinityState, Block, Document, Owner, Pool};
use ipam_core::net::{bounds, nth};
use ipnet::IpNet;
use kv::Kv;

use super::finding::{Code, Finding, Inspection, Subject, addresses};

/// Facts about all blocks of a store, in the order in which the inspection has read the blocks.
#[derive(Debug, Default)]
pub(super) struct BlockFacts {
    notes: Vec<BlockNote>,
    by_cidr: HashMap<IpNet, u32>,
    /// For each node that is gone: the number of addresses held for the node, and the first of these addresses.
    gone: BTreeMap<String, (u64, IpAddr)>,
}

#[derive(Debug)]
struct BlockNote {
    cidr: IpNet,
    /// Facts about the block's addresses and owner; `None` if the block's value cannot be decoded.
    about: Option<BlockSummary>,
}

#[derive(Debug)]
pub(super) struct BlockSummary {
    owner: Option<Owner>,
    has_affinity: bool,
    owner_is_gone: bool,
    /// A bit set with one bit per ordinal of the block; a set bit means that the address is allocated.
    allocated: Box<[u64]>,
    /// Number of host bits of each prefix, in a block of prefixes; 0 for a block of single addresses.
    host_bits: u8,
}

/// Whether a block is stored and can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockPresence {
    /// No block with this CIDR is stored.
    Absent,
    /// The block is stored, but its value cannot be decoded.
    Unreadable,
    /// The block is stored and was decoded.
    Readable,
}

/// Returns a bit set with one bit per ordinal of the block; a set bit means that the address is allocated.
fn bits(block: &Block) -> Box<[u64]> {
    let mut bits = vec![0_u64; block.capacity().div_ceil(64)];
    for ordinal in block.allocated().filter_map(|(ip, _)| block.ordinal(ip)) {
        if let Some(word) = bits.get_mut(ordinal / 64) {
            *word |= 1 << (ordinal % 64);
        }
    }
    bits.into_boxed_slice()
}

impl BlockSummary {
    /// Collects the facts about a block that later comparisons of an inspection need.
    pub(super) fn of(block: &Block, owner_is_gone: bool) -> Self {
        let host_bits = block.family().bits() - block.length();
        Self { owner: block.owner(), has_affinity: false, owner_is_gone, allocated: bits(block), host_bits }
    }

    fn ordinals(&self) -> impl Iterator<Item = u128> {
        (0..self.allocated.len() as u128 * 64).filter(|ordinal| self.has(*ordinal))
    }

    fn has(&self, ordinal: u128) -> bool {
        let word = usize::try_from(ordinal / 64).ok().and_then(|word| self.allocated.get(word));
        word.is_some_and(|word| word >> (ordinal % 64) & 1 == 1)
    }
}

impl BlockFacts {
    /// Records an address that is held for a node that is gone.
    pub(super) fn note_gone(&mut self, node: &str, ip: IpAddr) {
        self.gone.entry(node.to_owned()).or_insert((0, ip)).0 += 1;
    }

    /// Adds the facts about a block, and returns the block's index.
    pub(super) fn note(&mut self, cidr: IpNet, about: Option<BlockSummary>) -> u32 {
        let index = u32::try_from(self.notes.len()).unwrap_or(u32::MAX);
        self.notes.push(BlockNote { cidr, about });
        self.by_cidr.insert(cidr, index);
        index
    }

    /// The CIDR of the block with this index.
    pub(super) fn cidr(&self, index: u32) -> IpNet {
        self.notes.get(index as usize).map(|note| note.cidr).unwrap_or_default()
    }

    /// Returns whether the block with this CIDR is stored and can be decoded.
    pub(super) fn find(&self, cidr: IpNet) -> BlockPresence {
        match self.by_cidr.get(&cidr).and_then(|index| self.notes.get(*index as usize)) {
            None => BlockPresence::Absent,
            Some(BlockNote { about: None, .. }) => BlockPresence::Unreadable,
            Some(_) => BlockPresence::Readable,
        }
    }

    /// True if the address lies in a block whose value cannot be decoded.
    pub(super) fn has_unreadable(&self, ip: IpAddr) -> bool {
        self.notes.iter().any(|note| note.about.is_none() && note.cidr.contains(&ip))
    }

    /// Compares an affinity with its block and the block's pool, after the caller has added all blocks of the store.
    pub(super) fn compare_affinity(
        &mut self,
        (owner, cidr): (&Owner, IpNet),
        pool: Option<&Pool>,
        kv: &Kv,
        findings: &mut Vec<Finding>,
    ) {
        let odd = pool.filter(|pool| pool.block_size() != cidr.prefix_len());
        let known = self.find(cidr);
        let index = self.by_cidr.get(&cidr).copied().unwrap_or(u32::MAX);
        let about = self.notes.get_mut(index as usize).and_then(|note| note.about.as_mut());
        let mut whose = "the block is not there".to_owned();
        let mut is_own = false;
        if let Some(about) = about {
            is_own = about.owner.as_ref() == Some(owner);
            about.has_affinity |= is_own;
            whose = match &about.owner {
                Some(other) => format!("the block is of {other}"),
                None => "the block has no owner".to_owned(),
            };
        }
        let (code, what) = match Affinity::decode(&kv.key, kv.value.as_bytes()).map(|affinity| affinity.state()) {
            Err(error) => (Code::UnreadableAffinity, error.reason().to_owned()),
            Ok(_) if known == BlockPresence::Absent && odd.is_some() => {
                let pool = odd.map(|pool| format!("pool {} has blocks of /{}", pool.name(), pool.block_size()));
                (Code::AffinityOfOtherSize, pool.unwrap_or_default())
            }
            Ok(AffinityState::Unknown) => (Code::AffinityUnknown, whose),
            Ok(AffinityState::Pending) => (Code::AffinityPending, whose),
            Ok(AffinityState::PendingDeletion) => (Code::AffinityPendingDeletion, whose),
            Ok(AffinityState::Confirmed) if known == BlockPresence::Absent => (Code::AffinityWithoutBlock, whose),
            Ok(AffinityState::Confirmed) if known == BlockPresence::Readable && !is_own => {
                (Code::AffinityOfOther, whose)
            }
            Ok(AffinityState::Confirmed) => return,
        };
        let finding = Finding::new(code, Subject::Affinity(owner.clone(), cidr), what);
        findings.push(finding.mendable(known != BlockPresence::Unreadable));
    }

    /// Compares the blocks with each other and with the affinities, after the caller has added all keys of the store.
    pub(super) fn finish(&mut self, done: &mut Inspection) {
        for note in &self.notes {
            let Some(BlockSummary { owner: Some(owner), has_affinity: false, owner_is_gone: false, .. }) = &note.about
            else {
                continue;
            };
            if matches!(owner, Owner::Host(name) | Owner::Virtual(name) if !name.is_empty()) {
                let what = format!("{owner} has no affinity to it");
                let finding = Finding::new(Code::OwnerWithoutAffinity, Subject::Block(note.cidr), what);
                done.findings.push(finding.mendable(true));
            }
        }
        for (node, (count, first)) in std::mem::take(&mut self.gone) {
            let what = format!("{} held for it, the first is {first}", addresses(count));
            done.findings.push(Finding::new(Code::HolderGone, Subject::Node(node), what));
        }
        self.find_overlaps(&mut done.findings);
    }

    /// Finds overlapping blocks. Two blocks overlap only if one of the blocks contains the other. Visits the blocks in
    /// order of their first address; if two blocks start at the same address, visits the larger block first. While the
    /// function visits a block, a stack holds all blocks that contain this block.
    fn find_overlaps(&self, findings: &mut Vec<Finding>) {
        let mut ordered: Vec<&BlockNote> = self.notes.iter().collect();
        ordered.sort_by_key(|note| (note.cidr.addr().is_ipv6(), bounds(note.cidr).0, note.cidr.prefix_len()));
        let mut around: Vec<&BlockNote> = Vec::new();
        for note in ordered {
            around.retain(|outer| outer.cidr.contains(&note.cidr));
            for outer in &around {
                let what = format!("block {} has it, too", outer.cidr);
                findings.push(Finding::new(Code::OverlappingBlocks, Subject::Block(note.cidr), what));
                find_twice(outer, note, findings);
            }
            around.push(note);
        }
    }
}

/// Finds the addresses that are assigned in both of two overlapping blocks.
fn find_twice(outer: &BlockNote, inner: &BlockNote, findings: &mut Vec<Finding>) {
    let (Some(out), Some(within)) = (&outer.about, &inner.about) else { return };
    let distance = bounds(inner.cidr).0 - bounds(outer.cidr).0;
    // The shifted ordinal is an offset inside the block, so the shift loses no bits.
    for place in within.ordinals().map(|ordinal| ordinal << within.host_bits) {
        let is_twice = out.has((distance + place) >> out.host_bits);
        if let Some(ip) = nth(inner.cidr, place).filter(|_| is_twice) {
            let what = format!("blocks {} and {} both have assigned it", outer.cidr, inner.cidr);
            findings.push(Finding::new(Code::AddressTwice, Subject::Address(ip), what));
        }
    }
}

/// Facts about blocks that may have addresses of secondary networks.
#[derive(Debug, Default)]
pub(super) struct SecondaryBlocks {
    /// Names of the CNI networks that are known not to be Calico's.
    known: BTreeSet<String>,
    notes: Vec<SecondaryNote>,
}

/// A block that may have addresses of a secondary network, with the numbers of its addresses by kind.
#[derive(Debug)]
struct SecondaryNote {
    cidr: IpNet,
    is_nodes: bool,
    /// True if a secondary network has used the block's pool, and Calico assigns from this pool only if a request names
    /// it.
    is_bridged: bool,
    /// Number of the block's addresses whose attributes use Margay's names.
    own: u64,
    /// Number of the block's addresses with Calico's attribute names, by network.
    calicos: BTreeMap<String, u64>,
    /// Number of the block's addresses without a recorded network, which Calico's own plugin has assigned.
    nameless: u64,
}

impl SecondaryBlocks {
    /// Counts the addresses of a block by network, separately for Margay's and Calico's attribute names.
    pub(super) fn add(&mut self, block: &Block, is_bridged: bool) {
        let is_nodes = matches!(block.owner(), Some(Owner::Host(name)) if !name.is_empty());
        let mut note =
            SecondaryNote { cidr: block.cidr(), is_nodes, is_bridged, own: 0, calicos: BTreeMap::new(), nameless: 0 };
        for (_, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            let network = entry.network();
            if entry.get(OWN_NODE).is_some() {
                note.own += 1;
                if let Some(network) = network.filter(|network| !self.known.contains(*network)) {
                    self.known.insert(network.to_owned());
                }
            }
            let names_of_calicos = [NODE, POD, NAMESPACE].iter().any(|name| entry.get(name).is_some());
            match network {
                Some(network) if names_of_calicos => *note.calicos.entry(network.to_owned()).or_default() += 1,
                None if entry.get(OWN_NODE).is_none() => note.nameless += 1,
                _ => {}
            }
        }
        // To save memory, `notes` has no item for blocks in which no address has a recorded network. Most blocks of a
        // cluster have only addresses of Calico, which record no network.
        if note.own > 0 || !note.calicos.is_empty() {
            self.notes.push(note);
        }
    }

    /// Reports the findings about secondary networks. Add all blocks before calling this: any block can show that a
    /// network is secondary.
    pub(super) fn finish(&self, findings: &mut Vec<Finding>) {
        for note in &self.notes {
            findings.extend(self.names(note));
            findings.extend(self.owner(note));
        }
    }

    /// Reports the secondary-network addresses in a block that Calico's kube-controllers could release by mistake.
    fn names(&self, note: &SecondaryNote) -> Option<Finding> {
        let known: Vec<(&String, &u64)> = note.calicos.iter().filter(|(name, _)| self.known.contains(*name)).collect();
        let count: u64 = known.iter().map(|(_, count)| **count).sum();
        let networks: Vec<String> = known.into_iter().map(|(name, _)| name.clone()).collect();
        let what = format!("{} of {}", addresses(count), networks.join(", "));
        let finding = Finding::new(Code::CalicosNames, Subject::Block(note.cidr), what);
        (count > 0).then(|| finding.mendable(true).with_networks(networks))
    }

    /// Reports a block that has addresses of secondary networks but is owned by a node itself, not by the node's
    /// secondary owner.
    fn owner(&self, note: &SecondaryNote) -> Option<Finding> {
        let (networks, others): (Vec<&String>, Vec<&String>) =
            note.calicos.keys().partition(|network| self.known.contains(*network));
        let networks: Vec<String> = networks.into_iter().cloned().collect();
        let is_of_known = note.own > 0 || !networks.is_empty();
        if !note.is_nodes || !(is_of_known || (note.is_bridged && note.nameless == 0)) {
            return None;
        }
        let (code, what) = match (&others[..], note.nameless) {
            ([], 0) => (Code::SecondaryOfNode, "all of its addresses are of such networks".to_owned()),
            (others, 0) if !is_of_known => {
                let names = others.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
                (Code::SecondaryOfNode, format!("whether {names} is Calico's is not known"))
            }
            (others, nameless) => {
                let count: u64 = others.iter().filter_map(|name| note.calicos.get(*name)).sum();
                (Code::MixedBlock, format!("{} of it may be Calico's", addresses(count + nameless)))
            }
        };
        let finding = Finding::new(code, Subject::Block(note.cidr), what);
        Some(finding.mendable(others.is_empty()).with_networks(networks))
    }
}
