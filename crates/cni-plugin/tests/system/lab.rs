//! A store in a temporary folder, and configurations that name it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use datastore::Location;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::Call;
use crate::tested::drivers;

/// An engine that a store can be on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Engine {
    name: &'static str,
    /// The file that its rows are in, below the store's folder.
    pub(crate) file: &'static str,
}

pub(crate) const ENGINES: [Engine; 2] = [Engine::SLED, Engine::REDB];

impl Engine {
    pub(crate) const SLED: Self = Self::new("sled", "sled/db");
    pub(crate) const REDB: Self = Self::new("redb", "db.redb");

    pub(crate) const fn new(name: &'static str, file: &'static str) -> Self {
        Self { name, file }
    }

    /// Its name in configurations.
    pub(crate) fn name(self) -> &'static str {
        self.name
    }

    /// Another one.
    pub(crate) fn other(self) -> Self {
        ENGINES.into_iter().find(|engine| *engine != self).unwrap()
    }

    /// The location of a store in this folder.
    pub(crate) fn at(self, folder: &Path) -> Location {
        drivers().of_engine(self.name, folder).unwrap()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// A temporary folder with a place for a store.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) engine: Engine,
    pub(crate) root: TempDir,
    pub(crate) store: PathBuf,
}

impl Lab {
    /// Without a store.
    pub(crate) fn new(engine: Engine) -> Self {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        Self { engine, root, store }
    }

    /// With a store that has one pool, `lab`.
    pub(crate) fn with_pool(engine: Engine, cidr: &str) -> Self {
        let lab = Self::new(engine);
        lab.pool("lab", cidr);
        lab
    }

    /// Where the store is.
    pub(crate) fn location(&self) -> Location {
        self.engine.at(&self.store)
    }

    /// The configuration of a network of this type on the store, in CNI 1.0.0.
    pub(crate) fn conf(&self, plugin: &str) -> Value {
        self.conf_with(plugin, json!({}))
    }

    /// The same with more in its `ipam`.
    pub(crate) fn conf_with(&self, plugin: &str, ipam: Value) -> Value {
        conf_at(self.engine, &self.store, plugin, ipam)
    }

    /// ADD on a bridged network.
    pub(crate) fn add(&self, container: &str) -> Call {
        Call::new("ADD", container, &self.conf("bridge"))
    }

    /// DEL on a bridged network.
    pub(crate) fn del(&self, container: &str) -> Call {
        Call::new("DEL", container, &self.conf("bridge"))
    }
}

/// The configuration of a network of this type on a store, with more in its `ipam`.
pub(crate) fn conf_at(engine: Engine, store: &Path, plugin: &str, mut ipam: Value) -> Value {
    ipam["type"] = "margay-ipam".into();
    json!({
        "cniVersion": "1.0.0",
        "name": "net1",
        "type": plugin,
        "isGateway": true,
        "nodename": "node-1",
        "datastore_type": engine.name(),
        "datastore_path": store,
        "ipam": ipam,
    })
}

/// The configuration for CHECK: with the addresses of an earlier result.
pub(crate) fn after(conf: &Value, cidrs: &[String]) -> Value {
    let mut conf = conf.clone();
    let ips: Vec<_> = cidrs.iter().map(|cidr| json!({"address": cidr})).collect();
    conf["prevResult"] = json!({"cniVersion": conf["cniVersion"], "ips": ips});
    conf
}

/// A mounted file system; it is gone when this is.
#[derive(Debug)]
pub(crate) struct Mount {
    at: PathBuf,
}

impl Mount {
    /// A file system in memory, of this size. Only root can have one.
    pub(crate) fn tmpfs(at: &Path, size: &str) -> Self {
        let options = format!("size={size},mode=700");
        run("mount", &["-t", "tmpfs", "-o", &options, "margay-test", path(at)]);
        Self { at: at.to_owned() }
    }

    /// A folder once more, over itself, where nothing can be written.
    pub(crate) fn read_only(at: &Path) -> Self {
        run("mount", &["--bind", path(at), path(at)]);
        let mount = Self { at: at.to_owned() };
        mount.remount("bind,ro");
        mount
    }

    /// Changes its options.
    pub(crate) fn remount(&self, options: &str) {
        run("mount", &["-o", &format!("remount,{options}"), path(&self.at)]);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", path(&self.at)]).status();
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?} failed (this test needs root): {said}");
}
