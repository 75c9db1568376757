//! Tests quotas with several assignments in one commit, and with plugins that are killed.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{Call, Ended};

fn of_shop(lab: &Lab, verb: &str, container: &str) -> Call {
    let pod = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={container}");
    Call::new(verb, container, &lab.conf()).args(&pod)
}

/// Returns the number of addresses that count against the quota.
fn used(lab: &Lab) -> u64 {
    lab.margay("quota list -o json").ok().json()["quotas"][0]["used"].as_u64().unwrap()
}

#[track_caller]
fn is_refused(ended: Ended) -> Ended {
    let ended = ended.failed();
    assert!(ended.out.contains("the quota of namespace shop is used up"), "{ended:?}");
    ended
}

#[test]
fn quota_gives_crowd_as_many_addresses_as_allowed() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.78.0.0/24");
        let mut daemon = Daemon::start(&lab);
        lab.margay("quota set --namespace shop 7").ok();
        let adds: Vec<_> = lab.held_open(async |_| {
            let adds = (0..16).map(|number| of_shop(&lab, "ADD", &format!("c{number}")).start()).collect();
            thread::sleep(Duration::from_millis(300));
            adds
        });
        let ended: Vec<_> = adds.into_iter().map(|add| add.end()).collect();
        let (given, refused): (Vec<_>, Vec<_>) = ended.into_iter().partition(|add| add.code == Some(0));
        assert_eq!((given.len(), refused.len(), used(&lab)), (7, 9, 7));
        refused.into_iter().for_each(|add| _ = is_refused(add).by_daemon());
        let listed = lab.margay("quota list -o json").ok().json();
        let row = json!({"kind": "namespace", "name": "shop", "limit": 7, "used": 7, "percent": 100});
        assert_eq!(listed, json!({"quotas": [row]}));
        // Without the daemon, an ADD above the quota is refused with the same message as with the daemon.
        let beside = is_refused(of_shop(&lab, "ADD", "more").run());
        daemon.runs();
        daemon.end().ok();
        let alone = is_refused(of_shop(&lab, "ADD", "more").run());
        assert_eq!(beside.out, alone.out);
        lab.is_in_order();
    }
}

#[test]
fn quota_has_room_again_when_plugins_of_daemon_are_killed() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.78.0.0/24");
        let daemon = Daemon::start(&lab);
        lab.margay("quota set --namespace shop 3").ok();
        let random = std::cell::RefCell::new(fastrand::Rng::with_seed(26));
        for round in 0..12 {
            let names: Vec<String> = (0..6).map(|number| format!("c{round}-{number}")).collect();
            let adds: Vec<_> = names.iter().map(|name| of_shop(&lab, "ADD", name).start()).collect();
            thread::sleep(Duration::from_millis(random.borrow_mut().u64(0..30)));
            for add in adds {
                match random.borrow_mut().bool() {
                    true => _ = add.kill(),
                    false => _ = add.end(),
                }
            }
            assert!(lab.held_there().len() <= 3);
            for name in &names {
                of_shop(&lab, "DEL", name).run().ok();
            }
            assert_eq!((used(&lab), lab.held_there().len()), (0, 0));
        }
        for number in 0..3 {
            of_shop(&lab, "ADD", &format!("last{number}")).ok().by_daemon();
        }
        is_refused(of_shop(&lab, "ADD", "more").run());
        daemon.end().ok();
        lab.is_in_order();
    }
}
