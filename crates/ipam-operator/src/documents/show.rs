//! Reads stored documents, and completes their fields for display.

use ipam_core::model::{Document, IpamConfig, Malformed, NewPool, Pool};
use ipam_core::{Error, Result, transact};
use kv::{Deadline, Key, Range, Revision, Transaction, Value as Stored};
use serde_json::Value;

use super::write::settings_document;
use super::{API_VERSION, DocumentError, DocumentKind, JsonObject, SETTINGS_NAME, split};
use crate::Operator;

/// The namespaces whose documents are listed, for a kind of document with namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// The documents of all namespaces.
    All,
    /// The documents of the namespace with this name.
    One(String),
}

/// A stored document in the form that a person sees. The stored version of the document is in
/// `metadata.resourceVersion`. Fields that a stored pool lacks have their default values.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredDocument {
    /// The document's full name, which is `NAMESPACE/NAME` for a kind of document with namespaces.
    pub name: String,
    /// The whole document as JSON.
    pub document: JsonObject,
}

/// All stored documents of a kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Documents {
    /// The documents of this kind, sorted by name.
    pub items: Vec<StoredDocument>,
    /// The revision of the store at which the documents were read.
    pub revision: Revision,
}

impl Operator {
    /// Reads all documents of a kind at one revision. Damaged documents are logged and omitted, as in Calico. If no
    /// settings are stored, the default settings are returned instead. The namespace filter `within` applies only to
    /// kinds of documents with namespaces.
    ///
    /// # Errors
    /// `Malformed` if the stored settings are damaged; any store error.
    pub async fn documents(&self, kind: DocumentKind, within: &Namespaces, deadline: Deadline) -> Result<Documents> {
        if kind == DocumentKind::Settings {
            return transact!(self.ipam(), deadline, |tx| {
                let shown = self.shown(tx, kind, SETTINGS_NAME).await?;
                Ok(Documents { items: shown.into_iter().collect(), revision: tx.revision() })
            });
        }
        let range = Range::Prefix(super::prefix(kind, within));
        transact!(self.ipam(), deadline, |tx| {
            let mut items = Vec::new();
            for (key, value) in tx.snapshot_list(&range).await? {
                let Some(name) = super::named_by(kind, &key) else { continue };
                match shown(kind, &key, &name, &value, tx.written_at(&key)) {
                    Ok(shown) => items.push(shown),
                    Err(error) => tracing::warn!(%error, "skipping a stored resource that cannot be decoded"),
                }
            }
            Ok(Documents { items, revision: tx.revision() })
        })
    }

    /// Reads the documents of the given kinds and full names at one revision, in the given order. For a document that
    /// does not exist, the result contains the error `NotFound`.
    ///
    /// # Errors
    /// `Malformed` if one of the documents is damaged; any store error.
    pub async fn documents_named(
        &self,
        named: &[(DocumentKind, String)],
        deadline: Deadline,
    ) -> Result<Vec<Result<StoredDocument, DocumentError>>> {
        transact!(self.ipam(), deadline, |tx| {
            tx.prefetch(named.iter().map(|(kind, name)| super::key(*kind, name)).collect(), Vec::new()).await?;
            let mut found = Vec::new();
            for (kind, name) in named {
                let shown = self.shown(tx, *kind, name).await?;
                found.push(shown.ok_or_else(|| DocumentError::NotFound(*kind, name.clone())));
            }
            Ok(found)
        })
    }

    async fn shown(&self, tx: &mut Transaction, kind: DocumentKind, name: &str) -> Result<Option<StoredDocument>> {
        let key = super::key(kind, name);
        if kind == DocumentKind::Settings && name != SETTINGS_NAME {
            return Ok(None);
        }
        let stored = tx.snapshot_get(&key).await?;
        let version = tx.written_at(&key);
        if kind == DocumentKind::Settings {
            let stored = stored.map(|value| IpamConfig::decode(&key, value.as_bytes())).transpose()?;
            let document = settings_document(&stored.unwrap_or_default(), version);
            return Ok(Some(StoredDocument { name: name.to_owned(), document }));
        }
        stored.map(|value| shown(kind, &key, name, &value, version)).transpose().map_err(Error::from)
    }
}

fn shown(
    kind: DocumentKind,
    key: &Key,
    full_name: &str,
    value: &Stored,
    version: Option<Revision>,
) -> Result<StoredDocument, Malformed> {
    let mut document: JsonObject =
        serde_json::from_slice(value.as_bytes()).map_err(|error| Malformed::new(key, error))?;
    document.entry("kind").or_insert_with(|| kind.as_str().into());
    document.entry("apiVersion").or_insert_with(|| API_VERSION.into());
    let metadata = document.entry("metadata").or_insert_with(|| Value::Object(JsonObject::new()));
    let (namespace, name) = if kind.is_namespaced() { split(full_name) } else { ("", full_name) };
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.entry("name").or_insert_with(|| name.into());
        if kind.is_namespaced() {
            metadata.entry("namespace").or_insert_with(|| namespace.into());
        }
        if let Some(version) = version {
            metadata.insert("resourceVersion".to_owned(), version.to_string().into());
        }
    }
    if kind == DocumentKind::Pool {
        let pool = Pool::decode(key, value.as_bytes())?;
        if let Some(spec) = document.get_mut("spec").and_then(Value::as_object_mut) {
            fill(spec, &pool);
        }
    }
    Ok(StoredDocument { name: full_name.to_owned(), document })
}

/// Sets each missing or empty field of a pool's spec to its default.
fn fill(spec: &mut JsonObject, pool: &Pool) {
    let usual = NewPool::new(pool.name(), pool.cidr()).with_block_size(pool.block_size());
    let says_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Number(number) => number.as_u64() == Some(0),
        _ => false,
    };
    for (field, default) in usual.spec() {
        if spec.get(&field).is_none_or(says_nothing) {
            spec.insert(field, default);
        }
    }
}
