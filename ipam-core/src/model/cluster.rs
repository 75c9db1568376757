//! Defines Calico's document about the cluster. A cluster has one such document, named `default`.

use kv::{Key, Value};
use serde_json::json;
use time::OffsetDateTime;

use super::codec::{Document, JsonObject, Malformed, from_json, to_json};
use crate::timestamps::rfc3339;

/// The value of `clusterType` that `margay cluster init` writes. Calico's node agent appends its own types to
/// `clusterType` when it starts, and sets `calicoVersion`.
const MARGAY_CLUSTER: &str = "margay";

/// The stored ClusterInformation document.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterInformation {
    document: JsonObject,
}

impl ClusterInformation {
    /// Creates the document of a cluster in which only Margay runs. The document is in the form in which Calico writes
    /// it, but without `calicoVersion`. `guid` must have 32 hexadecimal digits, and `uid` must be a random UUID.
    pub fn of_margay(guid: &str, uid: &str, now: OffsetDateTime) -> Self {
        let document = json!({
            "kind": "ClusterInformation",
            "apiVersion": "projectcalico.org/v3",
            "metadata": { "name": "default", "uid": uid, "creationTimestamp": rfc3339(now) },
            "spec": { "clusterGUID": guid, "clusterType": MARGAY_CLUSTER, "datastoreReady": true },
        });
        match document {
            serde_json::Value::Object(document) => Self { document },
            _ => Self::empty(),
        }
    }

    /// Decodes a document. A document that is not a JSON object counts as empty, so its datastore is not ready.
    pub fn decode_or_empty(value: &[u8]) -> Self {
        serde_json::from_slice(value).map_or_else(|_| Self::empty(), |document| Self { document })
    }

    fn empty() -> Self {
        Self { document: JsonObject::new() }
    }

    fn text(&self, field: &str) -> &str {
        self.spec(field).and_then(serde_json::Value::as_str).unwrap_or("")
    }

    fn spec(&self, field: &str) -> Option<&serde_json::Value> {
        self.document.get("spec")?.get(field)
    }

    /// Returns the cluster's random id; empty if the document has none.
    pub fn guid(&self) -> &str {
        self.text("clusterGUID")
    }

    /// Returns the kinds of programs that run the cluster, separated by commas; empty if the document has none.
    pub fn cluster_type(&self) -> &str {
        self.text("clusterType")
    }

    /// Returns the version of Calico's node agent that started last in the cluster; empty if none has started.
    pub fn calico_version(&self) -> &str {
        self.text("calicoVersion")
    }

    /// True if CNI plugins may use the datastore. False while Calico is being upgraded or migrated, and if the flag
    /// `datastoreReady` is missing.
    pub fn is_ready(&self) -> bool {
        self.spec("datastoreReady").and_then(serde_json::Value::as_bool).unwrap_or(false)
    }

    /// True if the cluster was set up by Margay, whether or not Calico has been installed since.
    pub fn is_set_up_by_margay(&self) -> bool {
        self.cluster_type().split(',').any(|one| one == MARGAY_CLUSTER)
    }

    /// True if the cluster was set up by Margay, and Calico's node agent has never started in it.
    pub fn is_margay_alone(&self) -> bool {
        self.cluster_type() == MARGAY_CLUSTER && self.calico_version().is_empty()
    }
}

impl Document for ClusterInformation {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        Ok(Self { document: from_json(key, value)? })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(&self.document)
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn cluster_document_has_calicos_form() {
        let cluster = ClusterInformation::of_margay("0a", "u", datetime!(2026-01-01 0:00 UTC));
        let text = String::from_utf8(cluster.encode().unwrap().as_bytes().to_vec()).unwrap();
        assert_eq!(
            text,
            r#"{"apiVersion":"projectcalico.org/v3","kind":"ClusterInformation","metadata":{"creationTimestamp":"2026-01-01T00:00:00Z","name":"default","uid":"u"},"spec":{"clusterGUID":"0a","clusterType":"margay","datastoreReady":true}}"#
        );
        assert_eq!((cluster.guid(), cluster.is_ready(), cluster.is_margay_alone()), ("0a", true, true));
    }

    #[test]
    fn cluster_is_margays_until_calico_node_starts() {
        let read = |spec: &str| ClusterInformation::decode_or_empty(format!("{{\"spec\":{spec}}}").as_bytes());
        for spec in [
            r#"{"clusterType":"margay,k8s,bgp"}"#,
            r#"{"clusterType":"margay","calicoVersion":"v3.30.0"}"#,
            r#"{"clusterType":"k8s"}"#,
            r#"{"datastoreReady":true}"#,
            r#"{"clusterType":7}"#,
            "[]",
        ] {
            assert!(!read(spec).is_margay_alone(), "{spec}");
            assert_eq!(read(spec).is_set_up_by_margay(), spec.contains("margay"), "{spec}");
        }
        assert!(read(r#"{"clusterType":"margay","calicoVersion":""}"#).is_margay_alone());
        assert!(!read(r#"{"clusterType":"margay"}"#).is_ready(), "the flag is missing");
        assert!(!ClusterInformation::decode_or_empty(b"damaged").is_ready());
    }
}
