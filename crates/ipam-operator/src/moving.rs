//! Plans the migration of a store's content to another store: which keys are copied, and which changes the target store
//! needs.
//!
//! A migration copies documents byte for byte, except when a node is renamed. The function [`ranges`] lists the key
//! ranges that are copied. The function [`compare`] returns the writes and deletions that make a target store equal to
//! its source store. A [`Renaming`] turns the documents of one node into documents of another node. The type
//! [`DocumentCounts`] counts the copied documents for a message to the user.
//!
//! A store has an [import lock](ipam_core::import_lock) while it is being filled by a migration or an import.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;

pub use ipam_core::import_lock::{ImportLock, ImportLocked, ImportState, MoveKind, import_lock_key};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, Malformed, Owner, QuotaKind, QuotaSubject, Quotas, renamed_node_handle};
use ipnet::IpNet;
use kv::{Key, Kv, Range, Revision, Value};
use serde::{Serialize, Serializer};
use serde_json::Value as Json;

/// Common prefix of the keys that only Margay uses.
const MARGAY_PREFIX: &str = "/margay/";

/// Whether a copied key is IPAM data or describes the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRole {
    /// IPAM data: a block, a handle, an affinity, the settings, a pool or a reservation. The target store must not have
    /// any IPAM data before the migration.
    Books,
    /// A document about the cluster, such as a node or the cluster information. A migration does not change the target
    /// store's own documents about the cluster.
    Around,
}

/// The key under which an embedded store records the name of its only node.
fn pinned_node_key() -> Key {
    keys::PINNED_NODE.into()
}

/// The key ranges that a migration reads, in ascending order, including the key of the import lock, which is not
/// copied.
pub fn ranges() -> Vec<Range> {
    all().into_iter().map(|(range, _)| range).collect()
}

/// The key ranges that must be empty in the target store before the migration.
pub fn ranges_to_be_empty() -> Vec<Range> {
    all().into_iter().filter(|(_, part)| *part == KeyRole::Books).map(|(range, _)| range).collect()
}

/// Returns whether a key is IPAM data or describes the cluster; `None` for a key that a migration does not copy.
pub fn role_of(key: &Key) -> Option<KeyRole> {
    if *key == import_lock_key() {
        return None;
    }
    all().into_iter().find(|(range, _)| range.contains(key.as_bytes())).map(|(_, part)| part)
}

/// The parts of [`ranges`] from key `from` up to but excluding key `to`; without an upper bound if `to` is `None`.
pub fn ranges_between(from: &Key, to: Option<&Key>) -> Vec<Range> {
    let mut between = Vec::new();
    for range in ranges() {
        let (first, end) = range.bounds();
        let first = first.max(from.clone());
        let end = match (end, to) {
            (Some(end), Some(to)) => end.min(to.clone()),
            (Some(end), None) => end,
            (None, Some(to)) => to.clone(),
            (None, None) => continue,
        };
        if first < end {
            between.push(Range::FromTo(first, end));
        }
    }
    between
}

fn all() -> [(Range, KeyRole); 7] {
    let resource = |kind| Range::Prefix(keys::resources_prefix(kind));
    let other = |plural| Range::Prefix(keys::other_resources_prefix(plural));
    [
        (Range::Prefix(keys::ipam_prefix()), KeyRole::Books),
        (other("clusterinformations"), KeyRole::Around),
        (other("ipamconfigurations"), KeyRole::Around),
        (resource(ResourceKind::IpPool), KeyRole::Books),
        (resource(ResourceKind::IpReservation), KeyRole::Books),
        (resource(ResourceKind::Node), KeyRole::Around),
        (Range::prefix(MARGAY_PREFIX), KeyRole::Books),
    ]
}

/// A write or deletion of one key in the target store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key that is written or deleted.
    pub key: Key,
    /// The key's new value; `None` to delete the key.
    pub value: Option<Value>,
    /// The revision that last wrote the key in the target store; unset if the key is missing there.
    pub was: Revision,
}

/// The difference between a key range of the source store and the same range of the target store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// The changes that the target store needs, in ascending order of their keys.
    pub changes: Vec<Change>,
    /// Number of keys whose values in the source store and the target store are already equal.
    pub equal: u64,
    /// Number of keys whose value in the target store is kept, although the source store has another value or none.
    pub kept: u64,
}

/// Compares a key range of the source store with the same range of the target store. The caller must sort `source` and
/// `target` by key. The function calls `then`, in ascending order of keys, with every key and value that the target
/// store has after the changes.
pub fn compare(source: Vec<(Key, Value)>, target: Vec<Kv>, mut then: impl FnMut(&Key, &Value)) -> Difference {
    let mut found = Difference::default();
    let (mut source, mut target) = (source.into_iter().peekable(), target.into_iter().peekable());
    loop {
        let order = match (source.peek(), target.peek()) {
            (Some((key, _)), Some(kv)) => key.cmp(&kv.key),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return found,
        };
        let wanted = if order.is_le() { source.next() } else { None };
        let there = if order.is_ge() { target.next() } else { None };
        found.add(wanted, there, &mut then);
    }
}

impl Difference {
    fn add(&mut self, wanted: Option<(Key, Value)>, there: Option<Kv>, then: &mut impl FnMut(&Key, &Value)) {
        match (wanted, there) {
            (Some((key, value)), None) => {
                then(&key, &value);
                self.changes.push(Change { key, value: Some(value), was: Revision::UNSET });
            }
            (Some((key, value)), Some(there)) if value == there.value => {
                then(&key, &value);
                self.equal += 1;
            }
            (wanted, Some(there)) => match role_of(&there.key) {
                Some(KeyRole::Books) => {
                    let value = wanted.map(|(_, value)| value);
                    value.iter().for_each(|value| then(&there.key, value));
                    self.changes.push(Change { key: there.key, value, was: there.mod_revision });
                }
                part => {
                    then(&there.key, &there.value);
                    self.kept += u64::from(part.is_some());
                }
            },
            (None, None) => {}
        }
    }
}

/// The nodes that a document names: the owner of a block or affinity, the node of a node document, or an embedded
/// store's only node.
pub fn nodes_of(key: &Key, value: &[u8]) -> BTreeSet<String> {
    let mut nodes = BTreeSet::new();
    let host = |owner: Owner| owner.node().map(str::to_owned);
    if let Some((owner, _)) = keys::parse_affinity(key) {
        nodes.extend(host(owner));
    } else if keys::parse_block(key).is_some() {
        nodes.extend(Block::decode(key, value).ok().and_then(|block| block.owner()).and_then(host));
    } else if let Some(name) = keys::parse_resource(ResourceKind::Node, key) {
        nodes.insert(name.to_owned());
    } else if *key == pinned_node_key() {
        nodes.extend(str::from_utf8(value).ok().map(str::to_owned));
    }
    nodes
}

/// A change of a node's name in all documents. The name is changed in the node's blocks, affinities, prefixes and
/// quota, in the block entries of its containers and tunnels, and in the node's own document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renaming {
    from: String,
    to: String,
}

impl Renaming {
    /// Creates a renaming of node `from` to node `to`.
    pub fn new(from: impl Into<String>, to: impl Into<String>) -> Self {
        Self { from: from.into(), to: to.into() }
    }

    /// The node's name before the renaming.
    pub fn from(&self) -> &str {
        &self.from
    }

    /// Returns the key of a document after the renaming; `key` is the document's key before the renaming.
    pub fn key(&self, key: Key) -> Key {
        if let Some((owner, cidr)) = keys::parse_affinity(&key)
            && let Some(renamed) = owner.renamed(&self.from, &self.to)
        {
            return keys::affinity(&renamed, cidr).unwrap_or(key);
        }
        if let Some(id) = keys::parse_handle(&key).and_then(|id| renamed_node_handle(id, &self.from, &self.to)) {
            return keys::handle(&id);
        }
        if key == keys::legacy_host(&self.from) {
            return keys::legacy_host(&self.to);
        }
        if keys::parse_resource(ResourceKind::Node, &key) == Some(self.from.as_str()) {
            return keys::resource(ResourceKind::Node, &self.to);
        }
        key
    }

    /// Returns the value of a document after the renaming; `key` and `value` are those before the renaming.
    ///
    /// # Errors
    /// [`Malformed`] if the document may contain the node's name, but cannot be decoded.
    pub fn value(&self, key: &Key, value: Value) -> Result<Value, Malformed> {
        if keys::parse_block(key).is_some() {
            let mut block = Block::decode(key, value.as_bytes())?;
            return if block.rename_node(&self.from, &self.to) { block.encode() } else { Ok(value) };
        }
        if keys::parse_resource(ResourceKind::Node, key) == Some(self.from.as_str()) {
            return self.node(key, value.as_bytes());
        }
        if *key == keys::quotas() {
            return self.quotas(key, value);
        }
        if *key == pinned_node_key() && value.as_bytes() == self.from.as_bytes() {
            return Ok(self.to.as_str().into());
        }
        Ok(value)
    }

    /// Renames the node in the quotas, but not in the node's counter, because the target store counts the addresses
    /// again.
    fn quotas(&self, key: &Key, value: Value) -> Result<Value, Malformed> {
        let mut quotas = Quotas::decode(key, value.as_bytes())?;
        let [from, to] = [&self.from, &self.to].map(|name| QuotaSubject::new(QuotaKind::Node, name.as_str()));
        match quotas.set(&from, None) {
            None => Ok(value),
            limit => {
                quotas.set(&to, limit);
                quotas.encode()
            }
        }
    }

    fn node(&self, key: &Key, value: &[u8]) -> Result<Value, Malformed> {
        let mut node: Json = serde_json::from_slice(value).map_err(|error| Malformed::new(key, error))?;
        match node.pointer_mut("/metadata/name") {
            Some(name) => *name = self.to.as_str().into(),
            None => return Err(Malformed::new(key, "the node has no name")),
        }
        serde_json::to_vec(&node).map(Value::new).map_err(|error| Malformed::new(key, error))
    }
}

/// The numbers of copied documents of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DocumentCounts {
    /// Number of copied keys.
    pub keys: u64,
    /// Total size of all copied keys and values, in bytes.
    pub bytes: u64,
    /// Number of held addresses, without the addresses in cooldown.
    pub addresses: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of handles.
    pub handles: u64,
    /// Number of affinities.
    pub affinities: u64,
    /// Number of pools.
    pub pools: u64,
    /// Number of reservations.
    pub reservations: u64,
    /// Number of nodes.
    pub nodes: u64,
    /// Number of blocks that cannot be decoded and are copied unchanged.
    pub damaged: u64,
    /// The CIDRs of all copied blocks. Serialized to JSON as one number: how many of the copied blocks lie inside
    /// another block. Overlapping blocks are copied unchanged, but no address is assigned from them.
    #[serde(rename = "overlapping", serialize_with = "count_overlapping")]
    networks: Vec<IpNet>,
}

fn count_overlapping<S: Serializer>(networks: &[IpNet], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(overlapping(networks))
}

/// Counts the CIDRs that lie inside another CIDR of the list. Two CIDRs overlap only if one of them contains the other.
fn overlapping(networks: &[IpNet]) -> u64 {
    let mut ascending = networks.to_vec();
    // Sort the CIDRs by first address; among CIDRs with equal first addresses, the largest comes first.
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

impl DocumentCounts {
    /// Adds a document to the counts.
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

impl fmt::Display for DocumentCounts {
    /// Formats the counts for the user, for example `12 addresses in 2 blocks, 12 handles, 1 pool; 17 keys in all`.
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
    use ipam_core::import_lock::import_lock_key;
    use ipam_core::model::keys::{self, ResourceKind};

    use super::*;

    #[test]
    fn ranges_ascend_and_have_keys_of_every_kind() {
        let bounds: Vec<_> = ranges().iter().map(Range::bounds).collect();
        for pair in bounds.windows(2) {
            assert!(pair[0].1.as_ref().unwrap() <= &pair[1].0, "{pair:?}");
        }
        let cidr = "10.0.0.0/26".parse().unwrap();
        for key in [keys::block(cidr), keys::handle("n.c"), keys::config(), keys::legacy_host("a"), pinned_node_key()] {
            assert_eq!(role_of(&key), Some(KeyRole::Books), "{key}");
        }
        assert_eq!(role_of(&keys::resource(ResourceKind::IpPool, "p")), Some(KeyRole::Books));
        assert_eq!(role_of(&keys::resource(ResourceKind::Node, "n")), Some(KeyRole::Around));
        assert_eq!(role_of(&import_lock_key()), None);
        assert_eq!(role_of(&"/calico/resources/v3/projectcalico.org/profiles/a".into()), None);
    }

    #[test]
    fn ranges_parts_fit_together() {
        let all = ranges_between(&Key::default(), None);
        assert_eq!(all.len(), ranges().len());
        let at = keys::handle("m");
        let (low, high) = (ranges_between(&Key::default(), Some(&at)), ranges_between(&at, None));
        assert_eq!(low.len() + high.len(), all.len() + 1, "one range is cut in two");
        assert!(low.iter().all(|range| !range.contains(at.as_bytes())));
        assert!(high[0].contains(at.as_bytes()));
    }

    fn kv(key: Key, value: &str, at: i64) -> Kv {
        let at = Revision::new(at);
        Kv { key, value: value.into(), create_revision: at, mod_revision: at, version: 1, lease: None }
    }

    #[test]
    fn difference_changes_keys_and_keeps_those_of_target() {
        let node = |name| keys::resource(ResourceKind::Node, name);
        let source = vec![
            (keys::handle("equal"), "1".into()),
            (keys::handle("new"), "1".into()),
            (keys::handle("other"), "1".into()),
            (node("a"), "source's".into()),
            (node("b"), "source's".into()),
        ];
        let target = vec![
            kv(keys::handle("equal"), "1", 3),
            kv(keys::handle("gone"), "1", 4),
            kv(keys::handle("other"), "2", 5),
            kv(node("a"), "target's", 6),
            kv(node("c"), "target's", 7),
            kv(import_lock_key(), "{}", 8),
        ];
        let mut then = Vec::new();
        let found = compare(source, target, |key, value| then.push((key.clone(), value.clone())));
        let changes: Vec<_> = found
            .changes
            .iter()
            .map(|change| (change.key.to_string(), change.value.is_some(), change.was.get()))
            .collect();
        let expected = [
            (keys::handle("gone"), false, 4),
            (keys::handle("new"), true, 0),
            (keys::handle("other"), true, 5),
            (node("b"), true, 0),
        ];
        assert_eq!(changes, expected.map(|(key, put, was)| (key.to_string(), put, was)));
        assert_eq!((found.equal, found.kept), (1, 2));
        let expected = [
            (keys::handle("equal"), "1"),
            (keys::handle("new"), "1"),
            (keys::handle("other"), "1"),
            (node("a"), "target's"),
            (node("b"), "source's"),
            (node("c"), "target's"),
            (import_lock_key(), "{}"),
        ];
        assert_eq!(then, expected.map(|(key, value)| (key, value.into())));
    }

    #[test]
    fn node_quota_goes_with_node() {
        let mut quotas = Quotas::default();
        let of = |name: &str| QuotaSubject::new(QuotaKind::Node, name);
        quotas.set(&of("vm"), Some(50));
        quotas.set(&of("other"), Some(7));
        let renaming = Renaming::new("vm", "node3");
        let renamed = renaming.value(&keys::quotas(), quotas.encode().unwrap()).unwrap();
        let renamed = Quotas::decode(&keys::quotas(), renamed.as_bytes()).unwrap();
        let limit = |name| renamed.limit(QuotaKind::Node, name);
        assert_eq!((limit("vm"), limit("node3"), limit("other")), (None, Some(50), Some(7)));
    }

    #[test]
    fn overlapping_blocks_are_counted() {
        let count = |networks: &[&str]| {
            overlapping(&networks.iter().map(|network| network.parse().unwrap()).collect::<Vec<IpNet>>())
        };
        assert_eq!(count(&["10.0.0.64/26", "10.0.0.0/26", "10.0.1.0/26", "fd00::/122"]), 0);
        assert_eq!(count(&["10.0.0.64/26", "10.0.0.0/24", "10.0.0.192/28", "10.0.1.0/26"]), 2);
        assert_eq!(count(&["10.0.0.0/26", "10.0.0.0/24", "fd00::40/122", "fd00::/112", "fd00:0:0:1::/122"]), 2);
    }
}
