//! Converts sled's errors into store errors; only this module inspects sled's errors.

use std::io;

use kv::{Error, ErrorKind, Operation};
use kv_mvcc::io_kind;

/// Converts the sled error of a failed operation on the store named `store`.
pub(crate) fn from_sled(store: &str, operation: Operation, error: sled::Error) -> Error {
    Error::new(kind(operation, &error), operation, store.to_owned()).with_source(error)
}

/// Converts the operating system's error of a failed operation on the store named `store`.
pub(crate) fn from_io(store: &str, operation: Operation, error: io::Error) -> Error {
    from_sled(store, operation, sled::Error::Io(error))
}

fn kind(operation: Operation, error: &sled::Error) -> ErrorKind {
    match error {
        sled::Error::Io(error) => io_kind(operation, error),
        // Only sled writes its configuration file, so sled's error `Unsupported`, which reports an unexpected
        // configuration, means that the file is damaged.
        sled::Error::Corruption { .. }
        | sled::Error::CollectionNotFound(_)
        | sled::Error::ReportableBug(_)
        | sled::Error::Unsupported(_) => ErrorKind::Corrupt,
    }
}

#[cfg(test)]
mod tests {
    use kv::Outcome;

    use super::*;

    fn io(kind: io::ErrorKind) -> sled::Error {
        sled::Error::Io(kind.into())
    }

    #[test]
    fn error_has_kind_for_each_cause() {
        let rows = [
            (io(io::ErrorKind::StorageFull), ErrorKind::NoSpace),
            (io(io::ErrorKind::QuotaExceeded), ErrorKind::NoSpace),
            (io(io::ErrorKind::FileTooLarge), ErrorKind::NoSpace),
            (io(io::ErrorKind::UnexpectedEof), ErrorKind::Corrupt),
            (io(io::ErrorKind::InvalidData), ErrorKind::Corrupt),
            (io(io::ErrorKind::Other), ErrorKind::CommitIo),
            (sled::Error::Corruption { at: None, bt: () }, ErrorKind::Corrupt),
            (sled::Error::CollectionNotFound(sled::IVec::from(b"x")), ErrorKind::Corrupt),
            (sled::Error::ReportableBug("x".into()), ErrorKind::Corrupt),
            (sled::Error::Unsupported("x".into()), ErrorKind::Corrupt),
        ];
        for (error, expected) in rows {
            let text = error.to_string();
            let ours = from_sled("sled", Operation::Txn, error);
            assert_eq!(ours.kind(), &expected, "{text}");
            assert_eq!(ours.outcome(), Outcome::Unknown, "{text}");
            assert!(ours.to_string().contains(&text), "{ours} keeps {text}");
        }
    }

    #[test]
    fn error_while_reading_is_no_failed_commit() {
        for operation in [Operation::Open, Operation::Range] {
            assert_eq!(from_io("sled", operation, io::ErrorKind::PermissionDenied.into()).kind(), &ErrorKind::Io);
        }
    }
}
