//! Tests of sticky addresses on embedded stores.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::json;

use crate::lab::{ENGINES, Lab};
use crate::process::Call;
use crate::sticky_kills::{call, workloads_keep_their_addresses};

#[test]
fn sticky_address_returns_to_pod_of_same_name() {
    for engine in ENGINES {
        for plugin in ["bridge", "calico"] {
            let lab = Lab::with_pool(engine, "10.81.0.0/28");
            let conf = lab.conf_with(plugin, json!({"sticky": {"by": "pod", "for": "1h"}}));
            let own = call("ADD", "c1", "web-0", &conf).ok().address();
            call("DEL", "c1", "web-0", &conf).ok();
            call("DEL", "c1", "web-0", &conf).ok();
            let mut others = Vec::new();
            loop {
                let container = format!("o{}", others.len());
                let call = call("ADD", &container, &container, &conf);
                let outcome = call.run();
                if outcome.exit != 0 {
                    outcome.refusal();
                    break;
                }
                others.push(outcome.address());
            }
            assert!(others.len() >= 12 && !others.contains(&own), "{engine:?} {plugin}: {own} {others:?}");
            assert_eq!(call("ADD", "c2", "web-0", &conf).ok().address(), own, "{engine:?} {plugin}");
            call("CHECK", "c2", "web-0", &crate::lab::after(&conf, &[format!("{own}/28")])).run();
            assert_eq!(lab.books().count_of("net1.c2"), 1);
            call("DEL", "c2", "web-0", &conf).ok();
            // A container without a sticky name does not get the address that is kept for another workload.
            Call::new("ADD", "c3", &conf).run().refusal();
        }
    }
}

#[test]
fn sticky_names_from_labels_arguments_and_annotations() {
    let lab = Lab::with_pool(ENGINES[1], "10.81.0.0/28");
    let mut conf = lab.conf_with("macvlan", json!({"sticky": "label:app"}));
    let again = |conf: &serde_json::Value, args: &str| -> BTreeSet<IpAddr> {
        let of = |container: &str| {
            let ip = Call::new("ADD", container, conf).with("CNI_ARGS", args).ok().address();
            Call::new("DEL", container, conf).with("CNI_ARGS", args).ok();
            ip
        };
        ["c1", "c2", "c3"].map(of).into()
    };
    assert_eq!(again(&conf, "").len(), 3, "nothing names it");
    conf["args"] = json!({"cni": {"labels": [{"key": "app", "value": "db"}]}});
    let labelled = again(&conf, "");
    assert_eq!(labelled.len(), 1);
    let named = again(&conf, "IgnoreUnknown=1;MARGAY_STICKY=printer");
    assert_eq!(named.len(), 1);
    assert_ne!(named, labelled);
    conf["ipam"]["sticky"] = json!("annotation:app");
    conf["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": {"app": "db"}});
    assert_eq!(again(&conf, ""), labelled, "the name is what counts");

    conf["ipam"]["sticky"] = json!({"by": "pod", "for": "soon"});
    let refusal = Call::new("ADD", "c4", &conf).run().refusal();
    assert_eq!(refusal.code, 7);
    refusal.says(&["ipam.sticky.for must be a time such as"]);
    Call::new("DEL", "c4", &conf).ok();
}

#[test]
fn sticky_address_stays_while_plugins_are_killed() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.81.0.0/28");
        let conf = lab.conf_with("bridge", json!({"sticky": "pod"}));
        let kept = workloads_keep_their_addresses(&conf);
        // After the DELs no address is held, but the sticky addresses are not yet assigned to other workloads.
        let books = lab.books();
        assert!(books.held.is_empty() && books.waiting.keys().copied().collect::<BTreeSet<_>>() == kept, "{books:?}");
        let mut others = BTreeSet::new();
        for number in 0..16 {
            let outcome = Call::new("ADD", &format!("o{number}"), &conf).run();
            if outcome.exit == 0 {
                others.insert(outcome.address());
            }
        }
        assert!(others.is_disjoint(&kept), "{others:?} {kept:?}");
        assert_eq!(others.len() + kept.len(), 13, "all of the pool but network, broadcast and gateway");
    }
}
