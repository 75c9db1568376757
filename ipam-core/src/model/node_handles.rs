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

/// The beginning of a handle that ends with this node's name: all before the name. `None` for every other handle.
pub fn beginning_of_node_handle<'h>(handle: &'h str, node: &str) -> Option<&'h str> {
    let of_tunnel = handle.strip_suffix(node).filter(|kind| TUNNELS.contains(kind));
    of_tunnel.or_else(|| beginning_of_node_prefix(handle, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_of_another_node_or_of_a_container_is_none() {
        assert_eq!(beginning_of_node_handle("vxlan-v6-tunnel-addr-n1", "n1"), Some("vxlan-v6-tunnel-addr-"));
        assert_eq!(beginning_of_node_handle("margay-node-prefix.racks@n1", "n1"), Some("margay-node-prefix.racks@"));
        for handle in ["vxlan-tunnel-addr-n11", "vxlan-tunnel-addr-v6-n1", "n1", "net.n1", "x-ipip-tunnel-addr-n1"] {
            assert_eq!(beginning_of_node_handle(handle, "n1"), None, "{handle}");
        }
    }
}
