//! Tests `margay ipam split`.

use std::collections::BTreeMap;

use serde_json::json;

use crate::common::Lab;
use crate::habits::files::{document, resource, stored, with_file};

/// Returns all IPAM documents of the store by key.
pub(crate) fn addresses(lab: &Lab) -> BTreeMap<String, String> {
    stored(lab).into_iter().filter(|(key, _)| key.starts_with("/calico/ipam/")).collect()
}

#[test]
fn split_keeps_blocks_and_addresses() {
    for lab in Lab::each() {
        let pool = "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata:\n  name: main\n  labels: {a: b}\nspec:\n  cidr: \
                    10.65.0.0/16\n  natOutgoing: true\n";
        with_file(&lab, "create", pool).answer();
        let ip = lab.assign("net", "c1");
        let before = addresses(&lab);
        assert_eq!(
            lab.margay("ipam split 2 --name main --dry-run").answer(),
            "Dry run: IP Pool main would be split into 2 smaller pools.\nWould create split-main-0 with CIDR 10.65.0.0/17.\n\
             Would create split-main-1 with CIDR 10.65.128.0/17.\n"
        );
        assert_eq!(
            lab.margay("ipam split 2 --cidr 10.65.0.0/16").answer(),
            "IP Pool main was successfully split into 2 smaller pools.\nCreated split-main-0 with CIDR 10.65.0.0/17.\n\
             Created split-main-1 with CIDR 10.65.128.0/17.\n"
        );
        assert_eq!(addresses(&lab), before);
        let part = resource(&lab, "ippools", "split-main-1");
        assert_eq!(
            (&part["spec"]["cidr"], &part["spec"]["natOutgoing"], &part["metadata"]["labels"]),
            (&json!("10.65.128.0/17"), &json!(true), &json!({"a": "b"}))
        );
        assert_ne!(part["metadata"]["uid"], resource(&lab, "ippools", "split-main-0")["metadata"]["uid"]);
        assert_eq!(lab.margay("get pools -o json").json()["items"].as_array().unwrap().len(), 2);
        assert!(lab.assign("net", "c2").starts_with("10.65."));
        lab.margay(&format!("ipam release --ip {ip}")).answer();
        lab.margay("ipam release --container c2").answer();
        // A pool that was created by a split can be split like any other pool.
        let again = lab.margay("ipam split 128 --name split-main-0 -o json").json();
        assert_eq!(
            (&again["parts"][127]["name"], &again["parts"][127]["cidr"]),
            (&json!("split-split-main-0-127"), &json!("10.65.127.0/24"))
        );
        assert_eq!(lab.margay("get pools -o json").json()["items"].as_array().unwrap().len(), 129);
        let last = resource(&lab, "ippools", "split-split-main-0-127");
        assert!(last["spec"].get("disabled").is_none() && last["metadata"].get("annotations").is_none(), "{last}");
        // When there are 129 pools, another pool can still be created unless it overlaps an existing pool.
        lab.margay("pool create more 10.66.0.0/16").answer();
        assert!(lab.margay("pool create over 10.65.3.0/24").failure().contains("overlaps"));
        assert!(lab.assign("net", "c3").starts_with("10.6"));
    }
}

#[test]
fn split_gives_disabled_parts_when_pool_is_disabled() {
    for lab in Lab::each() {
        with_file(&lab, "create", &document("IPPool", "off", "  cidr: 10.65.0.0/16\n  disabled: true\n")).answer();
        lab.margay("ipam split 2 --name off").answer();
        lab.margay("ipam split 64 --name split-off-0").answer();
        for name in ["split-off-1", "split-split-off-0-63"] {
            assert_eq!(resource(&lab, "ippools", name)["spec"]["disabled"], true);
        }
    }
}

#[test]
fn split_is_refused_when_impossible() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        lab.margay("pool create lab 10.70.0.0/24 --gateway 10.70.0.1").answer();
        lab.margay("pool create split-main-1 10.66.0.0/24").answer();
        let before = stored(&lab);
        for (args, reason) in [
            ("3 --name main", "number to split CIDR into is not a valid power of 2: 3"),
            ("0 --name main", "not a valid power of 2: 0"),
            ("1 --name main", "not a valid power of 2: 1"),
            ("2048 --name main", "into 1024 parts at most"),
            ("8 --name main", "the CIDR 10.65.0.0/24 is not large enough to be split into 8 parts"),
            ("2 --name other", "pool other does not exist"),
            ("2 --cidr 10.65.0.0/25", "a pool of exactly 10.65.0.0/25 does not exist"),
            ("2 --name lab", "pool lab belongs to a bridged network"),
            ("2 --name main", "resource already exists: IPPool(split-main-1)"),
            ("2", "required"),
        ] {
            for dry_run in ["", " --dry-run"] {
                let said = lab.margay(&format!("ipam split {args}{dry_run}")).failure();
                assert!(said.contains(reason), "{args}: {said}");
            }
        }
        assert_eq!(stored(&lab), before);
    }
}
