//! Checks the main plugin's parsers of a network configuration, an IPAM plugin's result, a kubeconfig and a
//! WorkloadEndpoint.

use std::net::IpAddr;

use cni_plugin::fuzzing::{parse_ipam_result, parse_kubeconfig, parse_main_conf};
use ipam_core::model::{Document, WorkloadEndpoint, keys};
use ipnet::IpNet;
use serde_json::Value;

/// A secret that no error message may contain. In the seeds, every secret of a kubeconfig is this string.
const SECRET: &str = "c2VjcmV0";

/// Runs the fuzz target `main_plugin` on an input, whose first byte (`c`, `r`, `k` or `e`) chooses one of the parsers.
pub fn main_plugin(data: &[u8]) {
    match data {
        [b'c', text @ ..] => conf(text),
        [b'r', text @ ..] => result(text),
        [b'k', text @ ..] => kubeconfig(text),
        [b'e', text @ ..] => endpoint(text),
        _ => {}
    }
}

fn conf(text: &[u8]) {
    if let Err(message) = parse_main_conf(text) {
        assert!(!message.is_empty());
    }
}

/// Checks which addresses the parser of IPAM results returns: those in `ips`, in order, or those in `ip4` and `ip6` if
/// the result has an old CNI version.
fn result(text: &[u8]) {
    let Ok(addresses) = parse_ipam_result(text) else { return };
    let json: Value = serde_json::from_slice(text).unwrap();
    let expected: Vec<IpAddr> = if json.get("ip4").is_some() || json.get("ip6").is_some() {
        ["ip4", "ip6"].iter().filter_map(|family| address(&json[*family]["ip"])).collect()
    } else {
        json["ips"].as_array().into_iter().flatten().filter_map(|ip| address(&ip["address"])).collect()
    };
    assert_eq!(addresses, expected);
}

fn address(text: &Value) -> Option<IpAddr> {
    Some(text.as_str()?.parse::<IpNet>().unwrap().addr())
}

fn kubeconfig(text: &[u8]) {
    if let Err(message) = parse_kubeconfig(text) {
        assert!(!message.contains(SECRET), "{message}");
    }
}

/// Checks that a WorkloadEndpoint encodes and decodes to an equal one, and that all its fields can be read.
fn endpoint(text: &[u8]) {
    let key = keys::workload_endpoint("default", "node1-cni-c1-eth0");
    let Ok(endpoint) = WorkloadEndpoint::decode(&key, text) else { return };
    let written = endpoint.encode().unwrap();
    let again = WorkloadEndpoint::decode(&key, written.as_bytes()).unwrap();
    assert_eq!(again.document(), endpoint.document());
    assert_eq!(again.encode().unwrap(), written);
    assert!(endpoint.addresses().len() <= endpoint.networks().len());
    let shown = [endpoint.node(), endpoint.container(), endpoint.pod(), endpoint.interface(), endpoint.mac()];
    assert!(shown.iter().all(|text| text.len() <= written.as_bytes().len()));
    assert!(endpoint.profiles().len() <= written.as_bytes().len());
    let mut changed = endpoint;
    changed.add_profile("net1");
    assert!(changed.profiles().contains(&"net1".to_owned()));
}
