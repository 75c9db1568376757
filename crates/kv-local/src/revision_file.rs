//! Reads and writes the file `head` of a store's folder, and opens the file `journal`.
//!
//! The file `head` records the newest revision that was ever durable, and a fingerprint of the store's files at their
//! last close. The file `head` also records which parts of the journal are known to be durable.
//!
//! An engine that finds the end of its log or its newest header damaged assumes that a crash interrupted a write, and
//! silently opens an earlier state of the store. If the engine lost acknowledged commits, addresses that workloads use
//! would be assigned again. To detect lost commits, the revision of each durable commit is recorded in the file `head`,
//! without waiting until `head` is durable. After a power loss, `head` may be behind the store, but never ahead of it.
//!
//! A process that closes the store also records a fingerprint in `head`, computed from the inode numbers, sizes and
//! change times of the store's files. A process that opens the store detects from the fingerprint whether the files
//! were changed after the last close, for example by a copy, a repair, or a killed process. Opening a store checks all
//! keys only if the store's files have changed since the last clean close.
//!
//! Two entries of `head` say which journal records and which checkpoints of the engine are known to be durable (see
//! [`kv_mvcc::journal`]). All blocks of the file `journal` are allocated when the file is created, so a commit that
//! fits into the journal needs no more disk space.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_mvcc::Write;
use kv_mvcc::journal::{DurableParts, JOURNAL_BYTES, Medium};

use super::folder;

/// The size in bytes of one entry of the file `head`: a number and its CRC-32, both big endian. The file `head` has
/// four entries: the newest revision, the [`fingerprint`] at the last close, the number of a journal record, and the
/// number of a checkpoint.
const NOTE_BYTES: usize = 12;
const LEFT_AT: u64 = 12;
const RECORD_AT: u64 = 24;
const CHECKPOINT_AT: u64 = 36;

#[derive(Debug)]
pub(crate) struct RevisionFile {
    file: File,
    seen: u64,
    files: Vec<PathBuf>,
    /// True if the store was opened without damage and no commit has failed since.
    in_order: AtomicBool,
}

impl RevisionFile {
    /// Opens or creates the file `head`. `files` lists the paths that the fingerprint covers: the engine's files and
    /// the journal.
    pub(crate) fn open(path: &Path, files: Vec<PathBuf>) -> io::Result<Self> {
        let file = folder::open_or_create(path)?;
        let seen = read(&file, 0)?;
        Ok(Self { file, seen, files, in_order: AtomicBool::new(false) })
    }

    /// Returns true if the store's files have not changed since the last clean close. The caller must call `is_as_left`
    /// before the engine opens its files.
    pub(crate) fn is_as_left(&self) -> bool {
        let left = read(&self.file, LEFT_AT).unwrap_or_default();
        left != 0 && fingerprint(&self.files).is_ok_and(|now| now == left)
    }

    /// Notes that the store was opened without finding damage, so that closing the store records a fingerprint.
    pub(crate) fn set_in_order(&self) {
        self.in_order.store(true, Ordering::Release);
    }

    /// Notes that a failed commit may be durable nevertheless, so that closing the store records no fingerprint.
    pub(crate) fn set_in_doubt(&self) {
        self.in_order.store(false, Ordering::Release);
    }

    /// Records the fingerprint of the store's files in the file `head`. The caller must call `close_cleanly` after the
    /// engine has closed its files.
    pub(crate) fn close_cleanly(&self) {
        if !self.in_order.load(Ordering::Acquire) {
            return;
        }
        if let Ok(now) = fingerprint(&self.files) {
            // If writing to `head` fails, the only effect is that the next opening of the store takes longer.
            let _ = self.file.write_all_at(&encode(now), LEFT_AT);
        }
    }

    /// The newest revision that `head` recorded when it was opened; 0 if it recorded none.
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    /// The record number and the checkpoint number that the file `head` records as durable.
    pub(crate) fn noted(&self) -> DurableParts {
        let number = |at| read(&self.file, at).unwrap_or_default();
        DurableParts { record: number(RECORD_AT), checkpoint: number(CHECKPOINT_AT) }
    }

    fn note_journal(&self, noted: DurableParts) {
        let bytes = [encode(noted.record), encode(noted.checkpoint)].concat();
        // If writing to `head` fails, the only effect is that the next opening of the store takes longer.
        let _ = self.file.write_all_at(&bytes, RECORD_AT);
    }

    pub(crate) fn note(&self, writes: &[Write]) {
        if let Some(revision) = kv_mvcc::revision_of(writes) {
            // A failed write to `head` does not affect the commit; only later damage of the store may go unnoticed.
            let _ = self.file.write_all_at(&encode(revision), 0);
        }
    }
}

/// Returns a fingerprint of the store's files: a number that changes whenever any of them is written, replaced or
/// renamed.
fn fingerprint(files: &[PathBuf]) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        match fs::metadata(file) {
            Ok(found) => (found.ino(), found.size(), found.ctime(), found.ctime_nsec()).hash(&mut hasher),
            // Not every store has all of the files in `files`.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hasher.finish())
}

/// Reads the newest revision that the file `head` at `path` records; 0 if it records none.
pub(crate) fn newest(path: &Path) -> io::Result<u64> {
    read(&File::open(path)?, 0)
}

/// Reads the number at offset `at` of the file `head`; 0 if the entry is missing or damaged.
fn read(file: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; NOTE_BYTES];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => Ok(decode(bytes)),
        // The file `head` is new, or a power loss truncated it.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        Err(error) => Err(error),
    }
}

fn encode(number: u64) -> [u8; NOTE_BYTES] {
    let mut bytes = [0; NOTE_BYTES];
    let (first, sum) = bytes.split_at_mut(8);
    first.copy_from_slice(&number.to_be_bytes());
    sum.copy_from_slice(&crc32fast::hash(first).to_be_bytes());
    bytes
}

/// Decodes an entry of the file `head`; 0 if the entry is damaged.
fn decode(bytes: [u8; NOTE_BYTES]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = bytes;
    let number = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
    if encode(number) == bytes { number } else { 0 }
}

/// The open file `journal` of a store's folder. The file `head` records which parts of the journal are durable.
#[derive(Debug)]
pub(crate) struct JournalFile {
    file: File,
    revision_file: Arc<RevisionFile>,
}

impl JournalFile {
    /// Opens or creates the file `journal`, and extends a short file to its full size by writing all missing blocks.
    pub(crate) fn open(path: &Path, revision_file: Arc<RevisionFile>) -> io::Result<Self> {
        let file = folder::open_or_create(path)?;
        let length = file.metadata()?.len();
        if length < JOURNAL_BYTES {
            // Writes zeros instead of only allocating blocks: the first sync after a write to an unwritten block also
            // syncs the file system's metadata.
            let missing = usize::try_from(JOURNAL_BYTES - length).unwrap_or(usize::MAX);
            let filled = file.write_all_at(&vec![0; missing], length).and_then(|()| file.sync_all());
            if let Err(error) = filled {
                // Cuts the file `journal` back to its old length after it could be extended only in part. If a partly
                // extended file cannot be cut back, the next opening of the store completes the extension.
                let _ = file.set_len(length);
                return Err(error);
            }
            folder::sync(path.parent().unwrap_or(path))?;
        }
        Ok(Self { file, revision_file })
    }
}

impl Medium for JournalFile {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while read < buffer.len() {
            match self.file.read_at(&mut buffer[read..], offset + read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn noted(&self) -> DurableParts {
        self.revision_file.noted()
    }

    fn note(&self, noted: DurableParts) {
        self.revision_file.note_journal(noted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> RevisionFile {
        RevisionFile::open(path, vec![path.with_extension("db")]).unwrap()
    }

    fn close_cleanly(path: &Path) {
        let revision_file = open(path);
        revision_file.set_in_order();
        revision_file.close_cleanly();
    }

    #[test]
    fn revision_file_tells_whether_files_were_changed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, db) = (folder.path().join("head"), folder.path().join("head.db"));
        assert!(!open(&path).is_as_left(), "there is no file");
        fs::write(&db, "one").unwrap();
        assert!(!open(&path).is_as_left(), "it was not closed cleanly yet");
        open(&path).close_cleanly();
        assert!(!open(&path).is_as_left(), "it was not in order before it was closed");
        close_cleanly(&path);
        assert!(open(&path).is_as_left());
        // Setting a file's modification time changes its fingerprint, even if the new time equals the old one.
        let time = fs::metadata(&db).unwrap().modified().unwrap();
        // The kernel advances its clock for file times in steps of several milliseconds, so the test waits for the next
        // step.
        std::thread::sleep(std::time::Duration::from_millis(20));
        File::options().write(true).open(&db).unwrap().set_modified(time).unwrap();
        assert!(!open(&path).is_as_left());
        close_cleanly(&path);
        fs::copy(&db, folder.path().join("copy")).unwrap();
        fs::rename(folder.path().join("copy"), &db).unwrap();
        assert!(!open(&path).is_as_left(), "another file");
    }

    fn rows_at_revision_7() -> Vec<Write> {
        let table = kv_mvcc::MemoryTable::new();
        let store = kv_mvcc::MvccStore::open(Box::new(table.clone()), kv_mvcc::Options::default()).unwrap();
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            for _ in 0..6 {
                kv::StoreExt::put(&store, "k", "v").await.unwrap();
            }
        });
        let mut rows = Vec::new();
        let table: &dyn kv_mvcc::Table = &table;
        let view = table.view().unwrap();
        view.scan(&[], &[u8::MAX], &mut |key, value| {
            rows.push(Write::Put(key.to_vec(), value.to_vec()));
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        rows
    }

    #[test]
    fn revision_file_keeps_newest_revision() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("head");
        assert_eq!(open(&path).seen(), 0);
        let rows = rows_at_revision_7();
        let (stateless, writes): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|row| kv_mvcc::revision_of(std::slice::from_ref(row)).is_none());
        open(&path).note(&writes);
        assert_eq!((open(&path).seen(), newest(&path).unwrap()), (7, 7));
        assert!(!stateless.is_empty());
        open(&path).note(&stateless);
        assert_eq!(open(&path).seen(), 7, "a commit without a state says nothing");
    }

    #[test]
    fn revision_file_has_no_revision_when_damaged() {
        let good = encode(7);
        assert_eq!(decode(good), 7);
        for bit in 0..NOTE_BYTES * 8 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(bytes), 0, "bit {bit}");
        }
        assert_eq!(decode([0; NOTE_BYTES]), 0);
    }
}
