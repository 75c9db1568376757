//! Tests the journal on a simulated disk that can lose power at any moment, with processes that can be killed at any
//! moment, and with views that are open during commits.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::table::Visit;

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

/// Size in bytes of the journal in these tests, so small that a few commits fill it.
const BYTES: u64 = 4096;

/// A simulated disk with a journal and with a table that may lose its last commit.
#[derive(Clone, Debug, Default)]
struct Disk(Arc<Mutex<DiskState>>);

#[derive(Debug, Default)]
struct DiskState {
    content: Vec<u8>,
    durable: Vec<u8>,
    /// The offset and the bytes of each unsynced write, which a power failure can undo.
    unsynced: Vec<(usize, Vec<u8>)>,
    noted: DurableParts,
    table: Rows,
    table_durable: Rows,
    /// The number of disk operations that succeed before all further ones fail.
    left: Option<u32>,
    /// If true, the next sync fails, but the simulated operating system marks the written pages as clean nevertheless.
    lies: bool,
    syncs: u32,
    commits: u32,
}

const SECTOR: usize = 512;

impl Disk {
    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap()
    }

    fn operation(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        let mut state = self.state();
        match &mut state.left {
            Some(0) => return Err(io::Error::other("no power")),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(state)
    }

    fn open(&self) -> Result<JournaledTable> {
        JournaledTable::with_bytes(Box::new(Engine(self.clone())), Box::new(self.clone()), "test", BYTES)
    }

    /// The simulated disk after a power failure, which may have undone unsynced writes and all notes.
    fn cut_power(&self, random: &mut fastrand::Rng) -> Self {
        let state = self.state();
        let mut content = state.durable.clone();
        for (start, bytes) in &state.unsynced {
            for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                if random.bool() {
                    let start = start + number * SECTOR;
                    content.resize(content.len().max(start + sector.len()), 0);
                    content[start..start + sector.len()].copy_from_slice(sector);
                }
            }
        }
        let table = if random.bool() { state.table.clone() } else { state.table_durable.clone() };
        let noted = if random.bool() { DurableParts::default() } else { state.noted };
        let durable = content.clone();
        let table_durable = table.clone();
        Self(Arc::new(Mutex::new(DiskState { content, durable, noted, table, table_durable, ..DiskState::default() })))
    }
}

impl Medium for Disk {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let state = self.operation()?;
        let from = state.content.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
        let length = from.len().min(buffer.len());
        buffer[..length].copy_from_slice(&from[..length]);
        Ok(length)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        assert!(start + bytes.len() <= usize::try_from(BYTES).unwrap(), "a write behind the end");
        let mut state = self.operation()?;
        let end = state.content.len().max(start + bytes.len());
        state.content.resize(end, 0);
        state.content[start..start + bytes.len()].copy_from_slice(bytes);
        state.unsynced.push((start, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.operation()?;
        if std::mem::take(&mut state.lies) {
            state.unsynced.clear();
            return Err(io::Error::other("the disk is broken"));
        }
        let unsynced = std::mem::take(&mut state.unsynced);
        for (start, bytes) in unsynced {
            let end = state.durable.len().max(start + bytes.len());
            state.durable.resize(end, 0);
            state.durable[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        state.syncs += 1;
        Ok(())
    }

    fn noted(&self) -> DurableParts {
        self.state().noted
    }

    fn note(&self, noted: DurableParts) {
        if let Ok(mut state) = self.operation() {
            state.noted = noted;
        }
    }
}

/// A simulated engine that can be killed between a commit and the sync of that commit.
#[derive(Debug)]
struct Engine(Disk);

struct Snapshot(Rows);

impl View for Snapshot {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(key).cloned())
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        let within = self.0.iter().filter(|(key, _)| from <= key.as_slice() && key.as_slice() < to);
        for (key, value) in within {
            if visit(key, value).is_break() {
                break;
            }
        }
        Ok(())
    }
}

impl Table for Engine {
    fn view(&self) -> Result<Box<dyn View + '_>> {
        Ok(Box::new(Snapshot(self.0.state().table.clone())))
    }

    fn commit(&self, writes: &[Write]) -> Result<()> {
        let failed = |error| Error::new(ErrorKind::CommitIo, Operation::Txn, "test").with_source(error);
        apply(&mut self.0.operation().map_err(failed)?.table, writes);
        let mut state = self.0.operation().map_err(failed)?;
        state.table_durable = state.table.clone();
        state.commits += 1;
        Ok(())
    }

    fn recover(&self) -> Result<()> {
        Ok(())
    }
}

fn apply(rows: &mut Rows, writes: &[Write]) {
    for write in writes {
        match write {
            Write::Put(key, value) => drop(rows.insert(key.clone(), value.clone())),
            Write::Delete(key) => drop(rows.remove(key)),
        }
    }
}

fn rows(table: &dyn Table) -> Rows {
    let mut rows = Rows::new();
    let mut last = None;
    table
        .view()
        .unwrap()
        .scan(b"", b"\xff\xff", &mut |key, value| {
            assert!(last.as_deref() < Some(key), "rows out of order");
            last = Some(key.to_vec());
            rows.insert(key.to_vec(), value.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
    rows
}

/// The writes of commit number `n`: one row that every commit writes, and rows that are added and removed. Some of the
/// commits are too large for the journal.
fn writes(n: u32) -> Vec<Write> {
    let length = if n % 17 == 5 { 5000 } else { 100 + n as usize * 37 % 900 };
    let mut writes = vec![
        Write::Put(b"newest".to_vec(), n.to_be_bytes().to_vec()),
        Write::Put(format!("log/{n:05}").into_bytes(), vec![n.to_le_bytes()[0]; length]),
        Write::Put(format!("slot/{}", n % 7).into_bytes(), n.to_be_bytes().to_vec()),
    ];
    if let Some(old) = n.checked_sub(5) {
        writes.push(Write::Delete(format!("log/{old:05}").into_bytes()));
    }
    if n.is_multiple_of(11) {
        writes.clear();
    }
    writes
}

fn expected(n: u32) -> Rows {
    let mut rows = Rows::new();
    (1..=n).for_each(|n| apply(&mut rows, &writes(n)));
    rows
}

/// Opens the table and commits repeatedly until a disk operation fails. Returns the number of the last acknowledged
/// commit.
fn work(disk: &Disk, mut done: u32, random: &mut fastrand::Rng) -> u32 {
    loop {
        let Ok(table) = disk.open() else { return done };
        for _ in 0..random.u32(0..4) {
            if table.commit(&writes(done + 1)).is_err() {
                return done;
            }
            done += 1;
        }
    }
}

#[test]
fn journal_keeps_acknowledged_and_seen_after_power_cuts() {
    for seed in 0..400 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut disk, mut done) = (Disk::default(), 0);
        for _ in 0..6 {
            disk.state().left = Some(random.u32(0..60));
            let acknowledged = work(&disk, done, &mut random);
            disk.state().left = None;
            if random.bool() {
                disk = disk.cut_power(&mut random);
            }
            let seen = rows(&disk.open().unwrap());
            done = match acknowledged {
                n if seen == expected(n) => n,
                n if seen == expected(n + 1) => n + 1,
                n => panic!("seed {seed}: neither {n} nor the next: {:?}", seen.keys()),
            };
            if random.bool() {
                disk = disk.cut_power(&mut random);
                assert!(rows(&disk.open().unwrap()) == seen, "seed {seed}: rows that were read are gone");
            }
        }
        assert!(done > 3, "seed {seed}: {done} commits in all");
    }
}

#[test]
fn journal_record_length_is_known_beforehand() {
    let mut writes = Vec::new();
    for n in 0..20 {
        assert_eq!(encoded_bytes(&writes), encode_record(7, &writes).len() as u64);
        writes.extend([Write::Put(vec![1; n], vec![2; 3 * n]), Write::Delete(vec![3; n])]);
    }
}

/// A commit that is too large for the journal must reach the engine sorted by key, whether or not the journal is empty.
#[test]
fn journal_is_bypassed_by_large_commit() {
    let disk = Disk::default();
    let table = disk.open().unwrap();
    let put = |key: &str, length: usize| Write::Put(key.into(), vec![7; length]);
    table.commit(&[put("b", 1)]).unwrap();
    for small in [true, false] {
        if small {
            table.commit(&[put("b", 2), put("d", 1)]).unwrap();
        }
        let commits = disk.state().commits;
        table.commit(&[put("c", 5000), put("a", 5000), Write::Delete(b"d".to_vec())]).unwrap();
        assert_eq!(disk.state().commits, commits + 1);
        let expected = [("a", 5000), ("b", 2), ("c", 5000)].map(|(key, length)| (key.into(), vec![7; length]));
        assert_eq!(rows(&table), expected.into());
    }
}

#[test]
fn journal_commit_takes_one_sync_and_leaves_engine_alone() {
    let disk = Disk::default();
    let small = |n: u32| [Write::Put(b"n".to_vec(), n.to_be_bytes().repeat(200))];
    disk.open().unwrap().commit(&small(0)).unwrap();
    let before = disk.state().commits;
    for n in 1..=4 {
        let syncs = disk.state().syncs;
        let table = disk.open().unwrap();
        assert_eq!(disk.state().syncs, syncs, "to open");
        table.commit(&small(n)).unwrap();
        drop(table);
        assert_eq!(disk.state().syncs, syncs + 1, "in all");
    }
    assert_eq!(disk.state().commits, before);
    disk.open().unwrap().commit(&small(5)).unwrap();
    assert_eq!(disk.state().commits, before + 1, "the journal is full");
    disk.open().unwrap().checkpoint().unwrap();
    assert_eq!(disk.state().table.get(b"n".as_slice()), Some(&5_u32.to_be_bytes().repeat(200)));
}

#[test]
fn journal_notes_what_opening_found_durable() {
    let disk = Disk::default();
    let table = disk.open().unwrap();
    (1..=3).for_each(|n| table.commit(&writes(n)).unwrap());
    drop(table);
    let noted = disk.state().noted;
    assert_ne!(noted, DurableParts::default());
    disk.state().noted = DurableParts::default();
    disk.open().unwrap();
    // The engine shows a commit that may not be durable, so opening the table must make one more checkpoint.
    assert_eq!(disk.state().noted, DurableParts { checkpoint: noted.checkpoint + 1, ..noted });
}

#[test]
fn journal_makes_up_for_failed_sync() {
    let disk = Disk::default();
    let table = disk.open().unwrap();
    (1..=3).for_each(|n| table.commit(&writes(n)).unwrap());
    disk.state().lies = true;
    assert_eq!(*table.commit(&writes(4)).unwrap_err().kind(), ErrorKind::CommitIo);
    table.recover().unwrap();
    assert_eq!(rows(&table), expected(4), "it was written");
    for seed in 0..20 {
        let after = disk.cut_power(&mut fastrand::Rng::with_seed(seed));
        assert_eq!(rows(&after.open().unwrap()), expected(4), "seed {seed}");
    }
    table.commit(&writes(5)).unwrap();
}

#[test]
fn journal_views_are_snapshots_beside_writer() {
    let disk = Disk::default();
    let table = disk.open().unwrap();
    let all = |n: u32| (0..8).map(|i| Write::Put(vec![b'r', i], n.to_be_bytes().repeat(20))).collect::<Vec<_>>();
    table.commit(&all(0)).unwrap();
    let scans = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut last = 0;
            while last < 500 {
                let rows = rows(&table);
                let rows = rows.iter().filter(|(key, _)| key[0] == b'r');
                let values: Vec<&Vec<u8>> = rows.map(|(_, value)| value).collect();
                assert!(values.len() == 8 && values.iter().all(|value| *value == values[0]), "{values:?}");
                let now = u32::from_be_bytes(values[0][..4].try_into().unwrap());
                assert!(now >= last, "a view went back");
                last = now;
                scans.fetch_add(1, Ordering::Relaxed);
            }
        });
        // The test commits until the reading thread has made many scans.
        let mut n = 0;
        while !reader.is_finished() {
            let seen = scans.load(Ordering::Relaxed);
            n = (n + 1).min(if seen < 100 { 499 } else { 500 });
            table.commit(&all(n)).unwrap();
        }
    });
    assert!(disk.state().commits > 10, "rows have moved to the engine meanwhile");
}

#[test]
fn journal_is_refused_when_not_of_table() {
    let disk = Disk::default();
    let table = disk.open().unwrap();
    (1..=3).for_each(|n| table.commit(&writes(n)).unwrap());
    drop(table);
    let refused = |what: &str| {
        let error = disk.open().unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Corrupt, "{what}");
    };
    let good = disk.state().table.clone();
    disk.state().table.clear();
    refused("the table has lost everything");
    disk.state().table.clone_from(&good);
    disk.state().table.insert(JOURNAL_ROW_KEY.to_vec(), b"odd".to_vec());
    refused("the table's row is damaged");
    disk.state().table.clone_from(&good);
    let table = disk.open().unwrap();
    // The commits of this loop fill the journal more than once. After the commits, the test restores the engine's table
    // from `good`, a copy made before the commits.
    (4..40).for_each(|n| table.commit(&writes(n)).unwrap());
    drop(table);
    disk.state().table = good;
    refused("records between the table and the journal are missing");
}
