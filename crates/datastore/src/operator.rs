//! Chooses the store that a run of the command `margay` works on.

use std::fmt;
use std::path::{Path, PathBuf};

use driver::{Candidate, ConfigError, ConfigResult, Drivers, Location, StorePlace};

use crate::conflist::{NamedStore, scan};
use crate::settings::{self, ConfigFile, Environment};

/// The source of the configuration from which a store was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChoiceSource {
    /// The store was chosen by the URL that the operator specified.
    Url,
    /// Environment variables select the store.
    Environment,
    /// The file at this path selects the store: a file of the CNI configuration, or `calicoctl.cfg`.
    File(PathBuf),
    /// No store is configured, so the default store is used.
    Default,
}

impl fmt::Display for ChoiceSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url => f.write_str("--store"),
            Self::Environment => f.write_str("from the environment"),
            Self::File(file) => write!(f, "named in {}", file.display()),
            Self::Default => f.write_str("the default"),
        }
    }
}

/// A chosen store, and the source that named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenStore {
    /// The store's location.
    pub location: Location,
    /// The source of configuration that named the chosen store. Programs print which source selected the store, unless
    /// it is [`ChoiceSource::Url`].
    pub source: ChoiceSource,
    /// A warning for each unreadable configuration file, which might have named another store.
    pub unreadable: Vec<String>,
}

impl ChosenStore {
    /// Returns the default store, for a host on which no store is configured.
    fn default_of(drivers: &Drivers) -> ConfigResult<Self> {
        Ok(Self { location: drivers.default_location()?, source: ChoiceSource::Default, unreadable: Vec::new() })
    }
}

/// Chooses the store that the operator's command works on. The first of the following sources that names a store wins.
///
/// 1. The store URL that the operator specified.
/// 2. The operator's configuration file; its settings are not merged with the environment.
/// 3. The environment variables (`DATASTORE_TYPE`, `DATASTORE_PATH`, `ETCD_ENDPOINTS`, ..., with or without the prefix
///    `CALICO_`).
/// 4. The CNI configuration in `conf_dir`, if it names exactly one store.
/// 5. The default store.
///
/// If a URL names an etcd, the credentials for it come from the environment (`ETCD_KEY_FILE`, `ETCD_CERT_FILE`,
/// `ETCD_CA_CERT_FILE`, `ETCD_USERNAME`, `ETCD_PASSWORD`). Credentials that are missing in a CNI configuration file are
/// also read from the environment variables `ETCD_...`.
///
/// The environment variable `KUBECONFIG` is ignored, because operators set it for other purposes. An optional
/// configuration file about the Kubernetes API is skipped if another source names a store, because every host that
/// Calico manages has such a file.
///
/// # Errors
/// [`ConfigError::SeveralStores`] if the CNI configuration names more than one store; otherwise the error in the URL,
/// in the environment, or in the only configuration file.
pub fn for_operator(
    drivers: &Drivers,
    url: Option<&str>,
    file: ConfigFile<'_>,
    env: &Environment<'_>,
    conf_dir: &Path,
) -> ConfigResult<ChosenStore> {
    let chosen = |location, source| ChosenStore { location, source, unreadable: Vec::new() };
    let settings = settings::environment_settings(env);
    if let Some(url) = url {
        let location = drivers.parse(url)?;
        if *location.place() == StorePlace::Memory {
            return Err(ConfigError::MemoryStore);
        }
        return Ok(chosen(location.with_access(|_| in_environment(settings.access()))?, ChoiceSource::Url));
    }
    let mut passed_over = None;
    if let Some(said) = settings::read_config_file(file)? {
        let (ConfigFile::Given(path) | ConfigFile::IfThere(path)) = file;
        let in_file = |error| ConfigError::InFile { file: path.into(), error: Box::new(error) };
        match (settings::location(drivers, &said), file) {
            (Ok(location), _) => return Ok(chosen(location, ChoiceSource::File(path.into()))),
            (Err(error @ ConfigError::Kubernetes), ConfigFile::IfThere(_)) => passed_over = Some(in_file(error)),
            (Err(error), _) => return Err(in_file(error)),
        }
    }
    if settings::names_a_store(&settings) {
        return Ok(chosen(in_environment(settings::location(drivers, &settings))?, ChoiceSource::Environment));
    }
    let found = from_configuration(drivers, conf_dir)?;
    if let Some(error) = passed_over.filter(|_| found.source == ChoiceSource::Default) {
        return Err(error);
    }
    // A NetConf cannot contain a password, so credentials that are missing in the NetConf come from the environment.
    let location = found.location.with_access(|access| Ok(access.or(in_environment(settings.access())?)))?;
    Ok(ChosenStore { location, ..found })
}

/// Returns every store that the CNI configuration in `conf_dir` names, for commands that work on all stores of the
/// host. Returns the default store if the CNI configuration names no store, or only Calico's store in the Kubernetes
/// API. The first `ChosenStore` in the result lists the unreadable configuration files.
///
/// # Errors
/// The error in the only configuration file, or in the etcd settings of the environment.
pub fn all_for_operator(drivers: &Drivers, env: &Environment<'_>, conf_dir: &Path) -> ConfigResult<Vec<ChosenStore>> {
    let found = scan(drivers, conf_dir);
    if found.candidates.is_empty() {
        return match from_configuration(drivers, conf_dir) {
            Err(ConfigError::InFile { error, .. }) if *error == ConfigError::Kubernetes => {
                Ok(vec![ChosenStore::default_of(drivers)?])
            }
            chosen => chosen.map(|chosen| vec![chosen]),
        };
    }
    let mut unreadable = found.unreadable;
    let (mut stores, settings) = (Vec::new(), settings::environment_settings(env));
    for candidate in found.candidates {
        let location = candidate.location.with_access(|access| Ok(access.or(in_environment(settings.access())?)))?;
        let unreadable = std::mem::take(&mut unreadable);
        stores.push(ChosenStore { location, source: ChoiceSource::File(candidate.file), unreadable });
    }
    Ok(stores)
}

fn in_environment<T>(result: ConfigResult<T>) -> ConfigResult<T> {
    result.map_err(|error| ConfigError::InEnvironment(Box::new(error)))
}

fn from_configuration(drivers: &Drivers, conf_dir: &Path) -> ConfigResult<ChosenStore> {
    let mut found = scan(drivers, conf_dir);
    match (found.candidates.len(), found.broken, found.candidates.pop()) {
        (1, _, Some(one)) => Ok(ChosenStore {
            location: one.location,
            source: ChoiceSource::File(one.file),
            unreadable: found.unreadable,
        }),
        (_, _, Some(last)) => {
            found.candidates.push(last);
            let named = |found: NamedStore| Candidate { store: found.location.to_string(), file: found.file };
            Err(ConfigError::SeveralStores(found.candidates.into_iter().map(named).collect()))
        }
        (_, Some((file, error)), None) => Err(ConfigError::InFile { file, error: Box::new(error) }),
        (_, None, None) if !found.unreadable.is_empty() => Err(ConfigError::UnreadableConfiguration(found.unreadable)),
        (_, None, None) => ChosenStore::default_of(drivers),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use driver::Pem;

    fn at(url: &str) -> Location {
        stores::at(url).unwrap()
    }

    fn choose(url: Option<&str>, env: &[(&str, &str)], dir: &Path) -> ConfigResult<ChosenStore> {
        let env = |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        for_operator(&stores::drivers(), url, ConfigFile::IfThere(&dir.join("calicoctl.cfg")), &env, dir)
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    const SLED: &str = r#"{"name":"a","plugins":[{"type":"bridge","datastore_type":"sled","datastore_path":"/a",
        "ipam":{"type":"margay-ipam"}},{"type":"portmap"}]}"#;
    const REDB: &str = r#"{"name":"b","type":"bridge","Datastore_Type":"redb","ipam":{"type":"margay-ipam"}}"#;
    const CALICO: &str = r#"{"name":"k8s","plugins":[{"type":"calico","datastore_type":"kubernetes",
        "ipam":{"type":"calico-ipam"},"kubernetes":{"kubeconfig":"/etc/cni/net.d/calico-kubeconfig"}}]}"#;
    const OTHER: &str = r#"{"name":"o","type":"bridge","ipam":{"type":"host-local","subnet":"10.0.0.0/24"}}"#;

    #[test]
    fn store_from_url_beats_all() {
        let dir = folder(&[("1.conflist", SLED), ("2.conf", REDB)]);
        let chosen = choose(Some("redb:///x"), &[("DATASTORE_TYPE", "sled")], dir.path()).unwrap();
        assert_eq!((chosen.location, chosen.source), (at("redb:///x"), ChoiceSource::Url));
        assert_eq!(choose(Some("memory:"), &[], dir.path()).unwrap_err(), ConfigError::MemoryStore);
    }

    #[test]
    fn store_from_environment_beats_configuration() {
        let dir = folder(&[("1.conflist", SLED)]);
        let cases: [(&[(&str, &str)], &str); 4] = [
            (&[("DATASTORE_TYPE", "redb")], "redb:///var/lib/margay/ipam.redb"),
            (&[("DATASTORE_PATH", "/x")], "sled:///x"),
            (&[("CALICO_DATASTORE_PATH", "/x"), ("DATASTORE_PATH", "/y")], "sled:///x"),
            (&[("ETCD_ENDPOINTS", "https://a:1"), ("KUBECONFIG", "/k")], "etcd+https://a:1"),
        ];
        for (env, expected) in cases {
            let chosen = choose(None, env, dir.path()).unwrap();
            assert_eq!(chosen.location.to_string(), expected);
            assert_eq!(chosen.source, ChoiceSource::Environment);
        }
        let error = choose(None, &[("DATASTORE_TYPE", "foo")], dir.path()).unwrap_err();
        assert_eq!(error.to_string(), "in the environment: unknown datastore type: foo");
    }

    #[test]
    fn etcd_login_comes_from_url_and_environment() {
        const ETCD: &str = r#"{"type":"calico","etcd_endpoints":"https://b:1","etcd_ca_cert_file":"/conf/ca",
            "ipam":{"type":"calico-ipam"}}"#;
        let env = [("ETCD_CA_CERT_FILE", "/env/ca"), ("ETCD_USERNAME", "root"), ("ETCD_PASSWORD", "hidden")];
        let dir = folder(&[("1.conf", ETCD), ("2.conf", &ETCD.replace("/conf/ca", "/other/ca"))]);
        let with_endpoints = [&env[..], &[("ETCD_ENDPOINTS", "https://c:1")]].concat();
        let cases = [
            (Some("etcd+https://a:1"), &env[..], "https://a:1", "/env/ca"),
            (None, &with_endpoints, "https://c:1", "/env/ca"),
            (None, &[], "https://b:1", "/conf/ca"),
        ];
        for (url, env, endpoint, authority) in cases {
            let Some(etcd) = choose(url, env, dir.path()).unwrap().location.cluster().cloned() else {
                panic!("{url:?}")
            };
            assert_eq!(etcd.endpoints, [endpoint]);
            assert_eq!(etcd.access.authority, Some(Pem::File(authority.into())), "{endpoint}");
            assert_eq!(etcd.access.login.is_some(), !env.is_empty(), "{endpoint}");
            let shown = format!("{etcd:?} {}", etcd.url("etcd"));
            assert!(!shown.contains("hidden"), "{shown}");
        }
        let login = [("ETCD_USERNAME", "root"), ("ETCD_PASSWORD", "hidden")];
        let Some(etcd) = choose(None, &login, dir.path()).unwrap().location.cluster().cloned() else { panic!() };
        assert!(etcd.access.login.is_some(), "what a file has no place for is in the environment");
        let half = [("ETCD_KEY_FILE", "/k")];
        let error = choose(Some("etcd+https://a:1"), &half, dir.path()).unwrap_err();
        assert_eq!(error.to_string(), "in the environment: a key for etcd is configured without its certificate");
    }

    #[test]
    fn store_from_configuration_file_alone() {
        let config = |spec: &str| format!("apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nspec: {spec}\n");
        let etcd = config("{etcdEndpoints: 'https://f:1', etcdCACertFile: /f/ca}");
        let dir = folder(&[("calicoctl.cfg", &etcd), ("1.conflist", SLED)]);
        let env = [("ETCD_ENDPOINTS", "https://e:1"), ("ETCD_USERNAME", "root"), ("ETCD_PASSWORD", "hidden")];
        let chosen = choose(None, &env, dir.path()).unwrap();
        assert_eq!(chosen.source, ChoiceSource::File(dir.path().join("calicoctl.cfg")));
        let Some(found) = chosen.location.cluster().cloned() else { panic!() };
        assert_eq!(
            (found.endpoints, found.access.login),
            (vec!["https://f:1".into()], None),
            "no word of the environment"
        );
        assert_eq!(choose(Some("redb:///x"), &env, dir.path()).unwrap().location, at("redb:///x"));
        let broken = folder(&[("calicoctl.cfg", "{"), ("1.conflist", SLED)]);
        assert!(matches!(choose(None, &env, broken.path()), Err(ConfigError::ConfigFileSyntax { .. })));

        // A configuration file about the Kubernetes API is an error only if no other file names a store, or if the
        // operator specified the file's path.
        let kubernetes = folder(&[("calicoctl.cfg", &config("{datastoreType: kubernetes}")), ("1.conflist", SLED)]);
        assert_eq!(choose(None, &[], kubernetes.path()).unwrap().location, at("sled:///a"));
        let file = kubernetes.path().join("calicoctl.cfg");
        let named =
            for_operator(&stores::drivers(), None, ConfigFile::Given(&file), &|_| None, kubernetes.path()).unwrap_err();
        fs::remove_file(kubernetes.path().join("1.conflist")).unwrap();
        let alone = choose(None, &[], kubernetes.path()).unwrap_err();
        for error in [named, alone] {
            assert!(
                error.to_string().ends_with("calicoctl.cfg: datastore type kubernetes is not supported"),
                "{error}"
            );
        }
    }

    #[test]
    fn store_ignores_kubeconfig_of_shell() {
        let chosen = choose(None, &[("KUBECONFIG", "/k")], folder(&[]).path()).unwrap();
        assert_eq!(chosen, ChosenStore::default_of(&stores::drivers()).unwrap());
    }

    #[test]
    fn configuration_folder_is_empty_when_absent() {
        let dir = folder(&[]);
        assert_eq!(choose(None, &[], &dir.path().join("none")).unwrap().source, ChoiceSource::Default);
    }

    #[test]
    fn store_is_only_one_of_configuration() {
        let dir = folder(&[("1.conflist", SLED), ("2.conf", OTHER), ("3.conf", SLED), ("4.conf.bak", REDB)]);
        let chosen = choose(None, &[], dir.path()).unwrap();
        assert_eq!(chosen.location, at("sled:///a"));
        assert_eq!(chosen.source, ChoiceSource::File(dir.path().join("1.conflist")));
    }

    #[test]
    fn stores_are_each_named_once() {
        let dir =
            folder(&[("1.conflist", SLED), ("2.conf", OTHER), ("3.conf", SLED), ("4.json", REDB), ("5.conf", "{")]);
        let all = all_for_operator(&stores::drivers(), &|_| None, dir.path()).unwrap();
        let locations: Vec<_> = all.iter().map(|chosen| chosen.location.to_string()).collect();
        assert_eq!(locations, ["sled:///a", "redb:///var/lib/margay/ipam.redb"]);
        assert_eq!((all[0].unreadable.len(), all[1].unreadable.len()), (1, 0));
        let none = all_for_operator(&stores::drivers(), &|_| None, folder(&[]).path()).unwrap();
        assert_eq!((none.len(), &none[0].source), (1, &ChoiceSource::Default));
        assert!(all_for_operator(&stores::drivers(), &|_| None, folder(&[("1.conf", "{")]).path()).is_err());
    }

    #[test]
    fn stores_are_listed_when_several() {
        let dir = folder(&[("1.conflist", SLED), ("2.json", REDB)]);
        let error = choose(None, &[], dir.path()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("sled:///a (in ") && said.contains("1.conflist)"), "{said}");
        assert!(said.contains("redb:///var/lib/margay/ipam.redb (in ") && said.contains("2.json)"), "{said}");
        assert!(stores::drivers().advice(&error).contains("--store sled:///a"), "{}", stores::drivers().advice(&error));
    }

    #[test]
    fn calico_on_kubernetes_is_error_only_without_store() {
        let dir = folder(&[("10-calico.conflist", CALICO)]);
        let error = choose(None, &[], dir.path()).unwrap_err();
        assert!(
            error.to_string().ends_with("10-calico.conflist: datastore type kubernetes is not supported"),
            "{error}"
        );
        assert!(stores::drivers().advice(&error).contains("--store URL"));
        let dir = folder(&[("10-calico.conflist", CALICO), ("20.conf", REDB)]);
        assert_eq!(choose(None, &[], dir.path()).unwrap().location, at("redb:///var/lib/margay/ipam.redb"));
    }

    #[test]
    fn calico_on_kubernetes_is_none_of_all_stores() {
        let all =
            |files: &[(&str, &str)]| all_for_operator(&stores::drivers(), &|_| None, folder(files).path()).unwrap();
        assert_eq!(all(&[("10-calico.conflist", CALICO)]), [ChosenStore::default_of(&stores::drivers()).unwrap()]);
        let beside = all(&[("10-calico.conflist", CALICO), ("20.conf", REDB)]);
        assert_eq!(beside.len(), 1);
        assert_eq!(beside[0].location, at("redb:///var/lib/margay/ipam.redb"));
    }

    #[test]
    fn configuration_files_are_never_skipped_when_broken() {
        for text in ["{", "[", r#"{"plugins": 1}"#, "\u{0}"] {
            let dir = folder(&[("1.conflist", text)]);
            let error = choose(None, &[], dir.path()).unwrap_err();
            assert!(matches!(&error, ConfigError::UnreadableConfiguration(_)), "{text}: {error}");
            assert!(error.to_string().contains("1.conflist"), "{error}");
            let dir = folder(&[("1.conflist", text), ("2.conf", SLED)]);
            let chosen = choose(None, &[], dir.path()).unwrap();
            assert_eq!(chosen.location, at("sled:///a"));
            assert_eq!(chosen.unreadable.len(), 1);
        }
    }

    #[test]
    fn configuration_of_odd_shape_is_not_ours() {
        for text in ["[]", "1", "null", r#"{"plugins":[1,null,{"ipam":7}]}"#, r#"{"ipam":{"type":3}}"#] {
            let dir = folder(&[("1.conf", text)]);
            assert_eq!(choose(None, &[], dir.path()).unwrap().source, ChoiceSource::Default, "{text}");
        }
    }
}
