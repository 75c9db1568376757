//! Parses and prints the CNI results of ADD in each CNI version. The module handles the results of this plugin, the
//! outputs of other IPAM plugins, and the `prevResult` of CHECK and DEL.

use std::net::IpAddr;

use agent::{CniError, Code, Result};
use ipam_core::assign::AssignedAddress;
use ipnet::IpNet;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::bridged::{BridgedSettings, PrefixMask, ResultRoute};
use crate::env::{AddressForm, parse_address};
use crate::gojson::{self, GoJson};
use crate::versions;

/// The field of a CNI result that lists the assigned prefixes. CNI itself defines no field for prefixes, and readers of
/// CNI results ignore unknown fields.
const PREFIXES_MEMBER: &str = "margay.io/prefixes";

/// The CNI result of an ADD. The plugin's own results list IPv4 addresses before IPv6 addresses.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AddResult {
    pub(crate) interfaces: Vec<ResultPart<ResultInterface>>,
    pub(crate) ips: Vec<ResultIp>,
    pub(crate) routes: Vec<ResultPart<ResultRoute>>,
    /// The assigned prefixes. For each assigned prefix, `ips` contains one address, although the container owns the
    /// whole prefix.
    pub(crate) prefixes: Vec<IpNet>,
    /// The object `dns` of the CNI result; `None` if the object is empty.
    pub(crate) dns: Option<Value>,
}

/// A part of a CNI result: created by this program, or copied from the output of another plugin.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum ResultPart<T> {
    Ours(T),
    Theirs(Value),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct ResultInterface {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mac: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sandbox: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ResultIp {
    pub(crate) address: IpNet,
    pub(crate) gateway: Option<IpAddr>,
    /// The index in `interfaces` of the interface that has the address.
    pub(crate) interface: Option<usize>,
}

impl AddResult {
    /// Builds the CNI result that Calico's plugin would return. An address that the allocator chose is printed with the
    /// prefix length of its block. A requested address is printed as a host address (/32 or /128), and an assigned
    /// prefix with its own length. The result has one route for each address in `ips`. As in Calico, the destination of
    /// each route keeps its host bits.
    ///
    /// # Errors
    /// An error if an assigned address has an invalid prefix length, which the allocator never returns.
    pub(crate) fn calico(assigned: &[AssignedAddress], wanted: &[IpAddr]) -> Result<Self> {
        let prefix =
            |a: &AssignedAddress| if wanted.contains(&a.ip) { host_prefix(a.ip) } else { a.block.prefix_len() };
        let ips = in_order(assigned, prefix)?;
        let ips: Vec<_> = ips.into_iter().map(|ip| ResultIp { gateway: None, ..ip }).collect();
        let routes = ips.iter().map(|ip| ResultPart::Ours(ResultRoute::to(ip.address))).collect();
        Ok(Self { ips, routes, prefixes: prefixes(assigned), ..Self::default() })
    }

    /// Removes the routes from the CNI result. Calico returns no routes to the target pod of a migration, because
    /// traffic must still go to the source pod.
    pub(crate) fn without_routes(mut self) -> Self {
        self.routes.clear();
        self
    }

    /// Builds the CNI result that host-local would return, with the gateway and the configured routes. Each address in
    /// the result has the network mask of its pool or, if so configured, of its block.
    ///
    /// # Errors
    /// An error if an address has an invalid prefix length. The allocator never returns an address with an invalid
    /// prefix length.
    pub(crate) fn bridged(assigned: &[AssignedAddress], settings: &BridgedSettings) -> Result<Self> {
        let prefix = |a: &AssignedAddress| match settings.mask {
            PrefixMask::Pool => a.pool.prefix_len(),
            PrefixMask::Block => a.block.prefix_len(),
        };
        let mut ips = in_order(assigned, prefix)?;
        // host-local lists addresses in the order of their sets of ranges.
        ips.sort_by_key(|ip| settings.network.set_of(ip.address.addr()));
        let routes = settings.routes.iter().cloned().map(ResultPart::Ours).collect();
        Ok(Self { ips, routes, prefixes: prefixes(assigned), ..Self::default() })
    }

    /// Builds the CNI result for addresses that were assigned without an IPAM plugin.
    pub(crate) fn of_addresses(addresses: &[IpAddr]) -> Self {
        let ip = |ip: &IpAddr| ResultIp { address: IpNet::from(*ip), gateway: None, interface: None };
        Self { ips: addresses.iter().map(ip).collect(), ..Self::default() }
    }

    /// Parses the output of an IPAM plugin, which may be in any CNI version.
    ///
    /// # Errors
    /// An error if the output is not JSON, or not a CNI result.
    pub(crate) fn parse(text: &[u8]) -> Result<Self> {
        let wrong = |reason: String| CniError::internal(format!("failed to unmarshal raw result: {reason}"));
        let result: Value = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        let Value::Object(members) = &result else { return Err(wrong("the result is no object".to_owned())) };
        let mut parsed = Self { dns: dns(members.get("dns")), ..Self::default() };
        for prefix in list(members.get(PREFIXES_MEMBER)).map_err(wrong)? {
            let text = prefix.as_str().unwrap_or_default();
            parsed.prefixes.push(text.parse().map_err(|_| wrong(format!("invalid CIDR address: {text}")))?);
        }
        if members.contains_key("ip4") || members.contains_key("ip6") {
            for family in ["ip4", "ip6"].iter().filter_map(|name| members.get(*name)).filter(|value| value.is_object())
            {
                parsed.ips.push(ip(family, "ip").map_err(wrong)?);
                let routes = list(family.get("routes")).map_err(wrong)?;
                parsed.routes.extend(routes.into_iter().map(ResultPart::Theirs));
            }
            return Ok(parsed);
        }
        for entry in list(members.get("ips")).map_err(wrong)? {
            parsed.ips.push(ip(&entry, "address").map_err(wrong)?);
        }
        parsed.routes = list(members.get("routes")).map_err(wrong)?.into_iter().map(ResultPart::Theirs).collect();
        parsed.interfaces =
            list(members.get("interfaces")).map_err(wrong)?.into_iter().map(ResultPart::Theirs).collect();
        Ok(parsed)
    }

    /// Returns the addresses of the CNI result, without prefix lengths.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().map(|ip| ip.address.addr()).collect()
    }

    /// Converts the CNI result of an IPAM plugin to the result of the main plugin, as Calico does. In the main plugin's
    /// result, the main plugin's own interfaces follow the interfaces of the IPAM plugin. Each address in the main
    /// plugin's result belongs to the last interface and has no gateway. An address has the prefix length of its
    /// assigned prefix, or /32 or /128 if no assigned prefix contains the address.
    pub(crate) fn on(mut self, interfaces: [ResultInterface; 2]) -> Self {
        self.interfaces.extend(interfaces.map(ResultPart::Ours));
        let last = self.interfaces.len() - 1;
        for ip in &mut self.ips {
            let address = ip.address.addr();
            let prefix = self.prefixes.iter().find(|prefix| prefix.contains(&address));
            let prefix = prefix.and_then(|prefix| IpNet::new(address, prefix.prefix_len()).ok());
            *ip = ResultIp { address: prefix.unwrap_or_else(|| address.into()), gateway: None, interface: Some(last) };
        }
        self
    }

    /// Renders the CNI result as JSON of a supported CNI version, indented by four spaces, without a trailing newline.
    ///
    /// # Errors
    /// An error if the result has no address and the CNI version is before 0.3.0.
    pub(crate) fn to_json(&self, version: &str) -> Result<String> {
        if versions::is_before(version, "0.3.0") {
            self.before_030(version)
        } else if versions::is_before(version, "1.0.0") {
            Ok(self.since_030(version, ResultForm::Before100))
        } else {
            Ok(self.since_030(version, ResultForm::Since100))
        }
    }

    fn before_030(&self, version: &str) -> Result<String> {
        #[derive(Serialize)]
        struct PrintedFamily<'a> {
            ip: IpNet,
            #[serde(skip_serializing_if = "Option::is_none")]
            gateway: Option<IpAddr>,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            routes: Vec<PrintedRoute<'a>>,
        }
        #[derive(Serialize)]
        #[serde(untagged)]
        enum PrintedRoute<'a> {
            Ours {
                dst: &'a IpNet,
                #[serde(skip_serializing_if = "Option::is_none")]
                gw: Option<IpAddr>,
            },
            Theirs(&'a Value),
        }
        impl<'a> From<&'a ResultPart<ResultRoute>> for PrintedRoute<'a> {
            fn from(route: &'a ResultPart<ResultRoute>) -> Self {
                match route {
                    ResultPart::Ours(route) => Self::Ours { dst: &route.dst, gw: route.gw },
                    ResultPart::Theirs(route) => Self::Theirs(route),
                }
            }
        }
        #[derive(Serialize)]
        struct PrintedOldResult<'a> {
            #[serde(rename = "cniVersion")]
            version: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            ip4: Option<PrintedFamily<'a>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            ip6: Option<PrintedFamily<'a>>,
            #[serde(rename = "margay.io/prefixes", skip_serializing_if = "<[_]>::is_empty")]
            prefixes: &'a [IpNet],
            dns: Value,
        }
        let family = |is_v4: bool| {
            let ip = self.ips.iter().find(|ip| ip.address.addr().is_ipv4() == is_v4)?;
            let routes =
                self.routes.iter().filter(|route| route.is_v4() == Some(is_v4)).map(PrintedRoute::from).collect();
            Some(PrintedFamily { ip: ip.address, gateway: ip.gateway, routes })
        };
        let (ip4, ip6) = (family(true), family(false));
        if ip4.is_none() && ip6.is_none() {
            return Err(no_addresses());
        }
        let dns = self.dns.clone().unwrap_or_else(no_dns);
        Ok(gojson::indented(&PrintedOldResult { version, ip4, ip6, prefixes: &self.prefixes, dns }))
    }

    /// Renders a CNI result in CNI version 0.3.0 or later. In results before CNI 1.0.0, each address has a field for
    /// its IP version, the field `dns` is always present, and interfaces have no MTU.
    fn since_030(&self, version: &str, form: ResultForm) -> String {
        #[derive(Serialize)]
        struct PrintedIp {
            #[serde(skip_serializing_if = "Option::is_none")]
            version: Option<&'static str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            interface: Option<usize>,
            address: IpNet,
            #[serde(skip_serializing_if = "Option::is_none")]
            gateway: Option<IpAddr>,
        }
        #[derive(Serialize)]
        struct PrintedResult<'a> {
            #[serde(rename = "cniVersion")]
            version: &'a str,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            interfaces: Vec<ResultPart<ResultInterface>>,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            ips: Vec<PrintedIp>,
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            routes: &'a [ResultPart<ResultRoute>],
            #[serde(rename = "margay.io/prefixes", skip_serializing_if = "<[_]>::is_empty")]
            prefixes: &'a [IpNet],
            #[serde(skip_serializing_if = "Option::is_none")]
            dns: Option<Value>,
        }
        let family = |address: &IpNet| if address.addr().is_ipv4() { "4" } else { "6" };
        let ip = |ip: &ResultIp| PrintedIp {
            version: (form == ResultForm::Before100).then(|| family(&ip.address)),
            interface: ip.interface,
            address: ip.address,
            gateway: ip.gateway,
        };
        let dns = self.dns.clone().or_else(|| (form == ResultForm::Before100).then(no_dns));
        let ips = self.ips.iter().map(ip).collect();
        let mut interfaces = self.interfaces.clone();
        for interface in &mut interfaces {
            if let (ResultPart::Ours(ours), ResultForm::Before100) = (interface, form) {
                ours.mtu = None;
            }
        }
        let Self { routes, prefixes, .. } = self;
        gojson::indented(&PrintedResult { version, interfaces, ips, routes, prefixes, dns })
    }
}

impl ResultPart<ResultRoute> {
    /// True if the route is an IPv4 route. Returns `None` if the route comes from another plugin and has no
    /// destination.
    fn is_v4(&self) -> Option<bool> {
        match self {
            Self::Ours(route) => Some(route.dst.addr().is_ipv4()),
            Self::Theirs(route) => Some(!route.get("dst")?.as_str()?.contains(':')),
        }
    }
}

/// Whether a CNI result has the JSON fields of the CNI versions before 1.0.0, or of version 1.0.0 and later.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResultForm {
    Before100,
    Since100,
}

fn no_dns() -> Value {
    Value::Object(Map::new())
}

/// Returns the error for a result without an address in a CNI version before 0.3.0.
pub(crate) fn no_addresses() -> CniError {
    CniError::internal("cannot convert: no valid IP addresses")
}

fn prefixes(assigned: &[AssignedAddress]) -> Vec<IpNet> {
    let prefix = |one: &AssignedAddress| IpNet::new(one.ip, one.prefix_length?).ok();
    assigned.iter().filter_map(prefix).map(|prefix| prefix.trunc()).collect()
}

fn host_prefix(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn in_order(assigned: &[AssignedAddress], prefix: impl Fn(&AssignedAddress) -> u8) -> Result<Vec<ResultIp>> {
    let families = [true, false].into_iter();
    let sorted = families.flat_map(|v4| assigned.iter().filter(move |a| a.ip.is_ipv4() == v4));
    let ip = |a: &AssignedAddress| {
        let prefix = a.prefix_length.unwrap_or_else(|| prefix(a));
        let address = IpNet::new(a.interface_ip(), prefix)
            .map_err(|_| CniError::internal(format!("address {} cannot have the prefix length {prefix}", a.ip)))?;
        Ok(ResultIp { address, gateway: a.gateway, interface: None })
    };
    sorted.map(ip).collect()
}

/// Returns the object `dns` of another plugin's result; returns `None` if all fields of `dns` are empty.
fn dns(value: Option<&Value>) -> Option<Value> {
    let members = value?.as_object()?;
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    (!members.values().all(is_empty)).then(|| Value::Object(members.clone()))
}

fn ip(value: &Value, name: &str) -> Result<ResultIp, String> {
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let address = text(name).ok_or_else(|| format!("an address lacks the text {name}"))?;
    let parsed = address.parse().map_err(|_| format!("invalid CIDR address: {address}"))?;
    // As in Go, an address that cannot be parsed becomes a null address.
    Ok(ResultIp { address: parsed, gateway: text("gateway").and_then(|gateway| gateway.parse().ok()), interface: None })
}

fn list(value: Option<&Value>) -> Result<Vec<Value>, String> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(items)) => Ok(items.clone()),
        Some(_) => Err("ips, routes and interfaces must be lists".to_owned()),
    }
}

/// Returns the addresses in a CNI result of version 0.3.0 or later. Without a CNI result, the returned list is empty.
///
/// # Errors
/// CNI error code 6 if the value is not a CNI result.
pub(crate) fn previous_addresses(result: Option<&GoJson>) -> Result<Vec<IpAddr>> {
    let Some(result) = result else { return Ok(Vec::new()) };
    let decode = |reason: &str| CniError::new(Code::Decode, format!("could not parse prevResult: {reason}"));
    if !matches!(result, GoJson::Object(_)) {
        return Err(decode(&format!("it must be an object, not a JSON {}", result.kind())));
    }
    let wrong = || decode("ips must be a list of objects with an address");
    match result.member("ips") {
        None => Ok(Vec::new()),
        Some(GoJson::Array(ips)) => ips
            .iter()
            .map(|ip| {
                let text = ip.member("address").and_then(GoJson::as_str).ok_or_else(wrong)?;
                parse_address(text, AddressForm::BareOrCidr).map_err(|_| wrong())
            })
            .collect(),
        Some(_) => Err(wrong()),
    }
}

/// Returns the prefixes in a `prevResult` of the main plugin. A prefix is an address in the `prevResult` whose prefix
/// length is less than that of a host address. The prefixes are not read from the field `margay.io/prefixes`, because
/// runtimes drop fields that CNI does not define.
pub(crate) fn previous_prefixes(result: Option<&GoJson>) -> Vec<IpNet> {
    let Some(GoJson::Array(ips)) = result.and_then(|result| result.member("ips")) else { return Vec::new() };
    let networks = ips.iter().filter_map(|ip| ip.member("address")?.as_str()?.parse::<IpNet>().ok());
    networks.filter(|net| net.prefix_len() < net.max_prefix_len()).map(|net| net.trunc()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gojson::GoJson;
    use crate::netconf::NetConf;

    fn assigned(address: &str, gateway: Option<&str>) -> AssignedAddress {
        let address: IpAddr = address.parse().unwrap();
        let (block, pool) = if address.is_ipv4() { (26, 16) } else { (122, 64) };
        let network = |length| IpNet::new(address, length).unwrap().trunc();
        AssignedAddress {
            ip: address,
            prefix_length: None,
            block: network(block),
            pool: network(pool),
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        }
    }

    fn dual() -> [AssignedAddress; 2] {
        [assigned("fd00::5", Some("fd00::1")), assigned("10.0.0.5", Some("10.0.0.1"))]
    }

    fn bridged(ipam: &str, assigned: &[AssignedAddress]) -> AddResult {
        let json = format!(r#"{{"type":"bridge","ipam":{ipam}}}"#);
        let conf = NetConf::decode(&GoJson::parse(json.as_bytes()).unwrap()).unwrap();
        AddResult::bridged(assigned, &BridgedSettings::from_conf(&conf).unwrap()).unwrap()
    }

    /// Renders a CNI result as JSON without indentation, so that expected values are readable.
    fn compact(result: &AddResult, version: &str) -> String {
        let json = result.to_json(version).unwrap();
        json.lines().map(str::trim_start).collect::<String>().replace("\": ", "\":")
    }

    #[test]
    fn result_of_calico_has_block_mask_and_self_route() {
        let result = AddResult::calico(&dual(), &[]).unwrap();
        assert_eq!(
            compact(&result, "1.0.0"),
            r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.5/26"},{"address":"fd00::5/122"}],"routes":[{"dst":"10.0.0.5/26"},{"dst":"fd00::5/122"}]}"#
        );
        let wanted = AddResult::calico(&dual(), &["10.0.0.5".parse().unwrap()]).unwrap();
        assert!(compact(&wanted, "1.0.0").contains(r#""ips":[{"address":"10.0.0.5/32"},{"address":"fd00::5/122"}]"#));
    }

    const ROUTES: &str = r#"{"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0","gw":"fd00::9","mtu":1400}]}"#;

    #[test]
    fn result_of_bridge_in_each_version() {
        let result = bridged(ROUTES, &dual());
        for version in ["0.1.0", "0.2.0"] {
            assert_eq!(
                compact(&result, version),
                format!(
                    r#"{{"cniVersion":"{version}","ip4":{{"ip":"10.0.0.5/16","gateway":"10.0.0.1","routes":[{{"dst":"0.0.0.0/0"}}]}},"ip6":{{"ip":"fd00::5/64","gateway":"fd00::1","routes":[{{"dst":"::/0","gw":"fd00::9"}}]}},"dns":{{}}}}"#
                )
            );
        }
        for version in ["0.3.0", "0.3.1", "0.4.0"] {
            assert_eq!(
                compact(&result, version),
                format!(
                    r#"{{"cniVersion":"{version}","ips":[{{"version":"4","address":"10.0.0.5/16","gateway":"10.0.0.1"}},{{"version":"6","address":"fd00::5/64","gateway":"fd00::1"}}],"routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0","gw":"fd00::9","mtu":1400}}],"dns":{{}}}}"#
                )
            );
        }
        for version in ["1.0.0", "1.1.0"] {
            assert_eq!(
                compact(&result, version),
                format!(
                    r#"{{"cniVersion":"{version}","ips":[{{"address":"10.0.0.5/16","gateway":"10.0.0.1"}},{{"address":"fd00::5/64","gateway":"fd00::1"}}],"routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"::/0","gw":"fd00::9","mtu":1400}}]}}"#
                )
            );
        }
    }

    #[test]
    fn result_of_old_version_drops_route_without_address() {
        let result = bridged(ROUTES, &[assigned("10.0.0.5", None)]);
        assert_eq!(
            compact(&result, "0.2.0"),
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.5/16","routes":[{"dst":"0.0.0.0/0"}]},"dns":{}}"#
        );
    }

    #[test]
    fn result_has_block_mask_when_asked_for() {
        let result = bridged(r#"{"mask":"block"}"#, &[assigned("10.0.0.5", None)]);
        assert_eq!(compact(&result, "1.0.0"), r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.5/26"}]}"#);
    }

    #[test]
    fn result_without_address_is_refused() {
        let nothing = AddResult::calico(&[], &[]).unwrap();
        assert_eq!(nothing.to_json("1.0.0").unwrap(), "{\n    \"cniVersion\": \"1.0.0\"\n}");
        assert_eq!(nothing.to_json("0.4.0").unwrap(), "{\n    \"cniVersion\": \"0.4.0\",\n    \"dns\": {}\n}");
        assert_eq!(nothing.to_json("0.2.0").unwrap_err().message(), "cannot convert: no valid IP addresses");
    }

    #[test]
    fn result_prefix_is_refused_when_impossible() {
        let wrong = AssignedAddress { pool: "fd00::/64".parse().unwrap(), ..assigned("10.0.0.5", None) };
        let conf = NetConf::default();
        assert!(AddResult::bridged(&[wrong], &BridgedSettings::from_conf(&conf).unwrap()).is_err());
    }

    /// Returns the result that the main plugin builds from the output of an IPAM plugin.
    fn answered(version: &str, assigned: &[u8], mtu: Option<u32>) -> Value {
        let inside =
            ResultInterface { name: "eth0".to_owned(), mac: Some("m".to_owned()), mtu, sandbox: Some("/n".to_owned()) };
        let outside = ResultInterface { name: "calic1".to_owned(), ..ResultInterface::default() };
        let answer = AddResult::parse(assigned).unwrap().on([outside, inside]);
        serde_json::from_str(&answer.to_json(version).unwrap()).unwrap()
    }

    const BOTH: &[u8] = br#"{"ips":[{"address":"10.0.0.1/26","gateway":"10.0.0.2"},{"address":"fd80::1/122"}],
    "routes":[{"dst":"10.0.0.1/26"},{"dst":"fd80::1/122"}]}"#;

    #[test]
    fn result_has_single_address_masks_and_no_gateways() {
        let new = answered("1.0.0", BOTH, Some(1410));
        assert_eq!(
            new,
            json!({"cniVersion":"1.0.0","interfaces":[{"name":"calic1"},{"name":"eth0","mac":"m","sandbox":"/n","mtu":1410}],
            "ips":[{"address":"10.0.0.1/32","interface":1},{"address":"fd80::1/128","interface":1}],
            "routes":[{"dst":"10.0.0.1/26"},{"dst":"fd80::1/122"}]})
        );
        let older = answered("0.4.0", BOTH, Some(1410));
        assert_eq!(older["interfaces"][1].get("mtu"), None);
        assert_eq!((&older["dns"], &older["ips"][1]["version"]), (&json!({}), &json!("6")));
    }

    #[test]
    fn result_of_oldest_version_has_one_address_per_family() {
        let old = answered("0.2.0", BOTH, None);
        assert_eq!(
            old,
            json!({"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.1/32","routes":[{"dst":"10.0.0.1/26"}]},
            "ip6":{"ip":"fd80::1/128","routes":[{"dst":"fd80::1/122"}]},"dns":{}})
        );
    }

    #[test]
    fn result_keeps_ipam_interfaces_in_front() {
        let result = br#"{"interfaces":[{"name":"x"}],"ips":[{"address":"10.0.0.1/26"}],"dns":{"nameservers":["n"]}}"#;
        let new = answered("1.1.0", result, None);
        assert_eq!((&new["interfaces"][0]["name"], &new["ips"][0]["interface"]), (&json!("x"), &json!(2)));
        assert_eq!(new["dns"]["nameservers"][0], "n");
    }

    #[test]
    fn result_is_read_in_every_version() {
        let new = AddResult::parse(
        br#"{"cniVersion":"1.0.0","ips":[{"address":"10.9.8.7/24","gateway":"10.9.8.1"}],"routes":[{"dst":"10.0.0.0/8"}],"dns":{}}"#,
    )
    .unwrap();
        assert_eq!(new.addresses(), ["10.9.8.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(new.ips[0].gateway, Some("10.9.8.1".parse().unwrap()));
        assert_eq!((new.routes.len(), new.dns), (1, None));
        let old = AddResult::parse(
        br#"{"ip4":{"ip":"10.9.8.7/24","routes":[{"dst":"1.0.0.0/8"}]},"ip6":{"ip":"fd80::7/64"},"dns":{"nameservers":["a"]}}"#,
    )
    .unwrap();
        assert_eq!((old.ips.len(), old.routes.len(), old.dns.is_some()), (2, 1, true));
        assert_eq!(AddResult::parse(b"{}").unwrap(), AddResult::default());
        let prefix = AddResult::parse(
            br#"{"ips":[{"address":"2001:db8:0:5::1/64"}],"margay.io/prefixes":["2001:db8:0:5::/64"]}"#,
        )
        .unwrap();
        assert_eq!(prefix.prefixes, ["2001:db8:0:5::/64".parse().unwrap()]);
    }

    #[test]
    fn result_is_refused_when_garbage() {
        for text in [
            "",
            "no json here",
            "[]",
            r#"{"ips":5}"#,
            r#"{"ips":[{}]}"#,
            r#"{"ips":[{"address":"x"}]}"#,
            r#"{"margay.io/prefixes":[7]}"#,
        ] {
            let error = AddResult::parse(text.as_bytes()).unwrap_err();
            assert!(error.message().starts_with("failed to unmarshal raw result: "), "{text}: {error}");
        }
    }
}
