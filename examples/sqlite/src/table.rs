//! Keeps the ordered rows of a store in one SQLite table.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{Table, View, Visit, Write};
use rusqlite::{Connection, OptionalExtension};

use crate::error::from_sqlite;

/// The name of SQLite's database file; the engine needs a folder, because SQLite keeps its log beside this file.
const FILE: &str = "db";

/// With SQLite's setting `FULL`, each commit syncs SQLite's log before the commit is visible. With SQLite's exclusive
/// lock, other programs that open the database fail at once; [`kv_local`] queues the processes that use the store.
/// SQLite orders blobs as unsigned bytes.
const SETUP: &str = "
    PRAGMA busy_timeout = 0;
    PRAGMA locking_mode = EXCLUSIVE;
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL;
    CREATE TABLE IF NOT EXISTS rows (key BLOB NOT NULL PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
";

/// A table of rows, in a folder with a SQLite database file and its log. Read views and commits take turns on one
/// SQLite connection, so a view is a snapshot and never shows an unfinished commit.
#[derive(Debug)]
pub struct SqliteTable {
    path: PathBuf,
    store: String,
    /// The open SQLite connection; `None` only after reopening the database has failed.
    connection: Mutex<Option<Connection>>,
}

impl SqliteTable {
    /// Opens the SQLite database in a folder, and creates the folder and the database if they are missing. The argument
    /// `store` is the store's name in error messages.
    ///
    /// # Errors
    /// An error of the kind `Corrupt`, `Locked`, `Io` or `NoSpace`.
    pub fn open(path: &Path, store: &str) -> Result<Self> {
        let connection = connect(path, store)?;
        Ok(Self { path: path.to_owned(), store: store.to_owned(), connection: Mutex::new(Some(connection)) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Connection>> {
        // The SQLite connection in the mutex stays valid even if a thread panics while it holds the lock.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poisoned(&self, operation: Operation) -> Error {
        Error::new(ErrorKind::Poisoned, operation, self.store.clone())
    }
}

fn connect(folder: &Path, store: &str) -> Result<Connection> {
    let path = &folder.join(FILE);
    // SQLite creates its log with the file mode of the database file, so the database file is created first, with mode
    // 0600.
    let file = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let made = match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => file(),
    };
    made.map_err(|error| Error::new(ErrorKind::Io, Operation::Open, store.to_owned()).with_source(error))?;
    let connect = || {
        let connection = Connection::open(path)?;
        connection.execute_batch(SETUP)?;
        Ok(connection)
    };
    connect().map_err(|error| from_sqlite(store, Operation::Open, error))
}

fn write_all(connection: &mut Connection, writes: &[Write]) -> rusqlite::Result<()> {
    // SQLite rolls back a transaction that is dropped before its commit.
    let transaction = connection.transaction()?;
    for write in writes {
        match write {
            Write::Put(key, value) => transaction
                .prepare("INSERT OR REPLACE INTO rows (key, value) VALUES (?1, ?2)")?
                .execute((key, value))?,
            Write::Delete(key) => transaction.prepare("DELETE FROM rows WHERE key = ?1")?.execute((key,))?,
        };
    }
    transaction.commit()
}

impl Table for SqliteTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        Ok(Box::new(SqliteView { table: self, connection: self.lock() }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let mut guard = self.lock();
        let connection = guard.as_mut().ok_or_else(|| self.poisoned(Operation::Txn))?;
        write_all(connection, writes).map_err(|error| from_sqlite(&self.store, Operation::Txn, error))
    }

    fn recover(&self) -> Result<()> {
        let mut guard = self.lock();
        // Close the connection before reopening the database, because an open connection locks the file.
        *guard = None;
        *guard = Some(connect(&self.path, &self.store)?);
        Ok(())
    }
}

/// A read view of a SQLite table; it blocks commits until it is dropped, which the trait [`Table`] permits.
struct SqliteView<'t> {
    table: &'t SqliteTable,
    connection: MutexGuard<'t, Option<Connection>>,
}

impl SqliteView<'_> {
    fn read<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        let connection = self.connection.as_ref().ok_or_else(|| self.table.poisoned(Operation::Range))?;
        read(connection).map_err(|error| from_sqlite(&self.table.store, Operation::Range, error))
    }
}

impl View for SqliteView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.read(|connection| {
            let mut statement = connection.prepare("SELECT value FROM rows WHERE key = ?1")?;
            statement.query_row((key,), |row| row.get(0)).optional()
        })
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        self.read(|connection| {
            let mut statement =
                connection.prepare("SELECT key, value FROM rows WHERE key >= ?1 AND key < ?2 ORDER BY key")?;
            let mut rows = statement.query((from, to))?;
            while let Some(row) = rows.next()? {
                if let ControlFlow::Break(()) = visit(row.get_ref(0)?.as_blob()?, row.get_ref(1)?.as_blob()?) {
                    break;
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, value: &str) -> Write {
        Write::Put(key.into(), value.into())
    }

    fn value(table: &SqliteTable, key: &str) -> Option<Vec<u8>> {
        table.view().unwrap().get(key.as_bytes()).unwrap()
    }

    /// Checks the settings that are in effect, because SQLite silently ignores a setting that it cannot apply.
    #[test]
    fn commits_are_synced() {
        let folder = tempfile::tempdir().unwrap();
        let table = SqliteTable::open(&folder.path().join("db"), "test").unwrap();
        let guard = table.lock();
        let setting =
            |name: &str| guard.as_ref().unwrap().pragma_query_value(None, name, |row| row.get::<_, String>(0));
        assert_eq!(setting("journal_mode").unwrap(), "wal");
        assert_eq!(setting("locking_mode").unwrap(), "exclusive");
        let synchronous = guard.as_ref().unwrap().pragma_query_value(None, "synchronous", |row| row.get::<_, i64>(0));
        assert_eq!(synchronous.unwrap(), 2, "FULL");
    }

    #[test]
    fn table_can_be_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        let table = SqliteTable::open(&path, "test").unwrap();
        table.commit(&[put("a", "1"), put("b", "2")]).unwrap();
        table.commit(&[put("a", "one"), Write::Delete(b"b".to_vec())]).unwrap();
        table.recover().unwrap();
        assert_eq!((value(&table, "a"), value(&table, "b")), (Some(b"one".to_vec()), None));
        let second = SqliteTable::open(&path, "test").unwrap_err();
        assert_eq!(*second.kind(), ErrorKind::Locked);
    }

    #[test]
    fn table_leaves_foreign_file_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(FILE), "this is no database of SQLite's").unwrap();
        assert_eq!(*SqliteTable::open(&path, "test").unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(std::fs::read(path.join(FILE)).unwrap(), b"this is no database of SQLite's");
    }
}
