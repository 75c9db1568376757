//! Tests of quotas on etcd: how many requests quotas cost, and that no sequence of calls exceeds a quota.

use ipam_core::model::{QuotaKind, QuotaSubject};

use crate::lab::Lab;
use crate::process::Call;
use crate::round_trips::asks;
use crate::under_quota::{is_refused, kills_leave_the_quota_exact, limit, of_shop, shop};

#[test]
fn quota_costs_no_request_in_steady_state() {
    let lab = Lab::start();
    let conf = lab.conf();
    of_shop("ADD", "c0", &conf).ok();
    limit(&lab, &shop(), 4);
    assert_eq!(asks(&lab, &of_shop("ADD", "c1", &conf)), (2, 1), "all blocks are counted once");
    assert_eq!(asks(&lab, &of_shop("ADD", "c2", &conf)), (2, 0), "ADD");
    assert_eq!(asks(&lab, &of_shop("DEL", "c2", &conf)), (2, 0), "DEL");
    of_shop("ADD", "c2", &conf).ok();
    of_shop("ADD", "c3", &conf).ok();
    assert!(is_refused(&of_shop("ADD", "c4", &conf).run()));
    // A DEL at the quota limit stores an exact usage counter, so the next ADD need not count addresses.
    assert_eq!(asks(&lab, &of_shop("DEL", "c3", &conf)), (2, 0), "DEL at the limit");
    assert_eq!(asks(&lab, &of_shop("ADD", "c4", &conf)), (2, 0), "ADD up to the limit");
    assert_eq!(asks(&lab, &Call::new("DEL", "c4", &conf)), (2, 1), "DEL that does not tell the namespace");
    for container in ["c0", "c1", "c2"] {
        of_shop("DEL", container, &conf).ok();
    }
    lab.nothing_is_left();
}

#[test]
fn quota_of_networks_and_nodes() {
    let lab = Lab::start();
    limit(&lab, &QuotaSubject::new(QuotaKind::Node, "node-1"), 2);
    lab.add("c1").ok();
    assert_eq!(asks(&lab, &lab.add("c2")), (2, 0));
    let refusal = lab.add("c3").run().refusal();
    assert!(refusal.text.contains("the quota of node node-1 is used up: 2 of 2"), "{refusal:?}");
    assert_eq!(asks(&lab, &lab.del("c2")), (2, 0));
    lab.add("c3").ok();
    limit(&lab, &QuotaSubject::new(QuotaKind::Network, "*"), 3);
    lab.add("c4").ok();
    let refusal = lab.add("c5").run().refusal();
    assert!(refusal.text.contains("the quota of network net1 is used up: 3 of 3"), "{refusal:?}");
}

#[test]
fn quota_is_never_exceeded_by_kills() {
    let lab = Lab::start();
    kills_leave_the_quota_exact(&lab, &lab.conf());
    lab.no_notes_are_left();
}
