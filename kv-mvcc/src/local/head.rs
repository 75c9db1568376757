//! The file `head`: the newest revision that was ever durable.
//!
//! An engine that finds the end of its log or its newest header damaged takes that for a write that was cut off, goes
//! back to what was there before, and says nothing. For it this cannot be told from a crash; but what was acknowledged
//! is gone, and addresses in use would be handed out again. So each commit, once it is durable, leaves its revision
//! here. Nothing waits for this file to be durable: after a power loss it may lag behind the store, never the reverse.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::folder;
use crate::codec::{self, State};
use crate::table::Write;

/// The revision and its CRC-32, both big endian.
const BYTES: usize = 12;

/// The open file.
#[derive(Debug)]
pub(super) struct Head {
    file: File,
    seen: u64,
}

impl Head {
    /// Opens the file, or makes it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = folder::open_or_create(path)?;
        let mut bytes = [0; BYTES];
        let seen = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => decode(bytes),
            // New, or cut off by a power loss.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(error),
        };
        Ok(Self { file, seen })
    }

    /// The newest revision known when the file was opened; 0 if none was.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// Notes the revision of a commit that is durable.
    pub(super) fn note(&self, writes: &[Write]) {
        let state = writes.iter().rev().find_map(|write| match write {
            Write::Put(key, row) if key == codec::STATE_KEY => codec::decode::<State>(key, row).ok(),
            _ => None,
        });
        if let Some(state) = state {
            // Without it damage may go unseen; the commit stands.
            let _ = self.file.write_all_at(&encode(state.revision), 0);
        }
    }
}

fn encode(revision: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let (number, sum) = bytes.split_at_mut(8);
    number.copy_from_slice(&revision.to_be_bytes());
    sum.copy_from_slice(&crc32fast::hash(number).to_be_bytes());
    bytes
}

/// The revision; 0 if the bytes are damaged.
fn decode(bytes: [u8; BYTES]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = bytes;
    let revision = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
    if encode(revision) == bytes { revision } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_the_newest_revision() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("head");
        assert_eq!(Head::open(&path).unwrap().seen(), 0);
        let state = State { revision: 7, ..State::NEW };
        let row = codec::encode(codec::STATE_KEY, &state).unwrap();
        let writes = [Write::Put(b"c".to_vec(), Vec::new()), Write::Put(codec::STATE_KEY.to_vec(), row)];
        Head::open(&path).unwrap().note(&writes);
        assert_eq!(Head::open(&path).unwrap().seen(), 7);
        Head::open(&path).unwrap().note(&writes[..1]);
        assert_eq!(Head::open(&path).unwrap().seen(), 7, "a commit without a state says nothing");
    }

    #[test]
    fn damage_to_it_is_no_revision() {
        let good = encode(7);
        assert_eq!(decode(good), 7);
        for bit in 0..BYTES * 8 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(bytes), 0, "bit {bit}");
        }
        assert_eq!(decode([0; BYTES]), 0);
    }
}
