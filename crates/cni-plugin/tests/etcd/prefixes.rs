//! Tests on etcd of networks that assign whole prefixes.

use serde_json::{Value, json};

use crate::kills::values_stay_unique;
use crate::lab::Lab;
use crate::prefix_pools::{pool, prefix};
use crate::process::Call;
use crate::round_trips::asks;

fn conf(lab: &Lab) -> Value {
    let mut conf = lab.conf();
    conf["type"] = "macvlan".into();
    conf["ipam"] = json!({
        "type": "margay-ipam", "assign_ipv4": "false", "assign_ipv6": "true", "ipv6_pools": ["pods"],
    });
    conf
}

#[test]
fn prefix_costs_as_many_requests_as_address() {
    let lab = Lab::start();
    pool(&lab, "pods", "2001:db8::/48", 64);
    let conf = conf(&lab);
    let own = prefix(&Call::new("ADD", "c0", &conf).ok());
    assert_eq!(asks(&lab, &Call::new("ADD", "c1", &conf)), (2, 0), "ADD");
    assert_eq!(asks(&lab, &Call::new("DEL", "c1", &conf)), (2, 0), "DEL");
    assert_eq!(lab.books().held[&own.addr()], "net1.c0");
}

#[test]
fn prefix_is_given_once_while_plugins_are_killed() {
    let lab = Lab::start();
    pool(&lab, "pods", "2001:db8::/60", 64);
    values_stay_unique(&conf(&lab), prefix);
    assert!(lab.books().held.is_empty(), "{:?}", lab.books());
    lab.no_notes_are_left();
}
