//! Tests leases in the daemon's etcd API with etcdctl, on stores of format 2.

use std::fs::{self, File};
use std::thread::sleep;
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::Value;

use super::{Api, Watching};
use crate::lab::{ENGINES, Lab};
use crate::programs::{Running, wait_until};

pub(super) fn lab_with_leases(engine: &'static str) -> Lab {
    let lab = Lab::with_pool(engine, "10.77.0.0/24");
    lab.margay("store upgrade").ok();
    lab
}

/// Grants a lease in the daemon's etcd API, and returns the lease id in hexadecimal.
fn grant(api: &Api, seconds: u32) -> String {
    let out = api.etcdctl(&format!("lease grant {seconds}")).ok().out;
    out.split(' ').nth(1).unwrap_or_else(|| panic!("{out}")).to_owned()
}

fn is_there(api: &Api, key: &str) -> bool {
    !api.etcdctl(&format!("get {key} --keys-only")).ok().out.is_empty()
}

#[test]
fn leases_are_granted_listed_renewed_and_revoked() {
    for engine in ENGINES {
        let lab = lab_with_leases(engine);
        let api = Api::start(&lab);
        assert_eq!(api.etcdctl("lease list").ok().out, "found 0 leases\n");
        let lease = grant(&api, 600);
        assert!(api.etcdctl("lease list").ok().out.contains(&lease));
        api.etcdctl(&format!("put /t/a 1 --lease={lease}")).ok();
        api.etcdctl(&format!("put /t/b 1 --lease={lease}")).ok();
        let stored: Value = serde_json::from_str(&api.etcdctl("get /t/a -w json").ok().out).unwrap();
        let number = i64::from_str_radix(&lease, 16).unwrap();
        assert_eq!(stored["kvs"][0]["lease"].as_i64(), Some(number));
        let reported = api.etcdctl(&format!("lease timetolive {lease} --keys")).ok().out;
        assert!(
            reported.contains("granted with TTL(600s), remaining(") && reported.contains("[/t/a /t/b]"),
            "{reported}"
        );
        let renewed = api.etcdctl(&format!("lease keep-alive --once {lease}")).ok().out;
        assert_eq!(renewed, format!("lease {lease} keepalived with TTL(600)\n"));
        // A put removes the lease of its key unless the put has the option `--ignore-lease`.
        api.etcdctl("put /t/a 2 --ignore-lease").ok();
        api.etcdctl("put /t/b 2").ok();
        let reported = api.etcdctl(&format!("lease timetolive {lease} --keys")).ok().out;
        assert!(reported.contains("[/t/a]"), "{reported}");
        let revoked = api.etcdctl(&format!("lease revoke {lease}")).ok().out;
        assert_eq!(revoked, format!("lease {lease} revoked\n"));
        assert!(!is_there(&api, "/t/a") && is_there(&api, "/t/b"));
        let gone = api.etcdctl(&format!("lease timetolive {lease}")).ok().out;
        assert_eq!(gone, format!("lease {lease} already expired\n"));
        for args in [format!("lease revoke {lease}"), format!("put /t/a 1 --lease={lease}")] {
            let refused = api.etcdctl(&args).failed();
            assert!(refused.err.contains("etcdserver: requested lease not found"), "{args}: {refused:?}");
        }
        api.end();
        lab.is_in_order();
        lab.margay("store verify").ok();
    }
}

#[test]
fn leases_end_in_time_and_watch_sees_it() {
    let lab = lab_with_leases("redb");
    let api = Api::start(&lab);
    let begun = Instant::now();
    // The lease with the shorter time to live must last for three calls of etcdctl.
    let seconds = u32::try_from(patient(Duration::from_secs(2)).as_secs()).unwrap();
    let (short, long) = (grant(&api, seconds), grant(&api, 600));
    for (key, lease) in [("/t/short", &short), ("/t/other", &short), ("/t/long", &long)] {
        api.etcdctl(&format!("put {key} x --lease={lease}")).ok();
    }
    let watching = Watching::start(&api, &lab);
    wait_until("the keys of the short lease are gone", || watching.count("/t/short") + watching.count("/t/other") == 4);
    assert!(begun.elapsed() > Duration::from_millis(u64::from(seconds) * 1000 - 100), "{:?}", begun.elapsed());
    assert!(!is_there(&api, "/t/short") && !is_there(&api, "/t/other") && is_there(&api, "/t/long"));
    assert!(!api.etcdctl("lease list").ok().out.contains(&short));
    api.end();
}

#[test]
fn leases_get_full_time_at_start_but_not_after_hand_over() {
    for engine in ENGINES {
        let lab = lab_with_leases(engine);
        let api = Api::start(&lab);
        let lease = grant(&api, 600);
        api.etcdctl(&format!("put /t/a 1 --lease={lease}")).ok();
        let left = |api: &Api| {
            let reported: Value =
                serde_json::from_str(&api.etcdctl(&format!("lease timetolive {lease} -w json")).ok().out).unwrap();
            reported["ttl"].as_i64().unwrap()
        };
        sleep(Duration::from_millis(2100));
        let before = left(&api);
        assert!((300..599).contains(&before), "{before}");
        lab.held_open(async |_| {
            // While another process has the store, leases continue to expire and can be renewed.
            assert!(left(&api) <= before);
        });
        assert!(left(&api) <= before, "{engine}");
        lab.held_open(async |_| {
            api.etcdctl(&format!("lease keep-alive --once {lease}")).ok();
        });
        assert!(left(&api) > before, "{engine}");
        // The test pauses longer than a daemon takes to start.
        sleep(patient(Duration::from_millis(2100)));
        let before = left(&api);
        api.daemon.kill();
        let api = Api::start(&lab);
        assert!(left(&api) > before, "{engine}: {}", left(&api));
        assert!(is_there(&api, "/t/a"));
        api.end();
    }
}

#[test]
fn leases_end_late_while_another_process_has_store() {
    let lab = lab_with_leases("redb");
    let api = Api::start(&lab);
    let ttl = patient(Duration::from_secs(2));
    let lease = grant(&api, u32::try_from(ttl.as_secs()).unwrap());
    api.etcdctl(&format!("put /t/a 1 --lease={lease}")).ok();
    lab.held_open(async |open| {
        sleep(ttl + Duration::from_millis(1500));
        let renewed = api.etcdctl(&format!("lease keep-alive --once {lease}"));
        assert!(renewed.err.contains("requested lease not found"), "{renewed:?}");
        // When the daemon revokes a lease, it must keep a key of the lease that another process has overwritten
        // meanwhile.
        open.store().txn(kv::Txn::new().with_success([kv::Op::put("/t/kept", "x")])).await.unwrap();
    });
    wait_until("the key is gone", || !is_there(&api, "/t/a"));
    assert!(is_there(&api, "/t/kept"));
    api.end();
}

#[test]
fn lease_lock_passes_on_when_holder_is_killed() {
    for engine in ENGINES {
        let lab = lab_with_leases(engine);
        let api = Api::start(&lab);
        let file = |who: &str| lab.root().join(who);
        let ttl = patient(Duration::from_secs(2)).as_secs();
        let lock = |who: &str| {
            let mut command = api.etcdctl_command(&format!("lock /t/lock --ttl={ttl}"));
            command.stdout(File::create(file(who)).unwrap());
            Running::start(command, "")
        };
        // etcdctl prints the name of its lock key once etcdctl has the lock.
        let holds = |who: &str| !fs::read_to_string(file(who)).unwrap().is_empty();
        let first = lock("first");
        wait_until("the first one has the lock", || holds("first"));
        let second = lock("second");
        sleep(Duration::from_millis(300));
        assert!(!holds("second"), "{engine}");
        // The first process was killed, so its lease is no longer renewed and expires.
        assert!(first.kill());
        wait_until("the second one has the lock", || holds("second"));
        assert!(second.kill());
        api.end();
    }
}

#[test]
fn lease_election_has_one_leader() {
    let lab = lab_with_leases("sled");
    let api = Api::start(&lab);
    let run = |args: &str, name: &str| {
        let mut command = api.etcdctl_command(args);
        command.stdout(File::create(lab.root().join(name)).unwrap());
        Running::start(command, "")
    };
    let said = |name: &str| fs::read_to_string(lab.root().join(name)).unwrap();
    let leader = run("elect /t/election one", "leader");
    wait_until("there is a leader", || said("leader").ends_with("one\n"));
    let other = run("elect /t/election two", "other");
    let listener = run("elect -l /t/election", "listener");
    wait_until("the leader is known", || said("listener").contains("one"));
    assert_eq!(said("other"), "");
    assert!(leader.kill() && other.kill() && listener.kill());
    api.end();
}

#[test]
fn leases_of_older_format_say_how_to_get_them() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.77.0.0/24");
        let api = Api::start(&lab);
        let refused = api.etcdctl("lease grant 60").failed();
        assert!(
            refused.err.contains("format 1 keeps no leases") && refused.err.contains("store upgrade"),
            "{refused:?}"
        );
        lab.margay("store upgrade").ok();
        grant(&api, 60);
        api.end();
    }
}

#[test]
fn lease_compaction_by_client_leaves_address_history() {
    for engine in ENGINES {
        let lab = lab_with_leases(engine);
        let api = Api::start(&lab);
        let address = lab.add("kept-in-history").ok().address();
        lab.del("kept-in-history").ok();
        api.etcdctl("put /t/a 1").ok();
        api.etcdctl("put /t/a 2").ok();
        let revision = lab.revision();
        api.etcdctl(&format!("compaction {revision}")).ok();
        for args in [format!("get /t/a --rev {}", revision - 1), format!("compaction {}", revision - 1)] {
            let refused = api.etcdctl(&args).failed();
            assert!(refused.err.contains("etcdserver: mvcc: required revision has been compacted"), "{refused:?}");
        }
        let late = api.etcdctl(&format!("watch /t/a --rev {}", revision - 1));
        assert!(late.err.contains("required revision has been compacted"), "{late:?}");
        let history = lab.margay(&format!("ipam history {address}")).ok().out;
        assert!(history.contains("kept-in-history"), "{engine}: {history}");
        api.end();
    }
}

#[test]
fn leases_are_carried_by_backup() {
    for engine in ENGINES {
        let lab = lab_with_leases(engine);
        let api = Api::start(&lab);
        let lease = grant(&api, 600);
        api.etcdctl(&format!("put /t/a 1 --lease={lease}")).ok();
        let file = lab.root().join("backup");
        lab.margay(&format!("store backup {}", file.display())).ok();
        api.etcdctl(&format!("lease revoke {lease}")).ok();
        lab.margay(&format!("store restore {} --replace", file.display())).ok();
        // Wait with a `get` until the restored store is open, because on a busy machine `lease timetolive` would time
        // out.
        api.etcdctl("get /t/a").ok();
        let reported = api.etcdctl(&format!("lease timetolive {lease} --keys")).ok().out;
        assert!(reported.contains("granted with TTL(600s)") && reported.contains("[/t/a]"), "{engine}: {reported}");
        lab.margay("store verify").ok();
        api.end();
    }
}
