//! Tests `margay cluster init` and `margay node register`, on a real etcd and on embedded stores.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::{Done, Lab, margay};
use crate::support::Etcd;

const CLUSTER: &str = "/calico/resources/v3/projectcalico.org/clusterinformations/default";
const NODE: &str = "/calico/resources/v3/projectcalico.org/nodes/node1";

/// An empty etcd for one test.
struct Cluster(Etcd);

impl Cluster {
    fn new() -> Self {
        Self(Etcd::start().unwrap())
    }

    fn url(&self) -> String {
        self.0.url().replace("http:", "etcd:")
    }

    fn margay(&self, args: &str) -> Done {
        margay(["--store", &self.url()].into_iter().chain(args.split(' ')))
    }

    fn run<T>(&self, work: impl AsyncFnOnce(&mut etcd_client::Client) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { work(&mut etcd_client::Client::connect([self.0.url()], None).await.unwrap()).await })
    }

    fn put(&self, key: &str, value: &Value) {
        self.run(async |client| drop(client.put(key, value.to_string(), None).await.unwrap()));
    }

    fn get(&self, key: &str) -> Value {
        let found = self.run(async |client| client.get(key, None).await.unwrap());
        found.kvs().first().map_or(Value::Null, |kv| serde_json::from_slice(kv.value()).unwrap())
    }

    /// The revision of etcd, which only a write changes.
    fn revision(&self) -> i64 {
        self.run(async |client| client.get("x", None).await.unwrap().header().unwrap().revision())
    }
}

#[test]
fn cluster_init_sets_up_empty_etcd_once() {
    let etcd = Cluster::new();
    let refused = etcd.margay("cluster init").failure();
    assert!(refused.contains("margay cluster init --pool 10.65.0.0/16"), "{refused}");
    let args = "cluster init --pool 10.65.0.0/16 --pool fd00:10:65::/48 -o json";

    let before = etcd.revision();
    let dry = etcd.margay(&format!("{args} --dry-run")).json();
    assert_eq!((&dry["cluster"]["state"], &dry["dry_run"]), (&json!("created"), &json!(true)));
    assert_eq!(etcd.revision(), before);

    let made = etcd.margay(args).json();
    assert_eq!(etcd.revision(), before + 1, "one commit");
    let states = |answer: &Value| -> Vec<String> {
        let pools = answer["pools"].as_array().unwrap().iter().map(|pool| &pool["state"]);
        std::iter::once(&answer["cluster"]["state"]).chain(pools).map(|state| state.as_str().unwrap().into()).collect()
    };
    assert_eq!(states(&made), ["created", "created", "created"]);
    assert_eq!(made["forwarding"], "margay");

    let cluster = etcd.get(CLUSTER);
    let guid = cluster["spec"]["clusterGUID"].as_str().unwrap();
    assert!(guid.len() == 32 && guid.bytes().all(|digit| digit.is_ascii_hexdigit()), "{guid}");
    assert_eq!(cluster["spec"], json!({"clusterGUID": guid, "clusterType": "margay", "datastoreReady": true}));
    assert_eq!((&cluster["kind"], &cluster["metadata"]["name"]), (&json!("ClusterInformation"), &json!("default")));
    assert!(cluster["metadata"]["uid"].is_string() && cluster["metadata"]["creationTimestamp"].is_string());
    let spec = |name: &str| {
        let pool = etcd.get(&format!("/calico/resources/v3/projectcalico.org/ippools/{name}"));
        pool["spec"].clone()
    };
    let (four, six) = (spec("default-ipv4-ippool"), spec("default-ipv6-ippool"));
    assert_eq!((&four["natOutgoing"], &six["natOutgoing"]), (&json!(true), &Value::Null));
    assert_eq!((&four["ipipMode"], &four["vxlanMode"]), (&json!("Never"), &json!("Never")));
    assert_eq!((&four["blockSize"], &six["blockSize"]), (&json!(26), &json!(122)));

    assert_eq!(states(&etcd.margay(args).json()), ["exists", "exists", "exists"]);
    assert_eq!(etcd.margay("cluster init -o json").json()["pools"].as_array().unwrap().len(), 2);
    let other = etcd.margay("cluster init --pool 10.66.0.0/16").failure();
    assert!(other.contains("has the range 10.65.0.0/16, not 10.66.0.0/16"), "{other}");
    assert_eq!(etcd.revision(), before + 1, "what exists stays as it is");
}

#[test]
fn cluster_init_takes_nat_and_block_sizes() {
    let etcd = Cluster::new();
    let args = "--pool 10.65.0.0/16 --pool fd00:10:65::/48 --nat-outgoing false --block-size 28 --block-size 124";
    let made = etcd.margay(&format!("cluster init {args} -o json")).json();
    for (pool, size) in made["pools"].as_array().unwrap().iter().zip([28, 124]) {
        assert_eq!((&pool["block_size"], &pool["nat_outgoing"]), (&json!(size), &json!(false)));
    }
    for (args, reason) in [
        ("--pool 10.65.0.0/16 --pool 10.66.0.0/16", "second range of its family"),
        ("--pool 10.65.0.0/16 --block-size 122", "no --pool can have blocks of /122"),
        ("--pool 169.254.0.0/16", "Link Local"),
    ] {
        let refused = etcd.margay(&format!("cluster init {args}")).failure();
        assert!(refused.contains(reason), "{args}: {refused}");
    }
}

#[test]
fn cluster_init_leaves_calicos_documents_alone() {
    let etcd = Cluster::new();
    let calico = |ready: bool| {
        json!({"kind": "ClusterInformation", "apiVersion": "projectcalico.org/v3", "metadata": {"name": "default"},
            "spec": {"clusterGUID": "9d9b893421de4f8e93091c560c9d80da", "clusterType": "k8s,bgp",
                "calicoVersion": "v3.30.0", "datastoreReady": ready}})
    };
    etcd.put(CLUSTER, &calico(false));
    let locked = etcd.margay("cluster init --pool 10.65.0.0/16").failure();
    assert!(locked.contains("datastoreReady") && locked.contains("calicoctl datastore migrate unlock"), "{locked}");
    etcd.put(CLUSTER, &calico(true));
    etcd.margay("pool create main 10.65.0.0/16").answer();
    let before = etcd.revision();
    let done = etcd.margay("cluster init --pool 10.65.0.0/16 -o json");
    assert!(done.err.contains("this is Calico's cluster (clusterType k8s,bgp, Calico v3.30.0)"), "{}", done.err);
    let answer = done.json();
    assert_eq!((&answer["cluster"]["state"], &answer["forwarding"]), (&json!("exists"), &json!("felix")));
    assert_eq!((&answer["pools"][0]["name"], &answer["pools"][0]["state"]), (&json!("main"), &json!("exists")));
    assert_eq!((etcd.get(CLUSTER), etcd.revision()), (calico(true), before));
    let status = etcd.margay("store status").answer();
    assert!(status.contains("\nForwarding and NAT: Felix\n"), "{status}");
}

#[test]
fn cluster_init_makes_only_pools_in_embedded_store() {
    for lab in Lab::each() {
        assert!(lab.margay("cluster init").failure().contains("there is no store"));
        assert!(!lab.exists());
        let made = lab.margay("cluster init --pool 10.65.0.0/16 -o json").json();
        assert_eq!((&made["cluster"], &made["pools"][0]["state"]), (&Value::Null, &json!("created")));
        let status = lab.margay("store status").answer();
        assert!(status.contains("\nForwarding and NAT: Margay's plugin\n"), "{status}");
    }
}

#[track_caller]
fn text_and_mode(file: &Path) -> (String, u32) {
    let mode = fs::metadata(file).unwrap().permissions().mode();
    (fs::read_to_string(file).unwrap(), mode & 0o777)
}

#[test]
fn node_register_writes_document_and_file() {
    let (etcd, folder) = (Cluster::new(), tempfile::tempdir().unwrap());
    let file = folder.path().join("var/lib/calico/nodename");
    let register = |args: &str| etcd.margay(&format!("node register --nodename-file {} {args}", file.display()));

    let before = etcd.revision();
    let dry = register("--node node1 --dry-run -o json").json();
    assert_eq!((&dry["state"], &dry["nodename_file"]["state"]), (&json!("created"), &json!("written")));
    assert!(!file.exists() && etcd.revision() == before);

    let made = register("--node node1 --address 192.0.2.10 --label rack=a --kubernetes");
    assert!(made.code == 0 && made.err.contains("margay cluster init"), "{} {}", made.out, made.err);
    assert_eq!(text_and_mode(&file), ("node1".to_owned(), 0o644));
    let node = etcd.get(NODE);
    assert_eq!(node["metadata"]["labels"], json!({"rack": "a"}));
    let spec = json!({
        "addresses": [{"address": "192.0.2.10", "type": "CalicoNodeIP"}],
        "orchRefs": [{"nodeName": "node1", "orchestrator": "k8s"}],
    });
    assert_eq!(node["spec"], spec);

    let (before, again) = (etcd.revision(), register("-o json").json());
    assert_eq!((&again["node"], &again["state"]), (&json!("node1"), &json!("exists")), "the name in the file");
    assert_eq!(etcd.revision(), before);

    fs::write(&file, "node1\n").unwrap();
    assert_eq!(register("--label zone=b -o json").json()["state"], "changed");
    assert_eq!(text_and_mode(&file).0, "node1", "Calico's plugin takes a line break for a part of the name");
    assert_eq!(etcd.get(NODE)["metadata"]["labels"], json!({"rack": "a", "zone": "b"}));
    assert_eq!(etcd.get(NODE)["spec"], spec);
}

#[test]
fn node_register_refuses_name_of_another_node() {
    let (etcd, folder) = (Cluster::new(), tempfile::tempdir().unwrap());
    let file = folder.path().join("nodename");
    fs::write(&file, "node1").unwrap();
    let register = |args: &str| etcd.margay(&format!("node register --nodename-file {} {args}", file.display()));
    let before = etcd.revision();
    let refused = register("--node node2").failure();
    assert!(refused.contains("names the node node1, not node2") && refused.contains("leave out --node"), "{refused}");
    fs::remove_file(&file).unwrap();
    let refused = register("--node Node_2").failure();
    assert!(refused.contains("\"Node_2\" cannot be the name of a node"), "{refused}");
    assert!(!file.exists() && etcd.revision() == before);
}
