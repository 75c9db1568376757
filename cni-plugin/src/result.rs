//! The output of ADD, in each version of CNI.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Serialize;

use crate::bridged::{BridgedSettings, Mask};
use crate::error::{CniError, Result};
use crate::gojson;
use crate::request::Assigned;
use crate::versions;

/// A route of a result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Route {
    pub(crate) dst: IpNet,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gw: Option<IpAddr>,
    #[serde(flatten)]
    pub(crate) options: RouteOptions,
}

/// The members of a route beside its destination and gateway; printed from CNI 0.3.0 on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RouteOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) advmss: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) table: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scope: Option<i64>,
}

impl Route {
    pub(crate) fn to(dst: IpNet) -> Self {
        Self { dst, gw: None, options: RouteOptions::default() }
    }
}

/// The member of a result that names the assigned prefixes. CNI has none for them, and passes over members that it does not
/// know.
pub(crate) const PREFIXES: &str = "margay.io/prefixes";

/// The addresses and routes of a result, IPv4 first.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AddResult {
    ips: Vec<Ip>,
    routes: Vec<Route>,
    /// The prefixes of which some of the addresses are.
    prefixes: Vec<IpNet>,
}

#[derive(Clone, Debug, PartialEq)]
struct Ip {
    address: IpNet,
    gateway: Option<IpAddr>,
}

impl AddResult {
    /// Calico's result: the mask of the block, that of a host for a wanted address, and a route to each address as it is
    /// printed, host bits included. A prefix has its own mask.
    ///
    /// # Errors
    /// A prefix length that the allocator cannot mean.
    pub(crate) fn calico(assigned: &[Assigned], wanted: &[IpAddr]) -> Result<Self> {
        let prefix = |a: &Assigned| if wanted.contains(&a.address) { host_prefix(a.address) } else { a.block_prefix };
        let ips = in_order(assigned, prefix)?;
        let ips: Vec<_> = ips.into_iter().map(|ip| Ip { gateway: None, ..ip }).collect();
        let routes = ips.iter().map(|ip| Route::to(ip.address)).collect();
        Ok(Self { ips, routes, prefixes: prefixes(assigned) })
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
            Mask::Pool => a.pool_prefix,
            Mask::Block => a.block_prefix,
        };
        let mut ips = in_order(assigned, prefix)?;
        // host-local's results have the order of the sets of ranges.
        ips.sort_by_key(|ip| settings.network.set_of(ip.address.addr()));
        Ok(Self { ips, routes: settings.routes.clone(), prefixes: prefixes(assigned) })
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
        struct OldRoute<'a> {
            dst: &'a IpNet,
            #[serde(skip_serializing_if = "Option::is_none")]
            gw: Option<IpAddr>,
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
            dns: Dns,
        }
        let family = |is_v4: bool| {
            let ip = self.ips.iter().find(|ip| ip.address.addr().is_ipv4() == is_v4)?;
            let routes = self.routes.iter().filter(|route| route.dst.addr().is_ipv4() == is_v4);
            let routes = routes.map(|route| OldRoute { dst: &route.dst, gw: route.gw }).collect();
            Some(Family { ip: ip.address, gateway: ip.gateway, routes })
        };
        let printed = Printed { version, ip4: family(true), ip6: family(false), prefixes: &self.prefixes, dns: Dns {} };
        if printed.ip4.is_none() && printed.ip6.is_none() {
            return Err(no_addresses());
        }
        Ok(gojson::indented(&printed))
    }

    /// A result of CNI 0.3.0 and later; those before 1.0.0 say of which family an address is, and have `dns`.
    fn since_030(&self, version: &str, form: Form) -> String {
        #[derive(Serialize)]
        struct Ip {
            #[serde(skip_serializing_if = "Option::is_none")]
            version: Option<&'static str>,
            address: IpNet,
            #[serde(skip_serializing_if = "Option::is_none")]
            gateway: Option<IpAddr>,
        }
        #[derive(Serialize)]
        struct Printed<'a> {
            #[serde(rename = "cniVersion")]
            version: &'a str,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            ips: Vec<Ip>,
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            routes: &'a [Route],
            #[serde(rename = "margay.io/prefixes", skip_serializing_if = "<[_]>::is_empty")]
            prefixes: &'a [IpNet],
            #[serde(skip_serializing_if = "Option::is_none")]
            dns: Option<Dns>,
        }
        let family = |address: &IpNet| if address.addr().is_ipv4() { "4" } else { "6" };
        let ip = |ip: &self::Ip| Ip {
            version: (form == Form::Before100).then(|| family(&ip.address)),
            address: ip.address,
            gateway: ip.gateway,
        };
        let dns = (form == Form::Before100).then_some(Dns {});
        let ips = self.ips.iter().map(ip).collect();
        gojson::indented(&Printed { version, ips, routes: &self.routes, prefixes: &self.prefixes, dns })
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

/// The object `dns`, which is always empty.
#[derive(Serialize)]
struct Dns {}

/// The error of results before 0.3.0 that have no address.
pub(crate) fn no_addresses() -> CniError {
    CniError::internal("cannot convert: no valid IP addresses")
}

fn prefixes(assigned: &[Assigned]) -> Vec<IpNet> {
    let prefix = |one: &Assigned| IpNet::new(one.address, one.prefix_length?).ok();
    assigned.iter().filter_map(prefix).map(|prefix| prefix.trunc()).collect()
}

fn host_prefix(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn in_order(assigned: &[Assigned], prefix: impl Fn(&Assigned) -> u8) -> Result<Vec<Ip>> {
    let families = [true, false].into_iter();
    let sorted = families.flat_map(|v4| assigned.iter().filter(move |a| a.address.is_ipv4() == v4));
    let ip = |a: &Assigned| {
        let prefix = a.prefix_length.unwrap_or_else(|| prefix(a));
        let address = IpNet::new(a.address, prefix)
            .map_err(|_| CniError::internal(format!("address {} cannot have the prefix length {prefix}", a.address)))?;
        Ok(Ip { address, gateway: a.gateway })
    };
    sorted.map(ip).collect()
}

#[cfg(test)]
#[path = "result_tests.rs"]
mod tests;
