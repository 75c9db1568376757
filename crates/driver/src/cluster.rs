//! The address of a cluster.

use crate::access::Access;
use crate::error::{ConfigError, Result};
use crate::path::absolute;
use crate::settings::Settings;

/// How to reach a cluster: endpoints, or a domain to look them up in; exactly one of the two is not empty.
///
/// Secrets are in `access` alone, which neither [`url`](Self::url) nor `Debug` shows: an endpoint with a user or a password in it
/// is never taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterAddress {
    /// The members, as `http://host:port`, `https://host:port` or `unix:///path`.
    pub endpoints: Vec<String>,
    /// The domain whose SRV records name the members.
    pub discovery_srv: String,
    /// The credentials.
    pub access: Access,
}

impl ClusterAddress {
    /// The address in a URL: `NAME://host:port[,host:port]`, with TLS `NAME+https://`, over a unix socket `NAME+unix:///path`.
    ///
    /// # Errors
    /// The fault of the URL. No error repeats what may be a secret.
    pub fn of_url(driver: &str, scheme: &str, rest: &str) -> Result<Self> {
        let endpoints = match scheme.strip_prefix(driver) {
            Some("") => members(rest, "http://")?,
            Some("+https") => members(rest, "https://")?,
            Some("+unix") => vec![format!("unix://{}", absolute(scheme, rest)?.display())],
            _ => return Err(ConfigError::UnknownScheme(scheme.to_owned())),
        };
        Ok(Self { endpoints, ..Self::default() })
    }

    /// The address in settings: Calico's, about etcd.
    ///
    /// # Errors
    /// The fault of the settings.
    pub fn of_settings(settings: &Settings) -> Result<Self> {
        if !settings.path.is_empty() {
            return Err(ConfigError::PathWithoutEmbedded);
        }
        let (endpoints, discovery_srv) = match (&settings.etcd_endpoints, &settings.etcd_discovery_srv) {
            (list, domain) if domain.is_empty() => (endpoints(list)?, String::new()),
            (list, domain) if list.is_empty() => (Vec::new(), domain.clone()),
            _ => return Err(ConfigError::EndpointsAndDiscovery),
        };
        Ok(Self { endpoints, discovery_srv, access: settings.access()? })
    }

    /// True if it says of each member that it is without TLS.
    pub fn all_without_tls(&self) -> bool {
        let without = |endpoint: &String| endpoint.starts_with("http://") || endpoint.starts_with("unix:");
        self.discovery_srv.is_empty() && self.endpoints.iter().all(without)
    }

    /// With its members in order, each once.
    #[must_use]
    pub fn in_order(&self) -> Self {
        let mut ordered = self.clone();
        ordered.endpoints.sort_unstable();
        ordered.endpoints.dedup();
        ordered
    }

    /// The URL, which begins with the driver's name. An SRV domain, and a list that mixes plain text and TLS, have no URL and are
    /// described instead.
    pub fn url(&self, driver: &str) -> String {
        if self.endpoints.is_empty() {
            return format!("{driver} members in the SRV records of {}", self.discovery_srv);
        }
        if let [endpoint] = &self.endpoints[..]
            && endpoint.starts_with("unix:///")
        {
            return format!("{driver}+{endpoint}");
        }
        let all = |prefix| self.endpoints.iter().map(|e| e.strip_prefix(prefix)).collect::<Option<Vec<_>>>();
        match (all("http://"), all("https://")) {
            (Some(hosts), _) => format!("{driver}://{}", hosts.join(",")),
            (_, Some(hosts)) => format!("{driver}+https://{}", hosts.join(",")),
            _ => format!("{driver} at {}", self.endpoints.join(",")),
        }
    }
}

/// The members that a URL names.
fn members(rest: &str, scheme: &str) -> Result<Vec<String>> {
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let hosts = endpoints(rest)?;
    if hosts.iter().any(|host| host.contains(['/', '?', '#'])) {
        return Err(ConfigError::EtcdUrl);
    }
    Ok(hosts.into_iter().map(|host| format!("{scheme}{host}")).collect())
}

/// A comma list of endpoints, as it stands in `etcd_endpoints` and `ETCD_ENDPOINTS`, with their schemes in lower case; never
/// empty.
fn endpoints(list: &str) -> Result<Vec<String>> {
    if list.contains('@') {
        return Err(ConfigError::SecretInAddress);
    }
    let endpoints: Vec<String> =
        list.split(',').map(str::trim).filter(|endpoint| !endpoint.is_empty()).map(with_lower_scheme).collect();
    if endpoints.is_empty() { Err(ConfigError::NoEndpoints) } else { Ok(endpoints) }
}

fn with_lower_scheme(endpoint: &str) -> String {
    match endpoint.split_once("://") {
        Some((scheme, rest)) => format!("{}://{rest}", scheme.to_ascii_lowercase()),
        None => endpoint.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_in_a_list_may_be_in_capitals() {
        assert_eq!(endpoints("HTTP://A:1, Https://b:2,c:3").unwrap(), ["http://A:1", "https://b:2", "c:3"]);
    }

    #[test]
    fn a_url_becomes_endpoints() {
        let address = ClusterAddress::of_url("etcd", "etcd+https", "a:1, b:2/").unwrap();
        assert_eq!(address.endpoints, ["https://a:1", "https://b:2"]);
    }

    #[test]
    fn an_address_without_a_url_is_described() {
        let mixed =
            ClusterAddress { endpoints: vec!["http://a:1".into(), "https://b:2".into()], ..ClusterAddress::default() };
        assert_eq!(mixed.url("etcd"), "etcd at http://a:1,https://b:2");
        let srv = ClusterAddress { discovery_srv: "example.org".into(), ..ClusterAddress::default() };
        assert_eq!(srv.url("etcd"), "etcd members in the SRV records of example.org");
    }
}
