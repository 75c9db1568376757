//! Provides shorthand functions for keys, entries and parts of answers in conformance cases.

use kv::{Key, Kv, OpResult, Range, RangeResponse, Revision, TxnResponse, Value};

use crate::expect::{Checked, Failure, same};

/// Formats a key or value as a string; bytes that are not printable ASCII are escaped.
pub(crate) fn text(value: &Value) -> String {
    value.as_bytes().escape_ascii().to_string()
}

/// The key range from `from` (inclusive) to `to` (exclusive).
pub(crate) fn span(from: &str, to: &str) -> Range {
    Range::FromTo(from.into(), to.into())
}

/// The revision that is `steps` revisions after `revision`.
pub(crate) fn after(revision: Revision, steps: i64) -> Revision {
    Revision::new(revision.get() + steps)
}

pub(crate) fn entry(key: &str, value: &str, create: Revision, modified: Revision, version: i64) -> Kv {
    Kv {
        key: Key::from(key),
        value: value.into(),
        create_revision: create,
        mod_revision: modified,
        version,
        lease: None,
    }
}

/// Returns the answer of the read at index `place` in a transaction's results.
#[track_caller]
pub(crate) fn read_result(answer: &TxnResponse, place: usize) -> Checked<&RangeResponse> {
    match answer.results.get(place) {
        Some(OpResult::Range(found)) => Ok(found),
        other => Err(Failure::new(format!("result {place} of a transaction"), "that of a read", format!("{other:?}"))),
    }
}

/// Returns what the delete at index `place` of a transaction reported: the number of deleted keys and their previous
/// entries.
#[track_caller]
pub(crate) fn delete_result(answer: &TxnResponse, place: usize) -> Checked<(u64, &[Kv])> {
    match answer.results.get(place) {
        Some(OpResult::Delete { count, prevs }) => Ok((*count, prevs)),
        other => {
            Err(Failure::new(format!("result {place} of a transaction"), "that of a delete", format!("{other:?}")))
        }
    }
}

/// Returns the previous entry that the put at index `place` of a transaction reported.
#[track_caller]
pub(crate) fn put_result(answer: &TxnResponse, place: usize) -> Checked<Option<&Kv>> {
    match answer.results.get(place) {
        Some(OpResult::Put { prev }) => Ok(prev.as_ref()),
        other => Err(Failure::new(format!("result {place} of a transaction"), "that of a put", format!("{other:?}"))),
    }
}

/// Checks that a transaction ran the expected branch (success or failure).
#[track_caller]
pub(crate) fn took(checked: &str, answer: &TxnResponse, succeeded: Branch) -> Checked {
    let branch = if answer.succeeded { Branch::Success } else { Branch::Failure };
    same(checked, branch, succeeded)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Branch {
    Success,
    Failure,
}
