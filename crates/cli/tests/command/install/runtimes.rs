//! Tests how `margay install` finds the folders in which container runtimes look for plugins.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::install::tree::{Done, Tree};

/// Writes the configuration of a container runtime to a file and runs `margay install --status` with this file.
fn status(tree: &Tree, runtime: &str, text: &str) -> Done {
    let file = tree.root().join(runtime);
    fs::write(&file, text).unwrap();
    let none = tree.root().join("none");
    let (file, none) = (file.to_str().unwrap(), none.to_str().unwrap());
    let [containerd, crio] = if runtime == "containerd" { [file, none] } else { [none, file] };
    tree.install(&["--status", "-o", "json", "--containerd-config", containerd, "--crio-config", crio])
}

fn folders(done: &Done) -> Vec<PathBuf> {
    let json: Value = done.json();
    json["plugin_path"].as_array().unwrap().iter().map(|folder| folder.as_str().unwrap().into()).collect()
}

#[test]
fn containerd_is_asked_itself() {
    let tree = Tree::without_store();
    let bin = tree.bin();
    let parts = tree.root().join("parts");
    fs::create_dir(&parts).unwrap();
    let section = "[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = ";
    let done = status(&tree, "containerd", &format!("version = 2\n{section}\"{}\"\n", bin.display()));
    assert_eq!(folders(&done), std::slice::from_ref(&bin), "{}", done.err);
    assert!(done.err.contains("which is not Margay's"), "{}", done.err);
    // A file that containerd's main file imports overrides the main file.
    fs::write(parts.join("a.toml"), format!("version = 2\n{section}\"/elsewhere\"\n")).unwrap();
    let imports = format!("version = 2\nimports = [\"{}/*.toml\"]\n{section}\"{}\"\n", parts.display(), bin.display());
    let done = status(&tree, "containerd", &imports);
    assert_eq!(folders(&done), [PathBuf::from("/elsewhere")]);
    assert_eq!(folders(&status(&tree, "containerd", "version = 2\n")), [PathBuf::from("/opt/cni/bin")]);
    // Docker's containerd runs no pods, and its configuration file has the oldest format.
    for dockers in
        ["disabled_plugins = [\"cri\"]\n", "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n"]
    {
        assert_eq!(status(&tree, "containerd", dockers).json()["plugin_path_from"], "the default");
    }
    let broken = status(&tree, "containerd", "version = [hidden");
    broken.fails(&["cannot tell from ", "containerd config dump fails", "--cni-bin-dir"]);
}

#[test]
fn crio_list_and_last_configuration_part_win() {
    let tree = Tree::without_store();
    assert_eq!(folders(&status(&tree, "crio", "")), [PathBuf::from("/opt/cni/bin")]);
    let text = "[crio.network]\nplugin_dirs = [\"/a\", \"/b\"]\nplugin_dir = \"/old\"\n";
    assert_eq!(folders(&status(&tree, "crio", text)), ["/a", "/b", "/old"].map(PathBuf::from));
    let parts = tree.root().join("crio.d");
    fs::create_dir(&parts).unwrap();
    let own = tree.root().join("own");
    fs::create_dir(&own).unwrap();
    let later = format!("[crio.network]\nplugin_dirs = [\"{}\", \"{}\"]\n", own.display(), tree.bin().display());
    fs::write(parts.join("50-margay.conf"), later).unwrap();
    fs::write(parts.join("10-a.conf"), "[crio.network]\nplugin_dirs = [\"/c\"]\n").unwrap();
    let done = status(&tree, "crio", "");
    assert_eq!(folders(&done), [own, tree.bin()]);
    assert_eq!(done.json()["runs"]["file"], tree.target().to_str().unwrap());
    status(&tree, "crio", "[crio").fails(&["it is not valid TOML", "--cni-bin-dir"]);
}

#[test]
fn runtimes_are_asked_about_when_folders_differ() {
    let tree = Tree::without_store();
    let write = |name: &str, text: &str| {
        let file = tree.root().join(name);
        fs::write(&file, text).unwrap();
        file.display().to_string()
    };
    let containerd = write("containerd", "version = 2\n");
    let crio = write("crio", "[crio.network]\nplugin_dirs = [\"/a\"]\n");
    tree.install(&["--status", "--containerd-config", &containerd, "--crio-config", &crio]).fails(&[
        "this node has containerd and CRI-O",
        "/opt/cni/bin (containerd, ",
        "/a (CRI-O, ",
        "--cni-bin-dir",
    ]);
}

#[test]
fn own_folder_is_refused_when_containerd_knows_one_only() {
    let tree = Tree::without_store();
    let file = tree.root().join("containerd");
    let bin = tree.bin();
    let text = format!("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"{}\"\n", bin.display());
    fs::write(&file, text).unwrap();
    let own = tree.root().join("own");
    let (file, own_text) = (file.to_str().unwrap(), own.to_str().unwrap());
    let none = tree.root().join("none");
    let configs = ["--containerd-config", file, "--crio-config", none.to_str().unwrap()];
    tree.install(&[&["--beside-calico", "--own-folder", own_text][..], &configs].concat()).fails(&[
        "looks for plugins in one folder only",
        "install without --own-folder",
        "bin_dirs",
    ]);
    assert!(!own.exists());
}
