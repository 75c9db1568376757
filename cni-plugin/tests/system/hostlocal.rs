//! Side by side with host-local: a working configuration in which nothing but the type changes has the same results.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde_json::{Value, json};

use crate::lab::{ENGINES, Lab};
use crate::process::Call;

/// The CNI versions that Debian's host-local speaks.
const VERSIONS: [&str; 4] = ["0.2.0", "0.3.1", "0.4.0", "1.0.0"];

pub(crate) fn host_local() -> PathBuf {
    let folders = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];
    let found = folders.map(|folder| PathBuf::from(folder).join("host-local")).into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("this test needs host-local (Debian: containernetworking-plugins) in {folders:?}"))
}

/// A result without what may differ: which addresses of the subnets were chosen.
///
/// From CNI 1.0.0 on `dns` may be left out when there is nothing in it; host-local as Debian builds it prints it empty.
pub(crate) fn shape(mut result: Value) -> Value {
    let without_host = |cidr: &mut Value| {
        let net: IpNet = cidr.as_str().unwrap().parse().unwrap();
        *cidr = net.trunc().to_string().into();
    };
    for family in ["ip4", "ip6"] {
        if let Some(cidr) = result.get_mut(family).and_then(|family| family.get_mut("ip")) {
            without_host(cidr);
        }
    }
    for ip in result.get_mut("ips").and_then(Value::as_array_mut).into_iter().flatten() {
        without_host(&mut ip["address"]);
    }
    if result["cniVersion"] == "1.0.0" && result["dns"] == json!({}) {
        result.as_object_mut().unwrap().remove("dns");
    }
    result
}

fn configurations() -> Vec<Value> {
    vec![
        json!({"subnet": "10.5.0.0/24"}),
        json!({"subnet": "10.5.0.0/24", "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.5.0.9"}]}),
        json!({"subnet": "10.5.0.0/20", "rangeStart": "10.5.1.10", "rangeEnd": "10.5.1.12", "gateway": "10.5.15.254"}),
        json!({"subnet": "fd05::/64", "routes": [{"dst": "::/0"}]}),
        json!({"ranges": [[{"subnet": "10.5.0.0/24"}], [{"subnet": "fd05::/64", "gateway": "fd05::fe"}]],
               "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}),
        // A small part of a large network.
        json!({"ranges": [
            [{"subnet": "10.0.0.0/8", "rangeStart": "10.200.3.7", "rangeEnd": "10.200.3.9"}],
            [{"subnet": "fd05::/48", "rangeStart": "fd05::7:3", "rangeEnd": "fd05::7:9"}],
        ]}),
        json!({"ranges": [[
            {"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.20", "rangeEnd": "10.5.0.29"},
            {"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.40", "rangeEnd": "10.5.0.49"},
        ]]}),
    ]
}

#[test]
fn the_same_results() {
    let host_local = host_local();
    for engine in ENGINES {
        for ipam in configurations() {
            for version in VERSIONS {
                let lab = Lab::new(engine);
                let mut ours = lab.conf_with("bridge", ipam.clone());
                ours["cniVersion"] = version.into();
                let mut theirs = ours.clone();
                theirs["ipam"]["type"] = "host-local".into();
                theirs["ipam"]["dataDir"] = json!(lab.root.path().join("host-local"));

                let expected = Call::new("ADD", "c1", &theirs).by(&host_local).ok().json();
                let found = Call::new("ADD", "c1", &ours).ok().json();
                assert_eq!(shape(found), shape(expected), "{engine:?}, CNI {version}, {ipam}");
                Call::new("DEL", "c1", &ours).ok();
                lab.nothing_is_left();
            }
        }
    }
}

/// Neither assigns the subnet's own address, the broadcast address or the gateway, and both stay in the range.
#[test]
fn the_same_addresses() {
    let host_local = host_local();
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let ours = lab.conf_with("bridge", json!({"subnet": "10.5.0.0/28", "rangeEnd": "10.5.0.12"}));
        let mut theirs = ours.clone();
        theirs["ipam"]["type"] = "host-local".into();
        theirs["ipam"]["dataDir"] = json!(lab.root.path().join("host-local"));
        let all = |conf: &Value, add: &dyn Fn(Call) -> Call| {
            let mut addresses: Vec<IpAddr> = Vec::new();
            loop {
                let outcome = add(Call::new("ADD", &format!("c{}", addresses.len()), conf)).run();
                if outcome.exit != 0 {
                    break;
                }
                addresses.push(outcome.address());
            }
            addresses.sort();
            addresses
        };
        let expected = all(&theirs, &|call| call.by(&host_local));
        assert_eq!(expected.len(), 11);
        assert_eq!(all(&ours, &|call| call), expected);
    }
}
