//! Profile: what the containers of a network accept. Only networks without a policy of their own have one.

use kv::Value;
use serde_json::json;
use time::OffsetDateTime;

use super::codec::{Malformed, to_json};
use super::endpoint::Orchestrator;
use crate::timestamps::rfc3339;

/// The document of a new profile that has a network's name. Containers accept each other's traffic, pods accept all.
/// `uid` is a random UUID; the time is cut to the second.
///
/// # Errors
/// [`Malformed`] if it cannot be written, which does not happen.
pub fn new_profile(
    network: &str,
    orchestrator: Orchestrator,
    uid: &str,
    now: OffsetDateTime,
) -> Result<Value, Malformed> {
    let ingress = match orchestrator {
        Orchestrator::Cni => json!([{ "action": "Allow", "source": { "selector": format!("has({network})") } }]),
        Orchestrator::K8s => json!([{ "action": "Allow" }]),
    };
    to_json(&json!({
        "kind": "Profile",
        "apiVersion": "projectcalico.org/v3",
        "metadata": { "name": network, "uid": uid, "creationTimestamp": rfc3339(now) },
        "spec": {
            "ingress": ingress,
            "egress": [{ "action": "Allow" }],
            "labelsToApply": { network: "" },
        },
    }))
}
