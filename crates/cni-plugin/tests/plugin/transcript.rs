//! Compares the outcomes of plugin calls byte by byte with the recorded outcomes of Calico's plugin.
//!
//! [`replay`] runs the recorded calls with any function that runs the plugin. `WITHOUT_A_STORE` names the recorded
//! calls that need no allocator.

use std::collections::BTreeMap;

use cni_plugin::ProcessOutcome;
use ipam_core::assign::AssignedAddress;
use serde::Deserialize;
use serde_json::Value;

use crate::common::{Scripted, assigned, call, call_binary};

/// Recorded calls for which Margay deliberately differs from Calico, each with the reason.
pub(crate) const DIFFERENT_ON_PURPOSE: [(&str, &str); 2] = [
    ("cniVersion 1.1.0 (newer than this plugin knows)", "this plugin knows CNI 1.1.0 and goes on"),
    ("VERSION", "the list of versions has 1.1.0 too"),
];

/// Recorded calls for which only the JSON parser's message in the error differs from Calico's.
pub(crate) const OTHER_WORDS: [&str; 1] = ["stdin is not JSON"];

/// The recording of Calico's plugin: the store's documents at the start, and the plugin calls.
#[derive(Deserialize)]
pub(crate) struct Transcript {
    pub(crate) start: Vec<Stored>,
    pub(crate) cases: Vec<Case>,
}

#[derive(Deserialize)]
pub(crate) struct Stored {
    pub(crate) key: String,
    pub(crate) value: String,
}

#[derive(Clone, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) stdin: String,
    pub(crate) exit: u8,
    pub(crate) stdout: String,
}

pub(crate) fn record() -> Transcript {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/calico/transcript.json");
    let transcript: Transcript = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(transcript.cases.len(), 53);
    transcript
}

fn transcript() -> Vec<Case> {
    record().cases
}

/// Recorded calls that fail or end before the plugin reads a store.
const WITHOUT_A_STORE: [&str; 14] = [
    "ADD, both families off",
    "CNI_ARGS pair without =",
    "CNI_ARGS unknown key",
    "CNI_ARGS bad address",
    "container id that ends with -",
    "container id with a blank",
    "stdin is not JSON",
    "no network name",
    "bad network name",
    "assign_ipv4 as a boolean",
    "unknown datastore type",
    "missing variables",
    "unknown command",
    "VERSION",
];

/// Runs the recorded calls with the given names, in the order of the recording, and compares the outcomes.
fn replay(names: &[&str], program: impl Fn(&Case) -> ProcessOutcome) {
    let cases = transcript();
    let chosen: Vec<_> = cases.iter().filter(|case| names.contains(&case.name.as_str())).collect();
    assert_eq!(chosen.len(), names.len(), "a name is not in the transcript");
    for case in chosen {
        let outcome = program(case);
        if DIFFERENT_ON_PURPOSE.iter().any(|(name, _)| *name == case.name) {
            continue;
        }
        assert_eq!(outcome.exit, case.exit, "{}: {outcome:?}", case.name);
        if OTHER_WORDS.contains(&case.name.as_str()) {
            let start = |text: &str| text.split_inclusive("network config: ").next().map(str::to_owned);
            assert_eq!(start(&outcome.stdout), start(&case.stdout), "{}", case.name);
        } else {
            assert_eq!(outcome.stdout, case.stdout, "{}", case.name);
        }
    }
}

#[test]
fn transcript_matches_to_byte_without_store() {
    replay(&WITHOUT_A_STORE, |case| call_binary(&case.env, case.stdin.as_bytes()));
    replay(&WITHOUT_A_STORE, |case| {
        call(cni_plugin::PluginName::CalicoIpam, &case.env, case.stdin.as_bytes(), &Scripted::default())
    });
}

/// Tests that the plugin prints the recorded results and errors if it gets the answers of Calico's allocator.
#[test]
fn transcript_matches_calico_for_allocator_answers() {
    let others: Vec<_> = transcript().into_iter().map(|case| case.name).collect();
    let others: Vec<_> = others
        .iter()
        .map(String::as_str)
        .filter(|name| !WITHOUT_A_STORE.contains(name) && DIFFERENT_ON_PURPOSE.iter().all(|(other, _)| other != name))
        .collect();
    assert_eq!(others.len(), 53 - WITHOUT_A_STORE.len() - 1);
    replay(&others, |case| {
        let allocator = answering(case);
        let outcome = call(cni_plugin::PluginName::Margay, &case.env, case.stdin.as_bytes(), &allocator);
        let calls = allocator.added.borrow().len() + allocator.deleted.borrow().len();
        assert_eq!(calls, 1, "{}", case.name);
        outcome
    });
}

/// Returns an allocator that replays the answers of Calico's allocator in a recorded call.
fn answering(case: &Case) -> Scripted {
    let json: Value = serde_json::from_str(&case.stdout).unwrap_or(Value::Null);
    if case.exit != 0 {
        assert_eq!(json["code"], 999, "{}", case.name);
        let error = agent::CniError::internal(json["msg"].as_str().unwrap());
        return Scripted { add: Some(Err(error)), ..Scripted::default() };
    }
    let new = json["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    let old = ["ip4", "ip6"].iter().map(|family| &json[family]["ip"]);
    let assigned = new.chain(old).filter_map(Value::as_str).map(of_record).collect();
    Scripted { add: Some(Ok(assigned)), del: Some(Ok(())), ..Scripted::default() }
}

fn of_record(address: &str) -> AssignedAddress {
    let net: ipnet::IpNet = address.parse().unwrap();
    // Results print a requested address with prefix length 32 or 128, so the recording does not show the prefix length
    // of the address's block.
    let block = if net.prefix_len() == net.max_prefix_len() { 26 } else { net.prefix_len() };
    assigned(net.addr(), block, 24, Some(net.addr()))
}

#[test]
fn transcript_version_reply_has_one_version_more() {
    let case = transcript().into_iter().find(|case| case.name == "VERSION").unwrap();
    let outcome = call_binary(&case.env, case.stdin.as_bytes());
    assert_eq!((outcome.exit, outcome.stdout), (0, case.stdout.replace("\"1.0.0\"]", "\"1.0.0\",\"1.1.0\"]")));
}
