//! The output of ADD, in each version of CNI.

use serde_json::{Map, Value, json};

use super::ipam_result::IpamResult;
use crate::error::Result;
use crate::gojson;
use crate::result::{PREFIXES, no_addresses};
use crate::versions;

/// The answer to an ADD.
#[derive(Clone, Debug)]
pub(super) struct Answer<'a> {
    /// The result of IPAM.
    pub(super) assigned: &'a IpamResult,
    /// The interface on the host.
    pub(super) host_interface: &'a str,
    /// The interface in the container.
    pub(super) interface: &'a str,
    /// Its address.
    pub(super) mac: &'a str,
    /// Its MTU, if one was configured; else 0.
    pub(super) mtu: u32,
    /// `CNI_NETNS`.
    pub(super) netns: &'a str,
}

impl Answer<'_> {
    /// The JSON in a version that the plugin speaks: indented by four, without a newline at the end.
    ///
    /// # Errors
    /// Before 0.3.0 there must be an address.
    pub(super) fn to_json(&self, version: &str) -> Result<String> {
        let printed =
            if versions::is_before(version, "0.3.0") { self.before_030(version)? } else { self.since_030(version) };
        Ok(gojson::indented(&printed))
    }

    fn before_030(&self, version: &str) -> Result<Value> {
        let mut printed = Map::new();
        printed.insert("cniVersion".to_owned(), version.into());
        for (name, is_v4) in [("ip4", true), ("ip6", false)] {
            let Some(ip) = self.assigned.ips.iter().find(|ip| ip.network.addr().is_ipv4() == is_v4) else { continue };
            let host = self.assigned.unit_of(ip.network.addr());
            let mut family = Map::from_iter([("ip".to_owned(), Value::from(host.to_string()))]);
            let of_family = |route: &&Value| {
                let dst = route.get("dst").and_then(Value::as_str);
                dst.is_some_and(|dst| dst.contains(':') != is_v4)
            };
            let routes: Vec<Value> = self.assigned.routes.iter().filter(of_family).cloned().collect();
            if !routes.is_empty() {
                family.insert("routes".to_owned(), routes.into());
            }
            printed.insert(name.to_owned(), family.into());
        }
        if printed.len() == 1 {
            return Err(no_addresses());
        }
        printed.insert("dns".to_owned(), self.assigned.dns.clone().unwrap_or_else(|| json!({})));
        Ok(printed.into())
    }

    fn since_030(&self, version: &str) -> Value {
        let is_old = versions::is_before(version, "1.0.0");
        let mut interfaces = self.assigned.interfaces.clone();
        let mut inside = json!({ "name": self.interface, "mac": self.mac, "sandbox": self.netns });
        if let (Value::Object(inside), false, true) = (&mut inside, is_old, self.mtu > 0) {
            inside.insert("mtu".to_owned(), self.mtu.into());
        }
        interfaces.extend([json!({ "name": self.host_interface }), inside]);
        let container = interfaces.len() - 1;
        let ip = |ip: &super::ipam_result::Ip| {
            let address = ip.network.addr();
            let network = self.assigned.unit_of(address).to_string();
            let mut printed = json!({ "address": network, "interface": container });
            if let (Value::Object(printed), true) = (&mut printed, is_old) {
                printed.insert("version".to_owned(), if address.is_ipv4() { "4" } else { "6" }.into());
            }
            printed
        };
        let ips: Vec<Value> = self.assigned.ips.iter().map(ip).collect();
        let mut printed = Map::new();
        printed.insert("cniVersion".to_owned(), version.into());
        printed.insert("interfaces".to_owned(), interfaces.into());
        let prefixes = self.assigned.prefixes.iter().map(|prefix| prefix.to_string().into()).collect();
        for (name, list) in [("ips", ips), ("routes", self.assigned.routes.clone()), (PREFIXES, prefixes)] {
            if !list.is_empty() {
                printed.insert(name.to_owned(), list.into());
            }
        }
        let dns = self.assigned.dns.clone().or_else(|| is_old.then(|| json!({})));
        printed.extend(dns.map(|dns| ("dns".to_owned(), dns)));
        printed.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(version: &str, assigned: &[u8], mtu: u32) -> Value {
        let assigned = IpamResult::parse(assigned).unwrap();
        let answer =
            Answer { assigned: &assigned, host_interface: "calic1", interface: "eth0", mac: "m", mtu, netns: "/n" };
        serde_json::from_str(&answer.to_json(version).unwrap()).unwrap()
    }

    const BOTH: &[u8] = br#"{"ips":[{"address":"10.0.0.1/26","gateway":"10.0.0.2"},{"address":"fd80::1/122"}],
        "routes":[{"dst":"10.0.0.1/26"},{"dst":"fd80::1/122"}]}"#;

    #[test]
    fn masks_are_of_one_address_and_gateways_go() {
        let new = printed("1.0.0", BOTH, 1410);
        assert_eq!(
            new,
            json!({"cniVersion":"1.0.0","interfaces":[{"name":"calic1"},{"name":"eth0","mac":"m","sandbox":"/n","mtu":1410}],
                "ips":[{"address":"10.0.0.1/32","interface":1},{"address":"fd80::1/128","interface":1}],
                "routes":[{"dst":"10.0.0.1/26"},{"dst":"fd80::1/122"}]})
        );
        let older = printed("0.4.0", BOTH, 1410);
        assert_eq!(older["interfaces"][1].get("mtu"), None);
        assert_eq!((&older["dns"], &older["ips"][1]["version"]), (&json!({}), &json!("6")));
    }

    #[test]
    fn the_oldest_form_has_an_address_of_each_family() {
        let old = printed("0.2.0", BOTH, 0);
        assert_eq!(
            old,
            json!({"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.1/32","routes":[{"dst":"10.0.0.1/26"}]},
                "ip6":{"ip":"fd80::1/128","routes":[{"dst":"fd80::1/122"}]},"dns":{}})
        );
    }

    #[test]
    fn interfaces_of_ipam_stay_in_front() {
        let result = br#"{"interfaces":[{"name":"x"}],"ips":[{"address":"10.0.0.1/26"}],"dns":{"nameservers":["n"]}}"#;
        let new = printed("1.1.0", result, 0);
        assert_eq!((&new["interfaces"][0]["name"], &new["ips"][0]["interface"]), (&json!("x"), &json!(2)));
        assert_eq!(new["dns"]["nameservers"][0], "n");
    }
}
