//! Reading a backup file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use datastore::text_fault;

use super::format::{AnyHeader, Header, MAX_LINE_BYTES, Row, Stored, TRAILER, VERSION_WITH_LEASES, trailer};
use crate::digest::Sha256;
use crate::error::{Failure, Result};

/// A backup file that is being read. Its parts are valid only after the last one was read: the checksum is at the end.
#[derive(Debug)]
pub(crate) struct Reader {
    input: BufReader<File>,
    path: PathBuf,
    header: Header,
    sum: Sha256,
    keys: u64,
    last: Vec<u8>,
    line: Vec<u8>,
    ended: bool,
}

impl Reader {
    /// Opens a file and reads its first line.
    pub(crate) fn open(path: &Path) -> Result<Self> {
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
        Ok(Self { input, path: path.to_owned(), header, sum, keys: 0, last: Vec::new(), line, ended: false })
    }

    /// The first line.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The checksum of the lines read so far; at the end, the checksum of the file.
    pub(crate) fn sum(&self) -> String {
        self.sum.hex()
    }

    /// Reads a file to its end, and returns its header and its number of keys.
    pub(crate) fn check(path: &Path) -> Result<(Header, u64)> {
        let mut reader = Self::open(path)?;
        while reader.next_row()?.is_some() {}
        Ok((reader.header, reader.keys))
    }

    /// The next key with its value and lease; `None` at the end of a file that is whole.
    pub(crate) fn next_row(&mut self) -> Result<Option<Stored>> {
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
        let row = serde_json::from_slice(&self.line).ok().filter(|_| self.line.ends_with(b"\n")).and_then(Row::read);
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

    fn end(&mut self) -> Result<Option<Stored>> {
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
        assert_eq!(Reader::check(&path).unwrap().1, 2);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
            assert!(Reader::check(&path).is_err(), "bit {bit}");
        }
    }
}
