//! Writing documents, and deleting them.

use ipam_core::Result;
use ipam_core::affinity::ReleaseIf;
use ipam_core::model::{
    Document, IpamConfig, Malformed, POOL_FIELDS, Pool, RESERVATION_FIELDS, check_changed_pool, read_reservation_spec,
};
use ipam_core::transact;
use kv::{Deadline, Key, Revision, StoreExt, Transaction};

use super::build::{Birth, NODE_FIELDS, assemble};
use super::{DocumentError, DocumentKind, Manifest, Object, settings};
use crate::Operator;
use crate::pool_deletion::InUse;

/// The state that a write expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Nothing of its name.
    Create,
    /// Something of its name or nothing.
    Apply,
    /// Something of its name.
    Replace,
}

impl WriteMode {
    /// The verb, as messages have it.
    fn verb(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Apply => "apply",
            Self::Replace => "replace",
        }
    }
}

/// The outcome for a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It was not there.
    Created,
    /// It was there, and is another one now.
    Changed,
    /// It was there, and is as it was; nothing was written.
    Unchanged,
}

impl Operator {
    /// Writes a document, in one commit: see [`crate::documents`] for what becomes of what it does not say. A version in it
    /// has to be the stored one, where one is stored.
    ///
    /// Guards: the document; for a new pool that no pool came or changed meanwhile.
    ///
    /// # Errors
    /// `Document`, also for a kind that only the CNI plugin writes; `Invalid` with Calico's text for a pool that must not be;
    /// those of the store; a damaged document in its place.
    pub async fn write_document(&self, manifest: &Manifest, way: WriteMode, deadline: Deadline) -> Result<Written> {
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
                None => Written::Created,
                Some(stored) if same(stored, wanted.as_bytes()) => Written::Unchanged,
                Some(_) => Written::Changed,
            };
            if written != Written::Unchanged {
                tx.put(&key, wanted)?;
            }
            Ok(written)
        })
    }

    /// The stored form of a pool, checked by all rules.
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
        spec: (Object, &[&str]),
    ) -> Result<kv::Value> {
        let damaged = |error: serde_json::Error| Malformed::new(key, error);
        let stored: Option<Object> = stored.map(serde_json::from_slice).transpose().map_err(damaged)?;
        let document =
            assemble(manifest, stored.as_ref(), spec, || Birth { uid: self.ipam().uid(), now: self.ipam().now() })?;
        Ok(kv::Value::new(serde_json::to_vec(&document).map_err(damaged)?))
    }

    /// Deletes a document. A version in the manifest has to be the stored one; of a pool it is looked at before its end
    /// begins, since that changes it. A pool goes as [`Self::delete_pool_if`] says;
    /// a node releases its empty blocks first, and addresses of its other blocks stay with their holders; without
    /// settings the defaults hold.
    ///
    /// # Errors
    /// `Document`, also for a profile, which only the CNI plugin keeps; `PoolInUse`; those of the store.
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
    Ok(settings::settings(manifest, stored.unwrap_or_default())?.encode()?)
}

/// A new document has no version.
fn refuse_version(manifest: &Manifest) -> Result<(), DocumentError> {
    match &manifest.version {
        None => Ok(()),
        Some(version) => {
            let reason = "field must not be set for a Create request";
            Err(DocumentError::field("Metadata.ResourceVersion", version, reason))
        }
    }
}

/// The document is there, in the version that is meant. Guards it.
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

/// True if both say the same, in whatever order.
fn same(stored: &[u8], wanted: &[u8]) -> bool {
    let read = |text: &[u8]| serde_json::from_slice::<Object>(text).ok();
    read(stored).is_some_and(|stored| Some(stored) == read(wanted))
}
