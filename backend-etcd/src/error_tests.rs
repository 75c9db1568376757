use tonic::{Code, Status};

use super::*;

fn status(code: Code, text: &str) -> etcd_client::Error {
    etcd_client::Error::GRpcStatus(Status::new(code, text))
}

fn of(code: Code, text: &str) -> (ErrorKind, Outcome) {
    let error = map(status(code, text), Operation::Txn, "etcd");
    (error.kind().clone(), error.outcome())
}

/// Each row: what comes, what it is, and whether a write that was answered so is certain not to have happened.
#[test]
fn every_row() {
    use Outcome::{NotApplied, Unknown};
    let disconnected = || DISCONNECTED;
    let rows: Vec<(Code, &str, ErrorKind, Outcome)> = vec![
        (Code::InvalidArgument, "etcdserver: key is not provided", InvalidArgument::EmptyKey.into(), NotApplied),
        (
            Code::InvalidArgument,
            "etcdserver: duplicate key given in txn request",
            InvalidArgument::DuplicateKey(Key::default()).into(),
            NotApplied,
        ),
        (
            Code::InvalidArgument,
            "etcdserver: too many operations in txn request",
            InvalidArgument::TooManyOps { count: 0 }.into(),
            NotApplied,
        ),
        (
            Code::InvalidArgument,
            "etcdserver: unsupported operations in txn request",
            ErrorKind::Unsupported,
            NotApplied,
        ),
        (Code::Unknown, "unsupported transaction: compare:<key:\"k\" >", ErrorKind::Unsupported, NotApplied),
        (Code::InvalidArgument, "etcdserver: request is too large", ErrorKind::TooLarge { bytes: 0 }, NotApplied),
        (
            Code::ResourceExhausted,
            "grpc: received message larger than max (2097168 vs. 2097152)",
            ErrorKind::TooLarge { bytes: 0 },
            NotApplied,
        ),
        (
            Code::OutOfRange,
            "etcdserver: mvcc: required revision has been compacted",
            ErrorKind::Compacted { compact_revision: Revision::UNSET },
            NotApplied,
        ),
        (
            Code::OutOfRange,
            "etcdserver: mvcc: required revision is a future revision",
            ErrorKind::FutureRevision,
            NotApplied,
        ),
        (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded", ErrorKind::NoSpace, Unknown),
        // Never seen: etcd says it before it proposes anything, which is known from its source alone.
        (Code::ResourceExhausted, "etcdserver: too many requests", ErrorKind::Throttled, NotApplied),
        (Code::Unauthenticated, "etcdserver: invalid auth token", ErrorKind::Auth(Auth::Unauthenticated), NotApplied),
        (Code::InvalidArgument, "etcdserver: user name is empty", ErrorKind::Auth(Auth::Unauthenticated), NotApplied),
        (
            Code::InvalidArgument,
            "etcdserver: authentication failed, invalid user ID or password",
            ErrorKind::Auth(Auth::Unauthenticated),
            NotApplied,
        ),
        (
            Code::InvalidArgument,
            "etcdserver: revision of auth store is old",
            ErrorKind::Auth(Auth::OldRevision),
            NotApplied,
        ),
        (Code::PermissionDenied, "etcdserver: permission denied", ErrorKind::Auth(Auth::Denied), NotApplied),
        (Code::Unavailable, "etcdserver: no leader", ErrorKind::NoLeader, NotApplied),
        (Code::Cancelled, "Timeout expired", ErrorKind::Timeout, Unknown),
        (Code::Unknown, "context deadline exceeded", ErrorKind::Timeout, Unknown),
        (Code::DeadlineExceeded, "context deadline exceeded", ErrorKind::Timeout, Unknown),
        (Code::Unavailable, "etcdserver: request timed out", ErrorKind::Timeout, Unknown),
        (
            Code::Unavailable,
            "etcdserver: request timed out, possibly due to previous leader failure",
            ErrorKind::Timeout,
            Unknown,
        ),
        (Code::Unavailable, "http2 error", disconnected(), Unknown),
        (Code::Unknown, "transport error", disconnected(), Unknown),
        (Code::Unknown, "h2 protocol error: error reading a body from connection", disconnected(), Unknown),
        (Code::Unavailable, "etcdserver: server stopped", disconnected(), Unknown),
        (Code::Unavailable, "etcdserver: leader changed", disconnected(), Unknown),
        (
            Code::OutOfRange,
            "Error, decoded message length too large: found 5242890 bytes, the limit is: 4194304 bytes",
            ErrorKind::Undecodable,
            Unknown,
        ),
        // Of 1,219 writes that were refused while the alarm came and went, none had happened.
        (Code::DataLoss, "etcdserver: corrupt cluster", ErrorKind::Corrupt, NotApplied),
        (Code::DataLoss, "something new", ErrorKind::Corrupt, Unknown),
    ];
    for (code, text, kind, outcome) in rows {
        assert_eq!(of(code, text), (kind, outcome), "{code:?} {text}");
    }
}

#[test]
fn what_is_not_known_is_unknown() {
    let codes = (0..=16).map(Code::from).filter(|code| *code != Code::Ok);
    for code in codes {
        let (kind, outcome) = of(code, "something new");
        assert_eq!(outcome, Outcome::Unknown, "{code:?} gave {kind:?}");
    }
    // The words of a definite error in the mouth of somebody else: another code, or not etcd's own wording.
    for (code, text) in [
        (Code::Unavailable, "tcp connect error"),
        (Code::Unavailable, "upstream connect error"),
        (Code::Internal, "etcdserver: too many requests"),
        (Code::InvalidArgument, "request is too large"),
        (Code::PermissionDenied, "forbidden by the proxy"),
        (Code::ResourceExhausted, "trying to send message larger than max"),
    ] {
        assert_eq!(of(code, text).1, Outcome::Unknown, "{code:?} {text}");
    }
    let error = map(etcd_client::Error::WatchError("gone".into()), Operation::Txn, "etcd");
    assert_eq!(error.outcome(), Outcome::Unknown);
}

#[test]
fn a_connection_that_was_never_made_proves_that_nothing_was_sent() {
    for text in ["tcp connect error", "dns error", "invalid peer certificate: UnknownIssuer"] {
        let status = Status::from_error(Box::new(ConnectError(text.into())));
        let error = map(etcd_client::Error::GRpcStatus(status), Operation::Txn, "etcd");
        assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied), "{text}");
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_read_that_failed_changed_nothing() {
    let error = map(status(Code::Unavailable, "http2 error"), Operation::Range, "etcd");
    assert_eq!(error.outcome(), Outcome::NotApplied);
}

#[test]
fn who_hangs_up_on_a_handshake_may_speak_something_else() {
    let broken = |kind: io::ErrorKind| {
        let status = Status::from_error(Box::new(ConnectError(Box::new(io::Error::from(kind)))));
        speaks_otherwise(&etcd_client::Error::GRpcStatus(status))
    };
    for kind in [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe] {
        assert!(broken(kind), "{kind}");
    }
    for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::HostUnreachable, io::ErrorKind::TimedOut] {
        assert!(!broken(kind), "{kind}");
    }
}

#[test]
fn a_transaction_that_a_server_repeats_is_not_told() {
    let refusal = status(Code::Unknown, "unsupported transaction: success:<value:\"hidden\" >");
    let advised = advice(&refusal).unwrap();
    let error = map(refusal, Operation::Txn, "etcd").with_detail(advised);
    let said = error.to_string();
    assert!(said.contains("as kine does not") && !said.contains("hidden"), "{said}");
}

#[test]
fn a_refusal_for_want_of_room_is_final_and_says_how_to_make_some() {
    let full = || status(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
    let error = map(full(), Operation::Txn, "etcd");
    assert_eq!((error.outcome(), error.is_final()), (Outcome::Unknown, true));
    assert!(!map(status(Code::Cancelled, "Timeout expired"), Operation::Txn, "etcd").is_final());
    let advice = advice(&full()).unwrap();
    for command in ["etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"] {
        assert!(advice.contains(command), "{advice}");
    }
}
