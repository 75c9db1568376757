//! Copies programs so that they can run immediately.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Copies a program so that it can run immediately. A separate process makes the copy: the kernel does not execute a
/// file that this process has open for writing, and a child that another test starts meanwhile inherits the descriptor
/// until its exec.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let done = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "cannot copy to {}", to.display());
}
