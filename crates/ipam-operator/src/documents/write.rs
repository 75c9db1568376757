//! Writes and deletes the documents that people edit. A write merges the document that a person has written with the
//! stored document of the same name. The settings have the form of a document of kind `IPAMConfiguration`, named
//! `default`.

use ipam_core::affinity::ReleaseIf;
use ipam_core::model::{
    Document, IpamConfig, Malformed, POOL_FIELDS, Pool, RESERVATION_FIELDS, SETTINGS_FIELDS, check_changed_pool,
    read_reservation_spec,
};
use ipam_core::timestamps::rfc3339;
use ipam_core::{Result, transact};
use kv::{Deadline, Key, Revision, StoreExt, Transaction};
use serde_json::Value;
use time::OffsetDateTime;

use super::{
    API_VERSION, DocumentError, DocumentKind, JsonObject, METADATA_FIELDS, Manifest, SETTINGS_NAME, TOP_LEVEL_FIELDS,
};
use crate::Operator;
use crate::pools::InUse;

/// Whether a write requires, allows or forbids that a document of the same name is already stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The write fails if a document of the same name is stored.
    Create,
    /// The write creates the document, or replaces the stored document of the same name.
    Apply,
    /// The write fails if no document of the same name is stored.
    Replace,
}

impl WriteMode {
    /// The verb that names this write mode in error messages.
    fn verb(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Apply => "apply",
            Self::Replace => "replace",
        }
    }
}

/// The effect of a write on the stored document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The write created the document, because no document of the same name was stored.
    Created,
    /// The write changed the stored document.
    Changed,
    /// The document to write equals the stored one, so nothing was written.
    Unchanged,
}

impl Operator {
    /// Writes a document in one commit. The module docs of [`crate::documents`] say which fields of the stored document
    /// are kept. If the written document has a `resourceVersion`, it must equal the version of the stored document.
    ///
    /// Before a new pool is written, stale affinities in the pool's range are deleted, one commit each. An affinity is
    /// stale if its block does not exist and the block size in its key differs from the pool's.
    ///
    /// The commit of a write guards the document's key. The commit that creates a pool fails if any other pool is
    /// created or changed meanwhile.
    ///
    /// # Errors
    /// `Document` for a document that cannot be written, including kinds that only the CNI plugin writes. `Invalid`,
    /// with Calico's error message, for a pool that Calico's rules forbid. `Malformed` if the stored document is
    /// damaged. Any store error.
    pub async fn write_document(
        &self,
        manifest: &Manifest,
        way: WriteMode,
        deadline: Deadline,
    ) -> Result<WriteOutcome> {
        let (kind, name) = (manifest.kind(), manifest.name());
        let key = super::key(kind, name);
        let not_supported = || DocumentError::NotSupported(way.verb(), kind, name.to_owned());
        if matches!(kind, DocumentKind::WorkloadEndpoint | DocumentKind::Profile) {
            return Err(not_supported().into());
        }
        manifest.check_name()?;
        if kind == DocumentKind::Pool
            && self.ipam().store().get(key.clone()).await?.is_none()
            && let Ok((new, _)) = manifest.new_pool(None)
        {
            self.ipam().drop_affinities_beside(&new, deadline).await?;
        }
        transact!(self.ipam(), deadline, |tx| {
            let stored = tx.get(&key).await?;
            let version = tx.written_at(&key);
            match way {
                WriteMode::Create if stored.is_some() => {
                    return Err(DocumentError::Exists(kind, name.to_owned()).into());
                }
                WriteMode::Create => refuse_version(manifest)?,
                WriteMode::Replace if stored.is_none() => {
                    return Err(DocumentError::NotFound(kind, name.to_owned()).into());
                }
                WriteMode::Apply | WriteMode::Replace => require_version(manifest, version)?,
            }
            let stored = stored.as_ref().map(kv::Value::as_bytes);
            let wanted = match kind {
                DocumentKind::Settings => settings_value(&key, manifest, stored)?,
                DocumentKind::Pool => self.pool_value(tx, &key, manifest, stored).await?,
                DocumentKind::Reservation => {
                    let spec = read_reservation_spec(&manifest.spec())?;
                    self.value(&key, manifest, stored, (spec, &RESERVATION_FIELDS))?
                }
                DocumentKind::Node => self.value(&key, manifest, stored, (manifest.spec(), &NODE_FIELDS))?,
                DocumentKind::WorkloadEndpoint | DocumentKind::Profile => return Err(not_supported().into()),
            };
            let written = match stored {
                None => WriteOutcome::Created,
                Some(stored) if same(stored, wanted.as_bytes()) => WriteOutcome::Unchanged,
                Some(_) => WriteOutcome::Changed,
            };
            if written != WriteOutcome::Unchanged {
                tx.put(&key, wanted)?;
            }
            Ok(written)
        })
    }

    /// Builds the stored form of a pool, and checks the pool against Calico's rules and the stored pools.
    async fn pool_value(
        &self,
        tx: &mut Transaction,
        key: &Key,
        manifest: &Manifest,
        stored: Option<&[u8]>,
    ) -> Result<kv::Value> {
        let old = stored.map(|value| Pool::decode(key, value)).transpose()?;
        let (new, spec) = manifest.new_pool(old.as_ref())?;
        match &old {
            Some(old) => check_changed_pool(&new, old)?,
            None => self.ipam().check_beside_others(tx, &new).await?,
        }
        let value = self.value(key, manifest, stored, (spec, &POOL_FIELDS))?;
        Pool::decode(key, value.as_bytes())?;
        Ok(value)
    }

    fn value(
        &self,
        key: &Key,
        manifest: &Manifest,
        stored: Option<&[u8]>,
        spec: (JsonObject, &[&str]),
    ) -> Result<kv::Value> {
        let damaged = |error: serde_json::Error| Malformed::new(key, error);
        let stored: Option<JsonObject> = stored.map(serde_json::from_slice).transpose().map_err(damaged)?;
        let document = assemble(manifest, stored.as_ref(), spec, || NewIdentity {
            uid: self.ipam().uid(),
            now: self.ipam().now(),
        })?;
        Ok(kv::Value::new(serde_json::to_vec(&document).map_err(damaged)?))
    }

    /// Deletes a document. If the manifest has a `resourceVersion`, it must equal the version of the stored document. A
    /// pool's version is checked before the deletion starts, because the deletion itself changes the pool document. For
    /// a pool, calls [`Self::delete_pool_if`]. Before a node's document is deleted, the node's empty blocks are
    /// released. Addresses in blocks that are not empty stay with their holders. After the settings are deleted, the
    /// default settings apply.
    ///
    /// # Errors
    /// `Document` for a document that cannot be deleted, including profiles, which only the CNI plugin deletes.
    /// `PoolInUse` if addresses of the pool are in use. Any store error.
    pub async fn delete_document(&self, manifest: &Manifest, in_use: InUse, deadline: Deadline) -> Result<()> {
        let (kind, name) = (manifest.kind(), manifest.name());
        let key = super::key(kind, name);
        if kind == DocumentKind::Profile {
            return Err(DocumentError::NotSupported("delete", kind, name.to_owned()).into());
        }
        transact!(self.ipam(), deadline, |tx| require_stored(tx, manifest, &key).await)?;
        if kind == DocumentKind::Pool {
            return self.delete_pool_if(name, in_use, deadline).await;
        }
        if kind == DocumentKind::Node {
            self.ipam().release_node_affinities(name, ReleaseIf::Empty, deadline).await?;
        }
        transact!(self.ipam(), deadline, |tx| {
            require_stored(tx, manifest, &key).await?;
            Ok(tx.delete(&key)?)
        })
    }
}

fn settings_value(key: &Key, manifest: &Manifest, stored: Option<&[u8]>) -> Result<kv::Value> {
    let stored = stored.map(|value| IpamConfig::decode(key, value)).transpose()?;
    Ok(read_settings(manifest, stored.unwrap_or_default())?.encode()?)
}

/// As in Calico, creating a document fails if the document has a `resourceVersion`.
fn refuse_version(manifest: &Manifest) -> Result<(), DocumentError> {
    match &manifest.version {
        None => Ok(()),
        Some(version) => {
            let reason = "field must not be set for a Create request";
            Err(DocumentError::field("Metadata.ResourceVersion", version, reason))
        }
    }
}

/// Fails unless the document is stored and has the version that the manifest names; the transaction guards the
/// document's key.
async fn require_stored(tx: &mut Transaction, manifest: &Manifest, key: &Key) -> Result<()> {
    if tx.get(key).await?.is_none() {
        return Err(DocumentError::NotFound(manifest.kind(), manifest.name().to_owned()).into());
    }
    Ok(require_version(manifest, tx.written_at(key))?)
}

fn require_version(manifest: &Manifest, stored: Option<Revision>) -> Result<(), DocumentError> {
    match (&manifest.version, stored) {
        (Some(wanted), Some(stored)) if *wanted != stored.to_string() => {
            Err(DocumentError::Conflict(manifest.kind(), manifest.name().to_owned()))
        }
        _ => Ok(()),
    }
}

/// True if two JSON documents are equal; the order of fields does not matter.
fn same(stored: &[u8], wanted: &[u8]) -> bool {
    let read = |text: &[u8]| serde_json::from_slice::<JsonObject>(text).ok();
    read(stored).is_some_and(|stored| Some(stored) == read(wanted))
}

/// Prefix of the names of Margay's own annotations. A write keeps a stored annotation with this prefix unless the
/// written document has an annotation of the same name.
const OWN_ANNOTATIONS: &str = "margay.io/";

/// The fields of a node's spec.
const NODE_FIELDS: [&str; 9] = [
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

/// The uid and the creation time of a new document.
struct NewIdentity {
    uid: String,
    now: OffsetDateTime,
}

/// Fails if the written object has an unknown field, unless the stored object has the same field with an equal value.
fn refuse_unknown(
    place: &str,
    written: &JsonObject,
    known: &[&str],
    stored: Option<&JsonObject>,
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

/// Merges a written document with the stored document. The labels, annotations and spec come from the written document,
/// and all other fields from the stored document.
fn assemble(
    manifest: &Manifest,
    stored: Option<&JsonObject>,
    (mut spec, known): (JsonObject, &[&str]),
    birth: impl FnOnce() -> NewIdentity,
) -> Result<JsonObject, DocumentError> {
    let stored_metadata = stored.and_then(|stored| inner(stored, "metadata"));
    let stored_spec = stored.and_then(|stored| inner(stored, "spec"));
    let written = manifest.metadata();
    refuse_unknown("", &manifest.document, &TOP_LEVEL_FIELDS, stored)?;
    refuse_unknown("metadata", &written, &METADATA_FIELDS, stored_metadata)?;
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
        let entry = document.entry("status").or_insert_with(|| Value::Object(JsonObject::new()));
        if let Some(status) = status {
            *entry = status;
        }
    }
    Ok(document)
}

fn new_metadata(name: &str, written: &JsonObject, birth: NewIdentity) -> JsonObject {
    let mut metadata = JsonObject::new();
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

fn changed_metadata(mut metadata: JsonObject, written: &JsonObject) -> JsonObject {
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

fn inner<'a>(object: &'a JsonObject, field: &str) -> Option<&'a JsonObject> {
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

/// Reads the settings from a settings document. Known settings that the document lacks become unset; unknown fields of
/// the stored settings are kept.
fn read_settings(manifest: &Manifest, stored: IpamConfig) -> Result<IpamConfig, DocumentError> {
    let metadata = manifest.metadata();
    for field in ["labels", "annotations"] {
        if inner(&metadata, field).is_some_and(|fields| !fields.is_empty()) {
            let reason = format!("the settings are stored without metadata.{field}: leave them away");
            return Err(DocumentError::Invalid(reason));
        }
    }
    let spec = manifest.spec();
    refuse_unknown("", &manifest.document, &["kind", "apiVersion", "metadata", "spec"], None)?;
    refuse_unknown("spec", &spec, &SETTINGS_FIELDS, None)?;
    stored.with_spec(&spec)
}

/// Builds the settings document; `version` is `None` if no settings are stored.
pub(super) fn settings_document(settings: &IpamConfig, version: Option<Revision>) -> JsonObject {
    let mut metadata = JsonObject::new();
    metadata.insert("name".to_owned(), SETTINGS_NAME.into());
    if let Some(version) = version {
        metadata.insert("resourceVersion".to_owned(), version.to_string().into());
    }
    let mut document = JsonObject::new();
    document.insert("kind".to_owned(), DocumentKind::Settings.as_str().into());
    document.insert("apiVersion".to_owned(), API_VERSION.into());
    document.insert("metadata".to_owned(), Value::Object(metadata));
    document.insert("spec".to_owned(), settings.spec());
    document
}

#[cfg(test)]
mod tests {
    use ipam_core::model::Document;
    use serde_json::json;

    use super::*;

    fn said_by(spec: Value) -> Result<IpamConfig, DocumentError> {
        let key = ipam_core::model::keys::config();
        let stored = br#"{"strict_affinity":true,"maxBlocksPerHost":3,"later":1}"#;
        let document = json!({"kind": "IPAMConfiguration", "apiVersion": API_VERSION, "metadata": {"name": "default"},
            "spec": spec});
        read_settings(&Manifest::read(document).unwrap()[0], IpamConfig::decode(&key, stored).unwrap())
    }

    #[test]
    fn document_defaults_apply_and_unknown_fields_stay() {
        let text = |config: IpamConfig| String::from_utf8(config.encode().unwrap().as_bytes().to_vec()).unwrap();
        assert_eq!(
            text(said_by(json!({})).unwrap()),
            r#"{"auto_allocate_blocks":true,"kubeVirtVMAddressPersistence":"Enabled","later":1}"#
        );
        let all = json!({"strictAffinity": true, "autoAllocateBlocks": false, "maxBlocksPerHost": 5,
            "kubeVirtVMAddressPersistence": "Disabled", "ipCooldownSeconds": 60});
        assert!(
            said_by(json!({"strictAffinity": true, "maxBlocksPerHost": 1_000_000, "ipCooldownSeconds": 1_200})).is_ok()
        );
        let config = said_by(all.clone()).unwrap();
        assert_eq!(settings_document(&config, None)["spec"], all);
        assert_eq!(settings_document(&config, Some(Revision::new(7)))["metadata"]["resourceVersion"], "7");
    }

    #[test]
    fn document_settings_are_refused_when_impossible() {
        for (spec, reason) in [
            (json!({"strictAffinity": "yes"}), "IPAMConfiguration.strictAffinity = 'yes' (must be true or false)"),
            (json!({"maxBlocksPerHost": -1}), "must be a number from 0 to 1000000"),
            (json!({"maxBlocksPerHost": 1_000_001}), "must be a number from 0 to 1000000"),
            (
                json!({"ipCooldownSeconds": 1_201}),
                "IPAMConfiguration.ipCooldownSeconds = '1201' (must be a number from 0 to 1200)",
            ),
            (json!({"ipCooldownSeconds": 4_294_967_296_u64}), "must be a number"),
            (json!({"kubeVirtVMAddressPersistence": "On"}), "must be Enabled or Disabled"),
            (json!({"maxBlocksPerHost": 2}), "MaxBlocksPerHost requires StrictAffinity to be enabled"),
            (json!({"autoAllocateBlocks": false}), "Cannot disable 'StrictAffinity' and 'AutoAllocateBlocks'"),
            (json!({"strict": true}), "unknown field \"spec.strict\""),
        ] {
            let error = said_by(spec).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
