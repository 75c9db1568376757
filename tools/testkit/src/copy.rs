//! Copies programs so that the copies can be run immediately.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Copies a program so that the copy can be run immediately. A separate process copies the program: if this process had
/// the copy open for writing, a child that another test starts could inherit the descriptor until its exec, and the
/// kernel executes no file that is open for writing.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let done = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "cannot copy to {}", to.display());
}
