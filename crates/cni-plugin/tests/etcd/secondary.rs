//! Tests of a secondary network in an etcd that Calico also reads: which keys Margay adds to etcd, and how many
//! requests a call sends.

use etcd_client::{Client, GetOptions};
use serde_json::{Value, json};

use crate::lab::{Lab, runtime};
use crate::process::Call;
use crate::round_trips::asks;

const CLUSTER: &str = "/calico/resources/v3/projectcalico.org/clusterinformations/default";

/// Returns the configuration of a macvlan network with a pool that Calico does not use.
fn macvlan(lab: &Lab) -> Value {
    let pool = json!({
        "kind": "IPPool", "apiVersion": "projectcalico.org/v3", "metadata": {"name": "lan"},
        "spec": {"cidr": "10.78.0.0/24", "blockSize": 26, "nodeSelector": "all()", "assignmentMode": "Manual"},
    });
    lab.put("/calico/resources/v3/projectcalico.org/ippools/lan", &pool.to_string());
    let mut conf = lab.conf();
    conf["name"] = "macvlan".into();
    conf["type"] = "macvlan".into();
    conf["ipam"] = json!({"type": "margay-ipam", "ipv4_pools": ["lan"]});
    conf
}

/// Lists the etcd keys with this prefix that are block affinities in the network's pool.
fn keys_of(lab: &Lab, prefix: &str) -> Vec<String> {
    let url = lab.etcds[0].url();
    let keys = runtime().block_on(async {
        let all = GetOptions::new().with_prefix().with_keys_only();
        let answer = Client::connect([url], None).await.unwrap().get(prefix, Some(all)).await.unwrap();
        answer.kvs().iter().map(|kv| kv.key_str().unwrap().to_owned()).collect::<Vec<_>>()
    });
    keys.into_iter().filter(|key| key.contains("/10.78.")).collect()
}

#[test]
fn secondary_network_call_costs_no_more_than_calico() {
    let lab = Lab::start();
    let conf = macvlan(&lab);
    lab.put(CLUSTER, "{}");
    let pod = |container: &str| {
        Call::new("ADD", container, &conf).with("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop")
    };
    pod("c1").ok();
    assert_eq!(asks(&lab, &pod("c2")), (2, 0), "ADD");
    assert_eq!(asks(&lab, &Call::new("DEL", "c2", &conf)), (2, 0), "DEL");
    assert_eq!(keys_of(&lab, "/calico/ipam/v2/host/"), Vec::<String>::new());
    assert_eq!(keys_of(&lab, "/calico/ipam/v2/virtual/secondary@node-1/").len(), 1);
    Call::new("DEL", "c1", &conf).ok();
}

#[test]
fn secondary_network_moves_older_block_without_request() {
    let lab = Lab::start();
    let conf = macvlan(&lab);
    Call::new("ADD", "c1", &conf).ok();
    assert_eq!(keys_of(&lab, "/calico/ipam/v2/host/node-1/").len(), 1);
    lab.put(CLUSTER, "{}");
    assert_eq!(asks(&lab, &Call::new("ADD", "c2", &conf)), (2, 0), "the ADD that moves it");
    assert_eq!(keys_of(&lab, "/calico/ipam/v2/host/"), Vec::<String>::new());
    assert_eq!(asks(&lab, &Call::new("ADD", "c3", &conf)), (2, 0), "the next one");
    for container in ["c1", "c2", "c3"] {
        Call::new("DEL", container, &conf).ok();
    }
}

#[test]
fn secondary_network_pool_is_refused_when_calico_uses_it() {
    let lab = Lab::start();
    let mut conf = macvlan(&lab);
    lab.put(CLUSTER, "{}");
    conf["ipam"]["ipv4_pools"] = json!(["lab"]);
    let refusal = Call::new("ADD", "c1", &conf).run().refusal();
    assert_eq!(refusal.code, 7);
    refusal.says(&["pool lab is Calico's, too", "margay pool create NAME CIDR --manual", "margay get ippool lab"]);
}
