//! Copies programs in a way that allows running the copies immediately.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Copies a program in a way that allows running the copy immediately. The program is copied by a separate process. If
/// this process had the file open for writing, a child started by another test could inherit the descriptor until its
/// exec, and the kernel executes no file that is open for writing.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let done = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "cannot copy to {}", to.display());
}
