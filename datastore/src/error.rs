//! Why configuration does not lead to a store.

use std::path::PathBuf;

use crate::location::Location;

/// A result of the half that decides.
pub type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// A store that a file of the CNI configuration folder names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The store.
    pub location: Location,
    /// The first file that names it.
    pub file: PathBuf,
}

/// Why configuration does not lead to a store. Nothing that may be a secret is kept in it.
///
/// [`Display`](std::fmt::Display) says what is wrong, with Calico's words where Calico has any; [`advice`](Self::advice)
/// says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A datastore type that nobody knows.
    #[error("unknown datastore type: {0}")]
    UnknownType(String),
    /// An etcd store is wanted, and nothing says where it is.
    #[error("no etcd endpoints specified")]
    NoEndpoints,
    /// Both endpoints and an SRV domain.
    #[error("multiple discovery or bootstrap options specified, use either \"etcdEndpoints\" or \"etcdDiscoverySrv\"")]
    EndpointsAndDiscovery,
    /// The file of a key for etcd, without that of its certificate.
    #[error("a key for etcd is configured without its certificate")]
    KeyWithoutCertificate,
    /// The file of a certificate for etcd, without that of its key.
    #[error("a certificate for etcd is configured without its key")]
    CertificateWithoutKey,
    /// Certificates or keys for etcd both as text and as files.
    #[error("could not initialize etcdv3 client: Cannot mix inline certificate-key and certificate / key files")]
    InlineAndFiles,
    /// A certificate for etcd as text without its key as text, or the other way.
    #[error("could not initialize etcdv3 client: Certificate and Key must both be present inline.")]
    HalfInline,
    /// The configuration file cannot be read.
    #[error("cannot read {}: {reason}", .file.display())]
    UnreadableConfigFile {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        reason: String,
    },
    /// The configuration file is no YAML or JSON, or has something in it that does not belong there.
    #[error("syntax error in {}: failed to parse config as YAML/JSON: {reason}", .file.display())]
    ConfigFileSyntax {
        /// The file.
        file: PathBuf,
        /// The fault, and its place.
        reason: String,
    },
    /// The configuration file is of another version.
    #[error("invalid config file: unknown APIVersion '{0}'")]
    ConfigFileVersion(String),
    /// The configuration file is something else.
    #[error("invalid config file: expected kind 'CalicoAPIConfig', got '{0}'")]
    ConfigFileKind(String),
    /// The Kubernetes API as a datastore.
    #[error("datastore type kubernetes is not supported")]
    Kubernetes,
    /// The environment names an embedded store, NetConf an etcd or Kubernetes one.
    #[error("the environment asks for datastore type {environment}, the network configuration for etcd or Kubernetes")]
    Contradiction {
        /// The type in the environment.
        environment: String,
    },
    /// A path together with a datastore that has none.
    #[error("a datastore path is set, but the datastore is not on this host")]
    PathWithoutEmbedded,
    /// A path that is not absolute.
    #[error("{setting} is not an absolute path")]
    RelativePath {
        /// The setting: `datastore_path` or `DATASTORE_PATH`.
        setting: &'static str,
    },
    /// A user or a password in an address.
    #[error("a store's address has a user or a password in it")]
    SecretInAddress,
    /// Not a URL.
    #[error("{}", .path.as_ref().map_or("this is not a store URL".into(), |path| format!("{path} is a path, not a store URL")))]
    NotAUrl {
        /// The given value, if it is an absolute path.
        path: Option<String>,
    },
    /// A URL of a scheme that nobody knows.
    #[error("{0}:// is not a kind of store")]
    UnknownScheme(String),
    /// The URL of an embedded store without an absolute path.
    #[error("the {0}:// URL has no absolute path")]
    UrlPath(String),
    /// The URL of an embedded store with something after the path.
    #[error("the {0}:// URL has more in it than a path")]
    UrlOptions(String),
    /// An etcd URL with more than hosts and ports.
    #[error("the etcd URL has more in it than hosts and ports")]
    EtcdUrl,
    /// The command was asked to work on a store that is gone when it ends.
    #[error("a store in memory is gone when the command ends")]
    MemoryStore,
    /// The CNI configuration names several stores.
    #[error("the CNI configuration names several stores:{}", .0.iter().map(|found| format!("\n  {} (in {})", found.location, found.file.display())).collect::<String>())]
    SeveralStores(Vec<Candidate>),
    /// No store is named, and some of the CNI configuration could not be read.
    #[error("cannot tell which store is meant: {}", .0.join("; "))]
    UnreadableConfiguration(Vec<String>),
    /// The environment names a store, but not one that there can be.
    #[error("in the environment: {0}")]
    InEnvironment(#[source] Box<ConfigError>),
    /// The only file that could name a store leads to none.
    #[error("{}: {error}", .file.display())]
    InFile {
        /// The file.
        file: PathBuf,
        /// Why it leads to none.
        #[source]
        error: Box<ConfigError>,
    },
}

impl ConfigError {
    /// The advice: one or two sentences.
    pub fn advice(&self) -> String {
        match self {
            Self::UnknownType(_) => "set datastore_type to sled, redb or etcdv3".into(),
            Self::NoEndpoints => {
                "for an etcd cluster set etcd_endpoints (or ETCD_ENDPOINTS); for a store on this host \
                                  set \"datastore_type\" to \"sled\" or \"redb\""
                    .into()
            }
            Self::EndpointsAndDiscovery => "remove one of the two".into(),
            Self::KeyWithoutCertificate => "set etcd_cert_file (or ETCD_CERT_FILE) as well".into(),
            Self::CertificateWithoutKey => "set etcd_key_file (or ETCD_KEY_FILE) as well".into(),
            Self::InlineAndFiles => {
                "give all of them as text (etcdKey, etcdCert, etcdCACert), or all of them as files".into()
            }
            Self::HalfInline => {
                "set both etcdCert and etcdKey; an authority alone has to be a file (etcdCACertFile)".into()
            }
            Self::UnreadableConfigFile { .. } => "name a file that is there with --config, or say --store URL".into(),
            Self::ConfigFileSyntax { .. } | Self::ConfigFileVersion(_) | Self::ConfigFileKind(_) => {
                "write it as Calico's calicoctl.cfg, name another file with --config, or say --store URL".into()
            }
            Self::Kubernetes => {
                "keep the addresses in etcd (datastore_type etcdv3) or on this host (datastore_type sled or redb)"
                    .into()
            }
            Self::Contradiction { .. } => {
                "remove DATASTORE_TYPE from the environment, or set datastore_type in the network configuration".into()
            }
            Self::PathWithoutEmbedded => "set the datastore type to sled or redb, or remove the path".into(),
            Self::RelativePath { .. } => "give a path that begins with /".into(),
            Self::SecretInAddress => {
                "remove user and password from the address; an address shows up in logs and process lists".into()
            }
            Self::NotAUrl { path: Some(path) } => format!("did you mean sled://{path} or redb://{path}?"),
            Self::NotAUrl { path: None } | Self::UnknownScheme(_) => {
                "store URLs are sled:///path, redb:///path, etcd://host:port and, with TLS, etcd+https://host:port"
                    .into()
            }
            Self::UrlPath(scheme) if scheme.starts_with("etcd") => {
                format!("write it with three slashes: {scheme}:///run/etcd/etcd.sock")
            }
            Self::UrlPath(scheme) => format!("write it with three slashes: {scheme}:///var/lib/margay/ipam.{scheme}"),
            Self::UrlOptions(_) => "a store URL ends with the path and has no ? or # in it".into(),
            Self::EtcdUrl => "write it as etcd://host:port[,host:port]".into(),
            Self::MemoryStore => "name a store that stays, such as sled:///var/lib/margay/ipam.sled".into(),
            Self::SeveralStores(candidates) => match candidates.first() {
                Some(first) => format!("say which one is meant, such as --store {}", first.location),
                None => "say which one is meant with --store URL".into(),
            },
            Self::UnreadableConfiguration(_) => "repair the file, or say which store is meant with --store URL".into(),
            Self::InFile { error, .. } | Self::InEnvironment(error) => {
                format!("{}; or say which store is meant with --store URL", error.advice())
            }
        }
    }
}
