//! Converts a transaction into the form that is sent to etcd, and decodes etcd's answer. The converted transaction has
//! additional compares and reads, whose results are removed from the answer.
//!
//! A transaction gets up to two additions: a read in each empty branch, and a guard against leases.
//!
//! - **A read in each empty branch.** A transaction without writes gets a read in each branch that has no operations.
//!   If a transaction has no operations, an etcd member answers it without contacting the others, even if that member
//!   lags behind. The read that the store adds to the transaction is linearizable, so the transaction's answer is as
//!   fresh as the answer to a read.
//! - **A guard against leases.** A put without a lease would silently detach its key from a lease that another program
//!   has attached. With a lease guard, a transaction that puts a key without a lease fails if the key has a lease. A
//!   lease guard consists of compares, and of reads in the failure branch. The reads in the failure branch show whether
//!   a leased key made the transaction fail. A lease guard is left out if the transaction would exceed a limit on
//!   compares, operations or bytes, or if its failure branch writes. Without a lease guard, the keys are read just
//!   before the transaction; a lease that is attached after this read is not noticed. A key needs no lease guard if a
//!   compare of the transaction requires that the key is absent. A lease on a key is reported even if other compares of
//!   the transaction fail.
//!
//! If the user lacks permission for one key, etcd refuses the whole transaction without naming that key. After etcd has
//! refused a transaction for lack of permission, one small request per key finds the denied key. The requests that
//! search for the denied key change nothing in the store.

use std::collections::BTreeSet;

use etcd_client::{Compare as WireCompare, CompareOp as WireOp, TxnOp, TxnOpResponse};
use kv::{
    Auth, Compare, CompareOp, Error, ErrorKind, Key, MAX_REQUEST_BYTES, MAX_TXN_OPS, Op, OpResult, Range, Revision,
    Target, Txn, TxnRange, TxnResponse,
};
use tokio::time::Instant;

use crate::EtcdStore;
use crate::cluster::Resend;
use crate::wire;

/// The bytes that a lease guard adds to a transaction, not counting the two copies of its key.
const GUARD_OVERHEAD_BYTES: usize = 32;

/// A transaction in the form that is sent to etcd.
#[derive(Debug)]
pub(crate) struct TxnPlan {
    pub(crate) wire: etcd_client::Txn,
    /// Keys that must be read before the transaction is sent, to check that they have no lease.
    pub(crate) read_first: Vec<Key>,
    /// The number of requested operations in the success branch and in the failure branch, without the added reads.
    asked: [usize; 2],
}

#[derive(Debug)]
pub(crate) enum PlanAnswer {
    Answer(TxnResponse),
    /// The transaction was not executed, because this key has a lease.
    Leased(Key),
    Nonsense,
}

impl TxnPlan {
    pub(crate) fn new(txn: &Txn) -> Self {
        let mut compares: Vec<WireCompare> = txn.compares.iter().map(wire::compare).collect();
        let mut success: Vec<TxnOp> = txn.success.iter().map(wire::op).collect();
        let mut failure: Vec<TxnOp> = txn.failure.iter().map(wire::op).collect();
        let asked = [success.len(), failure.len()];
        let mut guarded = keys_to_guard(txn);
        if txn.is_read_only() {
            let key = key_to_read(txn);
            for branch in [&mut success, &mut failure] {
                if branch.is_empty() {
                    branch.push(wire::read_op(&key));
                }
            }
        } else if guard_fits(txn, &guarded) {
            for key in std::mem::take(&mut guarded) {
                compares.push(WireCompare::lease(key.as_bytes(), WireOp::Equal, 0));
                failure.push(wire::read_op(key.as_bytes()));
            }
        }
        let wire = etcd_client::Txn::new().when(compares).and_then(success).or_else(failure);
        Self { wire, read_first: guarded.into_iter().collect(), asked }
    }

    /// Creates a transaction that reads the keys without their values.
    pub(crate) fn reading_keys(keys: &[Key]) -> Self {
        let reads: Vec<TxnOp> = keys.iter().map(|key| wire::read_op(key.as_bytes())).collect();
        Self { wire: etcd_client::Txn::new().and_then(reads), read_first: Vec::new(), asked: [0, 0] }
    }

    pub(crate) fn read(&self, answer: &etcd_client::TxnResponse, revision: Revision) -> PlanAnswer {
        let asked = self.asked[usize::from(!answer.succeeded())];
        let mut results: Vec<OpResult> = Vec::with_capacity(asked);
        for (place, result) in answer.op_responses().into_iter().enumerate() {
            if place >= asked {
                if let Some(key) = leased(&result) {
                    return PlanAnswer::Leased(key);
                }
                continue;
            }
            match wire::result(result, revision) {
                Some(result) => results.push(result),
                None => return PlanAnswer::Nonsense,
            }
        }
        if results.len() < asked {
            return PlanAnswer::Nonsense;
        }
        PlanAnswer::Answer(TxnResponse { revision, succeeded: answer.succeeded(), results })
    }
}

/// Takes the answer to a read of a lease guard; if the key that was read has a lease, returns the key.
fn leased(result: &TxnOpResponse) -> Option<Key> {
    match result {
        TxnOpResponse::Get(found) => found.kvs().iter().find(|kv| kv.lease() != 0).map(|kv| Key::from(kv.key())),
        _ => None,
    }
}

/// Returns the keys that the transaction puts without a lease, unless a compare shows that they are absent.
fn keys_to_guard(txn: &Txn) -> BTreeSet<Key> {
    let put = |ops: &[Op]| -> Vec<Key> {
        ops.iter()
            .filter_map(|op| if let Op::Put { key, lease: None, .. } = op { Some(key.clone()) } else { None })
            .collect()
    };
    let absent: Vec<&Range> = txn.compares.iter().filter_map(compared_absent).collect();
    let is_absent = |key: &Key| absent.iter().any(|range| range.contains(key.as_bytes()));
    let success = put(&txn.success).into_iter().filter(|key| !is_absent(key));
    success.chain(put(&txn.failure)).collect()
}

/// If the compare requires a range to contain no key, returns that range.
fn compared_absent(compare: &Compare) -> Option<&Range> {
    let zero = match &compare.target {
        Target::Version(version) => *version == 0,
        Target::CreateRevision(revision) | Target::ModRevision(revision) => *revision == Revision::UNSET,
        _ => false,
    };
    (zero && compare.op == CompareOp::Equal).then_some(&compare.range)
}

fn guard_fits(txn: &Txn, keys: &BTreeSet<Key>) -> bool {
    let bytes: usize = keys.iter().map(|key| 2 * key.as_bytes().len() + GUARD_OVERHEAD_BYTES).sum();
    let read_only_failure = !txn.failure.iter().any(Op::is_write);
    // The limit on requests to a store is slightly below etcd's own limit, so there is some room for lease guards.
    let fits = bytes <= MAX_GUARD_BYTES || txn.size() + bytes <= MAX_REQUEST_BYTES;
    read_only_failure
        && fits
        && txn.compares.len() + keys.len() <= MAX_TXN_OPS
        && txn.failure.len() + keys.len() <= MAX_TXN_OPS
}

/// Maximum size in bytes of all lease guards of a transaction: etcd's request limit (1.5 MiB) minus the limit on
/// requests to a store, minus some room for the rest of the request.
const MAX_GUARD_BYTES: usize = (1 << 20) * 3 / 2 - MAX_REQUEST_BYTES - 4096;

/// Chooses the key to read in an empty branch: a key that the transaction already uses, if any, because permissions are
/// granted per key.
fn key_to_read(txn: &Txn) -> Vec<u8> {
    let of_branches = txn.success.iter().chain(&txn.failure).find_map(|op| match op {
        Op::Range(read) => Some(&read.range),
        _ => None,
    });
    match txn.compares.first().map(|compare| &compare.range).or(of_branches) {
        Some(range) => wire::KeySpan::of(range).key,
        None => vec![0],
    }
}

/// Maximum number of keys and ranges that are tested for a missing permission after etcd has refused a transaction.
const MAX_TRIED_RANGES: usize = 32;

/// A read or write of a key range, for which the user needs a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KeyUse {
    Read(Range),
    Write(Range),
}

/// Returns the ranges that a transaction reads or writes, without duplicates.
fn uses(txn: &Txn) -> Vec<KeyUse> {
    let of_op = |op: &Op| match op {
        Op::Put { key, .. } => KeyUse::Write(Range::Key(key.clone())),
        Op::Delete { range, .. } => KeyUse::Write(range.clone()),
        Op::Range(read) => KeyUse::Read(read.range.clone()),
    };
    let compared = txn.compares.iter().map(|compare| KeyUse::Read(compare.range.clone()));
    let mut uses: Vec<KeyUse> = Vec::new();
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
    /// Finds the key for which the user lacks permission, and adds it to the error with the command that grants the
    /// permission.
    pub(crate) async fn with_refused_key(&self, error: Error, txn: &Txn, deadline: Instant) -> Error {
        if !is_denied(&error) {
            return error;
        }
        for one in uses(txn).into_iter().take(MAX_TRIED_RANGES) {
            let trial = match &one {
                KeyUse::Read(range) => {
                    Txn::new().with_success([Op::Range(TxnRange::keys_of(range.clone()).with_limit(1))])
                }
                KeyUse::Write(range) => Txn::trial([range.bounds().0]),
            };
            let tried = self.send(&TxnPlan::new(&trial), Resend::Always, deadline).await;
            if tried.is_err_and(|error| is_denied(&error)) {
                return match one {
                    KeyUse::Read(range) => with_refused(error, "read", &range),
                    KeyUse::Write(range) => with_refused(error, "write", &range),
                };
            }
        }
        error
    }
}

/// Adds the key range for which the user lacks permission to an error, with the command that grants the permission.
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

/// Returns the first directory of a key's path, for example `/calico/`.
fn folder(key: &Key) -> Option<String> {
    let key = key.to_string();
    let end = key.strip_prefix('/')?.find('/')? + 2;
    Some(key[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use kv::{Compare, Operation, Revision};

    use super::*;

    fn guarded(txn: &Txn) -> (usize, usize) {
        let before = keys_to_guard(txn).len();
        let plan = TxnPlan::new(txn);
        (before - plan.read_first.len(), plan.read_first.len())
    }

    #[test]
    fn guards_cover_keys_that_are_put() {
        let put = || Op::put("k", "v");
        assert_eq!(guarded(&Txn::new().with_success([put()])), (1, 0));
        assert_eq!(guarded(&Txn::new().with_success([Op::delete("k")])), (0, 0));
        assert_eq!(guarded(&Txn::new().with_compares([Compare::absent("k")]).with_success([put()])), (0, 0));
        assert_eq!(guarded(&Txn::new().with_compares([Compare::absent("k")]).with_failure([put()])), (0, 1));
        assert_eq!(guarded(&Txn::new().with_compares([Compare::absent("l")]).with_success([put()])), (1, 0));
    }

    #[test]
    fn guards_are_left_out_for_absent_keys() {
        let puts = || ["a1", "a2", "b"].map(|key| Op::put(key, "v"));
        let absent = Compare::all_absent(Range::prefix("a"));
        assert_eq!(guarded(&Txn::new().with_compares([absent.clone()]).with_success(puts())), (1, 0));
        assert_eq!(guarded(&Txn::new().with_compares([absent]).with_failure(puts())), (0, 3));
        let old = Compare::nothing_newer(Range::prefix("a"), Revision::new(7));
        assert_eq!(guarded(&Txn::new().with_compares([old]).with_success(puts())), (3, 0));
        let many = (0..127).map(|i| Op::put(format!("a{i}"), "v"));
        let compares = [Compare::unchanged("mark", Revision::new(7)), Compare::all_absent(Range::prefix("a"))];
        assert_eq!(guarded(&Txn::new().with_compares(compares).with_success(many)), (0, 0));
    }

    #[test]
    fn guards_keep_to_limits() {
        let puts = |count: usize, bytes: usize| (0..count).map(move |i| Op::put(format!("{i:0bytes$}"), "v"));
        assert_eq!(guarded(&Txn::new().with_success(puts(128, 10))), (128, 0));
        let compares = || (0..8).map(|i| Compare::unchanged(format!("c{i}"), Revision::new(7)));
        assert_eq!(guarded(&Txn::new().with_compares(compares()).with_success(puts(120, 10))), (120, 0));
        assert_eq!(guarded(&Txn::new().with_compares(compares()).with_success(puts(121, 10))), (0, 121));
        let reads = Txn::new().with_success(puts(2, 10)).with_failure((0..127).map(|_| Op::range(Range::All)));
        assert_eq!(guarded(&reads), (0, 2));
        let large = Op::put("large", vec![0; 1_200_000]);
        assert_eq!(guarded(&Txn::new().with_success(puts(80, 4000)).with_success([large])), (0, 81));
    }

    #[test]
    fn uses_of_key_are_each_tried_once() {
        let txn = Txn::new()
            .with_compares([Compare::unchanged("/a/1", Revision::new(3)), Compare::absent("/b/1")])
            .with_success([Op::put("/a/1", "v"), Op::put("/b/1", "v"), Op::delete("/a/1")])
            .with_failure([Op::range(Range::key("/a/1")), Op::range(Range::prefix("/c/"))]);
        let (read, write) = (|key| KeyUse::Read(Range::key(key)), |key| KeyUse::Write(Range::key(key)));
        let expected = [read("/a/1"), read("/b/1"), write("/a/1"), write("/b/1"), KeyUse::Read(Range::prefix("/c/"))];
        assert_eq!(uses(&txn), expected);
    }

    #[test]
    fn refusal_names_key_and_command() {
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
