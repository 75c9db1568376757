//! A pool's spec as a user wrote it: its meaning, and its stored form.

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::pool::{AssignmentMode, NewPool, Pool, PoolUse};
use super::pool_rules::default_block_size;
use super::spec_field::{InvalidPool, spec_fields};
use crate::net::Family;

spec_fields! {
    /// The fields that a spec can have.
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

type Object = Map<String, Value>;

/// Reads a spec, and returns the pool that it describes and the spec as it is stored: with the defaults, and without
/// fields that are off. `prefix_length` is the annotation [`super::PREFIX_LENGTH_ANNOTATION`]. Without it the pool has
/// that of the stored pool, and a spec without a block size has its block size, or else the default.
///
/// # Errors
/// [`InvalidPool`] for a field that is of another type or has a value that it cannot have, and for tunnels that do not
/// go together, or not with a load balancer. The other rules are those of [`super::check_new_pool`].
pub fn read_pool_spec(
    name: &str,
    written: &Object,
    prefix_length: Option<&str>,
    stored_pool: Option<&Pool>,
) -> Result<(NewPool, Object), InvalidPool> {
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
    /// The spec as it is stored, without tunnels.
    pub fn spec(&self) -> Object {
        let uses: Vec<&str> = self.allowed_uses.iter().map(|used| used.as_str()).collect();
        let mut spec = Object::from_iter([
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

fn network(written: &Object) -> Result<IpNet, InvalidPool> {
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

/// Calico's own text about `disableBGPExport` says `true` where it means `false`.
fn check_load_balancer(written: &Object, ipip: &str, vxlan: &str) -> Result<(), InvalidPool> {
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

/// The block size of a spec; 0 counts as none.
fn size(written: &Object, family: Family) -> Result<Option<u8>, InvalidPool> {
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

fn uses(written: &Object) -> Result<Vec<PoolUse>, InvalidPool> {
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use time::OffsetDateTime;

    use super::*;
    use crate::model::check_changed_pool;

    fn read(spec: Value) -> Result<(NewPool, Object), InvalidPool> {
        read_pool_spec("p", spec.as_object().unwrap(), None, None)
    }

    #[test]
    fn a_spec_is_stored_as_calico_stores_it() {
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
    fn a_spec_that_cannot_be_names_its_field() {
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
}
