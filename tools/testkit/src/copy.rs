//! Copying programs.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Copies a program so that it can run immediately. A separate process copies it: a file that this process has open for
/// writing cannot be executed, and a child that another test starts meanwhile inherits the descriptor until its exec.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let done = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "cannot copy to {}", to.display());
}
