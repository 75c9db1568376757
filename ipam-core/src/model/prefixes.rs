//! Defines pools of prefixes, from which whole prefixes such as /64s are assigned instead of single addresses.
//!
//! A pool of prefixes is divided into blocks like any other pool, and each ordinal of a block identifies one prefix.
//! The allocator's answers and Margay's reports name a prefix by its first address. A request to the allocator may name
//! a prefix by any address inside the prefix.
//!
//! A block of prefixes is larger than any block of addresses can be, so the size distinguishes the two kinds of blocks.
//! Blocks of prefixes have keys of a separate form, which Calico skips.

use ipnet::IpNet;

use crate::net::Family;

/// The annotation that contains the length of a pool's prefixes, in decimal like `64`. Calico keeps the annotation with
/// the prefix length. It assigns no addresses from a pool of prefixes, because the pool's assignment mode is manual.
pub const PREFIX_LENGTH_ANNOTATION: &str = "margay.io/prefix-length";

/// The text with which the handle of a node's own prefix begins.
const NODE_PREFIX: &str = "margay-node-prefix.";

/// Returns the handle under which a node holds its own prefix from a pool. In the handle of a node's own prefix, `@`
/// separates the pool's name from the node's name, because neither name can contain `@`.
pub fn node_prefix_handle(pool: &str, node: &str) -> String {
    format!("{NODE_PREFIX}{pool}@{node}")
}

/// For a handle that [`node_prefix_handle`] has built, returns the part before the node's name.
pub(super) fn beginning_of_node_prefix<'h>(handle: &'h str, node: &str) -> Option<&'h str> {
    handle.strip_suffix(node).filter(|rest| rest.starts_with(NODE_PREFIX) && rest.ends_with('@'))
}

/// By default, a block of prefixes has 2^6 = 64 prefixes.
const DEFAULT_BLOCK_BITS: u8 = 6;
/// Minimum number of host bits of a prefix. A prefix must contain the container's address and at least one other
/// address.
const MIN_HOST_BITS: u8 = 2;

/// True if the block has the size of a block of prefixes.
pub fn is_of_prefixes(block: IpNet) -> bool {
    block.prefix_len() <= largest_length(Family::of_net(block))
}

fn largest_length(family: Family) -> u8 {
    family.block_sizes().start() - 1
}

/// Returns the prefix length of the blocks in a pool whose prefixes have the length `length`.
///
/// # Errors
/// The reason why the pool cannot have prefixes of the given length.
pub fn block_size_for(pool: IpNet, length: u8) -> Result<u8, String> {
    let family = Family::of_net(pool);
    let longest = family.bits() - MIN_HOST_BITS;
    if length < pool.prefix_len() || length > longest {
        return Err(format!("prefixes of {pool} have a length from /{} to /{longest}", pool.prefix_len()));
    }
    let largest = largest_length(family);
    if pool.prefix_len() > largest {
        return Err(format!("a pool of {family} prefixes has a length of /{largest} at most"));
    }
    Ok(length.saturating_sub(DEFAULT_BLOCK_BITS).clamp(pool.prefix_len(), largest))
}

/// Returns the prefix length of one ordinal of a block: 32 or 128 in a block of addresses, or the length of the
/// prefixes in a block of prefixes. Returns `None` if the block cannot be divided into `ordinals` equal parts.
pub(super) fn length_in_block(block: IpNet, ordinals: usize) -> Option<u8> {
    let bits = Family::of_net(block).bits();
    let length = block.prefix_len().checked_add(u8::try_from(ordinals.checked_ilog2()?).ok()?)?;
    let is_length = if is_of_prefixes(block) { length <= bits - MIN_HOST_BITS } else { length == bits };
    (ordinals.is_power_of_two() && is_length).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(pool: &str, length: u8) -> Result<u8, String> {
        block_size_for(pool.parse().unwrap(), length)
    }

    #[test]
    fn prefix_block_has_64_prefixes_or_distinct_size() {
        assert_eq!(size("2001:db8::/48", 64), Ok(58));
        assert_eq!(size("2001:db8::/60", 64), Ok(60));
        assert_eq!(size("2001:db8::/64", 64), Ok(64));
        assert_eq!(size("2001:db8::/48", 80), Ok(74));
        assert_eq!(size("2001:db8::/96", 124), Ok(115));
        assert_eq!(size("10.0.0.0/8", 24), Ok(18));
        assert_eq!(size("10.64.0.0/16", 28), Ok(19));
        assert_eq!(size("10.0.0.0/8", 10), Ok(8));
        for (pool, length, reason) in [
            ("2001:db8::/48", 40, "from /48 to /126"),
            ("2001:db8::/48", 127, "from /48 to /126"),
            ("2001:db8::/120", 124, "/115 at most"),
            ("10.0.0.0/20", 28, "/19 at most"),
            ("10.0.0.0/16", 31, "from /16 to /30"),
        ] {
            let error = size(pool, length).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn prefix_handle_of_node_names_one_node() {
        assert_ne!(node_prefix_handle("a.b", "c"), node_prefix_handle("a", "b.c"));
        let handle = node_prefix_handle("racks", "node.1");
        assert_eq!(beginning_of_node_prefix(&handle, "node.1"), Some("margay-node-prefix.racks@"));
        assert_eq!(beginning_of_node_prefix(&handle, "1"), None);
        assert_eq!(beginning_of_node_prefix("net.c@node.1", "node.1"), None);
    }

    #[test]
    fn prefix_length_follows_from_number_of_ordinals() {
        let length = |block: &str, ordinals| length_in_block(block.parse().unwrap(), ordinals);
        assert_eq!(length("10.0.0.0/26", 64), Some(32));
        assert_eq!(length("2001:db8::/122", 64), Some(128));
        assert_eq!(length("2001:db8::/58", 64), Some(64));
        assert_eq!(length("2001:db8::/64", 1), Some(64));
        assert_eq!(length("10.0.0.0/19", 512), Some(28));
        for (block, ordinals) in
            [("10.0.0.0/26", 32), ("10.0.0.0/26", 0), ("2001:db8::/58", 63), ("10.0.0.0/19", 8192), ("::/58", 0)]
        {
            assert_eq!(length(block, ordinals), None, "{block} {ordinals}");
        }
    }
}
