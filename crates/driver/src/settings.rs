//! The settings from which a driver reads where its store is.

use std::fmt;

use crate::access::{Access, Identity, Login, Pem};
use crate::error::{ConfigError, Result};

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
