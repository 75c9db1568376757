//! Copies programs so that the copies can be run immediately.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Copies a program so that the copy can be run immediately. A separate process copies the program, so that this
/// process never has the copy open for writing. If this process wrote the copied program itself, a child of another
/// test could inherit the writable descriptor until its exec, and running the copy would fail with ETXTBSY.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let done = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(done.is_ok_and(|status| status.success()), "cannot copy to {}", to.display());
}
