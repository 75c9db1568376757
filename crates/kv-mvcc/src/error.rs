//! Creates the errors of this crate, maps failed file operations of an engine to error kinds, and converts an engine's
//! panic into an error.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kv::{Error, ErrorKind, Operation, Outcome, Result, Revision};

/// Creates the error for a damaged store; `detail` says what is damaged.
pub(crate) fn corrupt(store: &'static str, operation: Operation, detail: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, operation, store)
        .with_detail(format!("{detail}; restore the store from a backup, or move it away to start a new one"))
}

/// Creates the error for a read of a revision below the compaction mark.
pub(crate) fn compacted(store: &'static str, operation: Operation, mark: u64) -> Error {
    Error::new(ErrorKind::Compacted { compact_revision: revision(mark) }, operation, store)
}

/// Creates the error for a call that began after the store was closed and therefore had no effect.
pub(crate) fn closed(store: &'static str, operation: Operation) -> Error {
    Error::new(ErrorKind::Closed, operation, store)
}

pub(crate) fn revision(number: u64) -> Revision {
    Revision::new(number.cast_signed())
}

/// Calls an engine. Engines panic when their files are damaged; this function converts the panic into a `Corrupt`
/// error.
///
/// # Errors
/// Any error that `call` returns; `Corrupt` if `call` panicked.
pub(crate) fn guarded<T>(store: &'static str, operation: Operation, call: impl FnOnce() -> Result<T>) -> Result<T> {
    caught(call).unwrap_or_else(|| Err(corrupt(store, operation, ENGINE_GAVE_UP)))
}

/// The error detail that is reported when the engine panicked.
pub const ENGINE_GAVE_UP: &str = "the engine gave up over what it found in its files";

/// Calls the closure `call`; returns `None` if `call` panicked.
pub fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    let panicked =
        |panic: Box<dyn Any + Send>| tracing::debug!(text = panic_text(&*panic), "the storage engine panicked");
    catch_unwind(AssertUnwindSafe(call)).map_err(panicked).ok()
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text,
        (None, None) => "no reason given",
    }
}

/// An error that several callers get, for example all callers whose transactions shared a failed commit.
#[derive(Debug)]
pub(crate) struct SharedError(Arc<Error>);

impl SharedError {
    pub(crate) fn new(error: Error) -> Self {
        Self(Arc::new(error))
    }

    pub(crate) fn error(&self, store: &'static str, operation: Operation, outcome: Outcome) -> Error {
        let mut error = Error::new(self.0.kind().clone(), operation, store).with_outcome(outcome);
        if let Some(detail) = self.0.detail() {
            error = error.with_detail(detail);
        }
        if self.0.source().is_some() {
            error = error.with_source(SharedCause(Arc::clone(&self.0)));
        }
        error
    }

    pub(crate) fn outcome(&self) -> Outcome {
        self.0.outcome()
    }
}

/// The source of each copy of a shared error: the original error, which cannot be cloned.
#[derive(Debug)]
struct SharedCause(Arc<Error>);

impl fmt::Display for SharedCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.source().map_or(Ok(()), |source| write!(f, "{source}"))
    }
}

impl StdError for SharedCause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source().and_then(StdError::source)
    }
}

/// The error kind to report for an I/O error that occurred in `operation`.
pub fn io_kind(operation: Operation, error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => ErrorKind::NoSpace,
        // The engine's file is truncated, has invalid content, or was not written by this engine.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => ErrorKind::Corrupt,
        _ => unknown_io(operation),
    }
}

/// The error kind to report for an I/O failure with an unknown cause.
pub fn unknown_io(operation: Operation) -> ErrorKind {
    match operation {
        Operation::Txn | Operation::Compact | Operation::Transact => ErrorKind::CommitIo,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_panic_is_corruption() {
        let error = guarded::<()>("s", Operation::Range, || panic!("page {} is odd", 7)).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Corrupt);
        let text = error.to_string();
        assert!(text.contains(ENGINE_GAVE_UP) && !text.contains("page 7 is odd"), "{text}");
    }

    #[test]
    fn error_when_shared_keeps_kind_detail_and_source() {
        let error = Error::new(ErrorKind::CommitIo, Operation::Txn, "s")
            .with_detail("disk full?")
            .with_source(io::Error::other("boom"));
        let shared = SharedError::new(error);
        let error = shared.error("s", Operation::Txn, Outcome::NotApplied);
        assert_eq!(error.to_string(), "s: transaction: the commit failed: disk full?: boom");
        assert_eq!(error.outcome(), Outcome::NotApplied);
        assert_eq!(shared.outcome(), Outcome::Unknown);
    }
}
