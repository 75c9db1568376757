//! Reads and writes small files of the program that only their owner may access.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size in bytes of a private file that can be read.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a private JSON file. Returns `None` if the file does not exist, is damaged, or could have been written by
/// another user.
pub(crate) fn read_private<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let about = file.metadata().ok()?;
    let is_private = about.is_file() && about.uid() == geteuid().as_raw() && about.mode() & 0o077 == 0;
    if !is_private || about.len() > MAX_BYTES {
        tracing::warn!(
            path = %path.display(),
            "ignoring the data that an earlier run has saved, because other users can access the file or the file is \
             too large"
        );
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Writes a private JSON file atomically. Creates the file's folder if the folder does not exist.
///
/// # Errors
/// The file cannot be written; an existing file stays unchanged.
pub(crate) fn write_private(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(value).map_err(io::Error::other)?;
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    // Each process has a temporary file of its own, because two processes may write the file at the same time.
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    let _ = fs::remove_file(&unfinished);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
    let written = file.and_then(|mut file| file.write_all(&bytes)).and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}
