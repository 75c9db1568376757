//! Reading a backup file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use datastore::text_fault;
use kv::Key;

use super::format::{AnyHeader, Header, Line, MAX_LINE_BYTES, TRAILER, VERSION_WITH_LEASES, trailer};
use super::plan::OnlyIpam;
use super::{Part, Row, aside};
use crate::digest::Sha256;
use crate::error::{Failure, Result};

/// The number of bytes that are read at once.
const PART_BYTES: usize = 8 << 20;

/// A backup file that is being read. Its parts are valid only after the last one was read: the checksum is at the end.
#[derive(Debug)]
pub(super) struct Reader {
    input: BufReader<File>,
    path: PathBuf,
    header: Header,
    sum: Sha256,
    keys: u64,
    last: Key,
    line: Vec<u8>,
    ended: bool,
}

impl Reader {
    /// Opens a file and reads its first line.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| cannot_read(path, &error);
        let file = File::open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Failure::new(format!("{} is no regular file", path.display()))
                .hint("a backup is read twice, first to check it; store it in a file"));
        }
        let mut input = BufReader::with_capacity(1 << 16, file);
        let mut line = Vec::new();
        read_line(&mut input, &mut line).map_err(failed)?;
        let Ok(AnyHeader { margay_backup }) = serde_json::from_slice(&line) else {
            let fault = text_fault(&line).map(|fault| format!(": {fault}")).unwrap_or_default();
            return Err(Failure::new(format!("{} is no backup that margay has made{fault}", path.display())).hint(
                "give a file that `margay store backup` has written; its first line begins with {\"margay_backup\"",
            ));
        };
        if margay_backup > VERSION_WITH_LEASES {
            return Err(Failure::new(format!(
                "{} has format {margay_backup}, and this version knows up to {VERSION_WITH_LEASES}",
                path.display()
            ))
            .hint("use the version of margay that wrote it, or a newer one; nothing was changed"));
        }
        let Ok(header) = serde_json::from_slice(&line) else {
            return Err(damaged(path, "its first line cannot be read"));
        };
        let mut sum = Sha256::default();
        sum.update(&line);
        Ok(Self { input, path: path.to_owned(), header, sum, keys: 0, last: Key::default(), line, ended: false })
    }

    /// The first line.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// The next key with its value and lease; `None` at the end of a file that is whole.
    pub(super) fn next_row(&mut self) -> Result<Option<Row>> {
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
        let row = serde_json::from_slice(&self.line).ok().filter(|_| self.line.ends_with(b"\n")).and_then(Line::read);
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

    fn end(&mut self) -> Result<Option<Row>> {
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

/// A file that was read to its end and is whole.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    pub(super) path: PathBuf,
    /// Its first line.
    pub(crate) header: Header,
    /// The number of its keys.
    pub(crate) keys: u64,
    /// Its checksum.
    pub(super) sum: Sha256,
}

impl Checked {
    /// Reads a file to its end, and shows `each` of its rows.
    pub(super) fn read(path: &Path, mut each: impl FnMut(&Row)) -> Result<Self> {
        let mut reader = Reader::open(path)?;
        while let Some(row) = reader.next_row()? {
            each(&row);
        }
        Ok(Self { path: path.to_owned(), header: reader.header, keys: reader.keys, sum: reader.sum })
    }

    /// Reads a file to its end.
    pub(crate) async fn of(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        aside(move || Self::read(&path, |_| {})).await
    }

    /// The path, for people.
    pub(crate) fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// The rows, from the first on, or those that a filter makes of them.
    pub(crate) async fn rows(&self, filter: Option<OnlyIpam>) -> Result<Rows> {
        let path = self.path.clone();
        let reader = aside(move || Reader::open(&path)).await?;
        if reader.header() != &self.header {
            return Err(self.was_changed());
        }
        Ok(Rows { file: self.clone(), rest: Some((reader, filter)) })
    }

    fn was_changed(&self) -> Failure {
        Failure::new(format!("{} was changed meanwhile", self.path())).hint("try again with a file that stays as it is")
    }
}

/// The reader of a file's rows, from the first to the last.
pub(crate) struct Rows {
    file: Checked,
    /// The rest of the file; `None` at its end.
    rest: Option<(Reader, Option<OnlyIpam>)>,
}

impl Rows {
    pub(super) fn header(&self) -> &Header {
        &self.file.header
    }

    pub(super) async fn next(&mut self) -> Result<Part> {
        let Some((mut reader, mut filter)) = self.rest.take() else {
            return Ok(Part { rows: Vec::new(), is_last: true });
        };
        let file = self.file.clone();
        let (rows, rest) = aside(move || {
            let (mut rows, mut bytes) = (Vec::new(), 0);
            while bytes < PART_BYTES {
                let Some(row) = reader.next_row()? else {
                    if reader.sum != file.sum {
                        return Err(file.was_changed());
                    }
                    rows.extend(filter.into_iter().flat_map(OnlyIpam::rest));
                    return Ok((rows, None));
                };
                bytes += row.key.as_bytes().len() + row.value.len();
                match &mut filter {
                    None => rows.push(row),
                    Some(filter) => filter.pass(row, &mut rows)?,
                }
            }
            Ok((rows, Some((reader, filter))))
        })
        .await?;
        self.rest = rest;
        Ok(Part { rows, is_last: self.rest.is_none() })
    }
}

/// Reads a line with its line break, up to the length of the longest line.
fn read_line(input: &mut BufReader<File>, line: &mut Vec<u8>) -> io::Result<()> {
    line.clear();
    input.take(MAX_LINE_BYTES as u64).read_until(b'\n', line)?;
    Ok(())
}

fn damaged(path: &Path, what: &str) -> Failure {
    Failure::new(format!("{} is damaged: {what}", path.display())).hint("use another backup; nothing was changed")
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("cannot read {}: {error}", path.display()));
    match error.kind() {
        io::ErrorKind::NotFound => failure.hint("give the name of a file that `margay store backup` has written"),
        _ => failure.hint("give a file that you may read; nothing was changed"),
    }
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
    fn every_flipped_bit_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backup");
        let mut sum = Sha256::default();
        sum.update(LINES.as_bytes());
        let good = [LINES, &trailer(2, &sum)].concat().into_bytes();
        fs::write(&path, &good).unwrap();
        assert_eq!(Checked::read(&path, |_| {}).unwrap().keys, 2);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
            assert!(Checked::read(&path, |_| {}).is_err(), "bit {bit}");
        }
    }
}
