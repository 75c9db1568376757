//! Defines the format of the files that `margay store backup` writes. A backup file has the keys and values of a store
//! at one revision. A backup file is readable for people, and can be restored to a store of any engine.
//!
//! A backup file consists of lines of JSON. The first line describes the store that was backed up. The first line is
//! followed by one line for each key of the store, in ascending order of the keys. The last line contains the number of
//! keys and the SHA-256 of all preceding lines. For example:
//!
//! ```text
//! {"margay_backup":1,"margay":"0.1.0","engine":"redb","store":"3526f154-...","revision":7,"time":"2026-11-21T16:25:03Z"}
//! {"key":"/calico/ipam/v2/config","value":"{\"strictAffinity\":false}"}
//! {"keys":1,"sha256":"9f86d0818..."}
//! ```
//!
//! If the store's format supports leases, the first line of the backup file has the leases (`"margay_backup":2`,
//! `"leases":[{"id":7,"ttl":60}]`). If a key is attached to a lease, the key's line has the number of this lease
//! (`"lease":7`).
//!
//! A key or a value that is not valid UTF-8 is written in base64, in the field `key64` or `value64`. A backup file
//! without its last line is refused, so that a truncated file is never restored as if it were complete.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use kv::LeaseId;
use serde::{Deserialize, Serialize};

use super::{Row, StoreIdentity};
use crate::digest::Sha256;

/// The format version of backup files from stores without leases.
const VERSION: u32 = 1;
/// The newest format version of backup files, for stores with leases. In format version 2, the first line has the field
/// `leases`, and the lines of keys may have the field `lease`.
pub(super) const VERSION_WITH_LEASES: u32 = 2;

/// Maximum length in bytes of a line in a backup file: a key and a value of maximum length, every byte of which is
/// escaped.
pub(super) const MAX_LINE_BYTES: usize = 6 * (kv::MAX_KEY_BYTES + kv::MAX_VALUE_BYTES) + 1024;

/// The characters with which the last line of a backup file starts. No other line of a backup file starts with
/// `TRAILER`.
pub(super) const TRAILER: &str = "{\"keys\":";

/// The first line of a backup file, which describes the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupHeader {
    /// The format version of the backup file.
    pub(super) margay_backup: u32,
    /// The version of margay by which the backup file was written.
    margay: String,
    /// The engine of the backed-up store, or `etcd`.
    pub(crate) engine: String,
    /// The id of the backed-up store or cluster.
    pub(crate) store: String,
    pub(crate) revision: i64,
    /// The time at which the store was read.
    pub(crate) time: String,
    /// The leases of the backed-up store, or `None` if the store's format does not support leases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leases: Option<Vec<BackupLease>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupLease {
    /// The number of the lease, which must not be 0.
    id: i64,
    /// The time to live with which the lease was granted, in seconds.
    ttl: u64,
}

impl From<kv::Lease> for BackupLease {
    fn from(lease: kv::Lease) -> Self {
        Self { id: lease.id.get(), ttl: lease.ttl.as_secs() }
    }
}

impl BackupLease {
    /// Converts the lease of a backup file to a store's lease. Returns `None` if the lease's number or time to live is
    /// not allowed.
    pub(crate) fn read(self) -> Option<kv::Lease> {
        let ttl = Some(Duration::from_secs(self.ttl)).filter(|ttl| *ttl <= kv::Lease::MAX_TTL)?;
        Some(kv::Lease { id: LeaseId::new(self.id)?, ttl })
    }
}

impl BackupHeader {
    /// Creates the first line of a new backup file from the identity of the store.
    pub(crate) fn new(identity: &StoreIdentity, revision: i64, time: String) -> Self {
        let StoreIdentity { engine, id, leases } = identity;
        let leases = leases.as_ref().map(|leases| leases.iter().copied().map(BackupLease::from).collect());
        Self {
            margay_backup: if leases.is_some() { VERSION_WITH_LEASES } else { VERSION },
            margay: env!("CARGO_PKG_VERSION").to_owned(),
            engine: (*engine).to_owned(),
            store: id.clone(),
            revision,
            time,
            leases,
        }
    }
}

/// The fields of a backup file's first line that exist in all format versions.
#[derive(Deserialize)]
pub(super) struct BackupVersion {
    pub(super) margay_backup: u32,
}

/// A line of a backup file with one key and its value.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BackupLine {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value64: Option<String>,
    /// The number of the lease to which the key is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease: Option<i64>,
}

impl BackupLine {
    pub(super) fn new(key: &[u8], value: &[u8], lease: Option<LeaseId>) -> Self {
        let spell = |bytes: &[u8]| match str::from_utf8(bytes) {
            Ok(text) => (Some(text.to_owned()), None),
            Err(_) => (None, Some(BASE64.encode(bytes))),
        };
        let ((key, key64), (value, value64)) = (spell(key), spell(value));
        Self { key, key64, value, value64, lease: lease.map(LeaseId::get) }
    }

    /// Converts a line of a backup file to a row. Returns `None` unless the line has exactly one key and exactly one
    /// value.
    pub(super) fn read(self) -> Option<Row> {
        let read = |text: Option<String>, base64: Option<String>| match (text, base64) {
            (Some(text), None) => Some(text.into_bytes()),
            (None, Some(base64)) => BASE64.decode(base64).ok(),
            _ => None,
        };
        let (key, value) = (read(self.key, self.key64)?, read(self.value, self.value64)?);
        Some(Row { key: key.into(), value: value.into(), lease: self.lease.and_then(LeaseId::new) })
    }
}

/// Returns the last line of a backup file, with its line break.
pub(super) fn trailer(keys: u64, sum: &Sha256) -> String {
    format!("{TRAILER}{keys},\"sha256\":\"{}\"}}\n", sum.hex())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_can_spell_every_key_and_value() {
        let all: Vec<u8> = (0..=255).collect();
        for bytes in [&b""[..], b"k", "\u{0}\"\\\n\u{e9}\u{1f600}".as_bytes(), &all, b"\xff"] {
            for lease in [None, LeaseId::new(i64::MIN)] {
                let line = serde_json::to_string(&BackupLine::new(bytes, bytes, lease)).unwrap();
                assert!(!line.contains('\n') && !line.starts_with(TRAILER), "{line}");
                let row: BackupLine = serde_json::from_str(&line).unwrap();
                assert_eq!(
                    row.read(),
                    Some(Row { key: bytes.to_vec().into(), value: bytes.to_vec().into(), lease }),
                    "{line}"
                );
            }
        }
    }

    #[test]
    fn line_limit_has_room_for_longest_key_and_value() {
        let (key, value) = (vec![1; kv::MAX_KEY_BYTES], vec![1; kv::MAX_VALUE_BYTES]);
        assert!(
            serde_json::to_string(&BackupLine::new(&key, &value, LeaseId::new(i64::MIN))).unwrap().len()
                < MAX_LINE_BYTES
        );
    }

    #[test]
    fn line_has_one_key_and_one_value() {
        for line in [
            r#"{"key":"k"}"#,
            r#"{"value":"v"}"#,
            r#"{"key":"k","key64":"aw==","value":""}"#,
            r#"{"key64":"!","value":""}"#,
        ] {
            assert_eq!(serde_json::from_str::<BackupLine>(line).unwrap().read(), None, "{line}");
        }
    }
}
