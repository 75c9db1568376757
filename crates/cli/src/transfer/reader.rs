//! Reads backup files. For an import, this module skips all documents that are not IPAM documents, and may rename a
//! node in the IPAM documents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use datastore::text_fault;
use ipam_operator::moving::{DocumentCounts, Renaming, import_lock_key, nodes_of, role_of};
use kv::{Key, Value};

use super::format::{BackupHeader, BackupLine, BackupVersion, MAX_LINE_BYTES, TRAILER, VERSION_WITH_LEASES, trailer};
use super::{Row, RowBatch, run_blocking, unfinished_target_failure};
use crate::digest::Sha256;
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;

/// Target size in bytes of the rows that are read from a backup file in one step.
const BATCH_BYTES: usize = 8 << 20;

/// Reads the rows of a backup file. The rows must not be trusted until the last one has been read, because the checksum
/// is at the end of the file.
#[derive(Debug)]
struct BackupReader {
    input: BufReader<File>,
    path: PathBuf,
    header: BackupHeader,
    sum: Sha256,
    keys: u64,
    last: Key,
    line: Vec<u8>,
    ended: bool,
}

impl BackupReader {
    /// Opens a backup file and reads the file's first line.
    fn open(path: &Path) -> CommandResult<Self> {
        let failed = |error: io::Error| cannot_read(path, &error);
        let file = File::open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(CommandFailure::new(format!("{} is no regular file", path.display()))
                .hint("save the backup in a regular file, because margay reads the backup twice"));
        }
        let mut input = BufReader::with_capacity(1 << 16, file);
        let mut line = Vec::new();
        read_line(&mut input, &mut line).map_err(failed)?;
        let Ok(BackupVersion { margay_backup }) = serde_json::from_slice(&line) else {
            let fault = text_fault(&line).map(|fault| format!(": {fault}")).unwrap_or_default();
            return Err(CommandFailure::new(format!("{} is no backup that margay has made{fault}", path.display()))
                .hint(
                    "name a file that `margay store backup` has written; its first line begins with {\"margay_backup\"",
                ));
        };
        if margay_backup > VERSION_WITH_LEASES {
            return Err(CommandFailure::new(format!(
                "{} has format {margay_backup}, and this version knows up to {VERSION_WITH_LEASES}",
                path.display()
            ))
            .hint("use the margay version that wrote the backup, or a newer version; nothing was changed"));
        }
        let Ok(header) = serde_json::from_slice(&line) else {
            return Err(damaged(path, "its first line cannot be read"));
        };
        let mut sum = Sha256::default();
        sum.update(&line);
        Ok(Self { input, path: path.to_owned(), header, sum, keys: 0, last: Key::default(), line, ended: false })
    }

    fn header(&self) -> &BackupHeader {
        &self.header
    }

    /// Reads the next row of the backup file; returns `None` at the end of a complete file.
    fn next_row(&mut self) -> CommandResult<Option<Row>> {
        if self.ended {
            return Ok(None);
        }
        let number = self.keys + 2;
        read_line(&mut self.input, &mut self.line).map_err(|error| cannot_read(&self.path, &error))?;
        if self.line.is_empty() {
            return Err(damaged(&self.path, "its end is missing"));
        }
        if self.line.starts_with(TRAILER.as_bytes()) {
            return self.end();
        }
        let row =
            serde_json::from_slice(&self.line).ok().filter(|_| self.line.ends_with(b"\n")).and_then(BackupLine::read);
        let Some(row) = row else {
            return Err(damaged(&self.path, &format!("line {number} cannot be read")));
        };
        if row.key <= self.last {
            return Err(damaged(&self.path, &format!("line {number} is out of order")));
        }
        self.sum.update(&self.line);
        self.last.clone_from(&row.key);
        self.keys += 1;
        Ok(Some(row))
    }

    fn end(&mut self) -> CommandResult<Option<Row>> {
        if self.line != trailer(self.keys, &self.sum).as_bytes() {
            return Err(damaged(&self.path, "its checksum is wrong"));
        }
        match self.input.fill_buf() {
            Ok([]) => {
                self.ended = true;
                Ok(None)
            }
            Ok(_) => Err(damaged(&self.path, "something comes after its end")),
            Err(error) => Err(cannot_read(&self.path, &error)),
        }
    }
}

/// A backup file that was read once to its end, and was found complete.
#[derive(Clone, Debug)]
pub(crate) struct CheckedBackup {
    pub(super) path: PathBuf,
    pub(crate) header: BackupHeader,
    pub(crate) keys: u64,
    pub(super) sum: Sha256,
}

impl CheckedBackup {
    /// Reads a backup file to its end, and calls `each` with each row.
    pub(super) fn read(path: &Path, mut each: impl FnMut(&Row)) -> CommandResult<Self> {
        let mut reader = BackupReader::open(path)?;
        while let Some(row) = reader.next_row()? {
            each(&row);
        }
        Ok(Self { path: path.to_owned(), header: reader.header, keys: reader.keys, sum: reader.sum })
    }

    pub(crate) async fn of(path: &Path) -> CommandResult<Self> {
        let path = path.to_owned();
        run_blocking(move || Self::read(&path, |_| {})).await
    }

    pub(crate) fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Returns a reader that returns the rows from the start of the backup file, with an optional filter. Fails if the
    /// first line of the backup file has changed since the file was checked.
    pub(crate) async fn rows(&self, filter: Option<IpamFilter>) -> CommandResult<BackupRows> {
        let path = self.path.clone();
        let reader = run_blocking(move || BackupReader::open(&path)).await?;
        if reader.header() != &self.header {
            return Err(self.was_changed());
        }
        Ok(BackupRows { file: self.clone(), rest: Some((reader, filter)) })
    }

    fn was_changed(&self) -> CommandFailure {
        CommandFailure::new(format!("{} was changed meanwhile", self.path()))
            .hint("wait until no other program writes to the file, and then try again")
    }
}

/// Reads the rows of a checked backup file a second time, in order.
pub(crate) struct BackupRows {
    file: CheckedBackup,
    /// A reader of the file's remaining rows, with its filter; `None` at the end of the file.
    rest: Option<(BackupReader, Option<IpamFilter>)>,
}

impl BackupRows {
    pub(super) fn header(&self) -> &BackupHeader {
        &self.file.header
    }

    pub(super) async fn next(&mut self) -> CommandResult<RowBatch> {
        let Some((mut reader, mut filter)) = self.rest.take() else {
            return Ok(RowBatch { rows: Vec::new(), is_last: true });
        };
        let file = self.file.clone();
        let (rows, rest) = run_blocking(move || {
            let (mut rows, mut bytes) = (Vec::new(), 0);
            while bytes < BATCH_BYTES {
                let Some(row) = reader.next_row()? else {
                    if reader.sum != file.sum {
                        return Err(file.was_changed());
                    }
                    rows.extend(filter.into_iter().flat_map(IpamFilter::rest));
                    return Ok((rows, None));
                };
                bytes += row.key.as_bytes().len() + row.value.len();
                match &mut filter {
                    None => rows.push(row),
                    Some(filter) => filter.take_row(row, &mut rows)?,
                }
            }
            Ok((rows, Some((reader, filter))))
        })
        .await?;
        self.rest = rest;
        Ok(RowBatch { rows, is_last: self.rest.is_none() })
    }
}

/// Reads one line of at most [`MAX_LINE_BYTES`] bytes from a backup file, including the line break.
fn read_line(input: &mut BufReader<File>, line: &mut Vec<u8>) -> io::Result<()> {
    line.clear();
    input.take(MAX_LINE_BYTES as u64).read_until(b'\n', line)?;
    Ok(())
}

fn damaged(path: &Path, what: &str) -> CommandFailure {
    CommandFailure::new(format!("{} is damaged: {what}", path.display()))
        .hint("use another backup; nothing was changed")
}

fn cannot_read(path: &Path, error: &io::Error) -> CommandFailure {
    let failure = CommandFailure::new(format!("cannot read {}: {error}", path.display()));
    match error.kind() {
        io::ErrorKind::NotFound => failure.hint("name a file that `margay store backup` has written"),
        _ => failure.hint("name a file that you can read; nothing was changed"),
    }
}

/// A plan to import a backup file, which has already been checked.
#[derive(Clone, Debug)]
pub(crate) struct ImportPlan {
    pub(crate) file: CheckedBackup,
    /// The number of IPAM documents to import, by kind.
    pub(crate) tally: DocumentCounts,
    /// The number of keys in the backup file that are not imported, because they are not keys of IPAM documents.
    pub(crate) left_out: u64,
    filter: IpamFilter,
}

/// A filter that keeps only IPAM documents, and may rename a node in these documents.
#[derive(Clone, Debug, Default)]
pub(crate) struct IpamFilter {
    renaming: Option<Renaming>,
    /// Renamed documents that the filter has not returned yet, by their new key.
    moved: BTreeMap<Key, Value>,
}

impl ImportPlan {
    /// Reads and checks a backup file. If `as_node` is given, the documents of the node `from` are imported as
    /// documents of the node `as_node`. If `from` is `None`, the documents of the only node in the backup file are
    /// imported as documents of `as_node`.
    ///
    /// # Errors
    /// The backup file is incomplete, or the node cannot be renamed.
    pub(crate) async fn of(path: &Path, as_node: Option<String>, from: Option<String>) -> CommandResult<Self> {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        run_blocking(move || {
            let (mut tally, mut left_out, mut nodes, mut is_marked) =
                (DocumentCounts::default(), 0, BTreeSet::new(), false);
            let file = CheckedBackup::read(&path, |Row { key, value, .. }| {
                is_marked |= *key == import_lock_key();
                if role_of(key).is_some() {
                    tally.add(key, value.as_bytes());
                    nodes.extend(nodes_of(key, value.as_bytes()));
                } else {
                    left_out += 1;
                }
            })?;
            if is_marked {
                return Err(unfinished_target_failure("the store that the file was made of"));
            }
            let mut plan = Self { file, tally, left_out, filter: IpamFilter::default() };
            if let Some(name) = as_node {
                plan.rename(&nodes, from, name)?;
            }
            Ok(plan)
        })
        .await
    }

    /// Returns a string that identifies what is imported: the checksum of the backup file and, if a node is renamed,
    /// its old and new name.
    pub(crate) fn source(&self) -> String {
        let sum = self.file.sum.hex();
        match &self.filter.renaming {
            Some(renaming) => format!("{sum} {renaming:?}"),
            None => sum,
        }
    }

    /// Opens a reader of the IPAM documents in the backup file, from the file's start.
    pub(crate) async fn rows(&self) -> CommandResult<BackupRows> {
        self.file.rows(Some(self.filter.clone())).await
    }

    fn rename(&mut self, nodes: &BTreeSet<String>, from: Option<String>, to: String) -> CommandResult<()> {
        let list = || nodes.iter().map(|node| printable(node)).collect::<Vec<_>>().join(", ");
        if to.is_empty() || to.contains('/') {
            return Err(CommandFailure::new(format!("{to:?} cannot be the name of a node")));
        }
        let from = match (from, nodes.len()) {
            (Some(from), _) if nodes.contains(&from) => from,
            (Some(from), _) => {
                return Err(CommandFailure::new(format!("there is no node {from} in the file"))
                    .hint(format!("use --from-node with one of the nodes in the file: {}", list())));
            }
            (None, 0 | 1) => nodes.first().cloned().unwrap_or_else(|| to.clone()),
            (None, _) => {
                return Err(CommandFailure::new("there are several nodes in the file")
                    .hint(format!("use --from-node to choose which node gets the name {to}; candidates: {}", list())));
            }
        };
        if from == to {
            return Ok(());
        }
        if nodes.contains(&to) {
            return Err(CommandFailure::new(format!("there is a node {to} in the file already"))
                .hint("give --as-node a name that no other node in the file has: margay cannot merge two nodes"));
        }
        let renaming = Renaming::new(from, to);
        let mut reader = BackupReader::open(&self.file.path)?;
        while let Some(Row { key, value, .. }) = reader.next_row()? {
            let renamed = renaming.key(key.clone());
            if renamed != key && role_of(&key).is_some() {
                self.filter.moved.insert(renamed, rename_value(&renaming, &key, value)?);
            }
        }
        self.filter.renaming = Some(renaming);
        Ok(())
    }
}

impl IpamFilter {
    /// Appends to `rows` first the renamed rows whose new keys precede the key of `row`, and then `row` itself.
    fn take_row(&mut self, row: Row, rows: &mut Vec<Row>) -> CommandResult<()> {
        let Row { key, mut value, .. } = row;
        if role_of(&key).is_none() {
            return Ok(());
        }
        if let Some(renaming) = &self.renaming {
            if renaming.key(key.clone()) != key {
                return Ok(());
            }
            value = rename_value(renaming, &key, value)?;
            while let Some(first) = self.moved.first_entry().filter(|first| *first.key() < key) {
                let (key, value) = first.remove_entry();
                rows.push(Row { key, value, lease: None });
            }
        }
        rows.push(Row { key, value, lease: None });
        Ok(())
    }

    /// Returns the renamed rows whose new keys follow the last key in the backup file.
    fn rest(self) -> impl Iterator<Item = Row> {
        self.moved.into_iter().map(|(key, value)| Row { key, value, lease: None })
    }
}

fn rename_value(renaming: &Renaming, key: &Key, value: Value) -> CommandResult<Value> {
    renaming.value(key, value).map_err(|error| {
        CommandFailure::new(error).hint("import without --as-node: margay cannot rename the node in this key")
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LINES: &str = concat!(
        r#"{"margay_backup":2,"margay":"0.1.0","engine":"redb","store":"3526f154-0d8b-4a53-b2f5-6d2fb0f0a3c1","#,
        r#""revision":7,"time":"2026-11-21T16:25:03Z","leases":[{"id":7,"ttl":60}]}"#,
        "\n",
        r#"{"key":"/calico/a","value":"{\"strictAffinity\":false}"}"#,
        "\n",
        r#"{"key64":"/w==","value64":"/w==","lease":7}"#,
        "\n",
    );

    #[test]
    fn reader_notices_every_flipped_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backup");
        let mut sum = Sha256::default();
        sum.update(LINES.as_bytes());
        let good = [LINES, &trailer(2, &sum)].concat().into_bytes();
        fs::write(&path, &good).unwrap();
        assert_eq!(CheckedBackup::read(&path, |_| {}).unwrap().keys, 2);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
            assert!(CheckedBackup::read(&path, |_| {}).is_err(), "bit {bit}");
        }
    }
}
