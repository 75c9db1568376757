//! Tests Margay's programs built with the store of `examples/outside`.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// Returns the standard output of a program, and panics if the program has failed.
#[track_caller]
fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{:?}: {out}{err}", output.status);
    out
}

/// The command `margay` of `examples/outside`, built with its file-based store.
fn margay() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outside-margay"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

fn url(store: &Path) -> String {
    format!("rows://{}", store.display())
}

#[track_caller]
fn plugin(store: &Path, verb: &str) -> String {
    let network = json!({
        "cniVersion": "1.0.0", "name": "lab", "type": "bridge", "nodename": "one", "log_level": "error",
        "datastore_type": "rows", "datastore_path": store, "ipam": {"type": "margay-ipam"},
    });
    let mut child = Command::new(env!("CARGO_BIN_EXE_outside-margay-ipam"))
        .env_clear()
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", "a"), ("CNI_IFNAME", "eth0")])
        .envs([("CNI_NETNS", "/proc/1/ns/net"), ("CNI_PATH", "/nowhere")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(network.to_string().as_bytes()).unwrap();
    said(&child.wait_with_output().unwrap())
}

fn in_use(store: &Path) -> Value {
    let shown = margay().args(["ipam", "show", "-o", "json", "--store", &url(store)]).output().unwrap();
    let shown: Value = serde_json::from_str(&said(&shown)).unwrap();
    shown["pools"][0]["in_use"].clone()
}

#[test]
fn container_gets_address_and_gives_it_back() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    said(&margay().args(["pool", "create", "lab", "10.88.0.0/16", "--store", &url(&store)]).output().unwrap());
    let added: Value = serde_json::from_str(&plugin(&store, "ADD")).unwrap();
    let address = added["ips"][0]["address"].as_str().unwrap();
    assert!(address.starts_with("10.88."), "{added}");
    assert_eq!(in_use(&store), "1");
    plugin(&store, "DEL");
    assert_eq!(in_use(&store), "0");
}

#[test]
fn command_judges_store() {
    let folder = tempfile::tempdir().unwrap();
    // The in-memory store is tested in `tests/conformance.rs`; more conformance cases apply to a store in files, such
    // as those for crashes and damage.
    let judged = margay().args(["conformance", "--case", "D", &url(&folder.path().join("judged"))]).output().unwrap();
    let judged = said(&judged);
    assert!(judged.contains(" passed, 0 failed"), "{judged}");
}

#[test]
fn help_and_errors_list_store() {
    let help = said(&margay().arg("--help").output().unwrap());
    assert!(help.contains("etcd://host:port or rows:///path"), "{help}");
    let refused = margay().args(["--store", "mysql:///a", "pool", "list"]).output().unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("sled:///path, redb:///path,") && text.contains("rows:///path"), "{text}");
}
