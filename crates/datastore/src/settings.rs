//! Reads the settings that select a store, and derives the store's location from these settings.
//!
//! Store settings come from environment variables, which are looked up as in Calico, and from the YAML or JSON file
//! `calicoctl.cfg`, the configuration of Calico's operators.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use driver::{ConfigError, ConfigResult, Driver, Drivers, EtcdFiles, Location, Orchestrator, Scope, Settings};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// A function that looks up an environment variable by its exact name, and returns `None` if the variable is not set.
pub type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Reads an environment variable of this process; bytes that are not UTF-8 become replacement characters.
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Returns the value of the environment variable `CALICO_` + `name`, which overrides all other settings. An environment
/// variable that is set but empty counts as set.
pub(crate) fn overriding(env: &Environment<'_>, name: &str) -> Option<String> {
    env(&format!("CALICO_{name}"))
}

/// Returns the value of the environment variable `CALICO_` + `name` if it is set, or else of `name`, or else an empty
/// string.
pub(crate) fn variable(env: &Environment<'_>, name: &str) -> String {
    overriding(env, name).or_else(|| env(name)).unwrap_or_default()
}

/// Reads from the environment the settings that select a store. `KUBECONFIG` is ignored, because every Kubernetes user
/// sets this variable; callers that need it add it to the settings.
pub(crate) fn environment_settings(env: &Environment<'_>) -> Settings {
    let get = |name| variable(env, name);
    Settings {
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
        orchestrator: Orchestrator::Absent,
        path_setting: "DATASTORE_PATH",
    }
}

/// The default path of the configuration file of the command `calicoctl`.
pub const DEFAULT_CONFIG_FILE: &str = "/etc/calico/calicoctl.cfg";

/// The path of the operator's configuration file, and whether the file must exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigFile<'a> {
    /// The path of a configuration file that must exist.
    Given(&'a Path),
    /// The path of a configuration file that may be missing.
    IfThere(&'a Path),
}

/// The content of the operator's configuration file. As in Calico's strict decoder, unknown and duplicate fields in the
/// configuration file are errors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename = "Document")]
struct ConfigDocument {
    #[serde(rename = "apiVersion", default, deserialize_with = "text")]
    api_version: String,
    #[serde(default, deserialize_with = "text")]
    kind: String,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(default)]
    spec: Option<ConfigSpec>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename = "Spec", rename_all = "camelCase")]
struct ConfigSpec {
    #[serde(deserialize_with = "text")]
    datastore_type: String,
    #[serde(deserialize_with = "text")]
    etcd_endpoints: String,
    #[serde(deserialize_with = "text")]
    etcd_discovery_srv: String,
    #[serde(deserialize_with = "text")]
    etcd_username: String,
    #[serde(deserialize_with = "text")]
    etcd_password: String,
    #[serde(deserialize_with = "text")]
    etcd_key_file: String,
    #[serde(deserialize_with = "text")]
    etcd_cert_file: String,
    #[serde(rename = "etcdCACertFile", deserialize_with = "text")]
    etcd_ca_cert_file: String,
    #[serde(deserialize_with = "text")]
    etcd_key: String,
    #[serde(deserialize_with = "text")]
    etcd_cert: String,
    #[serde(rename = "etcdCACert", deserialize_with = "text")]
    etcd_ca_cert: String,
    // Settings of the Kubernetes datastore in the configuration file are accepted and ignored.
    #[serde(rename = "kubeconfig")]
    _kubeconfig: Option<IgnoredAny>,
    #[serde(rename = "k8sAPIEndpoint")]
    _api_endpoint: Option<IgnoredAny>,
    #[serde(rename = "k8sKeyFile")]
    _key_file: Option<IgnoredAny>,
    #[serde(rename = "k8sCertFile")]
    _cert_file: Option<IgnoredAny>,
    #[serde(rename = "k8sCAFile")]
    _ca_file: Option<IgnoredAny>,
    #[serde(rename = "k8sAPIToken")]
    _token: Option<IgnoredAny>,
    #[serde(rename = "k8sInsecureSkipTLSVerify")]
    _insecure: Option<IgnoredAny>,
    #[serde(rename = "k8sDisableNodePoll")]
    _node_poll: Option<IgnoredAny>,
    #[serde(rename = "usePodCIDR")]
    _pod_cidr: Option<IgnoredAny>,
    #[serde(rename = "kubeconfigInline")]
    _inline: Option<IgnoredAny>,
    #[serde(rename = "k8sClientQPS")]
    _qps: Option<IgnoredAny>,
    #[serde(rename = "k8sClientBurst")]
    _burst: Option<IgnoredAny>,
    #[serde(rename = "k8sCurrentContext")]
    _context: Option<IgnoredAny>,
    #[serde(rename = "calicoAPIGroup")]
    _group: Option<IgnoredAny>,
}

/// Decodes a string field of the configuration file; a null value becomes an empty string.
fn text<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// Reads the operator's configuration file; returns `None` if the file may be missing and is missing. As in Calico, a
/// configuration file without a datastore type selects the Kubernetes API, unless the file has etcd settings.
///
/// # Errors
/// `UnreadableConfigFile`, `ConfigFileSyntax`, `ConfigFileVersion` or `ConfigFileKind`. Errors about the configuration
/// file never contain a value from the file.
pub(crate) fn read_config_file(file: ConfigFile<'_>) -> ConfigResult<Option<Settings>> {
    let (path, may_be_absent) = match file {
        ConfigFile::Given(path) => (path, false),
        ConfigFile::IfThere(path) => (path, true),
    };
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if may_be_absent && error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ConfigError::UnreadableConfigFile { file: path.into(), reason: error.to_string() }),
    };
    let syntax = |reason| ConfigError::ConfigFileSyntax { file: path.into(), reason };
    let fault = |error| text_fault(&text).map_or_else(|| reason(&error), |fault| fault.to_string());
    let document: ConfigDocument = serde_saphyr::from_slice(&text).map_err(|error| syntax(fault(error)))?;
    if document.api_version != "projectcalico.org/v3" {
        return Err(ConfigError::ConfigFileVersion(document.api_version));
    }
    if document.kind != "CalicoAPIConfig" {
        return Err(ConfigError::ConfigFileKind(document.kind));
    }
    Ok(Some(settings_of(document.spec.unwrap_or_default())))
}

fn settings_of(spec: ConfigSpec) -> Settings {
    let mut settings = Settings {
        datastore_type: spec.datastore_type,
        path: String::new(),
        etcd_endpoints: spec.etcd_endpoints,
        etcd_discovery_srv: spec.etcd_discovery_srv,
        etcd_files: EtcdFiles {
            key: spec.etcd_key_file,
            certificate: spec.etcd_cert_file,
            authority: spec.etcd_ca_cert_file,
        },
        etcd_inline: EtcdFiles { key: spec.etcd_key, certificate: spec.etcd_cert, authority: spec.etcd_ca_cert },
        etcd_username: spec.etcd_username,
        etcd_password: spec.etcd_password,
        orchestrator: Orchestrator::Absent,
        path_setting: "datastore_path",
    };
    if !names_a_store(&settings) {
        KUBERNETES_DATASTORE_TYPE.clone_into(&mut settings.datastore_type);
    }
    settings
}

/// Describes a parse error of the configuration file without quoting the invalid value, which may be a key or a
/// password.
fn reason(error: &serde_saphyr::Error) -> String {
    let line = error.location().map(|at| format!(" in line {}", at.line())).unwrap_or_default();
    match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField { field, .. } => format!("unknown field {field:?}{line}"),
        serde_saphyr::Error::DuplicateMappingKey { .. } => format!("a field is there twice{line}"),
        _ => format!("something is wrong{line}"),
    }
}

/// Calico's `datastore_type` for etcd, which is the default if there is an etcd setting but no type.
const ETCD_DATASTORE_TYPE: &str = "etcdv3";
/// Calico's `datastore_type` for the Kubernetes API.
const KUBERNETES_DATASTORE_TYPE: &str = "kubernetes";

/// Returns true if the store settings contain a datastore type, a store path, or any setting for a cluster.
pub(crate) fn names_a_store(settings: &Settings) -> bool {
    !settings.datastore_type.is_empty() || !settings.path.is_empty() || settings.has_cluster_setting()
}

/// Returns true if any store setting, including the datastore type, is about etcd or Kubernetes.
pub(crate) fn means_cluster(drivers: &Drivers, settings: &Settings) -> bool {
    let is_calicos = matches!(settings.datastore_type.as_str(), ETCD_DATASTORE_TYPE | KUBERNETES_DATASTORE_TYPE);
    settings.has_cluster_setting() || is_calicos || scope_of(drivers, settings) == Some(Scope::Cluster)
}

/// Returns true if the datastore type in the store settings belongs to a store in a folder.
pub(crate) fn names_embedded(drivers: &Drivers, settings: &Settings) -> bool {
    scope_of(drivers, settings) == Some(Scope::Machine)
}

fn scope_of(drivers: &Drivers, settings: &Settings) -> Option<Scope> {
    drivers.of_type(&settings.datastore_type).map(|driver| driver.facts().scope)
}

/// Derives the location of the store from the settings; without a datastore type, the store is embedded unless a
/// setting is for a cluster.
pub(crate) fn location(drivers: &Drivers, settings: &Settings) -> ConfigResult<Location> {
    drivers.of_settings(driver_of(drivers, settings)?, settings)
}

fn driver_of(drivers: &Drivers, settings: &Settings) -> ConfigResult<&'static dyn Driver> {
    let named = match settings.datastore_type.as_str() {
        KUBERNETES_DATASTORE_TYPE => return Err(ConfigError::Kubernetes),
        "" if settings.has_cluster_setting() => ETCD_DATASTORE_TYPE,
        "" => return drivers.default_driver(),
        named => named,
    };
    drivers.of_type(named).ok_or_else(|| ConfigError::UnknownType(named.to_owned()))
}

/// The reason why a configuration file does not contain readable text. `Display` formats the reason as a sentence about
/// the file, for example `it is empty`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TextFault {
    /// The text file contains only white space.
    Empty,
    /// The file contains only zero bytes, which can happen after a power cut.
    ZeroBytes,
    /// The file begins with the byte order mark of UTF-8 or UTF-16.
    ByteOrderMark,
    /// The text file is compressed with gzip.
    Gzip,
    /// The text file is not valid UTF-8.
    NotUtf8,
}

impl fmt::Display for TextFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "it is empty",
            Self::ZeroBytes => "it holds nothing but zero bytes",
            Self::ByteOrderMark => "it begins with a byte order mark",
            Self::Gzip => "it is compressed with gzip",
            Self::NotUtf8 => "it is not UTF-8",
        })
    }
}

/// Returns the reason why a file's bytes are not readable text; `None` if the bytes are UTF-8 text. Call `text_fault`
/// after a parser has refused the file, because the parser's own error would only be about the first byte.
pub fn text_fault(content: &[u8]) -> Option<TextFault> {
    const BYTE_ORDER_MARKS: [&[u8]; 3] = [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"];
    const GZIP: &[u8] = b"\x1f\x8b";
    if content.trim_ascii().is_empty() {
        Some(TextFault::Empty)
    } else if content.iter().all(|byte| *byte == 0) {
        Some(TextFault::ZeroBytes)
    } else if BYTE_ORDER_MARKS.iter().any(|mark| content.starts_with(mark)) {
        Some(TextFault::ByteOrderMark)
    } else if content.starts_with(GZIP) {
        Some(TextFault::Gzip)
    } else if str::from_utf8(content).is_err() {
        Some(TextFault::NotUtf8)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use driver::{Access, ClientCertificate, Location, Login, Pem};

    use super::*;

    const HEAD: &str = "apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nmetadata:\n";

    fn read_text(text: &str) -> ConfigResult<Settings> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        read_config_file(ConfigFile::Given(file.path())).map(Option::unwrap)
    }

    fn located(text: &str) -> ConfigResult<Location> {
        super::location(&stores::drivers(), &read_text(text)?)
    }

    fn location(spec: &str) -> ConfigResult<Location> {
        located(&format!("{HEAD}spec:\n{spec}"))
    }

    fn access(spec: &str) -> ConfigResult<Access> {
        let location = location(&format!("  etcdEndpoints: https://a:1,https://b:2\n{spec}"))?;
        Ok(location.cluster().expect("a cluster").access.clone())
    }

    #[test]
    fn settings_are_read_from_yaml_and_json() {
        let yaml = format!("{HEAD}spec:\n  datastoreType: \"etcdv3\"\n  etcdEndpoints: \"http://a:1,http://b:2\"\n");
        let json = r#"{"apiVersion":"projectcalico.org/v3","kind":"CalicoAPIConfig","metadata":{},
            "spec":{"datastoreType":"etcdv3","etcdEndpoints":"http://a:1,http://b:2","k8sInsecureSkipTLSVerify":false}}"#;
        for text in [&yaml, json] {
            assert_eq!(located(text).unwrap().to_string(), "etcd://a:1,b:2", "{text}");
        }
        let found = location("  etcdDiscoverySrv: example.org\n").unwrap();
        assert_eq!(found.to_string(), "etcd members in the SRV records of example.org");
    }

    #[test]
    fn settings_type_is_kubernetes_unless_etcd() {
        for spec in [
            "",
            "  etcdEndpoints:\n",
            "  kubeconfig: /k\n",
            "  datastoreType: kubernetes\n  etcdEndpoints: http://a:1\n",
        ] {
            assert_eq!(location(spec).unwrap_err(), ConfigError::Kubernetes, "{spec}");
        }
        assert_eq!(location("  datastoreType: etcdv3\n").unwrap_err(), ConfigError::NoEndpoints);
        let both = location("  etcdEndpoints: http://a:1\n  etcdDiscoverySrv: d\n").unwrap_err();
        assert!(both.to_string().starts_with("multiple discovery or bootstrap options specified"));
    }

    #[test]
    fn settings_certificates_are_in_files_or_inline() {
        let file = |path: &str| Pem::File(path.into());
        let files =
            "  etcdKeyFile: /k\n  etcdCertFile: /c\n  etcdCACertFile: /a\n  etcdUsername: u\n  etcdPassword: hidden\n";
        let found = access(files).unwrap();
        assert_eq!(found.authority, Some(file("/a")));
        assert_eq!(found.identity, Some(ClientCertificate { certificate: file("/c"), key: file("/k") }));
        assert_eq!(found.login, Some(Login { user: "u".into(), password: "hidden".into() }));
        let inline = "  etcdKey: |\n    hidden key\n    more\n  etcdCert: |\n    cert\n  etcdCACert: |\n    ca\n";
        let text = |text: &str| Pem::Inline(text.into());
        let found = access(inline).unwrap();
        assert_eq!(found.authority, Some(text("ca\n")));
        assert_eq!(
            found.identity,
            Some(ClientCertificate { certificate: text("cert\n"), key: text("hidden key\nmore\n") })
        );

        let mixed = access(&format!("{inline}  etcdKeyFile: /k\n")).unwrap_err();
        let said = "could not initialize etcdv3 client: Cannot mix inline certificate-key and certificate / key files";
        assert_eq!(mixed.to_string(), said);
        for half in ["  etcdKey: hidden\n", "  etcdCert: c\n", "  etcdCACert: c\n"] {
            let error = access(half).unwrap_err();
            let said = "could not initialize etcdv3 client: Certificate and Key must both be present inline.";
            assert_eq!(error.to_string(), said);
        }
    }

    #[test]
    fn settings_are_strict_and_repeat_no_value() {
        let broken = |text: &str| {
            let error = read_text(text).map(drop).unwrap_err();
            let said = format!("{error} {error:?} {}", stores::drivers().advice(&error));
            assert!(!said.contains("hidden"), "{said}");
            error.to_string()
        };
        let spec = |text: &str| broken(&format!("{HEAD}spec:\n{text}"));
        let start = "failed to parse config as YAML/JSON: ";
        assert!(spec("  etcdPasswort: hidden\n").contains(&format!("{start}unknown field \"etcdPasswort\" in line 5")));
        assert!(spec("  etcdPassword: hidden\n  etcdPassword: hidden\n").contains("a field is there twice"));
        assert!(spec("  etcdPassword: [hidden\n").contains(start));
        assert!(spec("  etcdPassword: {hidden: 1}\n").contains(start));
        assert!(broken(&format!("{HEAD}specs: {{}}\n")).contains("unknown field \"specs\""));
        assert!(broken("{").starts_with("syntax error in /"));
        assert_eq!(broken("kind: CalicoAPIConfig\n"), "invalid config file: unknown APIVersion ''");
        assert_eq!(broken("apiVersion: v1\nkind: x\n"), "invalid config file: unknown APIVersion 'v1'");
        let kind = broken("apiVersion: projectcalico.org/v3\nkind: IPPool\n");
        assert_eq!(kind, "invalid config file: expected kind 'CalicoAPIConfig', got 'IPPool'");
    }

    #[test]
    fn settings_file_may_be_absent_only_when_usual() {
        let nowhere = Path::new("/nowhere/calicoctl.cfg");
        assert!(read_config_file(ConfigFile::IfThere(nowhere)).unwrap().is_none());
        let error = read_config_file(ConfigFile::Given(nowhere)).map(drop).unwrap_err();
        assert!(error.to_string().starts_with("cannot read /nowhere/calicoctl.cfg: No such file"), "{error}");
    }

    #[test]
    fn settings_text_fault_is_recognized() {
        for (content, fault) in [
            (&b""[..], TextFault::Empty),
            (b" \r\n", TextFault::Empty),
            (b"\0\0\0", TextFault::ZeroBytes),
            (b"\xef\xbb\xbf{}", TextFault::ByteOrderMark),
            (b"\xff\xfe{\0}\0", TextFault::ByteOrderMark),
            (b"\xfe\xff\0{\0}", TextFault::ByteOrderMark),
            (b"\x1f\x8b\x08\x00", TextFault::Gzip),
            (b"{\"\xff\"}", TextFault::NotUtf8),
        ] {
            assert_eq!(text_fault(content), Some(fault), "{content:?}");
        }
        assert_eq!(text_fault("{\"\u{e9}\":\"\u{feff}\"}".as_bytes()), None);
    }
}
