//! Creates a store for a test, in a temporary folder or on an etcd, with network configurations and plugin calls that
//! use the store.

use std::path::{Path, PathBuf};
use std::{fmt, fs};

use datastore::Location;
use etcd_client::{Client, DeleteOptions};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::process::Call;
use crate::programs::drivers;
use crate::server::Etcd;

/// A kind of store: on an embedded engine or on etcd.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Engine {
    name: &'static str,
    /// The file that contains the engine's rows, as a path relative to the store's folder.
    pub file: &'static str,
}

/// The embedded engines.
pub const ENGINES: [Engine; 2] = [Engine::SLED, Engine::REDB];

impl Engine {
    pub const SLED: Self = Self::new("sled", "sled/db");
    pub const REDB: Self = Self::new("redb", "db.redb");
    /// The store kind `etcd`. The field `file` is empty, because no test reads the data files of an etcd server.
    const ETCD: Self = Self::new("etcd", "");

    pub const fn new(name: &'static str, file: &'static str) -> Self {
        Self { name, file }
    }

    /// Returns the engine's name as it is written in network configurations.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the other of the two embedded engines: redb for sled, sled for redb.
    pub fn other(self) -> Self {
        ENGINES.into_iter().find(|engine| *engine != self).unwrap()
    }

    /// Returns the location of a store in the given folder.
    pub fn at(self, folder: &Path) -> Location {
        drivers().of_engine(self.name, folder).unwrap()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The key of the node that every configuration in a lab uses, and the node's document as Calico writes it.
const NODE: (&str, &str) = (
    "/calico/resources/v3/projectcalico.org/nodes/node-1",
    r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-1"},"spec":{},"status":{}}"#,
);

/// A temporary folder and a store, which is in this folder or on etcd servers. Dropping the `Lab` removes its temporary
/// folder and ends its etcd servers.
#[derive(Debug)]
pub struct Lab {
    pub engine: Engine,
    pub root: TempDir,
    /// The path of an embedded store's folder, which may not exist yet.
    pub store: PathBuf,
    pub etcds: Vec<Etcd>,
    /// Additional fields for the configurations that use an embedded store, for example `log_level`.
    pub members: Value,
}

impl Lab {
    /// Creates a `Lab` (a test store) whose embedded store does not exist yet.
    pub fn new(engine: Engine) -> Self {
        let root = tempfile::tempdir().unwrap();
        let store = root.path().join("store");
        Self { engine, root, store, etcds: Vec::new(), members: gateway() }
    }

    /// Creates a `Lab` (a test store) with an embedded store that has one pool with the name `lab`.
    pub fn with_pool(engine: Engine, cidr: &str) -> Self {
        let lab = Self::new(engine);
        lab.pool("lab", cidr);
        lab
    }

    /// Creates a `Lab` (a test store) on the given etcd servers without writing anything to them.
    pub fn on_empty(etcds: Vec<Etcd>) -> Self {
        Self { etcds, ..Self::new(Engine::ETCD) }
    }

    /// Creates a `Lab` (a test store) on the given etcd servers, with a registered node and a pool with the name `lab`.
    pub fn on(etcds: Vec<Etcd>) -> Self {
        let lab = Self::on_empty(etcds);
        // Deletes the hint files of earlier test stores whose etcd servers used the same ports: an outdated hint would
        // cost a plugin call one more request.
        hints_about(&lab.location()).iter().for_each(|hint| fs::remove_file(hint).unwrap());
        lab.put(NODE.0, NODE.1);
        lab.pool("lab", "10.77.0.0/24");
        lab
    }

    /// Creates a `Lab` (a test store) on a newly started etcd, with a registered node and a pool with the name `lab`.
    pub fn start() -> Self {
        Self::on(vec![Etcd::start().unwrap()])
    }

    /// Returns the first etcd server of this test store.
    pub fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcds[0]
    }

    /// Writes a key to etcd, without any code of Margay.
    pub fn put(&self, key: &str, value: &str) {
        let url = self.etcds[0].url();
        runtime().block_on(async {
            Client::connect([url], None).await.unwrap().put(key, value, None).await.unwrap();
        });
    }

    /// Deletes all keys with the given prefix from etcd.
    pub fn erase(&self, prefix: &str) {
        let url = self.etcds[0].url();
        runtime().block_on(async {
            let all = DeleteOptions::new().with_prefix();
            Client::connect([url], None).await.unwrap().delete(prefix, Some(all)).await.unwrap();
        });
    }

    pub fn location(&self) -> Location {
        if self.engine != Engine::ETCD {
            return self.engine.at(&self.store);
        }
        let hosts: Vec<_> = self.etcds.iter().map(|etcd| etcd.address().to_string()).collect();
        stores::at(&format!("etcd://{}", hosts.join(","))).unwrap()
    }

    /// Returns the path of the file that the processes of this host lock while they use a store on etcd.
    pub fn lock_file(&self) -> PathBuf {
        self.root.path().join("ipam.lock")
    }

    /// Returns a network configuration that uses this test store: a bridge network for an embedded store, a Calico
    /// network for etcd.
    pub fn conf(&self) -> Value {
        if self.engine != Engine::ETCD {
            return self.conf_of("bridge");
        }
        let urls: Vec<_> = self.etcds.iter().map(Etcd::url).collect();
        self.conf_at(&urls)
    }

    /// Returns the configuration of a Calico network with the etcd endpoints `urls` and with debug logging.
    pub fn conf_at(&self, urls: &[String]) -> Value {
        json!({
            "cniVersion": "1.0.0",
            "name": "net1",
            "type": "calico",
            "nodename": "node-1",
            "datastore_type": "etcdv3",
            "etcd_endpoints": urls.join(","),
            "ipam_lock_file": self.lock_file(),
            "log_level": "debug",
            "ipam": {"type": "calico-ipam"},
        })
    }

    /// Returns the configuration of a network with the plugin type `plugin` on an embedded store, for CNI version
    /// 1.0.0.
    pub fn conf_of(&self, plugin: &str) -> Value {
        self.conf_with(plugin, json!({}))
    }

    /// Returns the configuration of [`conf_of`](Self::conf_of) with additional fields in its `ipam` section.
    pub fn conf_with(&self, plugin: &str, ipam: Value) -> Value {
        conf_having(&self.members, self.engine, &self.store, plugin, ipam)
    }

    /// Returns an ADD call for a container in the network of [`conf`](Self::conf).
    pub fn add(&self, container: &str) -> Call {
        Call::new("ADD", container, &self.conf())
    }

    /// Returns a DEL call for a container in the network of [`conf`](Self::conf).
    pub fn del(&self, container: &str) -> Call {
        Call::new("DEL", container, &self.conf())
    }

    /// Checks that the store on etcd is consistent and usable: a repeated ADD of the container returns the same
    /// address, and two DELs remove all documents of the container.
    pub fn all_is_well(&self, container: &str) {
        let first = self.add(container).ok().address();
        assert_eq!(self.add(container).ok().address(), first);
        assert_eq!(self.books().count_of(&format!("net1.{container}")), 1);
        for _ in 0..2 {
            self.del(container).ok();
        }
        self.nothing_is_left();
        self.no_notes_are_left();
    }

    /// Checks that this machine has no record of a pending commit for this test store.
    pub fn no_notes_are_left(&self) {
        let left = notes_about(&self.location().to_string());
        assert!(left.is_empty(), "{left:?} are left");
    }
}

fn conf_having(members: &Value, engine: Engine, store: &Path, plugin: &str, mut ipam: Value) -> Value {
    ipam["type"] = "margay-ipam".into();
    let mut conf = json!({
        "cniVersion": "1.0.0",
        "name": "net1",
        "type": plugin,
        "nodename": "node-1",
        "datastore_type": engine.name(),
        "datastore_path": store,
        "ipam": ipam,
    });
    for (name, value) in members.as_object().unwrap() {
        conf[name] = value.clone();
    }
    conf
}

/// The configuration fields that make the bridge the containers' gateway.
fn gateway() -> Value {
    json!({ "isGateway": true })
}

/// Returns the configuration of a network on an embedded store, with the plugin type `plugin` and additional fields for
/// its `ipam` section. Needs no lab.
pub fn embedded_conf(engine: Engine, store: &Path, plugin: &str, ipam: Value) -> Value {
    conf_having(&gateway(), engine, store, plugin, ipam)
}

/// Returns a configuration for CHECK, with the addresses `cidrs` as its `prevResult`.
pub fn after(conf: &Value, cidrs: &[String]) -> Value {
    let mut conf = conf.clone();
    let ips: Vec<_> = cidrs.iter().map(|cidr| json!({"address": cidr})).collect();
    conf["prevResult"] = json!({"cniVersion": conf["cniVersion"], "ips": ips});
    conf
}

/// Returns the paths of the hint files that this machine keeps for a store.
pub fn hints_about(store: &Location) -> Vec<PathBuf> {
    files_with(&format!("\"{}\"", store.in_order()), "/run/margay/hints")
}

/// Returns the paths of the records of pending commits that this machine keeps for a store.
pub fn notes_about(store: &str) -> Vec<PathBuf> {
    files_with(store, agent::PENDING_COMMITS_FOLDER)
}

/// Returns the files in a folder that contain the given text.
fn files_with(text: &str, folder: &str) -> Vec<PathBuf> {
    let Ok(folder) = fs::read_dir(folder) else { return Vec::new() };
    let has_it = |bytes: Vec<u8>| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    // Other tests create and delete files in the folder with the hints, so reading a file may fail.
    folder.map(|file| file.unwrap().path()).filter(|path| fs::read(path).is_ok_and(has_it)).collect()
}

pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
