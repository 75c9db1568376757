//! Defines the import lock: a key that reserves a store for an import or a migration into this store.
//!
//! While the import lock's key exists, no address is assigned or released. Every operation of the allocator reads the
//! lock's key in the same request as its other keys, and its commit guards that the lock's key is absent. While the
//! lock exists, only the program that fills the store can assign or release addresses, even if other programs are
//! already configured to use the store. Calico's own programs ignore the lock. The crate `margay-ipam-operator` decides
//! what an import or a migration copies.

use std::fmt;

use kv::{Key, Transaction, Value};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

const LOCK_KEY: &str = "/margay/v1/migration";

/// Returns the key of the import lock.
pub fn import_lock_key() -> Key {
    LOCK_KEY.into()
}

/// Returns the result of an operation, or an error if the store has an import lock. A store error of the operation is
/// returned even if the store has an import lock.
///
/// # Errors
/// `ImportLocked` if the store has an import lock. Any error of the operation. Any store error.
pub async fn unless_import_locked<T>(tx: &mut Transaction, done: Result<T>) -> Result<T> {
    if let Err(Error::Store(_)) = done {
        return done;
    }
    match tx.get(&import_lock_key()).await? {
        Some(value) => Err(Error::ImportLocked(ImportLocked::new(value.as_bytes()))),
        None => done,
    }
}

/// Whether a store is filled by an import or by a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveKind {
    /// The store is filled from a file by an import.
    Import,
    /// The store is filled by a migration from another store, which may change during the migration.
    Migrate,
}

/// How far an import or a migration has progressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImportState {
    /// The import or migration may not have copied all keys of the source yet.
    Copying,
    /// The import or migration has copied all keys of one revision of the source, and has compared the copies with the
    /// source.
    Copied,
    /// The import or migration was aborted, and the copied keys are being removed.
    Removing,
}

/// The value of the import lock's key: the source and the progress of the import or migration, stored as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportLock {
    /// Whether a store is filled by an import or by a migration.
    pub way: MoveKind,
    /// The source of the import or migration, as the user gives it on the command line: the URL of a store, or the path
    /// of a file.
    pub from: String,
    /// The store that is being filled, as the user gives it on the command line.
    pub to: String,
    /// The identity of the source: the id of the store from which a migration copies, or a checksum of the imported
    /// file and of the requested changes to the file's content.
    pub source: String,
    /// How far the import or migration has progressed.
    pub state: ImportState,
    /// The newest source revision whose keys were all copied; 0 if no revision was copied completely yet.
    pub revision: i64,
}

impl ImportLock {
    /// Encodes the import lock as the value of its key.
    pub fn encode(&self) -> Value {
        Value::new(serde_json::to_vec(self).unwrap_or_default())
    }

    /// Decodes the value of the import lock's key. Returns `None` if the value cannot be decoded.
    pub fn decode(value: &[u8]) -> Option<Self> {
        serde_json::from_slice(value).ok()
    }

    /// Returns the command line that continues the import or migration.
    pub fn command(&self) -> String {
        let Self { from, to, .. } = self;
        match (self.way, self.state) {
            (MoveKind::Import, ImportState::Removing) => format!("margay import {from} --abort --store {to}"),
            (MoveKind::Import, _) => format!("margay import {from} --store {to}"),
            (MoveKind::Migrate, ImportState::Copying) => format!("margay migrate {from} {to}"),
            (MoveKind::Migrate, ImportState::Copied) => format!("margay migrate {from} {to} --finish"),
            (MoveKind::Migrate, ImportState::Removing) => format!("margay migrate {from} {to} --abort"),
        }
    }
}

/// The error of an operation on a store with an import lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportLocked {
    mark: Option<ImportLock>,
}

impl ImportLocked {
    /// Creates the error from the value of the import lock's key.
    pub fn new(value: &[u8]) -> Self {
        Self { mark: ImportLock::decode(value) }
    }
}

impl fmt::Display for ImportLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.mark {
            Some(ImportLock { way: MoveKind::Import, .. }) => "an import",
            _ => "a migration",
        };
        write!(f, "this store is the target of {what} that is not finished; ")?;
        match &self.mark {
            Some(mark) => write!(f, "go on with: {}", mark.command()),
            None => write!(f, "finish it with the version of margay that began it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_import_error_says_how_to_go_on() {
        let mut mark = ImportLock {
            way: MoveKind::Migrate,
            from: "sled:///a".into(),
            to: "redb:///b".into(),
            source: "id".into(),
            state: ImportState::Copied,
            revision: 7,
        };
        assert_eq!(ImportLock::decode(mark.encode().as_bytes()), Some(mark.clone()));
        let said = ImportLocked::new(mark.encode().as_bytes()).to_string();
        assert!(said.contains("a migration that is not finished"), "{said}");
        assert!(said.ends_with("margay migrate sled:///a redb:///b --finish"), "{said}");
        mark.way = MoveKind::Import;
        assert!(ImportLocked::new(mark.encode().as_bytes()).to_string().contains("margay import sled:///a"));
        assert!(ImportLocked::new(b"?").to_string().contains("with the version of margay that began it"));
    }
}
