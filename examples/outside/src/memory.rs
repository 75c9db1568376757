//! Keeps a table in memory with cheap snapshots: a commit copies the rows only if a snapshot still uses them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::Result;
use kv_mvcc::{MvccStore, Options, Table, View, Visit, Write};

pub(crate) type RowMap = BTreeMap<Vec<u8>, Vec<u8>>;

/// A table that keeps its rows in memory; clones of a `Shared` table share their rows.
#[derive(Clone, Debug, Default)]
pub struct Shared(Arc<Mutex<Arc<RowMap>>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Arc<RowMap>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> Arc<RowMap> {
        Arc::clone(&self.lock())
    }

    pub(crate) fn replace(&self, rows: Arc<RowMap>) {
        *self.lock() = rows;
    }
}

pub(crate) fn apply(writes: &[Write], rows: &mut RowMap) {
    for write in writes {
        match write {
            Write::Put(key, value) => drop(rows.insert(key.clone(), value.clone())),
            Write::Delete(key) => drop(rows.remove(key)),
        }
    }
}

/// Opens a store that keeps its rows in memory.
///
/// # Errors
/// An error of the kind `Corrupt` if the rows are not a valid store.
pub fn open(rows: &Shared) -> Result<MvccStore> {
    MvccStore::open(Box::new(rows.clone()), Options { name: "shared", ..Options::default() })
}

impl Table for Shared {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        Ok(Box::new(Snapshot(self.now())))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        apply(writes, Arc::make_mut(&mut self.lock()));
        Ok(())
    }

    fn recover(&self) -> Result<()> {
        Ok(())
    }
}

/// A read view that shows the rows as of the time of its snapshot.
struct Snapshot(Arc<RowMap>);

impl View for Snapshot {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        if from < to {
            for (key, value) in self.0.range::<[u8], _>((Bound::Included(from), Bound::Excluded(to))) {
                if visit(key, value).is_break() {
                    break;
                }
            }
        }
        Ok(())
    }
}
