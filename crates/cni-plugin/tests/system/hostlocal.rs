//! Compares Margay with host-local: in a working configuration, only the plugin type is changed, and the results must
//! stay the same.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde_json::{Value, json};

use crate::lab::{ENGINES, Lab};
use crate::process::Call;

/// The CNI versions that Debian's host-local plugin supports.
const VERSIONS: [&str; 4] = ["0.2.0", "0.3.1", "0.4.0", "1.0.0"];

pub(crate) fn host_local() -> PathBuf {
    let folders = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"];
    let found = folders.map(|folder| PathBuf::from(folder).join("host-local")).into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("this test needs host-local (Debian: containernetworking-plugins) in {folders:?}"))
}

/// Removes the addresses from a result, because Margay and host-local may choose different addresses in a subnet.
///
/// Since CNI 1.0.0 a result may omit an empty `dns`; host-local prints an empty `dns`, so remove `dns` before the
/// comparison.
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
        // The address range is a small part of a large subnet.
        json!({"ranges": [
            [{"subnet": "10.0.0.0/8", "rangeStart": "10.200.3.7", "rangeEnd": "10.200.3.9"}],
            [{"subnet": "fd05::/48", "rangeStart": "fd05::7:3", "rangeEnd": "fd05::7:9"}],
        ]}),
        json!({"ranges": [[
            {"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.20", "rangeEnd": "10.5.0.29"},
            {"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.40", "rangeEnd": "10.5.0.49"},
        ]]}),
        // host-local accepts an IPv6 gateway outside of the subnet (for example, a link-local address), so test such
        // gateways.
        json!({"subnet": "fd05::/64", "gateway": "fe80::1", "routes": [{"dst": "::/0"}]}),
        json!({"ranges": [[{"subnet": "10.5.0.0/24"}], [{"subnet": "fd05::/64", "gateway": "2001:db8::1"}]]}),
        json!({"ranges": [[{"subnet": "fd05::/64", "gateway": "fe80::1"}, {"subnet": "fd06::/64", "gateway": "fe80::2"}]]}),
        // Configuration templates and tools write keys with empty values.
        json!({"subnet": "10.5.0.0/24", "ranges": [], "rangeStart": "", "gateway": "", "routes": []}),
        json!({"ranges": [[{"subnet": "10.5.0.0/24", "rangeStart": "", "rangeEnd": "", "gateway": ""}]], "rangeStart": ""}),
    ]
}

#[test]
fn host_local_results_match() {
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

/// Tests two networks with the same name and different subnets, and a subnet that is changed while containers run or
/// after they have ended.
#[test]
fn host_local_subnets_of_one_name_match() {
    let host_local = host_local();
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let conf = |ipam: Value| {
            let ours = lab.conf_with("macvlan", ipam);
            let mut theirs = ours.clone();
            theirs["ipam"]["type"] = "host-local".into();
            theirs["ipam"]["dataDir"] = json!(lab.root.path().join("host-local"));
            (ours, theirs)
        };
        let add = |container: &str, ipam: Value| {
            let (ours, theirs) = conf(ipam);
            let expected = Call::new("ADD", container, &theirs).by(&host_local).ok().json();
            let found = Call::new("ADD", container, &ours).ok().json();
            assert_eq!(shape(found), shape(expected), "{engine:?}, {ours}");
        };
        let both = |v4: &str, v6: &str| json!({"ranges": [[{"subnet": v4}], [{"subnet": v6}]]});
        add("c1", json!({"subnet": "10.5.0.0/24"}));
        add("c2", json!({"subnet": "10.6.0.0/24"}));
        add("c3", json!({"subnet": "10.5.0.0/24"}));
        add("c4", both("10.7.0.0/24", "fd07::/64"));
        add("c5", both("10.8.0.0/25", "fd08::/120"));
        for container in ["c1", "c2", "c3", "c4", "c5"] {
            let (ours, theirs) = conf(both("10.9.0.0/24", "fd09::/64"));
            Call::new("DEL", container, &theirs).by(&host_local).ok();
            Call::new("DEL", container, &ours).ok();
        }
        lab.nothing_is_left();
        for round in 0..3 {
            let of = both(&format!("10.42.{round}.0/24"), &format!("fd42:0:0:{round}::/64"));
            add("d", of.clone());
            let (ours, theirs) = conf(of);
            Call::new("DEL", "d", &theirs).by(&host_local).ok();
            Call::new("DEL", "d", &ours).ok();
            lab.nothing_is_left();
        }
    }
}

/// Tests that host-local and Margay reject a configuration that defines no address, whatever pools the store has.
#[test]
fn host_local_refusals_match() {
    let host_local = host_local();
    let lab = Lab::with_pool(ENGINES[1], "10.88.0.0/24");
    for ipam in [
        json!({"ranges": []}),
        json!({"ranges": [[]]}),
        json!({"ranges": [[], []], "routes": [{"dst": "0.0.0.0/0"}]}),
        json!({"ranges": [[{"subnet": "10.1.0.0/24"}], []]}),
        json!({"ranges": ""}),
        json!({"ranges": {}}),
        json!({"ranges": [{"subnet": "10.1.0.0/24"}]}),
        json!({"subnet": ""}),
        json!({"subnet": ["10.1.0.0/24"]}),
        json!({"subnet": "10.1.0.0/24", "ranges": [[]]}),
        json!({"subnet": "10.1.0.0/24", "routes": ""}),
        json!({"subnet": "10.1.0.0/24", "routes": [{"dst": ""}]}),
    ] {
        let ours = lab.conf_with("bridge", ipam);
        let mut theirs = ours.clone();
        theirs["ipam"]["type"] = "host-local".into();
        theirs["ipam"]["dataDir"] = json!(lab.root.path().join("host-local"));
        assert_eq!(Call::new("ADD", "c1", &theirs).by(&host_local).run().exit, 1, "{theirs}");
        assert_eq!(Call::new("ADD", "c1", &ours).run().refusal().code, 7, "{ours}");
    }
    for ipam in [json!({"range": ""}), json!({"ipRanges": []}), json!({"range": "", "ipRanges": [{"range": ""}]})] {
        let refusal = Call::new("ADD", "c1", &lab.conf_with("macvlan", ipam)).run().refusal();
        assert_eq!(refusal.says(&["range"]).code, 7);
    }
    lab.nothing_is_left();
}

/// Tests that host-local and Margay never assign the network, broadcast or gateway address, or an address outside of
/// the range.
#[test]
fn host_local_addresses_match() {
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
