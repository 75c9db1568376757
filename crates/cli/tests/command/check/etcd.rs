//! Tests `margay ipam check` on a cluster.

use serde_json::{Value, json};

use crate::check::codes;
use crate::common::{Done, margay};
use crate::support::Etcd;

#[test]
fn check_repairs_and_reports_on_cluster() {
    let etcd = Etcd::start().unwrap();
    let url = etcd.url().replace("http:", "etcd:");
    let on = |args: &str| -> Done {
        let options = ["--store", &url, "--cni-conf-dir", "/nowhere"];
        margay(options.into_iter().chain(args.split(' ')))
    };
    on("pool create main 10.65.0.0/16").answer();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The cluster has more handles than fit in one page. Half of the cluster's handles are stray: no address is held
    // under them.
    runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        let mut allocations = vec![Value::Null; 64];
        let mut attributes = Vec::new();
        for (number, allocation) in allocations.iter_mut().enumerate().take(40) {
            let handle = format!("net.c{number:02}");
            *allocation = number.into();
            attributes.push(json!({"handle_id": handle, "secondary": {"node": "node1"}}));
            let document = json!({"block": {"10.65.0.0/26": 1}, "deleted": false}).to_string();
            client.put(format!("/calico/ipam/v2/handle/{handle}"), document.clone(), None).await.unwrap();
            client.put(format!("/calico/ipam/v2/handle/stray{number:02}"), document, None).await.unwrap();
        }
        let free: Vec<usize> = (40..64).collect();
        let block = json!({"cidr": "10.65.0.0/26", "affinity": "host:node1", "allocations": allocations, "unallocated": free,
            "attributes": attributes, "sequenceNumber": 9, "sequenceNumberForAllocation": {}, "deleted": false});
        client.put("/calico/ipam/v2/assignment/ipv4/block/10.65.0.0-26", block.to_string(), None).await.unwrap();
        let pending = r#"{"state":"pending","deleted":false}"#;
        client.put("/calico/ipam/v2/host/node1/ipv4/block/10.65.0.0-26", pending, None).await.unwrap();
        let node = r#"{"kind":"Node","metadata":{"name":"node1"},"spec":{}}"#;
        client.put("/calico/resources/v3/projectcalico.org/nodes/node1", node, None).await.unwrap();
    });
    let found = on("ipam check -o json");
    assert_eq!(found.code, 1, "{}", found.err);
    let found: Value = serde_json::from_str(&found.out).unwrap();
    let codes = codes(&found);
    assert_eq!((codes.len(), codes[0], codes[40]), (41, "AFF-02", "HND-02"), "{codes:?}");
    assert_eq!((&found["counts"]["held"], &found["counts"]["handles"]), (&json!(40), &json!(80)));

    let mended = on("ipam check --repair --apply -o json").json();
    assert_eq!((&mended["problems"], mended["repairs"].as_array().unwrap().len()), (&json!(0), 41));
    assert!(mended["repairs"].as_array().unwrap().iter().all(|repair| repair["outcome"] == "mended"), "{mended}");
    assert_eq!(on("ipam check -o json").json()["counts"]["handles"], 40);

    // The node `node1` is removed from the cluster, so a report of `ipam check` can be used to release its addresses.
    runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        let nodes = "/calico/resources/v3/projectcalico.org/nodes/";
        client.delete(format!("{nodes}node1"), None).await.unwrap();
        client.put(format!("{nodes}node2"), r#"{"kind":"Node","spec":{}}"#, None).await.unwrap();
    });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json").display().to_string();
    assert_eq!(on(&format!("ipam check --report {file}")).code, 1);
    let done = on(&format!("ipam release --from-report {file} -o json")).json();
    assert_eq!(done["released"].as_array().unwrap().len(), 40, "{done}");
    let last = on("ipam check --repair --apply -o json").json();
    assert_eq!(
        (&last["problems"], &last["counts"]["blocks"], &last["counts"]["handles"]),
        (&json!(0), &json!(0), &json!(0))
    );
}
