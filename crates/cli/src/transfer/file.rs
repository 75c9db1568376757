//! A backup or an export as a source.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ipam_operator::moving::{Renaming, Tally, mark_key, nodes_of, part_of};
use kv::{Key, Value};

use super::source::marked;
use crate::backup::{Header, Reader, Stored, aside};
use crate::error::{Failure, Result};
use crate::output::printable;

/// The number of bytes that are read at once.
const PART_BYTES: usize = 8 << 20;

/// The documents of a file that was read to its end and is whole.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    path: PathBuf,
    /// Its first line.
    pub(crate) header: Header,
    /// The numbers of documents to write, by kind.
    pub(crate) tally: Tally,
    /// The number of keys in it that are not IPAM's and are left out.
    pub(crate) left_out: u64,
    sum: String,
    renaming: Option<Renaming>,
    /// The renamed documents that get another key, by the new key.
    moved: BTreeMap<Key, Value>,
}

impl Plan {
    /// Reads a file. If `as_node` names a node, the documents of node `from`, or of the only node, become that node's.
    ///
    /// # Errors
    /// The file is not whole; the node cannot be renamed.
    pub(crate) async fn of(path: &Path, as_node: Option<String>, from: Option<String>) -> Result<Self> {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        aside(move || {
            let (mut plan, nodes) = Self::plan_of(path)?;
            if let Some(name) = as_node {
                plan.rename(&nodes, from, name)?;
            }
            Ok(plan)
        })
        .await
    }

    /// The identity of this source: the file's checksum and the renaming.
    pub(crate) fn source(&self) -> String {
        match &self.renaming {
            Some(renaming) => format!("{} {renaming:?}", self.sum),
            None => self.sum.clone(),
        }
    }

    /// The path of the file, for people.
    pub(crate) fn path(&self) -> String {
        self.path.display().to_string()
    }

    fn plan_of(path: PathBuf) -> Result<(Self, BTreeSet<String>)> {
        let mut reader = Reader::open(&path)?;
        let (mut tally, mut left_out, mut nodes) = (Tally::default(), 0, BTreeSet::new());
        let mut is_marked = false;
        while let Some(Stored { key, value, .. }) = reader.next_row()? {
            let key = Key::new(key);
            is_marked |= key == mark_key();
            if part_of(&key).is_some() {
                tally.add(&key, &value);
                nodes.extend(nodes_of(&key, &value));
            } else {
                left_out += 1;
            }
        }
        if is_marked {
            return Err(marked("the store that the file was made of"));
        }
        let (header, sum) = (reader.header().clone(), reader.sum());
        Ok((Self { path, header, tally, left_out, sum, renaming: None, moved: BTreeMap::new() }, nodes))
    }

    fn rename(&mut self, nodes: &BTreeSet<String>, from: Option<String>, to: String) -> Result<()> {
        let list = || nodes.iter().map(|node| printable(node)).collect::<Vec<_>>().join(", ");
        if to.is_empty() || to.contains('/') {
            return Err(Failure::new(format!("{to:?} cannot be the name of a node")));
        }
        let from = match (from, nodes.len()) {
            (Some(from), _) if nodes.contains(&from) => from,
            (Some(from), _) => {
                return Err(Failure::new(format!("there is no node {from} in the file"))
                    .hint(format!("its nodes are: {}", list())));
            }
            (None, 0 | 1) => nodes.first().cloned().unwrap_or_else(|| to.clone()),
            (None, _) => {
                return Err(Failure::new("there are several nodes in the file")
                    .hint(format!("say with --from-node which one becomes {to}: {}", list())));
            }
        };
        if from == to {
            return Ok(());
        }
        if nodes.contains(&to) {
            return Err(Failure::new(format!("there is a node {to} in the file already"))
                .hint("two nodes cannot become one; give another name"));
        }
        let renaming = Renaming::new(from, to);
        self.moved = self.moved_by(&renaming)?;
        self.renaming = Some(renaming);
        Ok(())
    }

    fn moved_by(&self, renaming: &Renaming) -> Result<BTreeMap<Key, Value>> {
        let mut moved = BTreeMap::new();
        let mut reader = Reader::open(&self.path)?;
        while let Some(Stored { key, value, .. }) = reader.next_row()? {
            let key = Key::new(key);
            let renamed = renaming.key(key.clone());
            if renamed != key && part_of(&key).is_some() {
                moved.insert(renamed, changed(renaming, &key, Value::new(value))?);
            }
        }
        Ok(moved)
    }

    /// The documents, from the first on.
    pub(crate) async fn rows(&self) -> Result<FileRows> {
        let path = self.path.clone();
        let reader = aside(move || Reader::open(&path)).await?;
        if reader.header() != &self.header {
            return Err(self.was_changed());
        }
        Ok(FileRows { reader: Some(reader), plan: self.clone(), moved: self.moved.clone() })
    }

    fn was_changed(&self) -> Failure {
        Failure::new(format!("{} was changed meanwhile", self.path())).hint("try again with a file that stays as it is")
    }
}

fn changed(renaming: &Renaming, key: &Key, value: Value) -> Result<Value> {
    renaming.value(key, value).map_err(|error| {
        Failure::new(error).hint("its node is not known, so the node cannot be renamed; import without --as-node")
    })
}

/// The reader of a file's documents, from the first to the last.
pub(crate) struct FileRows {
    reader: Option<Reader>,
    plan: Plan,
    /// The documents with another key that are still to come.
    moved: BTreeMap<Key, Value>,
}

impl FileRows {
    /// The next documents, ascending, and whether they were the last.
    pub(super) async fn next(&mut self) -> Result<(Vec<(Key, Value)>, bool)> {
        let Some(reader) = self.reader.take() else { return Ok((Vec::new(), true)) };
        let (plan, moved) = (self.plan.clone_for_reading(), std::mem::take(&mut self.moved));
        let (rows, reader, moved) = aside(move || plan.read(reader, moved)).await?;
        (self.reader, self.moved) = (reader, moved);
        Ok((rows, self.reader.is_none()))
    }
}

/// Documents, the reader unless the file is at its end, and the documents with another key that are still to come.
type Part = (Vec<(Key, Value)>, Option<Reader>, BTreeMap<Key, Value>);

/// The values that the reading needs, for another thread.
struct Reading {
    renaming: Option<Renaming>,
    sum: String,
    changed: Failure,
}

impl Plan {
    fn clone_for_reading(&self) -> Reading {
        Reading { renaming: self.renaming.clone(), sum: self.sum.clone(), changed: self.was_changed() }
    }
}

impl Reading {
    fn read(self, mut reader: Reader, mut moved: BTreeMap<Key, Value>) -> Result<Part> {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while bytes < PART_BYTES {
            let Some(Stored { key, value, .. }) = reader.next_row()? else {
                if reader.sum() != self.sum {
                    return Err(self.changed);
                }
                rows.extend(moved);
                return Ok((rows, None, BTreeMap::new()));
            };
            let (key, mut value) = (Key::new(key), Value::new(value));
            if part_of(&key).is_none() {
                continue;
            }
            if let Some(renaming) = &self.renaming {
                if renaming.key(key.clone()) != key {
                    continue;
                }
                value = changed(renaming, &key, value)?;
                while let Some(first) = moved.first_entry().filter(|first| *first.key() < key) {
                    rows.push(first.remove_entry());
                }
            }
            bytes += key.as_bytes().len() + value.len();
            rows.push((key, value));
        }
        Ok((rows, Some(reader), moved))
    }
}
