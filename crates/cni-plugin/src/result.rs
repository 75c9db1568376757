//! The result of an ADD, in each version of CNI: ours, and the one that another IPAM plugin printed.

use std::net::IpAddr;

use agent::{CniError, Result};
use ipam_core::assign::Assigned;
use ipnet::IpNet;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::bridged::{BridgedSettings, Mask};
use crate::gojson;
use crate::routes::Route;
use crate::versions;

/// The member of a result that names the assigned prefixes. CNI has none for them, and passes over members that it does not
/// know.
const PREFIXES: &str = "margay.io/prefixes";

/// A result of ADD. The addresses of ours are in order, IPv4 first.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AddResult {
    pub(crate) interfaces: Vec<Part<Interface>>,
    pub(crate) ips: Vec<Ip>,
    pub(crate) routes: Vec<Part<Route>>,
    /// The prefixes that were assigned: each has an address in `ips`, and the rest of it is the container's, too.
    pub(crate) prefixes: Vec<IpNet>,
    /// The object `dns`, unless it is empty.
    pub(crate) dns: Option<Value>,
}

/// A part of a result: made here, or passed on as another plugin printed it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Part<T> {
    Ours(T),
    Theirs(Value),
}

/// An interface of a result.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Interface {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mac: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sandbox: Option<String>,
}

/// An address of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ip {
    pub(crate) address: IpNet,
    pub(crate) gateway: Option<IpAddr>,
    /// The place of its interface in the list.
    pub(crate) interface: Option<usize>,
}

impl AddResult {
    /// Calico's result: the mask of the block, that of a host for a wanted address, and a route to each address as it is
    /// printed, host bits included. A prefix has its own mask.
    ///
    /// # Errors
    /// A prefix length that the allocator cannot mean.
    pub(crate) fn calico(assigned: &[Assigned], wanted: &[IpAddr]) -> Result<Self> {
        let prefix = |a: &Assigned| if wanted.contains(&a.ip) { host_prefix(a.ip) } else { a.block.prefix_len() };
        let ips = in_order(assigned, prefix)?;
        let ips: Vec<_> = ips.into_iter().map(|ip| Ip { gateway: None, ..ip }).collect();
        let routes = ips.iter().map(|ip| Part::Ours(Route::to(ip.address))).collect();
        Ok(Self { ips, routes, prefixes: prefixes(assigned), ..Self::default() })
    }

    /// The same without routes: Calico's answer to the target of a migration, whose traffic must still go to the
    /// source.
    pub(crate) fn without_routes(mut self) -> Self {
        self.routes.clear();
        self
    }

    /// The result as host-local would have it: the mask of the pool unless the block's is configured, the gateway, the
    /// configured routes.
    ///
    /// # Errors
    /// A prefix length that the allocator cannot mean.
    pub(crate) fn bridged(assigned: &[Assigned], settings: &BridgedSettings) -> Result<Self> {
        let prefix = |a: &Assigned| match settings.mask {
            Mask::Pool => a.pool.prefix_len(),
            Mask::Block => a.block.prefix_len(),
        };
        let mut ips = in_order(assigned, prefix)?;
        // host-local's results have the order of the sets of ranges.
        ips.sort_by_key(|ip| settings.network.set_of(ip.address.addr()));
        let routes = settings.routes.iter().cloned().map(Part::Ours).collect();
        Ok(Self { ips, routes, prefixes: prefixes(assigned), ..Self::default() })
    }

    /// The result for addresses that no IPAM plugin assigned.
    pub(crate) fn of_addresses(addresses: &[IpAddr]) -> Self {
        let ip = |ip: &IpAddr| Ip { address: IpNet::from(*ip), gateway: None, interface: None };
        Self { ips: addresses.iter().map(ip).collect(), ..Self::default() }
    }

    /// Reads what an IPAM plugin printed, in any version of CNI.
    ///
    /// # Errors
    /// No JSON, or no result.
    pub(crate) fn parse(text: &[u8]) -> Result<Self> {
        let wrong = |reason: String| CniError::internal(format!("failed to unmarshal raw result: {reason}"));
        let result: Value = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        let Value::Object(members) = &result else { return Err(wrong("the result is no object".to_owned())) };
        let mut parsed = Self { dns: dns(members.get("dns")), ..Self::default() };
        for prefix in list(members.get(PREFIXES)).map_err(wrong)? {
            let text = prefix.as_str().unwrap_or_default();
            parsed.prefixes.push(text.parse().map_err(|_| wrong(format!("invalid CIDR address: {text}")))?);
        }
        if members.contains_key("ip4") || members.contains_key("ip6") {
            for family in ["ip4", "ip6"].iter().filter_map(|name| members.get(*name)).filter(|value| value.is_object())
            {
                parsed.ips.push(ip(family, "ip").map_err(wrong)?);
                let routes = list(family.get("routes")).map_err(wrong)?;
                parsed.routes.extend(routes.into_iter().map(Part::Theirs));
            }
            return Ok(parsed);
        }
        for entry in list(members.get("ips")).map_err(wrong)? {
            parsed.ips.push(ip(&entry, "address").map_err(wrong)?);
        }
        parsed.routes = list(members.get("routes")).map_err(wrong)?.into_iter().map(Part::Theirs).collect();
        parsed.interfaces = list(members.get("interfaces")).map_err(wrong)?.into_iter().map(Part::Theirs).collect();
        Ok(parsed)
    }

    /// The addresses alone.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().map(|ip| ip.address.addr()).collect()
    }

    /// The answer of a main plugin, as Calico's has it: its interfaces come after those of the IPAM plugin, and each address is in
    /// the last one, without a gateway, as a single address or with the length of its prefix.
    pub(crate) fn on(mut self, interfaces: [Interface; 2]) -> Self {
        self.interfaces.extend(interfaces.map(Part::Ours));
        let last = self.interfaces.len() - 1;
        for ip in &mut self.ips {
            let address = ip.address.addr();
            let prefix = self.prefixes.iter().find(|prefix| prefix.contains(&address));
            let prefix = prefix.and_then(|prefix| IpNet::new(address, prefix.prefix_len()).ok());
            *ip = Ip { address: prefix.unwrap_or_else(|| address.into()), gateway: None, interface: Some(last) };
        }
        self
    }

    /// The JSON in a version that the plugin speaks: indented by four, without a newline at the end.
    ///
    /// # Errors
    /// Before 0.3.0 there must be an address.
    pub(crate) fn to_json(&self, version: &str) -> Result<String> {
        if versions::is_before(version, "0.3.0") {
            self.before_030(version)
        } else if versions::is_before(version, "1.0.0") {
            Ok(self.since_030(version, Form::Before100))
        } else {
            Ok(self.since_030(version, Form::Since100))
        }
    }

    fn before_030(&self, version: &str) -> Result<String> {
        #[derive(Serialize)]
        struct Family<'a> {
            ip: IpNet,
            #[serde(skip_serializing_if = "Option::is_none")]
            gateway: Option<IpAddr>,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            routes: Vec<OldRoute<'a>>,
        }
        #[derive(Serialize)]
        #[serde(untagged)]
        enum OldRoute<'a> {
            Ours {
                dst: &'a IpNet,
                #[serde(skip_serializing_if = "Option::is_none")]
                gw: Option<IpAddr>,
            },
            Theirs(&'a Value),
        }
        impl<'a> From<&'a Part<Route>> for OldRoute<'a> {
            fn from(route: &'a Part<Route>) -> Self {
                match route {
                    Part::Ours(route) => Self::Ours { dst: &route.dst, gw: route.gw },
                    Part::Theirs(route) => Self::Theirs(route),
                }
            }
        }
        #[derive(Serialize)]
        struct Printed<'a> {
            #[serde(rename = "cniVersion")]
            version: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            ip4: Option<Family<'a>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            ip6: Option<Family<'a>>,
            #[serde(rename = "margay.io/prefixes", skip_serializing_if = "<[_]>::is_empty")]
            prefixes: &'a [IpNet],
            dns: Value,
        }
        let family = |is_v4: bool| {
            let ip = self.ips.iter().find(|ip| ip.address.addr().is_ipv4() == is_v4)?;
            let routes = self.routes.iter().filter(|route| route.is_v4() == Some(is_v4)).map(OldRoute::from).collect();
            Some(Family { ip: ip.address, gateway: ip.gateway, routes })
        };
        let (ip4, ip6) = (family(true), family(false));
        if ip4.is_none() && ip6.is_none() {
            return Err(no_addresses());
        }
        let dns = self.dns.clone().unwrap_or_else(no_dns);
        Ok(gojson::indented(&Printed { version, ip4, ip6, prefixes: &self.prefixes, dns }))
    }

    /// A result of CNI 0.3.0 and later; those before 1.0.0 say of which family an address is, have `dns`, and no MTU.
    fn since_030(&self, version: &str, form: Form) -> String {
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
        struct Printed<'a> {
            #[serde(rename = "cniVersion")]
            version: &'a str,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            interfaces: Vec<Part<Interface>>,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            ips: Vec<PrintedIp>,
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            routes: &'a [Part<Route>],
            #[serde(rename = "margay.io/prefixes", skip_serializing_if = "<[_]>::is_empty")]
            prefixes: &'a [IpNet],
            #[serde(skip_serializing_if = "Option::is_none")]
            dns: Option<Value>,
        }
        let family = |address: &IpNet| if address.addr().is_ipv4() { "4" } else { "6" };
        let ip = |ip: &Ip| PrintedIp {
            version: (form == Form::Before100).then(|| family(&ip.address)),
            interface: ip.interface,
            address: ip.address,
            gateway: ip.gateway,
        };
        let dns = self.dns.clone().or_else(|| (form == Form::Before100).then(no_dns));
        let ips = self.ips.iter().map(ip).collect();
        let mut interfaces = self.interfaces.clone();
        for interface in &mut interfaces {
            if let (Part::Ours(ours), Form::Before100) = (interface, form) {
                ours.mtu = None;
            }
        }
        let Self { routes, prefixes, .. } = self;
        gojson::indented(&Printed { version, interfaces, ips, routes, prefixes, dns })
    }
}

impl Part<Route> {
    /// True for a route of IPv4; `None` for another plugin's without a destination.
    fn is_v4(&self) -> Option<bool> {
        match self {
            Self::Ours(route) => Some(route.dst.addr().is_ipv4()),
            Self::Theirs(route) => Some(!route.get("dst")?.as_str()?.contains(':')),
        }
    }
}

/// The form of a result of CNI 0.3.0 and later.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Before 1.0.0.
    Before100,
    /// 1.0.0 and later.
    Since100,
}

/// The object `dns` of a result that names no server.
fn no_dns() -> Value {
    Value::Object(Map::new())
}

/// The error of results before 0.3.0 that have no address.
pub(crate) fn no_addresses() -> CniError {
    CniError::internal("cannot convert: no valid IP addresses")
}

fn prefixes(assigned: &[Assigned]) -> Vec<IpNet> {
    let prefix = |one: &Assigned| IpNet::new(one.ip, one.prefix_length?).ok();
    assigned.iter().filter_map(prefix).map(|prefix| prefix.trunc()).collect()
}

fn host_prefix(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn in_order(assigned: &[Assigned], prefix: impl Fn(&Assigned) -> u8) -> Result<Vec<Ip>> {
    let families = [true, false].into_iter();
    let sorted = families.flat_map(|v4| assigned.iter().filter(move |a| a.ip.is_ipv4() == v4));
    let ip = |a: &Assigned| {
        let prefix = a.prefix_length.unwrap_or_else(|| prefix(a));
        let address = IpNet::new(a.interface_ip(), prefix)
            .map_err(|_| CniError::internal(format!("address {} cannot have the prefix length {prefix}", a.ip)))?;
        Ok(Ip { address, gateway: a.gateway, interface: None })
    };
    sorted.map(ip).collect()
}

/// The object `dns` of another plugin's result, unless nothing is in it.
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

fn ip(value: &Value, name: &str) -> Result<Ip, String> {
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let address = text(name).ok_or_else(|| format!("an address lacks the text {name}"))?;
    let parsed = address.parse().map_err(|_| format!("invalid CIDR address: {address}"))?;
    // Go reads what is no address as none.
    Ok(Ip { address: parsed, gateway: text("gateway").and_then(|gateway| gateway.parse().ok()), interface: None })
}

fn list(value: Option<&Value>) -> Result<Vec<Value>, String> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(items)) => Ok(items.clone()),
        Some(_) => Err("ips, routes and interfaces must be lists".to_owned()),
    }
}

#[cfg(test)]
#[path = "result_tests.rs"]
mod tests;
