//! Defines the common form of pools, reservations and nodes (kind, metadata, spec), and the documents of nodes and of
//! address reservations. The allocator reads only the labels in a node's document.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Key, Value};
use serde_json::{Map, Value as Json, json};
use time::OffsetDateTime;

use super::codec::{Document, JsonObject, Malformed, from_json, to_json};
use super::keys::{self, ResourceKind};
use super::spec::{SpecField, spec_fields};
use crate::DocumentError;
use crate::timestamps::rfc3339;

/// A map from the names of labels or annotations to their values.
pub type Labels = BTreeMap<String, String>;

/// A decoded Calico resource with all its fields. Unknown fields of the resource are written back unchanged.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    name: String,
    document: JsonObject,
}

impl Resource {
    /// Creates a resource with an empty spec. `uid` must be a random UUID. The creation time is `now`, truncated to
    /// seconds.
    pub fn new(kind: ResourceKind, name: &str, uid: &str, now: OffsetDateTime) -> Self {
        let document = json!({
            "kind": kind.kind(),
            "apiVersion": "projectcalico.org/v3",
            "metadata": { "name": name, "uid": uid, "creationTimestamp": rfc3339(now) },
            "spec": {},
        });
        let serde_json::Value::Object(document) = document else { return Self::empty(name) };
        Self { name: name.to_owned(), document }
    }

    pub(super) fn empty(name: &str) -> Self {
        Self { name: name.to_owned(), document: JsonObject::new() }
    }

    /// Decodes a resource. The resource's name is taken from the key, since some programs omit the name from the
    /// metadata.
    ///
    /// # Errors
    /// [`Malformed`] if the key does not belong to a resource of the given kind, or if the value is not a JSON object.
    pub(super) fn decode(kind: ResourceKind, key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let name = keys::parse_resource(kind, key)
            .ok_or_else(|| Malformed::new(key, format_args!("not the key of a resource of kind {}", kind.kind())))?;
        Self::read(name, key, value)
    }

    pub(super) fn read(name: &str, key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        Ok(Self { name: name.to_owned(), document: from_json(key, value)? })
    }

    pub(super) fn encode(&self) -> Result<Value, Malformed> {
        to_json(&self.document)
    }

    /// Copies the resource as a new resource with another name, unique id and creation time. The new resource lacks
    /// fields that describe only the original, for example its status.
    pub(super) fn reborn(&self, name: &str, uid: &str, now: OffsetDateTime) -> Self {
        let mut new = self.renamed(name);
        new.document.remove("status");
        let metadata = new.part("metadata");
        metadata.remove("generation");
        metadata.insert("uid".to_owned(), uid.into());
        metadata.insert("creationTimestamp".to_owned(), rfc3339(now).into());
        new
    }

    pub(super) fn renamed(&self, name: &str) -> Self {
        let mut new = Self { name: name.to_owned(), document: self.document.clone() };
        new.part("metadata").insert("name".to_owned(), name.into());
        new
    }

    pub(super) fn document(&self) -> &JsonObject {
        &self.document
    }

    /// Returns the name of the resource.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the resource's unique id; empty if the resource has none.
    pub fn uid(&self) -> &str {
        self.metadata("uid").and_then(serde_json::Value::as_str).unwrap_or("")
    }

    /// Returns the resource's stored creation time; empty if the resource has none.
    pub fn creation_timestamp(&self) -> &str {
        self.metadata("creationTimestamp").and_then(serde_json::Value::as_str).unwrap_or("")
    }

    /// True if deletion of the resource has been requested.
    pub fn is_being_deleted(&self) -> bool {
        self.metadata("deletionTimestamp").is_some_and(|stamp| !stamp.is_null())
    }

    /// Returns the labels of the resource. Labels whose values are not strings are skipped.
    pub fn labels(&self) -> Labels {
        text_map(self.metadata("labels"))
    }

    /// Returns the value of an annotation of the resource.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata("annotations")?.get(name)?.as_str()
    }

    /// Sets the value of an annotation of the resource.
    pub fn set_annotation(&mut self, name: &str, value: &str) {
        object(self.part("metadata").entry("annotations")).insert(name.to_owned(), value.into());
    }

    /// Removes an annotation. Removing the last annotation also removes the field `annotations`.
    pub fn remove_annotation(&mut self, name: &str) {
        let metadata = self.part("metadata");
        if let Some(annotations) = metadata.get_mut("annotations").and_then(serde_json::Value::as_object_mut) {
            annotations.remove(name);
            if annotations.is_empty() {
                metadata.remove("annotations");
            }
        }
    }

    /// Replaces all labels of the resource.
    pub fn set_labels(&mut self, labels: &Labels) {
        let labels = labels.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect();
        self.part("metadata").insert("labels".to_owned(), serde_json::Value::Object(labels));
    }

    pub(super) fn metadata(&self, field: &str) -> Option<&serde_json::Value> {
        self.document.get("metadata")?.get(field)
    }

    /// Returns the whole spec of the resource, or `None` if the resource has no spec.
    pub(super) fn whole_spec(&self) -> Option<&JsonObject> {
        self.document.get("spec")?.as_object()
    }

    /// Returns the value of one field of the resource's spec. A field that is `null` counts as absent.
    pub(super) fn spec(&self, field: SpecField) -> Option<&serde_json::Value> {
        field.get(self.whole_spec()?)
    }

    /// Returns the string in a field of the spec; empty if the field is absent.
    pub(super) fn text(&self, field: SpecField) -> &str {
        self.spec(field).and_then(serde_json::Value::as_str).unwrap_or("")
    }

    /// Returns the list of strings in a field of the spec. List entries that are not strings are skipped.
    pub(super) fn texts(&self, field: SpecField) -> impl Iterator<Item = &str> {
        let entries = self.spec(field).and_then(serde_json::Value::as_array).into_iter().flatten();
        entries.filter_map(serde_json::Value::as_str)
    }

    /// True if a field of the spec is `true`.
    pub(super) fn switch(&self, field: SpecField) -> bool {
        self.spec(field).and_then(serde_json::Value::as_bool).unwrap_or(false)
    }

    /// Sets a field of the spec. If `value` is `None`, removes the field, as with Go's `omitempty`.
    pub(super) fn set_spec(&mut self, field: SpecField, value: Option<serde_json::Value>) {
        self.set("spec", field.name, value);
    }

    /// Sets a field in a part of the document, for example the metadata. If `value` is `None`, removes the field.
    pub(super) fn set(&mut self, part: &str, field: &str, value: Option<serde_json::Value>) {
        match value {
            Some(value) => self.part(part).insert(field.to_owned(), value),
            None => self.part(part).remove(field),
        };
    }

    /// Returns a top-level object of the document, for example the metadata. Creates an empty object if the document
    /// has no object of this name.
    pub(super) fn part(&mut self, part: &str) -> &mut JsonObject {
        object(self.document.entry(part))
    }

    pub(super) fn status(&self, field: &str) -> Option<&serde_json::Value> {
        self.document.get("status")?.get(field)
    }

    pub(super) fn set_part(&mut self, part: &str, value: serde_json::Value) {
        self.document.insert(part.to_owned(), value);
    }
}

/// Returns the JSON object that is the value of a map entry. A value that is not an object is replaced by an empty
/// object.
pub(super) fn object(entry: serde_json::map::Entry<'_>) -> &mut JsonObject {
    let value = entry.or_insert(serde_json::Value::Null);
    loop {
        match value {
            serde_json::Value::Object(object) => return object,
            _ => *value = serde_json::Value::Object(JsonObject::new()),
        }
    }
}

/// Parses a JSON object as a map of strings. Fields whose values are not strings are skipped.
fn text_map(value: Option<&serde_json::Value>) -> Labels {
    let entries = value.and_then(serde_json::Value::as_object).into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

/// Checks that the name of a resource is a DNS subdomain, as in Calico.
///
/// # Errors
/// Returns the rule that the name violates.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let good_part = |part: &str| {
        part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    if name.is_empty() {
        Err("a name is needed")
    } else if name.len() > 253 {
        Err("a name has at most 253 characters")
    } else if name.split('.').all(good_part) {
        Ok(())
    } else {
        Err("a name has only a-z, 0-9, '-' and '.', and begins and ends each part with a letter or a digit")
    }
}

/// The facts that a node's agent records in the node's document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// The addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// The labels of the node, to which pools' node selectors refer.
    pub labels: Labels,
    /// The name of the node in Kubernetes; `None` for a node without Kubernetes.
    pub kubernetes_name: Option<String>,
}

/// The type of the addresses that Calico's node agent records in a node's document. Entries of other types belong to
/// other programs.
const NODE_ADDRESS_TYPE: &str = "CalicoNodeIP";
/// The name of Kubernetes in a node's document.
const KUBERNETES: &str = "k8s";

/// The stored document of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    resource: Resource,
    labels: Labels,
}

impl Node {
    /// Creates a node with the given labels.
    pub fn new(name: &str, labels: Labels, uid: &str, now: OffsetDateTime) -> Self {
        let mut resource = Resource::new(ResourceKind::Node, name, uid, now);
        resource.set_part("status", json!({}));
        if !labels.is_empty() {
            resource.set_labels(&labels);
        }
        Self { resource, labels }
    }

    /// Returns the name of the node.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// Returns the labels of the node.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Returns the whole resource of the node.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Adds the facts to the document, in the form of Calico's node agent. Labels are added to the stored labels; the
    /// addresses replace the addresses that a node agent has recorded, and the name in Kubernetes replaces the recorded
    /// one. An empty list of addresses, or no name, changes nothing.
    pub fn add_facts(&mut self, facts: &NodeFacts) {
        if !facts.labels.is_empty() {
            let labels = object(self.resource.part("metadata").entry("labels"));
            labels.extend(facts.labels.iter().map(|(name, value)| (name.clone(), value.as_str().into())));
            self.labels = self.resource.labels();
        }
        if !facts.addresses.is_empty() {
            let own = facts.addresses.iter();
            let own = own.map(|address| json!({ "address": address.to_string(), "type": NODE_ADDRESS_TYPE }));
            self.replace_entries("addresses", ("type", NODE_ADDRESS_TYPE), own.collect());
        }
        if let Some(name) = &facts.kubernetes_name {
            let own = json!({ "nodeName": name, "orchestrator": KUBERNETES });
            self.replace_entries("orchRefs", ("orchestrator", KUBERNETES), vec![own]);
        }
    }

    /// Replaces the entries of a list in the spec whose member `name` is `value`, and keeps all other entries.
    fn replace_entries(&mut self, list: &str, (name, value): (&str, &str), mut entries: Vec<Json>) {
        let stored = self.resource.whole_spec().and_then(|spec| spec.get(list)).and_then(Json::as_array);
        let others = stored.into_iter().flatten().filter(|entry| entry.get(name) != Some(&value.into()));
        entries.extend(others.cloned());
        self.resource.set("spec", list, Some(Json::Array(entries)));
    }
}

impl Document for Node {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        let resource = Resource::decode(ResourceKind::Node, key, value)?;
        let labels = resource.labels();
        Ok(Self { resource, labels })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}

spec_fields! {
    /// The names of the fields of a reservation's spec.
    pub const RESERVATION_FIELDS:
    CIDRS = "reservedCIDRs" as "IPReservation.ReservedCIDRs";
}

/// The stored document of an address reservation.
#[derive(Clone, Debug, PartialEq)]
pub struct IpReservation {
    resource: Resource,
}

impl IpReservation {
    /// Creates a reservation of the given CIDRs. A single address is reserved as a /32 or a /128.
    pub fn new(name: &str, networks: &[IpNet], uid: &str, now: OffsetDateTime) -> Self {
        let mut new = Self { resource: Resource::new(ResourceKind::IpReservation, name, uid, now) };
        new.set_networks(networks);
        new
    }

    /// Returns the name of the reservation.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// Returns the reserved CIDRs or addresses, as text. An entry that is not a string is returned as JSON text.
    pub fn texts(&self) -> Vec<String> {
        let entries = self.resource.spec(CIDRS).and_then(Json::as_array).into_iter().flatten();
        entries.map(|entry| entry.as_str().map_or_else(|| entry.to_string(), str::to_owned)).collect()
    }

    /// Replaces the reserved CIDRs of the reservation.
    pub fn set_networks(&mut self, networks: &[IpNet]) {
        let texts = networks.iter().map(|net| net.trunc().to_string().into()).collect();
        self.resource.set_spec(CIDRS, Some(Json::Array(texts)));
    }

    /// Returns the whole resource of the reservation.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Returns the whole resource of the reservation, to change its annotations.
    pub fn resource_mut(&mut self) -> &mut Resource {
        &mut self.resource
    }
}

/// Checks a reservation's spec, and returns the spec to store.
///
/// # Errors
/// [`DocumentError::Invalid`] for an entry that is neither a CIDR nor an address.
pub fn read_reservation_spec(written: &Map<String, Json>) -> Result<Map<String, Json>, DocumentError> {
    let wrong = |value: &Json| DocumentError::field(CIDRS.shown, value, "must be a list of networks and addresses");
    let Some(value) = CIDRS.get(written) else { return Ok(Map::new()) };
    let listed = value.as_array().ok_or_else(|| wrong(value))?;
    for entry in listed {
        let text = entry.as_str().ok_or_else(|| wrong(entry))?;
        if text.parse::<IpNet>().is_err() && text.parse::<IpAddr>().is_err() {
            return Err(DocumentError::field(CIDRS.shown, text, "is neither a network nor an address"));
        }
    }
    let stored = (!listed.is_empty()).then(|| CIDRS.with(value.clone()));
    Ok(stored.into_iter().collect())
}

impl Document for IpReservation {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        Ok(Self { resource: Resource::decode(ResourceKind::IpReservation, key, value)? })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::pool_spec::{CIDR, DISABLED};

    #[test]
    fn resource_names_are_subdomains() {
        for name in ["a", "pool4", "10-0-0-0-24", "a.b-c.d"] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        for name in ["", "A", "a_b", "-a", "a-", "a..b", ".a", "a/b", "a b", &"a".repeat(254)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn node_facts_keep_what_others_wrote() {
        let key = keys::resource(ResourceKind::Node, "n");
        let text = br#"{"metadata":{"labels":{"rack":"a","mine":"old"}},"spec":{"bgp":{"asNumber":7},"addresses":
            [{"address":"10.0.0.9/24","type":"CalicoNodeIP"},{"address":"192.0.2.9","type":"InternalIP"}]},"status":{}}"#;
        let mut node = Node::decode(&key, text).unwrap();
        node.add_facts(&NodeFacts {
            addresses: vec!["10.0.0.1".parse().unwrap()],
            labels: Labels::from([("mine".into(), "new".into())]),
            kubernetes_name: Some("n.example".into()),
        });
        let once = node.clone();
        let document: Json = serde_json::from_slice(node.encode().unwrap().as_bytes()).unwrap();
        assert_eq!(document["metadata"]["labels"], json!({"rack": "a", "mine": "new"}));
        assert_eq!(node.labels()["mine"], "new");
        let spec = json!({
            "bgp": {"asNumber": 7},
            "addresses": [{"address": "10.0.0.1", "type": "CalicoNodeIP"}, {"address": "192.0.2.9", "type": "InternalIP"}],
            "orchRefs": [{"nodeName": "n.example", "orchestrator": "k8s"}],
        });
        assert_eq!(document["spec"], spec);
        node.add_facts(&NodeFacts::default());
        assert_eq!(node, once);
    }

    #[test]
    fn resource_keeps_unknown_fields() {
        let key = keys::resource(ResourceKind::Node, "n");
        let text =
            br#"{"apiVersion":"x","later":{"a":null},"metadata":{"creationTimestamp":null,"labels":{"a":"b","c":1}}}"#;
        let mut node = Resource::decode(ResourceKind::Node, &key, text).unwrap();
        assert_eq!(node.encode().unwrap().as_bytes(), text);
        assert_eq!(node.name(), "n");
        assert_eq!(node.labels(), Labels::from([("a".into(), "b".into())]));
        node.set_annotation("x", "y");
        node.set_spec(CIDR, Some(1.into()));
        node.set_spec(DISABLED, None);
        assert_eq!(node.annotation("x"), Some("y"));
        assert_eq!(node.spec(CIDR), Some(&1.into()));
        assert!(Resource::decode(ResourceKind::Node, &key, b"[]").is_err());
        assert!(Resource::decode(ResourceKind::IpPool, &key, b"{}").is_err());
    }
}
