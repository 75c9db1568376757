//! A table in memory whose snapshots cost nothing: a commit copies the rows if a snapshot still needs them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::Result;
use kv_mvcc::{MvccStore, Options, Table, View, Visit, Write};

/// The rows, in order.
pub(crate) type RowMap = BTreeMap<Vec<u8>, Vec<u8>>;

/// The rows. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Shared(Arc<Mutex<Arc<RowMap>>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Arc<RowMap>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows as they are now.
    pub(crate) fn now(&self) -> Arc<RowMap> {
        Arc::clone(&self.lock())
    }

    /// Replaces the rows.
    pub(crate) fn replace(&self, rows: Arc<RowMap>) {
        *self.lock() = rows;
    }
}

/// Changes rows.
pub(crate) fn apply(writes: &[Write], rows: &mut RowMap) {
    for write in writes {
        match write {
            Write::Put(key, value) => drop(rows.insert(key.clone(), value.clone())),
            Write::Delete(key) => drop(rows.remove(key)),
        }
    }
}

/// Opens a store on rows in memory.
///
/// # Errors
/// `Corrupt` if the rows are not those of a store.
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

/// The rows as they were when it was made.
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
