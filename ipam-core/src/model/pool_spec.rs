//! Reads the spec of a pool as a user writes it, and checks new, changed and stored pools against Calico's rules.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Map, Value};

use super::codec::JsonObject;
use super::pool::{AssignmentMode, NewPool, Pool, PoolUse};
use super::prefixes::block_size_for;
use super::resource::check_name;
use super::spec::{InvalidPool, SpecField, spec_fields};
use crate::net::{Family, overlap};
use crate::selector::Selector;

spec_fields! {
    /// The names of the fields of a pool's spec.
    pub const POOL_FIELDS:
    CIDR = "cidr" as "IPPool.CIDR";
    VXLAN_MODE = "vxlanMode" as "IPPool.VXLANMode" of ["Never", "Always", "CrossSubnet"];
    IPIP_MODE = "ipipMode" as "IPPool.IPIPMode" of ["Never", "Always", "CrossSubnet"];
    NAT_OUTGOING = "natOutgoing" as "IPPool.NATOutgoing";
    DISABLED = "disabled" as "IPPool.Disabled";
    DISABLE_BGP_EXPORT = "disableBGPExport" as "IPPool.DisableBGPExport";
    BLOCK_SIZE = "blockSize" as "IPPool.BlockSize";
    NODE_SELECTOR = "nodeSelector" as "IPPool.NodeSelector";
    NAMESPACE_SELECTOR = "namespaceSelector" as "IPPool.NamespaceSelector";
    ALLOWED_USES = "allowedUses" as "IPPool.AllowedUses";
    ASSIGNMENT_MODE = "assignmentMode" as "IPPool.AssignmentMode" of ["Automatic", "Manual"];
}

/// Reads a pool's spec. Returns the pool that the spec defines, and the spec in its stored form, with default values
/// and without boolean fields that are false. The argument `prefix_length` is the value of the annotation
/// [`super::PREFIX_LENGTH_ANNOTATION`]; without the annotation, the stored pool's prefix length applies. If the spec
/// has no block size, the stored pool's block size applies, or else the default block size.
///
/// # Errors
/// [`InvalidPool`] for a field of a wrong type or with an invalid value, and for tunnel modes that exclude each other
/// or that a load balancer's pool must not have. `read_pool_spec` checks only the spec; [`check_new_pool`] also checks
/// a new pool's name, block size and overlaps.
pub fn read_pool_spec(
    name: &str,
    written: &JsonObject,
    prefix_length: Option<&str>,
    stored_pool: Option<&Pool>,
) -> Result<(NewPool, JsonObject), InvalidPool> {
    let cidr = network(written)?;
    let ipip = IPIP_MODE.text(written)?;
    let vxlan = VXLAN_MODE.text(written)?;
    check_tunnels(cidr, ipip, vxlan)?;
    let allowed_uses = uses(written)?;
    if allowed_uses.contains(&PoolUse::LoadBalancer) {
        check_load_balancer(written, ipip, vxlan)?;
    }
    let mode = ASSIGNMENT_MODE.text(written)?;
    let block_size = stored_pool.filter(|pool| pool.prefix_length().is_none()).map(Pool::block_size);
    let usual = block_size.unwrap_or_else(|| default_block_size(Family::of_net(cidr)));
    let not_a_length = |text| InvalidPool::new("IPPool.PrefixLength", text, "must be a number, for example 64");
    let length = prefix_length.map(|text| text.parse().map_err(|_| not_a_length(text))).transpose()?;
    let node_selector = NODE_SELECTOR.text(written)?;
    let new = NewPool {
        name: name.to_owned(),
        cidr,
        block_size: size(written, Family::of_net(cidr))?.unwrap_or(usual),
        prefix_length: length.or_else(|| stored_pool?.prefix_length()),
        node_selector: if node_selector.is_empty() { "all()" } else { node_selector }.to_owned(),
        namespace_selector: NAMESPACE_SELECTOR.text(written)?.to_owned(),
        allowed_uses,
        assignment_mode: if mode == "Manual" { AssignmentMode::Manual } else { AssignmentMode::Automatic },
    };
    let mut spec = new.spec();
    spec.extend([IPIP_MODE.with(ipip), VXLAN_MODE.with(vxlan)]);
    for field in [NAT_OUTGOING, DISABLED, DISABLE_BGP_EXPORT] {
        if field.switch(written)? {
            spec.extend([field.with(true)]);
        }
    }
    Ok((new, spec))
}

impl NewPool {
    /// Returns the pool's spec in its stored form, with both tunnel modes off.
    pub fn spec(&self) -> JsonObject {
        let uses: Vec<&str> = self.allowed_uses.iter().map(|used| used.as_str()).collect();
        let mut spec = JsonObject::from_iter([
            CIDR.with(self.cidr.to_string()),
            VXLAN_MODE.with("Never"),
            IPIP_MODE.with("Never"),
            BLOCK_SIZE.with(self.block_size),
            NODE_SELECTOR.with(self.node_selector.as_str()),
            ALLOWED_USES.with(uses),
            ASSIGNMENT_MODE.with(self.assignment_mode.as_str()),
        ]);
        if !self.namespace_selector.is_empty() {
            spec.extend([NAMESPACE_SELECTOR.with(self.namespace_selector.as_str())]);
        }
        spec
    }
}

fn network(written: &JsonObject) -> Result<IpNet, InvalidPool> {
    match CIDR.get(written) {
        None => Err(CIDR.wrong("", "IPPool CIDR must be specified")),
        Some(Value::String(text)) => text.parse().map_err(|_| CIDR.wrong(text, "IPPool CIDR must be a valid subnet")),
        Some(other) => Err(CIDR.wrong(other, "IPPool CIDR must be a valid subnet")),
    }
}

fn check_tunnels(cidr: IpNet, ipip: &str, vxlan: &str) -> Result<(), InvalidPool> {
    if vxlan != "Never" && ipip != "Never" {
        return Err(VXLAN_MODE.wrong(vxlan, "Cannot enable both VXLAN and IPIP on the same IPPool"));
    }
    if Family::of_net(cidr) == Family::V6 && ipip != "Never" {
        return Err(IPIP_MODE.wrong(ipip, "IPIP is not supported on an IPv6 IP pool"));
    }
    Ok(())
}

/// Checks the fields in the spec of a load balancer's pool. The error message about `disableBGPExport` says `false`,
/// where Calico's message wrongly says `true`.
fn check_load_balancer(written: &JsonObject, ipip: &str, vxlan: &str) -> Result<(), InvalidPool> {
    if let Some(mode) = [ipip, vxlan].into_iter().find(|mode| *mode != "Never") {
        let reason = "Neither IPIPMode nor VXLANMode can be enabled on AllowedUses LoadBalancer IP pool";
        return Err(IPIP_MODE.wrong(mode, reason));
    }
    if DISABLE_BGP_EXPORT.switch(written)? {
        let reason = "IP Pool with AllowedUse LoadBalancer must have DisableBGPExport set to false";
        return Err(DISABLE_BGP_EXPORT.wrong(true, reason));
    }
    Ok(())
}

/// Returns the block size in a pool's spec. A block size of 0 counts as unset.
fn size(written: &JsonObject, family: Family) -> Result<Option<u8>, InvalidPool> {
    let Some(value) = BLOCK_SIZE.get(written) else { return Ok(None) };
    match value.as_u64().map(u8::try_from) {
        Some(Ok(0)) => Ok(None),
        Some(Ok(size)) => Ok(Some(size)),
        _ => {
            let sizes = family.block_sizes();
            let reason = format!("block size must be between {} and {}", sizes.start(), sizes.end());
            Err(BLOCK_SIZE.wrong(value, reason))
        }
    }
}

fn uses(written: &JsonObject) -> Result<Vec<PoolUse>, InvalidPool> {
    const KNOWN: [PoolUse; 3] = [PoolUse::Workload, PoolUse::Tunnel, PoolUse::LoadBalancer];
    let wrong = |value: &Value| ALLOWED_USES.wrong(value, "must be a list of Workload, Tunnel and LoadBalancer");
    let Some(value) = ALLOWED_USES.get(written) else { return Ok(vec![PoolUse::Workload, PoolUse::Tunnel]) };
    let listed = value.as_array().ok_or_else(|| wrong(value))?;
    if listed.is_empty() {
        return Ok(vec![PoolUse::Workload, PoolUse::Tunnel]);
    }
    let known = |used: &Value| KNOWN.into_iter().find(|known| used == known.as_str()).ok_or_else(|| wrong(used));
    listed.iter().map(known).collect()
}

/// Returns the default prefix length of a block with 64 addresses: /26 or /122.
pub fn default_block_size(family: Family) -> u8 {
    match family {
        Family::V4 => 26,
        Family::V6 => 122,
    }
}

/// Returns the prefix length of a pool's blocks: the requested length or the default, but at least the pool's own
/// prefix length.
pub fn fitting_block_size(cidr: IpNet, wanted: Option<u8>) -> u8 {
    wanted.unwrap_or_else(|| default_block_size(Family::of_net(cidr))).max(cidr.prefix_len())
}

/// Checks a new pool against Calico's rules, the existing pools and the existing blocks.
///
/// # Errors
/// [`InvalidPool`] for the first of the following rules that the new pool violates:
/// - The pool's name is valid.
/// - The pool's CIDR has no host bits set, is not link-local, and is not IPv4 mapped into IPv6.
/// - Blocks have a prefix length of /20 to /32 (IPv4) or /116 to /128 (IPv6), and fit into the pool.
/// - The pool's selectors can be parsed and do not contain `global()`.
/// - The pool allows at least one use. A pool for `LoadBalancer` allows no other use, and is for all nodes. A pool for
///   `Tunnel` has no namespace selector.
/// - No other pool, and no existing block of another size, overlaps with the pool's CIDR.
pub fn check_new_pool(new: &NewPool, pools: &[Pool], blocks: &[IpNet]) -> Result<(), InvalidPool> {
    check_name(&new.name).map_err(|reason| InvalidPool::new("IPPool.Name", &new.name, reason))?;
    check_network(new.cidr)?;
    check_block_size(new)?;
    check_selectors_and_uses(new)?;
    check_neighbours(new, pools, blocks)
}

/// Checks a changed pool against the stored pool. The CIDR and the block size of a pool must not change, because
/// assigned addresses depend on both.
///
/// # Errors
/// [`InvalidPool`] for a changed CIDR or block size, for a load balancer's pool that changes to another use, and for
/// selectors and uses that are not allowed in a new pool.
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

/// Checks a stored pool against the rules that Calico's client applies to each change of a pool. Calico's client also
/// applies the rules for changes when it deletes a pool, because it updates the pool first.
///
/// # Errors
/// [`InvalidPool`] for a field of a wrong type, for tunnel modes that exclude each other, and for selectors and uses
/// that are not allowed in a new pool.
pub fn check_stored_pool(pool: &Pool) -> Result<(), InvalidPool> {
    let nothing = Map::new();
    let spec = pool.resource().whole_spec().unwrap_or(&nothing);
    let (new, _) = read_pool_spec(pool.name(), spec, None, Some(pool))?;
    check_selectors_and_uses(&new)
}

/// Removes `Tunnel` from the allowed uses of a pool with a namespace selector, since tunnels are in no namespace.
/// Returns `None` if the pool does not allow `Tunnel`, or allows only `Tunnel`.
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
        // A tunnel's address belongs to no namespace, so a tunnel pool must not have a namespace selector.
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
    /// Returns the prefix length of the pool's blocks, both for blocks of addresses and for blocks of prefixes.
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
    use serde_json::json;
    use time::OffsetDateTime;
    use time::macros::datetime;

    use super::*;
    use crate::model::check_changed_pool;

    fn read(spec: Value) -> Result<(NewPool, JsonObject), InvalidPool> {
        read_pool_spec("p", spec.as_object().unwrap(), None, None)
    }

    #[test]
    fn pool_spec_is_stored_as_calico_stores_it() {
        let (new, spec) = read(json!({"cidr": "10.65.0.0/16", "natOutgoing": true, "disabled": false})).unwrap();
        assert_eq!(new, NewPool::new("p", "10.65.0.0/16".parse().unwrap()));
        assert_eq!(
            Value::Object(spec),
            json!({"cidr": "10.65.0.0/16", "vxlanMode": "Never", "ipipMode": "Never", "natOutgoing": true, "blockSize": 26,
                "nodeSelector": "all()", "allowedUses": ["Workload", "Tunnel"], "assignmentMode": "Automatic"})
        );
        let all = json!({"cidr": "fd00:0:0::/64", "vxlanMode": "Always", "blockSize": 120, "nodeSelector": "has(a)",
            "namespaceSelector": "has(b)", "allowedUses": ["Workload"], "assignmentMode": "Manual",
            "disableBGPExport": true, "disabled": true});
        let (new, spec) = read(all).unwrap();
        assert_eq!((new.block_size, new.assignment_mode), (120, AssignmentMode::Manual));
        assert_eq!((&spec["cidr"], &spec["ipipMode"]), (&json!("fd00::/64"), &json!("Never")));
        assert_eq!((&spec["disabled"], &spec["namespaceSelector"]), (&json!(true), &json!("has(b)")));
        let made = |new: NewPool| Pool::new(&new, "u", OffsetDateTime::UNIX_EPOCH).unwrap();
        let again = |pool: &Pool, length: Option<&str>| {
            let spec = json!({"cidr": pool.cidr().to_string(), "blockSize": 0, "assignmentMode": "Manual"});
            read_pool_spec("p", spec.as_object().unwrap(), length, Some(pool)).map(|(new, _)| new)
        };
        let plain = made(NewPool::new("p", "10.0.0.0/16".parse().unwrap()).with_block_size(28));
        assert_eq!(again(&plain, None).unwrap().block_size, 28);
        let prefixes = made(NewPool::new("p", "2001:db8::/48".parse().unwrap()).with_prefix_length(64));
        assert_eq!(again(&prefixes, None).unwrap(), again(&prefixes, Some("64")).unwrap());
        assert_eq!(check_changed_pool(&again(&prefixes, None).unwrap(), &prefixes), Ok(()));
        let changed = check_changed_pool(&again(&prefixes, Some("60")).unwrap(), &prefixes).unwrap_err();
        assert_eq!(changed.field(), "IPPool.PrefixLength");
        assert_eq!(again(&prefixes, Some("/64")).unwrap_err().field(), "IPPool.PrefixLength");
    }

    #[test]
    fn pool_spec_names_field_when_impossible() {
        let with = |field: &str, value: Value| json!({"cidr": "10.0.0.0/16", field: value});
        for (spec, field, reason) in [
            (json!({}), "IPPool.CIDR", "must be specified"),
            (json!({"cidr": "10.0.0.0"}), "IPPool.CIDR", "must be a valid subnet"),
            (json!({"cidr": 10}), "IPPool.CIDR", "must be a valid subnet"),
            (with("blockSize", json!("26")), "IPPool.BlockSize", "between 20 and 32"),
            (with("blockSize", json!(-1)), "IPPool.BlockSize", "between 20 and 32"),
            (with("blockSize", json!(300)), "IPPool.BlockSize", "between 20 and 32"),
            (with("ipipMode", json!("Sometimes")), "IPPool.IPIPMode", "must be one of Never, Always, CrossSubnet"),
            (with("vxlanMode", json!(1)), "IPPool.VXLANMode", "must be a text"),
            (with("assignmentMode", json!("Auto")), "IPPool.AssignmentMode", "Automatic, Manual"),
            (with("natOutgoing", json!("yes")), "IPPool.NATOutgoing", "true or false"),
            (with("disabled", json!(1)), "IPPool.Disabled", "true or false"),
            (with("allowedUses", json!("Tunnel")), "IPPool.AllowedUses", "must be a list"),
            (with("allowedUses", json!(["Pods"])), "IPPool.AllowedUses", "must be a list"),
            (with("nodeSelector", json!(["all()"])), "IPPool.NodeSelector", "must be a text"),
            (
                json!({"cidr": "10.0.0.0/16", "ipipMode": "Always", "vxlanMode": "CrossSubnet"}),
                "IPPool.VXLANMode",
                "Cannot enable both VXLAN and IPIP",
            ),
            (json!({"cidr": "fd00::/64", "ipipMode": "Always"}), "IPPool.IPIPMode", "not supported on an IPv6"),
            (
                json!({"cidr": "10.0.0.0/16", "allowedUses": ["LoadBalancer"], "vxlanMode": "Always"}),
                "IPPool.IPIPMode",
                "Neither IPIPMode nor VXLANMode can be enabled on AllowedUses LoadBalancer IP pool",
            ),
            (
                json!({"cidr": "10.0.0.0/16", "allowedUses": ["LoadBalancer"], "disableBGPExport": true}),
                "IPPool.DisableBGPExport",
                "must have DisableBGPExport set to false",
            ),
        ] {
            let error = read(spec).unwrap_err();
            assert_eq!(error.field(), field, "{error}");
            assert!(error.reason().contains(reason), "{error}");
        }
    }

    fn new(cidr: &str, block_size: u8) -> NewPool {
        NewPool::new("p", cidr.parse().unwrap()).with_block_size(block_size)
    }

    #[test]
    fn pool_spec_rules_each_name_field() {
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
    fn pool_spec_keeps_network_and_blocks() {
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
    fn pool_spec_is_told_when_calico_refuses_stored_pool() {
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
    fn pool_spec_blocks_shrink_to_fit() {
        let net = |text: &str| text.parse().unwrap();
        assert_eq!(fitting_block_size(net("10.0.0.0/16"), None), 26);
        assert_eq!(fitting_block_size(net("10.0.0.0/28"), None), 28);
        assert_eq!(fitting_block_size(net("10.0.0.0/28"), Some(26)), 28);
        assert_eq!(fitting_block_size(net("fd80::/64"), Some(120)), 120);
        assert_eq!(fitting_block_size(net("fd80::/126"), None), 126);
    }
}
