//! Tests `margay ipam history` and `margay watch` on a real etcd.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use crate::support::Etcd;
use datastore::Create;
use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Labels, Node, Owner};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Range, Store, StoreExt};
use serde_json::Value;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn margay(url: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_margay")).args(["--store", url]).args(args).env_clear().output();
    let output = output.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(url: &str, args: &[&str]) -> Value {
    let (code, out, err) = margay(url, &[args, &["-o", "json"]].concat());
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

/// Runs `work` with an allocator that requires registered nodes, as the allocator on a cluster's node does.
fn with<T>(url: &str, work: impl AsyncFnOnce(&Ipam) -> T) -> T {
    let location = stores::at(url).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(&location, &Create::Never.with_wait(Duration::from_secs(10))).await.unwrap();
        let done = work(&Ipam::new(open.store(), Nodes::Registered)).await;
        open.close().await.unwrap();
        done
    })
}

/// Creates a cluster with a pool, a node, and keys of other programs that lie between the IPAM keys.
fn cluster() -> (Etcd, String) {
    let etcd = Etcd::start().unwrap();
    let url = etcd.url().replace("http:", "etcd:");
    let (code, _, err) = margay(&url, &["pool", "create", "main", "10.65.0.0/29", "--block-size", "30"]);
    assert_eq!(code, Some(0), "{err}");
    with(&url, async |ipam| {
        let node = Node::new("node1", Labels::new(), "uid", time::OffsetDateTime::UNIX_EPOCH);
        let key = keys::resource(ResourceKind::Node, "node1");
        ipam.store().put(key, node.encode().unwrap()).await.unwrap();
    });
    (etcd, url)
}

async fn assign(ipam: &Ipam, handle: &str) -> String {
    let attributes = [("node".to_owned(), "node1".to_owned())].into();
    let request =
        HandleRequest::new(handle, Owner::host("node1"), RequestedAddresses::any(1, 0)).with_attributes(attributes);
    ipam.assign_to_handle(&request, soon()).await.unwrap()[0].ip.to_string()
}

async fn release(ipam: &Ipam, handle: &str) {
    ipam.release_by_handle(handle, soon()).await.unwrap();
}

fn events(report: &Value) -> Vec<String> {
    let text = |event: &Value, name: &str| event[name].as_str().unwrap_or("-").to_owned();
    let events = report["events"].as_array().unwrap();
    events.iter().map(|event| format!("{} {}", text(event, "event"), text(event, "handle"))).collect()
}

#[test]
fn history_on_etcd_works_after_compaction() {
    let (_etcd, url) = cluster();
    let address = with(&url, async |ipam| {
        let address = assign(ipam, "net.a").await;
        for number in 0..5 {
            assign(ipam, &format!("net.x{number}")).await;
        }
        release(ipam, "net.a").await;
        ipam.store().put("/registry/other", "x").await.unwrap();
        address
    });
    let report = json(&url, &["ipam", "history", &address]);
    assert_eq!(events(&report), ["assigned net.a", "released net.a"], "{report}");
    assert_eq!((&report["oldest_revision"], &report["oldest_time"]), (&1.into(), &Value::Null));
    let of_node = json(&url, &["ipam", "history", "node1"]);
    let events_of_node = events(&of_node);
    assert_eq!(events_of_node.iter().filter(|event| event.starts_with("assigned ")).count(), 6, "{of_node}");
    assert_eq!(events_of_node.iter().filter(|event| *event == "claimed -").count(), 2, "{of_node}");
    // The event of the node's block claim has a time because the block records the time; etcd itself records no times.
    let claimed = of_node["events"].as_array().unwrap().iter().find(|event| event["event"] == "claimed").unwrap();
    assert!(claimed["time"].is_string(), "{claimed}");

    // Compact etcd's history, then release all addresses and delete their blocks.
    with(&url, async |ipam| {
        let now = ipam.store().list(Range::All).await.unwrap().revision;
        ipam.store().compact(now).await.unwrap();
        for number in 0..5 {
            release(ipam, &format!("net.x{number}")).await;
        }
        ipam.remove_owner(&Owner::host("node1"), soon()).await.unwrap();
    });
    let report = json(&url, &["ipam", "history", "net.x0"]);
    assert_eq!(events(&report), ["held net.x0", "released net.x0"], "{report}");
    assert!(report["oldest_revision"].as_i64().unwrap() > 1, "{report}");
    let report = json(&url, &["ipam", "history", "node1"]);
    assert_eq!(events(&report).iter().filter(|event| *event == "given_up -").count(), 2, "{report}");
    let (code, text, _) = margay(&url, &["ipam", "history", &address]);
    assert!(code == Some(0) && text.contains(&format!("since then nothing is known of {address}")), "{text}");
}

#[test]
fn watch_on_etcd_goes_on_after_restart() {
    let (mut etcd, url) = cluster();
    let mut child = Command::new(env!("CARGO_BIN_EXE_margay"))
        .args(["--store", &url, "watch", "-o", "json", "--node", "node1", "--count", "4"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut notes = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(notes.next().unwrap().unwrap().contains("watching etcd://"));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    with(&url, async |ipam| assign(ipam, "net.a").await);
    assert_eq!(next()["event"], "claimed");
    assert_eq!(next()["handle"], "net.a");
    etcd.stop();
    etcd.run().unwrap();
    with(&url, async |ipam| assign(ipam, "net.b").await);
    assert_eq!(next()["handle"], "net.b");
    with(&url, async |ipam| release(ipam, "net.b").await);
    let last = next();
    assert_eq!((&last["event"], &last["handle"]), (&"released".into(), &"net.b".into()));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// A running watch receives each change at once, so a compaction cannot take a change from it.
#[test]
fn watch_on_etcd_survives_compaction_while_hook_hangs() {
    const PAIRS: usize = 50;
    let (_etcd, url) = cluster();
    let folder = tempfile::tempdir().unwrap();
    let (hook, go, events) = (folder.path().join("hook"), folder.path().join("go"), folder.path().join("events"));
    let script =
        format!("#!/bin/sh\nwhile [ ! -e {} ]; do sleep 0.02; done\ncat >>{}\n", go.display(), events.display());
    fs::write(&hook, script).unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o700)).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_margay"))
        .args(["--store", &url, "watch", "--exec", hook.to_str().unwrap(), "--attempt-timeout", "60s"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut notes = BufReader::new(child.stderr.take().unwrap()).lines();
    while !notes.next().unwrap().unwrap().contains("watching etcd://") {}
    with(&url, async |ipam| {
        for _ in 0..PAIRS {
            assign(ipam, "net.a").await;
            release(ipam, "net.a").await;
        }
        // The hook hangs at the first event.
        let newest = ipam.store().list(Range::All).await.unwrap().revision;
        ipam.store().compact(newest).await.unwrap();
        assign(ipam, "net.b").await;
    });
    fs::write(&go, "").unwrap();
    let seen = || {
        let text = fs::read_to_string(&events).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone()).collect::<Vec<_>>()
    };
    let until = Instant::now() + Duration::from_secs(60);
    while seen().len() < 2 * PAIRS + 2 {
        assert!(Instant::now() < until, "{:?}", seen());
        thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let count = |event: &str| seen().iter().filter(|one| *one == event).count();
    assert_eq!((count("claimed"), count("assigned"), count("released")), (1, PAIRS + 1, PAIRS), "{:?}", seen());
}

#[test]
fn explain_on_etcd_knows_registered_nodes() {
    let (_etcd, url) = cluster();
    let report = json(&url, &["ipam", "explain", "--node", "node1"]);
    assert_eq!(report["outcome"]["source"], "new", "{report}");
    let (code, text, err) = margay(&url, &["ipam", "explain", "--node", "other"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(text.contains("resource does not exist: Node(other)") && text.contains("register node other "), "{text}");
}
