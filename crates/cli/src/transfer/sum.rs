//! Checksums of the contents of a store.

use kv::{Key, Kv, Value};

use crate::digest::Sha256;

/// The SHA-256 of keys and values, each with its length in front.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sum(Sha256);

impl Sum {
    /// The checksum of these documents.
    pub(super) fn of(kvs: &[Kv]) -> Self {
        let mut sum = Self::default();
        kvs.iter().for_each(|kv| sum.add(&kv.key, &kv.value));
        sum
    }

    /// Adds a document.
    pub(super) fn add(&mut self, key: &Key, value: &Value) {
        for bytes in [key.as_bytes(), value.as_bytes()] {
            self.0.update(&(bytes.len() as u64).to_le_bytes());
            self.0.update(bytes);
        }
    }
}

/// The checksum of a part of a store.
#[derive(Debug)]
pub(super) struct PartSum {
    /// Its first key.
    pub(super) from: Key,
    /// The key before which it ends; `None` for the last part.
    pub(super) to: Option<Key>,
    pub(super) sum: Sum,
}
