//! The result of an IPAM plugin, of any version of CNI.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use crate::error::{CniError, Result};
use crate::result::PREFIXES;

/// The result of an IPAM plugin. Routes, names of servers and interfaces are passed on as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct IpamResult {
    /// The addresses, with the masks that the plugin named.
    pub(super) ips: Vec<Ip>,
    pub(super) routes: Vec<Value>,
    /// The object `dns`, unless it is empty.
    pub(super) dns: Option<Value>,
    pub(super) interfaces: Vec<Value>,
    /// The prefixes that were assigned: each has an address in `ips`, and the rest of it is the container's, too.
    pub(super) prefixes: Vec<IpNet>,
}

/// An address of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ip {
    pub(super) network: IpNet,
    pub(super) gateway: Option<IpAddr>,
}

impl IpamResult {
    /// Reads what an IPAM plugin printed.
    ///
    /// # Errors
    /// No JSON, or no result.
    pub(super) fn parse(text: &[u8]) -> Result<Self> {
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
                parsed.routes.extend(list(family.get("routes")).map_err(wrong)?);
            }
            return Ok(parsed);
        }
        for entry in list(members.get("ips")).map_err(wrong)? {
            parsed.ips.push(ip(&entry, "address").map_err(wrong)?);
        }
        parsed.routes = list(members.get("routes")).map_err(wrong)?;
        parsed.interfaces = list(members.get("interfaces")).map_err(wrong)?;
        Ok(parsed)
    }

    /// The result for addresses that no IPAM plugin assigned.
    pub(super) fn of_addresses(addresses: &[IpAddr]) -> Self {
        let ips = addresses.iter().map(|ip| Ip { network: IpNet::from(*ip), gateway: None });
        Self { ips: ips.collect(), ..Self::default() }
    }

    /// An address as a result of ADD shows it: with the length of its prefix, or as a single one.
    pub(super) fn unit_of(&self, address: IpAddr) -> IpNet {
        let prefix = self.prefixes.iter().find(|prefix| prefix.contains(&address));
        let length = prefix.map(|prefix| IpNet::new(address, prefix.prefix_len()));
        length.and_then(|net| net.ok()).unwrap_or_else(|| address.into())
    }

    /// The addresses alone.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().map(|ip| ip.network.addr()).collect()
    }
}

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
    let network = address.parse().map_err(|_| format!("invalid CIDR address: {address}"))?;
    // Go reads what is no address as none.
    Ok(Ip { network, gateway: text("gateway").and_then(|gateway| gateway.parse().ok()) })
}

fn list(value: Option<&Value>) -> Result<Vec<Value>, String> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(items)) => Ok(items.clone()),
        Some(_) => Err("ips, routes and interfaces must be lists".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_is_read() {
        let new = IpamResult::parse(
            br#"{"cniVersion":"1.0.0","ips":[{"address":"10.9.8.7/24","gateway":"10.9.8.1"}],"routes":[{"dst":"10.0.0.0/8"}],"dns":{}}"#,
        )
        .unwrap();
        assert_eq!(new.addresses(), ["10.9.8.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(new.ips[0].gateway, Some("10.9.8.1".parse().unwrap()));
        assert_eq!((new.routes.len(), new.dns), (1, None));
        let old = IpamResult::parse(
            br#"{"ip4":{"ip":"10.9.8.7/24","routes":[{"dst":"1.0.0.0/8"}]},"ip6":{"ip":"fd80::7/64"},"dns":{"nameservers":["a"]}}"#,
        )
        .unwrap();
        assert_eq!((old.ips.len(), old.routes.len(), old.dns.is_some()), (2, 1, true));
        assert_eq!(IpamResult::parse(b"{}").unwrap(), IpamResult::default());
        let prefix = IpamResult::parse(
            br#"{"ips":[{"address":"2001:db8:0:5::1/64"}],"margay.io/prefixes":["2001:db8:0:5::/64"]}"#,
        )
        .unwrap();
        assert_eq!(prefix.prefixes, ["2001:db8:0:5::/64".parse().unwrap()]);
    }

    #[test]
    fn garbage_is_an_error() {
        for text in [
            "",
            "no json here",
            "[]",
            r#"{"ips":5}"#,
            r#"{"ips":[{}]}"#,
            r#"{"ips":[{"address":"x"}]}"#,
            r#"{"margay.io/prefixes":[7]}"#,
        ] {
            let error = IpamResult::parse(text.as_bytes()).unwrap_err();
            assert!(error.message().starts_with("failed to unmarshal raw result: "), "{text}: {error}");
        }
    }
}
