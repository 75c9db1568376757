//! Stores ordered rows in one table of redb.

use std::fmt;
use std::fs::OpenOptions;
use std::ops::ControlFlow;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{Table, View, Visit, Write};
use redb::backends::FileBackend;
use redb::{Builder, Database, ReadOnlyTable, ReadableDatabase, StorageBackend, TableDefinition, TableError};

use crate::error::from_redb;
use crate::file::{DbFile, FileSwitch};

const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("rows");

/// The size of redb's page cache, in bytes. A small cache is enough for a plugin process, which reads few pages. With a
/// cache of 16 MiB, a check of 10,000 blocks reads the file 18,000 times instead of 23,000 times, and a daemon uses 12
/// MiB more memory.
const CACHE_BYTES: usize = 4 * 1024 * 1024;

/// A function that opens the storage of a table, called each time that the table is opened.
type StorageSource<B> = Box<dyn Fn() -> Result<B, redb::Error> + Send + Sync>;

/// A table in a redb file, or in other storage that redb accepts.
pub(crate) struct RedbTable<B> {
    source: StorageSource<B>,
    store: String,
    /// The open database; `None` only after a failed attempt to reopen it. Views keep the lock for reading, so that the
    /// file is really closed before it is opened again.
    database: RwLock<Option<OpenDatabase<B>>>,
}

impl<B> fmt::Debug for RedbTable<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbTable").field("store", &self.store).finish_non_exhaustive()
    }
}

/// An open database that writes nothing when it is dropped.
#[derive(Debug)]
pub(crate) struct OpenDatabase<B> {
    database: Database,
    switch: FileSwitch<B>,
}

impl<B> Drop for OpenDatabase<B> {
    fn drop(&mut self) {
        self.switch.close();
    }
}

impl<B: StorageBackend> OpenDatabase<B> {
    /// Opens the database in `file`, or creates a database if the file is empty.
    pub(crate) fn on(file: B) -> Result<Self, redb::Error> {
        let (file, switch) = DbFile::new(file);
        let database = Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(file)?;
        let opened = Self { database, switch };
        opened.switch.opened()?;
        Ok(opened)
    }

    /// Applies all writes durably, or none of them.
    pub(crate) fn commit(&self, writes: &[Write]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        // redb's default durability is immediate. The module `file` explains why quick repair is enabled.
        transaction.set_quick_repair(true);
        {
            let mut rows = transaction.open_table(ROWS)?;
            for write in writes {
                match write {
                    Write::Put(key, value) => rows.insert(key.as_slice(), value.as_slice())?,
                    Write::Delete(key) => rows.remove(key.as_slice())?,
                };
            }
        }
        transaction.commit()?;
        Ok(())
    }

    /// Returns a snapshot of the table's rows; `None` before the first commit.
    pub(crate) fn rows(&self) -> Result<Option<RowsSnapshot>, redb::Error> {
        match self.database.begin_read()?.open_table(ROWS) {
            Ok(rows) => Ok(Some(rows)),
            Err(TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

pub(crate) type RowsSnapshot = ReadOnlyTable<&'static [u8], &'static [u8]>;

impl<B: StorageBackend> RedbTable<B> {
    /// Opens the table in the storage that `source` returns, or creates a table if the storage is empty.
    pub(crate) fn open(source: StorageSource<B>, store: &str) -> Result<Self> {
        let table = Self { source, store: store.to_owned(), database: RwLock::new(None) };
        table.recover()?;
        Ok(table)
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<OpenDatabase<B>>> {
        // A panic in the engine cannot break the `Option` that the lock guards.
        self.database.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn not_open(&self, operation: Operation) -> Error {
        Error::new(ErrorKind::Poisoned, operation, self.store.clone())
    }
}

/// Opens or creates the table in the file `path`.
pub(crate) fn in_file(path: &Path, store: &str) -> Result<RedbTable<FileBackend>> {
    let path = path.to_owned();
    RedbTable::open(Box::new(move || open_file(&path)), store)
}

fn open_file(path: &Path) -> Result<FileBackend, redb::Error> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    Ok(FileBackend::new(file.map_err(redb::Error::Io)?)?)
}

/// Moves the content of a redb file to the front of the file and truncates the rest. If the process is killed during
/// this work, no data is lost.
pub(crate) fn shrink_file(path: &Path, store: &str) -> Result<()> {
    let shrink = || {
        let mut opened = OpenDatabase::on(open_file(path)?)?;
        while opened.database.compact()? {}
        // An empty commit records the allocator's state, because redb's own last commit in `compact` does not record
        // it.
        opened.commit(&[])
    };
    shrink().map_err(|error: redb::Error| from_redb(store, Operation::Compact, error))
}

impl<B: StorageBackend> Table for RedbTable<B> {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        let guard = self.read();
        let opened = guard.as_ref().ok_or_else(|| self.not_open(Operation::Range))?;
        let rows = opened.rows().map_err(|error| from_redb(&self.store, Operation::Range, error))?;
        Ok(Box::new(RedbView { rows, store: &self.store, _open: guard }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let guard = self.read();
        let opened = guard.as_ref().ok_or_else(|| self.not_open(Operation::Txn))?;
        opened.commit(writes).map_err(|error| from_redb(&self.store, Operation::Txn, error))
    }

    fn recover(&self) -> Result<()> {
        let mut guard = self.database.write().unwrap_or_else(PoisonError::into_inner);
        // Close the database before opening it again: the file is locked while the database is open.
        *guard = None;
        let opened = (self.source)().and_then(OpenDatabase::on);
        *guard = Some(opened.map_err(|error| from_redb(&self.store, Operation::Open, error))?);
        Ok(())
    }
}

struct RedbView<'a, B> {
    // The rows must be declared before the guard `_open`: fields are dropped in order of declaration, and the rows must
    // not outlive the database.
    rows: Option<RowsSnapshot>,
    store: &'a str,
    _open: RwLockReadGuard<'a, Option<OpenDatabase<B>>>,
}

impl<B> RedbView<'_, B> {
    fn failed(&self, error: impl Into<redb::Error>) -> Error {
        from_redb(self.store, Operation::Range, error)
    }
}

impl<B> View for RedbView<'_, B> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(rows) = &self.rows else { return Ok(None) };
        let row = rows.get(key).map_err(|error| self.failed(error))?;
        Ok(row.map(|value| value.value().to_vec()))
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        let Some(rows) = &self.rows else { return Ok(()) };
        if from >= to {
            return Ok(());
        }
        for row in rows.range(from..to).map_err(|error| self.failed(error))? {
            let (key, value) = row.map_err(|error| self.failed(error))?;
            if let ControlFlow::Break(()) = visit(key.value(), value.value()) {
                break;
            }
        }
        Ok(())
    }
}
