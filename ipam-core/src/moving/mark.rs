//! The mark on a store that is being filled.

use std::fmt;

use kv::Value;
use serde::{Deserialize, Serialize};

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
pub enum State {
    /// Something may still be missing.
    Copying,
    /// All of one revision is there, and was compared.
    Copied,
    /// The written keys are being removed again.
    Removing,
}

/// The mark: that a store is being filled, from where, and how to end it. JSON under [`mark_key`](super::mark_key).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The kind of its source.
    pub way: MoveKind,
    /// The source, as one writes it on a command line: a URL or a file.
    pub from: String,
    /// The store itself, as one writes it on a command line.
    pub to: String,
    /// The identity of this source: the id of a store, or the checksum of a file and the changes to it.
    pub source: String,
    /// How far it has come.
    pub state: State,
    /// The revision of the source that was copied last; 0 before that.
    pub revision: i64,
}

impl Mark {
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
            (MoveKind::Import, State::Removing) => format!("margay import {from} --abort --store {to}"),
            (MoveKind::Import, _) => format!("margay import {from} --store {to}"),
            (MoveKind::Migrate, State::Copying) => format!("margay migrate {from} {to}"),
            (MoveKind::Migrate, State::Copied) => format!("margay migrate {from} {to} --finish"),
            (MoveKind::Migrate, State::Removing) => format!("margay migrate {from} {to} --abort"),
        }
    }
}

/// A store refuses, because it is being filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filling {
    mark: Option<Mark>,
}

impl Filling {
    /// With this under the mark's key.
    pub fn new(value: &[u8]) -> Self {
        Self { mark: Mark::decode(value) }
    }
}

impl fmt::Display for Filling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.mark {
            Some(Mark { way: MoveKind::Import, .. }) => "an import",
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
    fn it_says_how_to_go_on() {
        let mut mark = Mark {
            way: MoveKind::Migrate,
            from: "sled:///a".into(),
            to: "redb:///b".into(),
            source: "id".into(),
            state: State::Copied,
            revision: 7,
        };
        assert_eq!(Mark::decode(mark.encode().as_bytes()), Some(mark.clone()));
        let said = Filling::new(mark.encode().as_bytes()).to_string();
        assert!(said.contains("a migration that is not finished"), "{said}");
        assert!(said.ends_with("margay migrate sled:///a redb:///b --finish"), "{said}");
        mark.way = MoveKind::Import;
        assert!(Filling::new(mark.encode().as_bytes()).to_string().contains("margay import sled:///a"));
        assert!(Filling::new(b"?").to_string().contains("with the version of margay that began it"));
    }
}
