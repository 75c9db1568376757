//! The content of a file: what is durable, what programs see, and the changes in between.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::luck::Luck;

/// A disk writes a sector as a whole or not at all.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
enum Change {
    Length(usize),
    /// Within the length.
    Write {
        at: usize,
        bytes: Vec<u8>,
    },
}

/// The content of a file.
#[derive(Debug, Default)]
pub(crate) struct File {
    durable: Vec<u8>,
    seen: Vec<u8>,
    changes: Vec<Change>,
}

impl File {
    /// A file that was synced.
    pub(crate) fn durable(content: Vec<u8>) -> Self {
        Self { durable: content.clone(), seen: content, changes: Vec::new() }
    }

    /// The content that programs see.
    pub(crate) fn content(&self) -> &[u8] {
        &self.seen
    }

    /// True if something is not durable yet.
    pub(crate) fn is_unsynced(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(crate) fn set_length(&mut self, length: usize) {
        if length != self.seen.len() {
            self.seen.resize(length, 0);
            self.changes.push(Change::Length(length));
        }
    }

    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        self.set_length(self.seen.len().max(end));
        self.seen[at..end].copy_from_slice(bytes);
        self.changes.push(Change::Write { at, bytes: bytes.to_vec() });
    }

    /// Makes durable what programs see.
    pub(crate) fn sync(&mut self) {
        for change in self.changes.drain(..) {
            match change {
                Change::Length(length) => self.durable.resize(length, 0),
                Change::Write { at, bytes } => self.durable[at..at + bytes.len()].copy_from_slice(&bytes),
            }
        }
    }

    /// The content that a power cut leaves.
    pub(crate) fn after_cut(&self, luck: &mut Luck) -> Vec<u8> {
        let lengths = self.changes.iter().filter(|change| matches!(change, Change::Length(_))).count();
        let mut lengths = luck.of_length(lengths);
        let mut writes: BTreeMap<usize, usize> = BTreeMap::new();
        for change in &self.changes {
            if let Change::Write { at, bytes } = change {
                pieces(*at, bytes.len()).for_each(|piece| *writes.entry(piece.start / SECTOR).or_default() += 1);
            }
        }
        writes.values_mut().for_each(|count| *count = luck.of_sector(*count));
        let mut left = self.durable.clone();
        for change in &self.changes {
            match change {
                Change::Length(length) if lengths > 0 => {
                    lengths -= 1;
                    left.resize(*length, 0);
                }
                Change::Length(_) => {}
                Change::Write { at, bytes } => {
                    for piece in pieces(*at, bytes.len()) {
                        let Some(count) = writes.get_mut(&(piece.start / SECTOR)).filter(|count| **count > 0) else {
                            continue;
                        };
                        *count -= 1;
                        let end = piece.end.min(left.len());
                        if piece.start < end {
                            left[piece.start..end].copy_from_slice(&bytes[piece.start - at..end - at]);
                        }
                    }
                }
            }
        }
        left
    }
}

/// The parts of a write that are in one sector each.
fn pieces(at: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
    let end = at + length;
    let mut from = at;
    std::iter::from_fn(move || {
        let piece = from..end.min((from / SECTOR + 1) * SECTOR);
        from = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
