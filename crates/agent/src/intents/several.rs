//! Pending commits for several attachments, which earlier versions wrote: one file with a name for each attachment.
//!
//! A finder may not send such a transaction in every case. An attachment may have been released before the transaction
//! was first sent, and would get an address that nobody releases. So the file has steps: bytes that processes add to
//! it. Of two steps that exclude each other the first one counts.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use super::MAX_BYTES;
use crate::whole_file;

/// The writer sends the transaction from now on; or a finder came before that, and nobody ever sends it.
const CLOSED: u8 = b'c';
const VOID: u8 = b'v';
/// The writer knows the outcome, and removes the file for all; or a finder came before that, and each attachment
/// settles it.
const DONE: u8 = b'd';
const FOUND: u8 = b'f';

/// True if the transaction in a file whose steps begin there was sent, and nobody knows its outcome. Otherwise there is
/// nothing to settle, and there will be nothing: a writer that still lives does nothing that the steps of this finder
/// exclude.
pub(super) fn is_pending(path: &Path, steps: usize) -> io::Result<bool> {
    OpenOptions::new().append(true).open(path)?.write_all(&[VOID, FOUND])?;
    let note = whole_file::read(path, MAX_BYTES)?;
    let taken = note.get(steps..).unwrap_or_default();
    let first = |these: [u8; 2]| taken.iter().copied().find(|step| these.contains(step));
    Ok(first([CLOSED, VOID]) == Some(CLOSED) && first([DONE, FOUND]) == Some(FOUND))
}
