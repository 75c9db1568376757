//! The file `journal`, which has all its blocks from the beginning: a commit needs no room on the disk as long as it fits in.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::folder;
use super::head::Head;
use kv_mvcc::journal::{JOURNAL_BYTES, Medium, Noted};

/// The open file, and the one beside it in which is noted what is durable.
#[derive(Debug)]
pub(crate) struct JournalFile {
    file: File,
    head: Arc<Head>,
}

impl JournalFile {
    /// Opens the file, or makes it.
    pub(crate) fn open(path: &Path, head: Arc<Head>) -> io::Result<Self> {
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
        Ok(Self { file, head })
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

    fn noted(&self) -> Noted {
        self.head.noted()
    }

    fn note(&self, noted: Noted) {
        self.head.note_journal(noted);
    }
}
