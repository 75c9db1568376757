//! Provides a table in memory with injected faults and delays for tests.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{MemoryTable, MvccStore, Options, Table, View, Visit, Write};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The commit fails, and the table writes nothing.
    Refused(&'static ErrorKind),
    /// The table writes the commit but reports a failure.
    Applied,
    /// The engine panics without writing anything.
    Panic,
}

#[derive(Debug, Default)]
struct Shared {
    /// How many commits succeed before the fault occurs, and which fault occurs.
    fault: Mutex<Option<(usize, Fault)>>,
    broken: AtomicBool,
    failed: AtomicBool,
    /// The time that a scan takes per row, in microseconds.
    row_micros: AtomicUsize,
    views: AtomicUsize,
    commits: AtomicUsize,
}

/// A table in memory that injects faults and delays. Clones of a table share its rows and its faults.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wrapped {
    pub(crate) inner: MemoryTable,
    shared: Arc<Shared>,
}

impl Wrapped {
    pub(crate) fn store(&self, options: Options) -> MvccStore {
        MvccStore::open(Box::new(self.clone()), options).unwrap()
    }

    pub(crate) fn fail_next(&self, fault: Fault) {
        self.fail_after(0, fault);
    }

    /// Makes one commit of the table fail, after `commits` successful commits.
    pub(crate) fn fail_after(&self, commits: usize, fault: Fault) {
        *self.shared.fault.lock().unwrap() = Some((commits, fault));
    }

    pub(crate) fn has_fault(&self) -> bool {
        self.shared.fault.lock().unwrap().is_some()
    }

    pub(crate) fn set_broken(&self, broken: bool) {
        self.shared.broken.store(broken, Ordering::SeqCst);
    }

    pub(crate) fn set_row_micros(&self, micros: usize) {
        self.shared.row_micros.store(micros, Ordering::SeqCst);
    }

    pub(crate) fn views(&self) -> usize {
        self.shared.views.load(Ordering::SeqCst)
    }

    pub(crate) fn commits(&self) -> usize {
        self.shared.commits.load(Ordering::SeqCst)
    }

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, Operation::Txn, "wrapped").with_source(std::io::Error::other("as the test wants it"))
    }
}

impl Table for Wrapped {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        self.shared.views.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(WrappedView { inner: self.inner.view()?, shared: &self.shared }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        self.shared.commits.fetch_add(1, Ordering::SeqCst);
        if self.shared.failed.load(Ordering::SeqCst) {
            return Err(Self::error(ErrorKind::Poisoned));
        }
        let due = {
            let mut fault = self.shared.fault.lock().unwrap();
            if let Some((wait @ 1.., _)) = &mut *fault {
                *wait -= 1;
                None
            } else {
                fault.take()
            }
        };
        let Some((_, fault)) = due else { return self.inner.commit(writes) };
        self.shared.failed.store(true, Ordering::SeqCst);
        match fault {
            Fault::Refused(kind) => Err(Self::error(kind.clone())),
            Fault::Applied => {
                self.inner.commit(writes)?;
                Err(Self::error(ErrorKind::CommitIo))
            }
            Fault::Panic => panic!("page 7 is not a page"),
        }
    }

    fn recover(&self) -> Result<()> {
        if self.shared.broken.load(Ordering::SeqCst) {
            return Err(Self::error(ErrorKind::Io));
        }
        self.shared.failed.store(false, Ordering::SeqCst);
        Ok(())
    }
}

struct WrappedView<'t> {
    inner: Box<dyn View + 't>,
    shared: &'t Shared,
}

impl View for WrappedView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.inner.get(key)
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        let pause = Duration::from_micros(self.shared.row_micros.load(Ordering::SeqCst) as u64);
        self.inner.scan(from, to, &mut |key, value| {
            let began = Instant::now();
            while began.elapsed() < pause {
                std::hint::spin_loop();
            }
            visit(key, value)
        })
    }
}

pub(crate) fn rows(table: &dyn Table) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut rows = Vec::new();
    let view = table.view().unwrap();
    view.scan(&[], &[0xff], &mut |key, value| {
        rows.push((key.to_vec(), value.to_vec()));
        std::ops::ControlFlow::Continue(())
    })
    .unwrap();
    rows
}

/// The number of rows in the table whose key begins with the byte `tag`.
pub(crate) fn count(table: &dyn Table, tag: u8) -> usize {
    rows(table).iter().filter(|(key, _)| key[0] == tag).count()
}
