//! Tests of the cluster network's sample configuration in `packaging/conflists`, which users copy.

use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::lab::Lab;
use crate::process::Call;
use testkit::programs::plugin;

#[test]
fn sample_network_serves_add_on_cluster() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/conflists/routed-etcd.conflist");
    let list: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let mut conf = list["plugins"][0].clone();
    assert_eq!((&conf["type"], &conf["ipam"]["type"]), (&"calico".into(), &"calico-ipam".into()));
    assert_eq!((&conf["datastore_type"], &conf["policy"]["type"]), (&"etcdv3".into(), &"k8s".into()));
    let members = conf.as_object_mut().unwrap();
    for file in ["etcd_ca_cert_file", "etcd_cert_file", "etcd_key_file"] {
        assert!(members.remove(file).is_some_and(|path| path.as_str().unwrap().starts_with("/etc/calico/")));
    }
    let kubeconfig = members.remove("kubernetes").unwrap()["kubeconfig"].take();
    assert_eq!(kubeconfig, "/etc/cni/net.d/calico-kubeconfig");

    // A real cluster has certificates, a Kubernetes API and an agent that writes the node's name; this test's etcd has
    // none of these.
    let lab = Lab::start();
    lab.put(
        "/calico/resources/v3/projectcalico.org/clusterinformations/default",
        r#"{"kind":"ClusterInformation","apiVersion":"projectcalico.org/v3","metadata":{"name":"default"},"spec":{"datastoreReady":true}}"#,
    );
    let own = json!({
        "name": list["name"], "cniVersion": "1.1.0", "etcd_endpoints": lab.etcds[0].url(), "nodename": "node-1",
        "nodename_file_optional": true, "ipam_lock_file": lab.lock_file(),
    });
    members.extend(own.as_object().unwrap().clone());
    let bin = lab.root.path();
    for name in ["calico", "calico-ipam"] {
        symlink(plugin(), bin.join(name)).unwrap();
    }
    let status = || Call::new("STATUS", "", &conf).with("CNI_PATH", bin.to_str().unwrap()).by(bin.join("calico"));
    status().ok();
    lab.erase("/calico/resources/v3/projectcalico.org/ippools/");
    status().run().refusal().says(&["cannot find a qualified ippool"]);
}
