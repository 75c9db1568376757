//! Adapts the network configuration for the IPAM plugin host-local. A subnet in host-local's configuration may be a
//! placeholder for a pod range of the node (`spec.podCIDRs`).

use agent::{CniError, Result};
use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::gojson::{self, GoJson};

/// For each address family: the placeholder for the node's pod range (in upper or lower case), and the network that
/// replaces the placeholder on DEL.
const PLACEHOLDERS: [(&str, &str); 2] = [("usePodCidr", "0.0.0.0/0"), ("usePodCidrIPv6", "::/0")];
const V4: usize = 0;
const V6: usize = 1;

/// Whether the container gets default routes even if the configuration names routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultRoutes {
    /// The container gets only the routes of the configuration.
    Replaced,
    /// The container gets the routes of the configuration and the default routes (`include_default_routes`).
    Kept,
}

/// A network configuration whose IPAM plugin is host-local.
#[derive(Clone, Debug)]
pub(crate) struct HostLocal {
    conf: Value,
}

impl HostLocal {
    /// Checks a network configuration whose `ipam.type` is `host-local`. As in Calico, the names of the checked
    /// configuration fields are case-sensitive.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if `ipam`, `ipam.ranges` or an element of `ipam.ranges` is malformed.
    pub(crate) fn new(conf: &GoJson) -> Result<Self> {
        let conf = gojson::untyped(conf);
        check_shape(&conf["ipam"]).map_err(CniError::internal)?;
        Ok(Self { conf })
    }

    /// True if the configuration contains a placeholder for a pod range, so that an ADD for a pod must read the node's
    /// pod ranges.
    pub(crate) fn wants_pod_cidrs(&self) -> bool {
        subnets(&self.conf["ipam"]).any(|subnet| placeholder(subnet).is_some())
    }

    /// Replaces the placeholders with the node's pod ranges (`spec.podCIDRs`).
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if the node lacks a pod range that a placeholder needs, or has two
    /// ranges of one address family.
    pub(crate) fn with_pod_cidrs(mut self, node: &str, cidrs: &[String]) -> Result<Self> {
        let mut found = [None, None];
        for cidr in cidrs {
            let net = gojson::parse_cidr(cidr).map_err(CniError::internal)?;
            found[family(&net)] = Some(cidr);
        }
        if cidrs.is_empty() {
            let advice = "the cluster gives its nodes ranges for pods (kube-controller-manager --allocate-node-cidrs), or \
                          ipam.subnet names the range";
            return Err(CniError::internal(format!("no podCidr for node {node}")).with_details(advice));
        }
        if cidrs.len() > 1 && found.contains(&None) {
            return Err(CniError::internal("ClusterCIDR contains two ranges of the same type"));
        }
        for subnet in subnets_mut(&mut self.conf["ipam"]) {
            let Some(wanted) = placeholder(subnet) else { continue };
            let (name, family) = if wanted == V4 { ("usePodCidr", "IPv4") } else { ("usePodCidrIPv6", "IPv6") };
            let missing = || CniError::internal(format!("{name} found but there is no {family} CIDR configured"));
            *subnet = found[wanted].ok_or_else(missing)?.clone().into();
        }
        Ok(self)
    }

    /// Returns the network configuration for host-local's DEL, which needs only the container's id. Replaces each
    /// placeholder with `0.0.0.0/0` or `::/0`, so that DEL needs no request to the Kubernetes API. If the configuration
    /// has another range of the same address family, the range with the placeholder is deleted. DEL must not pass
    /// overlapping ranges to host-local: newer versions refuse them even on DEL, and the address would never be
    /// released.
    pub(crate) fn for_del(mut self) -> Self {
        let mut taken = [false, false];
        for subnet in subnets(&self.conf["ipam"]).chain(ranges_of_runtime(&self.conf)) {
            if let Some(Ok(net)) = subnet.as_str().map(gojson::parse_cidr) {
                taken[family(&net)] = true;
            }
        }
        // `settle` replaces a placeholder; it returns false if the subnet's range must be deleted from the
        // configuration.
        let mut settle = |subnet: &mut Value| match placeholder(subnet) {
            Some(family) if taken[family] => false,
            Some(family) => {
                taken[family] = true;
                *subnet = PLACEHOLDERS[family].1.into();
                true
            }
            None => true,
        };
        let Some(ipam) = self.conf.get_mut("ipam").and_then(Value::as_object_mut) else { return self };
        if ipam.get_mut("subnet").is_some_and(|subnet| !settle(subnet)) {
            ipam.remove("subnet");
        }
        if let Some(sets) = ipam.get_mut("ranges").and_then(Value::as_array_mut) {
            sets.retain_mut(|set| {
                let Some(ranges) = set.as_array_mut() else { return true };
                let was_empty = ranges.is_empty();
                ranges.retain_mut(|range| range.get_mut("subnet").is_none_or(&mut settle));
                was_empty || !ranges.is_empty()
            });
        }
        self
    }

    /// Returns the routes of a pod's container: the default routes, or the destinations in `ipam.routes` in their
    /// order. The gateways in `ipam.routes` are ignored, because all packets go through the host.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if `ipam.routes` is malformed. Calico itself panics if an element of
    /// `ipam.routes` is not an object.
    pub(crate) fn routes(&self, default: DefaultRoutes) -> Result<Vec<IpNet>> {
        let ipam = &self.conf["ipam"];
        let listed = match &ipam["routes"] {
            Value::Null => &[],
            Value::Array(routes) => routes.as_slice(),
            _ => {
                let text = format!(
                    "failed to parse host-local IPAM routes section; expecting list, not: {}",
                    gojson::printed(ipam)
                );
                return Err(CniError::internal(text));
            }
        };
        let mut routes = Vec::new();
        for route in listed {
            routes.extend(destination(route).map_err(CniError::internal)?);
        }
        if routes.is_empty() {
            return Ok(default_routes());
        }
        Ok(match default {
            DefaultRoutes::Replaced => routes,
            DefaultRoutes::Kept => [default_routes(), routes].concat(),
        })
    }

    /// Returns the network configuration to pass to host-local.
    pub(crate) fn conf(&self) -> &Value {
        &self.conf
    }
}

/// Returns the default routes of both address families. A container uses a default route only if it has an address of
/// the same family.
pub(crate) fn default_routes() -> Vec<IpNet> {
    PLACEHOLDERS.iter().filter_map(|(_, net)| net.parse().ok()).collect()
}

fn check_shape(ipam: &Value) -> Result<(), String> {
    dict(ipam)?;
    let sets = match &ipam["ranges"] {
        Value::Null => return Ok(()),
        Value::Array(sets) => sets,
        other => {
            return Err(format!(
                "failed to parse host-local IPAM ranges section; was expecting a list, not: {}",
                gojson::printed(other)
            ));
        }
    };
    for set in sets {
        // Calico's error message contains an empty list instead of the invalid value of `ranges`.
        let ranges =
            set.as_array().ok_or("failed to parse host-local IPAM range set; was expecting a list, not: []")?;
        ranges.iter().try_for_each(|range| dict(range).map(drop))?;
    }
    Ok(())
}

fn dict(value: &Value) -> Result<&Map<String, Value>, String> {
    let wrong =
        || format!("failed to parse host-local IPAM data; was expecting a dict, not: {}", gojson::printed(value));
    value.as_object().ok_or_else(wrong)
}

/// Returns the destination of a route in `ipam.routes`, or `None` if the route has no destination.
fn destination(route: &Value) -> Result<Option<IpNet>, String> {
    let Value::Object(route) = route else {
        return Err(format!("invalid IPAM routes section; expecting a dict, not: {}", gojson::printed(route)));
    };
    match route.get("dst") {
        // Calico's error message for a route without a destination.
        None => Err("invalid CIDR address: <nil>".to_owned()),
        Some(Value::String(text)) => gojson::parse_cidr(text).map(Some),
        Some(other) => {
            Err(format!("invalid IPAM routes section; expecting 'dst' to be a string, not: {}", gojson::printed(other)))
        }
    }
}

/// Returns the index of the address family if the subnet is a placeholder (such as `usePodCidr`), otherwise `None`.
fn placeholder(subnet: &Value) -> Option<usize> {
    let text = subnet.as_str()?;
    PLACEHOLDERS.iter().position(|(name, _)| text.eq_ignore_ascii_case(name))
}

fn family(net: &IpNet) -> usize {
    if matches!(net, IpNet::V4(_)) { V4 } else { V6 }
}

/// Returns the subnet of an `ipam` object, and the subnets of the ranges in its field `ranges`.
fn subnets(ipam: &Value) -> impl Iterator<Item = &Value> {
    let ranges = ipam["ranges"].as_array().into_iter().flatten().filter_map(Value::as_array).flatten();
    [ipam].into_iter().chain(ranges).filter_map(|range| range.get("subnet"))
}

/// Returns the subnets that [`subnets`] returns, as mutable references.
fn subnets_mut(ipam: &mut Value) -> Vec<&mut Value> {
    let mut found = Vec::new();
    for (name, value) in ipam.as_object_mut().into_iter().flatten() {
        match name.as_str() {
            "subnet" => found.push(value),
            "ranges" => {
                let ranges = value.as_array_mut().into_iter().flatten().filter_map(Value::as_array_mut).flatten();
                found.extend(ranges.filter_map(|range| range.get_mut("subnet")));
            }
            _ => {}
        }
    }
    found
}

/// Returns the subnets of the runtime's ranges, which host-local uses in addition to the ranges in `ipam`.
fn ranges_of_runtime(conf: &Value) -> impl Iterator<Item = &Value> {
    let sets = conf["runtimeConfig"]["ipRanges"].as_array().into_iter().flatten();
    sets.filter_map(Value::as_array).flatten().filter_map(|range| range.get("subnet"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_local(ipam: &str) -> Result<HostLocal> {
        HostLocal::new(&GoJson::parse(format!(r#"{{"name":"k8s-net","ipam":{ipam}}}"#).as_bytes()).unwrap())
    }

    /// Returns the network configurations that host-local gets on ADD and on DEL.
    fn given(ipam: &str, cidrs: &[&str]) -> (Result<String>, String) {
        let conf = host_local(ipam).unwrap();
        assert!(conf.wants_pod_cidrs(), "{ipam}");
        let cidrs: Vec<_> = cidrs.iter().map(|cidr| (*cidr).to_owned()).collect();
        let shown = |conf: HostLocal| conf.conf()["ipam"].to_string();
        (conf.clone().with_pod_cidrs("node1", &cidrs).map(shown), shown(conf.for_del()))
    }

    const BOTH: [&str; 2] = ["10.70.0.0/24", "fd00:70::/64"];

    #[test]
    fn node_ranges_are_put_in() {
        let (add, del) = given(r#"{"type":"host-local","subnet":"usePodCidr"}"#, &BOTH);
        assert_eq!(add.unwrap(), r#"{"subnet":"10.70.0.0/24","type":"host-local"}"#);
        assert_eq!(del, r#"{"subnet":"0.0.0.0/0","type":"host-local"}"#);
        let ranges = r#"{"ranges":[[{"subnet":"UsePodCIDR"}],[{"subnet":"usePodCidrIPv6"}]]}"#;
        let (add, del) = given(ranges, &BOTH);
        assert_eq!(add.unwrap(), r#"{"ranges":[[{"subnet":"10.70.0.0/24"}],[{"subnet":"fd00:70::/64"}]]}"#);
        assert_eq!(del, r#"{"ranges":[[{"subnet":"0.0.0.0/0"}],[{"subnet":"::/0"}]]}"#);
    }

    #[test]
    fn node_ranges_must_exist() {
        let ranges = r#"{"ranges":[[{"subnet":"usePodCidr"}],[{"subnet":"usePodCidrIPv6"}]]}"#;
        let refused = |cidrs: &[&str]| {
            let error = given(ranges, cidrs).0.unwrap_err();
            assert_eq!(error.code().number(), 999);
            error.message().to_owned()
        };
        assert_eq!(refused(&[]), "no podCidr for node node1");
        assert_eq!(refused(&BOTH[..1]), "usePodCidrIPv6 found but there is no IPv6 CIDR configured");
        assert_eq!(refused(&BOTH[1..]), "usePodCidr found but there is no IPv4 CIDR configured");
        assert_eq!(refused(&["10.70.0.0/24", "10.71.0.0/24"]), "ClusterCIDR contains two ranges of the same type");
        assert_eq!(refused(&["x"]), "invalid CIDR address: x");
    }

    #[test]
    fn node_ranges_never_overlap_on_del() {
        for (ipam, expected) in [
            (
                r#"{"ranges":[[{"subnet":"usePodCidr"}],[{"subnet":"10.100.0.0/24"}]]}"#,
                r#"{"ranges":[[{"subnet":"10.100.0.0/24"}]]}"#,
            ),
            (
                r#"{"ranges":[[{"subnet":"usePodCidr"},{"subnet":"10.1.0.0/16"}],[{"subnet":"usePodCidrIPv6"}],[]]}"#,
                r#"{"ranges":[[{"subnet":"10.1.0.0/16"}],[{"subnet":"::/0"}],[]]}"#,
            ),
            (
                r#"{"subnet":"usePodCidr","rangeStart":"10.70.0.9","ranges":[[{"subnet":"10.1.0.0/16"}]]}"#,
                r#"{"rangeStart":"10.70.0.9","ranges":[[{"subnet":"10.1.0.0/16"}]]}"#,
            ),
            (
                r#"{"subnet":"usePodCidr","ranges":[[{"subnet":"USEPODCIDR","gateway":"10.1.0.1"}],[{"subnet":"usePodCidrIPv6"}]]}"#,
                r#"{"ranges":[[{"subnet":"::/0"}]],"subnet":"0.0.0.0/0"}"#,
            ),
        ] {
            assert_eq!(given(ipam, &BOTH).1, expected, "{ipam}");
        }
        let conf = r#"{"ipam":{"subnet":"usePodCidr"},"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.0.0/16"}]]}}"#;
        let conf = HostLocal::new(&GoJson::parse(conf.as_bytes()).unwrap()).unwrap().for_del();
        assert_eq!(conf.conf()["ipam"].to_string(), "{}");
    }

    #[test]
    fn node_ranges_leave_everything_else() {
        let ipam =
            r#"{"dataDir":"/x","ranges":[[{"rangeEnd":"10.70.0.30","subnet":"10.70.0.0/24"}]],"type":"host-local"}"#;
        let conf = host_local(ipam).unwrap();
        assert!(!conf.wants_pod_cidrs());
        assert_eq!(conf.clone().with_pod_cidrs("node1", &["10.1.0.0/16".into()]).unwrap().conf(), conf.conf());
        assert_eq!(conf.conf()["ipam"].to_string(), ipam);
        assert_eq!(conf.conf()["name"], "k8s-net");
        assert_eq!(conf.for_del().conf()["ipam"].to_string(), ipam);
    }

    #[test]
    fn node_ranges_are_refused_when_malformed() {
        for (ipam, error) in [
            (r#""x""#, "failed to parse host-local IPAM data; was expecting a dict, not: x"),
            ("null", "failed to parse host-local IPAM data; was expecting a dict, not: <nil>"),
            (r#"{"ranges":"x"}"#, "failed to parse host-local IPAM ranges section; was expecting a list, not: x"),
            (r#"{"ranges":["x"]}"#, "failed to parse host-local IPAM range set; was expecting a list, not: []"),
            (r#"{"ranges":[[["x"]]]}"#, "failed to parse host-local IPAM data; was expecting a dict, not: [x]"),
        ] {
            let refused = host_local(ipam).unwrap_err();
            assert_eq!((refused.code().number(), refused.message()), (999, error));
        }
        // If a configuration has several fields with one name, the last field counts. The names of configuration fields
        // are case-sensitive, as in Calico.
        assert!(host_local(r#"{"ranges":"x","ranges":[]}"#).is_ok());
        assert!(HostLocal::new(&GoJson::parse(br#"{"IPAM":{}}"#).unwrap()).is_err());
        // The parser accepts a subnet that is not a string, because host-local itself reports the mistake.
        assert!(!host_local(r#"{"subnet":5}"#).unwrap().wants_pod_cidrs());
    }

    #[test]
    fn node_routes_of_container_are_put_in() {
        let routes = |ipam: &str, default| {
            let routes = host_local(ipam).unwrap().routes(default);
            routes.map(|routes| routes.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let replaced = |ipam| routes(ipam, DefaultRoutes::Replaced);
        let listed = r#"{"routes":[{"dst":"10.123.0.1/16","gw":"10.123.0.1"},{"dst":"fd00:99::/64"}]}"#;
        assert_eq!(replaced(listed).unwrap(), ["10.123.0.0/16", "fd00:99::/64"]);
        let kept = routes(listed, DefaultRoutes::Kept).unwrap();
        assert_eq!(kept, ["0.0.0.0/0", "::/0", "10.123.0.0/16", "fd00:99::/64"]);
        for none in ["{}", r#"{"routes":null}"#, r#"{"routes":[]}"#] {
            assert_eq!(replaced(none).unwrap(), ["0.0.0.0/0", "::/0"], "{none}");
            assert_eq!(routes(none, DefaultRoutes::Kept).unwrap(), ["0.0.0.0/0", "::/0"], "{none}");
        }
        for (ipam, error) in [
            (r#"{"routes":[{"gw":"10.0.0.1"}]}"#, "invalid CIDR address: <nil>"),
            (
                r#"{"type":"host-local","subnet":"10.70.0.0/24","routes":"x"}"#,
                "failed to parse host-local IPAM routes section; expecting list, not: map[routes:x subnet:10.70.0.0/24 type:host-local]",
            ),
            (r#"{"routes":[{"dst":5}]}"#, "invalid IPAM routes section; expecting 'dst' to be a string, not: 5"),
            (r#"{"routes":[{"dst":null}]}"#, "invalid IPAM routes section; expecting 'dst' to be a string, not: <nil>"),
            (r#"{"routes":[{"dst":"x"}]}"#, "invalid CIDR address: x"),
            (r#"{"routes":["x"]}"#, "invalid IPAM routes section; expecting a dict, not: x"),
        ] {
            assert_eq!(replaced(ipam).unwrap_err().message(), error);
        }
    }
}
