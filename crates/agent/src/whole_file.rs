//! Small files in a private folder. Nothing is synced: they need not outlive the machine.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use crc::{CRC_32_ISO_HDLC, Crc, Table};
use uuid::Uuid;

/// The checksum of the content of such files, and of their names. Faster ones query the processor in each process anew,
/// which takes longer in a virtual machine than the few kilobytes here.
pub(crate) static CRC_32: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISO_HDLC);

/// Writes a file (mode 0600) that is not there yet, in a folder that is made if it is missing (mode 0700). A reader
/// meanwhile finds a part of it.
///
/// # Errors
/// The error that stops the write; nothing is left of the file then.
pub(crate) fn create(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let path = folder.join(name);
    let open = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let opened = match open() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // Others have folders of their own beside it.
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
        // The caller gets the error of the write. A remainder of the file does no harm.
        let _ = fs::remove_file(&path);
    }
    written
}

/// Writes or replaces a file, otherwise as [`create`]. A reader finds it whole, as it is or as it was.
///
/// # Errors
/// The error that stops the write; nothing has changed then.
pub(crate) fn replace(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let unfinished = format!("{name}.{}.tmp", Uuid::new_v4().simple());
    create(folder, &unfinished, bytes)?;
    let renamed = fs::rename(folder.join(&unfinished), folder.join(name));
    if renamed.is_err() {
        let _ = fs::remove_file(folder.join(&unfinished));
    }
    renamed
}

/// Reads a file of at most so many bytes.
///
/// # Errors
/// The file cannot be read, or is larger.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if read as u64 > most { Err(io::Error::other("the file is too large")) } else { Ok(bytes) }
}

/// A checksum of texts, for the name of a file: equal texts have the same checksum, and few others.
pub(crate) fn name_of(parts: &[&str]) -> String {
    let mut sum = CRC_32.digest();
    for part in parts {
        sum.update(part.as_bytes());
        sum.update(&[0]);
    }
    format!("{:08x}", sum.finalize())
}
