//! The parts of the operations on a block: entries, sequence numbers, and the check after reading.

use kv::{Key, Value};
use smol_str::format_smolstr;

use super::{Attribute, Block, Field};
use crate::model::codec::{Document, Malformed, from_json, to_json_of};
use crate::model::kept::Net;
use crate::model::keys;

/// The usual lengths of a block without its entries, and of an entry: the buffer of a written block seldom grows.
const BYTES: usize = 1024;
const BYTES_OF_ENTRY: usize = 320;

impl Block {
    /// The entries that allocations point at.
    pub(super) fn attributes(&self) -> &[Attribute] {
        self.attributes.get().map_or(&[], Vec::as_slice)
    }

    /// Adds an entry and returns its index.
    pub(super) fn push_attribute(&mut self, attribute: Attribute) -> usize {
        let attributes = self.attributes.or_default();
        attributes.push(attribute);
        attributes.len() - 1
    }

    /// The allocated ordinals, ascending, whose entry's index passes the test.
    pub(super) fn ordinals_where(&self, test: impl Fn(usize) -> bool) -> Vec<usize> {
        let allocated = self.allocations.iter().enumerate().filter_map(|(ordinal, slot)| Some((ordinal, (*slot)?)));
        allocated.filter(|(_, index)| test(*index)).map(|(ordinal, _)| ordinal).collect()
    }

    /// Frees an allocated ordinal: to the end of the queue, its sequence number forgotten.
    pub(super) fn set_free(&mut self, ordinal: usize) {
        if let Some(slot) = self.allocations.get_mut(ordinal)
            && slot.take().is_some()
        {
            self.unallocated.push(ordinal);
            if let Some(numbers) = self.sequence_numbers.get_mut() {
                numbers.remove(format_smolstr!("{ordinal}").as_str());
            }
        }
    }

    pub(super) fn sequence_of(&self, ordinal: usize) -> u64 {
        let numbers = self.sequence_numbers.get();
        numbers.and_then(|numbers| numbers.get(format_smolstr!("{ordinal}").as_str())).copied().unwrap_or(0)
    }

    /// Records the block's sequence number, as it is before this write counts it up, for an ordinal.
    pub(super) fn set_sequence(&mut self, ordinal: usize) {
        let number = self.sequence_number();
        self.sequence_numbers.or_default().insert(format_smolstr!("{ordinal}"), number);
    }

    /// Drops the entries that no allocation points at and renumbers the others, their order kept.
    pub(super) fn compact(&mut self) {
        let Field::Is(attributes) = &mut self.attributes else { return };
        let mut used = vec![false; attributes.len()];
        for index in self.allocations.iter().flatten() {
            if let Some(used) = used.get_mut(*index) {
                *used = true;
            }
        }
        // Where each entry moves to: the number of used ones before it.
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

    /// Checks a block that was read, and heals what can be healed without a guess.
    ///
    /// The allocations determine what is free; the queue only in which order. So the queue loses an ordinal that is
    /// allocated or outside, and the second mention of one, and a free ordinal that it does not name is put at its end:
    /// an address is then neither assigned twice nor lost for ever.
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
        // Keeps the first mention of each free ordinal, and leaves in `missing` those without any.
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
        to_json_of(self, BYTES + self.attributes().len() * BYTES_OF_ENTRY)
    }
}
