//! Simulates a disk that, at a power cut, loses unsynced data and tears unfinished writes.

#![allow(clippy::unwrap_used, dead_code, reason = "tests; not every binary has all of it")]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use redb::StorageBackend;

/// A file on a simulated in-memory disk; clones of a `Disk` share the file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    state: Arc<Mutex<State>>,
    /// The number of disk operations that remain until the power fails; `None` if the power stays on.
    power: Arc<Mutex<Option<u32>>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub(crate) content: Vec<u8>,
    /// The durable content of the file: what remains after a power cut if no unsynced write reached the disk.
    durable: Vec<u8>,
    /// The changes of the file that were not synced; each of them may or may not survive a power cut.
    unsynced: Vec<Change>,
    pub(crate) syncs: u32,
    pub(crate) writes: u32,
}

#[derive(Clone, Debug)]
enum Change {
    Write(usize, Vec<u8>),
    Length(usize),
}

const SECTOR: usize = 512;

impl Disk {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Creates a second file on the same simulated disk, which loses power together with the first file.
    pub(crate) fn beside(&self) -> Self {
        Self { state: Arc::default(), power: Arc::clone(&self.power) }
    }

    /// Lets the power fail after this number of further disk operations; `None` means that the power stays on.
    pub(crate) fn set_operations_left(&self, operations: Option<u32>) {
        *self.power.lock().unwrap() = operations;
    }

    /// Counts one disk operation; fails if the simulated power has failed.
    fn operation(&self) -> io::Result<MutexGuard<'_, State>> {
        match &mut *self.power.lock().unwrap() {
            Some(0) => return Err(io::Error::other("no power")),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(self.state())
    }

    /// Lets the power fail, and returns the file as it is afterwards: each unsynced sector has its old or its new
    /// content.
    pub(crate) fn after_power_cut(&self, random: &mut fastrand::Rng) -> Self {
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
        let state = State { content: left.clone(), durable: left, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), power: Arc::default() }
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
        let State { durable, unsynced, .. } = &mut *state;
        for change in unsynced.drain(..) {
            match change {
                Change::Length(length) => durable.resize(length, 0),
                Change::Write(start, data) => durable[start..start + data.len()].copy_from_slice(&data),
            }
        }
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
