//! Tests installations that `margay install` refuses without changing anything.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use serde_json::json;

use crate::copy::copy_program;
use crate::install::tree::{Done, Tree, files};
use crate::tested::plugin;

/// Checks that `margay install` refuses to run and changes nothing. The error of `margay install` must contain the
/// given words but no secret.
#[track_caller]
fn refused(tree: &Tree, more: &[&str], words: &[&str]) {
    let before = files(&tree.bin());
    let done = tree.install(&[&["--beside-calico"], more].concat()).fails(words);
    assert!(!done.err.contains("hidden") && done.out.is_empty(), "{}{}", done.out, done.err);
    assert_eq!(files(&tree.bin()), before);
}

#[test]
fn install_is_refused_without_calico() {
    let tree = Tree::without_store();
    fs::remove_file(tree.networks().join("10-calico.conflist")).unwrap();
    refused(&tree, &[], &["no network in ", "\"ipam\": {\"type\": \"calico-ipam\"}", "--cni-conf-dir"]);
    // `margay install` ignores configurations of other plugins, and warns about configurations that it cannot read.
    fs::write(tree.networks().join("10-a.conf"), r#"{"name":"a","type":"bridge","ipam":{"type":"host-local"}}"#)
        .unwrap();
    fs::write(tree.networks().join("20-b.conf"), "{").unwrap();
    refused(&tree, &[], &["warning: skipped ", "20-b.conf: not valid JSON", "no network in "]);
}

#[test]
fn install_is_refused_when_calico_plugin_is_not_yet_there() {
    let tree = Tree::without_store();
    fs::remove_file(tree.target()).unwrap();
    refused(
        &tree,
        &[],
        &["there is no calico-ipam in", "start calico-node, which installs Calico's plugins", "--cni-bin-dir"],
    );
}

#[test]
fn install_is_refused_when_calico_uses_kubernetes_api() {
    let tree = Tree::without_store();
    tree.configure(&json!({"datastore_type": "kubernetes", "kubernetes": {"kubeconfig": "/nowhere"}}));
    refused(&tree, &[], &["datastore_type kubernetes", "keep Calico's plugin on this node", "etcdv3"]);
}

#[test]
fn install_is_refused_when_store_is_unreachable() {
    let tree = Tree::without_store();
    refused(
        &tree,
        &[],
        &["could give no address with", "10-calico.conflist", "etcd http://127.0.0.1:", "nothing was changed"],
    );
}

#[test]
fn install_is_refused_when_store_has_no_address() {
    let tree = Tree::new();
    let settings = json!({"datastore_type": "etcdv3", "etcd_endpoints": tree.etcd_url(), "nodename": "other"});
    tree.configure(&settings);
    refused(&tree, &[], &["could give no address with", "Node(other)"]);
}

#[test]
fn install_is_refused_when_plugin_is_missing_or_not_ours() {
    let tree = Tree::without_store();
    let file = tree.root().join("plugin");
    let text = file.to_str().unwrap();
    refused(&tree, &["--plugin", text], &["No such file", "make install"]);
    copy_program(plugin(), &file);
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    refused(
        &tree,
        &["--plugin", text],
        &["is no plugin of Margay's: cannot be run: Permission denied", "--plugin FILE"],
    );
    fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
    // With two changed bytes in its ELF header, the plugin's file is a program for another processor architecture.
    let mut bytes = fs::read(&file).unwrap();
    bytes[18..20].copy_from_slice(&[0xf3, 0]);
    fs::write(&file, bytes).unwrap();
    refused(&tree, &["--plugin", text], &["cannot be run: Exec format error", "built for this machine"]);
    Tree::write_program(tree.root(), "v3.28.0");
    let calicos = tree.root().join("calico-ipam");
    refused(&tree, &["--plugin", calicos.to_str().unwrap()], &["is no plugin of Margay's: not Margay: v3.28.0"]);
}

#[test]
fn install_is_refused_when_user_may_not_write() {
    let tree = Tree::new();
    let install = tree.args(&["--beside-calico"]);
    let open = Permissions::from_mode(0o755);
    fs::set_permissions(tree.root(), open).unwrap();
    let before = files(&tree.bin());
    // Margay's programs must be in a folder that a user other than root can read.
    for name in ["margay", "margay-ipam"] {
        copy_program(plugin().with_file_name(name), &tree.root().join(name));
    }
    let copy = tree.root().join("margay-ipam");
    let run = |args: &[String]| -> Done {
        let args: Vec<_> = args
            .iter()
            .map(|arg| if *arg == plugin().display().to_string() { copy.display().to_string() } else { arg.clone() })
            .collect();
        let mut command = std::process::Command::new(tree.root().join("margay"));
        command.env_clear().env("PATH", "/usr/bin:/bin").args(args).uid(65534).gid(65534);
        command.output().unwrap().into()
    };
    run(&install).fails(&["cannot write into ", "Permission denied", "run margay install as root"]);
    assert_eq!(files(&tree.bin()), before);
    tree.install(&["--beside-calico"]).ok();
    let installed = files(&tree.bin());
    run(&tree.args(&["--undo"])).fails(&["run margay install as root"]);
    run(&tree.args(&["--status"])).fails(&["run margay install as root"]);
    assert_eq!(files(&tree.bin()), installed);
}

#[test]
fn install_is_refused_when_state_is_of_newer_version() {
    let tree = Tree::new();
    tree.install(&["--beside-calico"]).ok();
    let state = tree.bin().join(".margay/state.json");
    let text = fs::read_to_string(&state).unwrap();
    fs::write(&state, text.replace("\"format\": 1", "\"format\": 2")).unwrap();
    refused(
        &tree,
        &[],
        &["is not what this margay writes", "a newer margay version made this installation: use that version"],
    );
    // An installation whose state file has a newer format can still be undone.
    tree.install(&["--undo"]).ok();
    assert_eq!(tree.version(), "v3.28.0");
}

#[test]
fn install_is_refused_when_another_runs() {
    let tree = Tree::new();
    tree.install(&["--beside-calico"]).ok();
    let lock = fs::File::open(tree.bin().join(".margay")).unwrap();
    lock.lock().unwrap();
    tree.install(&["--undo"]).fails(&["another margay install works in", "try again"]);
    // The test unlocks the lock file of `margay install` explicitly. Closing the lock file might not release the lock,
    // because a process that another test starts may have inherited the file descriptor.
    lock.unlock().unwrap();
    tree.install(&["--undo"]).ok();
}
