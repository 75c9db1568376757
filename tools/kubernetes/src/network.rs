//! The network of the pods: its configuration, its plugins and its store.

use std::fmt;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::machine::NODE_ADDRESS;
use crate::programs;

/// The pools of the network.
pub(crate) const POOL: (&str, &str) = ("lab", "10.45.0.0/24");
pub(crate) const POOL_6: (&str, &str) = ("lab6", "fd00:45::/64");

const ETCD: &str = "http://127.0.0.1:2379";
/// The name of the network and of its file, as Calico's installer chooses them.
pub(crate) const CONFLIST: &str = "etc/cni/net.d/10-calico.conflist";

/// The main plugin of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// Margay's main plugin, as `calico` on etcd, else as `margay-cni`.
    Routed,
    /// The standard plugin `bridge` with Margay's IPAM plugin.
    Bridge,
    /// The standard plugins `bridge` and `host-local`, to compare with.
    HostLocal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Etcd,
    Redb,
    Sled,
}

impl Store {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Redb => "redb",
            Self::Sled => "sled",
        }
    }
}

/// What a run is about: the network's main plugin, its store, and whether the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) network: Network,
    pub(crate) store: Store,
    pub(crate) serve: bool,
    /// Whether the runtime asks the plugins for STATUS, for which the network has version 1.1.0. Debian's plugins do not
    /// know that version, so such a network has no portmap.
    pub(crate) status: bool,
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.network {
            Network::HostLocal => return f.write_str("bridge + host-local"),
            Network::Routed => f.write_str("calico")?,
            Network::Bridge => f.write_str("bridge")?,
        }
        let part = |is: bool, text: &'static str| if is { text } else { "" };
        write!(f, ", {}{}{}", self.store.name(), part(self.serve, ", daemon"), part(self.status, ", containerd 2"))
    }
}

impl Setup {
    pub(crate) fn is_margay(self) -> bool {
        self.network != Network::HostLocal
    }

    /// Whether the network has the standard plugin portmap; see [`Setup::status`].
    pub(crate) fn has_portmap(self) -> bool {
        !self.status || self.network != Network::Routed
    }

    pub(crate) fn store_url(self) -> String {
        match self.store {
            Store::Etcd => "etcd://127.0.0.1:2379".to_owned(),
            Store::Redb | Store::Sled => format!("{0}:///var/lib/margay/ipam.{0}", self.store.name()),
        }
    }

    /// Returns the file name of the main plugin.
    pub(crate) fn main_plugin(self) -> &'static str {
        match (self.network, self.store) {
            (Network::Routed, Store::Etcd) => "calico",
            (Network::Routed, _) => "margay-cni",
            (Network::Bridge | Network::HostLocal, _) => "bridge",
        }
    }

    /// Returns the network's configuration. The object `ipam` has additional members for its section `ipam`.
    ///
    /// Each pool has a bridge of its own: the standard plugin refuses to give a bridge a second address.
    pub(crate) fn conflist(self, ipam: &Value) -> Value {
        let bridge = format!("cni-{}", ipam["ipv4_pools"][0].as_str().unwrap_or(POOL.0));
        let mut main = match self.network {
            Network::Routed => json!({
                "policy": {"type": "k8s"},
                "kubernetes": {"kubeconfig": "/var/lib/kubernetes/plugin.conf"},
                "ipam": {"type": if self.store == Store::Etcd { "calico-ipam" } else { "margay-ipam" }},
            }),
            Network::Bridge => json!({
                "bridge": bridge,
                "isGateway": true,
                "hairpinMode": true,
                "ipam": {"type": "margay-ipam", "ipv4_pools": [POOL.0], "routes": [{"dst": "0.0.0.0/0"}]},
            }),
            Network::HostLocal => json!({
                "bridge": "cni-other",
                "isGateway": true,
                "hairpinMode": true,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.49.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]},
            }),
        };
        main["type"] = self.main_plugin().into();
        if self.is_margay() {
            let store = match self.store {
                Store::Etcd => json!({"datastore_type": "etcdv3", "etcd_endpoints": ETCD}),
                Store::Redb | Store::Sled => json!({
                    "datastore_type": self.store.name(),
                    "datastore_path": format!("/var/lib/margay/ipam.{}", self.store.name()),
                }),
            };
            main.as_object_mut().unwrap().extend(store.as_object().unwrap().clone());
            main["ipam"].as_object_mut().unwrap().extend(ipam.as_object().unwrap().clone());
        }
        if !self.has_portmap() {
            return json!({"cniVersion": "1.1.0", "name": "k8s-pod-network", "plugins": [main]});
        }
        let portmap = json!({"type": "portmap", "snat": true, "capabilities": {"portMappings": true}});
        json!({"cniVersion": "1.0.0", "name": "k8s-pod-network", "plugins": [main, portmap]})
    }

    /// Installs the plugins on the machine's disk. The network's configuration follows when its store is ready, because
    /// a runtime that asks no STATUS reports the node as ready once the file is there.
    pub(crate) fn write_files(disk: &Path) {
        let bin = disk.join("opt/cni/bin");
        for plugin in ["bridge", "host-local", "portmap", "loopback"] {
            testkit::copy::copy_program(programs::standard_plugins().join(plugin), &bin.join(plugin));
        }
        testkit::copy::copy_program(programs::margay("margay-ipam"), &bin.join("margay-ipam"));
        for name in ["calico", "calico-ipam", "margay-cni"] {
            symlink("margay-ipam", bin.join(name)).unwrap();
        }
    }

    /// Creates a pool for the network. On etcd, a bridged network takes only pools that no network of Calico's kind uses by
    /// itself.
    pub(crate) fn create_pool(self, cluster: &Cluster, pool: &str, cidr: &str) {
        let manual = (self.network == Network::Bridge && self.store == Store::Etcd).then_some("--manual");
        let words = ["pool", "create", pool, cidr].into_iter().chain(manual);
        cluster.margay(&words.collect::<Vec<_>>()).unwrap();
    }

    /// Prepares the network's store, and then writes the network's configuration.
    pub(crate) fn prepare_store(self, cluster: &Cluster) {
        let run = |words: &[&str]| {
            cluster.run(&[&["margay", "--store", &self.store_url()], words].concat());
        };
        if self.is_margay() {
            if (self.network, self.store) == (Network::Routed, Store::Etcd) {
                run(&["cluster", "init", "--pool", POOL.1, "--pool", POOL_6.1]);
            } else {
                for (pool, cidr) in [POOL, POOL_6] {
                    self.create_pool(cluster, pool, cidr);
                }
            }
            if self.store == Store::Etcd {
                run(&["cluster", "init"]);
                run(&["node", "register", "--kubernetes", "--address", NODE_ADDRESS]);
            }
        }
        cluster.set_network(&json!({}));
    }
}
