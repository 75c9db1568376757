//! Tests of the addresses of attachments: repeated calls, several interfaces and networks, explicitly requested
//! addresses, and pools.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::{Value, json};

use crate::lab::{ENGINES, Engine, Lab, after};
use crate::process::{Call, Outcome};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn named(mut conf: Value, name: &str) -> Value {
    conf["name"] = name.into();
    conf
}

fn wanting(call: Call, address: &str) -> Call {
    call.with("CNI_ARGS", &format!("IgnoreUnknown=1;IP={address}"))
}

#[test]
fn attachment_has_one_address_until_del() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        for plugin in ["bridge", "calico"] {
            let conf = lab.conf_of(plugin);
            let add = Call::new("ADD", "c1", &conf);
            let first = add.ok();
            assert_eq!(add.ok().stdout, first.stdout, "a repeated ADD gets another result");
            let second = add.clone().on("eth1").ok();
            assert_ne!(second.address(), first.address(), "another interface");
            let other = Call::new("ADD", "c1", &named(conf.clone(), "net2")).ok();
            assert_eq!(lab.books().held.len(), 3, "another network");

            Call::new("CHECK", "c1", &after(&conf, &first.cidrs())).ok();
            let wrong = Call::new("CHECK", "c1", &after(&conf, &second.cidrs())).run();
            wrong.refusal().says(&[&second.address().to_string(), "is not recorded"]);

            let del = Call::new("DEL", "c1", &conf);
            assert_eq!(del.ok().stdout, "");
            del.ok();
            let held = lab.books().held;
            assert_eq!(held.keys().copied().collect::<BTreeSet<_>>(), [second.address(), other.address()].into());
            Call::new("CHECK", "c1", &conf).run().refusal().says(&["no address is recorded", "eth0"]);
            Call::new("CHECK", "c1", &after(&conf, &second.cidrs())).on("eth1").ok();
            // A runtime may have lost all data of an attachment except the names of its container, interface and
            // network.
            del.clone().on("eth1").without("CNI_NETNS").ok();
            Call::new("DEL", "c1", &named(conf, "net2")).without("CNI_NETNS").with("CNI_ARGS", "").ok();
            lab.nothing_is_left();
        }
    }
}

/// Tests that environment variables never override the configured store: a runtime may run ADD and DEL with different
/// environments.
#[test]
fn attachment_store_is_never_chosen_by_environment() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        let loud = [
            ("DATASTORE_TYPE", "etcdv3"),
            ("DATASTORE_PATH", "/nonexistent"),
            ("ETCD_ENDPOINTS", "http://127.0.0.1:1"),
            ("KUBECONFIG", "/nonexistent"),
            ("HOME", "/nonexistent"),
        ];
        let add = loud.iter().fold(lab.add("c1"), |call, (name, value)| call.with(name, value));
        let ip = add.ok().address();
        assert_eq!(lab.books().held.into_keys().collect::<Vec<_>>(), [ip]);
        lab.del("c1").ok();
        lab.nothing_is_left();
    }
}

/// Tests that containers keep their addresses when the host is renamed.
#[test]
fn attachment_stays_when_host_is_renamed() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        let first = lab.add("c1").ok();
        let mut conf = lab.conf_of("bridge");
        conf["nodename"] = "renamed".into();
        assert_eq!(Call::new("ADD", "c1", &conf).ok().stdout, first.stdout);
        Call::new("CHECK", "c1", &after(&conf, &first.cidrs())).ok();
        let second = Call::new("ADD", "c2", &conf).ok();
        assert_ne!(second.address(), first.address());
        Call::new("DEL", "c1", &conf).ok();
        lab.del("c2").ok();
        lab.nothing_is_left();
    }
}

#[test]
fn wanted_addresses_on_bridge() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        let first = wanting(lab.add("c1"), "10.2.0.77");
        assert_eq!(first.ok().cidrs(), ["10.2.0.77/24"]);
        assert_eq!(first.ok().cidrs(), ["10.2.0.77/24"], "a repeated ADD gets another address");
        wanting(lab.add("c2"), "10.2.0.77").run().refusal().says(&[
            "10.2.0.77",
            "already assigned",
            "margay ipam show",
        ]);
        wanting(lab.add("c1").on("eth1"), "10.2.0.77").run().refusal().says(&["10.2.0.77", "already assigned"]);
        for reserved in ["10.2.0.0", "10.2.0.1", "10.2.0.255"] {
            wanting(lab.add("c3"), reserved).run().refusal().says(&[reserved, "reserved"]);
        }
        wanting(lab.add("c3"), "10.3.0.1").run().refusal();
        assert_eq!(lab.books().held.len(), 1);
        // The CNI capability `ips` (in `runtimeConfig`) writes each address with a prefix length.
        let mut conf = lab.conf_of("bridge");
        conf["runtimeConfig"] = json!({"ips": ["10.2.0.78/24"]});
        assert_eq!(Call::new("ADD", "c4", &conf).ok().cidrs(), ["10.2.0.78/24"]);
        conf["runtimeConfig"] = json!({});
        conf["args"] = json!({"cni": {"ips": ["10.2.0.79", "10.2.0.78"]}});
        Call::new("ADD", "c5", &conf).run().refusal().says(&["10.2.0.78"]);
        assert_eq!(lab.books().held.len(), 2, "all or none");
        lab.del("c1").ok();
        assert_eq!(wanting(lab.add("c2"), "10.2.0.77").ok().cidrs(), ["10.2.0.77/24"]);
        for container in ["c2", "c3", "c4", "c5"] {
            lab.del(container).ok();
        }
        lab.nothing_is_left();
    }
}

#[test]
fn wanted_addresses_on_calico_network() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        let conf = lab.conf_of("calico");
        let add = wanting(Call::new("ADD", "c1", &conf), "10.2.0.77");
        assert_eq!(add.ok().cidrs(), ["10.2.0.77/32"]);
        for again in [add.clone(), wanting(Call::new("ADD", "c2", &conf), "10.2.0.77")] {
            let refusal = again.run().refusal();
            assert_eq!(refusal.code, 999);
            refusal.says(&["resource already exists: 10.2.0.77 with error: Address already assigned in block"]);
        }
        // A repeated ADD without a requested address returns the container's current address, even if that address was
        // explicitly requested before.
        Call::new("DEL", "c1", &conf).ok();
        lab.nothing_is_left();
    }
}

#[test]
fn bridged_network_names_pools_when_several() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/24");
        lab.pool("other", "10.3.0.0/24");
        let refusal = lab.add("c1").run().refusal();
        assert_eq!(refusal.says(&["lab", "other", "ipv4_pools"]).code, 7);
        assert!(lab.books().held.is_empty());
        for pool in ["other", "10.3.0.0/24"] {
            let conf = lab.conf_with("bridge", json!({"ipv4_pools": [pool]}));
            let address = Call::new("ADD", pool.split('/').next().unwrap(), &conf).ok().address();
            assert!(address.to_string().starts_with("10.3.0."), "{address}");
        }
        // Networks of type `calico` assign addresses from any pool.
        Call::new("ADD", "c2", &lab.conf_of("calico")).ok();
    }
}

/// Tests that a network of type `calico` never assigns an address that a bridge network in the same pool needs for
/// itself.
#[test]
fn bridged_network_gives_no_network_broadcast_or_gateway() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.0/28");
        let first = lab.add("on-the-bridge").ok();
        assert_eq!(first.json()["ips"][0]["gateway"], "10.2.0.1");
        let reserved: BTreeSet<String> = lab.books().reservations["margay-bridge-lab"].iter().cloned().collect();
        assert_eq!(reserved, ["10.2.0.0/32", "10.2.0.1/32", "10.2.0.15/32"].map(str::to_owned).into());
        let conf = lab.conf_of("calico");
        let mut held = BTreeSet::from([first.address()]);
        for number in 0..12 {
            let address = Call::new("ADD", &format!("routed-{number}"), &conf).ok().address();
            assert!(held.insert(address), "{address} twice");
        }
        assert_eq!(held, (2..=14).map(|n| IpAddr::from([10, 2, 0, n])).collect());
        Call::new("ADD", "one-too-many", &conf).run().refusal().says(&["10.2.0.0/28"]);
        lab.add("one-too-many").run().refusal().says(&["margay ipam show"]);
        // The routed and the bridged network share the pool: an address that a DEL on the routed network frees can be
        // assigned on the bridged network.
        Call::new("DEL", "routed-5", &conf).ok();
        let address = lab.add("one-too-many").ok().address();
        assert!(held.contains(&address) && address != first.address());
    }
}

#[test]
fn bridged_network_works_with_smallest_pools() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.2.0.4/31");
        let first = lab.add("c1").ok();
        assert_eq!(first.cidrs(), ["10.2.0.5/31"]);
        assert_eq!(first.json()["ips"][0]["gateway"], "10.2.0.4");
        lab.add("c2").run().refusal();
        lab.del("c1").ok();
        lab.nothing_is_left();

        let lab = Lab::with_pool(engine, "10.2.0.5/32");
        assert_eq!(lab.add("c1").run().refusal().says(&["10.2.0.5/32", "larger pool"]).code, 7);
        assert_eq!(Call::new("ADD", "c1", &lab.conf_of("calico")).ok().cidrs(), ["10.2.0.5/32"]);
    }
}

fn dual_stack(lab: &Lab) -> Value {
    lab.conf_with(
        "bridge",
        json!({
            "ranges": [
                [
                    {"subnet": "10.6.0.0/24", "rangeStart": "10.6.0.10", "rangeEnd": "10.6.0.11", "gateway": "10.6.0.254"},
                    {"subnet": "10.6.0.0/24", "rangeStart": "10.6.0.200", "rangeEnd": "10.6.0.203"},
                ],
                [{"subnet": "fd06::/64", "rangeStart": "fd06::10", "rangeEnd": "fd06::15"}],
            ],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd06::99"}],
        }),
    )
}

#[test]
fn host_local_keys_make_network() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let conf = dual_stack(&lab);
        let mut held = BTreeSet::new();
        for number in 0..6 {
            let outcome = Call::new("ADD", &format!("c{number}"), &conf).ok();
            let json = outcome.json();
            assert_eq!(json["routes"], json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd06::99"}]));
            let gateways: Vec<_> = json["ips"].as_array().unwrap().iter().map(|ip| ip["gateway"].clone()).collect();
            assert_eq!(gateways, ["10.6.0.254", "fd06::1"]);
            let cidrs = outcome.cidrs();
            assert!(cidrs[0].ends_with("/24") && cidrs[1].ends_with("/64"), "{cidrs:?}");
            held.extend(outcome.addresses());
        }
        let v4 = [10, 11, 200, 201, 202, 203].map(|n| IpAddr::from([10, 6, 0, n]));
        let v6 = (0x10..=0x15).map(|n| IpAddr::from([0xfd06, 0, 0, 0, 0, 0, 0, n]));
        assert_eq!(held, v4.into_iter().chain(v6).collect());
        // An attachment gets an address of each family, or no address at all.
        Call::new("ADD", "c6", &conf).run().refusal();
        assert_eq!(lab.books().count_of("net1.c6"), 0);
        assert_eq!(lab.books().held.len(), 12);
        wanting(Call::new("ADD", "c6", &conf), "10.6.0.50").run().refusal().says(&["10.6.0.50", "reserved"]);
        for number in 0..6 {
            Call::new("DEL", &format!("c{number}"), &conf).ok();
        }
        lab.nothing_is_left();
    }
}

#[test]
fn host_local_keys_in_short_form() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let ipam =
            json!({"subnet": "10.7.0.0/29", "rangeStart": "10.7.0.4", "rangeEnd": "10.7.0.5", "gateway": "10.7.0.6"});
        let conf = lab.conf_with("macvlan", ipam);
        let addresses: BTreeSet<_> =
            ["a", "b"].map(|container| Call::new("ADD", container, &conf).ok()).iter().map(Outcome::address).collect();
        assert_eq!(addresses, [ip("10.7.0.4"), ip("10.7.0.5")].into());
        let full = Call::new("ADD", "c", &conf).run();
        full.refusal().says(&["margay ipam show"]);
        // If the network's subnet is full, a second subnet under the same network name works, and ADDs on the first
        // subnet still fail.
        let other = lab.conf_with("macvlan", json!({"subnet": "10.8.0.0/24"}));
        assert!(Call::new("ADD", "d", &other).ok().address().to_string().starts_with("10.8.0."));
        Call::new("ADD", "e", &conf).run().refusal().says(&["margay ipam show"]);
        for subnet in ["10.7.0.0/31", "10.7.0.0/32", "10.7.0.1/24", "nonsense"] {
            let lab = Lab::new(engine);
            let conf = lab.conf_with("macvlan", json!({ "subnet": subnet }));
            assert_eq!(Call::new("ADD", "a", &conf).run().refusal().says(&[subnet]).code, 7);
            assert!(!lab.store.exists(), "{subnet} has made a store");
        }
    }
}

/// Tests that networks of type `calico` reject the configuration keys of secondary networks, which would have no
/// effect.
#[test]
fn bridged_keys_are_refused_on_calicos_networks() {
    let lab = Lab::with_pool(Engine::REDB, "10.2.0.0/24");
    let keys = [("mask", json!("pool")), ("gateway", json!("first")), ("routes", json!([]))];
    for (key, value) in keys {
        let conf = lab.conf_with("calico", json!({ key: value }));
        assert_eq!(Call::new("ADD", "c1", &conf).run().refusal().says(&[key]).code, 7);
    }
    let conf = lab.conf_with("bridge", json!({"mask": "block"}));
    assert!(Call::new("ADD", "c1", &conf).ok().cidrs()[0].ends_with("/26"));
}
