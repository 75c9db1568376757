//! Tests on embedded stores of networks that assign whole prefixes.

use serde_json::{Value, json};

use crate::kills::values_stay_unique;
use crate::lab::{ENGINES, Lab, after};
use crate::prefix_pools::{pool, prefix};
use crate::process::Call;
use crate::sticky_kills::{call, workloads_keep_their_addresses};

fn conf(lab: &Lab, more: Value) -> Value {
    let mut ipam = json!({"assign_ipv4": "false", "assign_ipv6": "true", "ipv6_pools": ["pods"]});
    ipam.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    lab.conf_with("macvlan", ipam)
}

#[test]
fn prefix_is_given_beside_address() {
    for engine in ENGINES {
        for plugin in ["macvlan", "calico"] {
            let lab = Lab::with_pool(engine, "10.81.0.0/28");
            pool(&lab, "pods", "2001:db8::/48", 64);
            let mut conf =
                lab.conf_with(plugin, json!({"assign_ipv6": "true", "ipv4_pools": ["lab"], "ipv6_pools": ["pods"]}));
            let added = Call::new("ADD", "c1", &conf).ok();
            let own = prefix(&added);
            assert_eq!(own.prefix_len(), 64);
            assert_eq!(added.cidrs().len(), 2);
            assert_eq!(added.cidrs()[1], format!("{}1/64", own.network()), "{engine:?} {plugin}");
            assert_eq!(prefix(&Call::new("ADD", "c1", &conf).ok()), own, "repeated");
            assert_ne!(prefix(&Call::new("ADD", "c2", &conf).ok()), own);
            conf = after(&conf, &added.cidrs());
            Call::new("CHECK", "c1", &conf).ok();
            Call::new("DEL", "c1", &conf).ok();
            Call::new("CHECK", "c1", &conf).run().refusal().says(&["is not recorded"]);
            assert_eq!(lab.books().held.len(), 2);
        }
    }
}

#[test]
fn prefix_error_tells_full_pool_or_wrong_network() {
    let lab = Lab::new(ENGINES[1]);
    pool(&lab, "pods", "2001:db8::/63", 64);
    let conf = conf(&lab, json!({}));
    for container in ["c1", "c2"] {
        Call::new("ADD", container, &conf).ok();
    }
    Call::new("ADD", "c3", &conf).run().refusal().says(&["2001:db8::/63"]);
    Call::new("DEL", "c1", &conf).ok();
    Call::new("ADD", "c3", &conf).ok();
    let mut bridge = conf.clone();
    bridge["type"] = "bridge".into();
    Call::new("ADD", "c4", &bridge).run().refusal().says(&["pool pods has prefixes", "isGateway"]);
    let mut before = conf;
    before["cniVersion"] = "0.2.0".into();
    Call::new("DEL", "c2", &before).ok();
    let old = Call::new("ADD", "c5", &before).ok();
    assert_eq!(old.json()["ip6"]["ip"].as_str().unwrap().split('/').nth(1), Some("64"));
    let routed = old.json()["margay.io/prefixes"][0].as_str().unwrap().to_owned();
    assert!(routed.ends_with("::/64"), "the main plugin routes it: {routed}");
}

#[test]
fn prefix_is_given_once_while_plugins_are_killed() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        pool(&lab, "pods", "2001:db8::/60", 64);
        values_stay_unique(&conf(&lab, json!({})), prefix);
        assert!(lab.books().held.is_empty(), "{:?}", lab.books());
    }
}

#[test]
fn prefix_of_workload_stays_while_plugins_are_killed() {
    let lab = Lab::new(ENGINES[1]);
    pool(&lab, "pods", "2001:db8::/60", 64);
    let conf = conf(&lab, json!({"sticky": "pod"}));
    let kept = workloads_keep_their_addresses(&conf);
    assert!(kept.iter().all(|ip| ip.to_string().ends_with("::1")), "{kept:?}");
    let again = call("ADD", "last", "web-0", &conf).ok().address();
    assert!(kept.contains(&again), "{again} {kept:?}");
}
