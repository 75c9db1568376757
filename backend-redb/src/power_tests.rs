//! Power cuts: a disk that forgets what was not synced, and tears what it had begun to write.

use std::collections::BTreeMap;

use kv_mvcc::Write;
use redb::ReadableTable;

use super::*;
use crate::table::Opened;

/// A disk in memory. Handles share it.
#[derive(Clone, Debug, Default)]
struct Disk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// What the programs see.
    content: Vec<u8>,
    /// What would be there after a power cut, if nothing else had got through.
    durable: Vec<u8>,
    /// What may or may not have got through.
    unsynced: Vec<Change>,
    /// After so many more operations the power fails.
    operations_left: Option<u32>,
    syncs: u32,
    writes: u32,
}

#[derive(Debug)]
enum Change {
    Write(usize, Vec<u8>),
    Length(usize),
}

const SECTOR: usize = 512;

impl Disk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// One operation, unless the power fails.
    fn operation(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        match &mut state.operations_left {
            Some(0) => return Err(io::Error::other("no power")),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(state)
    }

    /// The power fails: each sector that was not synced may be the old one or the new one. The disk that is left.
    fn after_power_cut(&self, random: &mut fastrand::Rng) -> Self {
        let mut state = self.state();
        let mut left = std::mem::take(&mut state.durable);
        for change in &state.unsynced {
            match change {
                Change::Length(length) if random.bool() => left.resize(*length, 0),
                Change::Length(_) => {}
                Change::Write(offset, data) => {
                    for (i, sector) in data.chunks(SECTOR).enumerate() {
                        let start = offset + i * SECTOR;
                        if let Some(place) = left.get_mut(start..start + sector.len())
                            && random.bool()
                        {
                            place.copy_from_slice(sector);
                        }
                    }
                }
            }
        }
        Self(Arc::new(Mutex::new(State { content: left.clone(), durable: left, ..State::default() })))
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.operation()?.content.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        let state = self.operation()?;
        let found = state.content.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(found);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).unwrap();
        let mut state = self.operation()?;
        state.content.resize(len, 0);
        state.unsynced.push(Change::Length(len));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.operation()?;
        state.durable = state.content.clone();
        state.unsynced.clear();
        state.syncs += 1;
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        let mut state = self.operation()?;
        state.content[start..start + data.len()].copy_from_slice(data);
        state.unsynced.push(Change::Write(start, data.to_vec()));
        state.writes += 1;
        Ok(())
    }
}

/// The writes of commit `n`: a few rows that all say `n`, some long, and one that goes away again.
fn writes(n: u32) -> Vec<Write> {
    let mut writes: Vec<Write> =
        (0..4).map(|i| Write::Put(format!("all/{i}").into_bytes(), n.to_be_bytes().repeat(1 + i * 400))).collect();
    writes.push(Write::Put(format!("log/{n}").into_bytes(), vec![n.to_le_bytes()[0]; 3000]));
    if let Some(old) = n.checked_sub(20) {
        writes.push(Write::Delete(format!("log/{old}").into_bytes()));
    }
    writes
}

fn content(opened: &Opened<Disk>) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let Some(rows) = opened.rows().unwrap() else { return BTreeMap::new() };
    rows.iter()
        .unwrap()
        .map(|row| row.unwrap())
        .map(|(key, value)| (key.value().into(), value.value().into()))
        .collect()
}

/// What is there after commits 1 to `n`.
fn expected(n: u32) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut rows = BTreeMap::new();
    for write in (1..=n).flat_map(writes) {
        match write {
            Write::Put(key, value) => drop(rows.insert(key, value)),
            Write::Delete(key) => drop(rows.remove(&key)),
        }
    }
    rows
}

/// Opens and commits, again and again, until the power fails; gives the last commit that was acknowledged.
fn work(disk: &Disk, mut done: u32, random: &mut fastrand::Rng) -> u32 {
    loop {
        let Ok(opened) = Opened::on(disk.clone()) else { return done };
        for _ in 0..random.u32(0..4) {
            if opened.commit(&writes(done + 1)).is_err() {
                return done;
            }
            done += 1;
        }
    }
}

#[test]
fn a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged() {
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut disk = Disk::default();
        // Making a file is not what is tested here.
        let mut done = 1;
        Opened::on(disk.clone()).unwrap().commit(&writes(done)).unwrap();
        for cut in 0..6 {
            disk.state().operations_left = Some(random.u32(0..200));
            done = work(&disk, done, &mut random);
            disk = disk.after_power_cut(&mut random);
            let opened = Opened::on(disk.clone()).unwrap();
            let found = content(&opened);
            if found == expected(done + 1) {
                done += 1;
            }
            assert!(found == expected(done), "seed {seed}, cut {cut}: not what was there after commit {done}");
        }
    }
}

/// What can be read once the file is open is durable, also what a killed process left behind.
#[test]
fn what_is_seen_after_opening_survives_a_power_cut() {
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let disk = Disk::default();
        Opened::on(disk.clone()).unwrap().commit(&writes(1)).unwrap();
        // Killed, with power: what was written stays, synced or not.
        disk.state().operations_left = Some(random.u32(0..60));
        work(&disk, 1, &mut random);
        disk.state().operations_left = None;
        let seen = content(&Opened::on(disk.clone()).unwrap());
        let after = Opened::on(disk.after_power_cut(&mut random)).unwrap();
        assert!(content(&after) == seen, "seed {seed}");
    }
}

#[test]
fn a_short_life_takes_three_syncs_and_a_look_writes_nothing() {
    let disk = Disk::default();
    Opened::on(disk.clone()).unwrap().commit(&writes(1)).unwrap();
    for n in 2..50 {
        let before = disk.state().syncs;
        let opened = Opened::on(disk.clone()).unwrap();
        assert_eq!(disk.state().syncs - before, 1, "to open");
        opened.commit(&writes(n)).unwrap();
        assert_eq!(disk.state().syncs - before, 3, "to commit");
        drop(opened);
        assert_eq!(disk.state().syncs - before, 3, "to close");
    }
    let before = disk.state().writes;
    assert_eq!(content(&Opened::on(disk.clone()).unwrap()), expected(49));
    assert_eq!(disk.state().writes, before);
}

#[test]
fn nothing_is_done_to_a_closed_file() {
    let disk = Disk::default();
    let (file, switch) = DbFile::new(disk.clone());
    switch.opened().unwrap();
    file.set_len(10).unwrap();
    switch.close();
    assert!(file.len().is_err());
    assert!(file.read(0, &mut [0]).is_err());
    assert!(file.write(0, &[1]).is_err());
    assert!(file.set_len(0).is_err());
    assert!(file.sync_data().is_err());
    assert_eq!(disk.state().content, [0; 10]);
}
