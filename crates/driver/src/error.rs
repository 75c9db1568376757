//! The reasons why configuration does not lead to a store.

use std::path::PathBuf;

/// The result of reading configuration.
pub type ConfigResult<T, E = ConfigError> = Result<T, E>;

/// A store that a file of the CNI configuration folder names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The store's URL, or its description.
    pub store: String,
    /// The first file that names the store.
    pub file: PathBuf,
}

/// The reason why configuration does not lead to a store. Contains no text that may be a secret.
///
/// [`Display`](std::fmt::Display) describes the fault, in Calico's words where Calico has this error.
/// [`Drivers::advice`](crate::Drivers::advice) gives the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The datastore type is unknown.
    #[error("unknown datastore type: {0}")]
    UnknownType(String),
    /// The store is an etcd cluster, but there are no endpoints.
    #[error("no etcd endpoints specified")]
    NoEndpoints,
    /// Both endpoints and an SRV domain are set.
    #[error("multiple discovery or bootstrap options specified, use either \"etcdEndpoints\" or \"etcdDiscoverySrv\"")]
    EndpointsAndDiscovery,
    /// A key file for etcd is set without a certificate file.
    #[error("a key for etcd is configured without its certificate")]
    KeyWithoutCertificate,
    /// A certificate file for etcd is set without a key file.
    #[error("a certificate for etcd is configured without its key")]
    CertificateWithoutKey,
    /// Certificates or keys for etcd are given both inline and as files.
    #[error("could not initialize etcdv3 client: Cannot mix inline certificate-key and certificate / key files")]
    InlineAndFiles,
    /// Only one of certificate and key for etcd is given inline.
    #[error("could not initialize etcdv3 client: Certificate and Key must both be present inline.")]
    HalfInline,
    /// The configuration file cannot be read.
    #[error("cannot read {}: {reason}", .file.display())]
    UnreadableConfigFile {
        /// The path of the file.
        file: PathBuf,
        /// The error of the operating system.
        reason: String,
    },
    /// The configuration file is not YAML or JSON, or has unexpected content.
    #[error("syntax error in {}: failed to parse config as YAML/JSON: {reason}", .file.display())]
    ConfigFileSyntax {
        /// The path of the file.
        file: PathBuf,
        /// The fault, with its line if known.
        reason: String,
    },
    /// The configuration file has another version.
    #[error("invalid config file: unknown APIVersion '{0}'")]
    ConfigFileVersion(String),
    /// The configuration file describes another kind of object.
    #[error("invalid config file: expected kind 'CalicoAPIConfig', got '{0}'")]
    ConfigFileKind(String),
    /// The datastore is the Kubernetes API.
    #[error("datastore type kubernetes is not supported")]
    Kubernetes,
    /// The environment names an embedded store, but the NetConf an etcd or Kubernetes one.
    #[error("the environment asks for datastore type {environment}, the network configuration for etcd or Kubernetes")]
    Contradiction {
        /// The type in the environment.
        environment: String,
    },
    /// A path is set for a datastore without one.
    #[error("a datastore path is set, but the datastore is not on this host")]
    PathWithoutEmbedded,
    /// The path is not absolute.
    #[error("{setting} is not an absolute path")]
    RelativePath {
        /// The name of the setting: `datastore_path` or `DATASTORE_PATH`.
        setting: &'static str,
    },
    /// An address contains a user or a password.
    #[error("a store's address has a user or a password in it")]
    SecretInAddress,
    /// The value is not a URL.
    #[error("{}", .path.as_ref().map_or("this is not a store URL".into(), |path| format!("{path} is a path, not a store URL")))]
    NotAUrl {
        /// The given value, if it is an absolute path.
        path: Option<String>,
    },
    /// No driver has this URL scheme.
    #[error("{0}:// is not a kind of store")]
    UnknownScheme(String),
    /// The URL of an embedded store has no absolute path.
    #[error("the {0}:// URL has no absolute path")]
    UrlPath(String),
    /// The URL of an embedded store has something after the path.
    #[error("the {0}:// URL has more in it than a path")]
    UrlOptions(String),
    /// The etcd URL contains more than hosts and ports.
    #[error("the etcd URL has more in it than hosts and ports")]
    EtcdUrl,
    /// The command was given a store in memory, which is lost when the command ends.
    #[error("a store in memory is gone when the command ends")]
    MemoryStore,
    /// The CNI configuration names several stores.
    #[error("the CNI configuration names several stores:{}", .0.iter().map(|found| format!("\n  {} (in {})", found.store, found.file.display())).collect::<String>())]
    SeveralStores(Vec<Candidate>),
    /// No store is named, and some of the CNI configuration could not be read.
    #[error("cannot tell which store is meant: {}", .0.join("; "))]
    UnreadableConfiguration(Vec<String>),
    /// The environment names a store, but its settings are invalid.
    #[error("in the environment: {0}")]
    InEnvironment(#[source] Box<ConfigError>),
    /// The only file that could name a store has invalid settings.
    #[error("{}: {error}", .file.display())]
    InFile {
        /// The path of the file.
        file: PathBuf,
        /// The fault of the file's settings.
        #[source]
        error: Box<ConfigError>,
    },
}
