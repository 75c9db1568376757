//! Environment variables, looked up as Calico does.

use driver::{EtcdFiles, Orchestrator, Settings};

/// A lookup of one environment variable by its exact name; `None` if it is not set.
pub type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The environment of this process. Bytes that are not UTF-8 become replacement characters.
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The variable with the prefix `CALICO_`, which beats everything else. Set but empty counts as set.
pub(crate) fn overriding(env: &Environment<'_>, name: &str) -> Option<String> {
    env(&format!("CALICO_{name}"))
}

/// A variable, with the prefix first; empty if neither is set.
pub(crate) fn variable(env: &Environment<'_>, name: &str) -> String {
    overriding(env, name).or_else(|| env(name)).unwrap_or_default()
}

/// The settings in the environment. Only signs that are about the datastore count: everybody who works with Kubernetes has a
/// `KUBECONFIG`, so the caller adds that one where it matters.
pub(crate) fn settings(env: &Environment<'_>) -> Settings {
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
