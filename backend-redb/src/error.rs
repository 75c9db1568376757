//! Converts redb's errors into store errors; only this module inspects redb's errors.

use kv::{Error, ErrorKind, Operation};
use kv_mvcc::{io_kind, unknown_io};

/// Converts the redb error of a failed operation on the store named `store`.
pub(crate) fn from_redb(store: &str, operation: Operation, error: impl Into<redb::Error>) -> Error {
    let error = error.into();
    Error::new(kind(operation, &error), operation, store.to_owned()).with_source(error)
}

fn kind(operation: Operation, error: &redb::Error) -> ErrorKind {
    match error {
        redb::Error::Io(error) => io_kind(operation, error),
        redb::Error::DatabaseAlreadyOpen => ErrorKind::Locked,
        redb::Error::ValueTooLarge(bytes) => ErrorKind::TooLarge { bytes: *bytes },
        redb::Error::UpgradeRequired(found) => ErrorKind::UnknownFormat { found: u32::from(*found) },
        redb::Error::PreviousIo | redb::Error::LockPoisoned(_) => ErrorKind::Poisoned,
        redb::Error::DatabaseClosed => ErrorKind::Closed,
        // The store has only one redb table, so any other table in the file means damage, like a bad checksum.
        redb::Error::Corrupted(_)
        | redb::Error::RepairAborted
        | redb::Error::TableTypeMismatch { .. }
        | redb::Error::TableIsMultimap(_)
        | redb::Error::TableIsNotMultimap(_)
        | redb::Error::TypeDefinitionChanged { .. }
        | redb::Error::TableDoesNotExist(_) => ErrorKind::Corrupt,
        _ => unknown_io(operation),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::panic::Location;

    use kv::Outcome;

    use super::*;

    fn io(kind: io::ErrorKind) -> redb::Error {
        redb::Error::Io(kind.into())
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
            (redb::Error::DatabaseAlreadyOpen, ErrorKind::Locked),
            (redb::Error::ValueTooLarge(9), ErrorKind::TooLarge { bytes: 9 }),
            (redb::Error::UpgradeRequired(2), ErrorKind::UnknownFormat { found: 2 }),
            (redb::Error::PreviousIo, ErrorKind::Poisoned),
            (redb::Error::LockPoisoned(Location::caller()), ErrorKind::Poisoned),
            (redb::Error::DatabaseClosed, ErrorKind::Closed),
            (redb::Error::Corrupted("x".into()), ErrorKind::Corrupt),
            (redb::Error::RepairAborted, ErrorKind::Corrupt),
            (redb::Error::TableIsMultimap("x".into()), ErrorKind::Corrupt),
            (redb::Error::TableIsNotMultimap("x".into()), ErrorKind::Corrupt),
            (redb::Error::TableDoesNotExist("x".into()), ErrorKind::Corrupt),
            (redb::Error::TransactionInProgress, ErrorKind::CommitIo),
        ];
        for (error, expected) in rows {
            let text = error.to_string();
            let ours = from_redb("redb", Operation::Txn, error);
            assert_eq!(ours.kind(), &expected, "{text}");
            assert!(ours.to_string().contains(&text), "{ours} keeps {text}");
        }
    }

    #[test]
    fn error_while_reading_is_no_failed_commit() {
        for operation in [Operation::Open, Operation::Range] {
            let error = from_redb("redb", operation, io(io::ErrorKind::PermissionDenied));
            assert_eq!(error.kind(), &ErrorKind::Io);
        }
    }

    #[test]
    fn error_is_definite_only_for_refusals() {
        let outcome = |error| from_redb("redb", Operation::Txn, error).outcome();
        assert_eq!(outcome(redb::Error::PreviousIo), Outcome::NotApplied);
        assert_eq!(outcome(io(io::ErrorKind::StorageFull)), Outcome::Unknown);
        assert_eq!(outcome(io(io::ErrorKind::Other)), Outcome::Unknown);
    }
}
