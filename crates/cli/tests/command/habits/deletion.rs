//! Tests that a pool can be deleted only while none of its addresses is in use.

use ipam_core::model::Owner;
use kv::Deadline;
use serde_json::json;

use crate::common::{Lab, TEST_TIMEOUT};
use crate::habits::files::{put, stored};

const ADVICE: &str =
    "hint: stop the containers that use the addresses, or release the addresses with: margay ipam release";

#[test]
fn pool_deletion_says_where_addresses_are_in_use() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24 --block-size 30").answer();
        let ips: Vec<String> = (0..5).map(|n| lab.assign("net", &format!("c{n}"))).collect();
        for args in ["pool delete main", "delete ippool main"] {
            let refused = lab.margay(args).failure();
            assert!(
                refused.contains("pool main still has 5 addresses in use: ") && refused.contains(ADVICE),
                "{refused}"
            );
            let full = refused.matches("4 in 10.65.0.").count();
            let rest = refused.matches("1 in 10.65.0.").count();
            assert_eq!((full, rest, refused.matches("/30 (node1)").count()), (1, 1, 2), "{refused}");
            assert_eq!(lab.margay("pool list -o json").json()["pools"][0]["disabled"], false);
        }
        for ip in &ips {
            lab.margay(&format!("ipam release --ip {ip}")).answer();
        }
        lab.margay("delete ippool main").answer();
        let left: Vec<String> = stored(&lab).into_keys().filter(|key| key.starts_with("/calico/")).collect();
        assert_eq!(left, [""; 0]);
    }
}

#[test]
fn pool_deletion_takes_empty_blocks_and_stale_affinities() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        lab.margay("pool create other 10.66.0.0/24").answer();
        let soon = || Deadline::after(TEST_TIMEOUT);
        lab.with_ipam(async |ipam| {
            for (owner, cidr) in [("a", "10.65.0.0/25"), ("b", "10.65.0.128/26"), ("a", "10.66.0.0/26")] {
                ipam.claim_affinity(&Owner::host(owner), cidr.parse().unwrap(), soon()).await.unwrap();
            }
        });
        // An affinity without a block, left by a writer that died before it created the block.
        put(&lab, "/calico/ipam/v2/host/gone/ipv4/block/10.65.0.192-26", r#"{"state":"pending","deleted":false}"#);
        lab.margay("pool delete main").answer();
        let left: Vec<String> = stored(&lab).into_keys().filter(|key| key.contains("/block/")).collect();
        let node = left[1].split('/').nth(5).unwrap().to_owned();
        assert_eq!(
            left,
            [
                "/calico/ipam/v2/assignment/ipv4/block/10.66.0.0-26".to_owned(),
                format!("/calico/ipam/v2/host/{node}/ipv4/block/10.66.0.0-26")
            ]
        );
    }
}

#[test]
fn pool_deletion_needs_name_twice_when_bridged_and_in_use() {
    for lab in Lab::each() {
        lab.margay("pool create lab 10.70.0.0/24 --gateway 10.70.0.1").answer();
        lab.margay("pool create main 10.65.0.0/24 --manual").answer();
        let ip = lab.assign("net", "c1");
        for args in [
            "pool delete lab",
            "delete ippool lab",
            "delete ippool lab --yes-delete-bridged-pool other",
            "delete ippool lab --dry-run",
        ] {
            let refused = lab.margay(args).failure();
            assert!(refused.contains("; it is the pool of a bridged network with gateway 10.70.0.1"), "{refused}");
            assert!(refused.contains(ADVICE) && refused.contains("--yes-delete-bridged-pool lab"), "{refused}");
        }
        lab.margay("delete ippool lab --yes-delete-bridged-pool lab --dry-run").answer();
        let done = lab.margay("pool delete lab --yes-delete-bridged-pool lab").answer();
        assert_eq!(done, "Successfully deleted pool lab\n");
        assert_eq!(lab.margay("reservation list -o json").json(), json!({"reservations": []}));
        // The container keeps its address after the pool is deleted; the release of the address also deletes its block.
        assert_eq!(lab.margay(&format!("ipam show --ip {ip} -o json")).json()["in_use"], true);
        assert!(!stored(&lab).keys().any(|key| key.contains("/ipam/v2/host/")));
        lab.margay("ipam release --container c1").answer();
        assert!(!stored(&lab).keys().any(|key| key.contains("/block/") || key.contains("/handle/")));

        // `--yes-delete-bridged-pool` has an effect only on bridged pools.
        with_main(&lab);
    }
}

fn with_main(lab: &Lab) {
    lab.margay("delete ippool main").answer();
    lab.margay("pool create main 10.65.0.0/24").answer();
    lab.assign("net", "c2");
    let refused = lab.margay("delete ippool main --yes-delete-bridged-pool main").failure();
    assert!(
        refused.contains("pool main still has 1 address in use") && !refused.contains("bridged network"),
        "{refused}"
    );
}

#[test]
fn pool_deletion_goes_on_when_broken_off_disabled() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        let key = "/calico/resources/v3/projectcalico.org/ippools/main";
        let disabled = stored(&lab)[key].replace("\"spec\":{", "\"spec\":{\"disabled\":true,");
        put(&lab, key, &disabled);
        assert_eq!(lab.margay("delete ippool main").answer(), "Successfully deleted 1 'IPPool' resource(s)\n");
        assert!(!stored(&lab).contains_key(key));
    }
}
