//! The one table of etcd's errors: code and text. Clients in Go compare the texts (`rpctypes`), so they are an interface.

use kv::{Auth, Error, ErrorKind, InvalidArgument, Outcome};
use tonic::{Code, Status};

/// A refusal with etcd's code and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    EmptyKey,
    KeyNotFound,
    ValueProvided,
    LeaseProvided,
    TooManyOps,
    DuplicateKey,
    Compacted,
    FutureRevision,
    NoSpace,
    RequestTooLarge,
    TooManyRequests,
    LeaseNotFound,
    LeaseExists,
    LeaseTooLong,
    NoLeader,
    Timeout,
    Stopped,
    PermissionDenied,
    NotSupportedHere,
}

impl Refusal {
    /// Code and text, as etcd 3.4 has them.
    pub(crate) const fn parts(self) -> (Code, &'static str) {
        match self {
            Self::EmptyKey => (Code::InvalidArgument, "etcdserver: key is not provided"),
            Self::KeyNotFound => (Code::InvalidArgument, "etcdserver: key not found"),
            Self::ValueProvided => (Code::InvalidArgument, "etcdserver: value is provided"),
            Self::LeaseProvided => (Code::InvalidArgument, "etcdserver: lease is provided"),
            Self::TooManyOps => (Code::InvalidArgument, "etcdserver: too many operations in txn request"),
            Self::DuplicateKey => (Code::InvalidArgument, "etcdserver: duplicate key given in txn request"),
            Self::Compacted => (Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted"),
            Self::FutureRevision => (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision"),
            Self::NoSpace => (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            Self::RequestTooLarge => (Code::InvalidArgument, "etcdserver: request is too large"),
            Self::TooManyRequests => (Code::ResourceExhausted, "etcdserver: too many requests"),
            Self::LeaseNotFound => (Code::NotFound, "etcdserver: requested lease not found"),
            Self::LeaseExists => (Code::FailedPrecondition, "etcdserver: lease already exists"),
            Self::LeaseTooLong => (Code::OutOfRange, "etcdserver: too large lease TTL"),
            Self::NoLeader => (Code::Unavailable, "etcdserver: no leader"),
            Self::Timeout => (Code::Unavailable, "etcdserver: request timed out"),
            Self::Stopped => (Code::Unavailable, "etcdserver: server stopped"),
            Self::PermissionDenied => (Code::PermissionDenied, "etcdserver: permission denied"),
            Self::NotSupportedHere => (Code::Unimplemented, "margay serve does not offer this"),
        }
    }

    pub(crate) fn status(self) -> Status {
        let (code, text) = self.parts();
        Status::new(code, text)
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        refusal.status()
    }
}

/// A method that is not offered, and what to do instead.
pub(crate) fn unsupported(what: &str) -> Status {
    let (code, text) = Refusal::NotSupportedHere.parts();
    Status::new(code, format!("{text}: {what}"))
}

/// The answer to a request over which the store failed. A write whose outcome is unknown gets a code that clients read as
/// unknown; a definite failure gets none of those that they send again.
pub(crate) fn status(error: &Error) -> Status {
    let refusal = match error.kind() {
        ErrorKind::InvalidArgument(InvalidArgument::EmptyKey) => Refusal::EmptyKey,
        ErrorKind::InvalidArgument(InvalidArgument::DuplicateKey(_)) => Refusal::DuplicateKey,
        ErrorKind::InvalidArgument(InvalidArgument::TooManyOps { .. }) => Refusal::TooManyOps,
        ErrorKind::TooLarge { .. } => Refusal::RequestTooLarge,
        ErrorKind::Compacted { .. } => Refusal::Compacted,
        ErrorKind::FutureRevision => Refusal::FutureRevision,
        ErrorKind::NoSpace => Refusal::NoSpace,
        ErrorKind::LeaseNotFound => Refusal::LeaseNotFound,
        ErrorKind::Throttled => Refusal::TooManyRequests,
        ErrorKind::NoLeader => Refusal::NoLeader,
        ErrorKind::Auth(Auth::Denied) => Refusal::PermissionDenied,
        ErrorKind::Timeout | ErrorKind::Disconnected { .. } => Refusal::Timeout,
        ErrorKind::Closed => Refusal::Stopped,
        ErrorKind::InvalidArgument(_) => return Status::invalid_argument(error.to_string()),
        ErrorKind::Unsupported => return unsupported(&error.to_string()),
        ErrorKind::Locked => return Status::unavailable(error.to_string()),
        _ if error.outcome() == Outcome::Unknown => return Status::unavailable(error.to_string()),
        _ => return Status::internal(error.to_string()),
    };
    refusal.status()
}
