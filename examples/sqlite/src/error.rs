//! Converts SQLite's errors into the store's error kinds; only this module inspects SQLite's errors.

use kv::{Error, ErrorKind, Operation};
use rusqlite::ErrorCode;

/// Converts the SQLite error of a failed operation on the store named `store`.
pub(crate) fn from_sqlite(store: &str, operation: Operation, error: rusqlite::Error) -> Error {
    Error::new(kind(operation, &error), operation, store.to_owned()).with_source(error)
}

fn kind(operation: Operation, error: &rusqlite::Error) -> ErrorKind {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => ErrorKind::NoSpace,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => ErrorKind::Corrupt,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => ErrorKind::Locked,
        // SQLite returns `Unknown`, `SchemaChanged` or `ConstraintViolation` if a statement does not fit the database
        // schema, or if a value has the wrong type. No other program creates the SQLite schema, so a schema that does
        // not fit means that the store is damaged.
        Some(ErrorCode::Unknown | ErrorCode::SchemaChanged | ErrorCode::ConstraintViolation) => ErrorKind::Corrupt,
        None => ErrorKind::Corrupt,
        // If an SQLite error maps to no other error kind, the outcome of a commit is unknown.
        Some(_) if operation == Operation::Txn => ErrorKind::CommitIo,
        Some(_) => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use kv::Outcome;
    use rusqlite::ffi;

    use super::*;

    #[test]
    fn error_has_kind_for_each_cause() {
        let rows = [
            (ffi::SQLITE_FULL, ErrorKind::NoSpace),
            (ffi::SQLITE_CORRUPT, ErrorKind::Corrupt),
            (ffi::SQLITE_NOTADB, ErrorKind::Corrupt),
            (ffi::SQLITE_BUSY, ErrorKind::Locked),
            (ffi::SQLITE_ERROR, ErrorKind::Corrupt),
            (ffi::SQLITE_IOERR, ErrorKind::CommitIo),
            (ffi::SQLITE_IOERR_FSYNC, ErrorKind::CommitIo),
        ];
        for (code, expected) in rows {
            let ours = from_sqlite("test", Operation::Txn, rusqlite::Error::SqliteFailure(ffi::Error::new(code), None));
            assert_eq!(*ours.kind(), expected, "{ours}");
        }
        let read = rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_IOERR_READ), None);
        assert_eq!(*from_sqlite("test", Operation::Range, read).kind(), ErrorKind::Io);
    }

    #[test]
    fn error_of_failed_commit_is_unknown() {
        for code in [ffi::SQLITE_FULL, ffi::SQLITE_IOERR_FSYNC, ffi::SQLITE_CORRUPT] {
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            assert_eq!(from_sqlite("test", Operation::Txn, error).outcome(), Outcome::Unknown, "{code}");
        }
    }
}
