//! Tests the request that each CNI verb sends to the allocator, and how the verb uses the allocator's answer.

use std::net::IpAddr;

use agent::{Allocator, Answer, CheckAnswer, CniError, Code, GcSummary, Result, StoreAccess, Verb};
use cni_plugin::PluginName;
use ipam_core::assign::{Bridge, Gateway, RepeatPolicy};
use ipam_core::{CheckResult, Standing};

use crate::common::{Scripted, assigned, call, environment, error_of};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn one_address() -> Scripted {
    let assigned = assigned(ip("10.0.0.5"), 26, 24, Some(ip("10.0.0.1")));
    Scripted { add: Some(Ok(vec![assigned])), del: Some(Ok(())), ..Scripted::default() }
}

fn bridge(more: &str) -> String {
    format!(r#"{{"cniVersion":"1.0.0","name":"net1","type":"bridge","datastore_type":"sled"{more}}}"#)
}

fn add(conf: &str, args: &str) -> (cni_plugin::ProcessOutcome, Scripted) {
    let allocator = one_address();
    let mut env = environment("ADD");
    env.insert("CNI_ARGS".into(), args.into());
    let outcome = call(PluginName::Margay, &env, conf.as_bytes(), &allocator);
    (outcome, allocator)
}

/// Runs an ADD and returns the requested addresses, and the numbers of IPv4 and IPv6 addresses that the allocator is to
/// choose.
fn asked(conf: &str, args: &str) -> (Vec<String>, usize, usize) {
    let (outcome, allocator) = add(conf, args);
    assert_eq!(outcome.exit, 0, "{outcome:?}");
    let requests = allocator.added.borrow();
    assert_eq!(requests.len(), 1);
    let wanted = &requests[0].request.wanted;
    (wanted.these.iter().map(ToString::to_string).collect(), wanted.any_v4, wanted.any_v6)
}

#[test]
fn add_on_bridge() {
    let (outcome, allocator) =
        add(&bridge(r#","isGateway":true,"ipam":{"routes":[{"dst":"0.0.0.0/0"}],"ipv4_pools":["lab"]}"#), "");
    assert_eq!(
        outcome.stdout,
        "{\n    \"cniVersion\": \"1.0.0\",\n    \"ips\": [\n        {\n            \"address\": \"10.0.0.5/24\",\n            \"gateway\": \"10.0.0.1\"\n        }\n    ],\n    \"routes\": [\n        {\n            \"dst\": \"0.0.0.0/0\"\n        }\n    ]\n}"
    );
    let requests = allocator.added.borrow();
    let request = &requests[0].request;
    let at = &allocator.at.borrow()[0];
    assert_eq!(at.location, stores::at("sled:///var/lib/margay/ipam.sled").unwrap());
    assert_eq!(at.lock_file.to_str(), Some("/var/run/calico/ipam.lock"));
    assert_eq!(request.attachment.handle(), "net1.c1");
    assert_eq!((request.attachment.node.as_str(), request.attachment.boot.as_deref()), ("host-1", Some("191b29e2")));
    assert_eq!(request.attributes["timestamp"], "2026-11-21 02:41:03 +0000 UTC");
    assert_eq!(request.v4_pools, ["lab"]);
    assert_eq!(request.max_blocks, 0);
    assert_eq!(request.bridge, Some(Bridge { v4: Gateway::First, v6: Gateway::First }));
    assert_eq!((request.define.len(), request.repeated), (0, RepeatPolicy::SameAnswer));
}

#[test]
fn add_asks_for_wanted_addresses() {
    let none: Vec<String> = Vec::new();
    assert_eq!(asked(&bridge(""), ""), (none.clone(), 1, 0));
    assert_eq!(asked(&bridge(r#","ipam":{"assign_ipv6":"true"}"#), ""), (none.clone(), 1, 1));
    assert_eq!(asked(&bridge(r#","ipam":{"assign_ipv4":"no","assign_ipv6":"True"}"#), ""), (none.clone(), 1, 0));
    assert_eq!(asked(&bridge(r#","ipam":{"subnet":"fd00::/64"}"#), ""), (none.clone(), 0, 1));
    let dual = r#","ipam":{"ranges":[[{"subnet":"10.0.0.0/24"}],[{"subnet":"fd00::/64"}]]}"#;
    assert_eq!(asked(&bridge(dual), ""), (none, 1, 1));
    // A requested address counts as the ADD's address of that family, so the allocator chooses only an address of the
    // other family.
    assert_eq!(asked(&bridge(dual), "IP=10.0.0.7/24"), (vec!["10.0.0.7".into()], 0, 1));
    assert_eq!(
        asked(&bridge(r#","args":{"cni":{"ips":["10.0.0.7"]}},"runtimeConfig":{"ips":["fd00::7/64"]}"#), "IP=10.0.0.7"),
        (vec!["10.0.0.7".into(), "fd00::7".into()], 0, 0)
    );
}

#[test]
fn add_wanted_addresses_replace_all_on_calico_networks() {
    let conf = r#"{"cniVersion":"1.0.0","name":"net1","type":"calico","datastore_type":"sled","ipam":{"assign_ipv6":"true"},"windows_use_single_network":true}"#;
    assert_eq!(asked(conf, "IP=10.0.0.7"), (vec!["10.0.0.7".into()], 0, 0));
    assert_eq!(asked(conf, ""), (vec![], 1, 1));
    let (outcome, allocator) = add(conf, "");
    assert!(outcome.stdout.contains("\"10.0.0.5/26\"") && !outcome.stdout.contains("gateway"), "{}", outcome.stdout);
    let request = &allocator.added.borrow()[0].request;
    assert_eq!((request.bridge, request.repeated, request.max_blocks), (None, RepeatPolicy::Refused, 1));
    let (outcome, _) = add(conf, "IP=10.0.0.7/24");
    assert!(error_of(&outcome).1.ends_with("invalid IP address: 10.0.0.7/24"));
}

#[test]
fn add_takes_kubernetes_keys_only_with_ignore_unknown() {
    let conf = r#"{"cniVersion":"1.0.0","name":"net1","type":"calico","datastore_type":"sled"}"#;
    let keys = "K8S_POD_NAME=a;K8S_POD_NAMESPACE=b";
    let (outcome, allocator) = add(conf, keys);
    assert_eq!(error_of(&outcome).1, "ARGS: unknown args [\"K8S_POD_NAME=a\" \"K8S_POD_NAMESPACE=b\"]");
    assert!(allocator.added.borrow().is_empty());
    assert_eq!(add(conf, &format!("{keys};IgnoreUnknown=1")).0.exit, 0);
    assert_eq!(add(&bridge(""), keys).0.exit, 0);
    let mut env = environment("DEL");
    env.insert("CNI_ARGS".into(), keys.into());
    assert_eq!(call(PluginName::Margay, &env, conf.as_bytes(), &allocator).exit, 0);
}

#[test]
fn name_calico_ipam_makes_every_network_calico() {
    let allocator = one_address();
    let conf = bridge(r#","ipam":{"routes":[{"dst":"0.0.0.0/0"}]}"#);
    let outcome = call(PluginName::CalicoIpam, &environment("ADD"), conf.as_bytes(), &allocator);
    assert!(outcome.stdout.contains("\"dst\": \"10.0.0.5/26\""), "{}", outcome.stdout);
    let from = |argument: &str| PluginName::from_argument(Some(argument.as_ref()));
    assert_eq!(from("/opt/cni/bin/calico-ipam"), PluginName::CalicoIpam);
    assert_eq!(from("calico-ipam"), PluginName::CalicoIpam);
    assert_eq!(from("/opt/calico-ipam/margay-ipam"), PluginName::Margay);
    assert_eq!(PluginName::from_argument(None), PluginName::Margay);
}

#[test]
fn name_calico_ipam_takes_no_bridged_settings() {
    for ipam in [r#"{"mask":"pool"}"#, r#"{"gateway":"first"}"#, r#"{"routes":[]}"#] {
        let conf = format!(r#"{{"name":"net1","type":"calico","datastore_type":"sled","ipam":{ipam}}}"#);
        let (outcome, allocator) = add(&conf, "");
        assert_eq!(error_of(&outcome).0, 7, "{ipam}");
        assert!(allocator.added.borrow().is_empty());
        // DEL releases a held address even if ADD would reject the configuration.
        assert_eq!(call(PluginName::Margay, &environment("DEL"), conf.as_bytes(), &allocator).exit, 0);
    }
}

#[test]
fn errors_come_before_any_work() {
    let cases = [
        (bridge(r#","ipam":{"mask":"x"}"#), 7, "ipam.mask must be \"pool\" or \"block\""),
        (bridge("").replace("sled", "foo"), 7, "unknown datastore type: foo"),
        (
            bridge("").replace("1.0.0", "0.2.0").replace("}", r#","ipam":{"assign_ipv4":"false"}}"#),
            999,
            "cannot convert: no valid IP addresses",
        ),
        (
            bridge(r#","runtimeConfig":{"ips":["10.0.0.1","10.0.0.2"]}"#).replace("1.0.0", "0.2.0"),
            7,
            "CNI 0.2.0 has results of one address per family, several are wanted",
        ),
        (
            bridge(r#","ipam":{"subnet":"10.0.0.0/24"}"#)
                .replace(r#""sled""#, r#""etcdv3","etcd_endpoints":"http://a:1""#),
            7,
            "ipam defines a pool of its own, but the store is a cluster's",
        ),
    ];
    for (conf, code, message) in cases {
        let (outcome, allocator) = add(&conf, "");
        let (found, text, _) = error_of(&outcome);
        assert_eq!((found, text.as_str()), (code, message), "{conf}");
        assert!(allocator.added.borrow().is_empty());
    }
}

#[test]
fn own_netns_is_refused_before_add_and_after_del() {
    let message = "plugin's netns and netns from CNI_NETNS should not be the same";
    let expected = (8, message.to_owned(), String::new());
    let with_netns = |verb: &str| {
        let mut env = environment(verb);
        env.insert("CNI_NETNS".into(), "/proc/self/ns/net".into());
        env
    };
    let conf = bridge("");
    let allocator = one_address();
    assert_eq!(error_of(&call(PluginName::Margay, &with_netns("ADD"), conf.as_bytes(), &allocator)), expected);
    assert!(allocator.added.borrow().is_empty());
    assert_eq!(error_of(&call(PluginName::Margay, &with_netns("DEL"), conf.as_bytes(), &allocator)), expected);
    assert_eq!(allocator.deleted.borrow().len(), 1);
    let mut accepted = with_netns("ADD");
    accepted.insert("CNI_NETNS_OVERRIDE".into(), "True".into());
    assert_eq!(call(PluginName::Margay, &accepted, conf.as_bytes(), &allocator).exit, 0);
}

#[test]
fn del_releases_attachment_without_settings() {
    let allocator = one_address();
    let mut env = environment("DEL");
    env.remove("CNI_NETNS");
    env.insert("CNI_ARGS".into(), "K8S_POD_NAME=a;K8S_POD_NAMESPACE=b".into());
    let outcome = call(PluginName::Margay, &env, bridge("").as_bytes(), &allocator);
    assert_eq!((outcome.exit, outcome.stdout.as_str(), outcome.stderr.as_str()), (0, "", ""));
    let requests = allocator.deleted.borrow();
    assert_eq!((requests[0].attachment.handle().as_str(), requests[0].old_handle.as_str()), ("net1.c1", "b.a"));
    // DEL ignores the settings that concern only ADD, even if their values are invalid.
    let allocator = one_address();
    let conf = bridge(r#","ipam":{"mask":5,"routes":5,"ranges":5,"gateway":5},"runtimeConfig":{"ips":5}"#);
    assert_eq!(call(PluginName::Margay, &env, conf.as_bytes(), &allocator).exit, 0);

    let failing = Scripted { del: Some(Err(CniError::new(Code::TryAgain, "busy"))), ..Scripted::default() };
    assert_eq!(error_of(&call(PluginName::Margay, &env, conf.as_bytes(), &failing)).0, 11);
}

/// Runs CHECK with a fake allocator that reports the addresses `held` and the address states `standings`; returns the
/// outcome.
fn check(more: &str, held: &[&str], standings: &[(&str, Standing)]) -> cni_plugin::ProcessOutcome {
    let held = held.iter().map(|address| ip(address)).collect();
    let standings = standings.iter().map(|(address, standing)| (ip(address), standing.clone())).collect();
    answered(more, Ok(CheckAnswer::Compared(CheckResult { held, standings })))
}

fn answered(more: &str, answer: Result<CheckAnswer>) -> cni_plugin::ProcessOutcome {
    let allocator = Scripted { check: Some(answer), ..Scripted::default() };
    call(PluginName::Margay, &environment("CHECK"), bridge(more).as_bytes(), &allocator)
}

#[test]
fn check_fails_when_address_is_free_or_of_another() {
    let (a, b) = ("10.0.0.5", "fd00::5");
    let good = check("", &[a], &[(a, Standing::Own), (b, Standing::Own)]);
    assert_eq!((good.exit, good.stdout.as_str()), (0, ""));
    let (code, message, details) = error_of(&check("", &[a], &[(a, Standing::Own), (b, Standing::Free)]));
    assert_eq!(
        (code, message.as_str()),
        (999, "fd00::5 is not recorded for container c1 interface eth0 in network net1")
    );
    assert!(details.starts_with("fd00::5 is free; the container has to be made anew"), "{details}");
    let (_, message, details) = error_of(&check("", &[], &[(a, Standing::Another("net1.c2".into()))]));
    assert!(message.starts_with("10.0.0.5 is not recorded") && details.contains("held by net1.c2"), "{details}");
}

#[test]
fn check_skips_what_store_cannot_know() {
    let a = "10.0.0.5";
    for standing in [Standing::Unmarked, Standing::Unknown] {
        assert_eq!(check("", &[], &[(a, standing.clone())]).exit, 0, "{standing:?}");
    }
    assert_eq!(answered("", Ok(CheckAnswer::Unknown("busy".into()))).exit, 0);
    assert_eq!(error_of(&answered("", Err(CniError::new(Code::TryAgain, "no connection")))).0, 11);
}

#[test]
fn check_without_prev_result_looks_for_any_address() {
    assert_eq!(check("", &["10.0.0.5"], &[]).exit, 0);
    assert_eq!(check(r#","ipam":{"assign_ipv4":"false"}"#, &[], &[]).exit, 0);
    let (_, message, _) = error_of(&check("", &[], &[]));
    assert_eq!(message, "no address is recorded for container c1 interface eth0 in network net1");
}

#[test]
fn check_asks_for_addresses_of_prev_result() {
    let allocator = Scripted { check: Some(Ok(CheckAnswer::Unknown("busy".into()))), ..Scripted::default() };
    let earlier = r#","prevResult":{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.5/24","interface":2},{"address":"fd00::5/64"}]}"#;
    let mut env = environment("CHECK");
    env.insert("CNI_ARGS".into(), "K8S_POD_NAME=a;K8S_POD_NAMESPACE=b".into());
    assert_eq!(call(PluginName::Margay, &env, bridge(earlier).as_bytes(), &allocator).exit, 0);
    let requests = allocator.checked.borrow();
    assert_eq!(requests[0].addresses, [ip("10.0.0.5"), ip("fd00::5")]);
    assert_eq!((requests[0].attachment.handle().as_str(), requests[0].old_handle.as_str()), ("net1.c1", "b.a"));
    for wrong in ["5", r#"[{"address":"x"}]"#, "[{}]"] {
        assert_eq!(error_of(&check(&format!(r#","prevResult":{{"ips":{wrong}}}"#), &[], &[])).0, 6);
    }
    for wrong in ["\"\"", "[]", "5", "true"] {
        assert_eq!(error_of(&check(&format!(r#","prevResult":{wrong}"#), &[], &[])).0, 6, "{wrong}");
    }
    let old = bridge("").replace("1.0.0", "0.3.1");
    let outcome = call(PluginName::Margay, &environment("CHECK"), old.as_bytes(), &Scripted::default());
    assert_eq!(error_of(&outcome), (1, "config version does not allow CHECK".into(), String::new()));
}

#[test]
fn gc_and_status_need_version_that_has_them() {
    let with = |verb: &str, version: &str, more: &str| {
        let conf = bridge(more).replace("1.0.0", version);
        call(PluginName::Margay, &environment(verb), conf.as_bytes(), &Scripted::default())
    };
    assert_eq!(error_of(&with("GC", "1.0.0", "")).1, "config version does not allow GC");
    assert_eq!(error_of(&with("STATUS", "1.0.0", "")).1, "config version does not allow STATUS");
    assert_eq!(error_of(&with("GC", "1.2.0", "")).1, "plugin version does not allow GC");
    for list in ["", r#","cni.dev/valid-attachments":{}"#, r#","cni.dev/valid-attachments":[{"containerID":"c1"}]"#] {
        let (code, message, details) = error_of(&with("GC", "1.1.0", list));
        assert_eq!(code, 7, "{list}");
        assert!(message.ends_with("nothing was released") && !details.is_empty(), "{message}");
    }
    let allocator = Scripted { gc: Some(Ok(GcSummary::default())), ..Scripted::default() };
    let list = r#","cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]"#;
    let conf = bridge(list).replace("1.0.0", "1.1.0");
    let mut env = environment("GC");
    env.retain(|name, _| matches!(name.as_str(), "CNI_COMMAND" | "CNI_PATH"));
    let outcome = call(PluginName::Margay, &env, conf.as_bytes(), &allocator);
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (0, ""), "{outcome:?}");
    let requests = allocator.collected.borrow();
    assert_eq!((requests[0].network.as_str(), requests[0].node.as_str()), ("net1", "host-1"));
    assert_eq!(requests[0].valid, [("c1".to_owned(), "eth0".to_owned())].into());
}

#[test]
fn status_asks_for_what_add_would() {
    let with = |more: &str, answer: Result<()>| {
        let allocator = Scripted { status: Some(answer), ..Scripted::default() };
        let mut env = environment("STATUS");
        env.retain(|name, _| matches!(name.as_str(), "CNI_COMMAND" | "CNI_PATH"));
        let conf = bridge(more).replace("1.0.0", "1.1.0");
        let outcome = call(PluginName::Margay, &env, conf.as_bytes(), &allocator);
        (outcome, allocator.asked.take())
    };
    let (ready, asked) = with(r#","ipam":{"assign_ipv6":"true","ipv4_pools":["lab"]}"#, Ok(()));
    assert_eq!((ready.exit, ready.stdout.as_str()), (0, ""));
    let request = &asked[0].request;
    assert_eq!((request.wanted.any_v4, request.wanted.any_v6, request.wanted.these.len()), (1, 1, 0));
    assert_eq!(request.v4_pools, ["lab"]);
    assert_eq!((request.attachment.network.as_str(), request.attachment.node.as_str()), ("net1", "host-1"));
    // Every error of STATUS has code 50.
    let refused = CniError::internal("no room").with_details("make some");
    assert_eq!(error_of(&with("", Err(refused)).0), (50, "no room".into(), "make some".into()));
    for wrong in [r#","ipam":{"mask":1}"#, r#","ipam":{"mask":"x"}"#, r#","datastore_type":"foo""#] {
        let (outcome, asked) = with(wrong, Ok(()));
        assert_eq!((error_of(&outcome).0, asked.len()), (50, 0), "{wrong}");
    }
    let (ready, asked) = with(r#","ipam":{"assign_ipv4":"false"}"#, Ok(()));
    assert_eq!((ready.exit, asked.len()), (0, 0), "no store is needed");
}

#[test]
fn panic_is_error() {
    struct Broken;
    impl Allocator for Broken {
        fn call(&self, _: &StoreAccess, verb: &Verb) -> Result<Answer> {
            match verb {
                Verb::Add(_) => panic!("index {} <out> of bounds", 5),
                _ => std::panic::panic_any(5),
            }
        }
    }
    cni_plugin::install_hook();
    let (code, message, details) =
        error_of(&call(PluginName::Margay, &environment("ADD"), bridge("").as_bytes(), &Broken));
    assert_eq!(code, 999);
    assert!(
        message.starts_with("margay-ipam stopped at an error of its own: index 5 <out> of bounds at "),
        "{message}"
    );
    assert!(details.contains("DEL is safe to repeat"));
    let outcome = call(PluginName::Margay, &environment("CHECK"), bridge("").as_bytes(), &Broken);
    assert!(error_of(&outcome).1.contains("no text"));
}
