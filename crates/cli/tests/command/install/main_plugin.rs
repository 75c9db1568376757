//! Tests `margay install --main-plugin`, which replaces Calico's main plugin by Margay's main plugin and can restore
//! Calico's plugin.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::thread;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

use crate::install::tree::{Done, Tree, files};

const STEP: [&str; 2] = ["--beside-calico", "--main-plugin"];

/// Creates a node on which `margay install` has already installed Margay's IPAM plugin.
fn after_the_first_step() -> Tree {
    let tree = Tree::with_main_plugin();
    tree.install(&["--beside-calico"]).ok();
    tree
}

fn inode(file: impl AsRef<std::path::Path>) -> u64 {
    file.as_ref().metadata().unwrap().ino()
}

#[test]
fn first_step_leaves_main_plugin_alone() {
    let tree = Tree::with_main_plugin();
    let before = files(&tree.bin())[&tree.main_target()].clone();
    tree.install(&["--beside-calico"]).ok();
    assert_eq!(files(&tree.bin())[&tree.main_target()], before);
    let status = tree.install(&["--status"]).ok().says(&["Main plugin: ", "/calico (not Margay: v3.28.0)"]);
    assert_eq!(status.err, "");
    tree.install(&["--undo"]).ok();
    assert_eq!(files(&tree.bin())[&tree.main_target()], before);
}

#[test]
fn second_step_is_refused_before_first() {
    let tree = Tree::with_main_plugin();
    let before = files(&tree.bin());
    tree.install(&STEP).fails(&[
        "a CNI call for addresses runs ",
        "(not Margay: v3.28.0)",
        "install Margay's IPAM plugin first: margay install --beside-calico",
    ]);
    assert_eq!(files(&tree.bin()), before);
}

#[test]
fn both_plugins_are_one_file_and_restored_exactly() {
    let tree = Tree::with_main_plugin();
    let before = files(&tree.bin());
    tree.install(&["--beside-calico"]).ok();
    let first = files(&tree.bin());

    tree.install(&[&STEP[..], &["--dry-run"]].concat()).ok().says(&["would put ", "/.margay-main/previous"]);
    assert_eq!(files(&tree.bin()), first);
    let done = tree.install(&STEP).ok().says(&["/calico is Margay's", "/.margay-main/previous (v3.28.0)"]);
    assert!(done.err.contains("UPDATE_CNI_BINARIES=false"), "{}", done.err);
    assert_eq!(tree.main_version(), concat!("margay-cni ", env!("CARGO_PKG_VERSION")));
    assert_eq!(inode(tree.main_target()), inode(tree.target()), "one program, so that it calls itself");
    let status = tree.install(&["--status"]).ok().says(&["Main plugin: ", "/calico (Margay ", ".margay-main/previous"]);
    assert_eq!(status.err, "");
    let json = tree.install(&["--status", "-o", "json"]).ok().json();
    assert_eq!((&json["ours"], &json["main_plugin"]["ours"]), (&true.into(), &true.into()));
    assert_eq!(json["main_plugin"]["installed"][0]["previous_version"], "v3.28.0");
    let installed = files(&tree.bin());
    tree.install(&STEP).ok().says(&["already"]);
    assert_eq!(files(&tree.bin()), installed, "the second time changes nothing");

    tree.install(&["--undo", "--main-plugin"]).ok().says(&["/calico is what it was before (v3.28.0)"]);
    assert_eq!(files(&tree.bin()), first, "addresses still come from Margay");
    tree.install(&["--undo", "--main-plugin"]).ok().says(&["nothing was installed"]);

    tree.install(&STEP).ok();
    tree.install(&["--undo", "--dry-run"]).ok().says(&["would put back ", "/calico as", "/calico-ipam as"]);
    tree.install(&["--undo"]).ok().says(&["/calico is what it was before", "/calico-ipam is what it was before"]);
    assert_eq!(files(&tree.bin()), before);
}

#[test]
fn overwritten_main_plugin_is_told_and_repaired() {
    let tree = after_the_first_step();
    tree.install(&STEP).ok();
    tree.calico_writes_main("v3.29.1");
    tree.install(&["--status"]).fails(&["/calico was overwritten", "run margay install --beside-calico --main-plugin"]);
    tree.install(&STEP).ok().says(&["v3.29.1"]);
    tree.install(&["--undo", "--main-plugin"]).ok();
    assert_eq!(tree.main_version(), "v3.29.1");
}

#[test]
fn two_own_programs_are_told_and_merged() {
    let tree = after_the_first_step();
    tree.install(&STEP).ok();
    // From here, the node looks as after an upgrade of Margay's files without a new `margay install --main-plugin`.
    tree.install(&["--undo"]).ok();
    tree.install(&["--beside-calico"]).ok();
    fs::copy(tree.target(), tree.main_target()).unwrap();
    let status = tree.install(&["--status"]).ok();
    let note = "is not the same program as";
    assert!(status.err.starts_with("note: ") && status.err.contains(note), "{}", status.err);
    let again = tree.install(&["--beside-calico"]).ok();
    assert!(again.err.contains(note), "{}", again.err);
    tree.install(&STEP).ok();
    assert_eq!(inode(tree.main_target()), inode(tree.target()));
    assert_eq!(tree.install(&["--status"]).ok().err, "");
}

#[test]
fn install_is_refused_when_cluster_or_network_does_not_fit() {
    let tree = after_the_first_step();
    let before = files(&tree.bin());
    let refused = |words: &[&str]| {
        tree.install(&STEP).fails(words);
        assert_eq!(files(&tree.bin()), before);
    };
    tree.put_document("ClusterInformation", "clusterinformations", "default", &json!({"datastoreReady": false}));
    refused(&["could wire no container with ", "Calico is currently not ready", "nothing was changed"]);
    tree.put_document("ClusterInformation", "clusterinformations", "default", &json!({"datastoreReady": true}));

    let with = |more: Value| {
        let mut settings = tree.settings();
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        tree.configure(&settings);
    };
    with(json!({"nodename_file_optional": false, "nodename_file": "/nowhere"}));
    refused(&["could wire no container with ", "stat /nowhere"]);
    with(json!({"type": "bridge"}));
    refused(&["no network in ", "has \"type\": \"calico\" and \"ipam\": {\"type\": \"calico-ipam\"}"]);
    with(json!({}));
    fs::remove_file(tree.main_target()).unwrap();
    tree.install(&STEP).fails(&["there is no calico in"]);
}

/// Moves this thread to separate mount and network namespaces.
fn leave_this_machine() {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)
        .unwrap_or_else(|error| panic!("this test needs root: {error}"));
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    mount(Some("margay-test"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=755")).unwrap();
    ip(&["link", "set", "lo", "up"]);
    ip(&["netns", "add", "web"]);
}

fn ip(args: &[&str]) -> String {
    let output = Command::new("ip").args(args).output().unwrap();
    assert!(output.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn installed_main_plugin_wires_container() {
    let run = || {
        leave_this_machine();
        let tree = after_the_first_step();
        let conf = json!({
            "cniVersion": "1.0.0", "name": "lab", "type": "calico", "nodename": "node-1", "nodename_file_optional": true,
            "datastore_type": "etcdv3", "etcd_endpoints": tree.etcd_url(),
            "ipam_lock_file": tree.root().join("ipam.lock"), "ipam": {"type": "calico-ipam"},
        });
        fs::write(tree.root().join("stdin"), conf.to_string()).unwrap();
        let call = |verb: &str| -> Done {
            let mut command = Command::new(tree.main_target());
            command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", "web").env("CNI_IFNAME", "eth0");
            command.env("CNI_NETNS", "/run/netns/web").env("CNI_PATH", tree.bin());
            command.stdin(fs::File::open(tree.root().join("stdin")).unwrap()).output().unwrap().into()
        };
        tree.install(&STEP).ok();
        let result: Value = call("ADD").ok().json();
        let address = result["ips"][0]["address"].as_str().unwrap();
        assert!(address.starts_with("10.78.0."), "{result}");
        assert!(ip(&["-n", "web", "address", "show", "dev", "eth0"]).contains(address), "{address}");
        let route = address.trim_end_matches("/32");
        assert!(ip(&["route"]).contains(&format!("{route} dev caliweb ")), "{}", ip(&["route"]));
        call("DEL").ok();
        assert_eq!(ip(&["route"]), "");
        let shown = tree.margay(&["ipam", "show", "-o", "json", "--store", &tree.store()]).ok().json();
        assert_eq!(shown["pools"][0]["in_use"], "0");
        // After `--undo`, an ADD runs the test's stand-in for Calico's main plugin, which sets up no interface.
        tree.install(&["--undo"]).ok();
        assert!(call("ADD").ok().json()["ips"].is_null());
    };
    thread::spawn(run).join().unwrap();
}
