//! Keeps the durable and the visible state of the files and folders on the test disk, and the unsynced changes between
//! the two. A random seed decides which unsynced changes survive a power cut.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::ops::Range;

use fastrand::Rng;

/// The size in bytes of a disk sector, the largest unit that is written atomically.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
enum ContentChange {
    Length(usize),
    /// A write inside the file, which does not change the file's length.
    Write {
        at: usize,
        bytes: Vec<u8>,
    },
}

#[derive(Debug, Default)]
pub(crate) struct File {
    durable: Vec<u8>,
    seen: Vec<u8>,
    changes: Vec<ContentChange>,
}

impl File {
    pub(crate) fn durable(content: Vec<u8>) -> Self {
        Self { durable: content.clone(), seen: content, changes: Vec::new() }
    }

    /// Returns the file's content as programs currently read it.
    pub(crate) fn content(&self) -> &[u8] {
        &self.seen
    }

    /// Returns true if the file has a change that is not durable yet.
    pub(crate) fn is_unsynced(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(crate) fn set_length(&mut self, length: usize) {
        if length != self.seen.len() {
            self.seen.resize(length, 0);
            self.changes.push(ContentChange::Length(length));
        }
    }

    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        self.set_length(self.seen.len().max(end));
        self.seen[at..end].copy_from_slice(bytes);
        self.changes.push(ContentChange::Write { at, bytes: bytes.to_vec() });
    }

    pub(crate) fn sync(&mut self) {
        for change in self.changes.drain(..) {
            match change {
                ContentChange::Length(length) => self.durable.resize(length, 0),
                ContentChange::Write { at, bytes } => self.durable[at..at + bytes.len()].copy_from_slice(&bytes),
            }
        }
    }

    /// Draws at random which content the file has after a power cut.
    pub(crate) fn after_cut(&self, luck: &mut Luck) -> Vec<u8> {
        let lengths = self.changes.iter().filter(|change| matches!(change, ContentChange::Length(_))).count();
        let mut lengths = luck.of_length(lengths);
        let mut writes: BTreeMap<usize, usize> = BTreeMap::new();
        for change in &self.changes {
            if let ContentChange::Write { at, bytes } = change {
                pieces(*at, bytes.len()).for_each(|piece| *writes.entry(piece.start / SECTOR).or_default() += 1);
            }
        }
        writes.values_mut().for_each(|count| *count = luck.of_sector(*count));
        let mut left = self.durable.clone();
        for change in &self.changes {
            match change {
                ContentChange::Length(length) if lengths > 0 => {
                    lengths -= 1;
                    left.resize(*length, 0);
                }
                ContentChange::Length(_) => {}
                ContentChange::Write { at, bytes } => {
                    for piece in pieces(*at, bytes.len()) {
                        let Some(count) = writes.get_mut(&(piece.start / SECTOR)).filter(|count| **count > 0) else {
                            continue;
                        };
                        *count -= 1;
                        let end = piece.end.min(left.len());
                        if piece.start < end {
                            left[piece.start..end].copy_from_slice(&bytes[piece.start - at..end - at]);
                        }
                    }
                }
            }
        }
        left
    }
}

/// Splits a write of `length` bytes at the boundaries of sectors.
fn pieces(at: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
    let end = at + length;
    let mut from = at;
    std::iter::from_fn(move || {
        let piece = from..end.min((from / SECTOR + 1) * SECTOR);
        from = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The entries of a folder: the names of its files and folders, with their inode numbers.
pub(crate) type Names = BTreeMap<OsString, u64>;

#[derive(Clone, Debug)]
enum NameChange {
    Add(OsString, u64),
    Remove(OsString),
    Rename(OsString, OsString),
}

impl NameChange {
    fn apply(&self, names: &mut Names) {
        match self {
            Self::Add(name, node) => {
                names.insert(name.clone(), *node);
            }
            Self::Remove(name) => {
                names.remove(name);
            }
            Self::Rename(from, to) => {
                if let Some(node) = names.remove(from) {
                    names.insert(to.clone(), node);
                }
            }
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Folder {
    durable: Names,
    seen: Names,
    changes: Vec<NameChange>,
}

impl Folder {
    pub(crate) fn durable(names: Names) -> Self {
        Self { durable: names.clone(), seen: names, changes: Vec::new() }
    }

    /// Returns the folder's entries as programs currently see them.
    pub(crate) fn names(&self) -> &Names {
        &self.seen
    }

    /// Returns true if the folder has a change that is not durable yet.
    pub(crate) fn is_unsynced(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(crate) fn get(&self, name: &OsStr) -> Option<u64> {
        self.seen.get(name).copied()
    }

    pub(crate) fn add(&mut self, name: &OsStr, node: u64) {
        self.change(NameChange::Add(name.to_owned(), node));
    }

    pub(crate) fn remove(&mut self, name: &OsStr) {
        self.change(NameChange::Remove(name.to_owned()));
    }

    /// Renames the entry `from` of the folder to `to`. A folder entry with the name `to` is replaced.
    pub(crate) fn rename(&mut self, from: &OsStr, to: &OsStr) {
        self.change(NameChange::Rename(from.to_owned(), to.to_owned()));
    }

    fn change(&mut self, change: NameChange) {
        change.apply(&mut self.seen);
        self.changes.push(change);
    }

    pub(crate) fn sync(&mut self) {
        for change in self.changes.drain(..) {
            change.apply(&mut self.durable);
        }
    }

    /// Draws at random which entries the folder has after a power cut.
    pub(crate) fn after_cut(&self, luck: &mut Luck) -> Names {
        let mut left = self.durable.clone();
        let survivors = luck.of_folder(self.changes.len());
        self.changes.iter().take(survivors).for_each(|change| change.apply(&mut left));
        left
    }
}

/// The rule for which unsynced changes to a folder survive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folders {
    /// A random number of the oldest unsynced changes survives: none, some or all.
    Prefix,
    /// No unsynced change to the folder survives, so the name of a file is durable only after a sync of its folder.
    Strict,
}

/// The random seed and the rule that decide which unsynced changes survive a power cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The seed of all random choices for this power cut. The same seed and the same changes always result in the same
    /// disk image.
    pub seed: u64,
    /// Which unsynced changes to folders survive this power cut.
    pub folders: Folders,
}

pub(crate) struct Luck {
    random: Rng,
    folders: Folders,
    /// The percentage of disk sectors whose unsynced writes survive.
    percent: u8,
}

impl Luck {
    pub(crate) fn new(cut: Cut) -> Self {
        let mut random = Rng::with_seed(cut.seed);
        // Sometimes nearly all or nearly no sectors survive, because such power cuts find other faults than power cuts
        // that keep half of the sectors.
        let percent = random.choice([0, 10, 50, 50, 90, 100]).unwrap_or(50);
        Self { random, folders: cut.folders, percent }
    }

    fn survives(&mut self) -> bool {
        self.random.u8(0..100) < self.percent
    }

    /// Draws at random how many of the unsynced writes to one sector survive: all, some or none.
    fn of_sector(&mut self, writes: usize) -> usize {
        match self.survives() {
            true if self.random.u8(0..4) == 0 => self.random.usize(1..=writes),
            true => writes,
            false => 0,
        }
    }

    /// Draws at random how many of the unsynced changes to one file's length survive.
    fn of_length(&mut self, changes: usize) -> usize {
        if self.survives() { changes } else { self.random.usize(0..=changes) }
    }

    /// Draws at random how many of the unsynced changes to one folder survive.
    pub(crate) fn of_folder(&mut self, changes: usize) -> usize {
        match self.folders {
            Folders::Prefix => self.of_length(changes),
            Folders::Strict => 0,
        }
    }

    /// Draws at random whether the newer of a file's two modification times survives.
    pub(crate) fn of_time(&mut self) -> bool {
        self.survives()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Cut, Folders, *};

    /// Returns the different contents that a file has after power cuts with many seeds.
    fn content_outcomes(file: &File) -> BTreeSet<Vec<u8>> {
        (0..2_000).map(|seed| file.after_cut(&mut Luck::new(Cut { seed, folders: Folders::Strict }))).collect()
    }

    /// Returns file content of whole sectors, each filled with one of the given bytes.
    fn sectors(bytes: &[u8]) -> Vec<u8> {
        bytes.iter().flat_map(|byte| [*byte; SECTOR]).collect()
    }

    #[test]
    fn write_is_cut_into_sectors() {
        let ends = |at, length| pieces(at, length).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(ends(0, 0), []);
        assert_eq!(ends(100, 412), [(100, 512)]);
        assert_eq!(ends(500, 600), [(500, 512), (512, 1024), (1024, 1100)]);
    }

    #[test]
    fn synced_changes_stay() {
        let mut file = File::default();
        file.write(0, &sectors(b"abc"));
        file.set_length(700);
        file.write(1000, b"x");
        let seen = file.content().to_vec();
        file.sync();
        assert_eq!(content_outcomes(&file), [seen].into());
    }

    #[test]
    fn sectors_survive_in_any_subset() {
        let mut file = File::durable(sectors(b"abc"));
        file.write(0, &sectors(b"ABC"));
        let expected = ["abc", "Abc", "aBc", "abC", "ABc", "AbC", "aBC", "ABC"];
        assert_eq!(content_outcomes(&file), expected.map(|sectors_left| sectors(sectors_left.as_bytes())).into());
    }

    #[test]
    fn sector_is_as_it_was_at_some_moment() {
        let mut file = File::durable(sectors(b"a"));
        file.write(0, b"1");
        file.write(1, b"2");
        let texts: BTreeSet<_> = content_outcomes(&file).into_iter().map(|left| left[..3].to_vec()).collect();
        assert_eq!(
            texts,
            [b"aaa".to_vec(), b"1aa".to_vec(), b"12a".to_vec()].into(),
            "the second never without the first"
        );
    }

    #[test]
    fn lengths_survive_in_order_and_show_zeros() {
        let mut file = File::durable(sectors(b"a"));
        file.set_length(0);
        file.write(0, b"bb");
        let left = content_outcomes(&file);
        let mut kept = sectors(b"a");
        assert!(left.contains(&kept), "nothing got through");
        kept[..2].copy_from_slice(b"bb");
        let expected: BTreeSet<Vec<u8>> =
            [sectors(b"a"), kept, Vec::new(), b"\0\0".to_vec(), b"bb".to_vec()].into_iter().collect();
        assert_eq!(left, expected);
    }

    fn name_outcomes(folder: &Folder, folders: Folders) -> BTreeSet<String> {
        let text = |names: Names| {
            let entries: Vec<_> =
                names.iter().map(|(name, node)| format!("{}={node}", name.to_string_lossy())).collect();
            entries.join(" ")
        };
        (0..500).map(|seed| text(folder.after_cut(&mut Luck::new(Cut { seed, folders })))).collect()
    }

    fn changed() -> Folder {
        let mut folder = Folder::durable([("id".into(), 1)].into());
        folder.add(OsStr::new("new"), 2);
        folder.rename(OsStr::new("new"), OsStr::new("id"));
        folder.add(OsStr::new("db"), 3);
        folder.remove(OsStr::new("db"));
        folder
    }

    #[test]
    fn changes_survive_in_order() {
        let expected = ["id=1", "id=1 new=2", "id=2", "db=3 id=2"].map(str::to_owned);
        assert_eq!(name_outcomes(&changed(), Folders::Prefix), expected.into());
    }

    #[test]
    fn strict_mode_keeps_only_synced_changes() {
        let mut folder = changed();
        assert_eq!(name_outcomes(&folder, Folders::Strict), ["id=1".to_owned()].into());
        folder.sync();
        folder.add(OsStr::new("late"), 4);
        assert_eq!(name_outcomes(&folder, Folders::Strict), ["id=2".to_owned()].into());
        assert_eq!(folder.names().len(), 2);
    }
}
