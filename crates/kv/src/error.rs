//! Defines the errors that stores return. The error of a failed write says whether the write may have happened anyway.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;

use crate::key::{Key, Revision};

/// The result type of the crate `kv`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The store operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Operation {
    /// The operation opens or creates a store.
    Open,
    /// [`Store::range`](crate::Store::range).
    Range,
    /// A call of [`Store::txn`](crate::Store::txn), even if the transaction contains only reads.
    Txn,
    /// [`Store::watch`](crate::Store::watch).
    Watch,
    /// [`Store::compact`](crate::Store::compact).
    Compact,
    /// One whole call of [`transact!`](crate::transact!), including all its attempts.
    Transact,
    /// Closing a store.
    Close,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Range => "read",
            Self::Txn => "transaction",
            Self::Watch => "watch",
            Self::Compact => "compaction",
            Self::Transact => "update",
            Self::Close => "close",
        })
    }
}

/// Says whether a failed write may have changed the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Outcome {
    /// The failed write did not happen and will not happen.
    NotApplied,
    /// The failed write may have happened already, or may still happen.
    Unknown,
}

/// The reason why a request is invalid: every store rejects it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum InvalidArgument {
    /// A request contains an empty key.
    EmptyKey,
    /// A request contains a key longer than [`MAX_KEY_BYTES`](crate::MAX_KEY_BYTES).
    KeyTooLong {
        /// The length of the key in bytes.
        bytes: usize,
    },
    /// One branch of a transaction puts a key twice, or puts and deletes one key.
    DuplicateKey(Key),
    /// A transaction has more than [`MAX_TXN_OPS`](crate::MAX_TXN_OPS) compares, or one of its branches has more
    /// operations than that.
    TooManyOps {
        /// The number of compares in the transaction, or of operations in the branch.
        count: usize,
    },
    /// A watch request has a range that contains no key.
    EmptyWatchRange,
    /// A request has a revision below 1, but needs a revision of 1 or more.
    RevisionNotSet,
    /// A [`Transaction`](crate::Transaction) writes a key that it has not read.
    UnguardedWrite(Key),
}

impl fmt::Display for InvalidArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyKey => f.write_str("a key is empty"),
            Self::KeyTooLong { bytes } => {
                write!(f, "a key is {bytes} bytes long, over the limit of {}", crate::MAX_KEY_BYTES)
            }
            Self::DuplicateKey(key) => write!(f, "key {key} is written twice in one branch of a transaction"),
            Self::TooManyOps { count } => write!(
                f,
                "a transaction has {count} compares or operations in one branch, over the limit of {}",
                crate::MAX_TXN_OPS
            ),
            Self::EmptyWatchRange => f.write_str("the range to watch is empty"),
            Self::RevisionNotSet => f.write_str("a revision of at least 1 is needed"),
            Self::UnguardedWrite(key) => write!(f, "key {key} is written without having been read"),
        }
    }
}

/// The reason why a store rejected the caller's login or permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Auth {
    /// The caller sent no valid user, password or token.
    Unauthenticated,
    /// The user has no permission for this request.
    Denied,
    /// The user's permissions changed while the request was in flight.
    OldRevision,
}

/// The kind of a store error; callers should match on the kind and not on the error's text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request is malformed and can never succeed.
    InvalidArgument(InvalidArgument),
    /// The request, or a value in it, exceeds the size limit of the store.
    TooLarge {
        /// The size in bytes of the request or value that is too large.
        bytes: usize,
    },
    /// The requested revision is below the compaction mark.
    Compacted {
        /// The compaction mark: the oldest readable revision, or unset if the store did not report it.
        compact_revision: Revision,
    },
    /// The requested revision is above the store's revision.
    FutureRevision,
    /// The store has no disk space left. On some stores, a write that failed with `NoSpace` may have happened anyway.
    NoSpace,
    /// The store is overloaded, and refused the request without executing any of it.
    Throttled,
    /// The store rejected the caller's credentials or permissions.
    Auth(Auth),
    /// The store could not be reached, so the request was never sent.
    NotSent,
    /// The cluster member that received the request knows no leader.
    NoLeader,
    /// Another process held the store lock for longer than the caller waited.
    Locked,
    /// After an earlier write error, this store handle is read-only; to write again, the caller must reopen the store.
    Poisoned,
    /// The store handle was closed before or during the call.
    Closed,
    /// The store's answer did not arrive in time.
    Timeout,
    /// The connection to the store broke; if the failed request is a watch, the caller can watch again from
    /// `resume_from`.
    Disconnected {
        /// The revision after the last revision that the watch delivered; unset if the failed request is not a watch.
        resume_from: Revision,
    },
    /// The store's answer could not be decoded.
    Undecodable,
    /// The storage engine reported an error during a commit.
    CommitIo,
    /// The operating system reported an error while the store was being read or opened.
    Io,
    /// There is no store at this path, and the caller did not ask to create one.
    Missing,
    /// The store is damaged.
    Corrupt,
    /// The store has a format that this version of Margay does not support.
    UnknownFormat {
        /// The format number that the store contains.
        found: u32,
    },
    /// The store's revision is lower than a revision that this handle has already seen: the store was restored from a
    /// backup, or replaced by another store.
    RevisionRegressed,
    /// A [`Transaction`](crate::Transaction) has more guards than one commit can check.
    ReadSetTooLarge {
        /// The number of guards that the transaction has.
        guards: usize,
    },
    /// At every attempt of a transaction, another writer changed a guarded key.
    Conflict {
        /// The number of attempts that the transaction made before it gave up.
        attempts: u32,
    },
    /// A put names a lease that does not exist.
    LeaseNotFound,
    /// The store does not support the request.
    Unsupported,
}

impl ErrorKind {
    /// The outcome of a write that failed with this kind of error: unknown, unless the kind proves that the write did
    /// not happen.
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::InvalidArgument(_)
            | Self::TooLarge { .. }
            | Self::Compacted { .. }
            | Self::FutureRevision
            | Self::Throttled
            | Self::Auth(_)
            | Self::NotSent
            | Self::NoLeader
            | Self::Locked
            | Self::Poisoned
            | Self::Closed
            | Self::Missing
            | Self::UnknownFormat { .. }
            | Self::RevisionRegressed
            | Self::ReadSetTooLarge { .. }
            | Self::Conflict { .. }
            | Self::LeaseNotFound
            | Self::Unsupported => Outcome::NotApplied,
            Self::NoSpace
            | Self::Timeout
            | Self::Disconnected { .. }
            | Self::Undecodable
            | Self::CommitIo
            | Self::Io
            | Self::Corrupt => Outcome::Unknown,
        }
    }

    /// Returns true if the request may succeed when the caller repeats it later.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Throttled
                | Self::NotSent
                | Self::NoLeader
                | Self::Locked
                | Self::Timeout
                | Self::Disconnected { .. }
                | Self::Undecodable
                | Self::Auth(Auth::OldRevision)
        )
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(what) => what.fmt(f),
            Self::TooLarge { bytes } => write!(
                f,
                "the request or a value in it is too large ({bytes} bytes, the limit is {})",
                crate::MAX_REQUEST_BYTES
            ),
            Self::Compacted { compact_revision } if compact_revision.is_set() => {
                write!(f, "the revision asked for has been compacted; the oldest readable one is {compact_revision}")
            }
            Self::Compacted { .. } => f.write_str("the revision asked for has been compacted"),
            Self::FutureRevision => f.write_str("the revision asked for does not exist yet"),
            Self::NoSpace => f.write_str("no space left"),
            Self::Throttled => f.write_str("the store has too many requests"),
            Self::Auth(Auth::Unauthenticated) => f.write_str("not authenticated"),
            Self::Auth(Auth::Denied) => f.write_str("permission denied"),
            Self::Auth(Auth::OldRevision) => f.write_str("permissions changed meanwhile"),
            Self::NotSent => f.write_str("no connection"),
            Self::NoLeader => f.write_str("the cluster has no leader"),
            Self::Locked => f.write_str("the store is in use by another process"),
            Self::Poisoned => f.write_str("an earlier error stopped all writing until the store is opened again"),
            Self::Closed => f.write_str("the store has been closed"),
            Self::Timeout => f.write_str("no answer in time"),
            Self::Disconnected { .. } => f.write_str("the connection broke"),
            Self::Undecodable => f.write_str("the answer could not be decoded"),
            Self::CommitIo => f.write_str("the commit failed"),
            Self::Io => f.write_str("input or output failed"),
            Self::Missing => f.write_str("there is no store here"),
            Self::Corrupt => f.write_str("the store is damaged"),
            Self::UnknownFormat { found } => {
                write!(f, "the store has format {found}, which this version does not know")
            }
            Self::RevisionRegressed => f.write_str("the store's revision went back"),
            Self::ReadSetTooLarge { guards } => {
                write!(f, "one commit cannot guard {guards} keys and ranges")
            }
            Self::Conflict { attempts } => write!(f, "other writers got in between {attempts} times"),
            Self::LeaseNotFound => f.write_str("there is no such lease"),
            Self::Unsupported => f.write_str("not supported"),
        }
    }
}

/// An error that an operation of a [`Store`](crate::Store) returned.
pub struct Error(Box<ErrorFields>);

struct ErrorFields {
    kind: ErrorKind,
    operation: Operation,
    store: Cow<'static, str>,
    outcome: Outcome,
    is_final: bool,
    detail: Option<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Creates an error of kind `kind` for a failed operation. The string `store` is an engine's name or a store's
    /// address, and must not contain a secret.
    pub fn new(kind: ErrorKind, operation: Operation, store: impl Into<Cow<'static, str>>) -> Self {
        let outcome = match operation {
            Operation::Txn | Operation::Compact | Operation::Transact => kind.outcome(),
            Operation::Open | Operation::Range | Operation::Watch | Operation::Close => Outcome::NotApplied,
        };
        let store = store.into();
        Self(Box::new(ErrorFields { kind, operation, store, outcome, is_final: false, detail: None, source: None }))
    }

    /// Sets the underlying error, which [`source`](std::error::Error::source) returns.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Sets the detail of the error: a sentence for the user that adds a fact or says what to do.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.0.detail = Some(detail.into());
        self
    }

    /// Replaces the outcome of the failed write, which otherwise follows from the error's kind. A caller that sets
    /// [`Outcome::NotApplied`] must have proof that the write did not happen, for example from a read of the store.
    #[must_use]
    pub fn with_outcome(mut self, outcome: Outcome) -> Self {
        self.0.outcome = outcome;
        self
    }

    /// Marks the failed request as ended: its write cannot happen later, so a read of the store shows the outcome.
    #[must_use]
    pub fn with_final_outcome(mut self) -> Self {
        self.0.is_final = true;
        self
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The store operation that failed.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The engine's name or the address of the store that returned the error.
    pub fn store(&self) -> &str {
        &self.0.store
    }

    /// Says whether the failed write may have happened anyway.
    pub fn outcome(&self) -> Outcome {
        self.0.outcome
    }

    /// Returns true if the failed request has ended, so that its write cannot be applied later. After a final error
    /// with an unknown outcome, a read of the latest revision shows whether the write happened.
    pub fn is_final(&self) -> bool {
        self.0.is_final || self.0.outcome == Outcome::NotApplied
    }

    /// The detail of the error, if there is one: a sentence for the user with a fact or advice.
    pub fn detail(&self) -> Option<&str> {
        self.0.detail.as_deref()
    }
}

impl fmt::Display for Error {
    /// Writes the error's store, operation, kind, detail and all its sources on one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.0.store, self.0.operation, self.0.kind)?;
        if let Some(detail) = &self.0.detail {
            write!(f, ": {detail}")?;
        }
        let mut source = self.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        if self.0.outcome == Outcome::Unknown {
            f.write_str(" (it may have been carried out all the same)")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("operation", &self.0.operation)
            .field("store", &self.0.store)
            .field("outcome", &self.0.outcome)
            .field("is_final", &self.0.is_final)
            .field("detail", &self.0.detail)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_follows_kind_and_operation() {
        assert_eq!(Error::new(ErrorKind::Timeout, Operation::Txn, "s").outcome(), Outcome::Unknown);
        assert_eq!(Error::new(ErrorKind::Timeout, Operation::Range, "s").outcome(), Outcome::NotApplied);
        assert_eq!(Error::new(ErrorKind::NotSent, Operation::Txn, "s").outcome(), Outcome::NotApplied);
        assert_eq!(Error::new(ErrorKind::NoSpace, Operation::Txn, "s").outcome(), Outcome::Unknown);
    }

    #[test]
    fn display_is_one_line_with_sources() {
        let error = Error::new(ErrorKind::Io, Operation::Open, "redb")
            .with_detail("check the folder's permissions")
            .with_source(std::io::Error::other("boom"));
        assert_eq!(error.to_string(), "redb: open: input or output failed: check the folder's permissions: boom");
        assert!(error.source().is_some());
    }

    #[test]
    fn compaction_error_names_revision_when_known() {
        let text = |compact_revision| ErrorKind::Compacted { compact_revision }.to_string();
        assert!(text(Revision::new(7)).ends_with("the oldest readable one is 7"));
        assert_eq!(text(Revision::UNSET), "the revision asked for has been compacted");
    }
}
