//! Tests etcd's API in the daemon with Debian's etcdctl.

use std::io::{BufRead, BufReader};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use super::Api;
use crate::lab::{ENGINES, Lab};
use crate::programs::Running;

#[test]
fn etcdctl_puts_reads_and_deletes_keys() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.75.0.0/24");
        let api = Api::start(&lab);
        for (key, value) in [("/t/a", "1"), ("/t/b", "3"), ("/t/c", "2"), ("/t/a", "4")] {
            assert_eq!(api.etcdctl(&format!("put {key} {value}")).ok().out, "OK\n");
        }
        let out = |args: &str| api.etcdctl(args).ok().out;
        assert_eq!(out("put /t/a 5 --prev-kv"), "OK\n/t/a\n4\n");
        assert_eq!(out("get /t/a"), "/t/a\n5\n");
        assert_eq!(out("get /t/a --print-value-only"), "5\n");
        assert_eq!(out("get /t/a --consistency=s"), "/t/a\n5\n");
        assert_eq!(out("get --prefix /t/ --keys-only").replace("\n\n", "\n"), "/t/a\n/t/b\n/t/c\n");
        assert_eq!(out("get --prefix /t/ --limit 2 --keys-only").replace("\n\n", "\n"), "/t/a\n/t/b\n");
        assert_eq!(out("get --from-key /t/b --print-value-only"), "3\n2\n");
        assert_eq!(out("get /t/a /t/c --print-value-only"), "5\n3\n");
        assert_eq!(out("get --prefix /t/ --keys-only --write-out fields").lines().last(), Some("\"Count\" : 3"));
        let sorted = |by: &str| out(&format!("get --prefix /t/ --print-value-only --sort-by={by} --order=DESCEND"));
        assert_eq!(sorted("VALUE"), "5\n3\n2\n");
        assert_eq!(sorted("KEY"), "2\n3\n5\n");
        assert_eq!(sorted("CREATE"), "2\n3\n5\n");
        assert_eq!(sorted("MODIFY"), "5\n2\n3\n");
        assert_eq!(sorted("VERSION").lines().next(), Some("5"));
        let stored: Value = serde_json::from_str(&out("get /t/a --write-out json")).unwrap();
        let (entry, header) = (&stored["kvs"][0], &stored["header"]);
        assert_eq!((&entry["version"], &entry["mod_revision"]), (&Value::from(3), &header["revision"]));
        let before = entry["mod_revision"].as_i64().unwrap() - 1;
        assert_eq!(out(&format!("get /t/a --print-value-only --rev {before}")), "4\n");
        assert_eq!(out("put /t/b --ignore-value --prev-kv"), "OK\n/t/b\n3\n");
        assert_eq!(out("del /t/b --prev-kv"), "1\n/t/b\n3\n");
        assert_eq!(out("del --prefix /t/"), "2\n");
        assert_eq!(out("get --prefix /t/"), "");
        api.end();
        lab.is_in_order();
    }
}

#[test]
fn etcdctl_transaction_does_one_branch_whole() {
    let lab = Lab::with_pool("redb", "10.75.0.0/24");
    let api = Api::start(&lab);
    api.etcdctl("put /t/a one").ok();
    let txn = |text: &str| Running::start(api.etcdctl_command("txn"), text).end().ok().out;
    let text = "value(\"/t/a\") = \"one\"\nversion(\"/t/a\") > \"0\"\ncreate(\"/t/none\") = \"0\"\n\n\
                put /t/a two\nput /t/b two\nget --prefix /t/\n\nget /t/a\n\n";
    assert_eq!(txn(text), "SUCCESS\n\nOK\n\nOK\n\n/t/a\ntwo\n/t/b\ntwo\n");
    assert_eq!(txn(text), "FAILURE\n\n/t/a\ntwo\n");
    api.end();
}

#[test]
fn etcdctl_watch_delivers_from_any_revision() {
    let lab = Lab::with_pool("redb", "10.75.0.0/24");
    let api = Api::start(&lab);
    let put: Value = serde_json::from_str(&api.etcdctl("put /t/a 1 --write-out json").ok().out).unwrap();
    let from = put["header"]["revision"].as_i64().unwrap();
    let mut watch = api.etcdctl_command(&format!("watch --prefix /t/ --rev {from} --prev-kv")).spawn().unwrap();
    let mut said = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = |count: usize| said.by_ref().take(count).map(Result::unwrap).collect::<Vec<_>>();
    // etcdctl prints an empty line if a key has no previous value.
    let mut first = next(3);
    if first[1].is_empty() {
        first = [first, next(2)].concat();
        first.retain(|line| !line.is_empty());
    }
    assert_eq!(first[..3], ["PUT", "/t/a", "1"]);
    api.etcdctl("put /t/b 2").ok();
    api.etcdctl("del /t/a").ok();
    let mut events = Vec::new();
    while !events.contains(&"DELETE".to_owned()) {
        events.extend(next(1));
    }
    assert!(events.starts_with(&["PUT".to_owned()]) && events.contains(&"/t/b".to_owned()), "{events:?}");
    watch.kill().unwrap();
    watch.wait().unwrap();
    api.end();
}

#[test]
fn etcdctl_shows_server_status() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.75.0.0/24");
        let api = Api::start(&lab);
        assert!(api.etcdctl("endpoint health").ok().err.contains("is healthy"));
        let status: Value = serde_json::from_str(&api.etcdctl("endpoint status -w json").ok().out).unwrap();
        let status = &status[0]["Status"];
        assert_eq!(status["version"], "3.5.13");
        assert!(status["dbSize"].as_u64().unwrap() > 0 && status["leader"] == status["header"]["member_id"]);
        let members = api.etcdctl("member list").ok().out;
        assert!(members.contains(&format!("http://{}", api.address)) && members.contains("started"), "{members}");
        assert_eq!(api.etcdctl("alarm list").ok().out, "");
        assert!(api.etcdctl("defrag").ok().out.contains("Finished defragmenting"));
        api.etcdctl("put /t/a 1").ok();
        api.etcdctl("put /t/a 2").ok();
        let revision = lab.revision();
        api.etcdctl(&format!("compaction {revision}")).ok();
        let old = api.etcdctl(&format!("get /t/a --rev {}", revision - 1)).failed();
        assert!(old.err.contains("etcdserver: mvcc: required revision has been compacted"), "{old:?}");
        let again = api.etcdctl(&format!("compaction {}", revision - 1)).failed();
        assert!(again.err.contains("etcdserver: mvcc: required revision has been compacted"), "{again:?}");
        let future = api.etcdctl(&format!("compaction {}", revision + 100)).failed();
        assert!(future.err.contains("etcdserver: mvcc: required revision is a future revision"), "{future:?}");
        api.end();
    }
}

#[test]
fn etcdctl_is_refused_with_reason_when_not_offered() {
    let lab = Lab::with_pool("redb", "10.75.0.0/24");
    let api = Api::start(&lab);
    for (args, text) in [
        ("snapshot save /tmp/no-such-snapshot", "margay store backup"),
        ("put /t/a 1 --lease=1234", "etcdserver: requested lease not found"),
        ("user add root:x", "etcdserver: authentication is not enabled"),
        ("move-leader 1", "MoveLeader"),
        ("member add other --peer-urls=http://127.0.0.1:1", "one member"),
        ("endpoint hashkv", "margay store verify"),
    ] {
        let refused = api.etcdctl(args);
        assert!(refused.code != Some(0) && refused.err.contains(text), "{args}: {refused:?}");
    }
    // etcdctl sends its requests without the user name and password, because the API has no users; etcdctl does the
    // same if etcd has no users.
    assert_eq!(api.etcdctl("--user root:secret put /t/a 1").ok().out, "OK\n");
    api.end();
}

#[test]
fn etcdctl_large_list_comes_whole() {
    let lab = Lab::with_pool("redb", "10.75.0.0/24");
    let api = Api::start(&lab);
    lab.margay("pool create large 10.90.0.0/16").ok();
    let value = "x".repeat(100_000);
    for number in 0..60 {
        api.etcdctl(&format!("put /t/{number:03} {value}")).ok();
    }
    let listed = api.etcdctl("get --prefix /t/ --print-value-only").ok();
    assert_eq!(listed.out.len(), 60 * (value.len() + 1));
    sleep(Duration::from_millis(10));
    api.end();
}
