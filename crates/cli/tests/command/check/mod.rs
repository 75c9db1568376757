//! Tests `margay ipam check` and `ipam release --from-report` on real stores.

mod endpoints;
mod etcd;
mod kill;
mod reports;

use crate::common::{Done, Lab};
use kv::StoreExt;
use serde_json::{Value, json};

const STRAY: &str = "/calico/ipam/v2/handle/stray";
const PENDING: &str = "/calico/ipam/v2/host/node1/ipv4/block/10.65.9.0-26";

fn put(lab: &Lab, rows: &[(&str, &str)]) {
    lab.with_ipam(async |ipam| {
        for (key, value) in rows {
            ipam.store().put(*key, *value).await.unwrap();
        }
    });
}

fn get(lab: &Lab, key: &str) -> Option<String> {
    let kv = lab.with_ipam(async |ipam| ipam.store().get(key).await.unwrap());
    kv.map(|kv| String::from_utf8(kv.value.as_bytes().to_vec()).unwrap())
}

/// Runs `ipam check` without the CNI configuration of this machine.
fn check(lab: &Lab, args: &str) -> Done {
    let folder = lab.folder().display();
    lab.margay(format!("--cni-conf-dir {folder}/none ipam check {args}").trim_end())
}

fn codes(answer: &Value) -> Vec<&str> {
    answer["findings"].as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect()
}

#[test]
fn check_passes_when_store_is_in_order() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        let ip = lab.assign("net", "c1");
        let text = check(&lab, "--show-all-ips").answer();
        assert!(text.starts_with(&format!("Checking IPAM for inconsistencies: {}, revision ", lab.location)), "{text}");
        assert!(text.contains("Found 1 IP pools:\n  10.65.0.0/16 (main)\n"), "{text}");
        assert!(text.contains(&format!("\n  {ip} in use; attrs Main:net.c1 Extra:margay.io/boot=")), "{text}");
        assert!(text.ends_with("\nCheck complete; found 0 problems.\n"), "{text}");
        let json = check(&lab, "-o json").json();
        assert_eq!((&json["problems"], &json["findings"], &json["repairs"]), (&json!(0), &json!([]), &json!([])));
        assert_eq!(json["counts"]["held"], 1);
        assert!(json.get("addresses").is_none());
    }
}

#[test]
fn check_takes_calicoctl_report_flags() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        lab.assign("net", "c1");
        let file = lab.folder().join("report.json");
        let ours = check(&lab, &format!("--report {}", file.display())).answer();
        let expected = std::fs::read(&file).unwrap();
        let path = file.display();
        for args in [format!("-o {path}"), format!("-o{path}"), format!("--output={path}"), format!("--output {path}")]
        {
            std::fs::remove_file(&file).unwrap();
            assert_eq!(check(&lab, &args).answer(), ours, "{args}");
            assert_eq!(std::fs::read(&file).unwrap(), expected, "{args}");
        }
        // `-o json` still selects the output format if another `-o` names a report file.
        assert!(check(&lab, &format!("-o json -o {path}")).json()["problems"].is_number());
        // `-o` with a value that may be a misspelt format does not create a file.
        let refused = check(&lab, "-o jsn").failure();
        assert!(refused.contains("possible values: table, wide, yaml, json"), "{refused}");
        assert!(refused.contains("--report jsn"), "{refused}");
    }
}

#[test]
fn check_tells_plans_and_repairs_damage() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/16").answer();
        let ip = lab.assign("net", "c1");
        put(
            &lab,
            &[
                (STRAY, r#"{"block":{"10.65.0.64/26":1},"deleted":false}"#),
                (PENDING, r#"{"state":"pending","deleted":false}"#),
                ("/calico/ipam/v2/handle/net.c1", r#"{"block":{},"deleted":false}"#),
                ("/calico/ipam/v2/odd/\u{1b}[2J", "{}"),
            ],
        );
        let found = check(&lab, "");
        assert_eq!(found.code, 1, "{}", found.out);
        assert_eq!(
            found.err,
            "error: 4 problems were found\n\
             hint: problems that can be repaired automatically: 3; see how, without changing anything, with: \
             margay ipam check --repair\n"
        );
        assert!(found.out.contains("| AFF-02 | affinity of host:node1 to 10.65.9.0/26 |"), "{}", found.out);
        assert!(!found.out.contains('\u{1b}') && found.out.contains("odd/\\x1b[2J"), "{}", found.out);
        assert!(found.out.ends_with("\nCheck complete; found 4 problems.\n"), "{}", found.out);

        let planned = check(&lab, "--repair HND-04 -o json");
        let planned: Value = serde_json::from_str(&planned.out).unwrap();
        assert_eq!(planned["repairs"].as_array().unwrap().len(), 1);
        assert_eq!(planned["repairs"][0]["outcome"], "planned");
        assert!(get(&lab, STRAY).is_some(), "a plan changes nothing");

        let one: Value = serde_json::from_str(&check(&lab, "-o json --repair hnd-04 --apply").out).unwrap();
        assert_eq!((&one["repairs"][0]["outcome"], get(&lab, STRAY)), (&json!("mended"), None));
        assert_eq!(codes(&one), ["AFF-02", "HND-03", "KEY-01"]);

        let rest = check(&lab, "--repair --apply");
        assert!(rest.out.contains("| OUTCOME |") && rest.out.contains("| mended  |"), "{}", rest.out);
        let reported = "error: 1 problem was found\n\
                        hint: none of these problems can be repaired automatically; follow the \
                        advice in the column MEND";
        assert!(rest.err.starts_with(reported), "{}", rest.err);
        assert_eq!(get(&lab, PENDING), None);
        let shown = lab.margay(&format!("ipam show --ip {ip}")).answer();
        assert!(shown.contains("Handle ID: net.c1"), "{shown}");
        let released = lab.margay("ipam release --handle net.c1").answer();
        assert!(released.contains(&ip), "{released}");
        let nothing = check(&lab, "--repair --apply");
        assert!(nothing.out.contains("There was nothing to mend.\n"), "{}", nothing.out);
    }
}

#[test]
fn check_says_what_to_do_when_usage_is_wrong() {
    let [lab, _] = Lab::each();
    let code = check(&lab, "--repair BLK-99").failure();
    assert!(code.contains("is no code of a finding; they look like BLK-03"), "{code}");
    assert!(check(&lab, "--apply").failure().contains("--repair"), "apply is for repairs");
    assert!(check(&lab, "").failure().contains("there is no store at"), "a check makes no store");
    assert!(!lab.exists());
}

#[test]
fn check_finds_two_networks_with_same_addresses() {
    let [lab, other] = Lab::each();
    lab.margay("pool create main 10.65.0.0/16").answer();
    other.margay("pool create lab 10.65.4.0/24").answer();
    let conf = lab.folder().join("net.d");
    std::fs::create_dir(&conf).unwrap();
    let path = |lab: &Lab| lab.location.path().unwrap().display().to_string();
    let write = |name: &str, kind: &str, path: String, subnet: &str| {
        let ipam = json!({"type": "margay-ipam", "subnet": subnet});
        let text =
            json!({"name": name, "type": "bridge", "datastore_type": kind, "datastore_path": path, "ipam": ipam});
        std::fs::write(conf.join(format!("{name}.conf")), text.to_string()).unwrap();
    };
    write("one", "sled", path(&lab), "10.65.0.0/16");
    write("two", "redb", path(&other), "10.65.4.0/24");
    write("apart", "redb", "/nowhere/at/all".into(), "10.99.0.0/24");
    let run = lab.margay(&format!("--cni-conf-dir {} ipam check -o json", conf.display()));
    assert_eq!(run.code, 1, "{}", run.err);
    let answer: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(codes(&answer), ["NET-01"]);
    let what = answer["findings"][0]["what"].as_str().unwrap();
    assert!(what.contains("10.65.4.0/24") && what.contains("10.65.0.0/16") && what.contains("redb:///"), "{what}");
}

/// The test's pool is one half of a network to which this machine has a route.
#[test]
fn check_warns_when_route_leads_pool_elsewhere() {
    let routes = host::all_routes().unwrap();
    let route = routes.iter().find(|route| route.net.addr().is_ipv4() && (8..=28).contains(&route.net.prefix_len()));
    let route = route.expect("this test needs a route to an IPv4 network");
    let half = ipnet::IpNet::new(route.net.network(), route.net.prefix_len() + 1).unwrap();
    let [lab, _] = Lab::each();
    lab.margay(&format!("pool create half {half}")).answer();
    let run = check(&lab, "-o json");
    assert_eq!(run.code, 0, "a warning is no problem: {}", run.err);
    let answer: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(codes(&answer), ["NET-02"]);
    let what = answer["findings"][0]["what"].as_str().unwrap();
    assert!(what.contains(&format!("{} dev {}", route.net, route.device)), "{what}");
}
