//! Handles that end with a node's name: those of its tunnels, and of the prefixes that it has itself.

use super::prefixes::beginning_of_node_prefix;

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
    fn a_handle_of_another_node_or_of_a_container_is_none() {
        let renamed = |handle| renamed_node_handle(handle, "n1", "other");
        assert_eq!(renamed("vxlan-v6-tunnel-addr-n1").as_deref(), Some("vxlan-v6-tunnel-addr-other"));
        assert_eq!(renamed("margay-node-prefix.racks@n1").as_deref(), Some("margay-node-prefix.racks@other"));
        for handle in ["vxlan-tunnel-addr-n11", "vxlan-tunnel-addr-v6-n1", "n1", "net.n1", "x-ipip-tunnel-addr-n1"] {
            assert_eq!(renamed(handle), None, "{handle}");
            assert!(!is_node_handle(handle, "n1"), "{handle}");
        }
    }
}
