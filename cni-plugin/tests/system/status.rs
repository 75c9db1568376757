//! STATUS on a real store: it says what an ADD would meet, and changes nothing.

use std::fs;

use serde_json::{Value, json};

use crate::lab::{ENGINES, Engine, Lab};
use crate::process::{Call, Outcome};

/// The code of every STATUS that fails.
const UNAVAILABLE: u64 = 50;

fn status(conf: &Value) -> Outcome {
    let mut conf = conf.clone();
    conf["cniVersion"] = "1.1.0".into();
    let call = Call::new("STATUS", "", &conf);
    ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"].iter().fold(call, |call, name| call.without(name)).run()
}

#[track_caller]
fn ready(conf: &Value) -> Outcome {
    let outcome = status(conf);
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (0, ""), "{outcome:?}");
    outcome
}

#[track_caller]
fn unavailable(conf: &Value, texts: &[&str]) {
    let refusal = status(conf).refusal();
    assert_eq!(refusal.says(texts).code, UNAVAILABLE, "{refusal:?}");
}

#[test]
fn it_says_whether_there_is_an_address_to_give() {
    for engine in ENGINES {
        // Network, broadcast and gateway are nobody's.
        let lab = Lab::with_pool(engine, "10.5.0.0/29");
        let conf = lab.conf("bridge");
        // The first number is the newest revision; the second one tells how the files were left.
        let newest = || fs::read(lab.store.join("head")).unwrap()[..8].to_vec();
        for number in 0..5 {
            let before = newest();
            ready(&conf);
            assert_eq!(newest(), before, "{engine:?}: something was written");
            lab.add(&format!("c{number}")).ok();
        }
        unavailable(&conf, &["No IPs available in pools", "margay ipam show"]);
        lab.del("c3").ok();
        ready(&conf);
        assert_eq!(lab.books().held.len(), 4);
        // As ADD, without a family there is nothing to ask.
        ready(&lab.conf_with("bridge", json!({"assign_ipv4": "false"})));
        unavailable(&lab.conf_with("bridge", json!({"ipv4_pools": ["none"]})), &["none"]);
    }
}

#[test]
fn a_store_that_is_not_there() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        unavailable(&lab.conf("bridge"), &["there is no store", "margay --store", "pool create"]);
        ready(&lab.conf_with("bridge", json!({"subnet": "10.5.0.0/24"})));
        assert!(!lab.store.exists(), "nothing is made");
    }
}

#[test]
fn a_busy_store_is_ready() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.5.0.0/24");
        lab.while_open(|| {
            let outcome = ready(&lab.conf("bridge"));
            assert!(outcome.stderr.contains("in use by another process"), "{outcome:?}");
        });
    }
}

#[test]
fn a_store_that_cannot_be_used() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.5.0.0/24");
        let mut other = lab.conf("bridge");
        other["datastore_type"] = engine.other().name().into();
        unavailable(&other, &["set datastore_type to"]);
        fs::write(lab.store.join("store.id"), "?").unwrap();
        unavailable(&lab.conf("bridge"), &["the store is damaged", "restore"]);
    }
    let mut etcd = Lab::new(Engine::Redb).conf("bridge");
    etcd["datastore_type"] = "etcdv3".into();
    etcd["etcd_endpoints"] = "http://127.0.0.1:1".into();
    etcd.as_object_mut().unwrap().remove("datastore_path");
    unavailable(&etcd, &["etcd"]);
}
