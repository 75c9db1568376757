//! Chooses the store that the plugin uses for a NetConf.

use driver::{ConfigError, ConfigResult, Drivers, EtcdFiles, Location, Orchestrator, Settings};

use crate::settings::{self, Environment, location, means_cluster, names_embedded, overriding, variable};

/// The settings of a NetConf that select a store. A store setting that is missing in the NetConf is an empty string.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetConfStore {
    /// `datastore_type`: the kind of store, which is `sled`, `redb`, `local`, `etcdv3` or `kubernetes`.
    pub datastore_type: String,
    /// `datastore_path`: the folder of an embedded store, as an absolute path.
    pub datastore_path: String,
    /// `etcd_endpoints`: the endpoint URLs of etcd, separated by commas.
    pub etcd_endpoints: String,
    /// True if the NetConf contains `etcd_endpoints` or `etcd_discovery_srv`, even if the value is empty. An endpoint
    /// setting is empty if the NetConf was made from a template without a value for the endpoints. An empty endpoint
    /// setting still means a cluster. A NetConf for a cluster must never select an embedded store, which would be a
    /// separate store on each host.
    pub has_endpoints: bool,
    /// `etcd_discovery_srv`: the domain whose SRV records list the etcd endpoints.
    pub etcd_discovery_srv: String,
    /// `etcd_key_file`: the path of the client's private key.
    pub etcd_key_file: String,
    /// `etcd_cert_file`: the path of the client's certificate.
    pub etcd_cert_file: String,
    /// `etcd_ca_cert_file`: the path of the CA certificate.
    pub etcd_ca_cert_file: String,
    /// `kubernetes.kubeconfig`: the path of a kubeconfig file. If `kubernetes.kubeconfig` is present, the NetConf is
    /// for a Kubernetes cluster and never selects an embedded store.
    pub kubeconfig: String,
    /// `kubernetes.k8s_api_root`: the URL of the Kubernetes API. If `kubernetes.k8s_api_root` is present, the NetConf
    /// is for a Kubernetes cluster and never selects an embedded store.
    pub k8s_api_root: String,
    /// True if the plugin was started under the name `calico-ipam`.
    pub called_as_calico_ipam: bool,
}

impl NetConfStore {
    pub(crate) fn settings(&self) -> Settings {
        let meant = [&self.kubeconfig, &self.k8s_api_root].into_iter().any(|sign| !sign.is_empty())
            || (self.has_endpoints && self.datastore_path.is_empty());
        Settings {
            datastore_type: self.datastore_type.clone(),
            path: self.datastore_path.clone(),
            etcd_endpoints: self.etcd_endpoints.clone(),
            etcd_discovery_srv: self.etcd_discovery_srv.clone(),
            etcd_files: EtcdFiles {
                key: self.etcd_key_file.clone(),
                certificate: self.etcd_cert_file.clone(),
                authority: self.etcd_ca_cert_file.clone(),
            },
            etcd_inline: EtcdFiles::default(),
            // The etcd user and password come only from the environment, as in Calico's plugin.
            etcd_username: String::new(),
            etcd_password: String::new(),
            orchestrator: if meant { Orchestrator::Kubernetes } else { Orchestrator::Absent },
            path_setting: "datastore_path",
        }
    }
}

/// Chooses the store that a plugin uses, from its NetConf and its environment.
///
/// - If the NetConf names an embedded store (`sled`, `redb`, `local`, or only a `datastore_path`), the NetConf alone
///   decides. The plugin does not read the environment for a NetConf that names an embedded store, because a runtime
///   may call ADD and DEL with different environments.
/// - For a NetConf that names no embedded store, the plugin uses the environment as Calico does. A setting of the
///   NetConf overrides the environment variable of the same purpose, and a variable with the prefix `CALICO_` overrides
///   both.
/// - If the plugin was started as `calico-ipam`, or if any etcd or Kubernetes setting exists, a missing endpoint is an
///   error, as in Calico. The plugin never falls back to an embedded store on this host because an etcd endpoint is
///   missing. If neither the NetConf nor the environment has a store setting, the result is
///   [`Drivers::default_location`].
///
/// # Errors
/// A [`ConfigError`] about store types, endpoints, paths or contradicting settings.
pub fn for_netconf(drivers: &Drivers, conf: &NetConfStore, env: &Environment<'_>) -> ConfigResult<Location> {
    let own = conf.settings();
    if names_embedded(drivers, &own) || (own.datastore_type.is_empty() && !own.path.is_empty()) {
        if own.datastore_type.is_empty() && means_cluster(drivers, &own) {
            return Err(ConfigError::PathWithoutEmbedded);
        }
        return location(drivers, &own);
    }
    let mut merged = merge(&own, env);
    if means_cluster(drivers, &own) {
        if names_embedded(drivers, &merged) {
            return Err(ConfigError::Contradiction { environment: merged.datastore_type });
        }
        // Ignore a store path in the environment, because it belongs to the embedded store of another network on this
        // host.
        merged.path = own.path;
        // An empty `ETCD_ENDPOINTS` clears the configured endpoints, but the store is still a cluster, never an
        // embedded store.
        merged.orchestrator = Orchestrator::Kubernetes;
    }
    if conf.called_as_calico_ipam && merged.path.is_empty() && !names_embedded(drivers, &merged) {
        merged.orchestrator = Orchestrator::Kubernetes;
    }
    location(drivers, &merged)
}

/// Merges the settings of the NetConf and of the environment, in Calico's order of precedence.
fn merge(own: &Settings, env: &Environment<'_>) -> Settings {
    let outer = settings::environment_settings(env);
    let pick = |name: &str, own: &str, outer: String| {
        if own.is_empty() || overriding(env, name).is_some() { outer } else { own.to_owned() }
    };
    let kubernetes = ["KUBECONFIG", "K8S_API_ENDPOINT"].into_iter().any(|name| !variable(env, name).is_empty());
    let meant = kubernetes || [own.orchestrator, outer.orchestrator].contains(&Orchestrator::Kubernetes);
    Settings {
        datastore_type: pick("DATASTORE_TYPE", &own.datastore_type, outer.datastore_type),
        path_setting: if own.path.is_empty() { outer.path_setting } else { own.path_setting },
        path: if own.path.is_empty() { outer.path } else { own.path.clone() },
        etcd_endpoints: pick("ETCD_ENDPOINTS", &own.etcd_endpoints, outer.etcd_endpoints),
        etcd_discovery_srv: pick("ETCD_DISCOVERY_SRV", &own.etcd_discovery_srv, outer.etcd_discovery_srv),
        etcd_files: EtcdFiles {
            key: pick("ETCD_KEY_FILE", &own.etcd_files.key, outer.etcd_files.key),
            certificate: pick("ETCD_CERT_FILE", &own.etcd_files.certificate, outer.etcd_files.certificate),
            authority: pick("ETCD_CA_CERT_FILE", &own.etcd_files.authority, outer.etcd_files.authority),
        },
        etcd_inline: EtcdFiles::default(),
        etcd_username: outer.etcd_username,
        etcd_password: outer.etcd_password,
        orchestrator: if meant { Orchestrator::Kubernetes } else { Orchestrator::Absent },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driver::{Access, ClientCertificate, Login, Pem};

    fn conf(set: impl FnOnce(&mut NetConfStore)) -> NetConfStore {
        let mut conf = NetConfStore::default();
        set(&mut conf);
        conf
    }

    fn with(conf: &NetConfStore, env: &[(&str, &str)]) -> ConfigResult<Location> {
        for_netconf(&stores::drivers(), conf, &|name| {
            env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn at(url: &str) -> Location {
        stores::at(url).unwrap()
    }

    fn etcd(endpoints: &[&str]) -> Location {
        let hosts: Vec<_> = endpoints.iter().map(|endpoint| endpoint.trim_start_matches("http://")).collect();
        at(&format!("etcd://{}", hosts.join(",")))
    }

    #[test]
    fn embedded_netconf_never_asks_environment() {
        let cases = [
            ("sled", "", at("sled:///var/lib/margay/ipam.sled")),
            ("local", "", at("sled:///var/lib/margay/ipam.sled")),
            ("redb", "", at("redb:///var/lib/margay/ipam.redb")),
            ("sled", "/a", at("sled:///a")),
            ("redb", "/a", at("redb:///a")),
            ("", "/a", at("sled:///a")),
        ];
        for (kind, path, expected) in cases {
            for called_as_calico_ipam in [false, true] {
                let conf = NetConfStore {
                    datastore_type: kind.into(),
                    datastore_path: path.into(),
                    called_as_calico_ipam,
                    ..NetConfStore::default()
                };
                let found = for_netconf(&stores::drivers(), &conf, &|name| panic!("asked for {name}"));
                assert_eq!(found.unwrap(), expected, "{kind:?} {path:?}");
            }
        }
    }

    #[test]
    fn engine_named_wins_over_cluster_settings() {
        let conf = conf(|c| {
            c.datastore_type = "sled".into();
            c.kubeconfig = "/k".into();
        });
        assert_eq!(with(&conf, &[]).unwrap(), at("sled:///var/lib/margay/ipam.sled"));
    }

    #[test]
    fn endpoints_when_empty_are_gap_unless_store_is_local() {
        let empty = |kind: &str, path: &str| {
            let (datastore_type, datastore_path) = (kind.into(), path.into());
            NetConfStore { datastore_type, datastore_path, has_endpoints: true, ..NetConfStore::default() }
        };
        assert_eq!(with(&empty("", ""), &[]).unwrap_err(), ConfigError::NoEndpoints);
        assert_eq!(with(&empty("", ""), &[("ETCD_ENDPOINTS", "http://a:1")]).unwrap(), etcd(&["http://a:1"]));
        assert_eq!(with(&empty("redb", ""), &[]).unwrap(), at("redb:///var/lib/margay/ipam.redb"));
        assert_eq!(with(&empty("", "/a"), &[]).unwrap(), at("sled:///a"));
    }

    #[test]
    fn default_store_when_nothing_is_set() {
        assert_eq!(with(&NetConfStore::default(), &[]).unwrap(), at("sled:///var/lib/margay/ipam.sled"));
    }

    #[test]
    fn endpoints_when_missing_never_fall_back() {
        let confs = [
            conf(|c| c.called_as_calico_ipam = true),
            conf(|c| c.datastore_type = "etcdv3".into()),
            conf(|c| c.etcd_key_file = "/k".into()),
            conf(|c| c.etcd_cert_file = "/k".into()),
            conf(|c| c.etcd_ca_cert_file = "/k".into()),
            conf(|c| c.kubeconfig = "/k".into()),
            conf(|c| c.k8s_api_root = "https://k".into()),
            conf(|c| c.has_endpoints = true),
        ];
        for conf in &confs {
            let error = with(conf, &[]).unwrap_err();
            assert_eq!(error.to_string(), "no etcd endpoints specified", "{conf:?}");
            assert!(stores::drivers().advice(&error).contains("etcd_endpoints"));
        }
        for name in ["ETCD_KEY_FILE", "CALICO_ETCD_CA_CERT_FILE", "KUBECONFIG", "K8S_API_ENDPOINT"] {
            assert_eq!(with(&NetConfStore::default(), &[(name, "x")]).unwrap_err(), ConfigError::NoEndpoints, "{name}");
        }
        assert_eq!(
            with(&NetConfStore::default(), &[("DATASTORE_TYPE", "etcdv3")]).unwrap_err(),
            ConfigError::NoEndpoints
        );
    }

    #[test]
    fn netconf_types_are_checked() {
        let conf = |kind: &str| conf(|c| c.datastore_type = kind.into());
        assert_eq!(with(&conf("foo"), &[]).unwrap_err().to_string(), "unknown datastore type: foo");
        assert_eq!(with(&conf("Sled"), &[]).unwrap_err(), ConfigError::UnknownType("Sled".into()));
        assert_eq!(with(&conf("kubernetes"), &[]).unwrap_err(), ConfigError::Kubernetes);
        let env = [("DATASTORE_TYPE", "bar"), ("ETCD_ENDPOINTS", "http://a:1")];
        assert_eq!(with(&NetConfStore::default(), &env).unwrap_err(), ConfigError::UnknownType("bar".into()));
    }

    #[test]
    fn netconf_precedence_matches_calico() {
        let own = conf(|c| c.etcd_endpoints = "http://own:1".into());
        assert_eq!(with(&own, &[("ETCD_ENDPOINTS", "http://env:1")]).unwrap(), etcd(&["http://own:1"]));
        assert_eq!(with(&own, &[("CALICO_ETCD_ENDPOINTS", "http://c:1")]).unwrap(), etcd(&["http://c:1"]));
        // An environment variable that is set to an empty string counts as set.
        assert_eq!(with(&own, &[("CALICO_ETCD_ENDPOINTS", "")]).unwrap_err(), ConfigError::NoEndpoints);
        let none = conf(|c| c.called_as_calico_ipam = true);
        assert_eq!(
            with(&none, &[("ETCD_ENDPOINTS", "http://a:1,http://b:1")]).unwrap(),
            etcd(&["http://a:1", "http://b:1"])
        );
        let both = conf(|c| {
            c.etcd_endpoints = "http://a:1".into();
            c.etcd_discovery_srv = "d".into();
        });
        assert!(with(&both, &[]).unwrap_err().to_string().starts_with("multiple discovery or bootstrap options"));
    }

    #[test]
    fn etcd_login_comes_from_netconf() {
        let conf = conf(|c| {
            c.etcd_endpoints = "https://a:1".into();
            c.etcd_ca_cert_file = "/own/ca".into();
            c.etcd_cert_file = "/own/cert".into();
            c.etcd_key_file = "/own/key".into();
        });
        let access = |env: &[(&str, &str)]| with(&conf, env).unwrap().cluster().unwrap().access.clone();
        let file = |path: &str| Pem::File(path.into());
        let identity = ClientCertificate { certificate: file("/own/cert"), key: file("/own/key") };
        let own = Access { authority: Some(file("/own/ca")), identity: Some(identity), login: None };
        assert_eq!(access(&[]), own);
        assert_eq!(access(&[("ETCD_CA_CERT_FILE", "/env/ca")]), own);
        assert_eq!(access(&[("CALICO_ETCD_CA_CERT_FILE", "/env/ca")]).authority, Some(file("/env/ca")));
        let login = |password: &str| Some(Login { user: "root".into(), password: password.into() });
        assert_eq!(access(&[("ETCD_USERNAME", "root"), ("ETCD_PASSWORD", "p")]).login, login("p"));
        let env = [("ETCD_USERNAME", "root"), ("ETCD_PASSWORD", "p"), ("CALICO_ETCD_PASSWORD", "q")];
        assert_eq!(access(&env).login, login("q"));
        // As in Calico, a user without a password, or a password without a user, counts as no login.
        for half in [("ETCD_USERNAME", "root"), ("ETCD_PASSWORD", "p")] {
            assert_eq!(access(&[half]).login, None);
        }
        assert_eq!(with(&conf, &[("CALICO_ETCD_KEY_FILE", "")]).unwrap_err(), ConfigError::CertificateWithoutKey);
        assert_eq!(with(&conf, &[("CALICO_ETCD_CERT_FILE", "")]).unwrap_err(), ConfigError::KeyWithoutCertificate);
    }

    #[test]
    fn environment_alone_may_name_embedded_store() {
        for called_as_calico_ipam in [false, true] {
            let conf = NetConfStore { called_as_calico_ipam, ..NetConfStore::default() };
            let env = [("DATASTORE_TYPE", "redb"), ("DATASTORE_PATH", "/a")];
            assert_eq!(with(&conf, &env).unwrap(), at("redb:///a"));
            assert_eq!(with(&conf, &[("DATASTORE_PATH", "/a")]).unwrap(), at("sled:///a"));
            assert_eq!(
                with(&conf, &[("DATASTORE_PATH", "/a"), ("ETCD_ENDPOINTS", "http://a:1")]).unwrap_err(),
                ConfigError::PathWithoutEmbedded
            );
        }
    }

    #[test]
    fn environment_cannot_turn_cluster_into_local_store() {
        let conf = conf(|c| c.etcd_endpoints = "http://a:1".into());
        for name in ["DATASTORE_TYPE", "CALICO_DATASTORE_TYPE"] {
            assert_eq!(
                with(&conf, &[(name, "sled")]).unwrap_err(),
                ConfigError::Contradiction { environment: "sled".into() }
            );
        }
        assert_eq!(with(&conf, &[("DATASTORE_PATH", "/a")]).unwrap(), etcd(&["http://a:1"]));
    }

    #[test]
    fn paths_are_absolute_and_belong_to_embedded_stores() {
        let relative = conf(|c| {
            c.datastore_type = "sled".into();
            c.datastore_path = "a/b".into();
        });
        assert_eq!(with(&relative, &[]).unwrap_err().to_string(), "datastore_path is not an absolute path");
        let env = [("DATASTORE_PATH", "a/b")];
        assert_eq!(
            with(&NetConfStore::default(), &env).unwrap_err().to_string(),
            "DATASTORE_PATH is not an absolute path"
        );
        for kind in ["", "etcdv3"] {
            let mixed = conf(|c| {
                c.datastore_type = kind.into();
                c.etcd_endpoints = "http://a:1".into();
                c.datastore_path = "/a".into();
            });
            assert_eq!(with(&mixed, &[]).unwrap_err(), ConfigError::PathWithoutEmbedded);
        }
    }

    #[test]
    fn endpoint_with_password_is_refused_without_repeating_it() {
        let conf = conf(|c| c.etcd_endpoints = "http://root:hunter2@a:1".into());
        let error = with(&conf, &[]).unwrap_err();
        assert_eq!(error, ConfigError::SecretInAddress);
        assert!(!format!("{error} {}", stores::drivers().advice(&error)).contains("hunter2"));
    }
}
