//! A backup or an export of which only IPAM's documents are wanted, perhaps with another name of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ipam_operator::moving::{Renaming, Tally, mark_key, nodes_of, part_of};
use kv::{Key, Value};

use super::reader::{Checked, Reader, Rows};
use super::{Row, aside, marked};
use crate::error::{Failure, Result};
use crate::output::printable;

/// The import of a file.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The file.
    pub(crate) file: Checked,
    /// The numbers of documents to write, by kind.
    pub(crate) tally: Tally,
    /// The number of keys in it that are not IPAM's and are left out.
    pub(crate) left_out: u64,
    filter: OnlyIpam,
}

/// The filter that leaves IPAM's documents, and renames a node in them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OnlyIpam {
    renaming: Option<Renaming>,
    /// The renamed documents that get another key and are still to come, by the new key.
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
            let (mut tally, mut left_out, mut nodes, mut is_marked) = (Tally::default(), 0, BTreeSet::new(), false);
            let file = Checked::read(&path, |Row { key, value, .. }| {
                is_marked |= *key == mark_key();
                if part_of(key).is_some() {
                    tally.add(key, value.as_bytes());
                    nodes.extend(nodes_of(key, value.as_bytes()));
                } else {
                    left_out += 1;
                }
            })?;
            if is_marked {
                return Err(marked("the store that the file was made of"));
            }
            let mut plan = Self { file, tally, left_out, filter: OnlyIpam::default() };
            if let Some(name) = as_node {
                plan.rename(&nodes, from, name)?;
            }
            Ok(plan)
        })
        .await
    }

    /// The identity of this source: the file's checksum and the renaming.
    pub(crate) fn source(&self) -> String {
        let sum = self.file.sum.hex();
        match &self.filter.renaming {
            Some(renaming) => format!("{sum} {renaming:?}"),
            None => sum,
        }
    }

    /// The documents, from the first on.
    pub(crate) async fn rows(&self) -> Result<Rows> {
        self.file.rows(Some(self.filter.clone())).await
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
        let mut reader = Reader::open(&self.file.path)?;
        while let Some(Row { key, value, .. }) = reader.next_row()? {
            let renamed = renaming.key(key.clone());
            if renamed != key && part_of(&key).is_some() {
                self.filter.moved.insert(renamed, changed(&renaming, &key, value)?);
            }
        }
        self.filter.renaming = Some(renaming);
        Ok(())
    }
}

impl OnlyIpam {
    /// Adds the rows that come next, now that the file has reached this one.
    pub(super) fn pass(&mut self, row: Row, rows: &mut Vec<Row>) -> Result<()> {
        let Row { key, mut value, .. } = row;
        if part_of(&key).is_none() {
            return Ok(());
        }
        if let Some(renaming) = &self.renaming {
            if renaming.key(key.clone()) != key {
                return Ok(());
            }
            value = changed(renaming, &key, value)?;
            while let Some(first) = self.moved.first_entry().filter(|first| *first.key() < key) {
                let (key, value) = first.remove_entry();
                rows.push(Row { key, value, lease: None });
            }
        }
        rows.push(Row { key, value, lease: None });
        Ok(())
    }

    /// The rows that come after the last one of the file.
    pub(super) fn rest(self) -> impl Iterator<Item = Row> {
        self.moved.into_iter().map(|(key, value)| Row { key, value, lease: None })
    }
}

fn changed(renaming: &Renaming, key: &Key, value: Value) -> Result<Value> {
    renaming.value(key, value).map_err(|error| {
        Failure::new(error).hint("its node is not known, so the node cannot be renamed; import without --as-node")
    })
}
