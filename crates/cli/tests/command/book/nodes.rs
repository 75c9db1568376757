//! Prepares the initial states of the book's pages about cluster nodes and about the main plugin.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::book::machine::Machine;
use crate::book::scenes::{NODE, cluster, put};
use crate::install::tree::Tree;
use crate::tested::plugin;

/// Prepares a node that has used Calico's addresses until now and on which Margay's plugin will be installed.
pub(super) fn beside_calico(heading: &str, machine: &mut Machine) {
    let folder = Path::new("/opt/cni/bin");
    match heading {
        "" => {
            machine.empty_folder("/opt/cni/bin");
            fs::copy(plugin(), folder.join("margay-ipam")).unwrap();
            Tree::write_program(folder, "v3.28.0");
            machine.put(
                "/etc/containerd/config.toml",
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/opt/cni/bin\"\n",
            );
            machine.start_etcd("10.0.0.1:2379");
            machine.put("node.yaml", NODE);
            machine.do_all(&[
                "margay --store etcd://10.0.0.1:2379 pool create main 10.65.0.0/16",
                "margay --store etcd://10.0.0.1:2379 apply -f node.yaml",
            ]);
            machine.put("/etc/cni/net.d/10-calico.conflist", CALICOS_NETWORK);
        }
        "Keep it there" => Tree::write_program(folder, "v3.29.1"),
        "Back" => machine.do_all(&["margay install --beside-calico"]),
        _ => {}
    }
}

/// Prepares a node that has Calico's main plugin and already gets its addresses from Margay.
pub(super) fn calico_plugin_replaced(heading: &str, machine: &mut Machine) {
    match heading {
        "" => {
            beside_calico("", machine);
            Tree::write_main_program(Path::new("/opt/cni/bin"), "v3.28.0");
            put(&cluster(), CLUSTER_INFORMATION.0, CLUSTER_INFORMATION.1);
            machine.put("/var/lib/calico/nodename", "node1");
            machine.do_all(&["margay install --beside-calico"]);
        }
        "Keep it there" => Tree::write_main_program(Path::new("/opt/cni/bin"), "v3.29.1"),
        "Back" => machine.do_all(&["margay install --beside-calico --main-plugin"]),
        _ => {}
    }
}

/// Starts the etcd of a cluster with two nodes on which Calico runs.
pub(super) fn beside_calicos_network(machine: &mut Machine) {
    machine.start_etcd("10.0.0.1:2379");
    machine.put("/etc/cni/net.d/10-calico.conflist", CALICOS_NETWORK);
    for node in ["node1", "node2"] {
        machine.put("node.yaml", NODE.replace("node1", node));
        machine.do_all(&["margay apply -f node.yaml"]);
    }
    put(&cluster(), CLUSTER_INFORMATION.0, CLUSTER_INFORMATION.1);
}

/// The key and the document of the cluster information that an installation of Calico writes.
const CLUSTER_INFORMATION: (&str, &str) = (
    "/calico/resources/v3/projectcalico.org/clusterinformations/default",
    r#"{"kind":"ClusterInformation","apiVersion":"projectcalico.org/v3","metadata":{"name":"default"},"spec":{"datastoreReady":true}}"#,
);

/// Prepares a machine with Margay's plugins and IP forwarding.
pub(super) fn with_main_plugin(machine: &mut Machine) {
    let folder = Path::new("/opt/cni/bin");
    machine.empty_folder("/opt/cni/bin");
    fs::copy(plugin(), folder.join("margay-ipam")).unwrap();
    symlink("margay-ipam", folder.join("margay-cni")).unwrap();
    fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
}

/// Calls the main plugin as a runtime does, for the containers `web` and `db`. The network configuration for the main
/// plugin is the file that the page shows.
pub(super) fn call_main_plugin(verb: &str, machine: &mut Machine) {
    let list = fs::read_to_string("/etc/cni/net.d/10-routed.conflist").unwrap();
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let mut conf = list["plugins"][0].clone();
    for member in ["name", "cniVersion"] {
        conf[member] = list[member].clone();
    }
    machine.put("routed.json", conf.to_string());
    for name in ["web", "db"] {
        let of_container = format!("CNI_CONTAINERID={name} CNI_NETNS=/run/netns/{name} CNI_IFNAME=eth0");
        machine.do_all(&[&format!(
            "CNI_COMMAND={verb} {of_container} CNI_PATH=/opt/cni/bin /opt/cni/bin/margay-cni <routed.json"
        )]);
    }
}

const CALICOS_NETWORK: &str = r#"{
  "name": "k8s-pod-network", "cniVersion": "0.3.1",
  "plugins": [{
    "type": "calico", "nodename": "node1", "ipam": {"type": "calico-ipam"},
    "datastore_type": "etcdv3", "etcd_endpoints": "http://10.0.0.1:2379"
  }]
}"#;
