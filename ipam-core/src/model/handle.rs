//! Handles: the document that records in which blocks a container has addresses, the names that follow from a container's name,
//! and the handles that end with a node's name (those of its tunnels and of its own prefixes).

use std::collections::BTreeMap;

use ipnet::IpNet;
use kv::{Key, Value};

use super::codec::{Document, Field, Malformed, UnknownFields, document, from_json, to_json};
use super::prefixes::beginning_of_node_prefix;

document! {
    /// The document under a handle's key. The id is in the key alone.
    ///
    /// The counts are hints: Calico adds the requested number before it knows how many addresses it gets, so a count can be
    /// too high. The blocks tell what is really held.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct Handle {
        // By the text of the network, so that an entry that is none survives.
        block: Field<BTreeMap<String, i64>> = "block",
        deleted: Field<bool> = "deleted",
    }
}

impl Handle {
    /// A handle without any block, in the current form.
    pub fn new() -> Self {
        Self { block: Field::Is(BTreeMap::new()), deleted: Field::Is(false), extra: UnknownFields::default() }
    }

    /// The blocks that are named, in the order of their text. An entry that is no network is left out.
    pub fn blocks(&self) -> impl Iterator<Item = (IpNet, i64)> {
        let entries = self.block.get().into_iter().flatten();
        entries.filter_map(|(text, count)| Some((text.parse::<IpNet>().ok()?.trunc(), *count)))
    }

    /// The count for one block; 0 if it is not named.
    pub fn count(&self, block: IpNet) -> i64 {
        self.blocks().find(|(named, _)| *named == block).map_or(0, |(_, count)| count)
    }

    /// Adds addresses of a block.
    pub fn increment(&mut self, block: IpNet, by: usize) {
        let by = i64::try_from(by).unwrap_or(i64::MAX);
        // A negative count is damage; what is added now is certain.
        self.set(block, self.count(block).max(0).saturating_add(by));
    }

    /// Subtracts addresses of a block; the entry is removed when nothing is left of it. Subtracting more than there are
    /// is not an error, since counts are hints.
    pub fn decrement(&mut self, block: IpNet, by: usize) {
        let by = i64::try_from(by).unwrap_or(i64::MAX);
        self.set(block, self.count(block).saturating_sub(by));
    }

    /// Sets the count for a block to what the block itself says; 0 or less removes the entry.
    pub fn set(&mut self, block: IpNet, count: i64) {
        let blocks = self.block.or_default();
        // Our spelling of the network replaces that of a foreign writer.
        blocks.retain(|text, _| text.parse::<IpNet>().map(|net| net.trunc()) != Ok(block));
        if count > 0 {
            blocks.insert(block.to_string(), count);
        }
        self.deleted = Field::Is(self.deleted.or_zero());
    }

    /// How many entries it has that are no networks.
    pub fn odd_entries(&self) -> usize {
        self.block.get().into_iter().flatten().filter(|(text, _)| text.parse::<IpNet>().is_err()).count()
    }

    /// Sets all counts to what the blocks themselves say, and drops every other entry.
    pub fn set_all(&mut self, counts: impl IntoIterator<Item = (IpNet, i64)>) {
        self.block.or_default().clear();
        for (block, count) in counts {
            self.set(block, count);
        }
    }

    /// True if no block is left, so that the key must be deleted. An entry that is no network names nothing.
    pub fn is_empty(&self) -> bool {
        self.blocks().next().is_none()
    }
}

impl Document for Handle {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        from_json(key, value)
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(self)
    }
}

/// The handle of a container on a network: `<network>.<container id>`. It can not be taken apart again, since both
/// halves may hold dots.
pub fn handle_id(network: &str, container: &str) -> String {
    format!("{network}.{container}")
}

/// True if a stored handle is this one. Of both only the part before the first carriage return counts: an old
/// migration stored file contents with their line end.
pub fn same_handle(stored: &str, handle: &str) -> bool {
    stored.split('\r').next() == handle.split('\r').next()
}

/// A container whose name cannot be part of a workload endpoint's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("error constructing WorkloadEndpoint name: error with field {field} = '{value}' ({reason})")]
pub struct InvalidWorkload {
    field: &'static str,
    value: String,
    reason: &'static str,
}

/// Calico's name of a workload's endpoint: the parts joined by `-`, each `-` inside a part doubled.
///
/// `parts` are pairs of the field's name, as an error shows it, and its value: node, `k8s` or `cni`, pod or container
/// id, interface.
///
/// # Errors
/// [`InvalidWorkload`] for the first part that is empty or that begins or ends with `-`.
pub fn workload_endpoint_name(parts: &[(&'static str, &str)]) -> Result<String, InvalidWorkload> {
    let mut name = Vec::with_capacity(parts.len());
    for (field, value) in parts {
        let reason = if value.is_empty() {
            "field should be assigned"
        } else if value.starts_with('-') {
            "field must not begin with a '-'"
        } else if value.ends_with('-') {
            "field must not end with a '-'"
        } else {
            name.push(value.replace('-', "--"));
            continue;
        };
        return Err(InvalidWorkload { field, value: (*value).to_owned(), reason });
    }
    Ok(name.join("-"))
}

/// The beginnings of the handles of a node's tunnel addresses in Calico; the node's name follows. It finds them by
/// these.
const TUNNELS: [&str; 5] = [
    "ipip-tunnel-addr-",
    "vxlan-tunnel-addr-",
    "vxlan-v6-tunnel-addr-",
    "wireguard-tunnel-addr-",
    "wireguard-v6-tunnel-addr-",
];

/// True for a handle that ends with this node's name.
pub fn is_node_handle(handle: &str, node: &str) -> bool {
    beginning(handle, node).is_some()
}

/// The name that a handle of the node `from` has when it is the node `to`'s. `None` for a handle that does not end with the
/// node's name.
pub fn renamed_node_handle(handle: &str, from: &str, to: &str) -> Option<String> {
    beginning(handle, from).map(|beginning| format!("{beginning}{to}"))
}

/// The part of such a handle before the node's name.
fn beginning<'h>(handle: &'h str, node: &str) -> Option<&'h str> {
    let of_tunnel = handle.strip_suffix(node).filter(|kind| TUNNELS.contains(kind));
    of_tunnel.or_else(|| beginning_of_node_prefix(handle, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_counts_go_up_and_down() {
        let (a, b) = ("10.0.0.0/26".parse().unwrap(), "fd80::40/122".parse().unwrap());
        let mut handle = Handle::new();
        assert!(handle.is_empty());
        handle.increment(a, 1);
        handle.increment(b, 2);
        assert_eq!(
            handle.encode().unwrap().as_bytes(),
            br#"{"block":{"10.0.0.0/26":1,"fd80::40/122":2},"deleted":false}"#
        );
        assert_eq!(handle.blocks().collect::<Vec<_>>(), [(a, 1), (b, 2)]);
        handle.decrement(b, 1);
        assert_eq!(handle.count(b), 1);
        handle.decrement(a, 5);
        handle.decrement(b, 1);
        assert!(handle.is_empty());
        handle.decrement(b, 1);
        assert!(handle.is_empty());
    }

    #[test]
    fn handle_damage_is_tolerated() {
        let mut handle =
            Handle::decode(&Key::default(), br#"{"block":{"nonsense":3,"10.0.0.0/26":-9223372036854775808}}"#).unwrap();
        let block = "10.0.0.0/26".parse().unwrap();
        assert_eq!(handle.blocks().count(), 1);
        handle.increment(block, 2);
        assert_eq!(handle.count(block), 2);
        let mut odd = Handle::decode(&Key::default(), br#"{"block":{"FD80:0::1/122":2}}"#).unwrap();
        let block = "fd80::/122".parse().unwrap();
        assert_eq!(odd.count(block), 2);
        odd.decrement(block, 2);
        assert!(odd.is_empty());
        assert!(Handle::decode(&Key::default(), br#"{"block":null}"#).unwrap().is_empty());
        assert!(Handle::decode(&Key::default(), br#"{"block":{"a":"b"}}"#).is_err());
    }

    #[test]
    fn handles_compare_up_to_carriage_return() {
        assert_eq!(handle_id("net1", "c1"), "net1.c1");
        assert!(same_handle("net1.c1\r\neth0", "net1.c1"));
        assert!(!same_handle("net1.c12", "net1.c1"));
    }

    #[test]
    fn handle_endpoint_names_match_calico() {
        let parts = [("node", "named-host"), ("orchestrator", "cni"), ("containerID", "abcd"), ("endpoint", "eth0")];
        assert_eq!(workload_endpoint_name(&parts).unwrap(), "named--host-cni-abcd-eth0");
        assert_eq!(
            workload_endpoint_name(&[("node", "n"), ("containerID", "bad4-")]).unwrap_err().to_string(),
            "error constructing WorkloadEndpoint name: error with field containerID = 'bad4-' (field must not end with a '-')"
        );
        assert!(workload_endpoint_name(&[("node", "")]).unwrap_err().to_string().contains("should be assigned"));
    }

    #[test]
    fn handle_is_renamed_only_for_its_node() {
        let renamed = |handle| renamed_node_handle(handle, "n1", "other");
        assert_eq!(renamed("vxlan-v6-tunnel-addr-n1").as_deref(), Some("vxlan-v6-tunnel-addr-other"));
        assert_eq!(renamed("margay-node-prefix.racks@n1").as_deref(), Some("margay-node-prefix.racks@other"));
        for handle in ["vxlan-tunnel-addr-n11", "vxlan-tunnel-addr-v6-n1", "n1", "net.n1", "x-ipip-tunnel-addr-n1"] {
            assert_eq!(renamed(handle), None, "{handle}");
            assert!(!is_node_handle(handle, "n1"), "{handle}");
        }
    }
}
