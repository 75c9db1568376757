//! Tests reports of `margay ipam check`, and releases of addresses from such reports.

use serde_json::{Value, json};

use crate::check::{check, codes, put};
use crate::common::{Done, Lab};

const NODE: &str = r#"{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":"other"},"spec":{}}"#;
const CLUSTER: &str = "/calico/resources/v3/projectcalico.org/clusterinformations/default";

/// Creates a store in which `node1` holds addresses but is no longer registered.
fn abandoned(lab: &Lab) -> Vec<String> {
    lab.margay("pool create main 10.65.0.0/16").answer();
    let given = ["c1", "c2", "c3"].map(|container| lab.assign("net", container)).to_vec();
    let stray = ("/calico/ipam/v2/handle/stray", r#"{"block":{"10.65.0.64/26":1},"deleted":false}"#);
    put(lab, &[("/calico/resources/v3/projectcalico.org/nodes/other", NODE), stray]);
    given
}

fn report(lab: &Lab, name: &str) -> (String, Value) {
    let path = lab.folder().join(name).display().to_string();
    let run = check(lab, &format!("--report {path}"));
    assert_eq!(run.code, 1, "{}{}", run.out, run.err);
    let text = std::fs::read_to_string(&path).unwrap();
    (path, serde_json::from_str(&text).unwrap())
}

fn release(lab: &Lab, args: &str) -> Done {
    lab.margay(&format!("ipam release --from-report {args}"))
}

#[test]
fn reports_release_agreed_addresses_unless_changed() {
    for lab in Lab::each() {
        let given = abandoned(&lab);
        let shown = check(&lab, "--show-problem-ips -o json");
        let shown: Value = serde_json::from_str(&shown.out).unwrap();
        assert_eq!(codes(&shown), ["ALC-05", "BLK-07", "HND-04"]);
        assert_eq!(shown["addresses"].as_array().unwrap().len(), 3);
        assert_eq!(shown["addresses"][0]["state"], "leaked");

        let (first, content) = report(&lab, "first.json");
        let row = &content["allocations"][&given[0]][0];
        assert_eq!((&row["ip"], &row["handle"], &row["node"]), (&json!(given[0]), &json!("net.c1"), &json!("node1")));
        assert_eq!(
            (&row["inUse"], &row["coolingDown"], &row["borrowed"]),
            (&json!(false), &json!(false), &json!(false))
        );
        assert!(row["sequenceNumber"].is_u64(), "{row}");
        assert_eq!((&content["leakedHandles"][0]["ID"], &content["datastoreLocked"]), (&json!("stray"), &json!(false)));
        assert!(content["leakedHandles"][0]["Revision"].is_string() && content["clusterGUID"].is_string());

        // The test releases one address before it writes the second report, and another address after it has written
        // the second report.
        lab.margay(&format!("ipam release --ip {}", given[1])).answer();
        let (second, _) = report(&lab, "second.json");
        lab.margay(&format!("ipam release --ip {}", given[2])).answer();

        let dry = release(&lab, &format!("{first} {second} --dry-run")).answer();
        assert_eq!(dry.lines().count(), 3, "{dry}");
        assert!(dry.contains(&format!("Would release IP address {}\n", given[0])), "{dry}");
        let done = release(&lab, &format!("{first} {second} -o json")).json();
        assert_eq!(done["released"], json!([given[0]]));
        assert_eq!(done["changed"], json!([given[2]]));
        assert_eq!(done["released_handles"], json!(["stray"]));
        let again = release(&lab, &first);
        assert_eq!(again.code, 0, "{}", again.err);
        assert_eq!(again.out.matches("it has changed since").count(), 4, "{}", again.out);
        let left: Value = serde_json::from_str(&check(&lab, "-o json").out).unwrap();
        assert_eq!((codes(&left), &left["counts"]["held"]), (vec!["BLK-07"], &json!(0)));
    }
}

#[test]
fn report_is_refused_when_old_or_of_another_cluster() {
    let [lab, other] = Lab::each();
    abandoned(&lab);
    abandoned(&other);
    let (path, _) = report(&lab, "report.json");
    let refused = release(&other, &path).failure();
    assert!(refused.contains(" is about cluster ") && refused.contains("hint: use only reports"), "{refused}");
    let cluster =
        |ready: bool| json!({"spec": {"clusterGUID": "c0ffee", "clusterType": "k8s", "datastoreReady": ready}});
    put(&lab, &[(CLUSTER, &cluster(true).to_string())]);
    assert!(release(&lab, &path).failure().contains(" is about cluster "), "Calico's own id counts");
    let (path, content) = report(&lab, "report.json");
    assert_eq!((&content["clusterGUID"], &content["clusterType"]), (&json!("c0ffee"), &json!("k8s")));
    put(&lab, &[(CLUSTER, &cluster(false).to_string())]);
    let refused = release(&lab, &path).failure();
    assert!(refused.contains("was changed after all of these reports") && refused.contains("--force"), "{refused}");
    assert_eq!(release(&lab, &format!("{path} --force -o json")).json()["released"].as_array().unwrap().len(), 3);

    // Programs in Go write empty fields as `null`.
    let empty = r#"{"clusterGUID":"c0ffee","allocations":null,"leakedHandles":null,"datastoreLocked":true}"#;
    std::fs::write(&path, empty).unwrap();
    let nothing = release(&lab, &format!("{path} --force"));
    assert_eq!((nothing.code, nothing.err.as_str()), (0, "note: no address or handle is unused in all reports\n"));

    for (text, words) in [("{", "is no report: "), ("[7]", "is no report: ")] {
        std::fs::write(&path, text).unwrap();
        let refused = release(&lab, &path).failure();
        assert!(refused.contains(words) && refused.contains("hint: name a file"), "{refused}");
    }
    assert!(release(&lab, "/nowhere/at/all").failure().contains("cannot read /nowhere/at/all"));
}
