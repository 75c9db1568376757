//! The rules for a new pool, as Calico checks them.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::pool::{AssignmentMode, NewPool, Pool, PoolUse};
use super::pool_spec::{
    ALLOWED_USES, ASSIGNMENT_MODE, BLOCK_SIZE, CIDR, NAMESPACE_SELECTOR, NODE_SELECTOR, read_pool_spec,
};
use super::prefixes::block_size_for;
use super::resource::check_name;
use super::spec_field::{InvalidPool, SpecField};
use crate::net::{Family, overlap};
use crate::selector::Selector;

/// The default prefix length of blocks: 64 addresses.
pub fn default_block_size(family: Family) -> u8 {
    match family {
        Family::V4 => 26,
        Family::V6 => 122,
    }
}

/// The prefix length of blocks for a pool: the wanted one, or the default, but never blocks larger than the pool.
pub fn fitting_block_size(cidr: IpNet, wanted: Option<u8>) -> u8 {
    wanted.unwrap_or_else(|| default_block_size(Family::of_net(cidr))).max(cidr.prefix_len())
}

/// Checks a new pool against the rules, the pools that exist, and the blocks that exist.
///
/// # Errors
/// [`InvalidPool`] for the first rule that is broken: the name; a network that is strictly masked, not link-local and
/// not IPv4 mapped into IPv6; blocks of /20 to /32, or /116 to /128, that fit into the pool; selectors that can be read
/// and do not contain `global()`; a use, with `LoadBalancer` only by itself and for all nodes, and `Tunnel` only without a
/// namespace selector; no other pool on the same addresses; no block of another size on them.
pub fn check_new_pool(new: &NewPool, pools: &[Pool], blocks: &[IpNet]) -> Result<(), InvalidPool> {
    check_name(&new.name).map_err(|reason| InvalidPool::new("IPPool.Name", &new.name, reason))?;
    check_network(new.cidr)?;
    check_block_size(new)?;
    check_selectors_and_uses(new)?;
    check_neighbours(new, pools, blocks)
}

/// Checks a changed pool. Its network and its block size must stay the same, since addresses depend on them.
///
/// # Errors
/// [`InvalidPool`] for another network or block size, a use other than that of a load balancer's pool, and for selectors
/// and uses as for a new pool.
pub fn check_changed_pool(new: &NewPool, stored: &Pool) -> Result<(), InvalidPool> {
    if new.cidr != stored.cidr() {
        return Err(CIDR.wrong(new.cidr, "IPPool CIDR cannot be modified"));
    }
    if new.prefix_length != stored.prefix_length() {
        let length = new.prefix_length.map_or(String::new(), |length| length.to_string());
        return Err(InvalidPool::new("IPPool.PrefixLength", length, "the length of the prefixes cannot be modified"));
    }
    if new.prefix_length.is_none() && new.block_size != stored.block_size() {
        return Err(BLOCK_SIZE.wrong(new.block_size, "IPPool BlockSize cannot be modified"));
    }
    if stored.allows(PoolUse::LoadBalancer) && !new.allowed_uses.contains(&PoolUse::LoadBalancer) {
        let reason = "IPPool allowed use cannot be changed from LoadBalancer to Workload or Tunnel";
        return Err(ALLOWED_USES.wrong(shown(&new.allowed_uses), reason));
    }
    check_selectors_and_uses(new)
}

/// Checks a stored pool against the rules that Calico's client applies to each change of a pool, and to its deletion, which
/// begins with a change.
///
/// # Errors
/// [`InvalidPool`] for a field of another type, tunnels that do not go together, and for selectors and uses as for a new
/// pool.
pub fn check_stored_pool(pool: &Pool) -> Result<(), InvalidPool> {
    let nothing = serde_json::Map::new();
    let spec = pool.resource().whole_spec().unwrap_or(&nothing);
    let (new, _) = read_pool_spec(pool.name(), spec, None, Some(pool))?;
    check_selectors_and_uses(&new)
}

/// Returns a pool for certain namespaces without the use for tunnels, which are in no namespace; `None` if it has no such use, or
/// no other.
pub fn without_tunnels(pool: &Pool) -> Option<Pool> {
    let tunnel = PoolUse::Tunnel.as_str();
    let uses = pool.allowed_uses();
    let others: Vec<&str> = uses.iter().copied().filter(|used| *used != tunnel).collect();
    if pool.namespace_selector().is_empty() || others.is_empty() || others.len() == uses.len() {
        return None;
    }
    let mut changed = pool.clone();
    changed.resource_mut().set_spec(ALLOWED_USES, Some(others.into()));
    Some(changed)
}

fn check_selectors_and_uses(new: &NewPool) -> Result<(), InvalidPool> {
    check_selector(NODE_SELECTOR, &new.node_selector)?;
    check_selector(NAMESPACE_SELECTOR, &new.namespace_selector)?;
    check_uses(new)
}

fn check_network(cidr: IpNet) -> Result<(), InvalidPool> {
    let wrong = |reason: &str| Err(CIDR.wrong(cidr, reason));
    if cidr != cidr.trunc() {
        return wrong("IP pool CIDR is not strictly masked");
    }
    let clashes = match cidr {
        IpNet::V4(_) => overlap(cidr, Ipv4Net::new_assert([169, 254, 0, 0].into(), 16).into()),
        IpNet::V6(_) => overlap(cidr, Ipv6Net::new_assert([0xfe80, 0, 0, 0, 0, 0, 0, 0].into(), 10).into()),
    };
    match cidr {
        IpNet::V4(_) if clashes => wrong("IP pool range overlaps with IPv4 Link Local range 169.254.0.0/16"),
        IpNet::V6(_) if clashes => wrong("IP pool range overlaps with IPv6 Link Local range fe80::/10"),
        IpNet::V6(net) if net.addr().to_ipv4_mapped().is_some() => wrong("IP pool range is IPv4 mapped into IPv6"),
        _ => Ok(()),
    }
}

fn check_block_size(new: &NewPool) -> Result<(), InvalidPool> {
    if let Some(length) = new.prefix_length {
        return match block_size_for(new.cidr, length) {
            Ok(_) if new.assignment_mode == AssignmentMode::Manual => Ok(()),
            Ok(_) => {
                let reason = "a pool of prefixes must have the assignment mode Manual";
                Err(ASSIGNMENT_MODE.wrong(new.assignment_mode.as_str(), reason))
            }
            Err(reason) => Err(InvalidPool::new("IPPool.PrefixLength", length, reason)),
        };
    }
    let sizes = Family::of_net(new.cidr).block_sizes();
    if !sizes.contains(&new.block_size) {
        let reason = format!("block size must be between {} and {}", sizes.start(), sizes.end());
        return Err(BLOCK_SIZE.wrong(new.block_size, reason));
    }
    if new.cidr.prefix_len() > new.block_size {
        let reason = format_args!(
            "IP pool size is too small for use with Calico IPAM. It must be equal to or greater than the block size, /{}",
            new.block_size
        )
        .to_string();
        return Err(CIDR.wrong(new.cidr, reason));
    }
    Ok(())
}

fn check_selector(field: SpecField, text: &str) -> Result<(), InvalidPool> {
    match text.parse::<Selector>() {
        Err(error) => Err(field.wrong(text, error)),
        Ok(selector) if selector.uses_global() => Err(field.wrong(text, "global() is not allowed here")),
        Ok(_) => Ok(()),
    }
}

fn check_uses(new: &NewPool) -> Result<(), InvalidPool> {
    let uses = &new.allowed_uses;
    if uses.is_empty() {
        return Err(ALLOWED_USES.wrong("", "at least one use is needed"));
    }
    if uses.contains(&PoolUse::Tunnel) && !new.namespace_selector.is_empty() {
        // The address of a tunnel is in no namespace.
        let reason = "IP Pool with AllowedUse Tunnel must not have a namespace selector; set allowedUses to Workload";
        return Err(NAMESPACE_SELECTOR.wrong(&new.namespace_selector, reason));
    }
    if !uses.contains(&PoolUse::LoadBalancer) {
        return Ok(());
    }
    if let Some(other) = uses.iter().find(|used| **used != PoolUse::LoadBalancer) {
        let reason = format!("LoadBalancer cannot be used at the same time as: {other}");
        return Err(ALLOWED_USES.wrong(shown(uses), reason));
    }
    if new.node_selector != "all()" {
        let reason = "IP Pool with AllowedUse LoadBalancer must have node selector set to all()";
        return Err(NODE_SELECTOR.wrong(&new.node_selector, reason));
    }
    Ok(())
}

fn shown(uses: &[PoolUse]) -> String {
    uses.iter().map(|used| used.as_str()).collect::<Vec<_>>().join(",")
}

impl NewPool {
    /// The prefix length of the pool's blocks, also of those of prefixes.
    pub(crate) fn size_of_blocks(&self) -> u8 {
        let of_prefixes = self.prefix_length.and_then(|length| block_size_for(self.cidr, length).ok());
        of_prefixes.unwrap_or(self.block_size)
    }
}

fn check_neighbours(new: &NewPool, pools: &[Pool], blocks: &[IpNet]) -> Result<(), InvalidPool> {
    if let Some(other) = pools.iter().find(|pool| pool.name() != new.name && overlap(pool.cidr(), new.cidr)) {
        let reason =
            format_args!("IPPool({}) CIDR overlaps with IPPool({}) CIDR {}", new.name, other.name(), other.cidr())
                .to_string();
        return Err(CIDR.wrong(new.cidr, reason));
    }
    let size = new.size_of_blocks();
    let odd = |block: &&IpNet| overlap(**block, new.cidr) && block.prefix_len() != size;
    if let Some(block) = blocks.iter().find(odd) {
        let reason = format_args!("block {block} of another size exists inside").to_string();
        return Err(BLOCK_SIZE.wrong(new.block_size, reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    fn new(cidr: &str, block_size: u8) -> NewPool {
        NewPool::new("p", cidr.parse().unwrap()).with_block_size(block_size)
    }

    #[test]
    fn each_rule_names_its_field() {
        let other = NewPool::new("other", "10.1.0.0/16".parse().unwrap());
        let pools = [Pool::new(&other, "u", datetime!(2026-01-01 0:00 UTC)).unwrap()];
        let blocks = ["10.2.0.0/28".parse().unwrap()];
        for (pool, field, reason) in [
            (NewPool { name: "A".into(), ..new("10.0.0.0/16", 26) }, "IPPool.Name", "a-z"),
            (new("10.0.0.1/16", 26), "IPPool.CIDR", "strictly masked"),
            (new("169.254.1.0/24", 26), "IPPool.CIDR", "Link Local"),
            (new("0.0.0.0/0", 26), "IPPool.CIDR", "Link Local"),
            (new("fe80::/64", 122), "IPPool.CIDR", "Link Local"),
            (new("::ffff:10.0.0.0/112", 122), "IPPool.CIDR", "mapped"),
            (new("10.0.0.0/16", 19), "IPPool.BlockSize", "between 20 and 32"),
            (new("10.0.0.0/16", 33), "IPPool.BlockSize", "between 20 and 32"),
            (new("fd80::/64", 115), "IPPool.BlockSize", "between 116 and 128"),
            (new("10.0.0.0/28", 26), "IPPool.CIDR", "too small"),
            (new("10.0.0.0/16", 26).with_node_selector("a =="), "IPPool.NodeSelector", "string"),
            (new("10.0.0.0/16", 26).with_node_selector("!global()"), "IPPool.NodeSelector", "global()"),
            (new("10.0.0.0/16", 26).with_namespace_selector("("), "IPPool.NamespaceSelector", ""),
            (new("10.0.0.0/16", 26).with_allowed_uses([]), "IPPool.AllowedUses", "at least one"),
            (
                new("10.0.0.0/16", 26).with_allowed_uses([PoolUse::LoadBalancer, PoolUse::Tunnel]),
                "IPPool.AllowedUses",
                "LoadBalancer cannot be used at the same time as: Tunnel",
            ),
            (
                new("10.0.0.0/16", 26).with_allowed_uses([PoolUse::LoadBalancer]).with_node_selector("has(a)"),
                "IPPool.NodeSelector",
                "IP Pool with AllowedUse LoadBalancer must have node selector set to all()",
            ),
            (
                new("10.0.0.0/16", 26)
                    .with_namespace_selector("has(a)")
                    .with_allowed_uses([PoolUse::Workload, PoolUse::Tunnel]),
                "IPPool.NamespaceSelector",
                "must not have a namespace selector",
            ),
            (new("10.1.2.0/24", 26), "IPPool.CIDR", "IPPool(p) CIDR overlaps with IPPool(other) CIDR 10.1.0.0/16"),
            (new("10.0.0.0/8", 26), "IPPool.CIDR", "overlaps"),
            (new("10.2.0.0/16", 26), "IPPool.BlockSize", "10.2.0.0/28"),
        ] {
            let error = check_new_pool(&pool, &pools, &blocks).unwrap_err();
            assert_eq!(error.field(), field, "{error}");
            assert!(error.reason().contains(reason), "{error}");
        }
        for good in [
            new("10.0.0.0/16", 26),
            new("10.0.0.0/32", 32),
            new("fd80::/64", 122),
            new("10.2.0.0/16", 28),
            new("10.0.0.0/16", 26).with_namespace_selector("has(a)"),
            new("10.0.0.0/16", 26).with_allowed_uses([PoolUse::LoadBalancer]),
        ] {
            assert_eq!(check_new_pool(&good, &pools, &blocks), Ok(()));
        }
        assert_eq!(
            check_new_pool(&new("10.0.0.1/16", 26), &[], &[]).unwrap_err().to_string(),
            "error with field IPPool.CIDR = '10.0.0.1/16' (IP pool CIDR is not strictly masked)"
        );
    }

    #[test]
    fn a_pool_keeps_its_network_and_its_blocks() {
        let made = |new: &NewPool| Pool::new(new, "u", datetime!(2026-01-01 0:00 UTC)).unwrap();
        let plain = new("10.0.0.0/16", 26);
        let balancer = plain.clone().with_allowed_uses([PoolUse::LoadBalancer]);
        for (stored, changed, field, reason) in [
            (&plain, new("10.1.0.0/16", 26), "IPPool.CIDR", "IPPool CIDR cannot be modified"),
            (&plain, new("10.0.0.0/16", 27), "IPPool.BlockSize", "IPPool BlockSize cannot be modified"),
            (&balancer, plain.clone(), "IPPool.AllowedUses", "cannot be changed from LoadBalancer"),
            (&plain, plain.clone().with_node_selector("global()"), "IPPool.NodeSelector", "global()"),
        ] {
            let error = check_changed_pool(&changed, &made(stored)).unwrap_err();
            assert_eq!(error.field(), field, "{error}");
            assert!(error.reason().contains(reason), "{error}");
        }
        assert_eq!(check_changed_pool(&plain.clone().with_node_selector("has(a)"), &made(&plain)), Ok(()));
        assert_eq!(check_changed_pool(&balancer, &made(&plain)), Ok(()));
    }

    #[test]
    fn a_stored_pool_that_calico_refuses_is_told() {
        let stored = |rest: &str| {
            let key = crate::model::keys::resource(crate::model::keys::ResourceKind::IpPool, "p");
            let text = format!(r#"{{"metadata":{{"name":"p"}},"spec":{{"cidr":"10.0.0.0/16"{rest}}}}}"#);
            crate::model::Document::decode(&key, text.as_bytes()).unwrap()
        };
        for (rest, field) in [
            (r#","namespaceSelector":"has(a)""#, "IPPool.NamespaceSelector"),
            (r#","namespaceSelector":"has(a)","allowedUses":["Tunnel"]"#, "IPPool.NamespaceSelector"),
            (r#","allowedUses":["LoadBalancer"],"nodeSelector":"has(a)""#, "IPPool.NodeSelector"),
            (r#","allowedUses":["LoadBalancer"],"disableBGPExport":true"#, "IPPool.DisableBGPExport"),
            (r#","allowedUses":["LoadBalancer"],"ipipMode":"Always""#, "IPPool.IPIPMode"),
            (r#","allowedUses":["LoadBalancer"],"vxlanMode":"CrossSubnet""#, "IPPool.IPIPMode"),
            (r#","allowedUses":["LoadBalancer","Workload"]"#, "IPPool.AllowedUses"),
            (r#","allowedUses":["Pods"]"#, "IPPool.AllowedUses"),
            (r#","ipipMode":"Always","vxlanMode":"Always""#, "IPPool.VXLANMode"),
        ] {
            assert_eq!(check_stored_pool(&stored(rest)).unwrap_err().field(), field, "{rest}");
        }
        for rest in [
            "",
            r#","namespaceSelector":"","allowedUses":[]"#,
            r#","namespaceSelector":"has(a)","allowedUses":["Workload"]"#,
            r#","allowedUses":["LoadBalancer"],"nodeSelector":"","disableBGPExport":false,"natOutgoing":true"#,
            r#","disableBGPExport":true,"ipipMode":"Always","nodeSelector":"has(a)""#,
        ] {
            assert_eq!(check_stored_pool(&stored(rest)), Ok(()), "{rest}");
        }
        for (rest, is_changed) in [
            (r#","namespaceSelector":"has(a)""#, true),
            (r#","namespaceSelector":"has(a)","allowedUses":["Tunnel","Workload"]"#, true),
            (r#","namespaceSelector":"has(a)","allowedUses":["Tunnel"]"#, false),
            (r#","namespaceSelector":"has(a)","allowedUses":["Workload"]"#, false),
            ("", false),
        ] {
            let changed = without_tunnels(&stored(rest));
            assert_eq!(changed.is_some(), is_changed, "{rest}");
            assert!(changed.is_none_or(|pool| check_stored_pool(&pool).is_ok()), "{rest}");
        }
        let new = NewPool::new("p", "10.0.0.0/16".parse().unwrap());
        assert_eq!(new.clone().with_namespace_selector("").allowed_uses, [PoolUse::Workload, PoolUse::Tunnel]);
        assert_eq!(new.with_namespace_selector("has(a)").allowed_uses, [PoolUse::Workload]);
        let prefixes = NewPool::new("p", "fd80::/48".parse().unwrap()).with_prefix_length(64);
        assert_eq!(check_stored_pool(&Pool::new(&prefixes, "u", datetime!(2026-01-01 0:00 UTC)).unwrap()), Ok(()));
    }

    #[test]
    fn blocks_shrink_to_fit() {
        let net = |text: &str| text.parse().unwrap();
        assert_eq!(fitting_block_size(net("10.0.0.0/16"), None), 26);
        assert_eq!(fitting_block_size(net("10.0.0.0/28"), None), 28);
        assert_eq!(fitting_block_size(net("10.0.0.0/28"), Some(26)), 28);
        assert_eq!(fitting_block_size(net("fd80::/64"), Some(120)), 120);
        assert_eq!(fitting_block_size(net("fd80::/126"), None), 126);
    }
}
