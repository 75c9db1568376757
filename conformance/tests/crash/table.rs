//! Implements a table of rows as a log file of commits, which is read completely when the table is opened. The
//! log-based table works correctly or has one injected fault.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use kv::{Error, ErrorKind, Operation, Result};
use kv_mvcc::{Table, View, Visit, Write};

use crate::breakage::Breakage;

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

/// The size in bytes of a commit's header, which has the length and the checksum of the commit.
const HEAD: usize = 8;
/// The size in bytes up to which a log is never rewritten, even if most of its rows are superseded.
const SMALL: usize = 1024 * 1024;

#[derive(Debug)]
pub(crate) struct FileTable {
    way: Breakage,
    log: Arc<Mutex<File>>,
    /// The current rows of the table, which open read views share.
    rows: Mutex<Arc<Rows>>,
}

fn io(error: std::io::Error) -> Error {
    let kind = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::FileTooLarge => ErrorKind::NoSpace,
        _ => ErrorKind::CommitIo,
    };
    Error::new(kind, Operation::Txn, "file").with_source(error)
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FileTable {
    pub(crate) fn open(path: &Path, way: Breakage) -> Result<Self> {
        let mut log = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(io)?;
        let mut bytes = Vec::new();
        log.read_to_end(&mut bytes).map_err(io)?;
        let (commits, whole) = commits(&bytes)?;
        if whole == 0 && !bytes.is_empty() {
            return Err(Error::new(ErrorKind::Corrupt, Operation::Open, "file"));
        }
        // A commit that is incomplete in the file was never acknowledged, so its bytes are removed.
        log.set_len(whole as u64).map_err(io)?;
        log.sync_data().map_err(io)?;
        let mut rows = Rows::new();
        let kept = match commits.last() {
            Some(last) if way == Breakage::GoesBack && last.len() == 1 => commits.len().saturating_sub(2),
            _ => commits.len(),
        };
        for commit in commits.into_iter().take(kept) {
            apply(&mut rows, &commit);
        }
        let live: usize = rows.iter().map(|(key, value)| key.len() + value.len()).sum();
        // Broken stores never rewrite their log: some allow two processes to open the store at once, and one of them
        // would still append to the old file after a rewrite.
        if way == Breakage::Healthy && whole > 4 * live + SMALL {
            log = rewritten(path, &rows).map_err(io)?;
        }
        Ok(Self { way, log: Arc::new(Mutex::new(log)), rows: Mutex::new(Arc::new(rows)) })
    }

    fn append(&self, writes: &[Write]) -> Result<()> {
        let mut log = held(&self.log);
        let before = log.metadata().map_err(io)?.len();
        let written = log.write_all(&encode(writes));
        if written.is_err() {
            // Remove the bytes of a commit that was written only in part; if this fails, the table ignores the
            // incomplete commit when it is opened again.
            let _ = log.set_len(before);
        }
        written.map_err(io)?;
        if self.way == Breakage::SyncsNothing { Ok(()) } else { log.sync_data().map_err(io) }
    }

    fn append_later(&self, writes: &[Write]) {
        let (log, bytes) = (self.log.clone(), encode(writes));
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(2));
            let _ = held(&log).write_all(&bytes);
        });
    }
}

impl Table for FileTable {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        Ok(Box::new(Snapshot(held(&self.rows).clone())))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        match self.way {
            Breakage::AcknowledgesEarly => self.append_later(writes),
            Breakage::RowByRow => {
                for write in writes {
                    self.append(std::slice::from_ref(write))?;
                    // While it writes a commit, the table sleeps for most of the time, so that most kills hit a partly
                    // written commit.
                    thread::sleep(Duration::from_micros(500));
                }
            }
            Breakage::ShowsEarly => {
                apply(Arc::make_mut(&mut held(&self.rows)), writes);
                thread::sleep(Duration::from_millis(1));
                self.append(writes)?;
            }
            _ => self.append(writes)?,
        }
        apply(Arc::make_mut(&mut held(&self.rows)), writes);
        Ok(())
    }

    fn recover(&self) -> Result<()> {
        Ok(())
    }
}

/// Writes a new log file with a single commit, which contains the current rows. Opening the table reads the whole log
/// file, so a log with many superseded rows would be slow to open. This rewriting speeds up the test that kills
/// compacting processes a hundred times and reopens the log each time; it took six times as long without it.
fn rewritten(path: &Path, rows: &Rows) -> std::io::Result<File> {
    let puts: Vec<Write> = rows.iter().map(|(key, value)| Write::Put(key.clone(), value.clone())).collect();
    let new = path.with_extension("new");
    fs::write(&new, encode(&puts))?;
    let log = OpenOptions::new().append(true).open(&new)?;
    log.sync_data()?;
    fs::rename(&new, path)?;
    Ok(log)
}

fn apply(rows: &mut Rows, writes: &[Write]) {
    for write in writes {
        match write {
            Write::Put(key, value) => drop(rows.insert(key.clone(), value.clone())),
            Write::Delete(key) => drop(rows.remove(key)),
        }
    }
}

fn encode(writes: &[Write]) -> Vec<u8> {
    let mut body = Vec::new();
    let mut part = |bytes: &[u8]| {
        body.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
        body.extend(bytes);
    };
    for write in writes {
        match write {
            Write::Put(key, value) => [&b"put"[..], key, value].into_iter().for_each(&mut part),
            Write::Delete(key) => [&b"delete"[..], key, b""].into_iter().for_each(&mut part),
        }
    }
    let mut bytes = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(crc32fast::hash(&body).to_be_bytes());
    bytes.extend(body);
    bytes
}

fn number(bytes: &[u8]) -> usize {
    u32::from_be_bytes(bytes.try_into().unwrap()) as usize
}

/// Parses all complete commits of the log, and returns them with their total length in bytes.
fn commits(bytes: &[u8]) -> Result<(Vec<Vec<Write>>, usize)> {
    let (mut commits, mut at) = (Vec::new(), 0);
    while let Some(head) = bytes.get(at..at + HEAD) {
        let Some(body) = bytes.get(at + HEAD..at + HEAD + number(&head[..4])) else { break };
        if crc32fast::hash(body).to_be_bytes() != head[4..] {
            return Err(Error::new(ErrorKind::Corrupt, Operation::Open, "file"));
        }
        commits.push(decode(body));
        at += HEAD + body.len();
    }
    Ok((commits, at))
}

fn decode(mut body: &[u8]) -> Vec<Write> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = body.split_at_checked(4) {
        let (part, rest) = rest.split_at(number(length));
        parts.push(part.to_vec());
        body = rest;
    }
    parts
        .chunks_exact(3)
        .map(|write| match &write[0][..] {
            b"put" => Write::Put(write[1].clone(), write[2].clone()),
            _ => Write::Delete(write[1].clone()),
        })
        .collect()
}

struct Snapshot(Arc<Rows>);

impl View for Snapshot {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        if from < to {
            for (key, value) in self.0.range(from.to_vec()..to.to_vec()) {
                if let ControlFlow::Break(()) = visit(key, value) {
                    break;
                }
            }
        }
        Ok(())
    }
}
