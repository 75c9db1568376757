//! Tests ADDs through the daemon when the network configuration has several pools and several sets of ranges.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{Call, Ended};

fn json_of(ended: &Ended) -> Value {
    serde_json::from_str(&ended.out).unwrap()
}

/// ADDs get the same answers with and without a daemon until both pools of the first set of `ranges` are full.
#[test]
fn subnet_sets_and_full_pools_match_with_daemon() {
    let ipam = json!({"ranges": [
        [{"subnet": "10.85.0.0/29"}, {"subnet": "10.86.0.0/29", "gateway": "10.86.0.6"}],
        [{"subnet": "10.87.0.0/24"}],
    ]});
    for engine in ENGINES {
        let labs = [Lab::with_pool(engine, "10.99.0.0/24"), Lab::with_pool(engine, "10.99.0.0/24")];
        let mut daemon = Daemon::start(&labs[1]);
        let given = labs.each_ref().map(|lab| {
            let conf = lab.conf_with("bridge", ipam.clone());
            let calls: Vec<_> = (0..12).map(|number| Call::new("ADD", &format!("c{number}"), &conf)).collect();
            let ended: Vec<_> = calls.iter().map(Call::run).collect();
            assert!(ended[..10].iter().all(|add| add.code == Some(0)), "{ended:?}");
            assert!(ended[10..].iter().all(|add| add.code == Some(1) && add.out.contains("10.86.0.0/29")), "{ended:?}");
            let gateways: Vec<Value> = ended[..10]
                .iter()
                .map(|add| json!([json_of(add)["ips"][0]["gateway"], json_of(add)["ips"][1]["gateway"]]))
                .collect();
            let addresses: BTreeSet<_> = ended[..10].iter().flat_map(Ended::addresses).collect();
            assert_eq!(addresses.len(), 20);
            assert_eq!(calls[3].run().addresses(), ended[3].addresses(), "a repeated ADD gets another address");
            (0..10).for_each(|number| drop(Call::new("DEL", &format!("c{number}"), &conf).ok()));
            lab.nothing_is_held();
            lab.is_in_order();
            gateways
        });
        assert_eq!(given[0], given[1]);
        assert_eq!(given[0][4..6], [json!(["10.85.0.1", "10.87.0.1"]), json!(["10.86.0.6", "10.87.0.1"])]);
        daemon.runs();
    }
}

#[test]
fn subnet_choice_agrees_for_first_calls_at_once() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.200.0.0/24");
        let mut daemon = Daemon::start(&lab);
        let conf = lab.conf_with("bridge", json!({"subnet": "auto"}));
        let started: Vec<_> = (0..6).map(|number| Call::new("ADD", &format!("c{number}"), &conf).start()).collect();
        let ended: Vec<_> = started.into_iter().map(|call| call.end().ok()).collect();
        let gateways: BTreeSet<_> = ended.iter().map(|add| json_of(add)["ips"][0]["gateway"].to_string()).collect();
        assert!(gateways.len() == 1 && !gateways.contains("\"10.200.0.1\""), "{gateways:?}");
        lab.is_in_order();
        daemon.runs();
    }
}
