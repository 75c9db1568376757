//! Stores the ordered rows of a store in one sled tree.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{Table, View, Visit, Write};
use sled::{Batch, Config, Db};

use crate::error::{from_io, from_sled};
use crate::priority::PriorityGuard;

/// The size of sled's page cache, in bytes; the cache is small, because a plugin process should use little memory. Even
/// with a smaller page cache, sled keeps at least one page in each of its 256 shards.
const CACHE_BYTES: u64 = 1024 * 1024;

/// Maximum time that sled may take to release its log: some of its threads end only after the last database handle is
/// dropped.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the checks for a disk error while a caller waits for a write by sled.
const ERROR_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum time that sled may take to write a commit to the kernel.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time that sled may take to open its files, including the reading of its whole log.
const OPEN_TIMEOUT: Duration = Duration::from_secs(600);

/// A table of rows in a sled folder.
///
/// In sled, `flush` writes but never syncs, scans are not snapshots, and a batch can be read as soon as it is applied.
/// Because sled itself never syncs, a commit consists of one sled batch, a flush and a separate sync, all under a write
/// lock. While a read view of the table is open, it holds a read lock, so no commit can run.
#[derive(Debug)]
pub(crate) struct SledTable {
    path: PathBuf,
    store: String,
    /// The open sled tree; `None` after a failed commit, until the table is reopened.
    database: RwLock<Option<OpenTree>>,
}

#[derive(Debug)]
struct OpenTree {
    /// The sled configuration that `database` uses, in which sled's threads record the first disk error.
    config: Config,
    /// The sled database; `None` only while the `OpenTree` is being dropped.
    database: Option<Db>,
    /// Our own handle on sled's log file, opened before the first write because a file handle reports only later
    /// writeback errors.
    log: File,
    blobs: PathBuf,
    /// The thread that runs the commits of this table. One thread runs all commits, because starting a thread for each
    /// commit made an ADD through the daemon 0.4 ms slower.
    worker: Worker,
}

impl SledTable {
    /// Opens or creates the sled folder `path`.
    pub(crate) fn open(path: &Path, store: &str) -> Result<Self> {
        let opened = OpenTree::open(path, store)?;
        Ok(Self { path: path.to_owned(), store: store.to_owned(), database: RwLock::new(Some(opened)) })
    }

    fn not_open(&self, operation: Operation) -> Error {
        Error::new(ErrorKind::Poisoned, operation, self.store.clone())
    }

    /// Runs `work`, which changes the sled database. If `work` fails or panics, the sled database must be reopened
    /// before the next read, because sled may show rows of the failed batch that are not durable.
    fn change(&self, work: impl FnOnce(&OpenTree) -> Result<(), sled::Error>) -> Result<()> {
        let mut guard = self.database.write().unwrap_or_else(PoisonError::into_inner);
        let opened = guard.take().ok_or_else(|| self.not_open(Operation::Txn))?;
        work(&opened).map_err(|error| from_sled(&self.store, Operation::Txn, error))?;
        *guard = Some(opened);
        Ok(())
    }
}

impl OpenTree {
    fn open(path: &Path, store: &str) -> Result<Self> {
        let io = |error| from_io(store, Operation::Open, error);
        let log = open_log(path).map_err(io)?;
        if !wait_until_free(&log).map_err(io)? {
            return Err(Error::new(ErrorKind::Locked, Operation::Open, store.to_owned())
                .with_detail("another program has opened the sled files in it"));
        }
        remove_unfinished_snapshots(path).map_err(io)?;
        let config = Config::new().path(path).cache_capacity(CACHE_BYTES).flush_every_ms(None);
        let worker = Worker::start().map_err(io)?;
        let clone = config.clone();
        let open = move || {
            let _raised = PriorityGuard::raise();
            clone.open()
        };
        let database = worker
            .watched(&config, OPEN_TIMEOUT, open, || {})
            .map_err(|error| from_sled(store, Operation::Open, error))?;
        let opened = Self { config, database: Some(database), log, blobs: path.join("blobs"), worker };
        // If a process was killed after sled's flush but before the sync of sled's log, the log contains rows that can
        // be read but are not durable. sled writes a new snapshot file when it opens the database; the folder is synced
        // to make the file's name durable.
        opened.sync().and_then(|()| File::open(path)?.sync_all()).map_err(io)?;
        Ok(opened)
    }

    fn database(&self) -> Result<&Db, sled::Error> {
        self.database.as_ref().ok_or_else(|| sled::Error::Io(io::Error::other("the store has been closed")))
    }

    fn commit(&self, writes: &[Write]) -> Result<(), sled::Error> {
        let mut batch = Batch::default();
        for write in writes {
            match write {
                Write::Put(key, value) => batch.insert(key.as_slice(), value.as_slice()),
                Write::Delete(key) => batch.remove(key.as_slice()),
            }
        }
        let database = self.database()?;
        let clone = database.clone();
        let write = move || clone.apply_batch(batch).and_then(|()| clone.flush()).map(|_| clone);
        self.worker.watched(&self.config, WRITE_TIMEOUT, write, || wake(database))?;
        Ok(self.sync()?)
    }

    fn sync(&self) -> io::Result<()> {
        // If a page is larger than a quarter of a log segment, sled puts it into a separate "blob" file that it never
        // syncs. Long values are split into several rows, so only very long keys cause pages in blob files. Each blob
        // file must be synced before a commit is durable, which is slow.
        let mut blobs = false;
        for entry in fs::read_dir(&self.blobs)? {
            match File::open(entry?.path()) {
                Ok(blob) => blob.sync_all()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            blobs = true;
        }
        if blobs {
            File::open(&self.blobs)?.sync_all()?;
        }
        self.log.sync_data()
    }
}

impl Drop for OpenTree {
    /// Closes the sled database on a separate thread, which is left running until the process ends if closing takes too
    /// long.
    fn drop(&mut self) {
        let Some(database) = self.database.take() else { return };
        // Flush the database before dropping it: otherwise dropping it writes the remaining data, and a thread that
        // hangs in this write cannot be woken. After an error or panic of an earlier commit, sled's `flush` can panic.
        // This flush runs on a separate worker, because the worker that runs commits may hang in one.
        let Ok(worker) = Worker::start() else { return };
        let clone = database.clone();
        let flush =
            || worker.watched(&self.config, RELEASE_TIMEOUT, move || clone.flush().map(|_| clone), || wake(&database));
        let _ = catch_unwind(AssertUnwindSafe(flush));
        let Ok(worker) = Worker::start() else { return };
        let (closed, is_closed) = channel();
        let close = move || {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(database)));
            let _ = closed.send(());
        };
        if worker.run(Box::new(close)).is_ok() && is_closed.recv_timeout(RELEASE_TIMEOUT).is_ok() {
            // Wait until sled's threads have released the lock on sled's log; otherwise the next process could not open
            // the store. If sled does not unlock its log in time, ignore this, because this process cannot make sled
            // unlock it.
            let _ = wait_until_free(&self.log);
        }
    }
}

type WorkerTask = Box<dyn FnOnce() + Send>;

/// A thread that runs tasks one after another until the `Worker` is dropped.
#[derive(Debug)]
struct Worker(Sender<WorkerTask>);

impl Worker {
    fn start() -> io::Result<Self> {
        let (sender, work) = channel::<WorkerTask>();
        thread::Builder::new().name("sled-work".into()).spawn(move || work.into_iter().for_each(|work| work()))?;
        Ok(Self(sender))
    }

    fn run(&self, work: WorkerTask) -> io::Result<()> {
        self.0.send(work).map_err(|_| io::Error::other("the thread for sled's work has ended"))
    }

    /// Runs `work` on the worker's thread, and waits for the sled database that it returns.
    ///
    /// After a disk error, sled 0.34 can wait forever for a write that one of its threads has abandoned. The thread
    /// that abandons a write records the error, but one code path (`exit_reservation`) does not wake the threads that
    /// wait for the write. While `watched` waits for a sled write, it checks regularly whether sled has recorded an
    /// error. Once sled has recorded an error, `watched` calls `wake`, which should end the blocked sled write; if the
    /// worker still hangs, its thread is abandoned. Without a recorded error, the wait ends after `limit`: a panic of a
    /// sled thread, for example, records no error.
    fn watched(
        &self,
        config: &Config,
        limit: Duration,
        work: impl FnOnce() -> sled::Result<Db> + Send + 'static,
        wake: impl Fn(),
    ) -> sled::Result<Db> {
        let (done, is_done) = channel();
        // If the caller has stopped waiting, the result cannot be sent; it is dropped, which closes the sled database
        // in the result.
        self.run(Box::new(move || drop(done.send(catch_unwind(AssertUnwindSafe(work))))))?;
        let started = Instant::now();
        loop {
            if let Ok(result) = is_done.recv_timeout(ERROR_CHECK_INTERVAL) {
                return result.unwrap_or_else(|panic| resume_unwind(panic));
            }
            if let Err(error) = config.global_error() {
                wake();
                let _ = is_done.recv_timeout(RELEASE_TIMEOUT);
                return Err(error);
            }
            if started.elapsed() > limit {
                let waited = format!("sled has not written for {} s", limit.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, waited).into());
            }
        }
    }
}

/// Wakes a thread that still waits for a sled write after a disk error. The function `wake` makes sled write to its
/// log; this write fails at once because of the disk error, and the failure wakes all waiting threads. `wake` creates a
/// tree because this write to the log works without a certain lock. All other log writes need this lock, which all sled
/// databases of the process share and which the waiting thread may hold.
fn wake(database: &Db) {
    let _ = database.open_tree("none");
}

/// Opens sled's log file; if the folder `path` is missing, creates it.
fn open_log(path: &Path) -> io::Result<File> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path.join("db"))
}

/// Removes unfinished sled snapshots, whose writer was killed or ran out of disk space. Sled writes a snapshot each
/// time it opens the store. sled would treat an unfinished snapshot file as the newest snapshot, and report damage
/// because the file is too short. If a snapshot is unfinished, the previous snapshot still exists, because sled removes
/// it only after the new one is complete.
fn remove_unfinished_snapshots(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("snap.") && name.to_string_lossy().ends_with(".generating") {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Waits until sled has released its log, by trying to acquire the `flock` lock that sled holds on the log.
fn wait_until_free(log: &File) -> io::Result<bool> {
    let started = Instant::now();
    let mut pause = Duration::from_micros(50);
    loop {
        match log.try_lock() {
            Ok(()) => {
                log.unlock()?;
                return Ok(true);
            }
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if started.elapsed() > RELEASE_TIMEOUT => return Ok(false),
            Err(TryLockError::WouldBlock) => {}
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}

impl Table for SledTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        // A panic in sled cannot invalidate the `Option` that the lock guards.
        let opened = self.database.read().unwrap_or_else(PoisonError::into_inner);
        if opened.is_none() {
            return Err(self.not_open(Operation::Range));
        }
        Ok(Box::new(SledView { opened, store: &self.store }))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        self.change(|opened| opened.commit(writes))
    }

    fn recover(&self) -> Result<()> {
        let mut opened = self.database.write().unwrap_or_else(PoisonError::into_inner);
        // Close the database before opening it again, because an open database locks sled's log.
        *opened = None;
        *opened = Some(OpenTree::open(&self.path, &self.store)?);
        Ok(())
    }
}

struct SledView<'a> {
    opened: RwLockReadGuard<'a, Option<OpenTree>>,
    store: &'a str,
}

impl SledView<'_> {
    fn failed(&self, error: sled::Error) -> Error {
        from_sled(self.store, Operation::Range, error)
    }

    fn database(&self) -> Result<&Db> {
        let closed = || Error::new(ErrorKind::Closed, Operation::Range, self.store.to_owned());
        let opened = self.opened.as_ref().ok_or_else(closed)?;
        opened.database().map_err(|error| self.failed(error))
    }
}

impl View for SledView<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let value = self.database()?.get(key).map_err(|error| self.failed(error))?;
        Ok(value.map(|value| value.to_vec()))
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        for row in self.database()?.range(from..to) {
            let (key, value) = row.map_err(|error| self.failed(error))?;
            if let ControlFlow::Break(()) = visit(&key, &value) {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(table: &SledTable) -> Result<Option<Vec<u8>>> {
        table.view()?.get(b"k")
    }

    #[test]
    fn row_is_unreadable_when_panic_cut_it_off() {
        let folder = tempfile::tempdir().unwrap();
        let table = SledTable::open(&folder.path().join("sled"), "test").unwrap();
        table.commit(&[Write::Put(b"k".to_vec(), b"durable".to_vec())]).unwrap();
        let panics = || {
            table.change(|opened| {
                let mut batch = Batch::default();
                batch.insert(b"k", b"neither flushed nor synced");
                opened.database()?.apply_batch(batch)?;
                panic!("the engine gave up")
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(value(&table).unwrap_err().kind(), &ErrorKind::Poisoned);
        assert_eq!(table.commit(&[]).unwrap_err().kind(), &ErrorKind::Poisoned);
        // The method `recover` makes the rows that it finds durable before they can be read.
        table.recover().unwrap();
        assert!(value(&table).unwrap().is_some());
        table.commit(&[Write::Put(b"k".to_vec(), b"new".to_vec())]).unwrap();
        assert_eq!(value(&table).unwrap(), Some(b"new".to_vec()));
    }
}
