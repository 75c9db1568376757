//! The mark on a store that is being filled.
//!
//! The mark is a key. While it is there, nothing is assigned and nothing is released: every verb of the allocator
//! reads it in the same request as everything else, and commits on the condition that it is absent. So the program that
//! fills a store has it to itself, whatever else is configured to use it already. Calico's own programs do not know the
//! mark. `margay-ipam-operator` moves what a store holds.

use std::fmt;

use kv::{Key, Transaction, Value};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The key of the mark.
const LOCK_KEY: &str = "/margay/v1/migration";

/// The key of the mark.
pub fn import_lock_key() -> Key {
    LOCK_KEY.into()
}

/// The outcome of a verb, unless the store is being filled. A refusal of the store stays one.
///
/// # Errors
/// `ImportLocked`; those of the verb; those of the store.
pub async fn unless_import_locked<T>(tx: &mut Transaction, done: Result<T>) -> Result<T> {
    if let Err(Error::Store(_)) = done {
        return done;
    }
    match tx.get(&import_lock_key()).await? {
        Some(value) => Err(Error::ImportLocked(ImportLocked::new(value.as_bytes()))),
        None => done,
    }
}

/// The source that fills the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveKind {
    /// A file.
    Import,
    /// Another store, which may change meanwhile.
    Migrate,
}

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImportState {
    /// Something may still be missing.
    Copying,
    /// All of one revision is there, and was compared.
    Copied,
    /// The written keys are being removed again.
    Removing,
}

/// The mark: that a store is being filled, from where, and how to end it. JSON under [`import_lock_key`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportLock {
    /// The kind of its source.
    pub way: MoveKind,
    /// The source, as one writes it on a command line: a URL or a file.
    pub from: String,
    /// The store itself, as one writes it on a command line.
    pub to: String,
    /// The identity of this source: the id of a store, or the checksum of a file and the changes to it.
    pub source: String,
    /// How far it has come.
    pub state: ImportState,
    /// The revision of the source that was copied last; 0 before that.
    pub revision: i64,
}

impl ImportLock {
    /// As it is stored.
    pub fn encode(&self) -> Value {
        Value::new(serde_json::to_vec(self).unwrap_or_default())
    }

    /// As it was stored; `None` if it cannot be read.
    pub fn decode(value: &[u8]) -> Option<Self> {
        serde_json::from_slice(value).ok()
    }

    /// The command that goes on with it.
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

/// A store refuses, because it is being filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportLocked {
    mark: Option<ImportLock>,
}

impl ImportLocked {
    /// With this under the mark's key.
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
