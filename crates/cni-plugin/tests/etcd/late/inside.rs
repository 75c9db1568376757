//! Observes an etcd process from outside, even while the process is stopped: its unread bytes, its write-ahead log on
//! disk, and whether it is processing a request.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::server::Etcd;

/// Time limit for etcd to process all requests that its sockets have received.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of bytes that are read from etcd's write-ahead log in one step.
const PIECE: usize = 256 * 1024;
/// The numeric codes of TCP states in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";
const LISTEN: &str = "0A";

/// The server side of all client connections of an etcd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Connections {
    /// The number of client connections, including those that etcd has not accepted yet.
    pub(super) count: usize,
    /// The number of bytes that etcd has not read yet, plus the number of connections that etcd has not accepted yet.
    pub(super) unread: u64,
}

/// Counts an etcd's client connections, including those of dead clients from which etcd has not read all data yet.
pub(super) fn connections(etcd: &Etcd) -> Connections {
    let port = etcd.address().port();
    let table = fs::read_to_string("/proc/net/tcp").expect("/proc/net/tcp can be read");
    let mut connections = Connections::default();
    for line in table.lines().skip(1) {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, state, queues, ..] = columns[..] else { continue };
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        if hex(local.split_once(':').unwrap().1) != u64::from(port) || state == TIME_WAIT {
            continue;
        }
        connections.count += usize::from(state != LISTEN);
        connections.unread += hex(queues.split_once(':').unwrap().1);
    }
    connections
}

/// Returns how many requests an etcd has started to process, and how many requests are unfinished.
fn requests(etcd: &Etcd) -> (u64, u64) {
    let metrics = etcd.ask("/metrics").expect("an etcd that is well tells what it does");
    let sum = |name: &str| -> u64 {
        let lines = metrics.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    let (begun, ended) = (sum("grpc_server_started_total"), sum("grpc_server_handled_total"));
    assert!(begun > 0, "this etcd does not count its requests: what is in flight cannot be known");
    (begun, begun.saturating_sub(ended))
}

/// Waits until an etcd has no unfinished request and its connections meet the given condition, in two consecutive
/// checks.
fn until(etcd: &Etcd, what: &str, holds: impl Fn(Connections) -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    let mut before = None;
    loop {
        let now = connections(etcd);
        let (begun, open) = if holds(now) { requests(etcd) } else { (0, 1) };
        let calm = (open == 0).then_some(begun);
        if calm.is_some() && calm == before {
            return;
        }
        before = calm;
        assert!(Instant::now() < end, "etcd has not {what}: {now:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until etcd has read and processed all data on its connections.
pub(super) fn until_all_is_read(etcd: &Etcd) {
    until(etcd, "read all", |now| now.unread == 0);
}

/// Waits until all client connections of an etcd are closed and their requests are processed.
pub(super) fn until_disconnected(etcd: &Etcd) {
    until(etcd, "ended all connections", |now| now == Connections::default());
}

/// An etcd's write-ahead log, read from a marked position on. etcd logs each proposal before applying the proposal,
/// even if the conditions of the transaction do not hold.
#[derive(Debug)]
pub(super) struct Log {
    folder: PathBuf,
    /// The marked position: a file of etcd's write-ahead log, and an offset in that file.
    mark: (PathBuf, u64),
}

impl Log {
    pub(super) fn of(etcd: &Etcd) -> Self {
        let mut log = Self { folder: etcd.data().join("member/wal"), mark: Default::default() };
        log.mark();
        log
    }

    /// Marks the current end of etcd's write-ahead log; [`count`](Self::count) counts only later writes.
    pub(super) fn mark(&mut self) {
        let (file, before) = self.files().pop().expect("an etcd has a log");
        self.mark = (file.clone(), before + written(&file, before).len() as u64);
    }

    /// Counts how often the given bytes occur in what etcd has written to its write-ahead log since the last mark.
    pub(super) fn count(&self, bytes: &[u8]) -> usize {
        let finder = |(file, from): (PathBuf, u64)| occurrences(&written(&file, from), bytes);
        self.files().into_iter().map(finder).sum()
    }

    /// Lists the write-ahead log files that etcd has written since the last mark, each with the byte offset where the
    /// new data starts.
    fn files(&self) -> Vec<(PathBuf, u64)> {
        let entries = self.folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "wal")).collect();
        files.sort();
        let (first, place) = &self.mark;
        let later = files.into_iter().filter(|path| path >= first);
        later.map(|path| (path.clone(), if path == *first { *place } else { 0 })).collect()
    }
}

/// Reads the bytes that etcd has written to a write-ahead log file from an offset on. etcd preallocates the file and
/// fills it with zeros.
fn written(file: &Path, from: u64) -> Vec<u8> {
    let mut file = File::open(file).unwrap();
    file.seek(SeekFrom::Start(from)).unwrap();
    let mut bytes = Vec::new();
    loop {
        let before = bytes.len();
        file.by_ref().take(PIECE as u64).read_to_end(&mut bytes).unwrap();
        if bytes[before..].iter().all(|byte| *byte == 0) {
            let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            bytes.truncate(end);
            return bytes;
        }
    }
}

fn occurrences(bytes: &[u8], wanted: &[u8]) -> usize {
    bytes.windows(wanted.len()).filter(|part| *part == wanted).count()
}
