//! Computes the effect of a group of transactions in memory, before the group is committed.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use kv::{
    Error, ErrorKind, Key, LeaseId, Op, OpResult, Operation, Outcome, Prev, Range, Result, Txn, TxnResponse, Value,
};

use crate::codec::{self, Change, LogPosition, LogRow, Pointer, StateRow, fingerprint};
use crate::error::{corrupt, revision};
use crate::read::{Entries, KeyOverlay, all_hold, found_in, kv_of, overlaid, read, stamp};
use crate::rows::{Rows, VisitEntry};
use crate::table::Write;

/// Maximum number of bytes of rows that one transaction may change. The limit per transaction keeps a whole commit,
/// with the removal of expired history, below 64 MiB.
pub(crate) const MAX_TXN_TOUCHED_BYTES: usize = 48 * 1024 * 1024;
/// Estimated overhead in bytes (rounded up) of one key change, excluding the key (written three times) and the value
/// (written once).
const CHANGE_OVERHEAD_BYTES: usize = 160;

/// An uncommitted state of the store: changes on top of the table.
///
/// A staged state holds a view of the table. Keeping this view open cannot block a commit, because only the writer
/// commits, and only the writer stages changes.
pub(crate) struct StagedState<'r, 't> {
    rows: &'r Rows<'t>,
    store: &'static str,
    staged: KeyOverlay,
    fresh: HashMap<LogPosition, Value>,
    log: Vec<(LogPosition, LogRow)>,
    tally: ChangeTotals,
    /// The staged entries at the start of the current transaction, for rolling back a failed transaction.
    undo: Vec<(Key, Option<Option<Pointer>>)>,
}

/// The new state row, and the size in bytes of all staged changes.
#[derive(Clone, Copy)]
struct ChangeTotals {
    state: StateRow,
    bytes: usize,
}

impl<'r, 't> StagedState<'r, 't> {
    /// Creates a staged state that has no changes yet. `state` is the state row of the table.
    pub(crate) fn new(rows: &'r Rows<'t>, store: &'static str, state: StateRow) -> Self {
        let tally = ChangeTotals { state, bytes: 0 };
        Self { rows, store, staged: KeyOverlay::new(), fresh: HashMap::new(), log: Vec::new(), tally, undo: Vec::new() }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.tally.bytes
    }

    /// Runs a transaction on top of the transactions staged so far. `now` is the current time in microseconds since
    /// 1970.
    ///
    /// # Errors
    /// `TooLarge` if the transaction changes too many bytes; any error of reading the table. A transaction that fails
    /// leaves the staged state unchanged.
    pub(crate) fn apply(&mut self, txn: &Txn, now: u64) -> Result<TxnResponse> {
        let (before, log) = (self.tally, self.log.len());
        let result = self.run(txn, now);
        let undo = std::mem::take(&mut self.undo);
        if result.is_err() {
            for (key, staged) in undo.into_iter().rev() {
                match staged {
                    Some(staged) => self.staged.insert(key, staged),
                    None => self.staged.remove(&key),
                };
            }
            for (place, _) in self.log.drain(log..) {
                self.fresh.remove(&place);
            }
            self.tally = before;
        }
        result.map_err(|error| error.with_outcome(Outcome::NotApplied))
    }

    /// Ends a lease and deletes its keys, in ascending order and at one revision. The caller must not have staged any
    /// change before it revokes a lease.
    ///
    /// # Errors
    /// `LeaseNotFound` if the lease does not exist; `TooLarge` if the lease has more keys than one commit can delete;
    /// any error of reading the table.
    pub(crate) fn revoke(&mut self, id: LeaseId, now: u64) -> Result<()> {
        self.check_lease(Some(id))?;
        let mut place = LogPosition::first_of(self.tally.state.revision + 1);
        let time = now.max(self.tally.state.time);
        for key in self.rows.leased(id)? {
            let Some(old) = self.rows.pointer(key.as_bytes())?.filter(|pointer| pointer.lease == Some(id)) else {
                let detail = format!("the key {key} is not attached to its lease {id}");
                return Err(corrupt(self.store, Operation::Txn, detail));
            };
            self.change(&key, Some(old), None, place, time);
            place = place.next();
            if self.tally.bytes > MAX_TXN_TOUCHED_BYTES {
                return Err(Error::new(ErrorKind::TooLarge { bytes: self.tally.bytes }, Operation::Txn, self.store)
                    .with_detail("too many keys are attached to the lease; delete some of them first"));
            }
        }
        self.advance(place, time);
        self.tally.state.other_changes += 1;
        Ok(())
    }

    /// If changes are staged at the revision of `place`, makes it the staged state's newest revision.
    fn advance(&mut self, place: LogPosition, time: u64) {
        if place.sub > 0 {
            self.tally.state.revision = place.revision;
            self.tally.state.time = time;
        }
    }

    fn check_lease(&self, lease: Option<LeaseId>) -> Result<()> {
        match lease {
            Some(id) if self.rows.lease(id)?.is_none() => {
                Err(Error::new(ErrorKind::LeaseNotFound, Operation::Txn, self.store).with_detail(format!("lease {id}")))
            }
            _ => Ok(()),
        }
    }

    fn run(&mut self, txn: &Txn, now: u64) -> Result<TxnResponse> {
        let succeeded = all_hold(self, &txn.compares)?;
        let ops = if succeeded { &txn.success } else { &txn.failure };
        let mut place = LogPosition::first_of(self.tally.state.revision + 1);
        let time = now.max(self.tally.state.time);
        let limit = self.tally.bytes + MAX_TXN_TOUCHED_BYTES;
        let mut results = Vec::with_capacity(ops.len());
        for op in ops {
            results.push(self.run_op(op, &mut place, time)?);
            if self.tally.bytes > limit {
                let bytes = MAX_TXN_TOUCHED_BYTES + (self.tally.bytes - limit);
                return Err(Error::new(ErrorKind::TooLarge { bytes }, Operation::Txn, self.store)
                    .with_detail("it deletes too many keys at once; delete them in parts"));
            }
        }
        self.advance(place, time);
        let at = revision(self.tally.state.revision);
        stamp(&mut results, at);
        Ok(TxnResponse { revision: at, succeeded, results })
    }

    fn run_op(&mut self, op: &Op, place: &mut LogPosition, time: u64) -> Result<OpResult> {
        match op {
            Op::Put { key, value, prev, lease } => {
                self.check_lease(*lease)?;
                let old = self.entry(key.as_bytes())?;
                let before = match (old, prev) {
                    (Some(old), Prev::Return) => Some(kv_of(key.clone(), &old, self.value(&old)?)),
                    _ => None,
                };
                self.put(key, value, *lease, old, *place, time)?;
                *place = place.next();
                Ok(OpResult::Put { prev: before })
            }
            Op::Delete { range, prev } => self.delete(range, *prev, place, time),
            Op::Range(request) => Ok(OpResult::Range(read(self, request)?)),
        }
    }

    fn put(
        &mut self,
        key: &Key,
        value: &Value,
        lease: Option<LeaseId>,
        old: Option<Pointer>,
        place: LogPosition,
        time: u64,
    ) -> Result<()> {
        // The check of the request has already limited the length of values, so this length fits into 32 bits.
        let len = u32::try_from(value.len())
            .map_err(|_| Error::new(ErrorKind::TooLarge { bytes: value.len() }, Operation::Txn, self.store))?;
        let (create_revision, version) = old.map_or((place.revision, 1), |old| (old.create_revision, old.version + 1));
        let pointer = Pointer { create_revision, version, place, len, lease };
        self.fresh.insert(place, value.clone());
        self.tally.bytes += value.len();
        self.change(key, old, Some(pointer), place, time);
        Ok(())
    }

    fn delete(&mut self, range: &Range, prev: Prev, place: &mut LogPosition, time: u64) -> Result<OpResult> {
        let found = found_in(self, range)?;
        let count = found.len() as u64;
        let mut prevs = Vec::new();
        for (key, old) in found {
            if prev == Prev::Return {
                let value = self.value(&old)?;
                prevs.push(kv_of(key.clone(), &old, value));
            }
            self.change(&key, Some(old), None, *place, time);
            *place = place.next();
        }
        Ok(OpResult::Delete { count, prevs })
    }

    fn change(&mut self, key: &Key, old: Option<Pointer>, new: Option<Pointer>, place: LogPosition, time: u64) {
        let state = &mut self.tally.state;
        if let Some(old) = old {
            state.live = state.live.wrapping_sub(1);
            state.digest = state.digest.wrapping_sub(fingerprint(key.as_bytes(), old.place));
        }
        if let Some(new) = new {
            state.live = state.live.wrapping_add(1);
            state.digest = state.digest.wrapping_add(fingerprint(key.as_bytes(), new.place));
        }
        self.tally.bytes += 3 * key.as_bytes().len() + CHANGE_OVERHEAD_BYTES;
        let change = new.map_or(Change::Delete, Change::Put);
        self.log.push((place, LogRow { key: key.as_bytes().to_vec(), time, change, prev: old }));
        let before = self.staged.insert(key.clone(), new);
        self.undo.push((key.clone(), before));
    }

    /// Returns the staged rows to write, without the state row, and the new state. The list of rows is empty if the
    /// transactions changed nothing.
    ///
    /// # Errors
    /// `Corrupt` if a staged row cannot be encoded.
    pub(crate) fn finish(self) -> Result<(Vec<Write>, StateRow)> {
        let damaged = |damage: codec::Damage| corrupt(self.store, Operation::Txn, damage.0);
        let mut state = self.tally.state;
        let mut writes = Vec::with_capacity(self.staged.len() + 2 * self.log.len() + 2);
        // For each row that attaches a key to a lease: whether the key is still attached after all staged changes.
        let mut leased = BTreeMap::new();
        for (place, row) in &self.log {
            let key = codec::log_key(*place);
            let bytes = codec::encode(&key, row).map_err(damaged)?;
            state.log_bytes += codec::log_cost(bytes.len(), row.prev.as_ref());
            writes.push(Write::Put(key, bytes));
            for (pointer, is_attached) in [(row.prev.as_ref(), false), (row.put(), true)] {
                if let Some(lease) = pointer.and_then(|pointer| pointer.lease) {
                    leased.insert(codec::leased_key(lease, &row.key), is_attached);
                }
            }
            if let Some(value) = self.fresh.get(place) {
                writes.extend(codec::value_rows(*place, value.as_bytes()).map(|(key, row)| Write::Put(key, row)));
            }
        }
        for (key, staged) in &self.staged {
            let row_key = codec::current_key(key.as_bytes());
            writes.push(match staged {
                Some(pointer) => {
                    let row = codec::encode(&row_key, pointer).map_err(damaged)?;
                    Write::Put(row_key, row)
                }
                None => Write::Delete(row_key),
            });
        }
        writes.extend(leased.into_iter().map(|(key, is_attached)| match is_attached {
            true => Write::Put(key.clone(), codec::seal(&key, &[])),
            false => Write::Delete(key),
        }));
        Ok((writes, state))
    }
}

impl Entries for StagedState<'_, '_> {
    fn entry(&mut self, key: &[u8]) -> Result<Option<Pointer>> {
        self.staged.get(key).map_or_else(|| self.rows.pointer(key), |staged| Ok(*staged))
    }

    fn each(&mut self, from: &[u8], to: Option<&[u8]>, visit: VisitEntry<'_>) -> Result<()> {
        let mut merge = overlaid(&self.staged, from, to);
        let mut flow = ControlFlow::Continue(());
        self.rows.pointers(from, to, &mut |key, pointer| {
            flow = merge.before(Some(key), visit);
            if flow.is_continue()
                && let Some(pointer) = merge.instead_of(key).unwrap_or(Some(pointer))
            {
                flow = visit(key, pointer);
            }
            flow
        })?;
        if flow.is_continue() {
            // Only staged entries are left and no scan follows, so a `Break` from `visit` is ignored.
            let _ = merge.before(None, visit);
        }
        Ok(())
    }

    fn value(&mut self, pointer: &Pointer) -> Result<Value> {
        self.fresh.get(&pointer.place).map_or_else(|| self.rows.value(pointer), |value| Ok(value.clone()))
    }
}
