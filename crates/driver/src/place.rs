//! A place where a store is: the address of a cluster and the credentials for it, or a path; and the settings from which a driver reads
//! it.

use std::fmt;
use std::path::PathBuf;

use crate::error::{ConfigError, Result};

/// A place where a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorePlace {
    /// The memory of this process.
    Memory,
    /// A folder of this machine.
    Folder(PathBuf),
    /// A cluster that serves many machines.
    Cluster(ClusterAddress),
}

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
            Some("+unix") => vec![format!("unix://{}", absolute_path(scheme, rest)?.display())],
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

/// The credentials for an etcd. `Debug` shows no secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The authority that signed the servers' certificates; those that the system trusts if unset.
    pub authority: Option<Pem>,
    /// A certificate of our own and its key, for servers that want one.
    pub identity: Option<ClientCertificate>,
    /// A user and a password, for servers that want them.
    pub login: Option<Login>,
}

impl Access {
    /// This, and from `other` what is missing here.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            authority: self.authority.or(other.authority),
            identity: self.identity.or(other.identity),
            login: self.login.or(other.login),
        }
    }

    /// True if something here is about TLS.
    pub fn names_certificates(&self) -> bool {
        self.authority.is_some() || self.identity.is_some()
    }
}

/// A certificate of our own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The certificate, and those between it and the authority.
    pub certificate: Pem,
    /// Its private key.
    pub key: Pem,
}

/// Something in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// In this file.
    File(PathBuf),
    /// This text itself.
    Inline(String),
}

impl fmt::Debug for Pem {
    /// Where it is, never what it says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Inline(_) => f.write_str("Inline(..)"),
        }
    }
}

/// The user who logs in.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The user's name.
    pub user: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for Login {
    /// The user, never the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

/// The settings about a store, wherever they came from: Calico's, and the path of a store in a folder. Empty means not set.
/// `Debug` shows none of them, since some are secrets.
#[derive(Clone, Default)]
pub struct Settings {
    /// `datastore_type`.
    pub datastore_type: String,
    /// The folder of a store of this machine.
    pub path: String,
    /// A comma list of endpoints.
    pub etcd_endpoints: String,
    /// A domain whose SRV records name the endpoints.
    pub etcd_discovery_srv: String,
    /// The files of certificates and keys.
    pub etcd_files: EtcdFiles,
    /// Certificates and keys in PEM form; only a file has a place for it.
    pub etcd_inline: EtcdFiles,
    /// The user who logs in.
    pub etcd_username: String,
    /// The password.
    pub etcd_password: String,
    /// Whether there is a sign of Kubernetes.
    pub orchestrator: Orchestrator,
    /// The name of the setting that the path is from.
    pub path_setting: &'static str,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("datastore_type", &self.datastore_type).finish_non_exhaustive()
    }
}

/// Certificates and keys: their files, or their contents.
#[derive(Clone, Default)]
pub struct EtcdFiles {
    /// The key.
    pub key: String,
    /// The certificate.
    pub certificate: String,
    /// The authority that signed the servers' certificates.
    pub authority: String,
}

impl fmt::Debug for EtcdFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdFiles").finish_non_exhaustive()
    }
}

/// Whether there is a sign of Kubernetes (a kubeconfig, the address of an API server), so that a store on this machine would be
/// the wrong answer to missing endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Orchestrator {
    /// None.
    #[default]
    Absent,
    /// There is one.
    Kubernetes,
}

impl EtcdFiles {
    fn is_empty(&self) -> bool {
        [&self.key, &self.certificate, &self.authority].into_iter().all(String::is_empty)
    }
}

impl Settings {
    /// True if an endpoint, a certificate or a sign of Kubernetes is set.
    pub fn has_cluster_setting(&self) -> bool {
        let etcd = [&self.etcd_endpoints, &self.etcd_discovery_srv].into_iter().any(|setting| !setting.is_empty());
        self.orchestrator == Orchestrator::Kubernetes
            || etcd
            || !self.etcd_files.is_empty()
            || !self.etcd_inline.is_empty()
    }

    /// The credentials for a cluster. As with Calico, a user without a password counts as none, and so does a password without
    /// a user.
    ///
    /// # Errors
    /// A certificate without its key, a key without its certificate, text beside files.
    pub fn access(&self) -> Result<Access> {
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

/// The path in a URL, taken as it stands, without percent-decoding.
///
/// # Errors
/// A path that is not absolute, more than a path, a user or password.
pub(crate) fn absolute_path(scheme: &str, rest: &str) -> Result<PathBuf> {
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
