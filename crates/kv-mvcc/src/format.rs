//! The format of a table's rows, and raising it.

use kv::Result;

use crate::codec;
use crate::store::MvccStore;
use crate::table::{Table, Write};

impl MvccStore {
    /// Marks the rows as being in this format. Rows that it spells in another way are written anew before. This blocks.
    ///
    /// # Errors
    /// `Closed`; those of the table.
    pub fn raise_format(&self, format: u32) -> Result<()> {
        let inner = self.inner();
        let table = inner.table.blocking_read();
        match table.as_deref() {
            Some(table) => mark(table, format),
            None => inner.check_open(kv::Operation::Txn),
        }
    }
}

fn mark(table: &dyn Table, format: u32) -> Result<()> {
    table.commit(&[Write::Put(codec::FORMAT_KEY.to_vec(), codec::encode_format(format))])
}

#[cfg(test)]
mod tests {
    use kv::ErrorKind;

    use super::*;
    use crate::codec::{FORMAT, FORMAT_WITH_LEASES};
    use crate::memory::MemoryTable;
    use crate::options::Options;

    #[test]
    fn a_store_that_was_raised_is_refused_by_a_program_that_does_not_know_the_format() {
        let table = MemoryTable::new();
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        assert_eq!(store.status().format, FORMAT);
        store.raise_format(FORMAT).unwrap();
        drop(store);
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        store.raise_format(FORMAT_WITH_LEASES).unwrap();
        drop(store);
        let store = MvccStore::open(Box::new(table.clone()), Options::default()).unwrap();
        assert_eq!(store.status().format, FORMAT_WITH_LEASES);
        store.raise_format(FORMAT_WITH_LEASES + 1).unwrap();
        drop(store);
        let error = MvccStore::open(Box::new(table), Options::default()).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::UnknownFormat { found: FORMAT_WITH_LEASES + 1 });
    }
}
