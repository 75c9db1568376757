//! Passes network configurations through the whole plugin, except the store.

use std::net::IpAddr;

use agent::{Allocator, Answer, CheckAnswer, GcSummary, StoreAccess, Verb};
use cni_plugin::{Environment, Host, Invocation, LogDestination, PluginName, run};
use ipam_core::assign::{AssignedAddress, RequestedAddresses};
use ipam_core::{CheckResult, Standing};
use ipnet::IpNet;
use serde_json::Value;
use time::OffsetDateTime;

/// Runs the fuzz target `netconf` on the plugin's standard input. A first byte other than `{` chooses the CNI verb and
/// the name under which the plugin is called.
pub fn netconf(data: &[u8]) {
    let (choice, text) = match data {
        [choice, text @ ..] if *choice != b'{' => (*choice, text),
        text => (0, text),
    };
    let verb = ["ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION"][usize::from(choice & 7) % 6];
    let name = if choice & 8 == 0 { PluginName::Margay } else { PluginName::CalicoIpam };
    let environment = Environment::from_iter([
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_NETNS", "/nowhere/netns"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/nowhere"),
    ]);
    let host = Host {
        hostname: "node1".to_owned(),
        boot_id: Some("01234567-89ab".to_owned()),
        now: OffsetDateTime::UNIX_EPOCH,
        nodename_file: "/nowhere/nodename".into(),
        own_netns: "/nowhere/own".into(),
    };
    let invocation =
        Invocation { drivers: stores::drivers(), name, environment, host, logging: LogDestination::Untouched };
    let outcome = run(&invocation, &mut &text[..], &Pretend);
    let shown = || format!("{verb}: {}", String::from_utf8_lossy(text));
    match (outcome.exit, outcome.stdout.as_str()) {
        (0, "") => assert_ne!(verb, "ADD", "{}", shown()),
        (0, stdout) => {
            let result: Value = serde_json::from_str(stdout).unwrap();
            assert!(result.get("cniVersion").is_some(), "{}", shown());
        }
        (1, stdout) => {
            let error: Value = serde_json::from_str(stdout).unwrap();
            assert!(error["code"].as_u64().is_some_and(|code| code > 0), "{}", shown());
            let message = error["msg"].as_str().unwrap();
            assert!(
                !message.is_empty() && !message.contains("stopped at an error of its own"),
                "{}: {message}",
                shown()
            );
        }
        (exit, _) => panic!("exit {exit}: {}", shown()),
    }
}

/// An allocator that returns plausible answers without a store.
struct Pretend;

impl Allocator for Pretend {
    fn call(&self, _: &StoreAccess, verb: &Verb) -> agent::Result<Answer> {
        Ok(match verb {
            Verb::Add(add) => Answer::Assigned(assigned(&add.request.wanted)),
            Verb::Del(_) | Verb::Quarantine(_) => Answer::Released(Vec::new()),
            Verb::Check(check) => {
                let standings = check.addresses.iter().map(|ip| (*ip, Standing::Own)).collect();
                Answer::Checked(CheckAnswer::Compared(CheckResult { held: check.addresses.clone(), standings }))
            }
            Verb::Status(_) => Answer::Ready,
            Verb::Gc(_) => Answer::Collected(GcSummary::default()),
        })
    }
}

fn assigned(wanted: &RequestedAddresses) -> Vec<AssignedAddress> {
    let chosen = |count: usize, address: &str| (0..count).map(|_| address.parse().unwrap()).collect::<Vec<IpAddr>>();
    let mut addresses = wanted.these.clone();
    addresses.extend(chosen(wanted.any_v4, "10.0.0.9"));
    addresses.extend(chosen(wanted.any_v6, "fd00::9"));
    let one = |ip: IpAddr| {
        let (block, pool) = if ip.is_ipv4() { (26, 16) } else { (122, 64) };
        let network = |length| IpNet::new(ip, length).unwrap().trunc();
        AssignedAddress { ip, prefix_length: None, block: network(block), pool: network(pool), gateway: None }
    };
    addresses.into_iter().map(one).collect()
}
