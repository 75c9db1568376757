//! Tests CNI calls of the installed plugin as a runtime makes them, with a real bridge plugin, network namespace and
//! etcd.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::install::tree::{Done, NODE, Tree};

/// A network namespace and a bridge, which are removed when the [`Namespace`] is dropped.
struct Namespace {
    name: String,
    bridge: String,
}

impl Namespace {
    fn new() -> Self {
        let number = std::process::id() % 100_000;
        let namespace = Self { name: format!("margay-install-{number}"), bridge: format!("mgi{number}") };
        let output = Command::new("ip").args(["netns", "add", &namespace.name]).output().unwrap();
        assert!(output.status.success(), "{} (this test needs root)", String::from_utf8_lossy(&output.stderr));
        namespace
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        _ = Command::new("ip").args(["netns", "delete", &self.name]).stderr(Stdio::null()).status();
        _ = Command::new("ip").args(["link", "delete", &self.bridge]).stderr(Stdio::null()).status();
    }
}

/// Returns the folder that contains the bridge plugin.
fn plugins() -> &'static str {
    let folders = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];
    let found = folders.into_iter().find(|folder| Path::new(folder).join("bridge").is_file());
    found.unwrap_or_else(|| panic!("no bridge plugin in {folders:?} (Debian: containernetworking-plugins)"))
}

#[test]
fn installed_plugin_serves_real_calls() {
    let tree = Tree::new();
    let namespace = Namespace::new();
    let conf = json!({
        "cniVersion": "1.0.0", "name": "lab", "type": "bridge", "bridge": namespace.bridge, "nodename": NODE,
        "datastore_type": "etcdv3", "etcd_endpoints": tree.etcd_url(),
        "ipam_lock_file": tree.root().join("ipam.lock"), "ipam": {"type": "calico-ipam"},
    });
    let call = |verb: &str| -> Done {
        let conf_file = tree.root().join("stdin");
        std::fs::write(&conf_file, conf.to_string()).unwrap();
        let path = format!("{}:{}", tree.bin().display(), plugins());
        let mut command = Command::new(Path::new(plugins()).join("bridge"));
        command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", "c1").env("CNI_IFNAME", "eth0");
        command.env("CNI_NETNS", format!("/run/netns/{}", namespace.name)).env("CNI_PATH", path);
        command.stdin(std::fs::File::open(conf_file).unwrap()).output().unwrap().into()
    };
    let used = || {
        let shown = tree.margay(&["ipam", "show", "-o", "json", "--store", &tree.store()]).ok().json();
        shown["pools"][0]["in_use"].as_str().unwrap().to_owned()
    };
    // The stand-in for Calico's IPAM plugin assigns no address, so ADD fails, after which a runtime calls DEL.
    assert_ne!(call("ADD").code, Some(0));
    call("DEL");
    tree.install(&["--beside-calico"]).ok();
    let added = call("ADD").ok();
    let result: Value = added.json();
    let address = result["ips"][0]["address"].as_str().unwrap();
    assert!(address.starts_with("10.78.0.") && used() == "1", "{result}");
    let shown =
        Command::new("ip").args(["-n", &namespace.name, "-o", "address", "show", "dev", "eth0"]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains(address.trim_end_matches("/32")), "{shown:?}");
    call("DEL").ok();
    assert_eq!(used(), "0");
    tree.install(&["--undo"]).ok();
    assert_ne!(call("ADD").code, Some(0));
}
