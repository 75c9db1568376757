//! Tests the history limits that a daemon sets, and how clients of etcd's API use the history.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::json;

use super::Api;
use super::leases::lab_with_leases;
use crate::lab::{ENGINES, Lab};
use crate::programs::{margay, run};

/// Requests the daemon's metrics.
fn metrics(socket: &std::path::Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn bounds(lab: &Lab) -> [Option<u64>; 4] {
    let status = lab.margay("store status -o json").ok().json();
    ["max_revisions", "max_bytes", "max_age_seconds", "min_age_seconds"].map(|name| status["history"][name].as_u64())
}

#[test]
fn history_bounds_stay_when_daemon_sets_them() {
    const WEEK: u64 = 7 * 24 * 3600;
    for engine in ENGINES {
        let lab = lab_with_leases(engine);
        assert_eq!(bounds(&lab), [Some(10_000), Some(16 << 20), Some(WEEK), None]);
        let api = Api::start(&lab);
        assert_eq!(bounds(&lab), [Some(10_000), Some(64 << 20), Some(WEEK), Some(300)]);
        api.end();
        let listen = ["--listen", "http://127.0.0.1:0", "--insecure-loopback"];
        let own = ["--history-revisions", "20", "--history-mib", "2", "--history-age", "2h", "--history-min-age", "0s"];
        let api = Api::start_with(&lab, &[&listen[..], &own].concat());
        let wanted = [Some(20), Some(2 << 20), Some(7200), Some(0)];
        assert_eq!(bounds(&lab), wanted);
        api.end();
        // While no daemon runs, the plugin enforces the history limits that the last daemon recorded in the store.
        for number in 0..15 {
            lab.add(&format!("c{number}")).ok();
            lab.del(&format!("c{number}")).ok();
        }
        let status = lab.margay("store status -o json").ok().json();
        assert_eq!(bounds(&lab), wanted, "{engine}");
        let kept = status["history"]["revisions"].as_u64().unwrap();
        assert!((20..=25).contains(&kept), "{engine}: {status}");
        lab.margay("store verify").ok();
    }
}

#[test]
fn history_bounds_need_store_that_can_have_them() {
    let lab = Lab::with_pool("redb", "10.77.0.0/24");
    let refused = run(margay(["--store", &lab.url(), "serve", "--history-mib", "1"])).failed();
    assert!(refused.err.contains("format 2") && refused.err.contains("store upgrade"), "{refused:?}");
    let etcd = run(margay(["--store", "etcd://127.0.0.1:1", "serve", "--history-age", "1h"])).failed();
    assert!(etcd.err.contains("sled or redb"), "{etcd:?}");
    for wrong in ["--history-mib 0", "--history-revisions 0", "--history-age soon"] {
        let words = ["--store", &lab.url(), "serve"].map(str::to_owned).into_iter();
        let words: Vec<String> = words.chain(wrong.split(' ').map(str::to_owned)).collect();
        let refused = run(margay(words.iter().map(String::as_str)));
        assert!(refused.code == Some(1) && refused.err.contains("invalid value"), "{wrong}: {refused:?}");
    }
    // A daemon started without history-limit options can serve etcd's API even if the store's format does not record
    // such limits.
    Api::start(&lab).end();
    assert_eq!(bounds(&lab)[3], None);
}

#[test]
fn history_users_are_shown_in_status_and_metrics() {
    let lab = lab_with_leases("sled");
    let socket = lab.root().join("page.sock");
    let http = format!("unix:{}", socket.display());
    let api = Api::start_with(&lab, &["--listen", "http://127.0.0.1:0", "--insecure-loopback", "--http", &http]);
    lab.add("c1").ok();
    for number in 0..30 {
        api.etcdctl(&format!("put /other/program/{number} {}", "x".repeat(200))).ok();
    }
    let status = lab.margay("store status -o json").ok().json();
    let largest = status["history"]["largest"].as_array().unwrap();
    assert_eq!((&largest[0]["prefix"], &largest[0]["changes"]), (&json!("/other/program/"), &json!(30)), "{status}");
    assert!(largest.iter().any(|group| group["prefix"] == "/calico/ipam/"), "{status}");
    let text = lab.margay("store status").ok().out;
    assert!(
        text.contains("Largest:   /other/program/ ") && text.contains("; nothing younger than 5 minutes"),
        "{text}"
    );
    let numbers = metrics(&socket);
    let value = |name: &str| -> f64 {
        let line = numbers.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}: {numbers}")).parse().unwrap()
    };
    assert_eq!(value("margay_store_history_bytes"), status["history"]["bytes"].as_f64().unwrap());
    assert_eq!(value("margay_store_history_max_bytes"), f64::from(64 << 20));
    api.end();
}
