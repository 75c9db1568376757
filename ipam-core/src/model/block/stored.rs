//! Reads stored blocks without repairs, and reports the flaws that decoding a [`Block`] would repair or refuse.

use kv::Key;
use smol_str::SmolStr;

use super::Block;
use crate::model::codec::{Malformed, Net, from_json};

/// A block that was read without repairs. Only the number of allocations is guaranteed to be right; the rest of
/// [`Block`]'s invariant may be violated.
#[derive(Clone, Debug)]
pub struct StoredBlock(Block);

/// The flaws inside a stored block. All lists of ordinals are sorted, except lists of ordinals from the queue of free
/// ordinals, which keep the queue's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockFlaws {
    /// Ordinals whose allocation refers to a missing entry.
    pub dangling: Vec<usize>,
    /// The number of the block's entries to which no allocation refers.
    pub unused: usize,
    /// Free ordinals that occur more than once in the queue of free ordinals.
    pub twice: Vec<usize>,
    /// Free ordinals that are missing in the queue of free ordinals.
    pub lost: Vec<usize>,
    /// Allocated ordinals that are in the queue of free ordinals.
    pub taken: Vec<usize>,
    /// Numbers in the queue of free ordinals that are not ordinals of the block.
    pub outside: Vec<usize>,
    /// Keys in the map of sequence numbers that are not allocated ordinals.
    pub numbers: Vec<String>,
}

impl BlockFlaws {
    /// True if [`Block::tidy`] would change the block.
    pub fn can_be_tidied(&self) -> bool {
        let Self { dangling: _, unused, twice, lost, taken, outside, numbers } = self;
        *unused > 0 || [twice, lost, taken, outside].iter().any(|list| !list.is_empty()) || !numbers.is_empty()
    }
}

impl StoredBlock {
    /// Decodes a stored block. The CIDR in the block may differ from the CIDR in the key.
    ///
    /// # Errors
    /// [`Malformed`] if the value is not a block, or if the block's number of allocations is wrong.
    pub fn read(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let mut block: Block = from_json(key, value)?;
        block.cidr = Net(block.cidr().trunc());
        block.check_size(key)?;
        Ok(Self(block))
    }

    /// Returns the stored block, for reading only.
    pub fn block(&self) -> &Block {
        &self.0
    }

    /// Returns the flaws inside the stored block.
    pub fn flaws(&self) -> BlockFlaws {
        let mut flaws = BlockFlaws::default();
        self.find_in_allocations(&mut flaws);
        self.find_in_queue(&mut flaws);
        let numbers = self.0.sequence_numbers.get().into_iter().flatten().map(|(name, _)| name);
        flaws.numbers =
            numbers.filter(|name| !is_allocated(&self.0.allocations, name)).map(SmolStr::to_string).collect();
        flaws
    }

    fn find_in_allocations(&self, flaws: &mut BlockFlaws) {
        let mut used = vec![false; self.0.attributes().len()];
        for (ordinal, index) in self.0.allocations.iter().enumerate() {
            let Some(index) = index else { continue };
            match used.get_mut(*index) {
                Some(used) => *used = true,
                None => flaws.dangling.push(ordinal),
            }
        }
        flaws.unused = used.iter().filter(|used| !**used).count();
    }

    fn find_in_queue(&self, flaws: &mut BlockFlaws) {
        let mut queued = vec![false; self.0.allocations.len()];
        for &ordinal in &self.0.unallocated {
            match (self.0.allocations.get(ordinal), queued.get_mut(ordinal)) {
                (Some(None), Some(queued)) if *queued => flaws.twice.push(ordinal),
                (Some(None), Some(queued)) => *queued = true,
                (Some(Some(_)), _) => flaws.taken.push(ordinal),
                _ => flaws.outside.push(ordinal),
            }
        }
        let free = self.0.allocations.iter().zip(queued).enumerate();
        flaws.lost =
            free.filter(|(_, (index, queued))| index.is_none() && !queued).map(|(ordinal, _)| ordinal).collect();
    }
}

impl Block {
    /// Drops the block's entries to which no allocation refers, and sequence numbers of addresses that are not
    /// allocated. The queue of free ordinals was already repaired when the block was decoded.
    pub fn tidy(&mut self) {
        self.compact();
        let allocations = &self.allocations;
        if let Some(numbers) = self.sequence_numbers.get_mut() {
            numbers.retain(|name, _| is_allocated(allocations, name));
        }
    }
}

/// True if `name` is an allocated ordinal in canonical decimal form.
fn is_allocated(allocations: &[Option<usize>], name: &str) -> bool {
    let ordinal = name.parse::<usize>().ok().filter(|ordinal| ordinal.to_string() == name);
    ordinal.is_some_and(|ordinal| matches!(allocations.get(ordinal), Some(Some(_))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Document, keys};

    fn read(value: &str) -> Result<StoredBlock, Malformed> {
        StoredBlock::read(&keys::block("10.0.0.0/30".parse().unwrap()), value.as_bytes())
    }

    #[test]
    fn flaws_are_each_told_once() {
        let value = r#"{"cidr":"10.0.0.0/30","allocations":[0,null,9,null],"unallocated":[1,1,0,77],
            "attributes":[{"handle_id":"a"},{"handle_id":"b"}],"sequenceNumberForAllocation":{"0":1,"1":2,"x":3,"00":4}}"#;
        let expected = BlockFlaws {
            dangling: vec![2],
            unused: 1,
            twice: vec![1],
            lost: vec![3],
            taken: vec![0],
            outside: vec![77],
            numbers: ["00", "1", "x"].map(str::to_owned).to_vec(),
        };
        assert_eq!(read(value).unwrap().flaws(), expected);
        assert!(read(r#"{"cidr":"10.0.0.0/30","allocations":[],"unallocated":[]}"#).is_err());
        assert!(read(r#"{"cidr":"0.0.0.0/0","allocations":[],"unallocated":[]}"#).is_err());
    }

    #[test]
    fn flaws_are_gone_after_tidying() {
        let value = r#"{"cidr":"10.0.0.0/30","allocations":[1,null,null,null],"unallocated":[1,1,0,77],
            "attributes":[{"handle_id":"a"},{"handle_id":"b"}],"sequenceNumberForAllocation":{"0":1,"1":2}}"#;
        let key = keys::block("10.0.0.0/30".parse().unwrap());
        let mut block = Block::decode(&key, value.as_bytes()).unwrap();
        block.tidy();
        let again = StoredBlock::read(&key, block.encode().unwrap().as_bytes()).unwrap();
        assert_eq!(again.flaws(), BlockFlaws::default());
        assert_eq!(block.ips_by_handle("b").len(), 1);
        assert_eq!(block.sequence_number_of("10.0.0.0".parse().unwrap()), 1);
    }
}
