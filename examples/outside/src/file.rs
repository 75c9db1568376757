//! Implements a table of rows that writes all its rows in each commit. Commits to this table are durable, and fast for
//! up to some thousand rows. During a commit to this table, the disk must have space for a second copy of the rows.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bincode::config;
use kv::{Error, Operation, Result};
use kv_mvcc::{Table, View, Write, io_kind};

use crate::memory::{RowMap, Shared, apply};

/// A table that keeps its rows both in memory and in a file. The file of a `FileTable` contains the rows and their
/// checksum.
#[derive(Debug)]
pub struct FileTable {
    folder: PathBuf,
    store: String,
    rows: Shared,
}

impl FileTable {
    /// Opens the table in a folder, and creates the folder and the table's file if they are missing. The argument
    /// `store` is the store's name in error messages.
    ///
    /// # Errors
    /// An error of the kind `Corrupt`, `Io` or `NoSpace`.
    pub fn open(folder: &Path, store: &str) -> Result<Self> {
        let table = Self { folder: folder.to_owned(), store: store.to_owned(), rows: Shared::default() };
        table.make_if_missing().map_err(|error| table.failed(Operation::Open, error))?;
        table.recover()?;
        Ok(table)
    }

    fn make_if_missing(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        // Create a new file only if the table's file certainly does not exist, because rows on an unreadable disk must
        // not be lost.
        if fs::exists(self.file())? { Ok(()) } else { self.write(&RowMap::new()) }
    }

    fn file(&self) -> PathBuf {
        self.folder.join("all")
    }

    /// Writes all rows to a draft file, and then renames this draft to the table's file.
    fn write(&self, rows: &RowMap) -> io::Result<()> {
        let rows = bincode::encode_to_vec(rows, config::standard()).map_err(io::Error::other)?;
        let draft = self.folder.join("draft");
        let placed = write_synced(&draft, &rows).and_then(|()| fs::rename(&draft, self.file()));
        // If the disk is full, remove the draft file, which would occupy the space that the next commit needs.
        placed.inspect_err(|_| drop(fs::remove_file(&draft)))?;
        self.sync_folder()
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }

    fn read(&self) -> io::Result<RowMap> {
        // The previous commit may have failed after it renamed the draft file and before it synced the folder. Sync the
        // folder before reading the table's file, so that readers see only durable rows.
        self.sync_folder()?;
        decode(&fs::read(self.file())?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn failed(&self, operation: Operation, error: io::Error) -> Error {
        Error::new(io_kind(operation, &error), operation, self.store.clone()).with_source(error)
    }
}

fn write_synced(path: &Path, rows: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(&crc32fast::hash(rows).to_le_bytes())?;
    file.write_all(rows)?;
    file.sync_all()
}

fn decode(bytes: &[u8]) -> Option<RowMap> {
    let (checksum, rows) = bytes.split_first_chunk()?;
    let whole = crc32fast::hash(rows) == u32::from_le_bytes(*checksum);
    whole.then(|| bincode::decode_from_slice(rows, config::standard()).ok())?.map(|(rows, _)| rows)
}

impl Table for FileTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        self.rows.view()
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let mut rows = self.rows.now();
        apply(writes, Arc::make_mut(&mut rows));
        self.write(&rows).map_err(|error| self.failed(Operation::Txn, error))?;
        self.rows.replace(rows);
        Ok(())
    }

    fn recover(&self) -> Result<()> {
        let rows = self.read().map_err(|error| self.failed(Operation::Open, error))?;
        self.rows.replace(Arc::new(rows));
        Ok(())
    }
}
