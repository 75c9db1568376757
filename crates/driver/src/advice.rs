//! Advice that names the stores of the program.

use crate::drivers::Drivers;
use crate::error::ConfigError;

impl Drivers {
    /// The advice to a user whose configuration leads to no store of these drivers: one or two sentences.
    pub fn advice(&self, error: &ConfigError) -> String {
        match error {
            ConfigError::UnknownType(_) => format!("set datastore_type to {}", self.types()),
            ConfigError::NoEndpoints => format!(
                "for an etcd cluster set etcd_endpoints (or ETCD_ENDPOINTS); for a store on this host \
                                  set \"datastore_type\" to {}",
                self.local_names("\"", "\"")
            ),
            ConfigError::EndpointsAndDiscovery => "remove one of the two".into(),
            ConfigError::KeyWithoutCertificate => "set etcd_cert_file (or ETCD_CERT_FILE) as well".into(),
            ConfigError::CertificateWithoutKey => "set etcd_key_file (or ETCD_KEY_FILE) as well".into(),
            ConfigError::InlineAndFiles => {
                "give all of them as text (etcdKey, etcdCert, etcdCACert), or all of them as files".into()
            }
            ConfigError::HalfInline => {
                "set both etcdCert and etcdKey; an authority alone has to be a file (etcdCACertFile)".into()
            }
            ConfigError::UnreadableConfigFile { .. } => {
                "name a file that is there with --config, or say --store URL".into()
            }
            ConfigError::ConfigFileSyntax { .. }
            | ConfigError::ConfigFileVersion(_)
            | ConfigError::ConfigFileKind(_) => {
                "write it as Calico's calicoctl.cfg, name another file with --config, or say --store URL".into()
            }
            ConfigError::Kubernetes => format!(
                "keep the addresses in etcd (datastore_type etcdv3) or on this host (datastore_type {})",
                self.local_names("", "")
            ),
            ConfigError::Contradiction { .. } => {
                "remove DATASTORE_TYPE from the environment, or set datastore_type in the network configuration".into()
            }
            ConfigError::PathWithoutEmbedded => {
                format!("set the datastore type to {}, or remove the path", self.local_names("", ""))
            }
            ConfigError::RelativePath { .. } => "give a path that begins with /".into(),
            ConfigError::SecretInAddress => {
                "remove user and password from the address; an address shows up in logs and process lists".into()
            }
            ConfigError::NotAUrl { path: Some(path) } => {
                format!("did you mean {}?", self.local_names("", &format!("://{path}")))
            }
            ConfigError::NotAUrl { path: None } | ConfigError::UnknownScheme(_) => {
                format!("store URLs are {}", self.url_forms())
            }
            ConfigError::UrlPath(scheme) if scheme.ends_with("+unix") => {
                format!("write it with three slashes: {scheme}:///run/etcd/etcd.sock")
            }
            ConfigError::UrlPath(scheme) => {
                format!("write it with three slashes: {scheme}:///var/lib/margay/ipam.{scheme}")
            }
            ConfigError::UrlOptions(_) => "a store URL ends with the path and has no ? or # in it".into(),
            ConfigError::EtcdUrl => "write it as etcd://host:port[,host:port]".into(),
            ConfigError::MemoryStore => match self.default_location() {
                Ok(location) => format!("name a store that stays, such as {location}"),
                Err(_) => format!("store URLs are {}", self.url_forms()),
            },
            ConfigError::SeveralStores(candidates) => match candidates.first() {
                Some(first) => format!("say which one is meant, such as --store {}", first.store),
                None => "say which one is meant with --store URL".into(),
            },
            ConfigError::UnreadableConfiguration(_) => {
                "repair the file, or say which store is meant with --store URL".into()
            }
            ConfigError::InFile { error, .. } | ConfigError::InEnvironment(error) => {
                format!("{}; or say which store is meant with --store URL", self.advice(error))
            }
        }
    }
}
