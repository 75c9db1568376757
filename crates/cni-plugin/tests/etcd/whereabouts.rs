//! Tests on etcd of secondary networks with whereabouts' configuration keys, whose pool is created by the first ADD in
//! the cluster.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::thread;

use serde_json::{Value, json};

use crate::lab::Lab;
use crate::process::Call;
use crate::round_trips::asks;

fn conf(lab: &Lab, node: &str, network: &str, ipam: &Value) -> Value {
    let mut conf = lab.conf();
    conf["name"] = network.into();
    conf["type"] = "macvlan".into();
    conf["nodename"] = node.into();
    conf["ipam"] = ipam.clone();
    conf["ipam"]["type"] = "margay-ipam".into();
    conf
}

#[test]
fn ranges_make_one_pool_when_nodes_begin_at_once() {
    let lab = Lab::start();
    lab.put("/calico/resources/v3/projectcalico.org/nodes/node-2", r#"{"metadata":{"name":"node-2"}}"#);
    lab.put("/calico/resources/v3/projectcalico.org/clusterinformations/default", "{}");
    let ipam = json!({"range": "10.79.0.8-10.79.0.23/24", "exclude": ["10.79.0.12/30"]});
    // The range has twelve addresses, and twelve ADDs on two networks and two nodes must get all of them.
    let calls: Vec<Call> = (0..12)
        .map(|number| {
            let (node, network) = (format!("node-{}", number % 2 + 1), format!("net-{}", number / 2 % 2));
            Call::new("ADD", &format!("c{number}"), &conf(&lab, &node, &network, &ipam))
        })
        .collect();
    let results: Vec<Value> = thread::scope(|scope| {
        let running: Vec<_> = calls.iter().map(|call| scope.spawn(|| call.ok().json())).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let cidr = |result: &Value| result["ips"][0]["address"].as_str().unwrap().to_owned();
    let addresses: BTreeSet<IpAddr> =
        results.iter().map(|result| cidr(result).strip_suffix("/24").unwrap().parse().unwrap()).collect();
    let expected: BTreeSet<IpAddr> =
        (8..=23).filter(|host| !(12..16).contains(host)).map(|host| IpAddr::from([10, 79, 0, host])).collect();
    assert_eq!(addresses, expected);
    assert!(results.iter().all(|result| result["ips"][0].get("gateway").is_none()), "{results:?}");
    let full = Call::new("ADD", "more", &conf(&lab, "node-1", "net-0", &ipam)).run().refusal();
    full.says(&["10.79.0.0/24"]);
    for number in 0..calls.len() {
        let conf = conf(&lab, &format!("node-{}", number % 2 + 1), &format!("net-{}", number / 2 % 2), &ipam);
        Call::new("DEL", &format!("c{number}"), &conf).ok();
    }
    lab.nothing_is_left();
}

#[test]
fn ranges_are_apart_for_networks_of_one_name() {
    let lab = Lab::start();
    lab.put("/calico/resources/v3/projectcalico.org/nodes/node-2", r#"{"metadata":{"name":"node-2"}}"#);
    let of = |node: usize, third: usize| {
        let ipam = json!({"range": format!("10.79.{third}.0/24"), "ipRanges": [{"range": format!("fd79:{}::/64", third + 1)}]});
        conf(&lab, &format!("node-{}", node + 1), "storage", &ipam)
    };
    for round in 0..4 {
        // The eight concurrent ADDs of a test round use two nodes. In each test round, half of the ADDs use a new
        // address range.
        let calls: Vec<(usize, Call)> = (0..8)
            .map(|number| {
                let third = if number / 2 % 2 == 0 { 0 } else { round + 1 };
                (third, Call::new("ADD", &format!("c{number}"), &of(number % 2, third)))
            })
            .collect();
        thread::scope(|scope| {
            let running: Vec<_> = calls.iter().map(|(_, call)| scope.spawn(|| call.ok().json())).collect();
            for (thread, (third, _)) in running.into_iter().zip(&calls) {
                let result = thread.join().unwrap();
                let address = |at: usize| result["ips"][at]["address"].as_str().unwrap();
                assert!(address(0).starts_with(&format!("10.79.{third}.")), "{result}");
                assert!(address(1).starts_with(&format!("fd79:{}:", third + 1)), "{result}");
            }
        });
        for number in 0..calls.len() {
            Call::new("DEL", &format!("c{number}"), &of(number % 2, 9)).ok();
        }
        lab.nothing_is_left();
    }
}

#[test]
fn ranges_cost_no_query() {
    let lab = Lab::start();
    let conf = conf(&lab, "node-1", "lan", &json!({"range": "10.79.0.0/24", "range_start": "10.79.0.9"}));
    Call::new("ADD", "c1", &conf).ok();
    assert_eq!(asks(&lab, &Call::new("ADD", "c2", &conf)), (2, 0), "ADD");
    assert_eq!(asks(&lab, &Call::new("DEL", "c2", &conf)), (2, 0), "DEL");
    Call::new("DEL", "c1", &conf).ok();
}

#[test]
fn ranges_of_host_local_stay_with_one_node() {
    let lab = Lab::start();
    let conf = conf(&lab, "node-1", "lan", &json!({"subnet": "10.79.0.0/24"}));
    let refusal = Call::new("ADD", "c1", &conf).run().refusal();
    assert_eq!(refusal.code, 7);
    refusal.says(&["ipam defines a pool of its own, but the store is a cluster's", "range"]);
}
