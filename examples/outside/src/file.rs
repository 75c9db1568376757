//! A table that writes all of its rows anew in each commit: durable, and quick with some thousand rows.

use std::fs::{self, File};
use std::io::{self, ErrorKind as Io, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bincode::config;
use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{Table, View, Write};

use crate::memory::{Rows, Shared, apply};

/// The rows in memory, and a folder with the file that has them, after a checksum.
#[derive(Debug)]
pub struct FileTable {
    folder: PathBuf,
    store: String,
    rows: Shared,
}

impl FileTable {
    /// Opens the table in a folder, or makes it; `store` names it in errors.
    ///
    /// # Errors
    /// `Corrupt`, `Io`, `NoSpace`.
    pub fn open(folder: &Path, store: &str) -> Result<Self> {
        let table = Self { folder: folder.to_owned(), store: store.to_owned(), rows: Shared::default() };
        fs::create_dir_all(folder).map_err(|error| table.failed(Operation::Open, error))?;
        if !table.file().exists() {
            table.write(&Rows::new()).map_err(|error| table.failed(Operation::Open, error))?;
        }
        table.recover()?;
        Ok(table)
    }

    fn file(&self) -> PathBuf {
        self.folder.join("all")
    }

    /// The new rows take the place of the old ones in one step, once they are durable.
    fn write(&self, rows: &Rows) -> io::Result<()> {
        let rows = bincode::encode_to_vec(rows, config::standard()).map_err(io::Error::other)?;
        let draft = self.folder.join("draft");
        let mut file = File::create(&draft)?;
        file.write_all(&crc32fast::hash(&rows).to_le_bytes())?;
        file.write_all(&rows)?;
        file.sync_all()?;
        fs::rename(draft, self.file())?;
        File::open(&self.folder)?.sync_all()
    }

    fn failed(&self, operation: Operation, error: io::Error) -> Error {
        let kind = match error.kind() {
            Io::StorageFull | Io::FileTooLarge | Io::QuotaExceeded => ErrorKind::NoSpace,
            Io::InvalidData => ErrorKind::Corrupt,
            _ if operation == Operation::Txn => ErrorKind::CommitIo,
            _ => ErrorKind::Io,
        };
        Error::new(kind, operation, self.store.clone()).with_source(error)
    }
}

fn decode(bytes: &[u8]) -> Option<Rows> {
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
        let bytes = fs::read(self.file()).map_err(|error| self.failed(Operation::Open, error))?;
        let rows = decode(&bytes).ok_or_else(|| self.failed(Operation::Open, Io::InvalidData.into()))?;
        self.rows.replace(Arc::new(rows));
        Ok(())
    }
}
