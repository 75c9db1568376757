//! Tests of the sample networks in `packaging/conflists`, which users copy: each network must work unchanged. The
//! sample for a cluster's network is tested in `tests/etcd/samples.rs`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::lab::{Engine, Lab};
use crate::process::Call;
use testkit::programs::plugin;

/// Runs a command in a new network namespace with its own /run, in which `c1` is the named network namespace of a
/// container. When the command ends, the network namespace and the container `c1` are gone.
const ELSEWHERE: [&str; 6] = [
    "/usr/bin/unshare",
    "--net",
    "--mount",
    "/bin/sh",
    "-c",
    "mount -t tmpfs none /run && ip netns add c1 && exec \"$0\"",
];

/// Expectations for a sample: its main plugin, the CIDRs that a container's addresses must be in, and an address that a
/// container may request.
const SAMPLES: [(&str, &str, &[&str], &str); 5] = [
    ("bridge", "bridge", &["10.41.0.0/24"], "10.41.0.77"),
    ("dual-stack", "bridge", &["10.42.0.0/24", "fd00:42::/64"], "fd00:42::77"),
    ("macvlan", "macvlan", &["10.44.0.0/24"], "10.44.0.200"),
    ("podman", "bridge", &["10.88.0.0/16"], "10.88.7.7"),
    ("ptp", "ptp", &["10.43.0.0/24"], "10.43.0.77"),
];

/// Returns the configuration that a runtime passes to the main plugin of a sample: the plugin's object, with the name
/// and version of the configuration list.
fn main_plugin(name: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/conflists");
    let list = fs::read_to_string(folder.join(format!("{name}.conflist"))).unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    let plugins = list["plugins"].as_array().unwrap();
    let ours: Vec<_> = plugins.iter().filter(|plugin| plugin["ipam"]["type"] == "margay-ipam").collect();
    assert_eq!(ours.len(), 1, "one plugin of a list has addresses: {list}");
    let mut conf = ours[0].clone();
    for key in ["name", "cniVersion"] {
        assert!(list[key].is_string(), "{key} is missing: {list}");
        conf[key] = list[key].clone();
    }
    conf
}

#[test]
fn sample_networks_give_addresses_without_existing_store() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/conflists");
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    files.retain(|file| !file.starts_with("routed"));
    assert_eq!(files, SAMPLES.map(|(name, ..)| format!("{name}.conflist")), "each sample has its row here");
    for (name, main, subnets, wanted) in SAMPLES {
        let mut conf = main_plugin(name);
        assert_eq!(conf["type"], main, "{name}");
        assert_eq!(conf["datastore_type"], "sled", "{name}: the store is named, whatever the runtime's environment");
        let lab = Lab::new(Engine::SLED);
        conf["datastore_path"] = lab.store.to_str().into();

        let added = Call::new("ADD", "c1", &conf).ok();
        let networks: Vec<_> = added.cidrs().iter().map(|cidr| network_of(cidr)).collect();
        assert_eq!(networks, subnets, "{name}: {added:?}");
        assert!(!added.json()["routes"].as_array().unwrap().is_empty(), "{name}: a way out: {added:?}");
        let asked = Call::new("ADD", "c2", &conf).with("CNI_ARGS", &format!("IgnoreUnknown=1;IP={wanted}")).ok();
        assert!(asked.addresses().contains(&wanted.parse().unwrap()), "{name}: {asked:?}");
        for container in ["c1", "c2"] {
            Call::new("DEL", container, &conf).ok();
        }
        // The requested address is free again after the DEL of the first container, so another container can request
        // it.
        Call::new("ADD", "c3", &conf).with("CNI_ARGS", &format!("IgnoreUnknown=1;IP={wanted}")).ok();
    }
}

fn network_of(cidr: &str) -> String {
    cidr.parse::<ipnet::IpNet>().unwrap().trunc().to_string()
}

#[test]
fn sample_routed_network_wires_container_with_its_pools() {
    let mut conf = main_plugin("routed");
    assert_eq!((&conf["type"], &conf["datastore_type"]), (&"margay-cni".into(), &"sled".into()));
    let lab = Lab::new(Engine::SLED);
    conf["datastore_path"] = lab.store.to_str().into();
    let bin = lab.root.path();
    for name in ["margay-cni", "margay-ipam"] {
        symlink(plugin(), bin.join(name)).unwrap();
    }
    let call = |verb: &str| {
        let call = Call::new(verb, "c1", &conf).with("CNI_NETNS", "/run/netns/c1").by(bin.join("margay-cni"));
        let call = call.with("CNI_PATH", bin.to_str().unwrap());
        call.run_as(call.command_through(&ELSEWHERE))
    };
    let done = |verb: &str| {
        let outcome = call(verb);
        assert_eq!(outcome.exit, 0, "{verb}: {outcome:?}");
        outcome
    };
    call("ADD").refusal().says(&["there is no store here", "pool create"]);
    // From here on, the test follows docs/routed-network.md.
    lab.pool("routed", "10.45.0.0/24");
    lab.pool("routed6", "fd00:45::/64");
    let added = done("ADD");
    let [v4, v6] = &added.cidrs()[..] else { panic!("{added:?}") };
    assert!(v4.starts_with("10.45.0.") && v4.ends_with("/32"), "{added:?}");
    assert!(v6.starts_with("fd00:45:") && v6.ends_with("/128"), "{added:?}");
    assert_eq!(added.json()["interfaces"][0]["name"], "calic1");
    assert_eq!(lab.books().held.len(), 2);
    done("DEL");
    lab.nothing_is_left();
}
