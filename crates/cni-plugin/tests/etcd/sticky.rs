//! Tests of sticky addresses on etcd.

use serde_json::{Value, json};

use crate::lab::Lab;
use crate::process::Call;
use crate::round_trips::asks;
use crate::sticky_kills::{call, workloads_keep_their_addresses};

fn conf(lab: &Lab) -> Value {
    let mut conf = lab.conf();
    conf["ipam"]["sticky"] = json!({"by": "pod", "for": "1h"});
    conf
}

#[test]
fn sticky_address_costs_no_request() {
    let lab = Lab::start();
    let conf = conf(&lab);
    let own = call("ADD", "c0", "web-0", &conf).ok().address();
    // Fill the block of the workload's sticky address, so that the node claims its next addresses from a different
    // block.
    for number in 0..70 {
        Call::new("ADD", &format!("o{number}"), &lab.conf()).ok();
    }
    // The runtime passes the address in `prevResult` to DEL, so DEL reads that address's block first.
    let mut conf = conf;
    conf["prevResult"] = json!({"cniVersion": "1.0.0", "ips": [{"address": format!("{own}/32")}]});
    for round in 0..3 {
        let ends = |verb: &str, round: u32| call(verb, &format!("c{round}"), "web-0", &conf);
        assert_eq!(asks(&lab, &ends("DEL", round)), (2, 0), "DEL");
        assert_eq!(asks(&lab, &ends("ADD", round + 1)), (2, 0), "ADD");
        assert_eq!(lab.books().held[&own], format!("net1.c{}", round + 1));
    }
    assert_eq!(asks(&lab, &call("ADD", "w1", "web-1", &conf)), (2, 0), "the first of a workload");
}

#[test]
fn sticky_address_stays_while_plugins_are_killed() {
    let lab = Lab::start();
    let kept = workloads_keep_their_addresses(&conf(&lab));
    let books = lab.books();
    assert!(books.held.is_empty() && books.waiting.keys().eq(&kept), "{books:?}, {kept:?}");
    lab.no_notes_are_left();
}
