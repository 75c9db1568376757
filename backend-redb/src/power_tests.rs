//! Tests which of redb's writes reach a simulated disk before a power cut, and in which order. `tests/power.rs` runs
//! conformance cases on the same simulated disk, `tests/disk/mod.rs`.

use std::collections::BTreeMap;

use kv_mvcc::Write;
use redb::ReadableTable;

use super::*;
use crate::table::OpenDatabase;

#[path = "../tests/disk/mod.rs"]
mod disk;

use disk::Disk;

/// The writes of commit number `n`: short and long rows with the value `n`, and one row that a later commit deletes.
fn writes(n: u32) -> Vec<Write> {
    let mut writes: Vec<Write> =
        (0..4).map(|i| Write::Put(format!("all/{i}").into_bytes(), n.to_be_bytes().repeat(1 + i * 400))).collect();
    writes.push(Write::Put(format!("log/{n}").into_bytes(), vec![n.to_le_bytes()[0]; 3000]));
    if let Some(old) = n.checked_sub(20) {
        writes.push(Write::Delete(format!("log/{old}").into_bytes()));
    }
    writes
}

fn content(opened: &OpenDatabase<Disk>) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let Some(rows) = opened.rows().unwrap() else { return BTreeMap::new() };
    rows.iter()
        .unwrap()
        .map(|row| row.unwrap())
        .map(|(key, value)| (key.value().into(), value.value().into()))
        .collect()
}

/// The rows that the table must contain after commits 1 to `n`.
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

/// Opens the database and makes one commit after another until the power fails; returns the number of the last
/// acknowledged commit.
fn work(disk: &Disk, mut done: u32, random: &mut fastrand::Rng) -> u32 {
    loop {
        let Ok(opened) = OpenDatabase::on(disk.clone()) else { return done };
        for _ in 0..random.u32(0..4) {
            if opened.commit(&writes(done + 1)).is_err() {
                return done;
            }
            done += 1;
        }
    }
}

#[test]
fn power_cut_leaves_seen_or_next_commit() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let disk = Disk::default();
        OpenDatabase::on(disk.clone()).unwrap().commit(&writes(1)).unwrap();
        // Simulate a process that is killed while the power stays on: the file keeps all its writes, synced or not.
        disk.set_operations_left(Some(random.u32(0..60)));
        work(&disk, 1, &mut random);
        // Open the file after the first kill, kill this second process as well, and only then cut the power.
        disk.set_operations_left(None);
        let opened = OpenDatabase::on(disk.clone()).unwrap();
        let seen = content(&opened);
        let n = (0..).find(|n| expected(*n) == seen).unwrap();
        disk.set_operations_left(Some(random.u32(0..60)));
        let acknowledged = opened.commit(&writes(n + 1)).is_ok();
        disk.set_operations_left(None);
        let left = content(&OpenDatabase::on(disk.after_power_cut(&mut random)).unwrap());
        assert!((n.saturating_sub(1)..=n + 1).any(|n| left == expected(n)), "seed {seed}");
        assert!(!acknowledged || left == expected(n + 1), "seed {seed}");
    }
}

#[test]
fn commit_takes_two_syncs_and_first_one_more() {
    let disk = Disk::default();
    OpenDatabase::on(disk.clone()).unwrap().commit(&writes(1)).unwrap();
    for n in (2..50).step_by(2) {
        let before = disk.state().syncs;
        let opened = OpenDatabase::on(disk.clone()).unwrap();
        assert_eq!(disk.state().syncs - before, 0, "to open");
        opened.commit(&writes(n)).unwrap();
        assert_eq!(disk.state().syncs - before, 3, "to commit");
        opened.commit(&writes(n + 1)).unwrap();
        assert_eq!(disk.state().syncs - before, 5, "to commit once more");
        drop(opened);
        assert_eq!(disk.state().syncs - before, 5, "to close");
    }
    let before = disk.state().writes;
    assert_eq!(content(&OpenDatabase::on(disk.clone()).unwrap()), expected(49));
    assert_eq!(disk.state().writes, before, "a look writes nothing");
}

#[test]
fn closed_file_is_never_touched() {
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
