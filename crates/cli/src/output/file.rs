//! Files that are written as a whole or not at all.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Failure, Result};

/// Writes a file that other users may read. An existing file is replaced.
///
/// # Errors
/// The file cannot be written; then an existing file stays as it is.
pub(crate) fn whole_file(path: &Path, text: &str) -> Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".{}.part", std::process::id()));
    let aside = PathBuf::from(aside);
    let written = write(&aside, text).and_then(|()| fs::rename(&aside, path));
    written.map_err(|error| {
        _ = fs::remove_file(&aside);
        Failure::new(format!("cannot write {}: {error}", path.display()))
            .hint("give a file in a folder that you may write to")
    })
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
