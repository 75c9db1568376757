//! Defines blocks: small CIDRs with a document that records the holder of each address.

mod owners;
mod release;
mod secondary;
mod sticky;
mod stored;

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Key, Value};
use serde::{Deserialize, Serialize};
use smol_str::{SmolStr, format_smolstr};
use time::{Duration, OffsetDateTime};

use super::attribute::Attribute;
use super::codec::{Document, Field, Malformed, Net, UnknownFields, document, from_json, to_json_of};
use super::keys;
use super::owner::Owner;
use super::prefixes::{is_of_prefixes, length_in_block};
use crate::net::{Count, Family, nth, number};
use crate::reservations::Reservations;
use crate::timestamps::{StoredTime, age, unix_nanos};

pub use owners::{ExpectedOwner, OtherOwner, OwnerChange, OwnerRefusal, OwnerUpdate};
pub use release::{ReleaseConflict, ReleaseConflictKind, ReleaseRequest, ReleaseResult};
pub use sticky::{StickyAddress, StickyRecord};
pub use stored::{BlockFlaws, StoredBlock};

/// The handle of the addresses that a Windows host reserves for itself in each of its blocks. A block counts as empty
/// if no handle other than `windows-reserved-ipam-handle` holds addresses in it. The Windows reservation handle is
/// compared case-insensitively.
pub const WINDOWS_RESERVED_HANDLE: &str = "windows-reserved-ipam-handle";

/// Maximum number of addresses in a block that this program can decode. Valid pools have at most 4096 addresses per
/// block.
pub const MAX_BLOCK_ADDRESSES: usize = 1 << 16;

document! {
    /// The stored document of a block.
    ///
    /// An address of a block is identified by its ordinal: the distance from the block's first address. In a block of
    /// prefixes ([`super::is_of_prefixes`]), each ordinal identifies a prefix, which is named by its first address.
    /// Each ordinal of a block is either allocated and refers to an [`Attribute`], or is in the list of free ordinals.
    /// The list of free ordinals is a queue: assignments take ordinals from its head, and releases append ordinals.
    ///
    /// **Invariant** of a block: there is one allocation slot per address, and each allocation refers to an existing
    /// attribute. The list of free ordinals contains each unallocated ordinal exactly once.
    ///
    /// The methods of a block change only the decoded block in memory, not the store. Call [`Self::bump`] exactly once
    /// before each write of the block.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Block {
        cidr: Net = "cidr",
        affinity: Field<String> = "affinity",
        affinity_claim_time: Field<StoredTime> = "affinity_claim_time",
        allocations: Vec<Option<usize>> = "allocations",
        unallocated: Vec<usize> = "unallocated",
        attributes: Field<Vec<Attribute>> = "attributes",
        sequence_number: Field<u64> = "sequenceNumber",
        sequence_numbers: Field<BTreeMap<SmolStr, u64>> = "sequenceNumberForAllocation",
        deleted: Field<bool> = "deleted",
    }
}

/// The addresses that a host reserves for itself at both ends of each new block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReserved {
    /// The number of reserved addresses at the start of the block.
    pub start: usize,
    /// The number of reserved addresses at the end of the block.
    pub end: usize,
    /// The handle that holds the reserved addresses, usually [`WINDOWS_RESERVED_HANDLE`].
    pub handle: String,
    /// The attributes of the reserved addresses.
    pub attributes: BTreeMap<String, String>,
}

/// The state of an address in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressState<'a> {
    /// The address is not in this block.
    Outside,
    /// The address has no holder, but may be reserved.
    Free,
    /// The address was released at the given time and is in cooldown.
    CoolingDown(OffsetDateTime),
    /// The address is held; the variant contains its block entry.
    Assigned(&'a Attribute),
}

/// The outcome of [`Block::apply_cooldown`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Cooldown {
    /// The addresses that are now free, because their cooldown is over.
    pub freed: Vec<IpAddr>,
    /// The number of release times and ends of waits that were too far in the future and were corrected. If
    /// `apply_cooldown` corrected a release time or the end of a wait, write the block even without other changes,
    /// because otherwise each read restarts the cooldown.
    pub moved: usize,
}

impl Block {
    /// Creates a block with all addresses free, except the addresses that the host reserves for itself. A block's
    /// sequence numbers start at the current time in nanoseconds, so even a block that is deleted and created again
    /// never repeats a sequence number.
    ///
    /// # Errors
    /// [`UnusableBlock`] if the CIDR is too large, or if the host reserves all addresses of the block.
    pub fn new(
        cidr: IpNet,
        owner: Option<&Owner>,
        now: OffsetDateTime,
        reserved: Option<&HostReserved>,
    ) -> Result<Self, UnusableBlock> {
        Self::of_length(cidr, Family::of_net(cidr).bits(), owner, now, reserved)
    }

    /// Creates a block whose ordinals are prefixes of the given length; see [`Self::new`].
    ///
    /// # Errors
    /// Any error of [`Self::new`].
    pub fn of_length(
        cidr: IpNet,
        length: u8,
        owner: Option<&Owner>,
        now: OffsetDateTime,
        reserved: Option<&HostReserved>,
    ) -> Result<Self, UnusableBlock> {
        let cidr = cidr.trunc();
        let size = capacity_of(cidr, length).ok_or(UnusableBlock::TooLarge(cidr))?;
        let mut block = Self {
            cidr: Net(cidr),
            affinity: Field::Null,
            affinity_claim_time: Field::Absent,
            allocations: vec![None; size],
            unallocated: (0..size).collect(),
            attributes: Field::Null,
            sequence_number: Field::Is(unix_nanos(now)),
            sequence_numbers: Field::Is(BTreeMap::new()),
            deleted: Field::Is(false),
            extra: UnknownFields::default(),
        };
        if let Some(reserved) = reserved {
            block.keep_for_host(reserved)?;
        }
        if let Some(owner) = owner {
            block.set_owner(owner, now);
        }
        Ok(block)
    }

    fn keep_for_host(&mut self, reserved: &HostReserved) -> Result<(), UnusableBlock> {
        let size = self.allocations.len();
        let end = size.checked_sub(reserved.end).filter(|end| *end > reserved.start);
        let end = end.ok_or(UnusableBlock::NothingLeft(self.cidr()))?;
        self.unallocated = (reserved.start..end).collect();
        if self.unallocated.len() == size {
            return Ok(());
        }
        let attribute = Attribute::new(Some(&reserved.handle), reserved.attributes.clone());
        let index = self.push_attribute(attribute);
        for (ordinal, slot) in self.allocations.iter_mut().enumerate() {
            if ordinal < reserved.start || ordinal >= end {
                *slot = Some(index);
            }
        }
        Ok(())
    }

    /// Returns the block's CIDR.
    pub fn cidr(&self) -> IpNet {
        self.cidr.0
    }

    /// Returns the address family of the block.
    pub fn family(&self) -> Family {
        Family::of_net(self.cidr())
    }

    /// Returns the owner, if the block has an owner.
    pub fn owner(&self) -> Option<Owner> {
        self.affinity.get().map(|text| Owner::from(text.as_str()))
    }

    /// True if the given owner owns the block.
    pub fn is_owned_by(&self, owner: &Owner) -> bool {
        self.owner().as_ref() == Some(owner)
    }

    /// Checks that the given owner may take addresses from the block under strict affinity.
    ///
    /// # Errors
    /// [`NotOwner`] if the block has another owner or no owner.
    pub fn require_owner(&self, owner: &Owner) -> Result<(), NotOwner> {
        match self.owner() {
            Some(other) if other == *owner => Ok(()),
            Some(_) => Err(NotOwner::Other),
            None => Err(NotOwner::Unowned(self.cidr())),
        }
    }

    /// Sets the owner of the block, with `now` as the time of the claim.
    pub fn set_owner(&mut self, owner: &Owner, now: OffsetDateTime) {
        self.affinity = Field::Is(owner.to_string());
        self.affinity_claim_time = Field::Is(StoredTime::new(now));
    }

    /// Removes the block's owner. Clearing the owner leaves the block's addresses assigned to their handles.
    pub fn clear_owner(&mut self) {
        self.affinity = Field::Null;
        self.affinity_claim_time = Field::Absent;
    }

    /// Replaces a node's name where the block names the node as its owner or as the holder of an address. Returns true
    /// if the block contained the node's old name.
    pub fn rename_node(&mut self, from: &str, to: &str) -> bool {
        let owner = self.owner().and_then(|owner| owner.renamed(from, to));
        let owns = owner.is_some();
        if let Some(owner) = owner {
            self.affinity = Field::Is(owner.to_string());
        }
        let entries = self.attributes.get_mut().into_iter().flatten();
        entries.fold(owns, |renamed, entry| entry.rename_node(from, to) || renamed)
    }

    /// Returns the recorded time at which the block was claimed.
    pub fn claimed_at(&self) -> Option<OffsetDateTime> {
        self.affinity_claim_time.get().map(StoredTime::at)
    }

    /// Returns the time since the block was claimed. A claim dated up to a day in the future counts as made now.
    /// Returns `None` if the claim's time is not recorded, or is more than a day in the future because of a wrong
    /// clock. Callers treat a claim of unknown age as very old, so that a wrong clock cannot keep other nodes from
    /// taking over the block for years.
    pub fn claim_age(&self, now: OffsetDateTime) -> Option<Duration> {
        let claimed = self.claimed_at()?;
        (claimed - now <= Duration::DAY).then(|| age(now, claimed))
    }

    /// Returns the sequence number of the block, which increases with each write of the block.
    pub fn sequence_number(&self) -> u64 {
        self.sequence_number.or_zero()
    }

    /// Returns the sequence number that the block had when the address was last assigned or released; 0 if none is
    /// recorded.
    pub fn sequence_number_of(&self, ip: IpAddr) -> u64 {
        self.ordinal(ip).map_or(0, |ordinal| self.sequence_of(ordinal))
    }

    /// Increases the block's sequence number, and converts the document to the current form. Call `bump` exactly once
    /// before each write of a changed block, after all changes. The sequence number wraps from 2^64 - 1 to 0.
    pub fn bump(&mut self) {
        self.sequence_number = Field::Is(self.sequence_number().wrapping_add(1));
        self.sequence_numbers.or_default();
        self.deleted = Field::Is(self.deleted.or_zero());
        if self.affinity == Field::Absent {
            self.affinity = Field::Null;
        }
        if self.attributes == Field::Absent {
            self.attributes = Field::Null;
        }
    }

    /// Frees the addresses whose cooldown is over. Callers must call `apply_cooldown` on every block that they have
    /// read.
    ///
    /// An address stays in cooldown until more than `cooldown_seconds` have passed from its release to `now`. If
    /// `cooldown_seconds` is 0 or less, there is no cooldown.
    ///
    /// Clocks of machines differ, so an address with a release date in the future counts as released now. A release
    /// date up to one cooldown in the future is left unchanged, so the address is in cooldown for at most twice the
    /// usual time. A release date more than one cooldown in the future is set to `now`, because the cooldown might
    /// otherwise never end. If the release date is right but the local clock is slow, setting the date to `now` makes
    /// the cooldown too short, which does less harm than an endless cooldown. If the recorded end of a sticky address's
    /// wait for its workload lies too far in the future, the wait is shortened.
    pub fn apply_cooldown(&mut self, now: OffsetDateTime, cooldown_seconds: i64) -> Cooldown {
        let cooldown = Duration::seconds(cooldown_seconds.max(0));
        let mut done = Cooldown::default();
        let mut over = vec![false; self.attributes().len()];
        for (attribute, over) in self.attributes.get_mut().into_iter().flatten().zip(&mut over) {
            if attribute.correct_wait(now, cooldown_seconds) {
                done.moved += 1;
                continue;
            }
            let Some(released_at) = attribute.released_at() else { continue };
            if cooldown.is_zero() || age(now, released_at) > cooldown {
                *over = true;
            } else if released_at - now > cooldown {
                attribute.set_released_at(now);
                done.moved += 1;
            }
        }
        if over.contains(&true) {
            for ordinal in self.ordinals_where(|index| over.get(index).copied().unwrap_or_default()) {
                self.set_free(ordinal);
                done.freed.extend(self.address(ordinal));
            }
            self.compact();
        }
        done
    }

    /// Returns the number of addresses that are free and not reserved.
    pub fn free_count(&self, reservations: &Reservations) -> usize {
        self.free_addresses().filter(|ip| !self.is_reserved(*ip, reservations)).count()
    }

    /// True if the block is full and stays full until it is written again.
    pub fn is_full(&self) -> bool {
        self.unallocated.is_empty()
            && self.allocated().all(|(_, entry)| entry.released_at().is_none())
            && !self.may_become_overdue()
    }

    /// True if no address of the block has a holder, ignoring addresses that a Windows host reserves for itself. A
    /// block with an address in cooldown is not empty.
    pub fn is_empty(&self) -> bool {
        let mut entries = self.allocations.iter().flatten().filter_map(|index| self.attributes().get(*index));
        entries.all(|entry| entry.handle_id().is_some_and(|id| id.eq_ignore_ascii_case(WINDOWS_RESERVED_HANDLE)))
    }

    /// Assigns up to `wanted` addresses, starting with the addresses that have been free for longest. Reserved
    /// addresses are skipped and keep their place in the queue of free addresses. Returns the assigned addresses; the
    /// list can be empty.
    pub fn assign_auto(&mut self, wanted: usize, holder: &Attribute, reservations: &Reservations) -> Vec<IpAddr> {
        let (mut taken, mut addresses) = (Vec::new(), Vec::new());
        for &ordinal in &self.unallocated {
            if taken.len() == wanted {
                break;
            }
            if let Some(ip) = self.address(ordinal).filter(|ip| !self.is_reserved(*ip, reservations)) {
                taken.push(ordinal);
                addresses.push(ip);
            }
        }
        self.set_taken(&taken, holder);
        addresses
    }

    /// Assigns one specific address of the block. As in Calico, a specifically requested address is assigned even if it
    /// is reserved.
    ///
    /// # Errors
    /// [`AlreadyAssigned`] if the address is held, in cooldown, or outside this block.
    pub fn assign_specific(&mut self, ip: IpAddr, holder: &Attribute) -> Result<(), AlreadyAssigned> {
        match self.ordinal(ip) {
            Some(ordinal) if self.allocations.get(ordinal) == Some(&None) => {
                self.set_taken(&[ordinal], holder);
                Ok(())
            }
            _ => Err(AlreadyAssigned(ip)),
        }
    }

    fn set_taken(&mut self, taken: &[usize], holder: &Attribute) {
        if taken.is_empty() {
            return;
        }
        let same = self.attributes().iter().position(|entry| entry.can_serve(holder));
        let index = same.unwrap_or_else(|| self.push_attribute(holder.clone()));
        for &ordinal in taken {
            if let Some(slot) = self.allocations.get_mut(ordinal) {
                *slot = Some(index);
            }
            self.set_sequence(ordinal);
        }
        self.unallocated.retain(|ordinal| self.allocations.get(*ordinal) == Some(&None));
    }

    /// Assigns an address to its current holder again: sets the given attributes, removes attributes whose given value
    /// is `None`, and records a new sequence number for the address. Addresses that shared an entry with the renewed
    /// address keep their attributes. `renew` does not change an address without a holder.
    pub fn renew<'a>(&mut self, ip: IpAddr, attributes: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) {
        let (Some(mut entry), Some(ordinal)) = (self.attributes_of(ip).cloned(), self.ordinal(ip)) else { return };
        for (name, value) in attributes {
            match value {
                Some(value) => entry.set(name, value),
                None => entry.unset(name),
            }
        }
        let index = self.push_attribute(entry);
        if let Some(slot) = self.allocations.get_mut(ordinal) {
            *slot = Some(index);
        }
        self.set_sequence(ordinal);
        self.compact();
    }

    /// Returns the state of an address in this block.
    pub fn lookup(&self, ip: IpAddr) -> AddressState<'_> {
        let Some(slot) = self.ordinal(ip).and_then(|ordinal| self.allocations.get(ordinal)) else {
            return AddressState::Outside;
        };
        match slot.and_then(|index| self.attributes().get(index)) {
            None => AddressState::Free,
            Some(entry) => entry.released_at().map_or(AddressState::Assigned(entry), AddressState::CoolingDown),
        }
    }

    /// Returns the attributes of an address's holder, or `None` if the address has no holder.
    pub fn attributes_of(&self, ip: IpAddr) -> Option<&Attribute> {
        match self.lookup(ip) {
            AddressState::Assigned(attribute) => Some(attribute),
            _ => None,
        }
    }

    /// Returns all addresses of the block, in ascending order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        (0..self.allocations.len()).filter_map(|ordinal| self.address(ordinal))
    }

    /// Returns the addresses that are held or in cooldown, in ascending order, each with its entry.
    pub fn allocated(&self) -> impl Iterator<Item = (IpAddr, &Attribute)> {
        self.allocations.iter().enumerate().filter_map(|(ordinal, slot)| {
            let attribute = self.attributes().get((*slot)?)?;
            Some((self.address(ordinal)?, attribute))
        })
    }

    /// Returns the free addresses in the order of assignment, including reserved addresses.
    pub fn free_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.unallocated.iter().filter_map(|ordinal| self.address(*ordinal))
    }

    /// Returns the addresses that a handle holds, in ascending order.
    pub fn ips_by_handle(&self, handle: &str) -> Vec<IpAddr> {
        self.allocated().filter(|(_, entry)| entry.has_handle(handle)).map(|(ip, _)| ip).collect()
    }

    /// Returns the stored handle of each held address.
    pub(crate) fn handles(&self) -> Vec<SmolStr> {
        self.allocated().filter_map(|(_, entry)| entry.holding_handle().cloned()).collect()
    }
}

/// Returns the number of subnets of the given prefix length in a block, or `None` if a block cannot have that many
/// ordinals.
fn capacity_of(cidr: IpNet, length: u8) -> Option<usize> {
    let count = 1_usize.checked_shl(u32::from(length.checked_sub(cidr.prefix_len())?))?;
    (count <= MAX_BLOCK_ADDRESSES).then_some(count)
}

impl Block {
    /// Returns the number of addresses or prefixes of the block.
    pub fn capacity(&self) -> usize {
        self.allocations.len()
    }

    /// Returns the prefix length of one ordinal: 32 or 128 in a block of addresses, or the length of the prefixes in a
    /// block of prefixes.
    pub fn length(&self) -> u8 {
        self.family().bits() - self.host_bits()
    }

    /// In a block of prefixes, returns the prefix that contains an address. In a block of addresses, returns the
    /// address itself as a /32 or /128 CIDR.
    pub fn unit_of(&self, ip: IpAddr) -> IpNet {
        let unit = self.cidr().contains(&ip).then(|| self.family().network(ip, self.length()));
        unit.flatten().unwrap_or_else(|| ip.into())
    }

    /// In a block of prefixes, returns the first address of the prefix that contains an address. In a block of
    /// addresses, returns the address itself.
    pub fn first_of(&self, ip: IpAddr) -> IpAddr {
        self.unit_of(ip).network()
    }

    /// True if the address or any part of its prefix is reserved.
    pub fn is_reserved(&self, ip: IpAddr, reservations: &Reservations) -> bool {
        match self.host_bits() {
            0 => reservations.contains(ip),
            _ => reservations.touches(self.unit_of(ip)),
        }
    }

    /// Returns the ordinal of an address, or `None` if the address is outside this block.
    pub fn ordinal(&self, ip: IpAddr) -> Option<usize> {
        if !self.cidr().contains(&ip) {
            return None;
        }
        let distance = number(ip).checked_sub(number(self.cidr().network()))?;
        usize::try_from(distance.checked_shr(self.host_bits().into())?).ok()
    }

    /// Returns the address of an ordinal, or `None` if the ordinal is outside this block.
    pub fn address(&self, ordinal: usize) -> Option<IpAddr> {
        nth(self.cidr(), (ordinal as u128).checked_shl(self.host_bits().into())?)
    }

    /// Returns the number of host bits of the block's prefixes; 0 in a block of addresses.
    fn host_bits(&self) -> u8 {
        let bits = self.family().bits() - self.cidr().prefix_len();
        bits.saturating_sub(self.allocations.len().checked_ilog2().and_then(|of| u8::try_from(of).ok()).unwrap_or(0))
    }

    /// Checks that the block's CIDR can be divided into as many addresses or prefixes as there are allocations.
    fn check_size(&self, key: &Key) -> Result<(), Malformed> {
        let (found, cidr) = (self.allocations.len(), self.cidr());
        if found <= MAX_BLOCK_ADDRESSES && length_in_block(cidr, found).is_some() {
            return Ok(());
        }
        if is_of_prefixes(cidr) {
            return Err(Malformed::new(key, format_args!("block {cidr} cannot have {found} prefixes")));
        }
        Err(Malformed::new(key, format_args!("{found} allocations for {} addresses", Count::of_net(cidr))))
    }
}

/// Typical JSON sizes in bytes: of a block without its entries, and of one entry. The buffer for encoding a block gets
/// an initial capacity computed from `BASE_BYTES` and `ENTRY_BYTES`, so that it seldom grows.
const BASE_BYTES: usize = 1024;
const ENTRY_BYTES: usize = 320;

impl Block {
    fn attributes(&self) -> &[Attribute] {
        self.attributes.get().map_or(&[], Vec::as_slice)
    }

    fn push_attribute(&mut self, attribute: Attribute) -> usize {
        let attributes = self.attributes.or_default();
        attributes.push(attribute);
        attributes.len() - 1
    }

    /// Returns the allocated ordinals for whose entry index `test` returns true, in ascending order.
    fn ordinals_where(&self, test: impl Fn(usize) -> bool) -> Vec<usize> {
        let allocated = self.allocations.iter().enumerate().filter_map(|(ordinal, slot)| Some((ordinal, (*slot)?)));
        allocated.filter(|(_, index)| test(*index)).map(|(ordinal, _)| ordinal).collect()
    }

    /// Appends an allocated ordinal to the queue of free ordinals, and drops the ordinal's sequence number.
    fn set_free(&mut self, ordinal: usize) {
        if let Some(slot) = self.allocations.get_mut(ordinal)
            && slot.take().is_some()
        {
            self.unallocated.push(ordinal);
            if let Some(numbers) = self.sequence_numbers.get_mut() {
                numbers.remove(format_smolstr!("{ordinal}").as_str());
            }
        }
    }

    fn sequence_of(&self, ordinal: usize) -> u64 {
        let numbers = self.sequence_numbers.get();
        numbers.and_then(|numbers| numbers.get(format_smolstr!("{ordinal}").as_str())).copied().unwrap_or(0)
    }

    /// Records the block's current sequence number for an ordinal, before [`Self::bump`] increases the block's sequence
    /// number.
    fn set_sequence(&mut self, ordinal: usize) {
        let number = self.sequence_number();
        self.sequence_numbers.or_default().insert(format_smolstr!("{ordinal}"), number);
    }

    /// Drops the block's entries to which no allocation refers, and renumbers the remaining entries in order.
    fn compact(&mut self) {
        let Field::Is(attributes) = &mut self.attributes else { return };
        let mut used = vec![false; attributes.len()];
        for index in self.allocations.iter().flatten() {
            if let Some(used) = used.get_mut(*index) {
                *used = true;
            }
        }
        let mut next = 0;
        let moved: Vec<usize> = used
            .iter()
            .map(|used| {
                let place = next;
                next += usize::from(*used);
                place
            })
            .collect();
        let mut kept = used.iter();
        attributes.retain(|_| kept.next().copied().unwrap_or_default());
        for slot in self.allocations.iter_mut().flatten() {
            if let Some(place) = moved.get(*slot) {
                *slot = *place;
            }
        }
    }

    /// Checks a block that was just decoded, and repairs its queue of free ordinals.
    ///
    /// The allocations determine which ordinals are free; the queue determines only the order of the free ordinals.
    /// Checking a decoded block removes ordinals from its queue of free ordinals if they are allocated, outside the
    /// block or listed twice, and appends free ordinals that the queue lacks. In the repaired queue, each free ordinal
    /// occurs exactly once, so no address is assigned twice or lost.
    fn check(&mut self, key: &Key) -> Result<(), Malformed> {
        self.cidr = Net(self.cidr().trunc());
        if keys::parse_block(key) != Some(self.cidr()) {
            return Err(Malformed::new(key, format_args!("the block inside is {}", self.cidr())));
        }
        self.check_size(key)?;
        let entries = self.attributes().len();
        if let Some(index) = self.allocations.iter().flatten().find(|index| **index >= entries) {
            return Err(Malformed::new(key, format_args!("an allocation points at attribute {index} of {entries}")));
        }
        self.heal_queue();
        Ok(())
    }

    fn heal_queue(&mut self) {
        let mut missing: Vec<bool> = self.allocations.iter().map(Option::is_none).collect();
        // Keeps only the first occurrence of each free ordinal in the queue. `retain` leaves `missing[ordinal]` true
        // only for free ordinals that are not in the queue.
        self.unallocated.retain(|ordinal| missing.get_mut(*ordinal).is_some_and(std::mem::take));
        let lost = missing.iter().enumerate().filter_map(|(ordinal, missing)| missing.then_some(ordinal));
        self.unallocated.extend(lost);
    }
}

impl Document for Block {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let mut block: Self = from_json(key, value)?;
        block.check(key)?;
        Ok(block)
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json_of(self, BASE_BYTES + self.attributes().len() * ENTRY_BYTES)
    }
}

/// The reason why a CIDR cannot be a block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableBlock {
    /// The CIDR has more than [`MAX_BLOCK_ADDRESSES`] addresses.
    #[error("block {0} has more than {MAX_BLOCK_ADDRESSES} addresses: give its pool a longer block size")]
    TooLarge(IpNet),
    /// The host reserves all of the block's addresses for itself.
    #[error("block {0} is too small for what its host keeps for itself")]
    NothingLeft(IpNet),
}

/// The error for an address that is already held or in cooldown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("resource already exists: {0} with error: Address already assigned in block")]
pub struct AlreadyAssigned(pub IpAddr);

/// The error for an assignment from a block that the requesting owner does not own, when strict affinity is on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOwner {
    /// The block has an owner, but not the requesting one.
    #[error("Block host affinity does not match")]
    Other,
    /// The block has no owner.
    #[error("Attempt to assign from block {0} with no affinity")]
    Unowned(IpNet),
}

#[cfg(test)]
mod tests;
