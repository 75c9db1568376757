//! Counting what is moved.

use std::fmt;

use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document};
use ipnet::IpNet;
use kv::Key;
use serde::{Serialize, Serializer};

/// How much there is of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// All keys.
    pub keys: u64,
    /// Bytes of all keys and values.
    pub bytes: u64,
    /// Addresses that somebody has.
    pub addresses: u64,
    /// Blocks.
    pub blocks: u64,
    /// Handles.
    pub handles: u64,
    /// Affinities.
    pub affinities: u64,
    /// Pools.
    pub pools: u64,
    /// Reservations.
    pub reservations: u64,
    /// Nodes.
    pub nodes: u64,
    /// Blocks that cannot be read. They are moved as they are.
    pub damaged: u64,
    /// The networks of the blocks. It is serialized as the number of blocks that lie in another block; they move unchanged, and
    /// nothing is assigned from them.
    #[serde(rename = "overlapping", serialize_with = "count_overlapping")]
    networks: Vec<IpNet>,
}

fn count_overlapping<S: Serializer>(networks: &[IpNet], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(overlapping(networks))
}

/// Returns how many of these networks lie in another one. Networks overlap only if one contains the other.
fn overlapping(networks: &[IpNet]) -> u64 {
    let mut ascending = networks.to_vec();
    // By first address, and of those with the same one the largest first.
    ascending.sort_unstable();
    let mut outer: Option<IpNet> = None;
    let mut count = 0;
    for network in ascending {
        if outer.is_some_and(|outer| outer.contains(&network)) {
            count += 1;
        } else {
            outer = Some(network);
        }
    }
    count
}

impl Tally {
    /// One key more.
    pub fn add(&mut self, key: &Key, value: &[u8]) {
        self.keys += 1;
        self.bytes += (key.as_bytes().len() + value.len()) as u64;
        if let Some(network) = keys::parse_block(key) {
            self.blocks += 1;
            self.networks.push(network);
            match Block::decode(key, value) {
                Ok(block) => {
                    let held = block.allocated().filter(|(_, entry)| entry.released_at().is_none());
                    self.addresses += held.count() as u64;
                }
                Err(_) => self.damaged += 1,
            }
        } else if keys::parse_handle(key).is_some() {
            self.handles += 1;
        } else if keys::parse_affinity(key).is_some() {
            self.affinities += 1;
        } else {
            let is = |kind| u64::from(keys::parse_resource(kind, key).is_some());
            self.pools += is(ResourceKind::IpPool);
            self.reservations += is(ResourceKind::IpReservation);
            self.nodes += is(ResourceKind::Node);
        }
    }
}

impl fmt::Display for Tally {
    /// The numbers for a person: `12 addresses in 2 blocks, 12 handles, 1 pool; 17 keys in all`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let some = |count: u64, one: &str, more: &str| format!("{count} {}", if count == 1 { one } else { more });
        let addresses = some(self.addresses, "address", "addresses");
        let blocks = some(self.blocks, "block", "blocks");
        let handles = some(self.handles, "handle", "handles");
        let pools = some(self.pools, "pool", "pools");
        let keys = some(self.keys, "key", "keys");
        write!(f, "{addresses} in {blocks}, {handles}, {pools}; {keys} in all")?;
        if self.damaged > 0 {
            let damaged = some(self.damaged, "block", "blocks");
            write!(f, "; {damaged} that cannot be read went along as they are")?;
        }
        let overlapping = overlapping(&self.networks);
        if overlapping > 0 {
            let overlapping = some(overlapping, "block", "blocks");
            write!(f, "; {overlapping} with addresses that other blocks have, too: see margay ipam check")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_overlap_are_counted() {
        let count = |networks: &[&str]| {
            overlapping(&networks.iter().map(|network| network.parse().unwrap()).collect::<Vec<IpNet>>())
        };
        assert_eq!(count(&["10.0.0.64/26", "10.0.0.0/26", "10.0.1.0/26", "fd00::/122"]), 0);
        assert_eq!(count(&["10.0.0.64/26", "10.0.0.0/24", "10.0.0.192/28", "10.0.1.0/26"]), 2);
        assert_eq!(count(&["10.0.0.0/26", "10.0.0.0/24", "fd00::40/122", "fd00::/112", "fd00:0:0:1::/122"]), 2);
    }
}
