//! Copying programs.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Copies a program so that it can be run at once. A process of its own does that: what one of ours has open for writing cannot
/// be run, and a child that another test starts meanwhile has it open, too, until it runs its own program.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let done = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "cannot copy to {}", to.display());
}
