//! Tests `margay quota`, and how other commands handle quotas.

use std::collections::BTreeMap;
use std::time::Duration;

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use kv::Deadline;
use serde_json::json;

use crate::common::Lab;

fn pod(lab: &Lab, container: &str) -> bool {
    let (network, container, interface, node) = ("net".into(), container.into(), "eth0".into(), "node1".into());
    let attachment = Attachment { network, container, interface, node, boot: None };
    let mut request = AssignRequest::new(attachment, RequestedAddresses::any(1, 0));
    request.attributes = BTreeMap::from([("namespace".to_owned(), "shop".to_owned())]);
    lab.with_ipam(async |ipam| ipam.assign(&request, Deadline::after(Duration::from_secs(60))).await.is_ok())
}

#[test]
fn quotas_come_and_go() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        assert_eq!(lab.margay("quota list -o json").json(), json!({"quotas": []}));
        let set = lab.margay("quota set --namespace shop 2").answer();
        assert_eq!(set, "Successfully set the quota of namespace shop to 2\n");
        assert!(pod(&lab, "c1") && pod(&lab, "c2") && !pod(&lab, "c3"));
        lab.margay("quota set --network * 9").answer();
        let row = |kind, name, limit, used: Option<u64>, percent: Option<u64>| json!({"kind": kind, "name": name, "limit": limit, "used": used, "percent": percent});
        let listed = lab.margay("quota list -o json").json();
        let shop = row("namespace", "shop", 2, Some(2), Some(100));
        let others = row("network", "*", 9, None, None);
        assert_eq!(listed, json!({"quotas": [shop, others, row("network", "net", 9, Some(2), Some(22))]}));
        let metrics = lab.margay("metrics --cluster").answer();
        for line in [
            r#"margay_quota_limit{kind="namespace",name="shop"} 2"#,
            r#"margay_quota_used{kind="namespace",name="shop"} 2"#,
            r#"margay_quota_used{kind="network",name="net"} 2"#,
        ] {
            assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
        }
        let refused = lab.margay("ipam explain --node node1 --namespace shop").answer();
        assert!(
            refused.contains("the quota of namespace shop is used up") && refused.contains("quota list"),
            "{refused}"
        );
        let raised = lab.margay("quota set --namespace shop 3").answer();
        assert_eq!(raised, "Successfully set the quota of namespace shop to 3 (was 2)\n");
        assert!(pod(&lab, "c3") && !pod(&lab, "c4"));
        let explained = lab.margay("ipam explain --node node1 --namespace other").answer();
        assert!(!explained.contains("quota"), "{explained}");

        lab.margay("quota delete --namespace shop --dry-run").answer();
        assert!(!pod(&lab, "c4"));
        assert_eq!(
            lab.margay("quota rm --namespace shop").answer(),
            "Successfully deleted the quota of namespace shop (3)\n"
        );
        assert!(pod(&lab, "c4"));
        assert!(lab.margay("quota delete --namespace shop").failure().contains("margay quota list"));
        lab.margay("quota delete --network *").answer();
        let left = lab.with_ipam(async |ipam| {
            let range = kv::Range::prefix(ipam_core::model::keys::QUOTAS_PREFIX);
            kv::StoreExt::list(ipam.store(), range).await.unwrap().kvs.len()
        });
        assert_eq!(left, 0, "quotas and counters are gone");
    }
}

#[test]
fn quotas_are_of_one_kind_each() {
    let [lab, _] = Lab::each();
    lab.margay("pool create main 10.65.0.0/24").answer();
    for wrong in ["quota set 5", "quota set --node a --network b 5", "quota set --node a -1", "quota set --node a x"] {
        assert_ne!(lab.margay(wrong).code, 0, "{wrong}");
    }
}

#[test]
fn quotas_move_with_store() {
    let [one, other] = Lab::each();
    one.margay("pool create main 10.65.0.0/24").answer();
    one.margay("quota set --namespace shop 2").answer();
    assert!(pod(&one, "c1"));
    let file = one.folder().join("exported");
    one.margay(&format!("export {}", file.display())).answer();
    // The import prints a warning about the age of the export.
    assert_eq!(other.margay(&format!("import {}", file.display())).code, 0);
    assert!(pod(&other, "c2") && !pod(&other, "c3"));
}
