//! Tests that `margay gc` deletes workload endpoints together with the addresses of their containers.

use serde_json::json;

use super::{age_looks, assign_in, assign_now, gc, is_held, lab, list};
use crate::common::Lab;
use crate::common::container::Container;
use crate::common::endpoint::{Endpoint, named, stored};

/// Stores the workload endpoint of a pod on `node1`. The pod has the name of its container.
fn store(lab: &Lab, container: &str, address: &str) {
    let endpoint = Endpoint { node: "node1", container, pod: Some(("shop", container)), address };
    lab.with_ipam(async |ipam| endpoint.store(ipam).await);
}

#[test]
fn endpoint_goes_with_address_when_container_is_gone() {
    for (number, lab_) in Lab::each().iter().enumerate() {
        lab(lab_, &format!("198.18.{}.0/24", 100 + number));
        let (left, live) = (lab_.assign("net", "left"), lab_.assign("net", "live"));
        store(lab_, "left", &left);
        store(lab_, "live", &live);
        // The store has two more workload endpoints: one of another node, and one of another container on this node.
        let others = [("node2", "left"), ("node1", "other")];
        for (node, container) in others {
            let other = Endpoint { node, container, pod: None, address: "192.0.2.1" };
            lab_.with_ipam(async |ipam| other.store(ipam).await);
        }
        let all = stored(lab_);
        let container = Container::with(&live);
        let shown = gc(lab_, "--boot").answer();
        for text in [
            "| NAMESPACE | ENDPOINT            | CONTAINER |",
            "| shop      | node1-k8s-left-eth0 | left      |",
            "would free 1 address and delete 1 workload endpoint; do it with --apply\n",
        ] {
            assert!(shown.contains(text), "{text:?}: {shown}");
        }
        let planned = gc(lab_, "--boot -o json").json();
        let row = json!({"namespace": "shop", "name": "node1-k8s-left-eth0", "container": "left"});
        assert_eq!(planned["stores"][0]["endpoints"], json!([row]));
        assert_eq!((named(&planned, "deleted_endpoints").len(), stored(lab_)), (0, all.clone()), "a dry run");

        let done = gc(lab_, "--boot --apply").answer();
        assert!(done.contains("freed 1 address and deleted 1 workload endpoint\n"), "{done}");
        let kept: Vec<String> = all.into_iter().filter(|name| name != "node1-k8s-left-eth0").collect();
        assert_eq!((stored(lab_), is_held(lab_, &left)), (kept, false));
        drop(container);
        let report = gc(lab_, "--boot --apply -o json").json();
        assert_eq!(
            (list(&report, "freed"), named(&report, "deleted_endpoints")),
            (vec![&*live], vec!["node1-k8s-live-eth0".to_owned()])
        );
        assert_eq!(stored(lab_).len(), 2);
        assert!(gc(lab_, "--boot --apply").answer().starts_with("nothing to free"));
    }
}

#[test]
fn endpoint_needs_same_evidence_as_address() {
    let labs = Lab::each();
    let lab_ = &labs[0];
    lab(lab_, "198.18.102.0/24");
    let (gone, flushed) = (assign_now(lab_, "gone"), Container::empty());
    let kept = assign_in(lab_, "flushed", Some(&flushed.netns()));
    store(lab_, "gone", &gone);
    store(lab_, "flushed", &kept);
    let first = gc(lab_, "--netns --apply -o json").json();
    assert_eq!((list(&first, "waiting"), named(&first, "endpoints").len()), (vec![&*gone], 0), "one look");
    age_looks(lab_, 61);
    let second = gc(lab_, "--netns --apply -o json").json();
    assert_eq!(named(&second, "deleted_endpoints"), ["node1-k8s-gone-eth0"]);
    assert_eq!(stored(lab_), ["node1-k8s-flushed-eth0"]);
}
