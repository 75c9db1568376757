//! Tests of networks with several pools of one address family: lists of pools, weights, sets of ranges, and automatic
//! subnets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::thread;

use serde_json::{Value, json};

use crate::hostlocal::{host_local, shape};
use crate::kills::values_stay_unique;
use crate::lab::{ENGINES, Engine, Lab};
use crate::process::{Call, Outcome};

/// Returns a test store with two pools of five assignable addresses each.
fn lab(engine: Engine) -> Lab {
    let lab = Lab::with_pool(engine, "10.2.0.0/29");
    lab.pool("more", "10.3.0.0/29");
    lab
}

/// Runs ADDs until one of them fails, and returns the results in order.
fn all(add: impl Fn(&str) -> Call) -> Vec<Value> {
    let results = (0..40).map(|number| add(&format!("c{number}")).run());
    results.take_while(|outcome| outcome.exit == 0).map(|outcome| outcome.json()).collect()
}

#[test]
fn fallback_serves_from_next_pool_when_one_is_full() {
    for engine in ENGINES {
        let lab = lab(engine);
        let conf = lab.conf_with("bridge", json!({"ipv4_pools": ["more", "lab"]}));
        let results = all(|container| Call::new("ADD", container, &conf));
        let gateways: Vec<_> = results.iter().map(|result| result["ips"][0]["gateway"].as_str().unwrap()).collect();
        assert_eq!(gateways, [["10.3.0.1"; 5], ["10.2.0.1"; 5]].concat(), "{engine:?}");
        let full = Call::new("ADD", "none", &conf).run().refusal();
        full.says(&["10.3.0.0/29", "10.2.0.0/29", "margay ipam show"]);
        // A repeated ADD returns the address that the container already has; an ADD of a new container may use any of
        // the pools.
        let third = results[2]["ips"][0]["address"].clone();
        Call::new("DEL", "c2", &conf).ok();
        assert_eq!(Call::new("ADD", "c7", &conf).ok().json(), results[7]);
        assert_eq!(Call::new("ADD", "again", &conf).ok().json()["ips"][0]["address"], third);
        assert_eq!(lab.books().held.len(), 10);
        // An explicitly requested address may be in any of the network's pools.
        Call::new("DEL", "c8", &conf).ok();
        let wanted = results[8]["ips"][0]["address"].as_str().unwrap();
        let call = Call::new("ADD", "wants", &conf).with("CNI_ARGS", &format!("IP={wanted}"));
        assert_eq!(call.ok().json()["ips"], results[8]["ips"]);
    }
}

#[test]
fn fallback_subnets_and_sets_match_host_local() {
    let host_local = host_local();
    let configurations = [
        json!({"ranges": [[{"subnet": "10.5.0.0/29"}, {"subnet": "10.6.0.0/29", "gateway": "10.6.0.6"}]],
               "routes": [{"dst": "0.0.0.0/0"}]}),
        json!({"ranges": [[{"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.7", "rangeEnd": "10.5.0.9"},
                           {"subnet": "10.6.0.0/16", "rangeStart": "10.6.9.9", "rangeEnd": "10.6.9.9"}]]}),
        json!({"ranges": [[{"subnet": "fd05::/64"}], [{"subnet": "10.5.0.0/29"}], [{"subnet": "10.6.0.0/28"}]]}),
        json!({"ranges": [[{"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.10", "rangeEnd": "10.5.0.12"}],
                          [{"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.20", "rangeEnd": "10.5.0.22"},
                           {"subnet": "10.7.0.0/29"}]]}),
        json!({"subnet": "10.5.0.0/29", "ranges": [[{"subnet": "10.6.0.0/29"}, {"subnet": "10.7.0.0/29"}]]}),
    ];
    for engine in ENGINES {
        for ipam in &configurations {
            for version in ["0.3.1", "1.0.0"] {
                let lab = Lab::new(engine);
                let mut ours = lab.conf_with("bridge", ipam.clone());
                ours["cniVersion"] = version.into();
                let mut theirs = ours.clone();
                theirs["ipam"]["type"] = "host-local".into();
                theirs["ipam"]["dataDir"] = json!(lab.root.path().join("host-local"));
                let expected = all(|container| Call::new("ADD", container, &theirs).by(&host_local));
                let found = all(|container| Call::new("ADD", container, &ours));
                let shapes = |results: &[Value]| results.iter().cloned().map(shape).collect::<Vec<_>>();
                assert!(expected.len() > 2, "{expected:?}");
                assert_eq!(shapes(&found), shapes(&expected), "{engine:?}, CNI {version}, {ipam}");
                let each: BTreeSet<_> = found
                    .iter()
                    .flat_map(|result| result["ips"].as_array().unwrap())
                    .map(|ip| ip["address"].to_string())
                    .collect();
                let count: usize = found.iter().map(|result| result["ips"].as_array().unwrap().len()).sum();
                assert_eq!(each.len(), count, "no address twice");
                for number in 0..found.len() {
                    Call::new("DEL", &format!("c{number}"), &ours).ok();
                }
                lab.nothing_is_left();
            }
        }
        let lab = Lab::new(engine);
        let mut old = lab.conf_with("bridge", configurations[4].clone());
        old["cniVersion"] = "0.2.0".into();
        Call::new("ADD", "c1", &old).run().refusal().says(&["one address per family"]);
    }
}

#[test]
fn fallback_wanted_address_is_of_its_set() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let conf =
            lab.conf_with("bridge", json!({"ranges": [[{"subnet": "10.5.0.0/24"}], [{"subnet": "10.6.0.0/24"}]]}));
        let call = Call::new("ADD", "c1", &conf).with("CNI_ARGS", "IP=10.6.0.77");
        let addresses: Vec<IpAddr> = call.ok().addresses();
        assert!(addresses.len() == 2 && addresses[0].to_string().starts_with("10.5.0."), "{addresses:?}");
        assert_eq!(addresses[1].to_string(), "10.6.0.77");
        assert_eq!(call.ok().addresses(), addresses);
    }
}

#[test]
fn fallback_weights_share_containers_out() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        lab.pool("more", "10.3.0.0/24");
        let conf = lab.conf_with("bridge", json!({"ipv4_pools": ["lab", "more"], "weights": {"lab": 3}}));
        let mut counted: BTreeMap<String, usize> = BTreeMap::new();
        for number in 0..40 {
            let add = Call::new("ADD", &format!("c{number}"), &conf);
            let address = add.ok().address();
            assert_eq!(add.ok().address(), address);
            *counted.entry(address.to_string()[..5].to_owned()).or_default() += 1;
        }
        assert!(counted["10.2."] > counted["10.3."] && counted["10.3."] > 2, "{counted:?}");
        let wrong = lab.conf_with("bridge", json!({"ipv4_pools": ["lab"], "weights": {"more": 3}}));
        assert_eq!(Call::new("ADD", "x", &wrong).run().refusal().says(&["\"more\""]).code, 7);
    }
}

#[test]
fn fallback_subnet_is_chosen_once_per_network() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let conf = lab.conf_with("bridge", json!({"subnet": "auto", "assign_ipv6": "true"}));
        let results: Vec<Value> = thread::scope(|scope| {
            let conf = &conf;
            let add = |number| scope.spawn(move || Call::new("ADD", &format!("c{number}"), conf).ok().json());
            let adds = (0..6).map(add);
            adds.collect::<Vec<_>>().into_iter().map(|add| add.join().unwrap()).collect()
        });
        let gateways: BTreeSet<_> = results.iter().map(|result| result["ips"][0]["gateway"].to_string()).collect();
        assert_eq!(gateways.len(), 1, "{results:?}");
        assert!(results.iter().all(|result| {
            let cidr = |at: usize| result["ips"][at]["address"].as_str().unwrap();
            cidr(0).ends_with("/24") && cidr(1).starts_with("fd") && cidr(1).ends_with("/64")
        }));
        let mut other = conf.clone();
        other["name"] = "another".into();
        let gateway = Call::new("ADD", "c9", &other).ok().json()["ips"][0]["gateway"].to_string();
        assert!(!gateways.contains(&gateway), "two networks have two subnets");
        for number in 0..6 {
            Call::new("DEL", &format!("c{number}"), &conf).ok();
        }
        Call::new("DEL", "c9", &other).ok();
        // These networks have names that differ only in characters that pool names do not allow.
        let gateways = ["web_app", "web-app", "web.App"].map(|name| {
            other["name"] = name.into();
            let gateway = Call::new("ADD", "c9", &other).ok().json()["ips"][0]["gateway"].to_string();
            Call::new("DEL", "c9", &other).ok();
            gateway
        });
        assert_eq!(BTreeSet::from(gateways.clone()).len(), 3, "{gateways:?}");
        lab.nothing_is_left();
    }
}

/// Runs callers of ADD and DEL on two small pools, and kills some of their calls. After all caller threads have ended,
/// every address of the two pools must be assignable.
fn killed(engine: Engine) {
    let lab = lab(engine);
    let conf = lab.conf_with("bridge", json!({"ipv4_pools": ["lab", "more"]}));
    values_stay_unique(&conf, Outcome::address);
    lab.nothing_is_left();
    let given: BTreeSet<String> = all(|container| Call::new("ADD", container, &conf))
        .iter()
        .map(|one| one["ips"][0]["address"].to_string())
        .collect();
    assert_eq!(given.len(), 10, "both pools are used up before an ADD fails");
}

#[test]
fn fallback_leaves_both_pools_whole_when_callers_are_killed() {
    ENGINES.into_iter().for_each(killed);
}
