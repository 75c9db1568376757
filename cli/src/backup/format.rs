//! The lines of a backup file.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The form of files that are written, and the newest that is read.
pub(super) const VERSION: u32 = 1;

/// The longest line that there can be: a key and a value of the greatest length, each byte of them escaped.
pub(super) const MAX_LINE_BYTES: usize = 6 * (kv::MAX_KEY_BYTES + kv::MAX_VALUE_BYTES) + 1024;

/// How the last line begins, and no other.
pub(super) const TRAILER: &str = "{\"keys\":";

/// The first line: what was written, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    /// The version of the form.
    pub(super) margay_backup: u32,
    /// The version of the program.
    margay: String,
    /// The engine that the store was on.
    pub(crate) engine: String,
    /// The store's id, or the cluster's.
    pub(crate) store: String,
    /// The revision of the store.
    pub(crate) revision: i64,
    /// When it was read.
    pub(crate) time: String,
}

impl Header {
    /// Of a file that is written now.
    pub(crate) fn new(engine: &str, store: &str, revision: i64, time: String) -> Self {
        Self {
            margay_backup: VERSION,
            margay: env!("CARGO_PKG_VERSION").to_owned(),
            engine: engine.to_owned(),
            store: store.to_owned(),
            revision,
            time,
        }
    }
}

/// The only member of the first line that every version has.
#[derive(Deserialize)]
pub(super) struct AnyHeader {
    pub(super) margay_backup: u32,
}

/// A line with a key.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value64: Option<String>,
}

impl Row {
    pub(super) fn new(key: &[u8], value: &[u8]) -> Self {
        let spell = |bytes: &[u8]| match str::from_utf8(bytes) {
            Ok(text) => (Some(text.to_owned()), None),
            Err(_) => (None, Some(BASE64.encode(bytes))),
        };
        let ((key, key64), (value, value64)) = (spell(key), spell(value));
        Self { key, key64, value, value64 }
    }

    /// The key and the value; `None` if one of them is there twice, or not at all.
    pub(super) fn read(self) -> Option<(Vec<u8>, Vec<u8>)> {
        let read = |text: Option<String>, base64: Option<String>| match (text, base64) {
            (Some(text), None) => Some(text.into_bytes()),
            (None, Some(base64)) => BASE64.decode(base64).ok(),
            _ => None,
        };
        Some((read(self.key, self.key64)?, read(self.value, self.value64)?))
    }
}

/// A checksum as text.
pub(super) fn hex(sum: Sha256) -> String {
    sum.finalize().iter().fold(String::with_capacity(64), |hex, byte| hex + &format!("{byte:02x}"))
}

/// The last line, with its end.
pub(super) fn trailer(keys: u64, sum: Sha256) -> String {
    format!("{TRAILER}{keys},\"sha256\":\"{}\"}}\n", hex(sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_and_value_can_be_spelled() {
        let all: Vec<u8> = (0..=255).collect();
        for bytes in [&b""[..], b"k", "\u{0}\"\\\n\u{e9}\u{1f600}".as_bytes(), &all, b"\xff"] {
            let line = serde_json::to_string(&Row::new(bytes, bytes)).unwrap();
            assert!(!line.contains('\n') && !line.starts_with(TRAILER), "{line}");
            let row: Row = serde_json::from_str(&line).unwrap();
            assert_eq!(row.read(), Some((bytes.to_vec(), bytes.to_vec())), "{line}");
        }
    }

    #[test]
    fn the_longest_line_has_room() {
        let (key, value) = (vec![1; kv::MAX_KEY_BYTES], vec![1; kv::MAX_VALUE_BYTES]);
        assert!(serde_json::to_string(&Row::new(&key, &value)).unwrap().len() < MAX_LINE_BYTES);
    }

    #[test]
    fn a_row_has_one_key_and_one_value() {
        for line in [
            r#"{"key":"k"}"#,
            r#"{"value":"v"}"#,
            r#"{"key":"k","key64":"aw==","value":""}"#,
            r#"{"key64":"!","value":""}"#,
        ] {
            assert_eq!(serde_json::from_str::<Row>(line).unwrap().read(), None, "{line}");
        }
    }
}
