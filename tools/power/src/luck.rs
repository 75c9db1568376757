//! The changes that survive a power cut, chosen by a seed.

use fastrand::Rng;

/// The unsynced changes to a folder that survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folders {
    /// The first so many, by chance: none, some or all.
    Prefix,
    /// None: a name is durable when its folder was synced, and not before.
    Strict,
}

/// A power cut: the chances of what was not synced.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The same seed and the same changes leave the same image.
    pub seed: u64,
    /// The changes to folders that survive.
    pub folders: Folders,
}

/// The chances of one cut.
pub(crate) struct Luck {
    random: Rng,
    folders: Folders,
    /// How many of a hundred sectors survive.
    percent: u8,
}

impl Luck {
    pub(crate) fn new(cut: Cut) -> Self {
        let mut random = Rng::with_seed(cut.seed);
        // Nearly all or nearly nothing finds other faults than a half.
        let percent = random.choice([0, 10, 50, 50, 90, 100]).unwrap_or(50);
        Self { random, folders: cut.folders, percent }
    }

    fn survives(&mut self) -> bool {
        self.random.u8(0..100) < self.percent
    }

    /// How many of the writes to one sector got through: none, all or some.
    pub(crate) fn of_sector(&mut self, writes: usize) -> usize {
        match self.survives() {
            true if self.random.u8(0..4) == 0 => self.random.usize(1..=writes),
            true => writes,
            false => 0,
        }
    }

    /// How many of the changes of one length got through.
    pub(crate) fn of_length(&mut self, changes: usize) -> usize {
        if self.survives() { changes } else { self.random.usize(0..=changes) }
    }

    /// How many of the changes to one folder got through.
    pub(crate) fn of_folder(&mut self, changes: usize) -> usize {
        match self.folders {
            Folders::Prefix => self.of_length(changes),
            Folders::Strict => 0,
        }
    }

    /// Whether the newer one of two times got through.
    pub(crate) fn of_time(&mut self) -> bool {
        self.survives()
    }
}
