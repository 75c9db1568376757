//! Tests how many requests a plugin call sends to etcd, as counted by etcd, and how hints save requests.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

use serde_json::Value;

use crate::lab::{Lab, hints_about};
use crate::process::Call;

/// The numbers of transactions and range requests that etcd has answered; the test's own connections do not change
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    txns: u64,
    ranges: u64,
}

fn asked(lab: &Lab) -> Asked {
    let address = lab.etcds[0].address();
    let mut connection = TcpStream::connect(address).unwrap();
    write!(connection, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    let count = |method: &str| {
        let name = format!("grpc_method=\"{method}\",grpc_service=\"etcdserverpb.KV\"");
        let lines = text.lines().filter(|line| line.starts_with("grpc_server_handled_total") && line.contains(&name));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    Asked { txns: count("Txn"), ranges: count("Range") }
}

/// Runs a plugin call that must succeed, and returns how many transactions and range requests it has sent to etcd.
#[track_caller]
pub(crate) fn asks(lab: &Lab, call: &Call) -> (u64, u64) {
    let before = asked(lab);
    call.ok();
    let after = asked(lab);
    (after.txns - before.txns, after.ranges - before.ranges)
}

/// Returns a test cluster with an IPv4 and an IPv6 pool, and a network configuration that uses both pools.
fn lab() -> (Lab, Value) {
    let lab = Lab::start();
    lab.pool("six", "fd00:77::/112");
    let conf = lab.conf();
    (lab, conf)
}

fn dual(conf: &Value) -> Value {
    let mut conf = conf.clone();
    conf["ipam"]["assign_ipv6"] = "true".into();
    conf
}

/// Returns the path of the newest hint file about the test cluster's store.
fn hint_of(lab: &Lab) -> PathBuf {
    let written = |path: &PathBuf| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    hints_about(&lab.location()).into_iter().max_by_key(written).expect("nothing was remembered")
}

#[test]
fn steady_call_takes_two_requests() {
    let (lab, conf) = lab();
    assert_eq!(asks(&lab, &Call::new("ADD", "c1", &conf)), (3, 0), "the first of a host");
    assert_eq!(asks(&lab, &Call::new("ADD", "c2", &conf)), (2, 0), "ADD");
    assert_eq!(asks(&lab, &Call::new("DEL", "c2", &conf)), (2, 0), "DEL");
    assert_eq!(asks(&lab, &Call::new("DEL", "c2", &conf)), (1, 0), "DEL again");
    Call::new("ADD", "c3", &dual(&conf)).ok();
    assert_eq!(asks(&lab, &Call::new("ADD", "c4", &dual(&conf))), (2, 0), "ADD of both families");
    assert_eq!(asks(&lab, &Call::new("DEL", "c4", &dual(&conf))), (2, 0), "DEL of both families");
    let given = Call::new("ADD", "c5", &conf).with("CNI_ARGS", "IP=10.77.0.130");
    assert_eq!(asks(&lab, &given), (2, 0), "ADD of a given address");
    assert_eq!(asks(&lab, &Call::new("DEL", "c5", &conf)), (2, 0), "DEL of it");
}

#[test]
fn stale_hint_of_earlier_cluster_costs_one_request() {
    let (lab, conf) = lab();
    Call::new("ADD", "c1", &conf).ok();
    for kind in ["assignment", "handle", "host"] {
        lab.erase(&format!("/calico/ipam/v2/{kind}"));
    }
    assert_eq!(asks(&lab, &Call::new("ADD", "c2", &conf)), (3, 1), "the first of a host");
}

#[test]
fn stale_hint_costs_one_request() {
    let (lab, conf) = lab();
    let first = Call::new("ADD", "c1", &conf).ok().address();
    let hint = hint_of(&lab);
    let good = fs::read_to_string(&hint).unwrap();
    let block = serde_json::from_str::<Value>(&good).unwrap()["blocks"][0].as_str().unwrap().to_owned();
    for (number, bad) in [
        String::new(),
        "nonsense".into(),
        good[..good.len() / 2].to_owned(),
        good.replace(&block, "10.99.0.0/26"),
        good.replace(&block, "10.77.0.0/16"),
        "x".repeat(1 << 20),
    ]
    .iter()
    .enumerate()
    {
        let container = format!("bad-{number}");
        fs::write(&hint, bad).unwrap();
        // If the hint is invalid, one request of the ADD reads the block, the block's affinity and the neighbouring
        // blocks' keys.
        assert_eq!(asks(&lab, &Call::new("ADD", &container, &conf)), (2, 3), "{bad:.100}");
        assert!(fs::read_to_string(&hint).unwrap().contains(&block), "it was not mended: {bad:.100}");
        fs::write(&hint, bad).unwrap();
        assert_eq!(asks(&lab, &Call::new("DEL", &container, &conf)), (2, 1), "{bad:.100}");
    }
    fs::remove_file(&hint).unwrap();
    let mut reported = conf;
    reported["prevResult"] = serde_json::json!({"cniVersion": "1.0.0", "ips": [{"address": format!("{first}/32")}]});
    assert_eq!(asks(&lab, &Call::new("DEL", "c1", &reported)), (2, 0), "DEL by who is told the address");
    lab.nothing_is_left();
}

/// Tests that a hint read before the cluster was restored from a backup only costs an ADD additional requests.
#[test]
fn stale_hint_from_before_restore_costs_two_requests() {
    let (lab, conf) = lab();
    Call::new("ADD", "c1", &conf).ok();
    let hint = hint_of(&lab);
    lab.erase("/calico/ipam/v2/");
    // The restored store is in its state before the first ADD, so none of the keys that the hint names exists.
    assert_eq!(asks(&lab, &Call::new("DEL", "c1", &conf)), (1, 0));
    // A new block must not overlap with an assigned prefix, so the ADD must read the blocks of assigned prefixes, too.
    // Without a hint, the first request of the ADD would already read the blocks of assigned prefixes.
    assert_eq!(asks(&lab, &Call::new("ADD", "c2", &conf)), (3, 1));
    assert!(hint.exists());
    Call::new("DEL", "c2", &conf).ok();
    lab.nothing_is_left();
}
