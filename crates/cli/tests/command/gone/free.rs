//! Tests `margay gc --node OLD --free` and `margay gc --gone`.

use std::collections::BTreeSet;
use std::fs;

use ipam_core::model::Owner;
use kv::{Deadline, StoreExt};
use serde_json::json;

use crate::common::Lab;
use crate::gone::{Cluster, TEST_TIMEOUT, attachment, give, give_dated, held, in_order, list, on, pool, revision, run};

const NODES: &str = "/calico/resources/v3/projectcalico.org/nodes";

/// Creates a store in which this machine's node is registered and another node has a block.
fn with_stranger(lab: &Lab, range: &str, own: &str) -> (String, String) {
    pool(lab, range);
    let mine = give(&lab.location, own, "mine");
    on(&lab.location, async |ipam| {
        ipam.store().delete(kv::Range::Key("/margay/v1/node".into())).await.unwrap();
    });
    let theirs = give(&lab.location, "stranger", "theirs");
    on(&lab.location, async |ipam| ipam.store().put("/margay/v1/node", own).await.unwrap());
    (mine, theirs)
}

#[test]
fn free_node_frees_addresses_and_gives_up_blocks() {
    for (number, lab) in Lab::each().iter().enumerate() {
        let at = &lab.location;
        let (mine, theirs) = with_stranger(lab, &format!("198.18.{}.0/24", 70 + number), "node1");
        let before = revision(at);
        let shown = lab.margay("gc --node stranger --free").answer();
        let last = "would free 1 address and give up 1 block of node stranger; do it with --apply\n";
        assert!(shown.contains(&format!("| stranger | {theirs} ")) && shown.ends_with(last), "{shown}");
        assert!(shown.contains("| net.theirs | eth0 "), "{shown}");
        assert_eq!(revision(at), before, "a dry run changes nothing");
        let done = lab.margay("gc --node stranger --free --apply -o json").json();
        assert_eq!(list(&done, "freed"), [theirs].into());
        assert_eq!(done["stores"][0]["gave_up"].as_array().unwrap().len(), 1, "{done}");
        assert_eq!((held(at, "stranger").len(), held(at, "node1")), (0, [mine].into()));
        in_order(at);
        let again = lab.margay("gc --node stranger --free --apply").answer();
        assert_eq!(again, "node stranger has nothing in the store\n");
    }
}

#[test]
fn free_node_is_refused_for_names_of_this_machine() {
    let [lab, _] = Lab::each();
    let at = &lab.location;
    let (_, theirs) = with_stranger(&lab, "198.18.72.0/24", "node1");
    let before = revision(at);
    let this = host::hostname();
    for (node, words) in [("node1", "it is the name of this machine"), (&this, "it is the name of this machine")] {
        let said = lab.margay(&format!("gc --node {node} --free --apply")).failure();
        assert!(said.contains("is this very machine") && said.contains(words) && said.contains("--move-to"), "{said}");
    }
    assert_eq!(revision(at), before);
    // The addresses of a node are not freed if one of them has this machine's boot id.
    let mut here = attachment("stranger", "here");
    here.boot = host::short_boot(&host::boot_id().unwrap());
    on(at, async |ipam| ipam.store().put("/margay/v1/node", "stranger").await.unwrap());
    let address = give_dated(at, here, 3600);
    on(at, async |ipam| ipam.store().put("/margay/v1/node", "node1").await.unwrap());
    let said = lab.margay("gc --node stranger --free --apply").failure();
    assert!(said.contains(&format!("its address {address} was given in this very boot")), "{said}");
    assert_eq!(held(at, "stranger"), BTreeSet::from([address, theirs]));
}

#[test]
fn free_node_is_refused_when_interface_here_has_address() {
    let [lab, _] = Lab::each();
    let at = &lab.location;
    // The loopback address 127.0.0.1 of the pool also belongs to the machine that runs the test.
    pool(&lab, "127.0.0.0/24");
    let wanted = ipam_core::assign::RequestedAddresses::these(["127.0.0.1".parse().unwrap()]);
    let request = ipam_core::assign::AssignRequest::new(attachment("dead", "c1"), wanted);
    on(at, async |ipam| ipam.assign(&request, Deadline::after(TEST_TIMEOUT)).await.unwrap());
    on(at, async |ipam| ipam.store().put("/margay/v1/node", "node1").await.unwrap());
    let said = lab.margay("gc --node dead --free --apply").failure();
    assert!(said.contains("an interface of this machine has its address 127.0.0.1"), "{said}");
    let file = lab.folder().join("nodes");
    fs::write(&file, "node1\n").unwrap();
    let done = lab.margay(&format!("gc --gone --nodes {} --apply -o json", file.display())).json();
    assert_eq!((&done["stores"], &done["skipped"][0]["node"]), (&json!([]), &json!("dead")), "{done}");
    assert_eq!(held(at, "dead"), ["127.0.0.1".to_owned()].into());
}

#[test]
fn free_nodes_that_are_gone_from_calico_cluster() {
    let cluster = Cluster::of_calicos();
    let at = &cluster.location;
    let mine = give(at, "node3", "margays");
    let of_three = held(at, "node3");
    let of_one = held(at, "node1");
    assert!(of_three.contains(&mine) && of_three.len() > 40);
    assert_eq!(cluster.margay("gc --gone --apply").answer(), "no node that is gone has anything in the store\n");
    let said = cluster.margay("gc --node node3 --free --apply").failure();
    assert!(said.contains("node node3 is registered in the store; nothing was freed"), "{said}");

    cluster.margay("delete node node3").answer();
    // Kubernetes may still have a node that the store lacks.
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let there = write("there", "node/node1\nnode/node2\nnode/node3\n");
    let none = cluster.margay(&format!("gc --gone --nodes {there} --apply")).answer();
    assert_eq!(none, "no node that is gone has anything in the store\n");
    let items: Vec<_> = ["node1", "node2"].map(|name| json!({"kind": "Node", "metadata": {"name": name}})).into();
    let gone = write("gone", &json!({"kind": "List", "items": items}).to_string());
    let before = revision(at);
    let shown = cluster.margay(&format!("gc --gone --nodes {gone} -o json")).json();
    assert_eq!(list(&shown, "candidates"), of_three);
    assert_eq!(revision(at), before, "a dry run changes nothing");

    for (name, text, words) in [
        ("empty", "\n", "it is empty"),
        ("table", "NAME   STATUS\nnode1  Ready\n", "line 1: \"NAME   STATUS\" is no node's name"),
        ("other", "east-1\neast-2\n", "has none of those that are registered in the store (2)"),
    ] {
        let said = cluster.margay(&format!("gc --gone --nodes {} --apply", write(name, text))).failure();
        assert!(said.contains(words) && said.contains("nothing was freed") && said.contains("hint: "), "{said}");
    }
    assert_eq!(revision(at), before);

    let done = cluster.margay("gc --gone --apply -o json").json();
    assert_eq!((list(&done, "freed"), &done["skipped"]), (of_three, &json!([])));
    assert_eq!((held(at, "node3").len(), held(at, "node1")), (0, of_one));
    let left = on(at, async |ipam| {
        let prefix = ipam_core::model::keys::affinities_prefix(&Owner::host("node3"), None).unwrap();
        ipam.store().list(kv::Range::Prefix(prefix)).await.unwrap().kvs.len()
    });
    assert_eq!(left, 0);
    in_order(at);
}

#[test]
fn free_is_refused_when_node_list_lacks_this_machine() {
    let cluster = Cluster::of_calicos();
    let at = &cluster.location;
    let this = host::hostname().to_lowercase();
    let node = json!({"kind": "Node", "apiVersion": "projectcalico.org/v3", "metadata": {"name": this}, "spec": {}});
    on(at, async |ipam| ipam.store().put(format!("{NODES}/{this}"), node.to_string()).await.unwrap());
    give(at, &this, "c1");
    cluster.margay("delete node node3").answer();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nodes");
    fs::write(&file, "node1\nnode2\n").unwrap();
    let said = cluster.margay(&format!("gc --gone --nodes {} --apply", file.display())).failure();
    assert!(said.contains(&format!("the list of nodes lacks this very machine, {this}")), "{said}");
    // `gc --gone` skips this machine even when the machine's node is no longer registered.
    cluster.margay(&format!("delete node {this}")).answer();
    let done = cluster.margay("gc --gone --apply -o json").json();
    assert_eq!(done["skipped"][0]["node"], this.as_str());
    assert_eq!((held(at, &this).len(), held(at, "node3").len()), (1, 0));
}

#[test]
fn free_needs_node_list_when_no_nodes_are_registered() {
    for (number, lab) in Lab::each().iter().enumerate() {
        let at = &lab.location;
        let (mine, theirs) = with_stranger(lab, &format!("198.18.{}.0/24", 80 + number), "node1");
        let said = lab.margay("gc --gone --apply").failure();
        assert!(said.contains("no node is registered in the store") && said.contains("--nodes FILE"), "{said}");
        let file = lab.folder().join("nodes");
        fs::write(&file, "other\n").unwrap();
        let gone = format!("gc --gone --nodes {} --apply -o json", file.display());
        assert!(run(at, &gone).failure().contains("lacks this very machine, node1"));
        fs::write(&file, "node1\nother\n").unwrap();
        assert_eq!(list(&run(at, &gone).json(), "freed"), [theirs].into());
        assert_eq!(held(at, "node1"), [mine].into());
        in_order(at);
    }
}
