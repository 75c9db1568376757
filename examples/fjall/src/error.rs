//! Converts fjall's errors into the store's error kinds; only this module inspects fjall's errors.

use std::io;

use kv::{Error, ErrorKind, Operation};
use kv_mvcc::io_kind;

/// Converts the fjall error of a failed operation on the store named `store`.
pub(crate) fn from_fjall(store: &str, operation: Operation, error: fjall::Error) -> Error {
    Error::new(kind(operation, &error), operation, store.to_owned()).with_source(error)
}

fn kind(operation: Operation, error: &fjall::Error) -> ErrorKind {
    match error {
        fjall::Error::Io(error) | fjall::Error::Storage(fjall::LsmError::Io(error)) => match error.kind() {
            // IO errors of the kinds `NotFound`, `InvalidInput` and `AlreadyExists` mean a damaged store: a referenced
            // file is missing or too short, or an unreferenced file exists.
            io::ErrorKind::NotFound | io::ErrorKind::InvalidInput | io::ErrorKind::AlreadyExists => ErrorKind::Corrupt,
            _ => io_kind(operation, error),
        },
        fjall::Error::Locked => ErrorKind::Locked,
        fjall::Error::Poisoned => ErrorKind::CommitIo,
        // All other fjall errors mean that a file is missing, or that a part of a file is not in fjall's format.
        _ => ErrorKind::Corrupt,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_has_kind_for_each_cause() {
        let io = |kind: io::ErrorKind| fjall::Error::Io(kind.into());
        let rows = [
            (io(io::ErrorKind::StorageFull), ErrorKind::NoSpace),
            (io(io::ErrorKind::NotFound), ErrorKind::Corrupt),
            (io(io::ErrorKind::InvalidInput), ErrorKind::Corrupt),
            (io(io::ErrorKind::Other), ErrorKind::CommitIo),
            (fjall::Error::Storage(fjall::LsmError::Io(io::ErrorKind::NotFound.into())), ErrorKind::Corrupt),
            (fjall::Error::Locked, ErrorKind::Locked),
            (fjall::Error::Poisoned, ErrorKind::CommitIo),
            (fjall::Error::InvalidVersion(None), ErrorKind::Corrupt),
        ];
        for (theirs, expected) in rows {
            let ours = from_fjall("test", Operation::Txn, theirs);
            assert_eq!(*ours.kind(), expected, "{ours}");
        }
    }
}
