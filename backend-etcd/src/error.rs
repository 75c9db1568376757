//! Converts errors of etcd and of the connection into store errors. No other module inspects the text of etcd's error
//! messages.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use kv::{Auth, Error, ErrorKind, InvalidArgument, Key, Operation, Outcome, Revision};
use tonic::{Code, ConnectError, Status};

pub(crate) const STORE_NAME: &str = "etcd";

/// Converts etcd's error of a failed store operation; `store` names the endpoint that returned the error.
pub(crate) fn map(error: etcd_client::Error, operation: Operation, store: &str) -> Error {
    let (kind, outcome) = classify(&error);
    let made = Error::new(kind, operation, store.to_owned());
    let made = match operation {
        Operation::Txn | Operation::Compact => made.with_outcome(outcome),
        _ => made,
    };
    // When etcd is out of space, it refuses a write either before it proposes the write to the cluster, or when it
    // processes the proposal. The out-of-space error does not show whether etcd had processed the proposal, but once
    // the error has arrived, the write cannot be applied later.
    let made = if *made.kind() == ErrorKind::NoSpace { made.with_final_outcome() } else { made };
    match error {
        etcd_client::Error::GRpcStatus(status) => made.with_source(StatusCause(status)),
        other => made.with_source(other),
    }
}

/// Returns the kind of an etcd error, and the outcome of the failed request if it was a write. The outcome of a failed
/// write is `Unknown` unless the write was certainly not applied.
///
/// The status code alone does not prove the outcome, because the client library and proxies use the same codes; the
/// message must also be etcd's. The Rust type of an error's cause can prove that a request was never sent, because a
/// server cannot forge that type.
fn classify(error: &etcd_client::Error) -> (ErrorKind, Outcome) {
    let etcd_client::Error::GRpcStatus(status) = error else {
        // An error that is not a gRPC status comes from the client library itself, for example about an argument, an
        // address, or a connection that could not be set up.
        return (ErrorKind::Io, Outcome::Unknown);
    };
    let text = status.message();
    let kind = match status.code() {
        Code::Unavailable if never_connected(status) => ErrorKind::NotSent,
        Code::Unavailable => unavailable(text),
        Code::InvalidArgument | Code::Unknown if refuses_transactions(text) => ErrorKind::Unsupported,
        Code::InvalidArgument => invalid_argument(text),
        Code::ResourceExhausted => exhausted(text),
        Code::OutOfRange => out_of_range(text),
        Code::Unauthenticated if text.contains("invalid auth token") => ErrorKind::Auth(Auth::Unauthenticated),
        Code::Unknown => unknown(text),
        Code::Unauthenticated => return (ErrorKind::Auth(Auth::Unauthenticated), Outcome::Unknown),
        Code::NotFound if text.contains("etcdserver: requested lease not found") => ErrorKind::LeaseNotFound,
        Code::PermissionDenied if text.contains("etcdserver: permission denied") => ErrorKind::Auth(Auth::Denied),
        Code::PermissionDenied => return (ErrorKind::Auth(Auth::Denied), Outcome::Unknown),
        Code::Cancelled if text.contains("Timeout expired") => ErrorKind::Timeout,
        Code::DeadlineExceeded => ErrorKind::Timeout,
        Code::Cancelled => DISCONNECTED,
        // While etcd's alarm CORRUPT is raised, the cluster's members refuse every request that changes data.
        Code::DataLoss if text.contains("etcdserver: corrupt cluster") => {
            return (ErrorKind::Corrupt, Outcome::NotApplied);
        }
        Code::DataLoss => ErrorKind::Corrupt,
        Code::Unimplemented => return (ErrorKind::Unsupported, Outcome::Unknown),
        _ => ErrorKind::Undecodable,
    };
    let outcome = kind.outcome();
    (kind, outcome)
}

const DISCONNECTED: ErrorKind = ErrorKind::Disconnected { resume_from: Revision::UNSET };

/// Returns true if the server, like kine, only supports transactions of a few shapes on a single key. A server like
/// kine checks the shape of a transaction before it executes any operation. For this error, newer kine versions return
/// the text with the prefix `etcdserver:`.
fn refuses_transactions(text: &str) -> bool {
    text.contains("etcdserver: unsupported operations in txn request") || text.starts_with("unsupported transaction: ")
}

/// The error message of an etcd learner (a member that does not vote yet).
const LEARNER_REFUSAL: &str = "etcdserver: rpc not supported for learner";

/// Returns true if the connection was never established, which proves that no request was sent.
fn never_connected(status: &Status) -> bool {
    chain(status).any(|cause| cause.is::<ConnectError>())
}

fn unavailable(text: &str) -> ErrorKind {
    if text.contains(LEARNER_REFUSAL) {
        // A learner refuses a request without executing it, so the request can be sent to another member.
        ErrorKind::NotSent
    } else if text.contains("etcdserver: no leader") {
        ErrorKind::NoLeader
    } else if text.contains("etcdserver: request timed out") {
        ErrorKind::Timeout
    } else {
        DISCONNECTED
    }
}

fn invalid_argument(text: &str) -> ErrorKind {
    let known = |words: &str| text.contains("etcdserver: ") && text.contains(words);
    if known("key is not provided") {
        InvalidArgument::EmptyKey.into()
    } else if known("duplicate key given in txn request") {
        // For a transaction that writes a key twice, etcd's error does not name this key.
        InvalidArgument::DuplicateKey(Key::default()).into()
    } else if known("too many operations in txn request") {
        InvalidArgument::TooManyOps { count: 0 }.into()
    } else if known("request is too large") {
        ErrorKind::TooLarge { bytes: 0 }
    } else if known("user name is empty") || known("authentication failed") {
        ErrorKind::Auth(Auth::Unauthenticated)
    } else if known("revision of auth store is old") {
        ErrorKind::Auth(Auth::OldRevision)
    } else {
        ErrorKind::Undecodable
    }
}

fn exhausted(text: &str) -> ErrorKind {
    if text.contains("etcdserver: mvcc: database space exceeded") {
        ErrorKind::NoSpace
    } else if text.contains("etcdserver: too many requests") {
        ErrorKind::Throttled
    } else if text.contains("received message larger than max") {
        ErrorKind::TooLarge { bytes: 0 }
    } else {
        // The server may have executed the request before it found that its answer was too large to send.
        ErrorKind::Undecodable
    }
}

fn out_of_range(text: &str) -> ErrorKind {
    if text.contains("required revision has been compacted") {
        ErrorKind::Compacted { compact_revision: Revision::UNSET }
    } else if text.contains("required revision is a future revision") {
        ErrorKind::FutureRevision
    } else {
        // The client library also uses the status code `OutOfRange` if etcd has executed the request but the answer
        // cannot be decoded.
        ErrorKind::Undecodable
    }
}

fn unknown(text: &str) -> ErrorKind {
    if text.contains("context deadline exceeded") {
        ErrorKind::Timeout
    } else if text.contains("etcdserver: invalid auth token") {
        ErrorKind::Auth(Auth::Unauthenticated)
    } else if text.contains("etcdserver: permission denied") {
        ErrorKind::Auth(Auth::Denied)
    } else {
        DISCONNECTED
    }
}

/// Returns true if the server refused a login because authentication is disabled.
pub(crate) fn says_no_login_needed(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status)
        if status.code() == Code::FailedPrecondition && status.message().contains("authentication is not enabled"))
}

/// Returns true if the connection ended in a way that suggests that the server speaks another protocol or requires a
/// client certificate.
pub(crate) fn speaks_other_protocol(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    // A server that does not understand a TLS hello closes the connection; if more data was in flight, the connection
    // is reset.
    let hung_up = |cause: &(dyn StdError + 'static)| {
        matches!(
            cause.downcast_ref::<io::Error>().map(io::Error::kind),
            Some(io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
        )
    };
    match classify(error).0 {
        ErrorKind::Disconnected { .. } => true,
        ErrorKind::NotSent => chain(status).any(hung_up),
        // The server at this address speaks HTTP/1.1 or another protocol, not HTTP/2.
        ErrorKind::Undecodable => status.message().contains("h2 protocol error"),
        _ => false,
    }
}

const SILENT_ADVICE: &str = "no server answers there: check the address, and that etcd runs";

/// Returns true if the etcd error means that no server answers at the address.
pub(crate) fn is_silent(error: &etcd_client::Error) -> bool {
    advice(error) == Some(SILENT_ADVICE)
}

/// Returns true if the server seems to have closed the connection because of the client certificate.
pub(crate) fn refuses_our_certificate(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    speaks_other_protocol(error) || chain(status).any(|cause| cause.to_string().contains("received fatal alert"))
}

/// The advice for operators while etcd's alarm NOSPACE is raised.
pub(crate) const NO_SPACE_ADVICE: &str = "etcd's quota is used up, and it takes no writes until there is room again: \
    etcdctl compact REVISION, then etcdctl defrag --cluster, then etcdctl alarm disarm";

/// The advice for operators while etcd's alarm CORRUPT is raised.
pub(crate) const CORRUPT_ADVICE: &str = "etcd has found that its members' data differ, and refuses all changes: see which member is \
    wrong with etcdctl endpoint hashkv --cluster, replace it, then etcdctl alarm disarm";

/// Returns advice for operators if the error comes from a member that cannot be reached, rejects the login, or is not
/// etcd.
pub(crate) fn advice(error: &etcd_client::Error) -> Option<&'static str> {
    let etcd_client::Error::GRpcStatus(status) = error else { return None };
    let says =
        |words: &str| status.message().contains(words) || chain(status).any(|cause| cause.to_string().contains(words));
    Some(match classify(error).0 {
        ErrorKind::NotSent if says(LEARNER_REFUSAL) => {
            "it is a learner, which serves no clients yet: name a member that votes, or promote it: etcdctl member promote"
        }
        ErrorKind::NotSent if says("dns error") => "the name is not known: check it, and the DNS of this host",
        ErrorKind::NotSent if says("UnknownIssuer") || says("BadSignature") => {
            "its certificate is from no authority that is trusted: name the one that signed it"
        }
        ErrorKind::NotSent if says("not valid for name") => {
            "its certificate is for another name: use a name or address that it carries"
        }
        ErrorKind::NotSent if says("certificate expired") => "its certificate has expired, or a clock is wrong",
        ErrorKind::NotSent if says("peer certificate") => "its certificate is not accepted",
        ErrorKind::NotSent => SILENT_ADVICE,
        ErrorKind::Auth(Auth::Unauthenticated) if says("user name is empty") => "it wants a user and a password",
        ErrorKind::Auth(Auth::Unauthenticated) if says("authentication failed") => "check user and password",
        ErrorKind::Auth(Auth::Denied) => "the roles of the user do not allow this",
        ErrorKind::NoSpace => NO_SPACE_ADVICE,
        ErrorKind::Corrupt if says("corrupt cluster") => CORRUPT_ADVICE,
        ErrorKind::Unsupported if refuses_transactions(status.message()) => {
            "this server takes no transactions on several keys, as kine does not: use a real etcd, or a store on this host"
        }
        ErrorKind::Unsupported => "this is no etcd v3: check the address",
        _ => return None,
    })
}

/// Converts etcd's reason for ending a watch into the status that other requests get for the same reason.
pub(crate) fn watch_ended(reason: &str) -> etcd_client::Error {
    etcd_client::Error::GRpcStatus(Status::unknown(reason))
}

fn chain(status: &Status) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    let mut next = status.source();
    std::iter::from_fn(move || {
        let cause = next?;
        next = cause.source();
        Some(cause)
    })
}

/// A server's gRPC status as the cause of an error, displayed without the content of the request. A server that rejects
/// a transaction as unsupported may quote the transaction's values, so `StatusCause` replaces the server's message.
#[derive(Debug)]
struct StatusCause(Status);

impl fmt::Display for StatusCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.message() {
            "" => self.0.code().fmt(f),
            message if refuses_transactions(message) => f.write_str("unsupported operations in a transaction"),
            message => f.write_str(message),
        }
    }
}

impl StdError for StatusCause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        chain(&self.0).find(|cause| {
            let text = cause.to_string();
            text != "transport error" && text != self.0.message()
        })
    }
}

#[cfg(test)]
mod tests {
    use tonic::{Code, Status};

    use super::*;

    fn status(code: Code, text: &str) -> etcd_client::Error {
        etcd_client::Error::GRpcStatus(Status::new(code, text))
    }

    fn of(code: Code, text: &str) -> (ErrorKind, Outcome) {
        let error = map(status(code, text), Operation::Txn, "etcd");
        (error.kind().clone(), error.outcome())
    }

    #[test]
    fn status_gives_kind_and_outcome_for_every_row() {
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
            // We never observed the error "too many requests"; etcd's source shows that etcd returns it before it
            // proposes anything to the cluster.
            (Code::ResourceExhausted, "etcdserver: too many requests", ErrorKind::Throttled, NotApplied),
            (
                Code::Unauthenticated,
                "etcdserver: invalid auth token",
                ErrorKind::Auth(Auth::Unauthenticated),
                NotApplied,
            ),
            (
                Code::InvalidArgument,
                "etcdserver: user name is empty",
                ErrorKind::Auth(Auth::Unauthenticated),
                NotApplied,
            ),
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
            // In a test that raised and cleared the alarm CORRUPT repeatedly, none of 1,219 refused writes was applied.
            (Code::DataLoss, "etcdserver: corrupt cluster", ErrorKind::Corrupt, NotApplied),
            (Code::DataLoss, "something new", ErrorKind::Corrupt, Unknown),
        ];
        for (code, text, kind, outcome) in rows {
            assert_eq!(of(code, text), (kind, outcome), "{code:?} {text}");
        }
    }

    #[test]
    fn status_outcome_is_unknown_when_code_is_unknown() {
        let codes = (0..=16).map(Code::from).filter(|code| *code != Code::Ok);
        for code in codes {
            let (kind, outcome) = of(code, "something new");
            assert_eq!(outcome, Outcome::Unknown, "{code:?} gave {kind:?}");
        }
        // A message that resembles a definite etcd error but differs in status code or wording leaves the write's
        // outcome unknown.
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
    fn nothing_was_sent_when_connection_was_never_made() {
        for text in ["tcp connect error", "dns error", "invalid peer certificate: UnknownIssuer"] {
            let status = Status::from_error(Box::new(ConnectError(text.into())));
            let error = map(etcd_client::Error::GRpcStatus(status), Operation::Txn, "etcd");
            assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied), "{text}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn read_error_means_nothing_changed() {
        let error = map(status(Code::Unavailable, "http2 error"), Operation::Range, "etcd");
        assert_eq!(error.outcome(), Outcome::NotApplied);
    }

    #[test]
    fn handshake_hangup_suggests_another_protocol() {
        let broken = |kind: io::ErrorKind| {
            let status = Status::from_error(Box::new(ConnectError(Box::new(io::Error::from(kind)))));
            speaks_other_protocol(&etcd_client::Error::GRpcStatus(status))
        };
        for kind in [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe] {
            assert!(broken(kind), "{kind}");
        }
        for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::HostUnreachable, io::ErrorKind::TimedOut] {
            assert!(!broken(kind), "{kind}");
        }
    }

    #[test]
    fn refusal_text_hides_transaction_that_server_repeats() {
        let refusal = status(Code::Unknown, "unsupported transaction: success:<value:\"hidden\" >");
        let advised = advice(&refusal).unwrap();
        let error = map(refusal, Operation::Txn, "etcd").with_detail(advised);
        let said = error.to_string();
        assert!(said.contains("as kine does not") && !said.contains("hidden"), "{said}");
    }

    #[test]
    fn refusal_for_lack_of_space_is_final_and_gives_remedy() {
        let full = || status(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
        let error = map(full(), Operation::Txn, "etcd");
        assert_eq!((error.outcome(), error.is_final()), (Outcome::Unknown, true));
        assert!(!map(status(Code::Cancelled, "Timeout expired"), Operation::Txn, "etcd").is_final());
        let advice = advice(&full()).unwrap();
        for command in ["etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"] {
            assert!(advice.contains(command), "{advice}");
        }
    }
}
