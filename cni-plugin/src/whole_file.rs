//! Small files in a private folder, which appear whole or not at all. Nothing is synced: they need not outlive the machine.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use uuid::Uuid;

/// Writes a file (mode 0600) in a folder that is made if it is missing (mode 0700), and gives it its name when it is whole.
///
/// # Errors
/// What keeps it from being written; nothing has changed then.
pub(crate) fn write(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let unfinished = folder.join(format!("{name}.{}.tmp", Uuid::new_v4().simple()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&unfinished, folder.join(name)));
    if written.is_err() {
        // What went wrong is told; that something is left of it does no harm.
        let _ = fs::remove_file(&unfinished);
    }
    written
}

/// Reads a file of at most so many bytes.
///
/// # Errors
/// What keeps it from being read; that it is larger.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if read as u64 > most { Err(io::Error::other("the file is too large")) } else { Ok(bytes) }
}

/// A checksum of texts, for the name of a file: equal ones have the same, and few others.
pub(crate) fn name_of(parts: &[&str]) -> String {
    let mut sum = crc32fast::Hasher::new();
    for part in parts {
        sum.update(part.as_bytes());
        sum.update(&[0]);
    }
    format!("{:08x}", sum.finalize())
}
