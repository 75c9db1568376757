//! Reads and writes small files in a private folder. Files written by this module are not synced to a disk, because
//! they need not survive a crash of the machine.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use crc::{CRC_32_ISO_HDLC, Crc, Table};
use uuid::Uuid;

/// The algorithm of the CRC-32 checksums in the files' contents and names. Use an implementation of CRC-32 with a
/// table, because faster implementations would have to query the features of the processor in every process. In a
/// virtual machine, such a query traps to the hypervisor and takes longer than the checksum of a few kilobytes.
pub(crate) static CRC_32: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISO_HDLC);

/// Creates a new file (mode 0600), and its folder (mode 0700) if it is missing. A process that reads the file while it
/// is being written may see only a part of its content.
///
/// # Errors
/// Any error of writing the file. If writing fails, the partial file is removed.
pub(crate) fn create(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let path = folder.join(name);
    let open = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let opened = match open() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // All users may read the parent folder, because folders of other programs may be in it as well.
            if let Some(above) = folder.parent() {
                DirBuilder::new().recursive(true).mode(0o755).create(above)?;
            }
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            open()
        }
        opened => opened,
    };
    let written = opened.and_then(|mut file| file.write_all(bytes));
    if written.as_ref().is_err_and(|error| error.kind() != ErrorKind::AlreadyExists) {
        // The caller gets the error of the failed write, not an error of removing the partial file. A partial file that
        // cannot be removed does no harm, because its readers notice that it is incomplete.
        let _ = fs::remove_file(&path);
    }
    written
}

/// Creates a file like [`create`], or replaces it atomically. A process that reads the file concurrently sees either
/// the old or the new content, never a part of it.
///
/// # Errors
/// Any error of writing the file. If writing fails, an existing file keeps its old content.
pub(crate) fn replace(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let unfinished = format!("{name}.{}.tmp", Uuid::new_v4().simple());
    create(folder, &unfinished, bytes)?;
    let renamed = fs::rename(folder.join(&unfinished), folder.join(name));
    if renamed.is_err() {
        let _ = fs::remove_file(folder.join(&unfinished));
    }
    renamed
}

/// Reads a whole file, which may have at most `most` bytes.
///
/// # Errors
/// An error if the file cannot be read, or is larger than `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if read as u64 > most { Err(io::Error::other("the file is too large")) } else { Ok(bytes) }
}

/// Returns a checksum of several strings, as text for a file name. Equal strings have equal checksums, and different
/// strings rarely have equal checksums.
pub(crate) fn name_of(parts: &[&str]) -> String {
    let mut sum = CRC_32.digest();
    for part in parts {
        sum.update(part.as_bytes());
        sum.update(&[0]);
    }
    format!("{:08x}", sum.finalize())
}
