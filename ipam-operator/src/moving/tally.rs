//! Counting what is moved.

use std::fmt;

use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document};
use kv::Key;
use serde::Serialize;

/// How much there is of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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
}

impl Tally {
    /// One key more.
    pub fn add(&mut self, key: &Key, value: &[u8]) {
        self.keys += 1;
        self.bytes += (key.as_bytes().len() + value.len()) as u64;
        if keys::parse_block(key).is_some() {
            self.blocks += 1;
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
        Ok(())
    }
}
