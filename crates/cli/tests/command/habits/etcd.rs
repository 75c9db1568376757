//! Tests that the documents Margay stores in a real etcd equal Calico's documents.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::Etcd;
use serde_json::{Value, json};

/// Runs `margay` with `input` as standard input, and returns its exit code, stdout and stderr.
fn margay(etcd: &Etcd, args: &str, input: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &etcd.url().replace("http:", "etcd:")]).args(args.split(' ')).env_clear();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Runs `margay`, checks that it succeeds, and returns its stdout.
fn answer(etcd: &Etcd, args: &str, input: &str) -> String {
    let (code, out, err) = margay(etcd, args, input);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{args}: {out}");
    out
}

fn stored(etcd: &Etcd, key: &str) -> Option<(Value, i64)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        let found = client.get(key, None).await.unwrap();
        found.kvs().first().map(|kv| (serde_json::from_slice(kv.value()).unwrap(), kv.mod_revision()))
    })
}

/// Returns the last document that a real Calico has stored under a key.
fn of_calico(key: &str) -> Value {
    let rows = include_str!("../../../../../fixtures/calico/documents.jsonl");
    let rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let row = rows.rev().find(|row| row["key"] == key).unwrap();
    serde_json::from_str(row["value"].as_str().unwrap()).unwrap()
}

#[test]
fn documents_are_stored_as_calico_stores_them() {
    let etcd = Etcd::start().unwrap();
    for (plural, name) in [("ippools", "by-hand"), ("ippools", "10-123-0-0-16"), ("ipreservations", "infra")] {
        let key = format!("/calico/resources/v3/projectcalico.org/{plural}/{name}");
        let mut calicos = of_calico(&key);
        // The document is written as a person would write it, without the fields that Calico fills in.
        let written = json!({"kind": calicos["kind"], "apiVersion": calicos["apiVersion"], "metadata": {"name": name},
            "spec": calicos["spec"]});
        let said = answer(&etcd, "create -f -", &written.to_string());
        assert_eq!(said, format!("Successfully created 1 '{}' resource(s)\n", calicos["kind"].as_str().unwrap()));
        let (mut ours, revision) = stored(&etcd, &key).unwrap();
        for field in ["uid", "creationTimestamp"] {
            let [ours, calicos] = [&mut ours, &mut calicos].map(|one| one["metadata"][field].take());
            assert_eq!(ours.as_str().unwrap().len(), calicos.as_str().unwrap().len(), "{field}");
        }
        assert_eq!(ours, calicos);
        let kind = plural.trim_end_matches('s');
        let shown: Value = serde_json::from_str(&answer(&etcd, &format!("get {kind} {name} -o json"), "")).unwrap();
        assert_eq!(shown["metadata"]["resourceVersion"], revision.to_string());
    }
}

#[test]
fn cluster_is_set_up_used_and_taken_down() {
    let etcd = Etcd::start().unwrap();
    let node = "apiVersion: projectcalico.org/v3\nkind: Node\nmetadata: {name: node1, labels: {rack: a}}\n";
    let pool = "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: main}\nspec: {cidr: 10.65.0.0/16, \
                nodeSelector: \"rack == 'a'\"}\n";
    let said = answer(&etcd, "apply -f -", &format!("{node}---\n{pool}"));
    assert_eq!(said, "Successfully applied 2 resource(s)\n");
    let (mut document, _) = stored(&etcd, "/calico/resources/v3/projectcalico.org/nodes/node1").unwrap();
    for field in ["uid", "creationTimestamp"] {
        assert!(document["metadata"][field].take().is_string());
    }
    assert_eq!(
        document,
        json!({"kind": "Node", "apiVersion": "projectcalico.org/v3", "metadata": {"name": "node1", "labels": {"rack": "a"},
            "uid": null, "creationTimestamp": null}, "spec": {}, "status": {}})
    );

    let location = stores::at(&etcd.url().replace("http:", "etcd:")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let soon = || kv::Deadline::after(crate::common::TEST_TIMEOUT);
    runtime.block_on(async {
        let open =
            datastore::open(&location, &datastore::Create::Never.with_wait(crate::common::TEST_TIMEOUT)).await.unwrap();
        let ipam = ipam_core::Ipam::new(open.store(), ipam_core::Nodes::Registered);
        let owner = ipam_core::model::Owner::host("node1");
        let request =
            ipam_core::assign::HandleRequest::new("h", owner, ipam_core::assign::RequestedAddresses::any(1, 0));
        ipam.assign_to_handle(&request, soon()).await.unwrap();
        open.close().await.unwrap();
    });

    let (code, out, err) = margay(&etcd, "delete ippool main", "");
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("pool main still has 1 address in use: 1 in 10.65.") && err.contains("/26 (node1)]"), "{err}");
    answer(&etcd, "ipam configure --strictaffinity=true", "");
    let (config, _) = stored(&etcd, "/calico/ipam/v2/config").unwrap();
    assert_eq!(config["strict_affinity"], true);
    answer(&etcd, "ipam split 4 --name main", "");
    answer(&etcd, "ipam release --handle h", "");
    let parts = "delete ippool split-main-0 split-main-1 split-main-2 split-main-3";
    assert_eq!(answer(&etcd, parts, ""), "Successfully deleted 4 'IPPool' resource(s)\n");
    answer(&etcd, "delete node node1", "");
    let left = runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        let all = client.get("/calico/", Some(etcd_client::GetOptions::new().with_prefix())).await.unwrap();
        all.kvs().iter().map(|kv| String::from_utf8_lossy(kv.key()).into_owned()).collect::<Vec<_>>()
    });
    assert_eq!(left, ["/calico/ipam/v2/config"]);
}
