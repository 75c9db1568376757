//! The files `revision_file` and `journal`.
//!
//! The file `revision_file` has the newest revision that was ever durable, how the store's files looked when they were left, and how
//! much of them is known to be durable.
//!
//! An engine that finds the end of its log or its newest header damaged takes that for a write that was cut off, goes
//! back to what was there before, and says nothing. The engine cannot distinguish this from a crash; but what was
//! acknowledged is gone, and addresses in use would be handed out again. So each commit, once it is durable, leaves its
//! revision here. Nothing waits for this file to be durable: after a power loss it may lag behind the store, never the
//! reverse.
//!
//! A process that closes the store also notes the sizes and times of its files here. So the next one knows whether they were
//! touched since: a copy, a repair, a process that was killed. Only then it checks all keys again.
//!
//! The note about the journal says which of its records, and of the engine's checkpoints, are known to be on the disk;
//! see [`kv_mvcc::journal`]. The file `journal` has all its blocks from the beginning: a commit needs no room on the disk as long as
//! it fits in.

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

/// A number and its CRC-32, both big endian. The file has four: the revision, what [`fingerprint`] gave when it was left, and
/// the numbers of a record and a checkpoint.
const NOTE_BYTES: usize = 12;
const LEFT_AT: u64 = 12;
const RECORD_AT: u64 = 24;
const CHECKPOINT_AT: u64 = 36;

/// The open file.
#[derive(Debug)]
pub(crate) struct RevisionFile {
    file: File,
    seen: u64,
    files: Vec<PathBuf>,
    /// Whether the store was opened and found in order.
    in_order: AtomicBool,
}

impl RevisionFile {
    /// Opens the file, or makes it. `files` are the engine's and the journal.
    pub(crate) fn open(path: &Path, files: Vec<PathBuf>) -> io::Result<Self> {
        let file = folder::open_or_create(path)?;
        let seen = read(&file, 0)?;
        Ok(Self { file, seen, files, in_order: AtomicBool::new(false) })
    }

    /// True if nobody has touched the store's files since it was closed last. Ask before the engine opens them.
    pub(crate) fn is_as_left(&self) -> bool {
        let left = read(&self.file, LEFT_AT).unwrap_or_default();
        left != 0 && fingerprint(&self.files).is_ok_and(|now| now == left)
    }

    /// Says that the store was opened and found in order. Until then nothing is noted when it is left.
    pub(crate) fn set_in_order(&self) {
        self.in_order.store(true, Ordering::Release);
    }

    /// Says that a commit has failed, and may have happened all the same.
    pub(crate) fn set_in_doubt(&self) {
        self.in_order.store(false, Ordering::Release);
    }

    /// Notes how the store's files look. To be called when the engine has closed them.
    pub(crate) fn close_cleanly(&self) {
        if !self.in_order.load(Ordering::Acquire) {
            return;
        }
        if let Ok(now) = fingerprint(&self.files) {
            // Without it the next opening takes longer.
            let _ = self.file.write_all_at(&encode(now), LEFT_AT);
        }
    }

    /// The newest revision known when the file was opened; 0 if none was.
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    /// The durable parts of the journal, as noted here.
    pub(crate) fn noted(&self) -> DurableParts {
        let number = |at| read(&self.file, at).unwrap_or_default();
        DurableParts { record: number(RECORD_AT), checkpoint: number(CHECKPOINT_AT) }
    }

    /// Notes what is durable of the journal.
    fn note_journal(&self, noted: DurableParts) {
        let bytes = [encode(noted.record), encode(noted.checkpoint)].concat();
        // Without it the next opening takes longer.
        let _ = self.file.write_all_at(&bytes, RECORD_AT);
    }

    /// Notes the revision of a commit that is durable.
    pub(crate) fn note(&self, writes: &[Write]) {
        if let Some(revision) = kv_mvcc::revision_of(writes) {
            // Without it damage may go unseen; the commit stands.
            let _ = self.file.write_all_at(&encode(revision), 0);
        }
    }
}

/// One number that is another one as soon as a file has been written, replaced or renamed.
fn fingerprint(files: &[PathBuf]) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        match fs::metadata(file) {
            Ok(found) => (found.ino(), found.size(), found.ctime(), found.ctime_nsec()).hash(&mut hasher),
            // Not every store has every file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hasher.finish())
}

/// The newest revision that a file tells of; 0 if it tells of none.
pub(crate) fn newest(path: &Path) -> io::Result<u64> {
    read(&File::open(path)?, 0)
}

/// The number that stands there; 0 if there is none.
fn read(file: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; NOTE_BYTES];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => Ok(decode(bytes)),
        // New, or cut off by a power loss.
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

/// The number; 0 if the bytes are damaged.
fn decode(bytes: [u8; NOTE_BYTES]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = bytes;
    let number = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
    if encode(number) == bytes { number } else { 0 }
}

/// The open file, and the one beside it in which is noted what is durable.
#[derive(Debug)]
pub(crate) struct JournalFile {
    file: File,
    revision_file: Arc<RevisionFile>,
}

impl JournalFile {
    /// Opens the file, or makes it.
    pub(crate) fn open(path: &Path, revision_file: Arc<RevisionFile>) -> io::Result<Self> {
        let file = folder::open_or_create(path)?;
        let length = file.metadata()?.len();
        if length < JOURNAL_BYTES {
            // Written, not just allocated: a sync of blocks that were never written has to sync the file system's own, too.
            let missing = usize::try_from(JOURNAL_BYTES - length).unwrap_or(usize::MAX);
            let filled = file.write_all_at(&vec![0; missing], length).and_then(|()| file.sync_all());
            if let Err(error) = filled {
                // A short file is filled the next time.
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
        assert!(!open(&path).is_as_left(), "nobody has left it yet");
        open(&path).close_cleanly();
        assert!(!open(&path).is_as_left(), "whoever left it did not find it in order");
        close_cleanly(&path);
        assert!(open(&path).is_as_left());
        // Changing a file's time is enough, whatever it is changed to; the content is the same.
        let time = fs::metadata(&db).unwrap().modified().unwrap();
        // The kernel's clock for files goes in steps of some milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(20));
        File::options().write(true).open(&db).unwrap().set_modified(time).unwrap();
        assert!(!open(&path).is_as_left());
        close_cleanly(&path);
        fs::copy(&db, folder.path().join("copy")).unwrap();
        fs::rename(folder.path().join("copy"), &db).unwrap();
        assert!(!open(&path).is_as_left(), "another file");
    }

    /// The rows of a store after six puts.
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
