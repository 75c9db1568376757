//! Keeps ordered rows in one keyspace of fjall.

use std::fmt;
use std::ops::{Bound, ControlFlow};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode, Readable, Snapshot};
use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{Table, View, Visit, Write};

use crate::error::from_fjall;

/// The name of the fjall keyspace that contains the rows.
const ROWS: &str = "rows";

/// The size in bytes at which fjall writes a memory table to the disk. Each time the store is opened, that is, at each
/// plugin call, fjall reads its whole journal, which can grow to 64 MB. Fjall skips the part of the journal that is
/// already in tables on disk. With memory tables of 1 MiB, fjall reads the journal at 20 MB/s, and with the default of
/// 64 MiB much more slowly.
const MAX_MEMTABLE_BYTES: u64 = 1 << 20;

/// A table of rows in a fjall database with one keyspace. A read view of the table is a fjall snapshot, which does not
/// block commits.
pub struct FjallTable {
    path: PathBuf,
    store: String,
    /// The open database; `None` only after reopening the database has failed.
    opened: Mutex<Option<Opened>>,
}

#[derive(Clone)]
struct Opened {
    database: Database,
    rows: Keyspace,
}

impl fmt::Debug for FjallTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FjallTable").field("path", &self.path).finish_non_exhaustive()
    }
}

impl FjallTable {
    /// Opens the database in a folder, and creates the folder and the database if they are missing. The argument
    /// `store` is the store's name in error messages.
    ///
    /// # Errors
    /// An error of the kind `Corrupt`, `Locked`, `Io` or `NoSpace`.
    pub fn open(path: &Path, store: &str) -> Result<Self> {
        let opened = Mutex::new(Some(open(path, store)?));
        Ok(Self { path: path.to_owned(), store: store.to_owned(), opened })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Opened>> {
        // The fjall handles in the mutex stay valid even if a thread panics while it holds the lock.
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self, operation: Operation) -> Result<Opened> {
        let opened = self.lock().clone();
        opened.ok_or_else(|| Error::new(ErrorKind::Poisoned, operation, self.store.clone()))
    }
}

fn open(path: &Path, store: &str) -> Result<Opened> {
    // One worker thread of a fjall database is enough for the writes of one plugin call.
    let open = || {
        let database = Database::builder(path).worker_threads(1).open()?;
        let options = || KeyspaceCreateOptions::default().max_memtable_size(MAX_MEMTABLE_BYTES);
        let rows = database.keyspace(ROWS, options)?;
        Ok(Opened { database, rows })
    };
    open().map_err(|error| from_fjall(store, Operation::Open, error))
}

impl Table for FjallTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        let Opened { database, rows } = self.opened(Operation::Range)?;
        Ok(Box::new(FjallView { store: &self.store, snapshot: database.snapshot(), rows }))
    }

    /// By default, a fjall commit stays in the operating system's buffers; with `SyncAll`, it is durable before it
    /// becomes visible.
    fn commit(&self, writes: &[Write]) -> Result<()> {
        let Opened { database, rows } = self.opened(Operation::Txn)?;
        let mut batch = database.batch().durability(Some(PersistMode::SyncAll));
        for write in writes {
            match write {
                Write::Put(key, value) => batch.insert(&rows, key.as_slice(), value.as_slice()),
                Write::Delete(key) => batch.remove(&rows, key.as_slice()),
            }
        }
        batch.commit().map_err(|error| from_fjall(&self.store, Operation::Txn, error))
    }

    fn recover(&self) -> Result<()> {
        let mut guard = self.lock();
        // Close the database before reopening it, because an open database locks its folder.
        *guard = None;
        *guard = Some(open(&self.path, &self.store)?);
        Ok(())
    }
}

struct FjallView<'t> {
    store: &'t str,
    snapshot: Snapshot,
    rows: Keyspace,
}

impl FjallView<'_> {
    fn failed(&self, error: fjall::Error) -> Error {
        from_fjall(self.store, Operation::Range, error)
    }
}

impl View for FjallView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let value = self.snapshot.get(&self.rows, key).map_err(|error| self.failed(error))?;
        Ok(value.map(|value| value.to_vec()))
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let range: (Bound<&[u8]>, Bound<&[u8]>) = (Bound::Included(from), Bound::Excluded(to));
        for row in self.snapshot.range::<&[u8], _>(&self.rows, range) {
            let (key, value) = row.into_inner().map_err(|error| self.failed(error))?;
            if let ControlFlow::Break(()) = visit(&key, &value) {
                break;
            }
        }
        Ok(())
    }
}
