//! Compares the parser of `CNI_ARGS` with a naive parser.

use std::net::IpAddr;

use cni_plugin::fuzzing::{ParsedArgs, parse_args};

/// Runs the fuzz target `cni_args` on an input.
pub fn cni_args(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    assert_eq!(parse_args(&text).ok(), expected(&text), "{text:?}");
    if let Err(error) = parse_args(&text) {
        assert!(error.starts_with("ARGS: "), "{error}");
    }
}

/// Returns the values that the parser under test must return; `None` if it must return an error.
fn expected(text: &str) -> Option<ParsedArgs> {
    let mut said = ParsedArgs::default();
    if text.is_empty() {
        return Some(said);
    }
    let (mut ignore, mut unknown) = (false, false);
    for pair in text.split(';') {
        let halves: Vec<&str> = pair.split('=').collect();
        let [key, value] = halves[..] else { return None };
        match key {
            "IgnoreUnknown" => {
                ignore = match value.to_lowercase().as_str() {
                    "1" | "true" => true,
                    "0" | "false" => false,
                    _ => return None,
                }
            }
            "IP" if value.is_empty() => said.ip = None,
            "IP" => said.ip = Some(value.parse::<IpAddr>().ok()?.to_canonical()),
            "K8S_POD_NAME" => said.pod = value.to_owned(),
            "K8S_POD_NAMESPACE" => said.pod_namespace = value.to_owned(),
            "K8S_POD_INFRA_CONTAINER_ID" => {}
            _ => unknown = true,
        }
    }
    (!unknown || ignore).then_some(said)
}
