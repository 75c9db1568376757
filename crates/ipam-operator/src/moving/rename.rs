//! Making what belongs to one node that of another.

use std::collections::BTreeSet;

use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, Malformed, Owner, QuotaKind, Quotas, Subject, renamed_node_handle};
use kv::{Key, Value};
use serde_json::Value as Json;

use super::scope::pinned_node_key;

/// The nodes that a document speaks of as owners of blocks, or as the store's own.
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

/// A node's new name: its blocks, its affinities, what its containers and tunnels hold, its prefixes, and its own
/// document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renaming {
    from: String,
    to: String,
}

impl Renaming {
    /// The blocks and addresses of `from` become those of `to`.
    pub fn new(from: impl Into<String>, to: impl Into<String>) -> Self {
        Self { from: from.into(), to: to.into() }
    }

    /// The old name.
    pub fn from(&self) -> &str {
        &self.from
    }

    /// The key under which a document will be.
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

    /// A document, by its old key, as it will be.
    ///
    /// # Errors
    /// [`Malformed`] for a block or a node that cannot be read: its owner is unknown.
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

    /// The quota of the node. Its counter is no good in another store, and is counted anew.
    fn quotas(&self, key: &Key, value: Value) -> Result<Value, Malformed> {
        let mut quotas = Quotas::decode(key, value.as_bytes())?;
        let [from, to] = [&self.from, &self.to].map(|name| Subject::new(QuotaKind::Node, name.as_str()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_of_a_node_goes_with_it() {
        let mut quotas = Quotas::default();
        let of = |name: &str| Subject::new(QuotaKind::Node, name);
        quotas.set(&of("vm"), Some(50));
        quotas.set(&of("other"), Some(7));
        let renaming = Renaming::new("vm", "node3");
        let renamed = renaming.value(&keys::quotas(), quotas.encode().unwrap()).unwrap();
        let renamed = Quotas::decode(&keys::quotas(), renamed.as_bytes()).unwrap();
        let limit = |name| renamed.limit(QuotaKind::Node, name);
        assert_eq!((limit("vm"), limit("node3"), limit("other")), (None, Some(50), Some(7)));
    }
}
