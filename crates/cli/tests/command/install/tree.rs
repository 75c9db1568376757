//! Creates a node with an installed Calico in a temporary folder.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::Etcd;
use crate::tested::{command, plugin};

pub(crate) const NODE: &str = "node-1";

/// The files of a container runtime and of Calico on a node.
#[derive(Debug)]
pub(crate) struct Tree {
    root: TempDir,
    /// The cluster's etcd; `None` if the store is unreachable on purpose.
    etcd: Option<Etcd>,
}

#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Done {
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self
    }

    /// Checks that the command failed and that its error contains the given words.
    #[track_caller]
    pub(crate) fn fails(self, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(1), "{}{}", self.out, self.err);
        assert!(self.err.contains("error: ") && self.err.contains("\nhint: "), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in {}", self.err);
        }
        self
    }

    #[track_caller]
    pub(crate) fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.out.contains(word), "no {word:?} in {}{}", self.out, self.err);
        }
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// Returns each file under a folder with the properties that identify it: inode, mode, modification time and content.
pub(crate) fn files(folder: &Path) -> BTreeMap<PathBuf, (u64, u32, i64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        if metadata.is_dir() {
            found.insert(path.clone(), (0, metadata.mode(), 0, Vec::new()));
            found.extend(files(&path));
        } else {
            let content = fs::read(&path).unwrap_or_default();
            found.insert(path, (metadata.ino(), metadata.mode(), metadata.mtime_nsec(), content));
        }
    }
    found
}

impl Tree {
    /// Creates a node whose etcd has a pool.
    pub(crate) fn new() -> Self {
        let etcd = Etcd::start().unwrap();
        let url = etcd.url();
        let tree = Self::at(&url, Some(etcd));
        tree.put_document("Node", "nodes", NODE, &json!({}));
        // The pool's blocks contain one address each: with larger blocks, the plugins get a route that the bridge
        // plugin cannot set.
        tree.margay(&["pool", "create", "main", "10.78.0.0/24", "--block-size", "32", "--store", &tree.store()]).ok();
        tree
    }

    /// Creates a node with both Calico plugins, and an etcd that contains Calico's `ClusterInformation` of a ready
    /// datastore.
    pub(crate) fn with_main_plugin() -> Self {
        let tree = Self::new();
        tree.put_document("ClusterInformation", "clusterinformations", "default", &json!({"datastoreReady": true}));
        tree.configure(&tree.settings());
        tree.calico_writes_main("v3.28.0");
        tree
    }

    /// Returns the store settings for Calico's network. The setting `nodename_file_optional` is set, because no
    /// calico-node has written this file on the test's node.
    pub(crate) fn settings(&self) -> Value {
        json!({"datastore_type": "etcdv3", "etcd_endpoints": self.etcd_url(), "nodename_file_optional": true})
    }

    /// Writes a Calico document to etcd.
    pub(crate) fn put_document(&self, kind: &str, plural: &str, name: &str, spec: &Value) {
        let document =
            json!({"kind": kind, "apiVersion": "projectcalico.org/v3", "metadata": {"name": name}, "spec": spec});
        let key = format!("/calico/resources/v3/projectcalico.org/{plural}/{name}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut client = etcd_client::Client::connect([self.etcd_url()], None).await.unwrap();
            client.put(key, document.to_string(), None).await.unwrap();
        });
    }

    /// Creates a node whose store is unreachable.
    pub(crate) fn without_store() -> Self {
        Self::at(&format!("http://{}", crate::support::dead_address().unwrap()), None)
    }

    fn at(url: &str, etcd: Option<Etcd>) -> Self {
        let tree = Self { root: tempfile::tempdir().unwrap(), etcd };
        fs::create_dir(tree.bin()).unwrap();
        fs::create_dir(tree.networks()).unwrap();
        tree.calico_writes("v3.28.0");
        tree.configure(
            &json!({"datastore_type": "etcdv3", "etcd_endpoints": url, "policy": {"k8s_auth_token": "hidden"}}),
        );
        tree
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn bin(&self) -> PathBuf {
        self.root().join("bin")
    }

    pub(crate) fn networks(&self) -> PathBuf {
        self.root().join("net.d")
    }

    pub(crate) fn target(&self) -> PathBuf {
        self.bin().join("calico-ipam")
    }

    pub(crate) fn main_target(&self) -> PathBuf {
        self.bin().join("calico")
    }

    pub(crate) fn store(&self) -> String {
        self.etcd.as_ref().unwrap().url().replace("http:", "etcd:")
    }

    pub(crate) fn etcd_url(&self) -> String {
        self.etcd.as_ref().unwrap().url()
    }

    /// Writes Calico's IPAM plugin as calico-node does when it starts: under a temporary name, followed by a rename.
    pub(crate) fn calico_writes(&self, version: &str) {
        Self::write_program(&self.bin(), version);
    }

    /// Like [`Self::calico_writes`], but writes Calico's main plugin.
    pub(crate) fn calico_writes_main(&self, version: &str) {
        Self::write_main_program(&self.bin(), version);
    }

    /// Writes a stand-in for Calico's IPAM plugin into a folder; it prints its version and answers the CNI verb
    /// VERSION.
    pub(crate) fn write_program(folder: &Path, version: &str) {
        Self::write_program_as("calico-ipam", folder, version);
    }

    /// Like [`Self::write_program`], but writes a stand-in for Calico's main plugin.
    pub(crate) fn write_main_program(folder: &Path, version: &str) {
        Self::write_program_as("calico", folder, version);
    }

    fn write_program_as(name: &str, folder: &Path, version: &str) {
        let script = format!(
            "#!/bin/sh\ncase \"$1\" in -v) echo {version}; exit 0 ;; esac\n\
             echo '{{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.3.1\",\"1.0.0\"]}}'\n"
        );
        let unfinished = folder.join(format!("{name}.tmp"));
        fs::write(&unfinished, script).unwrap();
        fs::set_permissions(&unfinished, Permissions::from_mode(0o755)).unwrap();
        fs::rename(unfinished, folder.join(name)).unwrap();
    }

    /// Writes Calico's network configuration with these store settings.
    pub(crate) fn configure(&self, settings: &Value) {
        let mut plugin = json!({"type": "calico", "nodename": NODE, "ipam": {"type": "calico-ipam"}});
        plugin.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let list = json!({"name": "k8s-pod-network", "cniVersion": "0.3.1", "plugins": [plugin, {"type": "portmap"}]});
        fs::write(self.networks().join("10-calico.conflist"), list.to_string()).unwrap();
    }

    /// Runs a `margay` command without the options that point it to the test's folder tree.
    pub(crate) fn margay(&self, args: &[&str]) -> Done {
        self.command(args).output().unwrap().into()
    }

    /// Returns the `margay` command that [`Self::margay`] would run.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(command());
        command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").args(args);
        command
    }

    /// Returns the arguments of `margay install` on this tree, followed by `more`.
    pub(crate) fn args(&self, more: &[&str]) -> Vec<String> {
        let text = |path: PathBuf| path.display().to_string();
        let mut args = vec!["install".to_owned()];
        args.extend(more.iter().map(|&arg| arg.to_owned()));
        args.extend(["--cni-conf-dir".to_owned(), text(self.networks())]);
        if !more.iter().any(|arg| arg.starts_with("--cni-bin-dir") || arg.ends_with("-config")) {
            args.extend(["--cni-bin-dir".to_owned(), text(self.bin())]);
        }
        let takes_plugin = more.contains(&"--beside-calico") && !more.contains(&"--main-plugin");
        if takes_plugin && !more.contains(&"--plugin") {
            args.extend(["--plugin".to_owned(), text(plugin())]);
        }
        args
    }

    /// Runs `margay install` on the folder tree of this test's node, with the further arguments `more`.
    pub(crate) fn install(&self, more: &[&str]) -> Done {
        let args = self.args(more);
        self.margay(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Returns the version that the installed IPAM plugin prints.
    pub(crate) fn version(&self) -> String {
        Self::version_of(&self.target())
    }

    /// Returns the version that the installed main plugin prints.
    pub(crate) fn main_version(&self) -> String {
        Self::version_of(&self.main_target())
    }

    fn version_of(program: &Path) -> String {
        let output = Command::new(program).arg("-v").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().lines().next().unwrap().to_owned()
    }
}
