//! Gives this repository's fuzzers access to the row encoding. The module `fuzzing` is not a public interface and may
//! change at any time.

use std::fmt::Debug;

use crate::codec::{self, LeaseRow, LogRow, Pointer, Row, StateRow};

/// Encodes a row with the key `key`, arbitrary content and a correct checksum.
pub fn seal(key: &[u8], payload: &[u8]) -> Vec<u8> {
    codec::seal(key, payload)
}

/// Checks the checksum of a row and returns its content; `None` if the row is damaged.
pub fn unseal<'r>(key: &[u8], row: &'r [u8]) -> Option<&'r [u8]> {
    codec::unseal(key, row).ok()
}

/// Decodes `row` once as each kind of row, to find panics of the decoder.
///
/// # Panics
/// Panics if the decoded content of a row changes when it is encoded and decoded again.
pub fn check_row(key: &[u8], row: &[u8]) {
    round_trip::<Pointer>(key, row);
    round_trip::<LogRow>(key, row);
    round_trip::<StateRow>(key, row);
    round_trip::<LeaseRow>(key, row);
    if let Ok(place) = codec::log_place(key) {
        assert_eq!(codec::log_key(place), key);
    }
    if let Ok(format) = codec::decode_format(row) {
        assert_eq!(codec::decode_format(&codec::encode_format(format)), Ok(format));
    }
    if let Ok(id) = codec::decode_id(row) {
        assert_eq!(codec::decode_id(&codec::encode_id(id)), Ok(id));
    }
}

fn round_trip<T: Row + PartialEq + Debug>(key: &[u8], row: &[u8]) {
    if let Ok(what) = codec::decode::<T>(key, row) {
        let again = codec::encode(key, &what).and_then(|row| codec::decode::<T>(key, &row));
        assert_eq!(again, Ok(what));
    }
}
