//! The rules that lead from settings, wherever they came from, to a location.

use std::path::{Path, PathBuf};

use crate::access::{Access, Identity, Login, Pem};
use crate::environment::{Environment, variable};
use crate::error::{ConfigError, Result};
use crate::location::{DEFAULT_REDB_PATH, DEFAULT_SLED_PATH, Etcd, Location, endpoints};

/// The settings; empty means not set.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) datastore_type: String,
    pub(crate) path: String,
    pub(crate) etcd_endpoints: String,
    pub(crate) etcd_discovery_srv: String,
    pub(crate) etcd_files: EtcdFiles,
    /// The same in PEM form instead of their paths; only a file has a place for it.
    pub(crate) etcd_inline: EtcdFiles,
    pub(crate) etcd_username: String,
    pub(crate) etcd_password: String,
    /// Whether there is a sign of Kubernetes: a kubeconfig, or the address of an API server.
    pub(crate) cluster: Cluster,
    /// The name of the setting that the path is from.
    pub(crate) path_setting: &'static str,
}

/// Certificates and keys: their files, or what is in them.
#[derive(Clone, Default)]
pub(crate) struct EtcdFiles {
    pub(crate) key: String,
    pub(crate) certificate: String,
    pub(crate) authority: String,
}

/// Whether something points to a cluster, so that a store on this host would be the wrong answer to a gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Cluster {
    #[default]
    Absent,
    Meant,
}

impl EtcdFiles {
    fn is_empty(&self) -> bool {
        [&self.key, &self.certificate, &self.authority].into_iter().all(String::is_empty)
    }
}

impl Settings {
    /// The settings in the environment. Only signs that are about the datastore count: everybody who works with
    /// Kubernetes has a `KUBECONFIG`, so the caller adds that one where it matters.
    pub(crate) fn from_environment(env: &Environment<'_>) -> Self {
        let get = |name| variable(env, name);
        Self {
            datastore_type: get("DATASTORE_TYPE"),
            path: get("DATASTORE_PATH"),
            etcd_endpoints: get("ETCD_ENDPOINTS"),
            etcd_discovery_srv: get("ETCD_DISCOVERY_SRV"),
            etcd_files: EtcdFiles {
                key: get("ETCD_KEY_FILE"),
                certificate: get("ETCD_CERT_FILE"),
                authority: get("ETCD_CA_CERT_FILE"),
            },
            etcd_inline: EtcdFiles::default(),
            etcd_username: get("ETCD_USERNAME"),
            etcd_password: get("ETCD_PASSWORD"),
            cluster: Cluster::Absent,
            path_setting: "DATASTORE_PATH",
        }
    }

    /// True if something here says which store is meant.
    pub(crate) fn names_a_store(&self) -> bool {
        !self.datastore_type.is_empty() || !self.path.is_empty() || self.means_cluster()
    }

    /// True if there is any etcd or Kubernetes setting, the type included.
    pub(crate) fn means_cluster(&self) -> bool {
        self.has_cluster_setting() || matches!(self.datastore_type.as_str(), "etcdv3" | "kubernetes")
    }

    fn has_cluster_setting(&self) -> bool {
        let etcd = [&self.etcd_endpoints, &self.etcd_discovery_srv].into_iter().any(|setting| !setting.is_empty());
        self.cluster == Cluster::Meant || etcd || !self.etcd_files.is_empty() || !self.etcd_inline.is_empty()
    }

    /// True if the type is one of an embedded store.
    pub(crate) fn names_embedded(&self) -> bool {
        matches!(self.datastore_type.as_str(), "sled" | "redb" | "local")
    }

    /// The location. Without a type it is an embedded store only if nothing points to a cluster.
    pub(crate) fn location(&self) -> Result<Location> {
        match self.datastore_type.as_str() {
            "sled" | "local" => Ok(Location::Sled(self.path_or(DEFAULT_SLED_PATH)?)),
            "redb" => Ok(Location::Redb(self.path_or(DEFAULT_REDB_PATH)?)),
            "etcdv3" => self.etcd(),
            "kubernetes" => Err(ConfigError::Kubernetes),
            "" if self.has_cluster_setting() => self.etcd(),
            "" => Ok(Location::Sled(self.path_or(DEFAULT_SLED_PATH)?)),
            other => Err(ConfigError::UnknownType(other.to_owned())),
        }
    }

    fn path_or(&self, default: &str) -> Result<PathBuf> {
        match self.path.as_str() {
            "" => Ok(default.into()),
            path if Path::new(path).is_absolute() => Ok(path.into()),
            _ => Err(ConfigError::RelativePath { setting: self.path_setting }),
        }
    }

    fn etcd(&self) -> Result<Location> {
        if !self.path.is_empty() {
            return Err(ConfigError::PathWithoutEmbedded);
        }
        let (endpoints, discovery_srv) = match (&self.etcd_endpoints, &self.etcd_discovery_srv) {
            (list, domain) if domain.is_empty() => (endpoints(list)?, String::new()),
            (list, domain) if list.is_empty() => (Vec::new(), domain.clone()),
            _ => return Err(ConfigError::EndpointsAndDiscovery),
        };
        Ok(Location::Etcd(Etcd { endpoints, discovery_srv, access: self.access()? }))
    }

    /// The credentials for an etcd. As with Calico, a user without a password, or the other way, is nobody.
    pub(crate) fn access(&self) -> Result<Access> {
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
            (false, false) => Some(Identity { certificate: pem(certificate), key: pem(key) }),
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
