//! Tests how `margay ipam check` handles workload endpoints.

use serde_json::{Value, json};

use crate::check::{check, codes};
use crate::common::Lab;
use crate::common::endpoint::Endpoint;
use crate::habits::files::{document, with_file};

/// Returns the names of the workload endpoints in the store.
fn endpoints(lab: &Lab) -> Vec<String> {
    let list = lab.margay("get wep -A -o json").json();
    let name = |item: &Value| item["metadata"]["name"].as_str().unwrap().to_owned();
    list["items"].as_array().unwrap().iter().map(name).collect()
}

#[test]
fn check_deletes_only_endpoints_of_departed_nodes() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        let address = lab.assign("net", "c1");
        let own = Endpoint { node: "node1", container: "c1", pod: None, address: &address };
        lab.with_ipam(async |ipam| own.store(ipam).await);
        let sound = check(&lab, "").answer();
        assert!(sound.contains("\nFound 1 workload endpoints.\n"), "{sound}");
        assert_eq!(check(&lab, "-o json").json()["counts"]["endpoints"], 1);

        for node in ["node1", "dead"] {
            with_file(&lab, "apply", &document("Node", node, "  {}\n"));
        }
        let dead = Endpoint { node: "dead", container: "c7", pod: Some(("shop", "web")), address: "10.65.0.7" };
        let wrong = Endpoint { node: "node1", container: "c8", pod: Some(("shop", "cart")), address: &address };
        lab.with_ipam(async |ipam| {
            dead.store(ipam).await;
            wrong.store(ipam).await;
        });
        lab.margay("delete node dead").answer();
        let found = check(&lab, "");
        assert_eq!(found.code, 1);
        let row = format!("| WEP-02 | endpoint shop/node1-k8s-cart-eth0 | {address} is held under handle net.c1 ");
        assert!(found.out.contains(&row), "{}", found.out);
        let row = "| WEP-03 | endpoint shop/dead-k8s-web-eth0   | node dead is not registered ";
        assert!(found.out.contains(row) && found.out.contains("| --repair deletes the endpoint "), "{}", found.out);
        assert_eq!(endpoints(&lab).len(), 3);

        let mended = check(&lab, "--repair --apply -o json");
        assert_eq!(mended.code, 1, "{}", mended.err);
        let mended: Value = serde_json::from_str(&mended.out).unwrap();
        assert_eq!((codes(&mended), &mended["counts"]["endpoints"]), (vec!["WEP-02"], &json!(2)));
        assert_eq!(mended["repairs"][0]["outcome"], "mended");
        assert_eq!(endpoints(&lab), ["node1-cni-c1-eth0", "node1-k8s-cart-eth0"]);
        lab.margay("delete wep node1-k8s-cart-eth0 -n shop").answer();
        check(&lab, "").answer();
    }
}
