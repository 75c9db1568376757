//! The file in which Calico's operators say where the datastore is: YAML or JSON, `calicoctl.cfg`.

use std::fs;
use std::io;
use std::path::Path;

use driver::{ConfigError, EtcdFiles, Orchestrator, Result, Settings};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use crate::choice::{KUBERNETES, names_a_store};
use crate::text::text_fault;

/// Where that file is if nobody says otherwise.
pub const DEFAULT_CONFIG_FILE: &str = "/etc/calico/calicoctl.cfg";

/// The file that says which store is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigFile<'a> {
    /// This one, which has to be there.
    Given(&'a Path),
    /// This one, if it is there.
    IfThere(&'a Path),
}

/// As Calico's strict decoder reads it: unknown members and members that are there twice are errors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(rename = "apiVersion", default, deserialize_with = "text")]
    api_version: String,
    #[serde(default, deserialize_with = "text")]
    kind: String,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(default)]
    spec: Option<Spec>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Spec {
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
    // The settings about the Kubernetes API as a datastore.
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

/// A text, of which null is as good as none.
fn text<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<String, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// The contents of a file; nothing if it need not be there and is not. Without a type it is the Kubernetes API that is
/// meant, as for Calico, unless there are etcd settings.
///
/// # Errors
/// `UnreadableConfigFile`, `ConfigFileSyntax`, `ConfigFileVersion`, `ConfigFileKind`. No error repeats a value.
pub(crate) fn read(file: ConfigFile<'_>) -> Result<Option<Settings>> {
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
    let document: Document = serde_saphyr::from_slice(&text).map_err(|error| syntax(fault(error)))?;
    if document.api_version != "projectcalico.org/v3" {
        return Err(ConfigError::ConfigFileVersion(document.api_version));
    }
    if document.kind != "CalicoAPIConfig" {
        return Err(ConfigError::ConfigFileKind(document.kind));
    }
    Ok(Some(settings(document.spec.unwrap_or_default())))
}

fn settings(spec: Spec) -> Settings {
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
        KUBERNETES.clone_into(&mut settings.datastore_type);
    }
    settings
}

/// The fault, without a value: that may be a key or a password.
fn reason(error: &serde_saphyr::Error) -> String {
    let line = error.location().map(|at| format!(" in line {}", at.line())).unwrap_or_default();
    match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField { field, .. } => format!("unknown field {field:?}{line}"),
        serde_saphyr::Error::DuplicateMappingKey { .. } => format!("a field is there twice{line}"),
        _ => format!("something is wrong{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice;
    use driver::{Access, Identity, Location, Login, Pem};

    const HEAD: &str = "apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nmetadata:\n";

    fn read_text(text: &str) -> Result<Settings> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        read(ConfigFile::Given(file.path())).map(Option::unwrap)
    }

    fn located(text: &str) -> Result<Location> {
        choice::location(&stores::drivers(), &read_text(text)?)
    }

    fn location(spec: &str) -> Result<Location> {
        located(&format!("{HEAD}spec:\n{spec}"))
    }

    fn access(spec: &str) -> Result<Access> {
        let location = location(&format!("  etcdEndpoints: https://a:1,https://b:2\n{spec}"))?;
        Ok(location.cluster().expect("a cluster").access.clone())
    }

    #[test]
    fn yaml_and_json_are_read() {
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
    fn the_type_is_kubernetes_unless_it_is_etcd() {
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
    fn certificates_are_in_files_or_in_the_text_itself() {
        let file = |path: &str| Pem::File(path.into());
        let files =
            "  etcdKeyFile: /k\n  etcdCertFile: /c\n  etcdCACertFile: /a\n  etcdUsername: u\n  etcdPassword: hidden\n";
        let found = access(files).unwrap();
        assert_eq!(found.authority, Some(file("/a")));
        assert_eq!(found.identity, Some(Identity { certificate: file("/c"), key: file("/k") }));
        assert_eq!(found.login, Some(Login { user: "u".into(), password: "hidden".into() }));
        let inline = "  etcdKey: |\n    hidden key\n    more\n  etcdCert: |\n    cert\n  etcdCACert: |\n    ca\n";
        let text = |text: &str| Pem::Inline(text.into());
        let found = access(inline).unwrap();
        assert_eq!(found.authority, Some(text("ca\n")));
        assert_eq!(found.identity, Some(Identity { certificate: text("cert\n"), key: text("hidden key\nmore\n") }));

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
    fn it_is_strict_and_repeats_no_value() {
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
    fn only_the_usual_file_may_be_absent() {
        let nowhere = Path::new("/nowhere/calicoctl.cfg");
        assert!(read(ConfigFile::IfThere(nowhere)).unwrap().is_none());
        let error = read(ConfigFile::Given(nowhere)).map(drop).unwrap_err();
        assert!(error.to_string().starts_with("cannot read /nowhere/calicoctl.cfg: No such file"), "{error}");
    }
}
