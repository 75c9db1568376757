//! Tests that `margay install` installs, reports, repairs and removes the plugin.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use crate::install::tree::{Tree, files};
use crate::tested::plugin;

const OURS: &str = concat!("margay-ipam ", env!("CARGO_PKG_VERSION"));

#[test]
fn install_is_found_by_status_and_undone_exactly() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    tree.install(&["--status"]).fails(&["which is not Margay's", "margay install --beside-calico"]);

    let done = tree.install(&["--beside-calico"]).ok().says(&["is Margay's", "v3.28.0", "/.margay/previous"]);
    assert!(
        done.err.starts_with("note: calico-node") && done.err.contains("UPDATE_CNI_BINARIES=false"),
        "{}",
        done.err
    );
    assert_eq!(tree.version(), OURS);
    assert_eq!(fs::read(tree.target()).unwrap(), fs::read(plugin()).unwrap());
    assert_eq!(tree.target().metadata().unwrap().mode() & 0o7777, 0o755);
    let status = tree.install(&["--status"]).ok().says(&["Runs now:    ", "(Margay ", "Kept:        ", "(v3.28.0)"]);
    assert_eq!(status.err, "");

    let installed = files(&tree.bin());
    tree.install(&["--beside-calico"]).ok().says(&["already"]);
    assert_eq!(files(&tree.bin()), installed, "the second time changes nothing");

    tree.install(&["--undo"]).ok().says(&["is what it was before (v3.28.0)"]);
    assert_eq!(files(&tree.bin()), before);
    tree.install(&["--undo"]).ok().says(&["nothing was installed"]);
    assert_eq!(files(&tree.bin()), before);
}

#[test]
fn install_on_etcd_says_who_must_compact() {
    let tree = Tree::with_main_plugin();
    let says_so = |err: &str| {
        let lines: Vec<_> = err.lines().filter(|line| line.contains("history")).collect();
        assert!(lines.len() <= 1, "{err}");
        lines.iter().any(|line| {
            line.starts_with("note: ") && line.contains("margay etcd status") && line.contains("margay-compact.timer")
        })
    };
    assert!(!says_so(&tree.install(&["--beside-calico", "--dry-run"]).ok().err));
    let done = tree.install(&["--beside-calico"]).ok();
    assert!(says_so(&done.err), "{}", done.err);
    // Once is enough.
    assert!(!says_so(&tree.install(&["--beside-calico"]).ok().err));
    assert!(!says_so(&tree.install(&["--beside-calico", "--main-plugin"]).ok().err));
}

#[test]
fn overwritten_plugin_is_told_and_repaired() {
    let tree = Tree::new();
    tree.install(&["--beside-calico"]).ok();
    tree.calico_writes("v3.29.1");
    let reported =
        tree.install(&["--status"]).fails(&["was overwritten", "--beside-calico again", "UPDATE_CNI_BINARIES=false"]);
    reported.says(&["not Margay: v3.29.1"]);
    let json = tree.install(&["--status", "-o", "json"]).json();
    assert_eq!((&json["ours"], &json["runs"]["version"]), (&false.into(), &"v3.29.1".into()));
    assert_eq!(json["installed"][0]["overwritten"], true);

    // The next installation finds calico-node's newer Calico plugin in place of Margay's, and keeps this newer version
    // for `--undo`.
    tree.install(&["--beside-calico"]).ok().says(&["v3.29.1"]);
    let json = tree.install(&["--status", "-o", "json"]).ok().json();
    assert_eq!((&json["ours"], &json["runs"]["program"]), (&true.into(), &"margay".into()));
    assert_eq!(json["installed"][0]["previous_version"], "v3.29.1");
    tree.install(&["--undo"]).ok();
    assert_eq!(tree.version(), "v3.29.1");
}

#[test]
fn undo_leaves_what_calico_node_put_there_meanwhile() {
    let tree = Tree::new();
    tree.install(&["--beside-calico"]).ok();
    tree.calico_writes("v3.30.0");
    let before = fs::read(tree.target()).unwrap();
    tree.install(&["--undo"]).ok().says(&["not Margay's any more, and stays"]);
    assert_eq!(files(&tree.bin()).len(), 1);
    assert_eq!(fs::read(tree.target()).unwrap(), before);
}

#[test]
fn install_restores_link_and_never_writes_its_target() {
    let tree = Tree::new();
    fs::rename(tree.target(), tree.bin().join("calico")).unwrap();
    symlink("calico", tree.target()).unwrap();
    let before = files(&tree.bin());
    tree.install(&["--beside-calico"]).ok();
    assert!(!tree.target().is_symlink() && tree.version() == OURS);
    tree.install(&["--undo"]).ok();
    assert_eq!(files(&tree.bin()), before);
    assert_eq!(fs::read_link(tree.target()).unwrap().to_str(), Some("calico"));
}

#[test]
fn install_restores_what_was_removed_meanwhile() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    tree.install(&["--beside-calico"]).ok();
    fs::remove_file(tree.target()).unwrap();
    tree.install(&["--status"]).fails(&["there is no calico-ipam in"]);
    tree.install(&["--beside-calico"]).ok();
    assert_eq!(tree.version(), OURS);
    fs::remove_file(tree.target()).unwrap();
    tree.install(&["--undo"]).ok();
    assert_eq!(files(&tree.bin()), before);
}

#[test]
fn dry_run_says_what_would_be_done_and_does_nothing() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    tree.install(&["--beside-calico", "--dry-run"]).ok().says(&["would put ", "and keep what is there as"]);
    let json = tree.install(&["--beside-calico", "--dry-run", "-o", "json"]).ok().json();
    assert_eq!((&json["dry_run"], &json["changes"][0]["action"]), (&true.into(), &"install".into()));
    tree.install(&["--undo", "--dry-run"]).ok().says(&["nothing to do"]);
    assert_eq!(files(&tree.bin()), before);
    tree.install(&["--beside-calico"]).ok();
    let installed = files(&tree.bin());
    tree.install(&["--undo", "--dry-run"]).ok().says(&["would put back"]);
    assert_eq!(files(&tree.bin()), installed);
}

#[test]
fn own_folder_counts_when_runtime_looks_there_first() {
    let tree = Tree::new();
    let own = tree.root().join("own/cni");
    let (own_text, bin) = (own.to_str().unwrap(), tree.bin());
    let bin = bin.to_str().unwrap();
    let before = files(&tree.bin());
    let install = ["--beside-calico", "--own-folder", own_text];
    tree.install(&install).fails(&["a CNI call runs", "and not what is in", &format!("\"{own_text}\", \"{bin}\"")]);
    assert_eq!(files(&tree.bin()), before, "Calico's folder is left alone");
    tree.install(&["--status", "--own-folder", own_text]).fails(&["and not what is in"]);

    let both = ["--cni-bin-dir", own_text, "--cni-bin-dir", bin];
    tree.install(&[&install[..], &both].concat()).ok().says(&["already"]);
    tree.install(&[&["--status"][..], &both].concat()).ok().says(&[&format!("{own_text}/calico-ipam (Margay ")]);
    // calico-node does not write into the folder given with `--own-folder`, so it cannot overwrite the plugin there.
    tree.calico_writes("v3.29.0");
    tree.install(&[&["--status"][..], &both].concat()).ok();

    tree.install(&[&["--undo"][..], &both].concat()).ok().says(&["it was only there for Margay"]);
    assert!(!own.exists());
    assert_eq!(tree.version(), "v3.29.0");
}

#[test]
fn install_never_leaves_node_without_plugin() {
    let tree = Tree::new();
    let own = tree.root().join("own");
    let own = own.to_str().unwrap();
    tree.install(&["--beside-calico", "--own-folder", own, "--cni-bin-dir", own]).ok();
    // The runtime's folders contain no other plugin named `calico-ipam`.
    tree.install(&["--undo", "--cni-bin-dir", own]).fails(&["there is no other calico-ipam", "nothing was changed"]);
    tree.install(&["--status", "--cni-bin-dir", own]).ok();
}

#[test]
fn status_tells_of_newer_plugin_beside() {
    let tree = Tree::new();
    tree.install(&["--beside-calico"]).ok();
    let newer = tree.bin().join("margay-ipam");
    fs::write(&newer, "#!/bin/sh\necho margay-ipam 99.0.0\n").unwrap();
    fs::set_permissions(&newer, fs::Permissions::from_mode(0o755)).unwrap();
    let status = tree.install(&["--status"]).ok();
    assert!(status.err.starts_with("note: ") && status.err.contains("is Margay's 99.0.0"), "{}", status.err);
}
