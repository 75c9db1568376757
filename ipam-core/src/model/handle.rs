//! Defines handles: documents that record which blocks contain a container's addresses. Builds the names of handles and
//! workload endpoints, and recognizes node handles. A node handle is a handle of a node's tunnel or own prefix, and
//! ends with the node's name.

use std::collections::BTreeMap;

use ipnet::IpNet;
use kv::{Key, Value};

use super::codec::{Document, Field, Malformed, UnknownFields, document, from_json, to_json};
use super::prefixes::beginning_of_node_prefix;

document! {
    /// The stored document of a handle. The handle's id is part of its key, but not of the document.
    ///
    /// A handle's count of addresses per block is only a hint, because Calico raises the count before the addresses are
    /// assigned. Only the blocks record reliably which addresses a handle holds.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct Handle {
        // The CIDRs of the blocks are kept as unparsed text, so that an invalid entry is not lost when the handle is
        // rewritten.
        block: Field<BTreeMap<String, i64>> = "block",
        deleted: Field<bool> = "deleted",
    }
}

impl Handle {
    /// Creates a handle without blocks, in the current form of the document.
    pub fn new() -> Self {
        Self { block: Field::Is(BTreeMap::new()), deleted: Field::Is(false), extra: UnknownFields::default() }
    }

    /// Returns the handle's blocks and the count of addresses in each, sorted by the block's text. Invalid entries of
    /// the handle are skipped.
    pub fn blocks(&self) -> impl Iterator<Item = (IpNet, i64)> {
        let entries = self.block.get().into_iter().flatten();
        entries.filter_map(|(text, count)| Some((text.parse::<IpNet>().ok()?.trunc(), *count)))
    }

    /// Returns the handle's count of addresses in a block, or 0 if the handle does not list the block.
    pub fn count(&self, block: IpNet) -> i64 {
        self.blocks().find(|(named, _)| *named == block).map_or(0, |(_, count)| count)
    }

    /// Increases the handle's count of addresses in a block.
    pub fn increment(&mut self, block: IpNet, by: usize) {
        let by = i64::try_from(by).unwrap_or(i64::MAX);
        // A negative stored count is damaged and counts as 0.
        self.set(block, self.count(block).max(0).saturating_add(by));
    }

    /// Decreases the handle's count of addresses in a block, and removes the block's entry when the count is 0. `by`
    /// may exceed the stored count, because the counts in a handle are only hints.
    pub fn decrement(&mut self, block: IpNet, by: usize) {
        let by = i64::try_from(by).unwrap_or(i64::MAX);
        self.set(block, self.count(block).saturating_sub(by));
    }

    /// Sets the handle's count for a block to the number of addresses that the block itself records. If `count` is 0 or
    /// less, removes the block from the handle.
    pub fn set(&mut self, block: IpNet, count: i64) {
        let blocks = self.block.or_default();
        // Another program may have spelled the block's CIDR differently, so entries in every spelling are removed.
        blocks.retain(|text, _| text.parse::<IpNet>().map(|net| net.trunc()) != Ok(block));
        if count > 0 {
            blocks.insert(block.to_string(), count);
        }
        self.deleted = Field::Is(self.deleted.or_zero());
    }

    /// Returns the number of entries of the handle whose key is not a valid CIDR.
    pub fn odd_entries(&self) -> usize {
        self.block.get().into_iter().flatten().filter(|(text, _)| text.parse::<IpNet>().is_err()).count()
    }

    /// Replaces all entries of the handle by the given blocks, each with the number of addresses that the block itself
    /// records.
    pub fn set_all(&mut self, counts: impl IntoIterator<Item = (IpNet, i64)>) {
        self.block.or_default().clear();
        for (block, count) in counts {
            self.set(block, count);
        }
    }

    /// True if the handle lists no block, so that its key must be deleted. Invalid entries of the handle are ignored.
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

/// Returns a container's handle in a network, `<network>.<container id>`. A handle cannot be split into network and
/// container id again, because both parts may contain dots.
pub fn handle_id(network: &str, container: &str) -> String {
    format!("{network}.{container}")
}

/// True if a stored handle equals a given handle. Compares handles only up to the first carriage return, because
/// Calico's old migration from host-local may have stored a carriage return and more text after a handle.
pub fn same_handle(stored: &str, handle: &str) -> bool {
    stored.split('\r').next() == handle.split('\r').next()
}

/// The error for a name that cannot be part of a workload endpoint's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("error constructing WorkloadEndpoint name: error with field {field} = '{value}' ({reason})")]
pub struct InvalidWorkload {
    field: &'static str,
    value: String,
    reason: &'static str,
}

/// Returns the name that Calico gives to a workload endpoint. An endpoint's name consists of its parts, joined by `-`;
/// each `-` inside a part is doubled.
///
/// Each element of `parts` consists of a part's name, which error messages mention, and its value. The parts of an
/// endpoint's name are node, `k8s` or `cni`, pod or container id, and interface.
///
/// # Errors
/// [`InvalidWorkload`] for the first name part that is empty, or that begins or ends with `-`.
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

/// Prefixes of the handles under which Calico holds and finds a node's tunnel addresses. The handle of a node's tunnel
/// is a prefix in `TUNNELS` followed by the node's name.
const TUNNELS: [&str; 5] = [
    "ipip-tunnel-addr-",
    "vxlan-tunnel-addr-",
    "vxlan-v6-tunnel-addr-",
    "wireguard-tunnel-addr-",
    "wireguard-v6-tunnel-addr-",
];

/// True if the handle is one of the node's tunnel handles, or the handle of a prefix that the node itself holds.
pub fn is_node_handle(handle: &str, node: &str) -> bool {
    beginning(handle, node).is_some()
}

/// Returns the node handle of `to` that corresponds to a node handle of `from`, or `None` if the handle is not a node
/// handle of `from`.
pub fn renamed_node_handle(handle: &str, from: &str, to: &str) -> Option<String> {
    beginning(handle, from).map(|beginning| format!("{beginning}{to}"))
}

/// Returns the part of a node handle before the node's name.
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
