//! The state of an etcd as seen from outside, also while it stands still: the bytes that it has not read yet, the bytes
//! that it has written to its log, and whether it is at work on anything.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::server::Etcd;

/// How long an etcd may take for the requests that it was sent.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much of a log is read at once.
const PIECE: usize = 256 * 1024;
/// States of sockets in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";
const LISTEN: &str = "0A";

/// The server's ends of connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Connections {
    /// How many there are, those included that wait to be accepted.
    pub(super) count: usize,
    /// How many bytes have come and were not read, and how many connections wait to be accepted.
    pub(super) unread: u64,
}

/// The connections of clients to an etcd. A connection whose client is dead is there until the server has read all that
/// came on it.
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

/// How many requests an etcd has begun with, and how many of them it has not ended.
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

/// Waits until an etcd has read all that it was sent, and has nothing to do for any client, twice in a row.
fn until(etcd: &Etcd, what: &str, holds: impl Fn(Connections) -> bool) {
    let end = Instant::now() + PATIENCE;
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

/// Waits until all is read and done that was sent on any connection.
pub(super) fn until_all_is_read(etcd: &Etcd) {
    until(etcd, "read all", |now| now.unread == 0);
}

/// Waits until there is no connection any more, and nothing to be done for those that were there.
pub(super) fn until_nobody_is_connected(etcd: &Etcd) {
    until(etcd, "ended all connections", |now| now == Connections::default());
}

/// An etcd's log on disk, from a mark on. A proposal stands there before it is carried out, and also if its guards do
/// not hold.
#[derive(Debug)]
pub(super) struct Log {
    folder: PathBuf,
    /// A file, and a place in it.
    mark: (PathBuf, u64),
}

impl Log {
    pub(super) fn of(etcd: &Etcd) -> Self {
        let mut log = Self { folder: etcd.data().join("member/wal"), mark: Default::default() };
        log.mark();
        log
    }

    /// Puts the mark at its end.
    pub(super) fn mark(&mut self) {
        let (file, before) = self.files().pop().expect("an etcd has a log");
        self.mark = (file.clone(), before + written(&file, before).len() as u64);
    }

    /// How often these bytes were written since the mark.
    pub(super) fn count(&self, bytes: &[u8]) -> usize {
        let finder = |(file, from): (PathBuf, u64)| occurrences(&written(&file, from), bytes);
        self.files().into_iter().map(finder).sum()
    }

    /// The files with something after the mark, and where that begins.
    fn files(&self) -> Vec<(PathBuf, u64)> {
        let entries = self.folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "wal")).collect();
        files.sort();
        let (first, place) = &self.mark;
        let later = files.into_iter().filter(|path| path >= first);
        later.map(|path| (path.clone(), if path == *first { *place } else { 0 })).collect()
    }
}

/// The bytes that are written in a file from a place on. The file was filled with zeros before.
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
