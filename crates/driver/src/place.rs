//! Defines the place of a store (in memory, in a folder or on a cluster), and the settings from which a driver derives
//! the place.

use std::fmt;
use std::path::PathBuf;

use crate::error::{ConfigError, ConfigResult};

/// Where a store is: in memory, in a folder, or on a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorePlace {
    /// The store is in the memory of this process.
    Memory,
    /// The store is in a folder on this machine.
    Folder(PathBuf),
    /// The store is on a cluster that many machines share.
    Cluster(ClusterAddress),
}

/// The address of a cluster: either a list of endpoints, or a domain whose SRV records name the endpoints.
///
/// Only the field `access` contains secrets, which neither [`url`](Self::url) nor `Debug` prints. No endpoint in a
/// `ClusterAddress` contains a user name or a password.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterAddress {
    /// The endpoints of the cluster's members, each as `http://host:port`, `https://host:port` or `unix:///path`.
    pub endpoints: Vec<String>,
    /// The domain whose SRV records name the cluster's members; empty if `endpoints` is set.
    pub discovery_srv: String,
    /// The credentials with which clients connect to the cluster.
    pub access: Access,
}

impl ClusterAddress {
    /// Parses the address of a cluster from a URL of the form `NAME://host:port[,host:port]`, `NAME+https://` for TLS,
    /// or `NAME+unix:///path` for a unix socket.
    ///
    /// # Errors
    /// An error that says what is wrong with the URL, without text that may be a secret.
    pub fn of_url(driver: &str, scheme: &str, rest: &str) -> ConfigResult<Self> {
        let endpoints = match scheme.strip_prefix(driver) {
            Some("") => members(rest, "http://")?,
            Some("+https") => members(rest, "https://")?,
            Some("+unix") => vec![format!("unix://{}", absolute_path(scheme, rest)?.display())],
            _ => return Err(ConfigError::UnknownScheme(scheme.to_owned())),
        };
        Ok(Self { endpoints, ..Self::default() })
    }

    /// Derives the address of a cluster from Calico's settings for etcd.
    ///
    /// # Errors
    /// An error that says what is wrong with the settings for etcd.
    pub fn of_settings(settings: &Settings) -> ConfigResult<Self> {
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

    /// Returns true if the address lists endpoints, all of them without TLS; false for an SRV domain.
    pub fn all_without_tls(&self) -> bool {
        let without = |endpoint: &String| endpoint.starts_with("http://") || endpoint.starts_with("unix:");
        self.discovery_srv.is_empty() && self.endpoints.iter().all(without)
    }

    /// Returns this address with its endpoints sorted and without duplicates.
    #[must_use]
    pub fn in_order(&self) -> Self {
        let mut ordered = self.clone();
        ordered.endpoints.sort_unstable();
        ordered.endpoints.dedup();
        ordered
    }

    /// Returns the store URL of the cluster, which begins with the driver's name. If the address has no URL (an SRV
    /// domain, or endpoints with and without TLS), returns a description of the address.
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

/// Parses the list of cluster members in a URL, and returns the endpoint of each member.
fn members(rest: &str, scheme: &str) -> ConfigResult<Vec<String>> {
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let hosts = endpoints(rest)?;
    if hosts.iter().any(|host| host.contains(['/', '?', '#'])) {
        return Err(ConfigError::EtcdUrl);
    }
    Ok(hosts.into_iter().map(|host| format!("{scheme}{host}")).collect())
}

/// Splits a comma-separated list of endpoints, as in `etcd_endpoints` and `ETCD_ENDPOINTS`, and changes the URL scheme
/// of each endpoint to lower case. The returned list of endpoints is never empty.
fn endpoints(list: &str) -> ConfigResult<Vec<String>> {
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

/// A client's credentials for a cluster. `Debug` omits the secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The CA that has signed the servers' certificates; if unset, the operating system's CAs are trusted.
    pub authority: Option<Pem>,
    /// The client's certificate and key, for servers that require a client certificate.
    pub identity: Option<ClientCertificate>,
    /// The user name and password, for servers that require a login.
    pub login: Option<Login>,
}

impl Access {
    /// Copies from `other` each credential that is missing in `self`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            authority: self.authority.or(other.authority),
            identity: self.identity.or(other.identity),
            login: self.login.or(other.login),
        }
    }

    /// Returns true if any credential for TLS is present.
    pub fn names_certificates(&self) -> bool {
        self.authority.is_some() || self.identity.is_some()
    }
}

/// A client certificate for TLS with its private key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The client certificate, and any intermediate certificates.
    pub certificate: Pem,
    /// The private key that belongs to the client certificate.
    pub key: Pem,
}

/// A certificate or key in PEM format.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// The path of a file that contains the PEM text.
    File(PathBuf),
    /// The text of the certificate or key in PEM format.
    Inline(String),
}

impl fmt::Debug for Pem {
    /// Prints the path of a PEM file, but never PEM text, which may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Inline(_) => f.write_str("Inline(..)"),
        }
    }
}

/// The user name and password for a login to a cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The name of the user who logs in.
    pub user: String,
    /// The password of the user who logs in.
    pub password: String,
}

impl fmt::Debug for Login {
    /// Prints the user name of the login, but never the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

/// The settings that select a store, from a NetConf, a file or the environment. The settings of a store include
/// Calico's settings for etcd, and the path of a store in a folder. A setting with an empty value counts as not set.
/// `Debug` prints only the datastore type, because other settings may be secrets.
#[derive(Clone, Default)]
pub struct Settings {
    /// The value of `datastore_type`: the kind of store.
    pub datastore_type: String,
    /// The folder of a store on this machine.
    pub path: String,
    /// Endpoints of etcd, separated by commas.
    pub etcd_endpoints: String,
    /// A domain whose SRV records name the etcd endpoints.
    pub etcd_discovery_srv: String,
    /// The paths of the certificate and key files for etcd.
    pub etcd_files: EtcdFiles,
    /// Certificates and keys for etcd as PEM text. Only Calico's file `calicoctl.cfg` has settings for PEM text.
    pub etcd_inline: EtcdFiles,
    /// The name of the etcd user.
    pub etcd_username: String,
    /// The password of the etcd user.
    pub etcd_password: String,
    /// Says whether any setting shows that the datastore is the Kubernetes API.
    pub orchestrator: Orchestrator,
    /// The name of the setting from which `path` was read, for error messages.
    pub path_setting: &'static str,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("datastore_type", &self.datastore_type).finish_non_exhaustive()
    }
}

/// A CA, a client certificate and its private key, each as a path or as PEM text.
#[derive(Clone, Default)]
pub struct EtcdFiles {
    /// The private key of the client certificate, as a path or as PEM text.
    pub key: String,
    /// The client certificate, as a path or as PEM text.
    pub certificate: String,
    /// The CA that has signed the servers' certificates, as a path or as PEM text.
    pub authority: String,
}

impl fmt::Debug for EtcdFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdFiles").finish_non_exhaustive()
    }
}

/// Says whether any setting shows that the datastore is the Kubernetes API, for example a kubeconfig or the address of
/// an API server. If the datastore is the Kubernetes API, missing etcd endpoints are an error, and programs must not
/// use the default store on this machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Orchestrator {
    /// None of the store settings concerns Kubernetes.
    #[default]
    Absent,
    /// At least one store setting concerns Kubernetes.
    Kubernetes,
}

impl EtcdFiles {
    fn is_empty(&self) -> bool {
        [&self.key, &self.certificate, &self.authority].into_iter().all(String::is_empty)
    }
}

impl Settings {
    /// Returns true if an etcd endpoint, an SRV domain, a certificate, a key or a Kubernetes setting is set.
    pub fn has_cluster_setting(&self) -> bool {
        let etcd = [&self.etcd_endpoints, &self.etcd_discovery_srv].into_iter().any(|setting| !setting.is_empty());
        self.orchestrator == Orchestrator::Kubernetes
            || etcd
            || !self.etcd_files.is_empty()
            || !self.etcd_inline.is_empty()
    }

    /// Returns the credentials for a cluster, taken from the store settings. As in Calico, a user name without a
    /// password is ignored, and so is a password without a user name.
    ///
    /// # Errors
    /// A certificate without its key, a key without its certificate, or PEM text in addition to certificate files.
    pub fn access(&self) -> ConfigResult<Access> {
        let inline = !self.etcd_inline.is_empty();
        let (given, pem): (_, fn(&String) -> Pem) = if inline {
            (&self.etcd_inline, |text| Pem::Inline(text.clone()))
        } else {
            (&self.etcd_files, |path| Pem::File(path.into()))
        };
        if inline && !self.etcd_files.is_empty() {
            return Err(ConfigError::InlineAndFiles);
        }
        let EtcdFiles { key, certificate, authority } = given;
        if inline && (key.is_empty() || certificate.is_empty()) {
            return Err(ConfigError::HalfInline);
        }
        let identity = match (certificate.is_empty(), key.is_empty()) {
            (true, true) => None,
            (false, false) => Some(ClientCertificate { certificate: pem(certificate), key: pem(key) }),
            (true, false) => return Err(ConfigError::KeyWithoutCertificate),
            (false, true) => return Err(ConfigError::CertificateWithoutKey),
        };
        let login = !self.etcd_username.is_empty() && !self.etcd_password.is_empty();
        Ok(Access {
            authority: (!authority.is_empty()).then(|| pem(authority)),
            identity,
            login: login.then(|| Login { user: self.etcd_username.clone(), password: self.etcd_password.clone() }),
        })
    }
}

/// Parses the path of a folder in a store URL, without percent-decoding.
///
/// # Errors
/// An error if the path is not absolute, or if the URL contains text after the path, a user name or a password.
pub(crate) fn absolute_path(scheme: &str, rest: &str) -> ConfigResult<PathBuf> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheme_in_list_may_be_in_capitals() {
        assert_eq!(endpoints("HTTP://A:1, Https://b:2,c:3").unwrap(), ["http://A:1", "https://b:2", "c:3"]);
    }

    #[test]
    fn url_becomes_endpoints() {
        let address = ClusterAddress::of_url("etcd", "etcd+https", "a:1, b:2/").unwrap();
        assert_eq!(address.endpoints, ["https://a:1", "https://b:2"]);
    }

    #[test]
    fn address_without_url_is_described() {
        let mixed =
            ClusterAddress { endpoints: vec!["http://a:1".into(), "https://b:2".into()], ..ClusterAddress::default() };
        assert_eq!(mixed.url("etcd"), "etcd at http://a:1,https://b:2");
        let srv = ClusterAddress { discovery_srv: "example.org".into(), ..ClusterAddress::default() };
        assert_eq!(srv.url("etcd"), "etcd members in the SRV records of example.org");
    }

    #[test]
    fn debug_of_access_has_no_secret() {
        let access = Access {
            authority: Some(Pem::File("/ca.pem".into())),
            identity: Some(ClientCertificate {
                certificate: Pem::Inline("hidden".into()),
                key: Pem::Inline("hidden".into()),
            }),
            login: Some(Login { user: "root".into(), password: "hidden".into() }),
        };
        let shown = format!("{access:?}");
        assert!(shown.contains("/ca.pem") && shown.contains("root") && !shown.contains("hidden"), "{shown}");
    }
}
