//! Defines the requests to a [`kv::Store`] that a client sends to the daemon, and the daemon's answers.

use std::fmt;
use std::time::{Duration, SystemTime};

use kv::{
    Batch, Error, ErrorKind, Operation, Outcome, Purpose, RangeRequest, RangeResponse, Revision, Txn, TxnResponse,
    WatchRequest,
};
use serde::{Deserialize, Serialize};

/// A request to a store, and the time limit of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedRequest {
    /// Time limit of the request, after which the daemon starts no work for the request.
    pub within: Duration,
    /// The request that the daemon carries out.
    pub request: Request,
}

/// A request to a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// A call of [`kv::Store::range`].
    Range(RangeRequest),
    /// A call of [`kv::Store::txn`].
    Txn(Txn, Purpose),
    /// A call of [`kv::Store::watch`]. The daemon sends each item of the watch as a separate answer, and closes the
    /// connection when the watch ends.
    Watch(WatchRequest),
    /// A call of [`kv::Store::compact`].
    Compact(Revision),
    /// Asks for the oldest revision that the store can still read, and the time of that revision.
    Oldest,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreReply {
    /// The answer to a [`Request::Range`].
    Range(RangeResponse),
    /// The answer to a [`Request::Txn`].
    Txn(TxnResponse),
    /// The confirmation that the store has registered the watch.
    Watching,
    /// A batch of events of a [`Request::Watch`].
    Happened(Batch),
    /// The answer to a [`Request::Compact`].
    Compacted,
    /// The oldest revision that the store can still read, and the time of that revision if known.
    Oldest(Revision, Option<SystemTime>),
    /// The error with which the request failed or the watch ended.
    Failed(ErrorReply),
}

/// A [`kv::Error`] in the form in which the daemon sends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    kind: ErrorKind,
    operation: Operation,
    store: String,
    outcome: Outcome,
    detail: Option<String>,
    source: Option<ErrorCause>,
}

/// The text of an error's source, and the cause of that source, if any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ErrorCause {
    text: String,
    source: Option<Box<Self>>,
}

impl ErrorCause {
    fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        Self { text: error.to_string(), source: error.source().map(|source| Box::new(Self::of(source))) }
    }
}

impl fmt::Display for ErrorCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for ErrorCause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<&Error> for ErrorReply {
    fn from(error: &Error) -> Self {
        Self {
            kind: error.kind().clone(),
            operation: error.operation(),
            store: error.store().to_owned(),
            outcome: error.outcome(),
            detail: error.detail().map(str::to_owned),
            source: std::error::Error::source(error).map(ErrorCause::of),
        }
    }
}

impl From<ErrorReply> for Error {
    fn from(failed: ErrorReply) -> Self {
        let ErrorReply { kind, operation, store, outcome, detail, source } = failed;
        let mut error = Self::new(kind, operation, store).with_outcome(outcome);
        if let Some(detail) = detail {
            error = error.with_detail(detail);
        }
        match source {
            Some(source) => error.with_source(source),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use kv::{Compare, Content, Key, Op, Range};

    use super::*;
    use crate::frame::{Frame, FrameKind};

    fn round<T: Serialize + serde::de::DeserializeOwned + PartialEq + fmt::Debug>(what: &T) {
        assert_eq!(&Frame::new(FrameKind::Keys, what).unwrap().decode::<T>().unwrap(), what);
    }

    #[test]
    fn requests_are_read_as_written() {
        let bytes = Key::new(vec![0, 0xff, b'k']);
        round(&Request::Range(
            RangeRequest::new(Range::FromTo(bytes.clone(), "z".into())).with_limit(5).with_content(Content::KeysOnly),
        ));
        let txn = Txn::new()
            .with_compares([Compare::absent("a"), Compare::nothing_newer(Range::All, Revision::new(7))])
            .with_success([Op::put(bytes, vec![0_u8, 1]), Op::delete("b").with_prev()])
            .with_failure([Op::range(Range::prefix("p"))]);
        round(&TimedRequest { within: Duration::from_millis(1500), request: Request::Txn(txn, Purpose::Release) });
    }

    #[test]
    fn errors_are_read_as_written() {
        let cause = std::io::Error::other("disk on fire");
        let error = Error::new(ErrorKind::CommitIo, Operation::Txn, "sled:///x")
            .with_detail("look at the disk")
            .with_outcome(Outcome::Unknown)
            .with_source(cause);
        let failed = ErrorReply::from(&error);
        round(&failed);
        let again = Error::from(failed);
        assert_eq!(again.to_string(), error.to_string());
        assert_eq!((again.kind(), again.outcome()), (error.kind(), error.outcome()));
    }
}
