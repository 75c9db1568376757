//! The networks of `packaging/conflists`, which users copy: each has to work as it is.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::lab::{Engine, Lab};
use crate::process::Call;

/// Each list with the plugin that has the addresses, what a container gets as its first ones, and what it may want.
const SAMPLES: [(&str, &str, &[&str], &str); 5] = [
    ("bridge", "bridge", &["10.41.0.0/24"], "10.41.0.77"),
    ("dual-stack", "bridge", &["10.42.0.0/24", "fd00:42::/64"], "fd00:42::77"),
    ("macvlan", "macvlan", &["10.44.0.0/24"], "10.44.0.200"),
    ("podman", "bridge", &["10.88.0.0/16"], "10.88.7.7"),
    ("ptp", "ptp", &["10.43.0.0/24"], "10.43.0.77"),
];

/// What a runtime gives the main plugin of a list: its object, with the name and the version of the list.
fn main_plugin(list: &Value) -> Value {
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
fn every_sample_network_gives_addresses_on_a_machine_that_has_no_store_yet() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/conflists");
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    assert_eq!(files, SAMPLES.map(|(name, ..)| format!("{name}.conflist")), "each sample has its row here");
    for (name, main, subnets, wanted) in SAMPLES {
        let text = fs::read_to_string(folder.join(format!("{name}.conflist"))).unwrap();
        let mut conf = main_plugin(&serde_json::from_str(&text).unwrap());
        assert_eq!(conf["type"], main, "{name}");
        assert_eq!(conf["datastore_type"], "sled", "{name}: the store is named, whatever the runtime's environment");
        let lab = Lab::new(Engine::Sled);
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
        // Given back: it can be had again.
        Call::new("ADD", "c3", &conf).with("CNI_ARGS", &format!("IgnoreUnknown=1;IP={wanted}")).ok();
    }
}

fn network_of(cidr: &str) -> String {
    cidr.parse::<ipnet::IpNet>().unwrap().trunc().to_string()
}
