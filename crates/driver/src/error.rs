//! Defines the errors of reading a store configuration.

use std::path::PathBuf;

/// The result type of functions that read a store configuration.
pub type ConfigResult<T> = Result<T, ConfigError>;

/// A store that some file in the CNI configuration folder names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The store's URL, or a description of a store that has no URL.
    pub store: String,
    /// The first file in the CNI configuration folder that names the store.
    pub file: PathBuf,
}

/// The reason why no store can be determined from a configuration. The error's message never contains a configured
/// value that may be a secret.
///
/// [`Display`](std::fmt::Display) says what is wrong with the configuration, with Calico's message if Calico has an
/// equal error. [`Drivers::advice`](crate::Drivers::advice) tells the user how to correct the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The configured datastore type is unknown.
    #[error("unknown datastore type: {0}")]
    UnknownType(String),
    /// The store is an etcd cluster, but no endpoints are configured.
    #[error("no etcd endpoints specified")]
    NoEndpoints,
    /// Both etcd endpoints and an SRV domain are configured.
    #[error("multiple discovery or bootstrap options specified, use either \"etcdEndpoints\" or \"etcdDiscoverySrv\"")]
    EndpointsAndDiscovery,
    /// A key file for etcd is configured without a certificate file.
    #[error("a key for etcd is configured without its certificate")]
    KeyWithoutCertificate,
    /// A certificate file for etcd is configured without a key file.
    #[error("a certificate for etcd is configured without its key")]
    CertificateWithoutKey,
    /// Certificates or keys for etcd are configured both inline and as files.
    #[error("could not initialize etcdv3 client: Cannot mix inline certificate-key and certificate / key files")]
    InlineAndFiles,
    /// Only one of the certificate and the key for etcd is configured inline.
    #[error("could not initialize etcdv3 client: Certificate and Key must both be present inline.")]
    HalfInline,
    /// The operator's configuration file cannot be read.
    #[error("cannot read {}: {reason}", .file.display())]
    UnreadableConfigFile {
        /// The path of the configuration file that cannot be read.
        file: PathBuf,
        /// The operating system's error on reading the configuration file.
        reason: String,
    },
    /// The configuration file is neither YAML nor JSON, or has content that is not expected.
    #[error("syntax error in {}: failed to parse config as YAML/JSON: {reason}", .file.display())]
    ConfigFileSyntax {
        /// The path of the configuration file with the syntax error.
        file: PathBuf,
        /// The fault in the configuration file, with the line number if known.
        reason: String,
    },
    /// The configuration file has an unsupported version.
    #[error("invalid config file: unknown APIVersion '{0}'")]
    ConfigFileVersion(String),
    /// The configuration file describes an object of a kind other than `CalicoAPIConfig`.
    #[error("invalid config file: expected kind 'CalicoAPIConfig', got '{0}'")]
    ConfigFileKind(String),
    /// The configured datastore is the Kubernetes API.
    #[error("datastore type kubernetes is not supported")]
    Kubernetes,
    /// An environment variable selects an embedded store, but the CNI network configuration selects etcd or Kubernetes.
    #[error("the environment asks for datastore type {environment}, the network configuration for etcd or Kubernetes")]
    Contradiction {
        /// The datastore type in the environment variable.
        environment: String,
    },
    /// A path is configured for a datastore that is not a folder on this host.
    #[error("a datastore path is set, but the datastore is not on this host")]
    PathWithoutEmbedded,
    /// The configured path of a store is not absolute.
    #[error("{setting} is not an absolute path")]
    RelativePath {
        /// The name of the setting that contains the path, `datastore_path` or `DATASTORE_PATH`.
        setting: &'static str,
    },
    /// The configured address of a store contains a user name or a password.
    #[error("a store's address has a user or a password in it")]
    SecretInAddress,
    /// The string that the user gave should be a store URL, but is not a URL.
    #[error("{}", .path.as_ref().map_or("this is not a store URL".into(), |path| format!("{path} is a path, not a store URL")))]
    NotAUrl {
        /// The string that the user gave instead of a URL, if it is an absolute path.
        path: Option<String>,
    },
    /// No driver of the program has the scheme of the given URL.
    #[error("{0}:// is not a kind of store")]
    UnknownScheme(String),
    /// The URL of an embedded store has no absolute path.
    #[error("the {0}:// URL has no absolute path")]
    UrlPath(String),
    /// The URL of an embedded store contains text after the path.
    #[error("the {0}:// URL has more in it than a path")]
    UrlOptions(String),
    /// The etcd URL contains more than hosts and ports.
    #[error("the etcd URL has more in it than hosts and ports")]
    EtcdUrl,
    /// The store URL of an operator's command names a store in memory, which would be lost when the command ends.
    #[error("a store in memory is gone when the command ends")]
    MemoryStore,
    /// The files in the CNI configuration folder name several different stores.
    #[error("the CNI configuration names several stores:{}", .0.iter().map(|found| format!("\n  {} (in {})", found.store, found.file.display())).collect::<String>())]
    SeveralStores(Vec<Candidate>),
    /// No file in the CNI configuration folder names a store, and some of the files could not be read.
    #[error("cannot tell which store is meant: {}", .0.join("; "))]
    UnreadableConfiguration(Vec<String>),
    /// Environment variables select a store, but their values are invalid.
    #[error("in the environment: {0}")]
    InEnvironment(#[source] Box<ConfigError>),
    /// The only CNI configuration file that could name a store has invalid settings.
    #[error("{}: {error}", .file.display())]
    InFile {
        /// The path of the configuration file with the invalid settings.
        file: PathBuf,
        /// The fault of the settings in the configuration file.
        #[source]
        error: Box<ConfigError>,
    },
}
