//! Defines the documents that people write and read: pools, reservations, nodes and the settings, in the form of
//! Calico's API. Workload endpoints and profiles can be shown, and workload endpoints can be deleted. Only the CNI
//! plugin writes workload endpoints and profiles.
//!
//! When a person writes a document, it replaces the stored document of the same name. A field that the written spec
//! lacks gets its default. A write keeps the stored document's uid, creation time and status. A write keeps the stored
//! document's Margay annotations, and its fields that this version of Margay does not know. An unknown field of a
//! written document is an error, because the field may be misspelt.

mod show;
mod write;

use ipam_core::Error;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    ENDPOINT_FIELDS, InvalidPool, JsonObject, NewPool, POOL_FIELDS, PREFIX_LENGTH_ANNOTATION, Pool, SETTINGS_FIELDS,
    check_name, check_new_pool, read_pool_spec,
};
pub use ipam_core::{DocumentError, DocumentKind};
use kv::Key;
use serde_json::Value;

pub use show::{Documents, Namespaces, StoredDocument};
pub use write::{WriteMode, WriteOutcome};

/// The `apiVersion` of every document.
const API_VERSION: &str = "projectcalico.org/v3";

/// The name of the only settings document of a store.
const SETTINGS_NAME: &str = "default";

/// The default namespace of documents whose metadata has no namespace.
pub const DEFAULT_NAMESPACE: &str = "default";

/// The fields of a profile's spec, of the rules in a profile, and of the source and destination in a rule.
const PROFILE_FIELDS: [&str; 11] = [
    "ingress",
    "egress",
    "labelsToApply",
    "action",
    "ipVersion",
    "nets",
    "selector",
    "notNets",
    "notSelector",
    "source",
    "destination",
];

const TOP_LEVEL_FIELDS: [&str; 5] = ["kind", "apiVersion", "metadata", "spec", "status"];
const METADATA_FIELDS: [&str; 13] = [
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "managedFields",
];

fn key(kind: DocumentKind, full_name: &str) -> Key {
    match kind {
        DocumentKind::Pool => keys::resource(ResourceKind::IpPool, full_name),
        DocumentKind::Reservation => keys::resource(ResourceKind::IpReservation, full_name),
        DocumentKind::Node => keys::resource(ResourceKind::Node, full_name),
        DocumentKind::Settings => keys::config(),
        DocumentKind::WorkloadEndpoint => {
            let (namespace, name) = split(full_name);
            keys::workload_endpoint(namespace, name)
        }
        DocumentKind::Profile => keys::profile(full_name),
    }
}

/// Returns the full name of the document that is stored under `key`; `None` for the settings, and for a key of another
/// kind of document.
fn named_by(kind: DocumentKind, key: &Key) -> Option<String> {
    match kind {
        DocumentKind::Pool => keys::parse_resource(ResourceKind::IpPool, key).map(str::to_owned),
        DocumentKind::Reservation => keys::parse_resource(ResourceKind::IpReservation, key).map(str::to_owned),
        DocumentKind::Node => keys::parse_resource(ResourceKind::Node, key).map(str::to_owned),
        DocumentKind::Settings => None,
        DocumentKind::WorkloadEndpoint => {
            keys::parse_workload_endpoint(key).map(|(namespace, name)| kind.full_name(namespace, name))
        }
        DocumentKind::Profile => keys::parse_profile(key).map(str::to_owned),
    }
}

/// The common key prefix of all documents of a kind. The namespace filter `within` applies only to kinds of documents
/// with namespaces.
fn prefix(kind: DocumentKind, within: &Namespaces) -> Key {
    match (kind, within) {
        (DocumentKind::Pool, _) => keys::resources_prefix(ResourceKind::IpPool),
        (DocumentKind::Reservation, _) => keys::resources_prefix(ResourceKind::IpReservation),
        (DocumentKind::Node, _) => keys::resources_prefix(ResourceKind::Node),
        (DocumentKind::Settings, _) => keys::config(),
        (DocumentKind::WorkloadEndpoint, Namespaces::All) => keys::workload_endpoints_prefix(),
        (DocumentKind::WorkloadEndpoint, Namespaces::One(namespace)) => keys::workload_endpoint(namespace, ""),
        (DocumentKind::Profile, _) => keys::profiles_prefix(),
    }
}

/// Splits a document's full name into namespace and name.
fn split(full_name: &str) -> (&str, &str) {
    full_name.split_once('/').unwrap_or((DEFAULT_NAMESPACE, full_name))
}

/// The names of all document fields, in the order in which calicoctl prints them.
pub fn field_order() -> impl Iterator<Item = &'static str> {
    let objects = TOP_LEVEL_FIELDS.into_iter().chain(["items"]).chain(METADATA_FIELDS);
    objects.chain(POOL_FIELDS).chain(SETTINGS_FIELDS).chain(ENDPOINT_FIELDS).chain(PROFILE_FIELDS)
}

/// A document to write or delete, or the kind and name of a stored document.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    kind: DocumentKind,
    /// The document's full name, which is `NAMESPACE/NAME` for a kind of document with namespaces.
    name: String,
    /// The `metadata.resourceVersion` of the written document, if set: the version of the stored document that a person
    /// has edited.
    version: Option<String>,
    /// The whole written document as JSON; empty if the manifest only refers to a stored document.
    document: JsonObject,
}

impl Manifest {
    /// Reads a document, a list of documents (such as `IPPoolList` or `List`), or a JSON array of documents. The JSON
    /// value `null` counts as an empty list.
    ///
    /// # Errors
    /// `Invalid` for a value that is not a document, for an unknown kind, and for missing or wrong fields.
    pub fn read(value: Value) -> Result<Vec<Self>, DocumentError> {
        match value {
            Value::Null => Ok(Vec::new()),
            Value::Array(values) => values.into_iter().map(Self::read).try_fold(Vec::new(), |mut all, read| {
                all.extend(read?);
                Ok(all)
            }),
            Value::Object(mut object) => match object.remove("items") {
                Some(items) if is_list(&object) => Self::read_items(&object, items),
                Some(items) => {
                    object.insert("items".to_owned(), items);
                    Ok(vec![Self::read_one(object)?])
                }
                None if is_list(&object) => Ok(Vec::new()),
                None => Ok(vec![Self::read_one(object)?]),
            },
            other => Err(invalid(format!("{other} is no document: kind, metadata and spec are wanted"))),
        }
    }

    /// Reads the items of a document list; an item without `kind` gets the kind and API version of the list.
    fn read_items(list: &JsonObject, items: Value) -> Result<Vec<Self>, DocumentError> {
        let kind = text(list, "kind")?.unwrap_or_default().trim_end_matches("List");
        let version = text(list, "apiVersion")?.unwrap_or_default();
        let items = match items {
            Value::Array(items) => items,
            Value::Null => Vec::new(),
            _ => return Err(invalid("the items of a list are an array")),
        };
        let complete = |item: Value| match item {
            Value::Object(mut item) => {
                if !kind.is_empty() {
                    item.entry("kind").or_insert_with(|| kind.into());
                    item.entry("apiVersion").or_insert_with(|| version.into());
                }
                Self::read_one(item)
            }
            other => Err(invalid(format!("{other} is no document: kind, metadata and spec are wanted"))),
        };
        items.into_iter().map(complete).collect()
    }

    fn read_one(document: JsonObject) -> Result<Self, DocumentError> {
        let kind = text(&document, "kind")?.ok_or_else(|| invalid("a document needs a kind"))?;
        let kind = DocumentKind::ALL.into_iter().find(|known| known.as_str() == kind).ok_or_else(|| {
            let known = DocumentKind::ALL.map(DocumentKind::as_str).join(", ");
            invalid(format!("kind '{kind}' is none that Margay keeps: {known}"))
        })?;
        match text(&document, "apiVersion")? {
            Some(API_VERSION) => {}
            other => {
                let reason = format!("must be {API_VERSION}");
                return Err(DocumentError::field("APIVersion", other.unwrap_or_default(), reason));
            }
        }
        let metadata = object(&document, "metadata")?.ok_or_else(|| invalid("a document needs metadata"))?;
        let name = text(metadata, "name")?.ok_or_else(|| invalid("a document needs metadata.name"))?;
        let namespace = text(metadata, "namespace")?.filter(|namespace| !namespace.is_empty());
        let name = kind.full_name(namespace.unwrap_or(DEFAULT_NAMESPACE), name);
        let version = text(metadata, "resourceVersion")?.filter(|version| !version.is_empty()).map(str::to_owned);
        if let Some(labels) = object(metadata, "labels")? {
            all_texts("metadata.labels", labels)?;
        }
        if let Some(annotations) = object(metadata, "annotations")? {
            all_texts("metadata.annotations", annotations)?;
        }
        object(&document, "spec")?;
        Ok(Self { kind, name, version, document })
    }

    /// Creates a manifest that only refers to the stored document with this kind and full name.
    pub fn named(kind: DocumentKind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into(), version: None, document: JsonObject::new() }
    }

    /// The document's kind.
    pub fn kind(&self) -> DocumentKind {
        self.kind
    }

    /// The document's full name, which is `NAMESPACE/NAME` for a kind of document with namespaces.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the document's namespace, which a person has named on the command line instead of in the document. A
    /// document of a kind without namespaces is returned unchanged.
    ///
    /// # Errors
    /// `Invalid`, with Calico's error message, if the document has a namespace that differs from `namespace`.
    pub fn within(self, namespace: &str) -> Result<Self, DocumentError> {
        if !self.kind.is_namespaced() {
            return Ok(self);
        }
        let metadata = self.metadata();
        match text(&metadata, "namespace")?.filter(|own| !own.is_empty() && *own != namespace) {
            Some(own) => {
                Err(invalid(format!("resource namespace does not match client namespace. {own} != {namespace}")))
            }
            None => {
                let (_, name) = split(&self.name);
                Ok(Self { name: self.kind.full_name(namespace, name), ..self })
            }
        }
    }

    /// Checks a new document as far as possible without reading the store.
    ///
    /// # Errors
    /// `Document` for a document that is not valid; `Invalid` for a pool that Calico's rules forbid.
    pub fn check(&self) -> Result<(), Error> {
        self.check_name()?;
        if self.kind == DocumentKind::Pool {
            let checked = self.new_pool(None).and_then(|(new, _)| check_new_pool(&new, &[], &[]));
            return Ok(checked?);
        }
        Ok(())
    }

    /// Reads the pool that the document describes, and returns it with its spec in stored form. Fields that the written
    /// document lacks are copied from the stored pool.
    fn new_pool(&self, stored: Option<&Pool>) -> Result<(NewPool, JsonObject), InvalidPool> {
        let metadata = self.metadata();
        let annotations = metadata.get("annotations").and_then(Value::as_object);
        let length = annotations.and_then(|all| all.get(PREFIX_LENGTH_ANNOTATION)).and_then(Value::as_str);
        read_pool_spec(&self.name, &self.spec(), length, stored)
    }

    fn spec(&self) -> JsonObject {
        self.document.get("spec").and_then(Value::as_object).cloned().unwrap_or_default()
    }

    fn metadata(&self) -> JsonObject {
        self.document.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default()
    }

    fn check_name(&self) -> Result<(), DocumentError> {
        if self.kind == DocumentKind::Settings && self.name != SETTINGS_NAME {
            return Err(DocumentError::field("Metadata.Name", &self.name, "the settings are named default"));
        }
        check_name(&self.name).map_err(|reason| DocumentError::field("Metadata.Name", &self.name, reason))
    }
}

/// True if a JSON object is a list of documents, such as an `IPPoolList` or a `List`.
fn is_list(object: &JsonObject) -> bool {
    object.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"))
}

fn invalid(reason: impl Into<String>) -> DocumentError {
    DocumentError::Invalid(reason.into())
}

/// Reads a string field of a JSON object; a field that is `null` counts as absent.
fn text<'a>(object: &'a JsonObject, field: &str) -> Result<Option<&'a str>, DocumentError> {
    match object.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(invalid(format!("{field} must be a text, and is {other}: put it in quotes"))),
    }
}

/// Reads a field whose value is a JSON object; a field that is `null` counts as absent.
fn object<'a>(object: &'a JsonObject, field: &str) -> Result<Option<&'a JsonObject>, DocumentError> {
    match object.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(inner)) => Ok(Some(inner)),
        Some(_) => Err(invalid(format!("{field} must have fields of its own"))),
    }
}

fn all_texts(place: &str, object: &JsonObject) -> Result<(), DocumentError> {
    match object.iter().find(|(_, value)| !value.is_string()) {
        Some((name, value)) => Err(invalid(format!("{place}.{name} must be a text, and is {value}: put it in quotes"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names(value: Value) -> Vec<(DocumentKind, String)> {
        let read = Manifest::read(value).unwrap();
        read.into_iter().map(|manifest| (manifest.kind, manifest.name)).collect()
    }

    fn document(kind: &str, name: &str) -> Value {
        json!({"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}})
    }

    #[test]
    fn documents_stand_alone_and_in_lists() {
        let (pool, node) = (document("IPPool", "p"), document("Node", "n"));
        let (is_pool, is_node) = ((DocumentKind::Pool, "p".to_owned()), (DocumentKind::Node, "n".to_owned()));
        assert_eq!(names(pool.clone()), std::slice::from_ref(&is_pool));
        assert_eq!(names(json!([pool, node])), [is_pool.clone(), is_node.clone()]);
        assert_eq!(
            names(json!({"kind": "List", "apiVersion": "v1", "items": [pool, node]})),
            [is_pool.clone(), is_node]
        );
        let bare = json!({"metadata": {"name": "p"}});
        assert_eq!(names(json!({"kind": "IPPoolList", "apiVersion": API_VERSION, "items": [bare]})), [is_pool]);
        assert_eq!(names(json!({"kind": "IPPoolList", "apiVersion": API_VERSION})), []);
        assert_eq!(names(Value::Null), []);
    }

    #[test]
    fn documents_are_refused_with_reason_when_malformed() {
        for (value, reason) in [
            (json!(7), "no document"),
            (json!({}), "needs a kind"),
            (document("NetworkPolicy", "x"), "kind 'NetworkPolicy' is none that Margay keeps: IPPool, IPReservation"),
            (json!({"kind": "IPPool", "metadata": {"name": "p"}}), "must be projectcalico.org/v3"),
            (json!({"kind": "IPPool", "apiVersion": API_VERSION}), "needs metadata"),
            (json!({"kind": "IPPool", "apiVersion": API_VERSION, "metadata": {}}), "needs metadata.name"),
            (json!({"kind": "IPPool", "apiVersion": API_VERSION, "metadata": {"name": 7}}), "put it in quotes"),
            (
                json!({"kind": "Node", "apiVersion": API_VERSION, "metadata": {"name": "n", "labels": {"a": true}}}),
                "metadata.labels.a must be a text, and is true",
            ),
            (json!({"kind": "IPPool", "apiVersion": API_VERSION, "metadata": {"name": "p"}, "spec": 1}), "spec must"),
            (json!({"kind": "IPPoolList", "items": 7}), "array"),
        ] {
            let error = Manifest::read(value.clone()).unwrap_err().to_string();
            assert!(error.contains(reason), "{value}: {error}");
        }
    }
}
