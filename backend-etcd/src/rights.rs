//! The key for which a user has no rights: etcd refuses a whole transaction without naming the key.
//!
//! To find it costs a small request for each key, after a refusal only. None of these requests changes anything.

use kv::{Auth, Error, ErrorKind, Key, Op, Range, Txn, TxnRange};
use tokio::time::Instant;

use crate::EtcdStore;
use crate::cluster::Resend;
use crate::txn::Plan;

/// Maximum number of keys and ranges that are tried after a refusal.
const MAX_TRIED: usize = 32;

/// A use of keys that needs a right.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Use {
    Read(Range),
    Write(Range),
}

/// Everything that a transaction reads and writes, each once.
fn uses(txn: &Txn) -> Vec<Use> {
    let of_op = |op: &Op| match op {
        Op::Put { key, .. } => Use::Write(Range::Key(key.clone())),
        Op::Delete { range, .. } => Use::Write(range.clone()),
        Op::Range(read) => Use::Read(read.range.clone()),
    };
    let compared = txn.compares.iter().map(|compare| Use::Read(compare.range.clone()));
    let mut uses: Vec<Use> = Vec::new();
    for one in compared.chain(txn.success.iter().chain(&txn.failure).map(of_op)) {
        if !uses.contains(&one) {
            uses.push(one);
        }
    }
    uses
}

fn is_denied(error: &Error) -> bool {
    *error.kind() == ErrorKind::Auth(Auth::Denied)
}

impl EtcdStore {
    /// Adds the key that was refused, and the command that grants the right, to the error of a transaction.
    pub(crate) async fn with_refused_key(&self, error: Error, txn: &Txn, deadline: Instant) -> Error {
        if !is_denied(&error) {
            return error;
        }
        for one in uses(txn).into_iter().take(MAX_TRIED) {
            let trial = match &one {
                Use::Read(range) => {
                    Txn::new().with_success([Op::Range(TxnRange::keys_of(range.clone()).with_limit(1))])
                }
                Use::Write(range) => Txn::trial([range.bounds().0]),
            };
            let tried = self.send(&Plan::new(&trial), Resend::Always, deadline).await;
            if tried.is_err_and(|error| is_denied(&error)) {
                return match one {
                    Use::Read(range) => with_refused(error, "read", &range),
                    Use::Write(range) => with_refused(error, "write", &range),
                };
            }
        }
        error
    }
}

/// Adds what was refused to an error.
pub(crate) fn with_refused(error: Error, verb: &str, range: &Range) -> Error {
    if !is_denied(&error) {
        return error;
    }
    let before = error.detail().map(|detail| format!("{detail}: ")).unwrap_or_default();
    let grant = match folder(&range.bounds().0) {
        Some(folder) => format!("; etcdctl role grant-permission --prefix=true ROLE readwrite {folder} allows it"),
        None => String::new(),
    };
    error.with_detail(format!("{before}it may not {verb} {range}{grant}"))
}

/// The first part of a key's path, such as `/calico/`.
fn folder(key: &Key) -> Option<String> {
    let key = key.to_string();
    let end = key.strip_prefix('/')?.find('/')? + 2;
    Some(key[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use kv::{Compare, Operation, Revision};

    use super::*;

    #[test]
    fn each_use_of_a_key_is_tried_once() {
        let txn = Txn::new()
            .with_compares([Compare::unchanged("/a/1", Revision::new(3)), Compare::absent("/b/1")])
            .with_success([Op::put("/a/1", "v"), Op::put("/b/1", "v"), Op::delete("/a/1")])
            .with_failure([Op::range(Range::key("/a/1")), Op::range(Range::prefix("/c/"))]);
        let (read, write) = (|key| Use::Read(Range::key(key)), |key| Use::Write(Range::key(key)));
        let expected = [read("/a/1"), read("/b/1"), write("/a/1"), write("/b/1"), Use::Read(Range::prefix("/c/"))];
        assert_eq!(uses(&txn), expected);
    }

    #[test]
    fn a_refusal_names_the_key_and_the_command() {
        let denied = |detail: &str| {
            let error = Error::new(ErrorKind::Auth(Auth::Denied), Operation::Txn, "etcd");
            with_refused(error.with_detail(detail), "write", &Range::key("/margay/v1/quotas")).to_string()
        };
        assert_eq!(
            denied("no"),
            "etcd: transaction: permission denied: no: it may not write /margay/v1/quotas; etcdctl role grant-permission \
             --prefix=true ROLE readwrite /margay/ allows it"
        );
        let other = Error::new(ErrorKind::Timeout, Operation::Txn, "etcd");
        assert_eq!(with_refused(other, "read", &Range::All).detail(), None);
        assert_eq!(folder(&Key::from("k")), None);
        assert_eq!(folder(&Key::from("/k")), None);
    }
}
