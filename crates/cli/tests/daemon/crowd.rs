//! Tests many plugins that call the daemon at the same time.

use std::collections::BTreeSet;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::{Call, Running};

/// Checks that `count` simultaneous ADDs get different addresses, and that the daemon makes fewer commits than there
/// are ADDs.
#[track_caller]
fn crowd(lab: &Lab, count: usize) {
    let mut daemon = Daemon::start(lab);
    // The first ADD claims a block for the node.
    lab.add("first").ok().by_daemon();
    let before = lab.revision();
    // The store is locked until all ADDs are queued, so that the daemon can commit them together.
    let adds: Vec<_> = lab.held_open(async |_| {
        let sockets = daemon.sockets();
        let adds = (0..count).map(|number| lab.add(&format!("c{number}")).start()).collect();
        daemon.wait_for_requests(count, sockets);
        adds
    });
    let given: BTreeSet<_> = adds.into_iter().map(|add| add.end().ok().by_daemon().address()).collect();
    assert_eq!(given.len(), count, "an address was given twice");
    let commits = lab.revision() - before;
    assert!(commits < i64::try_from(count).unwrap() / 2, "{commits} commits for {count} ADDs");
    let held = lab.held();
    assert_eq!(held.len(), count + 1);
    assert!(given.iter().all(|address| held.contains_key(address)));
    let dels: Vec<_> = (0..count).map(|number| lab.del(&format!("c{number}")).start()).collect();
    dels.into_iter().for_each(|del| _ = del.end().ok().by_daemon());
    lab.del("first").ok().by_daemon();
    lab.nothing_is_held();
    lab.is_in_order();
    daemon.runs();
}

#[test]
fn crowd_of_16_plugins_is_served() {
    for engine in ENGINES {
        crowd(&Lab::with_pool(engine, "10.78.0.0/24"), 16);
    }
}

#[test]
fn crowd_of_200_plugins_is_served() {
    for engine in ENGINES {
        // 200 ADDs need more than one block and more than one commit.
        crowd(&Lab::with_pool(engine, "10.78.0.0/22"), 200);
    }
}

#[test]
fn crowd_is_refused_when_addresses_run_short() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.78.0.0/28");
        let mut daemon = Daemon::start(&lab);
        let adds: Vec<_> = lab.held_open(async |_| {
            let adds = (0..20).map(|number| lab.add(&format!("c{number}")).start()).collect();
            thread::sleep(Duration::from_millis(300));
            adds
        });
        let ended: Vec<_> = adds.into_iter().map(|add| add.end()).collect();
        let given: BTreeSet<_> = ended.iter().filter(|add| add.code == Some(0)).map(|add| add.address()).collect();
        let refused: Vec<_> = ended.iter().filter(|add| add.code != Some(0)).cloned().collect();
        assert_eq!(given.len() + refused.len(), 20);
        assert_eq!(given, lab.held().into_keys().collect());
        assert!(!refused.is_empty() && given.len() >= 13, "{} of 16", given.len());
        for refused in refused {
            let refused = refused.failed();
            assert!(refused.out.contains("No IPs available"), "{refused:?}");
        }
        // When the pool is full, an ADD is refused with the same message whether or not a daemon runs.
        let beside = lab.add("more").run().failed();
        daemon.runs();
        daemon.end().ok();
        let alone = lab.add("more").run().failed();
        assert_eq!(beside.out, alone.out);
    }
}

#[test]
fn crowd_of_networks_families_and_wishes_is_served() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.78.0.0/24");
        lab.margay("pool create six fd78::/112").ok();
        let mut daemon = Daemon::start(&lab);
        let both = lab.conf_with("bridge", json!({"assign_ipv6": "true"}));
        let other = {
            let mut conf = lab.conf();
            conf["name"] = "net2".into();
            conf["nodename"] = "node-2".into();
            conf
        };
        let calico = lab.conf_with("calico", json!({}));
        let calls: Vec<(Call, usize)> = (0..24)
            .map(|number| match number % 4 {
                0 => (Call::new("ADD", &format!("c{number}"), &both), 2),
                1 => (Call::new("ADD", &format!("c{number}"), &other), 1),
                2 => {
                    (Call::new("ADD", &format!("c{number}"), &calico).args(&format!("IP=10.78.0.{}", 200 + number)), 1)
                }
                _ => (lab.add(&format!("c{number}")), 1),
            })
            .collect();
        let started: Vec<_> = lab.held_open(async |_| {
            let started = calls.iter().map(|(call, count)| (call.start(), *count)).collect();
            thread::sleep(Duration::from_millis(300));
            started
        });
        let mut given = BTreeSet::new();
        for (add, count) in started {
            let add = add.end().ok().by_daemon();
            assert_eq!(add.addresses().len(), count, "{add:?}");
            given.extend(add.addresses());
        }
        assert_eq!(given.len(), 30);
        assert_eq!(given, lab.held().into_keys().collect());
        lab.is_in_order();
        daemon.runs();
    }
}

/// Runs `count` plugins at the same time, all of which the daemon must serve. Returns the duration of each plugin call,
/// the shortest first.
fn at_once(lab: &Lab, count: usize, verb: fn(&Lab, &str) -> Call) -> Vec<Duration> {
    let mut took: Vec<_> = thread::scope(|scope| {
        let call = |number| verb(lab, &format!("c{number}")).run().ok().by_daemon().took;
        let calls: Vec<_> = (0..count).map(|number| scope.spawn(move || call(number))).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    took.sort_unstable();
    took
}

/// With two busy loops per core, 400 simultaneous callers may wait for the daemon at most three times as long as 200.
#[test]
#[ignore = "it measures for a minute; run it with --ignored --nocapture"]
#[allow(clippy::print_stdout, reason = "prints its measurements")]
fn crowd_of_400_plugins_is_served_on_busy_machine() {
    const ROUNDS: usize = 3;
    let loops = 2 * thread::available_parallelism().unwrap().get();
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.78.0.0/22");
        let mut daemon = Daemon::start(&lab);
        lab.add("first").ok().by_daemon();
        let busy = || {
            let mut command = Command::new("sh");
            command.args(["-c", "while :; do :; done"]);
            Running::start(command, "")
        };
        let _busy: Vec<_> = (0..loops).map(|_| busy()).collect();
        let p99 = |count: usize| {
            let mut took = Vec::new();
            for _ in 0..ROUNDS {
                took.extend(at_once(&lab, count, Lab::add));
                took.extend(at_once(&lab, count, Lab::del));
            }
            took.sort_unstable();
            let at = |percent: usize| took[(took.len() - 1) * percent / 100];
            println!("{engine}: {count} callers: median {:?}, p99 {:?}, longest {:?}", at(50), at(99), at(100));
            at(99)
        };
        let (fewer, more) = (p99(200), p99(400));
        assert!(more <= 3 * fewer, "{engine}: {more:?} and {fewer:?}");
        daemon.runs();
    }
}
