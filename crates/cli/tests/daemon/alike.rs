//! Tests that the plugin's verbs give the same answers with a daemon and without a daemon.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{Call, Ended};

const POOL: &str = "10.85.0.0/24";

/// Returns the parts of a plugin call's outcome that a container runtime reads: exit code and stdout.
fn seen(ended: &Ended) -> (Option<i32>, String) {
    (ended.code, ended.out.clone())
}

/// Starts plugin calls while the store is locked, so that the daemon receives all of them together, and returns their
/// outcomes.
fn together(lab: &Lab, calls: &[Call]) -> Vec<Ended> {
    let started: Vec<_> = lab.held_open(async |_| {
        let started = calls.iter().map(Call::start).collect();
        std::thread::sleep(std::time::Duration::from_millis(300));
        started
    });
    started.into_iter().map(|call| call.end()).collect()
}

/// Returns the network configuration with a `prevResult` that contains the given addresses.
fn after(conf: &Value, addresses: &[&str]) -> Value {
    let mut conf = conf.clone();
    let ips: Vec<_> = addresses.iter().map(|address| json!({"address": address})).collect();
    conf["prevResult"] = json!({"cniVersion": "1.0.0", "ips": ips});
    conf["cniVersion"] = "1.1.0".into();
    conf
}

#[test]
fn answers_match_for_check_status_and_refusals() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        lab.add("c1").ok();
        let address = lab.held().into_keys().next().unwrap();
        let bridge = lab.conf();
        let calico = lab.conf_with("calico", json!({}));
        let mut modern = bridge.clone();
        modern["cniVersion"] = "1.1.0".into();
        let wrong_pool = lab.conf_with("bridge", json!({"ipv4_pools": ["none"]}));
        let calls = [
            Call::new("CHECK", "c1", &after(&bridge, &[&format!("{address}/24")])),
            Call::new("CHECK", "c1", &after(&bridge, &["10.85.0.99/24"])),
            Call::new("CHECK", "c2", &after(&bridge, &[&format!("{address}/24")])),
            Call::new("CHECK", "c2", &after(&bridge, &[])),
            Call::new("STATUS", "", &modern),
            Call::new("STATUS", "", &wrong_pool),
            // From here on, container `c1` already has an address, so its ADDs are repeats.
            Call::new("ADD", "c1", &bridge),
            Call::new("ADD", "c1", &calico),
            Call::new("ADD", "c1", &calico).args(&format!("IP={address}")),
            Call::new("ADD", "c2", &calico).args(&format!("IP={address}")),
            Call::new("ADD", "c2", &bridge).args(&format!("IP={address}")),
            Call::new("ADD", "c2", &bridge).args("IP=192.0.2.1"),
            Call::new("ADD", "c2", &calico).args("IP=192.0.2.1"),
            Call::new("ADD", "c2", &wrong_pool),
            Call::new("ADD", "c2", &lab.conf_with("bridge", json!({"assign_ipv6": "true"}))),
            Call::new("DEL", "c2", &bridge),
            Call::new("ADD", "../c2", &bridge),
        ];
        let before = lab.held();
        let without: Vec<_> = calls.iter().map(|call| seen(&call.run())).collect();
        assert_eq!(lab.held(), before, "these calls change nothing");
        let mut daemon = Daemon::start(&lab);
        for (call, without) in calls.iter().zip(without) {
            assert_eq!(seen(&call.run()), without, "{engine}: {call:?}");
        }
        assert_eq!(lab.held(), before);
        daemon.runs();
    }
}

#[test]
fn answers_match_for_gc() {
    for engine in ENGINES {
        let labs = [Lab::with_pool(engine, POOL), Lab::with_pool(engine, POOL)];
        let mut daemon = Daemon::start(&labs[1]);
        for lab in &labs {
            for number in 0..6 {
                lab.add(&format!("c{number}")).ok();
            }
            // GC releases only addresses that were assigned before the runtime made its list of valid attachments.
            std::thread::sleep(std::time::Duration::from_millis(1100));
            let mut conf = lab.conf();
            conf["cniVersion"] = "1.1.0".into();
            conf["cni.dev/valid-attachments"] =
                json!([{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c4", "ifname": "eth0"}]);
            Call::new("GC", "", &conf).ok();
            lab.is_in_order();
        }
        let [without, beside] = labs.each_ref().map(Lab::held);
        assert_eq!(without, beside);
        daemon.runs();
    }
}

#[test]
fn answers_match_for_same_container_repeated() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        for conf in [lab.conf(), lab.conf_with("calico", json!({}))] {
            let calls: Vec<_> = (0..8).map(|_| Call::new("ADD", "c1", &conf)).collect();
            let ended = together(&lab, &calls);
            let given: BTreeSet<_> = ended.into_iter().map(|add| add.ok().address()).collect();
            assert_eq!(given.len(), 1, "{given:?}");
            assert_eq!(lab.held().into_keys().collect::<BTreeSet<_>>(), given);
            lab.del("c1").ok().by_daemon();
            lab.nothing_is_held();
        }
        lab.is_in_order();
        daemon.runs();
    }
}

#[test]
fn answers_match_for_same_address_requested_by_many() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        for conf in [lab.conf(), lab.conf_with("calico", json!({}))] {
            let calls: Vec<_> = (0..8)
                .map(|number| {
                    let call = Call::new("ADD", &format!("c{number}"), &conf);
                    if number % 2 == 0 { call.args("IP=10.85.0.77") } else { call }
                })
                .collect();
            let ended = together(&lab, &calls);
            let (given, refused): (Vec<_>, Vec<_>) = ended.into_iter().partition(|add| add.code == Some(0));
            assert_eq!((given.len(), refused.len()), (5, 3));
            let addresses: BTreeSet<_> = given.iter().map(Ended::address).collect();
            assert_eq!(addresses.len(), 5);
            assert_eq!(lab.held().into_keys().collect::<BTreeSet<_>>(), addresses);
            let alone = {
                daemon.end().ok();
                let alone = Call::new("ADD", "c99", &conf).args("IP=10.85.0.77").run().failed();
                daemon = Daemon::start(&lab);
                alone
            };
            for refused in refused {
                assert_eq!(seen(&refused), seen(&alone));
            }
            for number in 0..8 {
                Call::new("DEL", &format!("c{number}"), &conf).ok().by_daemon();
            }
            lab.nothing_is_held();
        }
        lab.is_in_order();
        daemon.runs();
    }
}

#[test]
fn answers_match_for_container_added_and_deleted_at_once() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        for _ in 0..5 {
            let calls: Vec<_> =
                (0..10).map(|number| if number % 2 == 0 { lab.add("c1") } else { lab.del("c1") }).collect();
            together(&lab, &calls).into_iter().for_each(|call| _ = call.ok().by_daemon());
            assert!(lab.held().len() <= 1);
            lab.del("c1").ok().by_daemon();
            lab.nothing_is_held();
        }
        lab.is_in_order();
        daemon.runs();
    }
}
