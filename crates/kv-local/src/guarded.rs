//! A table that holds the lock of its store, and whose engine may panic.

use std::sync::Arc;

use kv::{Error, ErrorKind, Operation, Result};

use super::ballast::Ballast;
use super::errors::Place;
use super::folder;
use super::head::Head;
use super::queue::StoreLock;
use kv_mvcc::{ENGINE_GAVE_UP, Table, View, Visit, Write};

/// A table of an engine on disk.
///
/// Engines panic on some damaged files; here that becomes `Corrupt`. Each commit leaves its revision in `head`. On drop the engine
/// closes first, then the lock is released.
#[derive(Debug)]
pub(crate) struct Guarded {
    table: Option<Box<dyn Table>>,
    place: Place,
    head: Arc<Head>,
    ballast: Arc<Ballast>,
    // Below `table`, since fields are dropped in this order.
    _lock: StoreLock,
}

impl Guarded {
    pub(crate) fn new(
        table: Box<dyn Table>,
        place: Place,
        head: Arc<Head>,
        ballast: Arc<Ballast>,
        lock: StoreLock,
    ) -> Self {
        Self { table: Some(table), place, head, ballast, _lock: lock }
    }

    fn table(&self, operation: Operation) -> Result<&dyn Table> {
        // Only a drop takes it away.
        self.table.as_deref().ok_or_else(|| Error::new(ErrorKind::Closed, operation, self.place.store.clone()))
    }
}

impl Table for Guarded {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        let table = self.table(Operation::Range)?;
        let view = caught(&self.place, Operation::Range, || table.view())?;
        Ok(Box::new(GuardedView { view: Some(view), place: &self.place }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let table = self.table(Operation::Txn)?;
        let result = caught(&self.place, Operation::Txn, || table.commit(writes));
        match result {
            Ok(()) => self.head.note(writes),
            Err(_) => self.head.set_in_doubt(),
        }
        result
    }

    fn recover(&self) -> Result<()> {
        let table = self.table(Operation::Open)?;
        caught(&self.place, Operation::Open, || table.recover())?;
        self.head.set_in_order();
        Ok(())
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let table = self.table.take();
        // There is nobody to tell, and nothing is lost: what was committed is durable.
        let closed = kv_mvcc::caught(|| drop(table));
        self.ballast.take_back();
        if let Err(error) = folder::give_to_owner(&self.place.folder) {
            tracing::warn!(%error, store = self.place.store, "what root made here stays root's: its owner may be kept out");
        }
        // This changes their times, too, so it comes after.
        if closed.is_some() {
            self.head.close_cleanly();
        }
    }
}

struct GuardedView<'a> {
    view: Option<Box<dyn View + 'a>>,
    place: &'a Place,
}

impl GuardedView<'_> {
    fn view(&self) -> Result<&dyn View> {
        self.view.as_deref().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Range, self.place.store.clone()))
    }
}

impl View for GuardedView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let view = self.view()?;
        caught(self.place, Operation::Range, || view.get(key))
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        let view = self.view()?;
        caught(self.place, Operation::Range, || view.scan(from, to, visit))
    }
}

impl Drop for GuardedView<'_> {
    fn drop(&mut self) {
        let view = self.view.take();
        let _ = kv_mvcc::caught(|| drop(view));
    }
}

/// Runs `f`; its panic is the engine's word for damage. Damage comes with advice.
pub(crate) fn caught<T>(place: &Place, operation: Operation, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let gave_up = || Error::new(ErrorKind::Corrupt, operation, place.store.clone()).with_source(ENGINE_GAVE_UP);
    kv_mvcc::caught(f).unwrap_or_else(|| Err(gave_up())).map_err(|error| place.advise(error))
}
