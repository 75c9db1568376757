//! The faults inside a block, and at its place.

use std::net::IpAddr;

use ipam_core::model::{Attribute, Block, Flaws, Owner, StoredBlock};
use ipam_core::sticky::waits_until;
use ipnet::IpNet;
use kv::Key;
use time::Duration;

use super::block_facts::About;
use super::code::Code;
use super::finding::{AllocatedAddress, Finding, Subject, addresses};
use super::{Inspector, Keep};

/// How far another machine's clock may be ahead of ours, where released addresses have no cooldown.
const AHEAD: Duration = Duration::MINUTE;

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
        let about = About::of(block, owner_is_gone);
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
            self.blocks.note_gone(node, ip);
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
