//! Why configuration does not lead to a store.

use std::path::PathBuf;

/// A result of reading configuration.
pub type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// A store that a file of the CNI configuration folder names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The URL of the store, or its description.
    pub store: String,
    /// The first file that names it.
    pub file: PathBuf,
}

/// Why configuration does not lead to a store. Nothing that may be a secret is kept in it.
///
/// [`Display`](std::fmt::Display) says what is wrong, with Calico's words where Calico has any; [`Drivers::advice`](crate::Drivers::advice)
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
    #[error("the CNI configuration names several stores:{}", .0.iter().map(|found| format!("\n  {} (in {})", found.store, found.file.display())).collect::<String>())]
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
