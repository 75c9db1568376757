//! A place where a store is, as a value and as a URL.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::access::Access;
use crate::error::{ConfigError, Result};

/// Where a sled store is if nothing says otherwise.
pub const DEFAULT_SLED_PATH: &str = "/var/lib/margay/ipam.sled";

/// Where a redb store is if redb is named without a path.
pub const DEFAULT_REDB_PATH: &str = "/var/lib/margay/ipam.redb";

/// How to reach an etcd cluster: endpoints, or a domain to look them up in; exactly one of the two is not empty.
///
/// Secrets are in `access` alone, which neither `Display` nor `Debug` shows: an endpoint with a user or a password in it
/// is never taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Etcd {
    /// The members, as `http://host:port`, `https://host:port` or `unix:///path`.
    pub endpoints: Vec<String>,
    /// The domain whose SRV records name the members.
    pub discovery_srv: String,
    /// The credentials.
    pub access: Access,
}

impl Etcd {
    /// True if it says of each member that it is without TLS.
    pub fn all_without_tls(&self) -> bool {
        let without = |endpoint: &String| endpoint.starts_with("http://") || endpoint.starts_with("unix:");
        self.discovery_srv.is_empty() && self.endpoints.iter().all(without)
    }
}

/// Where a store is. It parses from, and prints as, a store URL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// `sled:///path`: the folder of a sled store.
    Sled(PathBuf),
    /// `redb:///path`: the folder of a redb store.
    Redb(PathBuf),
    /// `memory:`: gone when it is closed. For tests, conformance and benchmarks only.
    Memory,
    /// `etcd://host:port[,host:port]`, with TLS `etcd+https://`, over a unix socket `etcd+unix:///path`: a cluster.
    Etcd(Etcd),
}

impl Location {
    /// The folder of an embedded store; `None` for the others.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Sled(path) | Self::Redb(path) => Some(path),
            Self::Memory | Self::Etcd(_) => None,
        }
    }

    /// Its address, the same in whatever order the members of a cluster are named: a key for files about the store.
    pub fn in_order(&self) -> String {
        let Self::Etcd(etcd) = self else { return self.to_string() };
        let mut etcd = etcd.clone();
        etcd.endpoints.sort_unstable();
        etcd.endpoints.dedup();
        etcd.to_string()
    }

    /// True if both are the same store, however it is reached.
    pub(crate) fn is_same_store(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Etcd(one), Self::Etcd(two)) => {
                one.endpoints == two.endpoints && one.discovery_srv == two.discovery_srv
            }
            _ => self == other,
        }
    }
}

impl Default for Location {
    /// The store when nothing is configured at all: sled at [`DEFAULT_SLED_PATH`].
    fn default() -> Self {
        Self::Sled(DEFAULT_SLED_PATH.into())
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sled(path) => write!(f, "sled://{}", path.display()),
            Self::Redb(path) => write!(f, "redb://{}", path.display()),
            Self::Memory => f.write_str("memory:"),
            Self::Etcd(etcd) => etcd.fmt(f),
        }
    }
}

impl fmt::Display for Etcd {
    /// The store URL; a list that mixes plain text and TLS, or an SRV domain, has none and is described instead.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.endpoints.is_empty() {
            return write!(f, "etcd members in the SRV records of {}", self.discovery_srv);
        }
        if let [endpoint] = &self.endpoints[..]
            && endpoint.starts_with("unix:///")
        {
            return write!(f, "etcd+{endpoint}");
        }
        let all = |prefix| self.endpoints.iter().map(|e| e.strip_prefix(prefix)).collect::<Option<Vec<_>>>();
        match (all("http://"), all("https://")) {
            (Some(hosts), _) => write!(f, "etcd://{}", hosts.join(",")),
            (_, Some(hosts)) => write!(f, "etcd+https://{}", hosts.join(",")),
            _ => write!(f, "etcd at {}", self.endpoints.join(",")),
        }
    }
}

impl FromStr for Location {
    type Err = ConfigError;

    /// Reads a store URL. A path is taken as it stands, without percent-decoding.
    ///
    /// # Errors
    /// An unknown scheme, a path that is not absolute, a user or password. No error repeats what may be a secret.
    fn from_str(url: &str) -> Result<Self> {
        if url == "memory:" {
            return Ok(Self::Memory);
        }
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(ConfigError::NotAUrl { path: url.starts_with('/').then(|| url.to_owned()) });
        };
        match scheme.to_ascii_lowercase().as_str() {
            scheme @ "sled" => Ok(Self::Sled(absolute(scheme, rest)?)),
            scheme @ "redb" => Ok(Self::Redb(absolute(scheme, rest)?)),
            "etcd" => Ok(Self::Etcd(members(rest, "http://")?)),
            scheme @ "etcd+unix" => Ok(Self::Etcd(Etcd { endpoints: vec![socket(scheme, rest)?], ..Etcd::default() })),
            "etcd+https" => Ok(Self::Etcd(members(rest, "https://")?)),
            _ => Err(ConfigError::UnknownScheme(scheme.to_owned())),
        }
    }
}

/// The path of an embedded store's URL.
fn absolute(scheme: &str, rest: &str) -> Result<PathBuf> {
    if rest.contains('@') && !rest.starts_with('/') {
        return Err(ConfigError::SecretInAddress);
    }
    if rest.contains(['?', '#', '\0']) {
        return Err(ConfigError::UrlOptions(scheme.to_owned()));
    }
    if !rest.starts_with('/') || rest.trim_end_matches('/').is_empty() {
        return Err(ConfigError::UrlPath(scheme.to_owned()));
    }
    Ok(rest.into())
}

/// The endpoint that is a unix socket.
fn socket(scheme: &str, rest: &str) -> Result<String> {
    absolute(scheme, rest).map(|path| format!("unix://{}", path.display()))
}

/// The members that an etcd URL names.
fn members(rest: &str, scheme: &str) -> Result<Etcd> {
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let endpoints = endpoints(rest)?;
    if endpoints.iter().any(|host| host.contains(['/', '?', '#'])) {
        return Err(ConfigError::EtcdUrl);
    }
    Ok(Etcd { endpoints: endpoints.into_iter().map(|host| format!("{scheme}{host}")).collect(), ..Etcd::default() })
}

/// A comma list of endpoints, as it stands in `etcd_endpoints` and `ETCD_ENDPOINTS`, with their schemes in lower case; never
/// empty.
pub(crate) fn endpoints(list: &str) -> Result<Vec<String>> {
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
    fn a_scheme_may_be_in_capitals() {
        for (url, same) in [
            ("HTTP://a", None),
            ("Redb:///A/b", Some("redb:///A/b")),
            ("SLED:///a", Some("sled:///a")),
            ("ETCD://A:2379", Some("etcd://A:2379")),
            ("Etcd+HTTPS://a:2379", Some("etcd+https://a:2379")),
            ("ETCD+UNIX:///a", Some("etcd+unix:///a")),
        ] {
            assert_eq!(url.parse::<Location>().ok().map(|location| location.to_string()).as_deref(), same, "{url}");
        }
        assert_eq!(endpoints("HTTP://A:1, Https://b:2,c:3").unwrap(), ["http://A:1", "https://b:2", "c:3"]);
    }

    #[test]
    fn urls_parse_and_print_back() {
        for url in [
            "sled:///var/lib/margay/ipam.sled",
            "redb:///srv/my stores/a@b",
            "memory:",
            "etcd://10.0.0.1:2379",
            "etcd+https://a:2379,[fd00::1]:2379",
            "etcd+unix:///run/etcd/localhost:2379",
        ] {
            assert_eq!(url.parse::<Location>().unwrap().to_string(), url);
        }
    }

    #[test]
    fn etcd_urls_become_endpoints() {
        let Location::Etcd(etcd) = "etcd+https://a:1, b:2/".parse().unwrap() else { panic!("not etcd") };
        assert_eq!(etcd.endpoints, ["https://a:1", "https://b:2"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("sled://relative/path", ConfigError::UrlPath("sled".into())),
            ("redb://", ConfigError::UrlPath("redb".into())),
            ("sled:///", ConfigError::UrlPath("sled".into())),
            ("sled:///a?cache=1", ConfigError::UrlOptions("sled".into())),
            ("postgres://x/y", ConfigError::UnknownScheme("postgres".into())),
            ("/var/lib/x", ConfigError::NotAUrl { path: Some("/var/lib/x".into()) }),
            ("", ConfigError::NotAUrl { path: None }),
            ("etcd://", ConfigError::NoEndpoints),
            ("etcd://a:2379/calico", ConfigError::EtcdUrl),
        ];
        for (url, expected) in cases {
            assert_eq!(url.parse::<Location>().unwrap_err(), expected, "{url}");
        }
    }

    #[test]
    fn no_error_repeats_a_secret() {
        for url in [
            "etcd://root:hunter2@a:2379",
            "etcd+https://a:1,root:hunter2@b:2",
            "sled://root:hunter2@host/path",
            "http://root:hunter2@a:2379",
            "root:hunter2@a",
            "sled:root:hunter2",
        ] {
            let error = url.parse::<Location>().unwrap_err();
            let said = format!("{error} {} {error:?}", error.advice());
            assert!(!said.contains("hunter2"), "{url}: {said}");
        }
    }

    #[test]
    fn etcd_without_a_url_is_described() {
        let mixed = Etcd { endpoints: vec!["http://a:1".into(), "https://b:2".into()], ..Etcd::default() };
        assert_eq!(mixed.to_string(), "etcd at http://a:1,https://b:2");
        let srv = Etcd { discovery_srv: "example.org".into(), ..Etcd::default() };
        assert_eq!(srv.to_string(), "etcd members in the SRV records of example.org");
    }
}
