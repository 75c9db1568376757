//! The names in a folder: those that are durable, those that programs see, and the changes in between.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use crate::luck::Luck;

/// Names, and the numbers of what they name.
pub(crate) type Names = BTreeMap<OsString, u64>;

#[derive(Clone, Debug)]
enum Change {
    Add(OsString, u64),
    Remove(OsString),
    Rename(OsString, OsString),
}

impl Change {
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

/// A folder.
#[derive(Debug, Default)]
pub(crate) struct Folder {
    durable: Names,
    seen: Names,
    changes: Vec<Change>,
}

impl Folder {
    /// A folder that was synced.
    pub(crate) fn durable(names: Names) -> Self {
        Self { durable: names.clone(), seen: names, changes: Vec::new() }
    }

    /// The entries that programs see.
    pub(crate) fn names(&self) -> &Names {
        &self.seen
    }

    /// True if something is not durable yet.
    pub(crate) fn is_unsynced(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(crate) fn get(&self, name: &OsStr) -> Option<u64> {
        self.seen.get(name).copied()
    }

    pub(crate) fn add(&mut self, name: &OsStr, node: u64) {
        self.change(Change::Add(name.to_owned(), node));
    }

    pub(crate) fn remove(&mut self, name: &OsStr) {
        self.change(Change::Remove(name.to_owned()));
    }

    /// Gives what has the name `from` the name `to`, instead of what has that one.
    pub(crate) fn rename(&mut self, from: &OsStr, to: &OsStr) {
        self.change(Change::Rename(from.to_owned(), to.to_owned()));
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.seen);
        self.changes.push(change);
    }

    /// Makes durable what programs see.
    pub(crate) fn sync(&mut self) {
        for change in self.changes.drain(..) {
            change.apply(&mut self.durable);
        }
    }

    /// The entries that a power cut leaves.
    pub(crate) fn after_cut(&self, luck: &mut Luck) -> Names {
        let mut left = self.durable.clone();
        let survivors = luck.of_folder(self.changes.len());
        self.changes.iter().take(survivors).for_each(|change| change.apply(&mut left));
        left
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::luck::{Cut, Folders};

    fn outcomes(folder: &Folder, folders: Folders) -> BTreeSet<String> {
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
        assert_eq!(outcomes(&changed(), Folders::Prefix), expected.into());
    }

    #[test]
    fn in_the_strict_mode_only_what_was_synced_survives() {
        let mut folder = changed();
        assert_eq!(outcomes(&folder, Folders::Strict), ["id=1".to_owned()].into());
        folder.sync();
        folder.add(OsStr::new("late"), 4);
        assert_eq!(outcomes(&folder, Folders::Strict), ["id=2".to_owned()].into());
        assert_eq!(folder.names().len(), 2);
    }
}
