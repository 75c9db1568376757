//! Tests of secondary networks with several pools on etcd, and of the number of etcd requests that a full pool costs.

use std::collections::BTreeSet;
use std::thread;

use serde_json::{Value, json};

use crate::kills::values_stay_unique;
use crate::lab::Lab;
use crate::process::{Call, Outcome};
use crate::round_trips::asks;

/// Returns the configuration of a bridge network with the given `ipam` object.
fn conf(lab: &Lab, ipam: Value) -> Value {
    let mut conf = lab.conf();
    conf["name"] = "net".into();
    conf["type"] = "bridge".into();
    conf["isGateway"] = true.into();
    conf["ipam"] = ipam;
    conf["ipam"]["type"] = "margay-ipam".into();
    conf
}

#[test]
fn fallback_costs_no_query_when_pool_is_full() {
    let lab = Lab::start();
    lab.pool("small", "10.81.0.0/29");
    lab.pool("large", "10.82.0.0/24");
    let conf = conf(&lab, json!({"ipv4_pools": ["small", "large"]}));
    for number in 0..6 {
        Call::new("ADD", &format!("c{number}"), &conf).ok();
    }
    for number in 6..10 {
        let call = Call::new("ADD", &format!("c{number}"), &conf);
        assert_eq!(asks(&lab, &call), (2, 0), "ADD {number} with a full pool");
        assert_eq!(asks(&lab, &call), (1, 0), "a repeated ADD writes nothing");
    }
    assert_eq!(asks(&lab, &Call::new("DEL", "c9", &conf)), (2, 0), "DEL");
    // This DEL frees an address in the pool 10.81.0.0/29, which is small and full. The last ADD that succeeds in the
    // loop below must get the freed address.
    Call::new("DEL", "c0", &conf).ok();
    let mut last = String::new();
    for number in 10..300 {
        let outcome = Call::new("ADD", &format!("c{number}"), &conf).run();
        if outcome.exit != 0 {
            outcome.refusal().says(&["10.81.0.0/29", "10.82.0.0/24"]);
            break;
        }
        last = outcome.cidrs()[0].clone();
    }
    assert!(last.ends_with("/29"), "{last}");
    for number in 0..300 {
        Call::new("DEL", &format!("c{number}"), &conf).ok();
    }
    lab.nothing_is_left();
}

#[test]
fn fallback_weights_cost_no_query() {
    let lab = Lab::start();
    lab.pool("one", "10.81.0.0/26");
    lab.pool("two", "10.82.0.0/26");
    let conf = conf(&lab, json!({"ipv4_pools": ["one", "two"], "weights": {"one": 1, "two": 1}}));
    let mut pools = BTreeSet::new();
    for number in 0..8 {
        pools.insert(Call::new("ADD", &format!("c{number}"), &conf).ok().address().to_string()[..6].to_owned());
    }
    assert_eq!(pools.len(), 2);
    for number in 8..14 {
        assert_eq!(asks(&lab, &Call::new("ADD", &format!("c{number}"), &conf)), (2, 0), "ADD {number}");
    }
}

#[test]
fn fallback_leaves_both_pools_whole_when_callers_are_killed() {
    let lab = Lab::start();
    lab.pool("one", "10.81.0.0/29");
    lab.pool("two", "10.82.0.0/29");
    let conf = conf(&lab, json!({"ipv4_pools": ["one", "two"]}));
    values_stay_unique(&conf, Outcome::address);
    lab.nothing_is_left();
    let mut given = BTreeSet::new();
    for number in 0..10 {
        given.insert(Call::new("ADD", &format!("c{number}"), &conf).ok().address());
    }
    assert_eq!(given.len(), 10, "both pools are used up before an ADD fails");
    Call::new("ADD", "c10", &conf).run().refusal();
}

#[test]
fn fallback_agrees_on_subnet_for_first_calls_at_once() {
    let lab = Lab::start();
    let conf = conf(&lab, json!({"subnet": "auto"}));
    let gateways: BTreeSet<String> = thread::scope(|scope| {
        let conf = &conf;
        let add = |number| scope.spawn(move || Call::new("ADD", &format!("c{number}"), conf).ok().json());
        let adds = (0..6).map(add);
        let adds: Vec<_> = adds.collect();
        adds.into_iter().map(|add| add.join().unwrap()["ips"][0]["gateway"].to_string()).collect()
    });
    assert_eq!(gateways.len(), 1, "{gateways:?}");
    assert_eq!(asks(&lab, &Call::new("ADD", "c6", &conf)), (2, 0), "the pool is found by its name");
}
