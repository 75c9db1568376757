//! Tests of the address probe of a secondary network on a real layer-2 segment. An address that a device already uses
//! is quarantined, and the container gets another address.

use std::fs;
use std::net::IpAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::Create;
use ipam_core::quarantine::{Quarantine, quarantine_of};
use serde_json::{Value, json};

use crate::lab::{ENGINES, Engine, Lab};
use crate::process::Call;
use crate::victim::head;
use crate::wire::Wire;

/// Maximum duration of a plugin call that probes an address.
const LONG: Duration = Duration::from_secs(2);

/// Returns the configuration of a macvlan network on the test segment, with a probe and additional `ipam` fields.
fn conf(lab: &Lab, wire: &Wire, more: &Value) -> Value {
    let mut conf = lab.conf_with("macvlan", json!({"probe": true}));
    conf["master"] = wire.interface.as_str().into();
    conf["ipam"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    conf
}

/// Returns the address that the first container gets in a new store with the given pool.
fn first_of(engine: Engine, pool: &str) -> IpAddr {
    let lab = Lab::with_pool(engine, pool);
    Call::new("ADD", "c1", &lab.conf_of("macvlan")).ok().address()
}

fn quarantine(lab: &Lab) -> Quarantine {
    lab.with_ipam(Create::Never, async |ipam, deadline| {
        quarantine_of(&ipam.inventory(deadline).await.unwrap().reservations)
    })
}

#[test]
fn probe_quarantines_device_address_and_assigns_another() {
    for engine in ENGINES {
        let pool = "10.251.1.0/24";
        let first = first_of(engine, pool);
        let wire = Wire::new(&[&format!("{first}/24")]);
        let lab = Lab::with_pool(engine, pool);
        let conf = conf(&lab, &wire, &json!({}));
        let begun = Instant::now();
        let answer = Call::new("ADD", "c1", &conf).ok();
        assert!(begun.elapsed() < patient(LONG), "{:?}", begun.elapsed());
        assert_ne!(answer.address(), first);
        let found = quarantine(&lab);
        assert_eq!(found.keys().collect::<Vec<_>>(), [&first]);
        assert_eq!(found[&first].reason, format!("{} answered on {}", wire.mac(), wire.interface));
        assert_eq!(found[&first].node, "node-1");
        let since = ipam_core::timestamps::parse_rfc3339(&found[&first].since).unwrap();
        assert!((time::OffsetDateTime::now_utc() - since).whole_minutes() < 2);

        // After the first ADD the container itself answers ARP for its address, but a repeated ADD must not quarantine
        // that address.
        wire.device("add", &format!("{}/24", answer.address()));
        assert_eq!(Call::new("ADD", "c1", &conf).ok().stdout, answer.stdout);
        assert_eq!(quarantine(&lab), found);
        assert_eq!(lab.books().held.len(), 1);
        // No other ADD gets the quarantined address, even without a probe or by an explicit request.
        let plain = lab.conf_of("macvlan");
        let taken = Call::new("ADD", "c2", &plain).with("CNI_ARGS", &format!("IP={first}")).run();
        taken.refusal().says(&[&first.to_string(), "reserved", "margay ipam show --ip"]);
        for container in ["c1", "c2"] {
            Call::new("DEL", container, &conf).ok();
        }
        lab.nothing_is_left();
    }
}

#[test]
fn probe_of_ipv6_on_bridge() {
    for engine in ENGINES {
        let pool = "fd00:251:2::/64";
        let both = json!({"assign_ipv4": "false", "assign_ipv6": "true"});
        let first = Lab::with_pool(engine, pool);
        let first = Call::new("ADD", "c1", &first.conf_with("bridge", both.clone())).ok().address();
        let wire = Wire::new(&[&format!("{first}/64")]);
        let lab = Lab::with_pool(engine, pool);
        let mut conf = conf(&lab, &wire, &both);
        conf["type"] = "bridge".into();
        conf["bridge"] = wire.bridged().into();
        assert_ne!(Call::new("ADD", "c1", &conf).ok().address(), first);
        let found = quarantine(&lab);
        assert_eq!(found[&first].reason, format!("{} answered on {}", wire.mac(), conf["bridge"].as_str().unwrap()));
        assert_eq!(found.len(), 1);
    }
}

#[test]
fn probe_on_silent_wire_and_unusable_interface() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let wire = Wire::new(&["10.251.3.200/24"]);
        let mut conf = conf(&lab, &wire, &json!({"subnet": "10.251.3.0/24"}));
        let begun = Instant::now();
        Call::new("ADD", "c1", &conf).ok();
        assert!(begun.elapsed() > Duration::from_millis(200), "the address was not probed");
        assert!(begun.elapsed() < patient(LONG), "{:?}", begun.elapsed());
        assert!(quarantine(&lab).is_empty());
        for (interface, why) in [("no-such0", "there is no interface no-such0"), ("lo", "not an Ethernet one")] {
            conf["ipam"]["probe"] = json!({"interface": interface, "timeout": 100});
            let answer = Call::new("ADD", interface, &conf).ok();
            assert!(answer.stderr.contains("cannot probe") && answer.stderr.contains(why), "{answer:?}");
        }
        assert_eq!(lab.books().held.len(), 3);
    }
}

#[test]
fn probe_fails_when_devices_have_all_tried_addresses() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let wire = Wire::new(&["10.251.4.2/24", "10.251.4.3/24", "10.251.4.4/24"]);
        let range = json!({"subnet": "10.251.4.0/24", "rangeStart": "10.251.4.2", "rangeEnd": "10.251.4.5"});
        let conf = conf(&lab, &wire, &range);
        // The first ADD creates the store, quarantines three addresses that devices use, and fails.
        let refusal = Call::new("ADD", "c1", &conf).run().refusal();
        assert_eq!(refusal.code, 11);
        refusal.says(&["10.251.4.2", "10.251.4.3", "10.251.4.4", &wire.mac(), "margay ipam quarantine list"]);
        lab.nothing_is_left();
        assert_eq!(quarantine(&lab).len(), 3);
        assert_eq!(Call::new("ADD", "c1", &conf).ok().cidrs(), ["10.251.4.5/24"]);
    }
}

#[test]
fn probe_refuses_requested_address_of_device() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.251.5.0/24");
        let wire = Wire::new(&["10.251.5.9/24"]);
        let conf = conf(&lab, &wire, &json!({}));
        let add = Call::new("ADD", "c1", &conf).with("CNI_ARGS", "IP=10.251.5.9");
        let refusal = add.run().refusal();
        assert_eq!(refusal.code, 11);
        refusal.says(&["10.251.5.9 was requested", &wire.mac()]);
        lab.nothing_is_left();
        assert!(quarantine(&lab).is_empty());
        wire.device("del", "10.251.5.9/24");
        assert_eq!(add.ok().cidrs(), ["10.251.5.9/24"], "the device is gone");
    }
}

#[test]
fn probe_leaks_nothing_when_plugin_is_killed() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.251.6.0/24");
        let wire = Wire::new(&[]);
        let conf = conf(&lab, &wire, &json!({}));
        let killed = (0..20).any(|n| killed_in_probe(&lab, &Call::new("ADD", &format!("c{n}"), &conf)));
        assert!(killed, "no call was met in its probe");
        for n in 0..20 {
            Call::new("DEL", &format!("c{n}"), &conf).ok();
        }
        lab.nothing_is_left();
        assert!(quarantine(&lab).is_empty());
    }
}

/// Runs a plugin call, and kills it while it waits for an answer to its probe, after the call's commit. Returns false
/// if the call was killed too early, or ended without being killed. The kill may come too early: the test waits until
/// the file `head` changes, but opening the store changes `head` as well.
fn killed_in_probe(lab: &Lab, call: &Call) -> bool {
    let held = lab.books().held.len();
    let before = head(&lab.store);
    let mut child = call.start(call.command());
    let files = format!("/proc/{}/fd", child.id());
    let in_probe = || {
        let mut open =
            fs::read_dir(&files).into_iter().flatten().filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        head(&lab.store) != before && open.any(|path| path.to_string_lossy().starts_with("socket:"))
    };
    let end = Instant::now() + patient(LONG);
    while child.try_wait().unwrap().is_none() && Instant::now() < end && !in_probe() {
        sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap().code().is_none() && lab.books().held.len() > held
}

#[test]
fn probe_is_skipped_without_wire_and_on_calico_network() {
    let lab = Lab::with_pool(Engine::REDB, "10.251.7.0/24");
    let probing = |plugin: &str| Call::new("ADD", "c1", &lab.conf_with(plugin, json!({"probe": true}))).run().refusal();
    let refusal = probing("ptp");
    assert_eq!(refusal.says(&["ipam.probe", "ipam.probe.interface"]).code, 7);
    assert_eq!(probing("calico").says(&["ipam.probe cannot be used"]).code, 7);
    lab.nothing_is_left();
}
