//! Tests sticky addresses with a daemon and without a daemon.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::Call;

const POOL: &str = "10.86.0.0/24";

fn call(verb: &str, container: &str, name: &str, lab: &Lab) -> Call {
    let conf = lab.conf_with("bridge", json!({"sticky": {"by": "container", "for": "2h"}}));
    Call::new(verb, container, &conf).args(&format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={name};K8S_POD_NAME={name}"))
}

fn kept(lab: &Lab, args: &str) -> Vec<Value> {
    let mut listed = lab.margay(&format!("ipam list {args} -o json").replace("  ", " ")).ok().json();
    listed["addresses"].take().as_array().unwrap().clone()
}

#[test]
fn sticky_address_is_kept_with_and_without_daemon() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let own = call("ADD", "c0", "db", &lab).ok().address();
        call("DEL", "c0", "db", &lab).ok();
        let daemon = Daemon::start(&lab);
        assert_ne!(lab.add("other").ok().by_daemon().address(), own);
        assert_eq!(call("ADD", "c1", "db", &lab).ok().by_daemon().address(), own);
        assert_eq!(kept(&lab, "")[0]["handle"], "net1.c1");
        call("DEL", "c1", "db", &lab).ok().by_daemon();
        assert_eq!(call("ADD", "c2", "db", &lab).ok().by_daemon().address(), own);
        drop(daemon);
        call("DEL", "c2", "db", &lab).ok();
        let listed = kept(&lab, "");
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(
            (&listed[0]["ip"], &listed[0]["workload"], &listed[0]["pinned"]),
            (&json!(own), &json!("db"), &json!(false))
        );
        assert!(listed[0]["until"].as_str().unwrap().ends_with('Z'), "{listed:?}");
        lab.is_in_order();
    }
}

#[test]
fn sticky_pins_hold_with_and_without_daemon() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let printer: IpAddr = "10.86.0.77".parse().unwrap();
        for with_daemon in [false, true] {
            let _daemon = with_daemon.then(|| Daemon::start(&lab));
            lab.margay("ipam pin 10.86.0.77 printer --dry-run").ok();
            assert!(kept(&lab, "--pinned").is_empty());
            lab.margay("ipam pin 10.86.0.77 printer").ok();
            lab.margay("ipam pin 10.86.0.77 printer").ok();
            let refused = lab.margay("ipam pin 10.86.0.77 scanner").failed();
            assert!(refused.err.contains("is kept for printer"), "{refused:?}");
            let listed = kept(&lab, "--pinned");
            assert_eq!((&listed[0]["ip"], &listed[0]["until"]), (&json!(printer), &json!("forever")), "{listed:?}");
            assert_eq!(call("ADD", "p1", "printer", &lab).ok().address(), printer);
            call("DEL", "p1", "printer", &lab).ok();
            assert_eq!(call("ADD", "p2", "printer", &lab).ok().address(), printer);
            lab.margay("ipam unpin 10.86.0.77").ok();
            assert!(kept(&lab, "").is_empty());
            call("DEL", "p2", "printer", &lab).ok();
            // After the wait for its workload, a sticky address is free for all workloads. An assigned address can be
            // pinned for a later workload.
            let ip = lab.add("c1").ok().address();
            let noted = lab.margay(&format!("ipam pin {ip} later")).ok();
            assert!(noted.err.contains("waits for later after its release"), "{noted:?}");
            lab.del("c1").ok();
            assert_ne!(lab.add("c2").ok().address(), ip);
            assert_eq!(call("ADD", "l1", "later", &lab).ok().address(), ip);
            for (container, name) in [("l1", "later"), ("c2", "")] {
                call("DEL", container, name, &lab).ok();
            }
            lab.margay(&format!("ipam unpin {ip}")).ok();
            let nothing = lab.margay(&format!("ipam unpin {ip}")).failed();
            assert!(nothing.err.contains("no workload keeps"), "{nothing:?}");
            assert!(lab.held().is_empty());
            lab.is_in_order();
        }
    }
}

#[test]
fn sticky_pin_is_refused_when_impossible() {
    let lab = Lab::with_pool(ENGINES[0], POOL);
    lab.margay("reservation create routers 10.86.0.1/32").ok();
    for (args, says) in [
        ("10.99.0.1 db", "10.99.0.1 is in no pool"),
        ("10.86.0.1 db", "is reserved by reservation routers"),
        ("10.86.0.300 db", "invalid IP address"),
    ] {
        let refused = lab.margay(&format!("ipam pin {args}")).failed();
        assert!(refused.err.contains(says), "{refused:?}");
    }
    assert!(kept(&lab, "").is_empty());
}
