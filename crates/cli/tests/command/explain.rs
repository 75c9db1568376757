//! Tests `margay ipam explain`.

use crate::common::Lab;
use kv::{Range, StoreExt};

#[test]
fn explain_matches_what_then_happens() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.88.0.0/30 --block-size 31").answer();
        lab.margay("pool create spare 10.89.0.0/30 --block-size 30 --manual").answer();
        lab.margay("pool create racks 10.90.0.0/30 --block-size 30 --node-selector rack=='b'").answer();
        let text = lab.margay("ipam explain --node node1").answer();
        assert!(text.starts_with("IPv4 for a container on node node1 (no labels)\n"), "{text}");
        for line in [
            "| main  | 10.88.0.0/30 | yes    | 0 of 4 in use; the node has 0 blocks with 0 free",
            "| racks | 10.90.0.0/30 | no     | its node selector rack=='b' does not match the node's labels: no labels",
            "| spare | 10.89.0.0/30 | no     | only for networks that name it (ipv4_pools, ipv6_pools): --pool spare",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert!(text.contains("from a new block that the node would claim: 10.88.0."), "{text}");
        for number in 0..4 {
            let before = lab.with_ipam(async |ipam| ipam.store().list(Range::All).await.unwrap());
            let report = lab.margay("ipam explain --node node1 -o json").json();
            let after = lab.with_ipam(async |ipam| ipam.store().list(Range::All).await.unwrap());
            assert_eq!(before, after, "nothing is written");
            let outcome = &report["outcome"];
            assert_eq!(outcome["source"], if number % 2 == 0 { "new" } else { "own" }, "{report}");
            assert_eq!((&outcome["pool"], &report["pools"][0]["in_use"]), (&"main".into(), &number.to_string().into()));
            assert_eq!(lab.assign("net", &format!("c{number}")), outcome["address"].as_str().unwrap());
        }
        let full = lab.margay("ipam explain --node node1").answer();
        assert!(full.contains("4 of 4 in use; the node has 2 blocks with 0 free"), "{full}");
        assert!(full.contains("it would get no address: ") && full.contains("margay pool create NAME CIDR"), "{full}");
        let named = lab.margay("ipam explain --node node1 --pool spare -o json").json();
        assert_eq!(named["outcome"]["pool"], "spare", "{named}");
        let obstacles: Vec<_> =
            named["pools"].as_array().unwrap().iter().filter_map(|pool| pool["obstacle"].as_str()).collect();
        assert_eq!(obstacles, ["not_requested"; 2]);
    }
}

#[test]
fn explain_says_what_would_help() {
    for lab in Lab::each() {
        lab.margay("pool create shops 10.88.0.0/30 --block-size 30 --namespace-selector tier=='web'").answer();
        let unknown = lab.margay("ipam explain --node node1").answer();
        assert!(unknown.contains("needs the namespace: --namespace NAME"), "{unknown}");
        let other = lab.margay("ipam explain --node node1 --namespace shop").answer();
        assert!(other.contains("projectcalico.org/name=shop; others are given with --namespace-label"), "{other}");
        let web = lab.margay("ipam explain --node node1 --namespace shop --namespace-label tier=web").answer();
        assert!(web.contains("it would get 10.88.0."), "{web}");
        let none = lab.margay("ipam explain --node node1 -6").answer();
        assert!(none.contains("create a pool of this address family with: margay pool create"), "{none}");
        let missing = lab.margay("ipam explain --node node1 --pool none").answer();
        assert!(missing.contains("list the pools with: margay pool list"), "{missing}");
        let wrong = lab.margay("ipam explain --node n --namespace a --namespace-label b").failure();
        assert!(wrong.contains("hint: write the label as NAME=VALUE"), "{wrong}");
    }
}
