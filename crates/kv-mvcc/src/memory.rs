//! Provides a table in memory, for tests, benchmarks and experiments.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use kv::Result;

use crate::options::Options;
use crate::store::MvccStore;
use crate::table::{Table, View, Visit, Write};

type Map = BTreeMap<Vec<u8>, Vec<u8>>;

/// A table in memory. Clones of a table share their rows, so opening a store on a clone is like reopening the same
/// store on disk. The rows are lost when the last clone is dropped.
#[derive(Clone, Debug, Default)]
pub struct MemoryTable {
    rows: Arc<RwLock<Map>>,
}

impl MemoryTable {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Table for MemoryTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        Ok(Box::new(MemoryView(self.rows.read().unwrap_or_else(PoisonError::into_inner))))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        for write in writes {
            match write {
                Write::Put(key, value) => {
                    rows.insert(key.clone(), value.clone());
                }
                Write::Delete(key) => {
                    rows.remove(key);
                }
            }
        }
        Ok(())
    }

    fn recover(&self) -> Result<()> {
        Ok(())
    }
}

/// A view of a [`MemoryTable`]. A view holds the table's lock and so blocks commits, as the contract of [`Table`]
/// allows.
struct MemoryView<'t>(RwLockReadGuard<'t, Map>);

impl View for MemoryView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        // `BTreeMap::range` panics if the end of the range is below its start.
        if from >= to {
            return Ok(());
        }
        for (key, value) in self.0.range::<[u8], _>((std::ops::Bound::Included(from), std::ops::Bound::Excluded(to))) {
            if let ControlFlow::Break(()) = visit(key, value) {
                break;
            }
        }
        Ok(())
    }
}

/// Opens a new, empty store in memory.
pub fn memory() -> MvccStore {
    let options = Options { name: "memory", ..Options::default() };
    match MvccStore::open(Box::new(MemoryTable::new()), options) {
        Ok(store) => store,
        // `MvccStore::open` fails only if the table is damaged or full, and an empty map is neither.
        Err(error) => unreachable!("an empty table in memory opens: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_scans_are_half_open_and_stop_on_break() {
        let table = MemoryTable::new();
        let put = |key: &str| Write::Put(key.into(), b"v".to_vec());
        table.commit(&[put("a"), put("b"), put("c")]).unwrap();
        table.commit(&[Write::Delete(b"missing".to_vec())]).unwrap();
        let keys = |from: &str, to: &str, most: usize| {
            let mut keys = Vec::new();
            table
                .view()
                .unwrap()
                .scan(from.as_bytes(), to.as_bytes(), &mut |key, _| {
                    keys.push(String::from_utf8(key.to_vec()).unwrap());
                    if keys.len() == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                })
                .unwrap();
            keys
        };
        assert_eq!(keys("a", "c", 9), ["a", "b"]);
        assert_eq!(keys("", "z", 1), ["a"]);
        assert!(keys("z", "a", 9).is_empty());
        assert!(keys("b", "b", 9).is_empty());
    }
}
