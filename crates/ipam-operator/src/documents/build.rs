//! The stored form of a document that a person has written, on top of the one that is there.

use ipam_core::timestamps::rfc3339;
use serde_json::Value;
use time::OffsetDateTime;

use super::{API_VERSION, DocumentError, DocumentKind, Manifest, Object};

/// Annotations that begin like this are Margay's own, and stay where a document does not name them.
const OWN_ANNOTATIONS: &str = "margay.io/";

pub(super) const TOP: [&str; 5] = ["kind", "apiVersion", "metadata", "spec", "status"];

pub(super) const METADATA: [&str; 13] = [
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

/// The members of a node's spec.
pub(super) const NODE_FIELDS: [&str; 9] = [
    "bgp",
    "ipv4VXLANTunnelAddr",
    "ipv6VXLANTunnelAddr",
    "vxlanTunnelMACAddr",
    "vxlanTunnelMACAddrV6",
    "orchRefs",
    "wireguard",
    "addresses",
    "interfaces",
];

/// Where the identity of a new document comes from.
pub(super) struct Birth {
    pub(super) uid: String,
    pub(super) now: OffsetDateTime,
}

/// Refuses fields of a spec that nobody knows, unless they are stored just so: then they were read from here.
pub(super) fn refuse_unknown(
    place: &str,
    written: &Object,
    known: &[&str],
    stored: Option<&Object>,
) -> Result<(), DocumentError> {
    let is_unknown = |(name, value): &(&String, &Value)| {
        !known.contains(&name.as_str()) && stored.and_then(|stored| stored.get(*name)) != Some(*value)
    };
    match written.iter().find(is_unknown) {
        None => Ok(()),
        Some((name, _)) if place.is_empty() => Err(DocumentError::Invalid(format!("unknown field \"{name}\""))),
        Some((name, _)) => Err(DocumentError::Invalid(format!("unknown field \"{place}.{name}\""))),
    }
}

/// Puts the document together: its labels, annotations and spec as they are written, all else as it was.
pub(super) fn assemble(
    manifest: &Manifest,
    stored: Option<&Object>,
    (mut spec, known): (Object, &[&str]),
    birth: impl FnOnce() -> Birth,
) -> Result<Object, DocumentError> {
    let stored_metadata = stored.and_then(|stored| inner(stored, "metadata"));
    let stored_spec = stored.and_then(|stored| inner(stored, "spec"));
    let written = manifest.metadata();
    refuse_unknown("", &manifest.document, &TOP, stored)?;
    refuse_unknown("metadata", &written, &METADATA, stored_metadata)?;
    refuse_unknown("spec", &manifest.spec(), known, stored_spec)?;

    let mut document = stored.cloned().unwrap_or_default();
    document.insert("kind".to_owned(), manifest.kind().as_str().into());
    document.insert("apiVersion".to_owned(), API_VERSION.into());
    let metadata = match stored_metadata {
        Some(stored) => changed_metadata(stored.clone(), &written),
        None => new_metadata(manifest.name(), &written, birth()),
    };
    document.insert("metadata".to_owned(), Value::Object(metadata));
    for (name, value) in stored_spec.into_iter().flatten() {
        if !known.contains(&name.as_str()) {
            spec.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
    document.insert("spec".to_owned(), Value::Object(spec));
    if manifest.kind() == DocumentKind::Node {
        let status = manifest.document.get("status").filter(|status| status.is_object()).cloned();
        let entry = document.entry("status").or_insert_with(|| Value::Object(Object::new()));
        if let Some(status) = status {
            *entry = status;
        }
    }
    Ok(document)
}

fn new_metadata(name: &str, written: &Object, birth: Birth) -> Object {
    let mut metadata = Object::new();
    metadata.insert("name".to_owned(), name.into());
    metadata.insert("uid".to_owned(), birth.uid.into());
    metadata.insert("creationTimestamp".to_owned(), rfc3339(birth.now).into());
    for field in ["labels", "annotations", "ownerReferences", "finalizers"] {
        if let Some(value) = written.get(field).filter(|value| !is_empty(value)) {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    metadata
}

fn changed_metadata(mut metadata: Object, written: &Object) -> Object {
    let mut annotations = inner(written, "annotations").cloned().unwrap_or_default();
    for (name, value) in inner(&metadata, "annotations").into_iter().flatten() {
        if name.starts_with(OWN_ANNOTATIONS) {
            annotations.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
    let labels = inner(written, "labels").cloned().unwrap_or_default();
    for (field, value) in [("labels", labels), ("annotations", annotations)] {
        if value.is_empty() {
            metadata.remove(field);
        } else {
            metadata.insert(field.to_owned(), Value::Object(value));
        }
    }
    for field in ["ownerReferences", "finalizers"] {
        if let Some(value) = written.get(field) {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    metadata
}

/// The object in a field, if there is one.
pub(super) fn inner<'a>(object: &'a Object, field: &str) -> Option<&'a Object> {
    object.get(field)?.as_object()
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
