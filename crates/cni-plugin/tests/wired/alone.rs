//! Tests of the main plugin on an etcd without Calico, which only `margay cluster init` and `margay node register` set
//! up.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use conformance::patient;
use serde_json::{Value, json};
use testkit::programs::command;
use testkit::server::dead_address;

use crate::call::Came;
use crate::own::{TEST_TIMEOUT, call, forwarding, make_world, set_and_run, succeed};
use crate::place::{ETCD, Place, shell};
use crate::replay::Stage;
use crate::{Kind, Mode, NamedTest, Test};

const CLUSTER: &str = "/calico/resources/v3/projectcalico.org/clusterinformations/default";
/// The file in which the plugins look for the node's name by default.
const NODENAME: &str = "/var/lib/calico/nodename";
/// The node's name, which is the host name of the test's machine in lower case.
const NODE: &str = "recorder.example";

/// Returns all tests of this module, each with its name.
pub(crate) fn all() -> impl Iterator<Item = (String, Test)> {
    let on = |mode: Mode, (name, test): NamedTest| -> (String, Test) {
        (
            format!("alone/{}/{name}", if mode == Mode::Child { "child" } else { "in_process" }),
            Box::new(move || set_and_run("plain", Kind::Etcd, mode, test)),
        )
    };
    [
        on(Mode::InProcess, named!(cluster_reaches_world)),
        on(Mode::Child, named!(cluster_reaches_world)),
        on(Mode::InProcess, named!(rules_go_when_calico_comes)),
        on(Mode::InProcess, named!(rules_are_left_to_felix_of_machine)),
        on(Mode::InProcess, named!(rules_follow_pool_commands)),
        on(Mode::InProcess, named!(del_succeeds_after_failed_setup)),
        on(Mode::Child, named!(del_succeeds_after_failed_setup)),
        on(Mode::InProcess, named!(del_fails_if_something_may_be_left)),
    ]
    .into_iter()
}

/// Deletes everything in etcd.
fn empty(stage: &Stage) {
    stage.books.all().keys().for_each(|key| stage.books.delete(key));
}

/// Runs `margay` on the machine's etcd, and returns its JSON answer.
#[track_caller]
fn margay(line: &str) -> Value {
    let mut margay = Command::new(command());
    margay.args(["--store", &format!("etcd://{ETCD}"), "-o", "json"]).args(line.split(' ')).stdin(Stdio::null());
    let output = margay.output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Sets up an empty etcd with the two commands alone, and returns the name of the cluster's nftables table.
fn set_up(stage: &Stage) -> String {
    empty(stage);
    let cluster = margay("cluster init --pool 10.65.0.0/16 --pool fd00:10:65::/48");
    margay("node register");
    assert_eq!(fs::read_to_string(NODENAME).unwrap(), NODE);
    format!("margay-etcd-{}", cluster["cluster"]["guid"].as_str().unwrap())
}

fn run(stage: &Stage, verb: &str, container: &str, netns: &str) -> Came {
    run_with(stage, verb, container, netns, &json!({}))
}

/// Runs a plugin call on a dual-stack network that reads the default node name file.
fn run_with(stage: &Stage, verb: &str, container: &str, netns: &str, more: &Value) -> Came {
    let mut conf = json!({"nodename_file": NODENAME, "ipam": {"type": "calico-ipam", "assign_ipv6": "true"}});
    conf.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    call(stage, verb, container, netns, &conf).run(patient(TEST_TIMEOUT))
}

/// Checks that a call has failed, and that the error's details name the given command.
#[track_caller]
fn fails(came: &Came, message: &str, next: &str) {
    assert_eq!(came.outcome["exit"], 1, "{}", came.outcome);
    let error = &came.outcome["stdout"];
    assert!(error["msg"].as_str().unwrap().contains(message), "{error}");
    assert!(error["details"].as_str().unwrap_or_default().contains(next), "{error}");
}

/// Checks that the store has no address, and the host no interface of a container.
#[track_caller]
fn nothing_assigned(stage: &Stage) {
    let scan = stage.scan();
    assert_eq!(scan["etcd"]["ipam"], json!({"addresses": {}, "handles": {}}));
    let links = scan["host"]["links"].as_array().unwrap();
    assert!(!links.iter().any(|link| link.as_str().unwrap().starts_with("cali")), "{links:?}");
    let documents = scan["etcd"]["documents"].as_object().unwrap();
    assert!(!documents.keys().any(|key| key.contains("/workloadendpoints/")), "{documents:?}");
}

fn cluster_reaches_world(stage: &mut Stage) {
    set_up(stage);
    make_world();
    shell("echo 0 >/proc/sys/net/ipv4/ip_forward");
    let addresses = |came: &Came| -> Vec<String> {
        let ips = succeed(came)["ips"].as_array().unwrap().clone();
        ips.iter().map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned()).collect()
    };
    let first = addresses(&run(stage, "ADD", "c1", "a"));
    assert_eq!(first.len(), 2);
    Place::add_netns("b");
    addresses(&run(stage, "ADD", "c2", "b"));
    assert_eq!(forwarding(), "1");
    for netns in ["a", "b"] {
        shell(&format!("ip netns exec {netns} ping -c 1 -W 5 192.0.2.2"));
    }
    for address in &first {
        shell(&format!("ip netns exec b ping -c 1 -W 5 {address}"));
    }
    for (container, netns) in [("c1", "a"), ("c2", "b")] {
        assert_eq!(run(stage, "DEL", container, netns).outcome["exit"], 0);
    }
    nothing_assigned(stage);
}

/// True if the kernel has this nftables table for IPv4.
fn has_table(name: &str) -> bool {
    let output = Command::new("nft").args(["list", "table", "ip", name]).output().unwrap();
    output.status.success()
}

/// Tests that the plugin removes its rules in the first ADD after Calico's node agent has started in the cluster.
fn rules_go_when_calico_comes(stage: &mut Stage) {
    let table = set_up(stage);
    succeed(&run(stage, "ADD", "c1", "a"));
    assert!(has_table(&table));
    let mut cluster = stage.books.all().remove(CLUSTER).unwrap();
    cluster["spec"]["clusterType"] = json!("margay,k8s,bgp");
    cluster["spec"]["calicoVersion"] = json!("v3.30.0");
    stage.books.put_all(&[(CLUSTER.to_owned(), cluster)].into());
    Place::add_netns("b");
    succeed(&run(stage, "ADD", "c2", "b"));
    assert!(!has_table(&table));
}

/// Tests that the plugin makes no rules where Calico's node agent runs for another cluster.
fn rules_are_left_to_felix_of_machine(stage: &mut Stage) {
    let table = set_up(stage);
    fs::create_dir_all("/run/calico").unwrap();
    fs::write("/run/calico/bird.ctl", "").unwrap();
    shell("echo 0 >/proc/sys/net/ipv4/ip_forward");
    succeed(&run(stage, "ADD", "c1", "a"));
    assert!(!has_table(&table));
    assert_eq!(forwarding(), "0");
    assert_eq!(margay("store status")["forwarding"], "felix");
}

/// Tests that pool commands change the rules on the machine on which they run.
fn rules_follow_pool_commands(stage: &mut Stage) {
    let table = set_up(stage);
    assert_eq!(margay("store status")["forwarding"], "margay");
    succeed(&run(stage, "ADD", "c1", "a"));
    assert!(has_table(&table));
    assert_eq!(run(stage, "DEL", "c1", "a").outcome["exit"], 0);
    margay("pool delete default-ipv4-ippool");
    assert!(!has_table(&table));
}

/// Tests that DEL succeeds after each ADD that failed because the cluster or the node was not set up.
fn del_succeeds_after_failed_setup(stage: &mut Stage) {
    empty(stage);
    let (node, cluster) = ("margay node register", "margay cluster init");
    let gone = |stage: &Stage, more: &Value| {
        let came = run_with(stage, "DEL", "c1", "a", more);
        assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
        nothing_assigned(stage);
    };
    fails(&run(stage, "ADD", "c1", "a"), "stat /var/lib/calico/nodename: no such file", node);
    gone(stage, &json!({}));
    margay("node register");
    fails(&run(stage, "ADD", "c1", "a"), "resource does not exist: ClusterInformation(default)", cluster);
    gone(stage, &json!({}));
    margay("cluster init --pool 10.65.0.0/16 --pool fd00:10:65::/48");
    margay(&format!("delete node {NODE}"));
    // Another program's error is passed on unchanged.
    let next = if stage.mode == Mode::Child { "" } else { node };
    fails(&run(stage, "ADD", "c1", "a"), &format!("resource does not exist: Node({NODE})"), next);
    gone(stage, &json!({}));
    margay("node register");
    let pod = json!({"kubernetes": {"kubeconfig": "/none"}, "policy": {"type": "k8s"}});
    let as_pod = |verb: &str| {
        let mut call = call(stage, verb, "c1", "a", &pod);
        call.env.insert("CNI_ARGS".to_owned(), "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web".to_owned());
        call.run(patient(TEST_TIMEOUT))
    };
    fs::write(stage.place.root.join("files/nodename"), NODE).unwrap();
    fails(&as_pod("ADD"), "stat /none: no such file or directory", "");
    assert_eq!(as_pod("DEL").outcome["exit"], 0);
    nothing_assigned(stage);
    succeed(&run(stage, "ADD", "c1", "a"));
}

/// Tests that DEL fails where the store cannot be read, and where the node name file is gone although something is
/// stored for the container.
fn del_fails_if_something_may_be_left(stage: &mut Stage) {
    let dead = json!({"etcd_endpoints": format!("http://{}", dead_address().unwrap())});
    let came = run_with(stage, "DEL", "c1", "a", &dead);
    assert_eq!(came.outcome["exit"], 1, "{}", came.outcome);
    set_up(stage);
    succeed(&run(stage, "ADD", "c1", "a"));
    let hidden = Path::new("/var/lib/calico/hidden");
    fs::rename(NODENAME, hidden).unwrap();
    fails(&run(stage, "DEL", "c1", "a"), "stat /var/lib/calico/nodename: no such file", "margay node register");
    let came = run(stage, "DEL", "another", "a");
    assert_eq!(came.outcome["exit"], 0, "{} {}", came.outcome, came.stderr);
    fs::rename(hidden, NODENAME).unwrap();
    assert_eq!(run(stage, "DEL", "c1", "a").outcome["exit"], 0);
    nothing_assigned(stage);
}
