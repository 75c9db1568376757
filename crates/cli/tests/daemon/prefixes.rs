//! Tests the assignment of prefixes with a daemon and without a daemon.

use serde_json::json;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::Call;

#[test]
fn prefix_is_assigned_with_and_without_daemon() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.86.0.0/24");
        lab.margay("pool create pods 2001:db8::/60 --prefix-length 64").ok();
        let ipam = json!({"assign_ipv4": "false", "assign_ipv6": "true", "ipv6_pools": ["pods"]});
        let conf = lab.conf_with("macvlan", ipam);
        let call = |verb: &str, container: &str| Call::new(verb, container, &conf);
        let prefix = |container: &str| {
            let added = call("ADD", container).ok();
            added.json()["margay.io/prefixes"][0].as_str().unwrap().to_owned()
        };
        let mut all = vec![prefix("c0")];
        let daemon = Daemon::start(&lab);
        all.extend(["c1", "c2"].map(prefix));
        assert_eq!(prefix("c0"), all[0], "repeated");
        call("CHECK", "c1").run();
        let node = lab.margay("ipam assign-prefix pods --node node-1 -o json").ok().json();
        all.push(node["prefix"].as_str().unwrap().to_owned());
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 4, "{all:?}");
        let inside = all[0].replace("::/64", ":a::5");
        assert!(
            lab.margay(&format!("ipam show --ip {inside}"))
                .ok()
                .out
                .starts_with(&format!("Prefix {} is in use", all[0]))
        );
        let history = lab.margay(&format!("ipam history {inside}")).ok().out;
        assert!(history.contains("assigned") && history.contains(&all[0]), "{history}");
        let usage = lab.margay("ipam show -o json").ok().json();
        let pools = usage["pools"].as_array().unwrap();
        let of = pools.iter().find(|pool| pool["name"] == "pods").unwrap();
        assert_eq!((&of["prefix_length"], &of["capacity"], &of["in_use"]), (&json!(64), &json!("16"), &json!("4")));
        call("DEL", "c1").ok().by_daemon();
        drop(daemon);
        for container in ["c0", "c2"] {
            call("DEL", container).ok();
        }
        lab.margay("pool delete pods").failed();
        lab.margay(&format!("ipam release --handle {}", node["handle"].as_str().unwrap())).ok();
        lab.margay("pool delete pods").ok();
        lab.is_in_order();
    }
}
