//! Blocks, and the affinities to them.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use ipam_core::model::{Affinity, AffinityState, Attribute, Block, Document, Flaws, Owner, StoredBlock};
use ipam_core::net::{bounds, nth};
use ipam_core::sticky::waits_until;
use ipnet::IpNet;
use kv::{Key, Kv};
use time::Duration;

use super::code::Code;
use super::finding::{AllocatedAddress, Finding, Inspection, Subject, addresses};
use super::{Inspector, Keep};

/// How far another machine's clock may be ahead of ours, where released addresses have no cooldown.
const AHEAD: Duration = Duration::MINUTE;

/// The facts kept of the blocks, in the order in which they were read.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    notes: Vec<Note>,
    by_cidr: HashMap<IpNet, u32>,
    /// How many addresses are held for nodes that are gone, and one of them.
    gone: BTreeMap<String, (u64, IpAddr)>,
}

#[derive(Debug)]
struct Note {
    cidr: IpNet,
    /// The block's own owner; `None` for one that cannot be read.
    about: Option<About>,
}

#[derive(Debug)]
struct About {
    owner: Option<Owner>,
    has_affinity: bool,
    owner_is_gone: bool,
    /// Which ordinals are allocated, a bit for each.
    allocated: Box<[u64]>,
    /// How many bits of an address an ordinal does not tell: those inside a prefix.
    host_bits: u8,
}

/// Whether a block was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// There is none.
    Absent,
    /// There is something that is no block.
    Unreadable,
    /// It was.
    Readable,
}

impl Inspector {
    /// Looks at a block.
    pub(super) fn add_block(&mut self, cidr: IpNet, key: &Key, value: &[u8]) {
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
        let host_bits = block.family().bits() - block.length();
        let about = About { owner, has_affinity: false, owner_is_gone, allocated: bits(block), host_bits };
        let index = self.blocks.note(cidr, Some(about));
        self.inspect_addresses(block, index);
        if self.done.cluster.is_some() {
            let is_bridged = self.around.pool_of(cidr).is_some_and(|pool| self.around.is_bridged(pool));
            self.secondary.add(block, is_bridged);
        }
    }

    /// Compares a block with the pools.
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
            None if is_empty => (Code::EmptyBlock, "nobody owns it, and no address of it is held".to_owned(), true),
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

    /// Looks at every address that is not free.
    fn inspect_addresses(&mut self, block: &Block, index: u32) {
        let mut seen = Seen::default();
        let rest = Duration::seconds(self.around.cooldown_seconds().max(0));
        let ahead = if rest.is_zero() { AHEAD } else { rest };
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
            if self.keep == Keep::Addresses {
                let allocated = allocated(block, ip, entry, borrowed, node_gone);
                self.done.allocations.push(allocated);
            }
        }
        seen.tell(block.cidr(), &mut self.done.findings);
    }

    /// Looks at an address that somebody holds; says whether it is borrowed, and whether its node is gone.
    fn inspect_held(
        &mut self,
        block: &Block,
        index: u32,
        ip: IpAddr,
        entry: &Attribute,
        seen: &mut Seen,
    ) -> (bool, bool) {
        self.done.counts.held += 1;
        self.workloads.note(ip, entry, index);
        match entry.handle().filter(|id| !id.is_empty()) {
            Some(id) => self.handles.note(id, index),
            // An address that waits for its workload has none.
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
            self.blocks.gone.entry(node.to_owned()).or_insert((0, ip)).0 += 1;
        } else {
            self.endpoints.find_lack(ip, entry, self.now);
        }
        (borrowed, gone)
    }
}

/// Some addresses of a block: how many, and the first.
#[derive(Default)]
struct Several {
    count: u64,
    first: Option<IpAddr>,
}

impl Several {
    fn note(&mut self, ip: IpAddr) {
        self.count += 1;
        self.first.get_or_insert(ip);
    }
}

/// The findings that concern several addresses of a block.
#[derive(Default)]
struct Seen {
    future: Several,
    without_handle: Several,
    reserved: Several,
}

impl Seen {
    fn tell(self, cidr: IpNet, findings: &mut Vec<Finding>) {
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
        attributes: entry.attributes().clone(),
        alternate_attributes: entry.alternate_attributes().clone(),
        cooling: entry.released_at().is_some(),
        borrowed,
        node_gone,
    }
}

fn tell_flaws(block: &Block, flaws: &Flaws, findings: &mut Vec<Finding>) {
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

/// Which ordinals of a block are allocated.
fn bits(block: &Block) -> Box<[u64]> {
    let mut bits = vec![0_u64; block.capacity().div_ceil(64)];
    for ordinal in block.allocated().filter_map(|(ip, _)| block.ordinal(ip)) {
        if let Some(word) = bits.get_mut(ordinal / 64) {
            *word |= 1 << (ordinal % 64);
        }
    }
    bits.into_boxed_slice()
}

impl About {
    /// The allocated ordinals.
    fn ordinals(&self) -> impl Iterator<Item = u128> {
        (0..self.allocated.len() as u128 * 64).filter(|ordinal| self.has(*ordinal))
    }

    fn has(&self, ordinal: u128) -> bool {
        let word = usize::try_from(ordinal / 64).ok().and_then(|word| self.allocated.get(word));
        word.is_some_and(|word| word >> (ordinal % 64) & 1 == 1)
    }
}

impl Blocks {
    fn note(&mut self, cidr: IpNet, about: Option<About>) -> u32 {
        let index = u32::try_from(self.notes.len()).unwrap_or(u32::MAX);
        self.notes.push(Note { cidr, about });
        self.by_cidr.insert(cidr, index);
        index
    }

    /// The network of a block that was read.
    pub(super) fn cidr(&self, index: u32) -> IpNet {
        self.notes.get(index as usize).map(|note| note.cidr).unwrap_or_default()
    }

    /// Whether a block was read.
    pub(super) fn find(&self, cidr: IpNet) -> Known {
        match self.by_cidr.get(&cidr).and_then(|index| self.notes.get(*index as usize)) {
            None => Known::Absent,
            Some(Note { about: None, .. }) => Known::Unreadable,
            Some(_) => Known::Readable,
        }
    }

    /// True if what is stored as the block of an address cannot be read.
    pub(super) fn has_unreadable(&self, ip: IpAddr) -> bool {
        self.notes.iter().any(|note| note.about.is_none() && note.cidr.contains(&ip))
    }

    /// Compares an affinity with its block; all blocks were read before.
    pub(super) fn compare_affinity(&mut self, owner: &Owner, cidr: IpNet, kv: &Kv, findings: &mut Vec<Finding>) {
        let known = self.find(cidr);
        let index = self.by_cidr.get(&cidr).copied().unwrap_or(u32::MAX);
        let about = self.notes.get_mut(index as usize).and_then(|note| note.about.as_mut());
        let mut whose = "the block is not there".to_owned();
        let mut is_own = false;
        if let Some(about) = about {
            is_own = about.owner.as_ref() == Some(owner);
            about.has_affinity |= is_own;
            let of = about.owner.as_ref().map_or("nobody's".to_owned(), |owner| format!("of {owner}"));
            whose = format!("the block is {of}");
        }
        let (code, what) = match Affinity::decode(&kv.key, kv.value.as_bytes()).map(|affinity| affinity.state()) {
            Err(error) => (Code::UnreadableAffinity, error.reason().to_owned()),
            Ok(AffinityState::Unknown) => (Code::AffinityUnknown, whose),
            Ok(AffinityState::Pending) => (Code::AffinityPending, whose),
            Ok(AffinityState::PendingDeletion) => (Code::AffinityPendingDeletion, whose),
            Ok(AffinityState::Confirmed) if known == Known::Absent => (Code::AffinityWithoutBlock, whose),
            Ok(AffinityState::Confirmed) if known == Known::Readable && !is_own => (Code::AffinityOfOther, whose),
            Ok(AffinityState::Confirmed) => return,
        };
        let finding = Finding::new(code, Subject::Affinity(owner.clone(), cidr), what);
        findings.push(finding.mendable(known != Known::Unreadable));
    }

    /// Compares the blocks with each other, and with the affinities.
    pub(super) fn finish(&mut self, done: &mut Inspection) {
        for note in &self.notes {
            let Some(About { owner: Some(owner), has_affinity: false, owner_is_gone: false, .. }) = &note.about else {
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

    /// Networks overlap only if one has all of the other: in ascending order, larger ones first, those that have a
    /// block are on the stack.
    fn find_overlaps(&self, findings: &mut Vec<Finding>) {
        let mut ordered: Vec<&Note> = self.notes.iter().collect();
        ordered.sort_by_key(|note| (note.cidr.addr().is_ipv6(), bounds(note.cidr).0, note.cidr.prefix_len()));
        let mut around: Vec<&Note> = Vec::new();
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

/// Finds the addresses that both of two blocks have assigned.
fn find_twice(outer: &Note, inner: &Note, findings: &mut Vec<Finding>) {
    let (Some(out), Some(within)) = (&outer.about, &inner.about) else { return };
    let distance = bounds(inner.cidr).0 - bounds(outer.cidr).0;
    // The host bits of an ordinal are those of a shorter prefix than the block's: nothing is shifted out.
    for place in within.ordinals().map(|ordinal| ordinal << within.host_bits) {
        let is_twice = out.has((distance + place) >> out.host_bits);
        if let Some(ip) = nth(inner.cidr, place).filter(|_| is_twice) {
            let what = format!("blocks {} and {} both have assigned it", outer.cidr, inner.cidr);
            findings.push(Finding::new(Code::AddressTwice, Subject::Address(ip), what));
        }
    }
}
