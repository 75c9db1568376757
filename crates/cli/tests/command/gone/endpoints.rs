//! Tests how `margay gc` handles workload endpoints of containers missing from a list of attachments, and of departed
//! or renamed nodes.

use std::fs;

use kv::StoreExt;
use serde_json::json;

use crate::common::Lab;
use crate::common::endpoint::{Endpoint, named, stored};
use crate::gone::{attachment, give, give_dated, held, in_order, list, on, pool, revision, run};

/// Stores the workload endpoint of a pod. The pod has the name of its container.
fn store(lab: &Lab, node: &str, container: &str, address: &str) {
    let endpoint = Endpoint { node, container, pod: Some(("shop", container)), address };
    on(&lab.location, async |ipam| endpoint.store(ipam).await);
}

#[test]
fn endpoint_stays_when_pod_is_listed_and_other_address_goes() {
    for (number, lab) in Lab::each().iter().enumerate() {
        let at = &lab.location;
        pool(lab, &format!("198.18.{}.0/24", 104 + number));
        let first = give(at, "node1", "pod");
        let mut second = attachment("node1", "pod");
        second.interface = "net1".into();
        let second = give_dated(at, second, 3600);
        let alone = give(at, "node1", "alone");
        store(lab, "node1", "pod", &first);
        store(lab, "node1", "alone", &alone);
        let file = lab.folder().join("list");
        fs::write(&file, json!([{"containerID": "pod", "ifname": "eth0"}]).to_string()).unwrap();
        let gc = format!("gc --node node1 --attachments {} --apply -o json", file.display());
        let report = lab.margay(&gc).json();
        assert_eq!(list(&report, "freed"), [second, alone].into());
        assert_eq!(named(&report, "deleted_endpoints"), ["node1-k8s-alone-eth0"]);
        assert_eq!((held(at, "node1"), stored(lab)), ([first].into(), vec!["node1-k8s-pod-eth0".to_owned()]));
    }
}

#[test]
fn endpoints_of_dead_node_go_before_its_addresses() {
    for (number, lab) in Lab::each().iter().enumerate() {
        let at = &lab.location;
        pool(lab, &format!("198.18.{}.0/24", 106 + number));
        let mine = give(at, "node1", "mine");
        store(lab, "node1", "mine", &mine);
        store(lab, "stranger", "theirs", "198.51.100.7");
        let shown = lab.margay("gc --node stranger --free").answer();
        assert!(shown.contains("| shop      | stranger-k8s-theirs-eth0 | theirs    |"), "{shown}");
        let last = "would free 0 addresses, delete 1 workload endpoint and give up 0 blocks of node stranger; do it with --apply\n";
        assert!(shown.ends_with(last), "{shown}");
        assert_eq!(stored(lab).len(), 2, "a dry run");
        let done = lab.margay("gc --node stranger --free --apply -o json").json();
        assert_eq!(named(&done, "deleted_endpoints"), ["stranger-k8s-theirs-eth0"]);
        assert_eq!(stored(lab), ["node1-k8s-mine-eth0"]);
        assert_eq!(lab.margay("gc --node stranger --free").answer(), "node stranger has nothing in the store\n");

        // A workload endpoint's address can show that its node is this machine. The test uses the loopback address,
        // because every machine has it.
        store(lab, "former", "here", "127.0.0.1");
        let said = lab.margay("gc --node former --free --apply").failure();
        assert!(said.contains("an interface of this machine has its address 127.0.0.1"), "{said}");
        assert_eq!((stored(lab).len(), held(at, "node1")), (2, [mine].into()));
    }
}

#[test]
fn endpoints_of_renamed_node_get_new_name() {
    for (number, lab) in Lab::each().iter().enumerate() {
        let at = &lab.location;
        pool(lab, &format!("198.18.{}.0/24", 108 + number));
        let address = give(at, "old", "c1");
        store(lab, "old", "c1", &address);
        let before = revision(at);
        let renames = "rename workload endpoint shop/old-k8s-c1-eth0 to new--name-k8s-c1-eth0\n";
        let shown = lab.margay("gc --node old --move-to new-name").answer();
        assert!(shown.contains(&format!("would {renames}")), "{shown}");
        assert_eq!(revision(at), before, "a dry run changes nothing");
        let done = lab.margay("gc --node old --move-to new-name --apply -o json").json();
        let row = json!({"namespace": "shop", "from": "old-k8s-c1-eth0", "to": "new--name-k8s-c1-eth0"});
        assert_eq!(done["endpoints"], json!([row]));
        let moved = lab.margay("get wep -n shop new--name-k8s-c1-eth0 -o json").json();
        assert_eq!(
            (&moved["spec"]["node"], &moved["spec"]["ipNetworks"][0]),
            (&json!("new-name"), &json!(format!("{address}/32")))
        );
        assert_eq!(stored(lab), ["new--name-k8s-c1-eth0"]);
        in_order(at);
        let again = run(at, "gc --node old --move-to new-name --apply").answer();
        assert!(again.starts_with("node old has nothing in the store\n"), "{again}");
        on(at, async |ipam| ipam.store().get("/margay/v1/node").await.unwrap().unwrap());
    }
}
