//! The client against real servers on the loopback address.

mod client;
mod proxies;
pub(super) mod server;
pub(super) mod trust;
mod ways_in;

use std::path::Path;

use agent::CniError;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::server::Server;
use super::{Client, Kubernetes};
use crate::env::Environment;
use crate::gojson::Json;
use crate::netconf::NetConf;

const TOKEN: &str = "hidden-token";

/// The outcome of a network's configuration, outside a cluster.
fn kubernetes(conf: &Value) -> Kubernetes {
    let conf = NetConf::decode(&Json::parse(conf.to_string().as_bytes()).unwrap()).unwrap();
    Kubernetes::from_conf(&conf, &Environment::default())
}

/// A kubeconfig with this cluster and this user, which are JSON and so YAML.
fn kubeconfig(folder: &TempDir, cluster: &Value, user: &Value) -> Kubernetes {
    let text = json!({
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "local", "user": "plugin"}}],
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "plugin", "user": user}],
    });
    write(&folder.path().join("kubeconfig"), text.to_string());
    kubernetes(&json!({"kubernetes": {"kubeconfig": folder.path().join("kubeconfig")}}))
}

/// Writes a file that others may read, whatever this process's mask is.
fn write(path: &Path, text: impl AsRef<[u8]>) {
    std::fs::write(path, text).unwrap();
    set_mode(path, 0o644);
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A client with a token for a server without TLS.
fn client(server: &Server) -> Client {
    let policy = json!({"k8s_auth_token": TOKEN});
    kubernetes(&json!({"kubernetes": {"k8s_api_root": server.url()}, "policy": policy})).client().unwrap()
}

/// The number of an error that has no secret in it, and its text.
#[track_caller]
fn reported(error: CniError) -> (u32, String) {
    let all = format!("{error:?} {error} {}", crate::invocation::to_json(&error));
    assert!(!all.contains("hidden"), "{all}");
    (error.code().number(), error.message().to_owned())
}
