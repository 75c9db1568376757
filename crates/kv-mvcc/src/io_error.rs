//! The meaning of an error of the operating system that an engine meets in its files.

use std::io;

use kv::{ErrorKind, Operation};

/// The kind of `error`, which came up in `operation`.
pub fn io_kind(operation: Operation, error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => ErrorKind::NoSpace,
        // A file ends before something that it should have, has nonsense in it, or is no file of the engine's.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => ErrorKind::Corrupt,
        _ => unknown_io(operation),
    }
}

/// The kind of a failure of which nothing more is known.
pub fn unknown_io(operation: Operation) -> ErrorKind {
    match operation {
        Operation::Txn | Operation::Compact | Operation::Transact => ErrorKind::CommitIo,
        _ => ErrorKind::Io,
    }
}
