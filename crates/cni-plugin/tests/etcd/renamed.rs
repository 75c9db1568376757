//! Tests of DEL on a node that was renamed after the ADD.

use serde_json::Value;

use crate::lab::Lab;
use crate::process::Call;

const NODES: &str = "/calico/resources/v3/projectcalico.org/nodes/";
/// A container id that is as long as the ids of real runtimes, and is unique in the cluster.
const UNIQUE: &str = "7b01ac197d53e947c33f89529a7ebf04cc3e24c601edf53e1dc872a1c8baa960";
/// The warning of a DEL that releases addresses of the node's old name.
const RELEASED: &str = "WARN released the container's addresses, although they were recorded under another node name";

/// Registers node-2 as a Node in etcd beside the old Node, and returns the network configuration with the new node
/// name.
fn renamed(lab: &Lab) -> Value {
    let node =
        r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"node-2"},"spec":{},"status":{}}"#;
    lab.put(&format!("{NODES}node-2"), node);
    let mut conf = lab.conf();
    conf["nodename"] = "node-2".into();
    conf
}

#[test]
fn renamed_node_releases_addresses_of_old_name() {
    let lab = Lab::start();
    let renamed = renamed(&lab);
    let del = |container: &str| Call::new("DEL", container, &renamed).ok().stderr;
    lab.add(UNIQUE).ok();
    let reported = del(UNIQUE);
    assert!(reported.contains(RELEASED), "{reported}");
    assert!(reported.contains("node=\"node-1\""), "{reported}");
    lab.nothing_is_left();
    // A short container id is not unique, so the id may belong to another container on another node.
    let address = lab.add("renamed-1").ok().address();
    let reported = del("renamed-1");
    let kept = "WARN this container ID has addresses on another node that is registered";
    assert!(reported.contains(kept), "{reported}");
    assert!(reported.contains(&address.to_string()) && !reported.contains("nothing is held"), "{reported}");
    assert_eq!(lab.books().count_of("net1.renamed-1"), 1);
    lab.erase(&format!("{NODES}node-1"));
    let reported = del("renamed-1");
    assert!(reported.contains(RELEASED), "{reported}");
    lab.nothing_is_left();
    let reported = del("renamed-1");
    assert!(!reported.contains("WARN"), "{reported}");
}
