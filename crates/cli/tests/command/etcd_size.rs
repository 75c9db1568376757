//! Tests the commands about the size and the history of an etcd cluster on a real etcd.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use conformance::patient;
use etcd_client::{AlarmAction, AlarmType, Client, Compare, CompareOp, ConnectOptions, Permission, Txn, TxnOp};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::certificates::Certificates;

use crate::common::{Done, TEST_TIMEOUT, margay};
use crate::support::Etcd;

/// An etcd, and a node's folder in which `margay` saves its compaction marks between runs.
struct Node<'e> {
    etcd: &'e Etcd,
    notes: tempfile::TempDir,
}

impl<'e> Node<'e> {
    fn new(etcd: &'e Etcd) -> Self {
        Self { etcd, notes: tempfile::tempdir().unwrap() }
    }

    fn margay(&self, args: &str) -> Done {
        let store = self.etcd.url().replace("http:", "etcd:");
        let notes = self.notes.path().to_str().unwrap();
        let words = ["--store", &store].into_iter().chain(args.split_whitespace()).chain(["--notes", notes]);
        margay(words.map(str::to_owned))
    }

    fn compact(&self) -> (String, Option<i64>) {
        let answer = self.margay("etcd compact --keep 10m -o json").json();
        (answer["outcome"].as_str().unwrap().to_owned(), answer["revision"].as_i64())
    }

    /// Sets the times of the compaction marks that earlier `margay` runs saved back by eleven minutes.
    fn pass_eleven_minutes(&self) {
        for note in fs::read_dir(self.notes.path()).unwrap() {
            let path = note.unwrap().path();
            let mut note: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let at = &mut note["compaction"]["at"];
            *at = json!(at.as_u64().unwrap() - 660);
            fs::write(&path, note.to_string()).unwrap();
        }
    }
}

/// Raises the alarm NOSPACE of an etcd, or clears it.
fn alarm(etcd: &Etcd, action: AlarmAction) {
    with_client(etcd, async |mut client| client.alarm(action, AlarmType::Nospace, None).await.unwrap());
}

/// Forwards connections to an etcd, and counts them.
fn counting_relay(etcd: &Etcd) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, target) = (listener.local_addr().unwrap(), etcd.address());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
            let Ok(server) = TcpStream::connect(target) else { continue };
            let pairs = [
                (client.try_clone().unwrap(), server.try_clone().unwrap()),
                (server.try_clone().unwrap(), client.try_clone().unwrap()),
            ];
            for (mut from, mut to) in pairs {
                thread::spawn(move || {
                    // An error means that one end has closed its connection.
                    _ = io::copy(&mut from, &mut to);
                    _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    (address, count)
}

fn with_client<T>(etcd: &Etcd, work: impl AsyncFnOnce(Client) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { work(Client::connect([etcd.url()], None).await.unwrap()).await })
}

/// Writes `changes` revisions and returns the newest revision.
fn write(etcd: &Etcd, changes: usize) -> i64 {
    with_client(etcd, async |mut client| {
        let mut newest = 0;
        for _ in 0..changes {
            newest = client.put("/x", "y", None).await.unwrap().header().unwrap().revision();
        }
        newest
    })
}

#[test]
fn etcd_compaction_of_two_nodes_is_done_once() {
    let etcd = Etcd::start().unwrap();
    let (one, other) = (Node::new(&etcd), Node::new(&etcd));
    let noted = write(&etcd, 10);
    assert_eq!(one.compact(), ("noted".to_owned(), Some(noted)));
    assert_eq!(other.compact(), ("noted".to_owned(), Some(noted)));
    write(&etcd, 10);
    assert_eq!(one.compact(), ("too-early".to_owned(), None));
    one.pass_eleven_minutes();
    other.pass_eleven_minutes();
    assert_eq!(one.compact(), ("compacted".to_owned(), Some(noted)));
    assert_eq!(other.compact(), ("other-compactor".to_owned(), None));
    let status = one.margay("etcd status -o json").json();
    assert_eq!((&status["oldest_revision"], &status["compacted_by"]), (&json!(noted), &json!("key-holder")));
}

#[test]
fn etcd_compaction_is_left_to_others() {
    let etcd = Etcd::start().unwrap();
    let node = Node::new(&etcd);
    write(&etcd, 10);
    assert_eq!(node.compact().0, "noted");
    with_client(&etcd, async |mut client| {
        // kube-apiserver's compactor sends this transaction before each compaction.
        let txn = Txn::new().when([Compare::version("compact_rev_key", CompareOp::Equal, 0)]).and_then([TxnOp::put(
            "compact_rev_key",
            "0",
            None,
        )]);
        assert!(client.txn(txn).await.unwrap().succeeded());
    });
    node.pass_eleven_minutes();
    assert_eq!(node.compact().0, "other-compactor");
    with_client(&etcd, async |mut client| client.compact(5, None).await.unwrap());
    node.pass_eleven_minutes();
    assert_eq!(node.compact().0, "other-compaction");
    let status = node.margay("etcd status -o json").json();
    assert_eq!((&status["oldest_revision"], &status["compacted_by"]), (&json!(5), &json!("etcd-or-person")));
}

#[test]
fn etcd_compaction_works_when_quota_is_used_up() {
    let etcd = Etcd::start().unwrap();
    let node = Node::new(&etcd);
    let newest = write(&etcd, 10);
    alarm(&etcd, AlarmAction::Activate);
    let done = node.margay("etcd status");
    assert!(done.code == 1 && done.out.contains("NOSPACE"), "{done:?}");
    let done = node.margay("etcd compact --keep 0s -o json").json();
    assert_eq!((&done["outcome"], &done["revision"]), (&json!("compacted"), &json!(newest)));
    alarm(&etcd, AlarmAction::Deactivate);
    let done = node.margay("etcd status -o json").json();
    assert_eq!(done["oldest_revision"], json!(newest));
}

#[test]
fn etcd_status_names_margay_if_it_compacted_a_full_etcd() {
    let etcd = Etcd::start().unwrap();
    let (node, other) = (Node::new(&etcd), Node::new(&etcd));
    write(&etcd, 10);
    alarm(&etcd, AlarmAction::Activate);
    // While the alarm is raised, etcd refuses to write the key that names the last compaction.
    assert_eq!(node.margay("etcd compact --keep 0s -o json").json()["outcome"], json!("compacted"));
    alarm(&etcd, AlarmAction::Deactivate);
    let compacted_by = |node: &Node<'_>| node.margay("etcd status -o json").json()["compacted_by"].clone();
    assert_eq!(compacted_by(&node), json!("margay"));
    assert!(node.margay("etcd status").answer().contains("by margay etcd compact on this machine"));
    // Another machine has no note of the compaction.
    assert_eq!(compacted_by(&other), json!("etcd-or-person"));
    assert!(other.margay("etcd status").answer().contains("or by margay etcd compact while the quota was used up"));
    with_client(&etcd, async |mut client| {
        let newest = client.put("/x", "y", None).await.unwrap().header().unwrap().revision();
        client.compact(newest, None).await.unwrap();
    });
    assert_eq!(compacted_by(&node), json!("etcd-or-person"));
}

#[test]
fn etcd_alarm_is_named_in_plain_words() {
    let members = Etcd::start_three().unwrap();
    let store = members.iter().map(|etcd| etcd.url().replace("http://", "")).collect::<Vec<_>>().join(",");
    alarm(&members[0], AlarmAction::Activate);
    let status = |command: &str| {
        let args = format!("--store etcd://{store} {command}");
        margay(args.split_whitespace().map(str::to_owned)).out
    };
    let notes = tempfile::tempdir().unwrap();
    let out = status(&format!("etcd status --notes {}", notes.path().display()));
    let problems: Vec<_> = out.lines().filter(|line| line.starts_with("Problem:")).collect();
    assert_eq!(problems.len(), 1, "all members report the same alarm: {out}");
    let words = [
        "etcd's quota is used up, and it refuses changes (alarm NOSPACE",
        "margay etcd compact --keep 0s, then etcdctl defrag --cluster, then etcdctl alarm disarm",
    ];
    for out in [problems[0], &status("store status")] {
        assert!(words.iter().all(|words| out.contains(words)) && !out.contains("alarm:"), "{out}");
    }
    let found = status("--cni-conf-dir /nowhere ipam check");
    assert!(found.contains("etcd's quota is used up") && !found.contains("alarm:"), "{found}");
}

#[test]
fn etcd_status_with_frozen_member_takes_few_seconds() {
    const MAX_TIME: Duration = Duration::from_secs(9);
    let members = Etcd::start_three().unwrap();
    let store = members.iter().map(|etcd| etcd.url().replace("http://", "")).collect::<Vec<_>>().join(",");
    let (store, notes) = (format!("etcd://{store}"), tempfile::tempdir().unwrap());
    members[0].signal(Signal::SIGSTOP).unwrap();
    let begun = Instant::now();
    let done = margay(["--store", &store, "etcd", "status", "-o", "json", "--notes", notes.path().to_str().unwrap()]);
    let elapsed = begun.elapsed();
    let report: Value = serde_json::from_str(&done.out).unwrap_or_else(|_| panic!("{done:?}"));
    let roles: Vec<_> = (0..3).map(|member| report["members"][member]["role"].as_str().unwrap()).collect();
    assert_eq!((roles[0], done.code), ("no answer", 1), "{done:?}");
    assert!(roles[1] != "no answer" && roles[2] != "no answer" && elapsed < patient(MAX_TIME), "{elapsed:?}: {done:?}");
}

#[test]
fn etcd_compaction_connects_once() {
    let etcd = Etcd::start().unwrap();
    let newest = write(&etcd, 10);
    let (address, connections) = counting_relay(&etcd);
    let notes = tempfile::tempdir().unwrap();
    let args = format!("--store etcd://{address} etcd compact --keep 0s -o json --notes {}", notes.path().display());
    assert_eq!(margay(args.split_whitespace().map(str::to_owned)).json()["revision"], json!(newest));
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[test]
fn etcd_compaction_of_all_stores_names_unreadable_files() {
    let etcd = Etcd::start().unwrap();
    write(&etcd, 10);
    let (networks, notes) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let run = || {
        let folders = format!("--cni-conf-dir {} etcd compact --all-stores --notes", networks.path().display());
        margay(folders.split_whitespace().map(str::to_owned).chain([notes.path().display().to_string()]))
    };
    fs::write(networks.path().join("10-broken.conf"), "{").unwrap();
    let done = run();
    assert!(done.code != 0 && done.err.contains("10-broken.conf"), "{done:?}");
    let network = json!({"cniVersion": "1.0.0", "name": "lan", "type": "calico", "datastore_type": "etcdv3",
        "etcd_endpoints": etcd.url(), "ipam": {"type": "calico-ipam"}});
    fs::write(networks.path().join("20-lan.conf"), network.to_string()).unwrap();
    let done = run();
    assert!(done.code == 0 && done.out.starts_with("Noted revision"), "{done:?}");
    assert!(done.err.starts_with("warning: skipped ") && done.err.contains("10-broken.conf"), "{done:?}");
}

#[test]
fn etcd_status_names_each_member_and_the_quota() {
    let members = Etcd::start_three().unwrap();
    let node = Node::new(&members[0]);
    let store = members.iter().map(|etcd| etcd.url().replace("http://", "")).collect::<Vec<_>>().join(",");
    let status = |more: &str| {
        let args = format!("--store etcd://{store} etcd status {more} -o json");
        let notes = node.notes.path().to_str().unwrap();
        margay(args.split_whitespace().chain(["--notes", notes]).map(str::to_owned))
    };
    let report = status("--quota 2000000").json();
    let rows = report["members"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let roles: Vec<_> = rows.iter().map(|row| row["role"].as_str().unwrap()).collect();
    assert_eq!(roles.iter().filter(|role| **role == "leader").count(), 1, "{roles:?}");
    assert!(rows.iter().all(|row| row["quota_bytes"] == json!(2_000_000) && row["bytes"].as_u64() > Some(0)));
    let [_, _, mut last] = members;
    last.stop();
    let done = status("");
    assert_eq!(done.code, 1, "{done:?}");
    let report: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(report["members"][2]["role"], json!("no answer"));
    assert!(done.err.contains("the cluster has a problem"), "{done:?}");
}

#[test]
fn etcd_commands_do_nothing_on_embedded_stores() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &str| {
        let store = format!("sled://{}/s", folder.path().display());
        margay(["--store", &store].into_iter().chain(args.split_whitespace()).map(str::to_owned))
    };
    for args in ["etcd status", "etcd compact"] {
        assert!(
            run(args).failure().contains("is not a cluster\nhint: an embedded store deletes old history itself"),
            "{args}"
        );
    }
    assert!(!Path::new(&folder.path().join("s")).exists());
    let empty = format!("--cni-conf-dir {} etcd compact --all-stores", folder.path().display());
    assert_eq!(margay(empty.split_whitespace().map(str::to_owned)).answer(), "");
}

#[test]
fn etcd_plan_grows_with_changes_and_block_size() {
    let plan = |args: &str| margay(args.split_whitespace().map(str::to_owned)).json();
    let small = plan("etcd plan --nodes 100 --pods-per-node 60 --churn 10 -o json");
    let large = plan("etcd plan --nodes 100 --pods-per-node 60 --churn 20 -o json");
    for (one, other) in small["blocks"].as_array().unwrap().iter().zip(large["blocks"].as_array().unwrap()) {
        assert_eq!(one["history_bytes"].as_u64().unwrap() * 2, other["history_bytes"].as_u64().unwrap());
    }
    let bytes = |size: usize| small["blocks"][size]["bytes_per_change"].as_u64().unwrap();
    // An etcd 3.4.23 grew by 20,582 bytes with each change of a block of /26 with 60 pods.
    assert!((18_000..24_000).contains(&bytes(0)), "{}", bytes(0));
    assert!(bytes(3) < bytes(2) && bytes(2) < bytes(0));
}

#[test]
fn etcd_plan_refuses_to_keep_no_history() {
    let run = |keep: &str| margay(["etcd", "plan", "--nodes", "100", "--churn", "10", "--keep", keep, "-o", "json"]);
    let refused = run("0s");
    assert!(refused.code == 1 && refused.err.contains("at least 1s"), "{refused:?}");
    // Sizes beyond all numbers are too large, not small.
    let endless = run("99999999999d").json();
    assert_eq!(endless["blocks"][0]["quota_bytes"], Value::Null, "{endless}");
}

#[test]
fn etcd_quota_is_read_from_metrics() {
    let quota = ["--quota-backend-bytes=33554432".to_owned()];
    let certificates = Certificates::make().unwrap();
    let plain = Etcd::start_with("http", &quota).unwrap();
    let tls = certificates.etcd(&quota).unwrap();
    for etcd in [&plain, &tls] {
        let store = etcd.url().replace("http", "etcd").replace("etcds:", "etcd+https:");
        let notes = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
        command.args(["--store", &store, "etcd", "status", "-o", "json", "--notes"]).arg(notes.path());
        let output = command.env_clear().env("ETCD_CA_CERT_FILE", certificates.path("authority.pem")).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        let member = &report["members"][0];
        assert_eq!(
            (&member["quota_bytes"], &member["quota_is_assumed"]),
            (&json!(33_554_432), &json!(false)),
            "{store}"
        );
    }
}

#[test]
fn etcd_check_warns_before_quota_is_used_up() {
    let etcd = Etcd::start_with("http", &["--quota-backend-bytes=33554432".to_owned()]).unwrap();
    let store = etcd.url().replace("http:", "etcd:");
    let check = || {
        let args = ["--store", &store, "--cni-conf-dir", "/nowhere", "ipam", "check", "-o", "json"];
        let done = margay(args);
        let report: Value = serde_json::from_str(&done.out).unwrap_or_else(|_| panic!("{done:?}"));
        let findings = report["findings"].as_array().unwrap();
        let codes = findings.iter().map(|finding| finding["code"].as_str().unwrap().to_owned());
        codes.filter(|code| code.starts_with("CLU")).collect::<Vec<_>>()
    };
    // etcd updates its count of used pages, and frees the pages of deleted history, only some time after a change.
    let until = |expected: &[&str]| {
        let end = Instant::now() + TEST_TIMEOUT;
        while check() != expected {
            assert!(Instant::now() < end, "{:?} instead of {expected:?}", check());
            thread::sleep(Duration::from_millis(100));
            // etcd updates its count of used pages only with the next change.
            with_client(&etcd, async |mut client| client.put("/y", "", None).await.unwrap());
        }
    };
    let block = |time: &str| {
        let holder = json!({"handle_id": "net.c1", "secondary": {"node": "node1", "timestamp": time}});
        json!({"cidr": "10.65.0.0/30", "affinity": "host:node1", "allocations": [0, null, null, null],
            "unallocated": [1, 2, 3], "attributes": [holder], "sequenceNumber": 1,
            "sequenceNumberForAllocation": {"0": 1}, "deleted": false})
    };
    let key = "/calico/ipam/v2/assignment/ipv4/block/10.65.0.0-30";
    let write = |mebibytes: usize, time: &str| {
        with_client(&etcd, async |mut client| {
            client.put(key, block(time).to_string(), None).await.unwrap();
            for _ in 0..mebibytes {
                client.put("/x", vec![b'x'; 1 << 20], None).await.unwrap();
            }
        });
    };
    write(1, "2020-01-01 00:00:00 +0000 UTC");
    assert_eq!(check(), [""; 0], "little is used");
    write(5, "2020-01-02 00:00:00 +0000 UTC");
    until(&["CLU-03"]);
    write(15, "2020-01-03 00:00:00 +0000 UTC");
    until(&["CLU-02", "CLU-03"]);
    let node = Node::new(&etcd);
    assert_eq!(node.margay("etcd compact --keep 0s -o json").json()["outcome"], json!("compacted"));
    until(&[]);
}

#[test]
fn etcd_commands_need_the_documented_rights_only() {
    let etcd = Etcd::start().unwrap();
    write(&etcd, 5);
    let grant = |role: &'static str, key: &'static str, end: &'static str| {
        with_client(&etcd, async |mut client| {
            let mut right = Permission::read_write(key);
            if !end.is_empty() {
                right = right.with_range_end(end);
            }
            client.role_grant_permission(role, right).await.unwrap();
        });
    };
    with_client(&etcd, async |mut client| {
        for role in ["root", "margay"] {
            client.role_add(role).await.unwrap();
            client.user_add(role, "hidden", None).await.unwrap();
            client.user_grant_role(role, role).await.unwrap();
        }
    });
    grant("margay", "/calico/", "/calico0");
    grant("margay", "/margay/", "/margay0");
    with_client(&etcd, async |mut client| client.auth_enable().await.unwrap());
    let run = |args: &str| {
        let store = etcd.url().replace("http:", "etcd:");
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
        command.args(["--store", &store]).args(args.split(' ')).arg("--notes").arg(folder.path());
        command.env_clear().env("ETCD_USERNAME", "margay").env("ETCD_PASSWORD", "hidden").output().unwrap()
    };
    let status = run("etcd status -o json");
    assert!(status.status.success(), "{status:?}");
    let compact = run("etcd compact --keep 0s");
    let said = String::from_utf8(compact.stderr).unwrap();
    assert!(!compact.status.success() && said.contains("compact_rev_key"), "{said}");
    let options = ConnectOptions::new().with_user("root", "hidden");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect([etcd.url()], Some(options)).await.unwrap();
        client.role_grant_permission("margay", Permission::read_write("compact_rev_key")).await.unwrap();
    });
    let compact = run("etcd compact --keep 0s");
    assert!(compact.status.success(), "{compact:?}");
    assert!(String::from_utf8(compact.stdout).unwrap().starts_with("Successfully compacted"));
}

#[test]
fn etcd_compaction_without_notes_deletes_nothing() {
    let etcd = Etcd::start().unwrap();
    write(&etcd, 10);
    let store = etcd.url().replace("http:", "etcd:");
    let run = |keep: &str| {
        // `/proc` takes no files.
        let args = ["--store", &store, "etcd", "compact", "--keep", keep, "--notes", "/proc/no/such/folder"];
        margay(args)
    };
    assert!(run("10m").failure().contains("run the command as root"));
    assert_eq!(Node::new(&etcd).margay("etcd status -o json").json()["oldest_revision"], json!(1));
    assert!(run("0s").answer().starts_with("Successfully compacted"));
}
