//! Stores the ordered rows of a store in one redb table.

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

/// The size of redb's page cache, in bytes. A small page cache is enough for a plugin process, which reads few pages. A
/// redb cache of 16 MiB would save little: a check of 10,000 blocks would read the file 18,000 instead of 23,000 times.
/// With a redb cache of 16 MiB, a daemon would use 12 MiB more memory.
const CACHE_BYTES: usize = 4 * 1024 * 1024;

/// A function that opens the storage of a table; it is called each time the table is opened.
type StorageSource<B> = Box<dyn Fn() -> Result<B, redb::Error> + Send + Sync>;

/// A table in a redb file, or in another storage backend of redb.
pub(crate) struct RedbTable<B> {
    source: StorageSource<B>,
    store: String,
    /// The open database; `None` only after reopening the database has failed. Read views hold the read lock, so the
    /// file can only be closed and reopened when no read view is open.
    database: RwLock<Option<OpenDatabase<B>>>,
}

impl<B> fmt::Debug for RedbTable<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbTable").field("store", &self.store).finish_non_exhaustive()
    }
}

/// An open redb database; dropping it writes nothing.
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
    /// Opens the database in `file`; if the file is empty, creates a database.
    pub(crate) fn on(file: B) -> Result<Self, redb::Error> {
        let (file, switch) = DbFile::new(file);
        let database = Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(file)?;
        let opened = Self { database, switch };
        opened.switch.opened()?;
        Ok(opened)
    }

    pub(crate) fn commit(&self, writes: &[Write]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        // In redb, commits are durable by default; the module `file` explains why quick repair is set.
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

    /// Returns a snapshot of the rows; `None` before the first commit.
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
    /// Opens the redb table in the storage that `source` returns; if the storage is empty, creates a table.
    pub(crate) fn open(source: StorageSource<B>, store: &str) -> Result<Self> {
        let table = Self { source, store: store.to_owned(), database: RwLock::new(None) };
        table.recover()?;
        Ok(table)
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<OpenDatabase<B>>> {
        // A panic in redb cannot invalidate the `Option` that the lock guards.
        self.database.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn not_open(&self, operation: Operation) -> Error {
        Error::new(ErrorKind::Poisoned, operation, self.store.clone())
    }
}

/// Opens or creates the redb table in the file `path`.
pub(crate) fn in_file(path: &Path, store: &str) -> Result<RedbTable<FileBackend>> {
    let path = path.to_owned();
    RedbTable::open(Box::new(move || open_file(&path)), store)
}

fn open_file(path: &Path) -> Result<FileBackend, redb::Error> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    Ok(FileBackend::new(file.map_err(redb::Error::Io)?)?)
}

/// Shrinks a redb file: moves its content to the front and truncates the rest; killing the process meanwhile loses no
/// data.
pub(crate) fn shrink_file(path: &Path, store: &str) -> Result<()> {
    let shrink = || {
        let mut opened = OpenDatabase::on(open_file(path)?)?;
        while opened.database.compact()? {}
        // Make an empty commit after `compact`, because the last commit inside redb's `compact` does not record redb's
        // allocator state.
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
        // Close the database before opening it again, because an open database locks its file.
        *guard = None;
        let opened = (self.source)().and_then(OpenDatabase::on);
        *guard = Some(opened.map_err(|error| from_redb(&self.store, Operation::Open, error))?);
        Ok(())
    }
}

struct RedbView<'a, B> {
    // The rows are declared before the guard `_open`: fields are dropped in declaration order, and the rows must not
    // outlive the database.
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
