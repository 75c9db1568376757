//! Creates and opens stores. Checks that rows are intact and consistent: a few rows whenever a store is opened, all
//! rows on request.

use std::ops::ControlFlow;

use kv::{Error, ErrorKind, Operation, Result};
use uuid::Uuid;

use crate::codec::{self, FORMAT, FORMAT_WITH_LEASES, LogPosition, Pointer, StateRow, fingerprint};
use crate::error::corrupt;
use crate::options::{Inspection, Retention};
use crate::rows::{LeasedKeys, Rows};
use crate::table::{Table, Write};

/// Maximum number of live keys for which opening a store checks all live keys. A damaged engine may lose rows silently,
/// so small stores are checked completely: 4,096 keys take at most a few milliseconds.
const MAX_LIVE_KEYS_CHECKED_AT_OPEN: u64 = 4096;

pub(crate) struct OpenFacts {
    pub(crate) id: Uuid,
    pub(crate) format: u32,
    pub(crate) state: StateRow,
    pub(crate) retention: Option<Retention>,
}

/// Reads the metadata rows of a table and makes the quick checks of an opened store. If the table is empty, creates a
/// new store in the table.
///
/// # Errors
/// `UnknownFormat` if this version does not support the store's format; `Corrupt` if the store is damaged; any error of
/// the table. `open_table` writes to the table only if the table is empty and `expected` is `None`.
pub(crate) fn open_table(
    table: &dyn Table,
    store: &'static str,
    expected: Option<Uuid>,
    inspection: Inspection,
    new_format: u32,
) -> Result<OpenFacts> {
    let damaged = |detail: String| corrupt(store, Operation::Open, detail);
    let rows = Rows::of(table, store)?;
    let Some(row) = rows.view().get(codec::FORMAT_KEY)? else {
        if !is_empty(&rows)? {
            return Err(damaged("the row with the format is missing".to_owned()));
        }
        if let Some(id) = expected {
            return Err(damaged(format!("the store {id} has lost all its rows")));
        }
        drop(rows);
        return create(table, store, new_format);
    };
    let format = codec::decode_format(&row).map_err(|damage| damaged(damage.0))?;
    if !(FORMAT..=FORMAT_WITH_LEASES).contains(&format) {
        return Err(Error::new(ErrorKind::UnknownFormat { found: format }, Operation::Open, store)
            .with_detail("use the version of Margay that wrote it, or a newer one"));
    }
    let id = match rows.view().get(codec::ID_KEY)? {
        Some(row) => codec::decode_id(&row).map_err(|damage| damaged(damage.0))?,
        None => return Err(damaged("the row with the store's id is missing".to_owned())),
    };
    if let Some(expected) = expected.filter(|expected| *expected != id) {
        return Err(damaged(format!("this is the store {id}, not {expected}")));
    }
    let state = rows.state()?;
    check_newest(&rows, &state, store)?;
    if inspection == Inspection::Entries && state.live <= MAX_LIVE_KEYS_CHECKED_AT_OPEN {
        check_entries(&rows, &state, store, Operation::Open)?;
    }
    let retention = if format >= FORMAT_WITH_LEASES { rows.retention()? } else { None };
    Ok(OpenFacts { id, format, state, retention })
}

fn is_empty(rows: &Rows<'_>) -> Result<bool> {
    let mut empty = true;
    rows.view().scan(&[], &[u8::MAX], &mut |_, _| {
        empty = false;
        ControlFlow::Break(())
    })?;
    Ok(empty)
}

fn create(table: &dyn Table, store: &'static str, format: u32) -> Result<OpenFacts> {
    let (id, state) = (Uuid::new_v4(), StateRow::NEW);
    let encoded =
        codec::encode(codec::STATE_KEY, &state).map_err(|damage| corrupt(store, Operation::Open, damage.0))?;
    table.commit(&[
        Write::Put(codec::FORMAT_KEY.to_vec(), codec::encode_format(format)),
        Write::Put(codec::ID_KEY.to_vec(), codec::encode_id(id)),
        Write::Put(codec::STATE_KEY.to_vec(), encoded),
    ])?;
    Ok(OpenFacts { id, format, state, retention: None })
}

/// Checks that the log contains the newest revision. If an engine loses the end of its file, the log row of the newest
/// revision is the first row to be lost.
fn check_newest(rows: &Rows<'_>, state: &StateRow, store: &'static str) -> Result<()> {
    if state.revision == StateRow::NEW.revision {
        return Ok(());
    }
    let key = codec::log_key(LogPosition::first_of(state.revision));
    let damaged = |detail: String| corrupt(store, Operation::Open, detail);
    match rows.view().get(&key)? {
        Some(row) => codec::decode::<codec::LogRow>(&key, &row).map(drop).map_err(|damage| damaged(damage.0)),
        None => Err(damaged(format!("the newest revision, {}, is missing from the log", state.revision))),
    }
}

/// The totals counted by a complete check of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// The number of live keys in the store.
    pub live: u64,
    /// The number of log rows in the store.
    pub log_rows: u64,
    /// The size in bytes of all live and superseded values.
    pub value_bytes: u64,
}

/// Compares the number and fingerprints of the live keys with the totals recorded in the state row.
///
/// # Errors
/// `Corrupt` if the live keys do not match the recorded totals; any error of the table.
fn check_entries(rows: &Rows<'_>, state: &StateRow, store: &'static str, operation: Operation) -> Result<()> {
    let (mut live, mut digest) = (0_u64, 0_u64);
    rows.pointers(&[], None, &mut |key, pointer| {
        live += 1;
        digest = digest.wrapping_add(fingerprint(key, pointer.place));
        ControlFlow::Continue(())
    })?;
    check_sums(state, live, digest).map_err(|detail| corrupt(store, operation, detail))
}

fn check_sums(state: &StateRow, live: u64, digest: u64) -> Result<(), String> {
    if live != state.live {
        return Err(format!("it has {live} keys where there should be {}", state.live));
    }
    if digest != state.digest {
        return Err("its keys are not those that were written last".to_owned());
    }
    Ok(())
}

/// Maximum number of attempts to check a whole store in short views, between which commits may run. If a commit changes
/// the store, the check of the store starts again.
const MAX_VERIFY_ATTEMPTS: usize = 3;
/// Maximum number of rows that a check of the store reads in one view.
const VERIFY_PAGE_ROWS: usize = 256;
const VERIFY_PAGE_BYTES: u64 = 4 * 1024 * 1024;

/// Checks that every row is intact, that every value is complete, and that there are no missing or surplus rows.
///
/// # Errors
/// `Corrupt` if the store fails the check; any error of the table.
pub(crate) fn verify(table: &dyn Table, store: &'static str) -> Result<Verification> {
    for _ in 0..MAX_VERIFY_ATTEMPTS {
        let state = Rows::of(table, store)?.state()?;
        match (VerifyPass { table, store, state, held: None }).run() {
            Ok(verified) => return Ok(verified),
            Err(VerifyStop::Failed(error)) => return Err(error),
            Err(VerifyStop::Changed) => {}
        }
    }
    // If commits interrupted every check in short views, the store is checked in one long view, which blocks commits.
    let rows = Rows::of(table, store)?;
    let state = rows.state()?;
    (VerifyPass { table, store, state, held: Some(rows) }).run().map_err(|stop| match stop {
        VerifyStop::Failed(error) => error,
        VerifyStop::Changed => corrupt(store, Operation::Range, "a view of the table changed while it was read"),
    })
}

enum VerifyStop {
    Changed,
    Failed(Error),
}

impl From<Error> for VerifyStop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// One pass over all rows of a store, page by page.
struct VerifyPass<'t> {
    table: &'t dyn Table,
    store: &'static str,
    /// The store's state when this check of the store started; if a commit changes the state, the check is stopped and
    /// started again.
    state: StateRow,
    /// The view that all pages of one check read, or `None` if each page opens its own view.
    held: Option<Rows<'t>>,
}

/// How many bytes and rows the intact values have in total.
#[derive(Default)]
struct ValueTotals {
    bytes: u64,
    rows: u64,
}

impl ValueTotals {
    fn check(&mut self, rows: &Rows<'_>, pointer: &Pointer) -> Result<()> {
        rows.value(pointer)?;
        self.bytes += u64::from(pointer.len);
        self.rows += u64::from(pointer.chunks());
        Ok(())
    }
}

impl VerifyPass<'_> {
    fn run(&self) -> Result<Verification, VerifyStop> {
        let mut values = ValueTotals::default();
        let attached = self.entries(&mut values)?;
        let log_rows = self.log(&mut values)?;
        self.leases(attached)?;
        let found = self.value_rows()?;
        if found != values.rows {
            let detail = format!("it has {found} rows of values where there should be {}", values.rows);
            return Err(self.corrupt(detail).into());
        }
        Ok(Verification { live: self.state.live, log_rows, value_bytes: values.bytes })
    }

    fn corrupt(&self, detail: impl std::fmt::Display) -> Error {
        corrupt(self.store, Operation::Range, detail)
    }

    fn page<T>(&self, read: impl FnOnce(&Rows<'_>) -> Result<T>) -> Result<T, VerifyStop> {
        if let Some(rows) = &self.held {
            return Ok(read(rows)?);
        }
        let rows = Rows::of(self.table, self.store)?;
        if rows.state()? != self.state {
            return Err(VerifyStop::Changed);
        }
        Ok(read(&rows)?)
    }

    /// Checks the rows of the live keys, and their values. Returns the number of keys that are attached to a lease.
    fn entries(&self, values: &mut ValueTotals) -> Result<u64, VerifyStop> {
        let (mut live, mut digest, mut attached, mut from) = (0_u64, 0_u64, 0, Some(Vec::new()));
        while let Some(start) = from.take() {
            from = self.page(|rows| {
                let (mut found, mut bytes, mut next) = (Vec::new(), 0, None);
                rows.pointers(&start, None, &mut |key, pointer| {
                    if found.len() >= VERIFY_PAGE_ROWS || bytes >= VERIFY_PAGE_BYTES {
                        next = Some(key.to_vec());
                        return ControlFlow::Break(());
                    }
                    bytes += u64::from(pointer.len);
                    live += 1;
                    attached += u64::from(pointer.lease.is_some());
                    digest = digest.wrapping_add(fingerprint(key, pointer.place));
                    found.push(pointer);
                    ControlFlow::Continue(())
                })?;
                found.iter().try_for_each(|pointer| values.check(rows, pointer))?;
                Ok(next)
            })?;
        }
        check_sums(&self.state, live, digest).map_err(|detail| self.corrupt(detail))?;
        Ok(attached)
    }

    /// Checks that each key with a lease has a row that records its attachment to the lease, and that the lease exists.
    fn leases(&self, attached: u64) -> Result<(), VerifyStop> {
        let (mut count, mut from) = (0, Some(vec![codec::LEASED]));
        while let Some(start) = from.take() {
            from = self.page(|rows| {
                let LeasedKeys { found, next } = rows.attached(&start, VERIFY_PAGE_ROWS)?;
                for (lease, key) in &found {
                    let is_there = rows.lease(*lease)?.is_some();
                    let is_its = rows.pointer(key.as_bytes())?.is_some_and(|pointer| pointer.lease == Some(*lease));
                    if !is_there || !is_its {
                        return Err(self.corrupt(format_args!("the key {key} is not attached to its lease {lease}")));
                    }
                }
                count += found.len() as u64;
                Ok(next)
            })?;
        }
        self.page(|rows| rows.leases().and(rows.retention()).map(drop))?;
        if count != attached {
            return Err(self.corrupt(format!("leases have {count} keys where there should be {attached}")).into());
        }
        Ok(())
    }

    /// Checks that the log has no gap and has the recorded size, and that the superseded values are intact.
    fn log(&self, values: &mut ValueTotals) -> Result<u64, VerifyStop> {
        let (mut log_rows, mut log_bytes, mut from) = (0, 0, Some(self.state.swept));
        while let Some(start) = from.take().filter(|start: &LogPosition| start.revision <= self.state.revision) {
            from = self.page(|rows| {
                let (mut found, mut bytes, mut next) = (Vec::new(), 0, None);
                let mut looked = 0;
                rows.log(start, self.state.revision, &mut |place, row, cost| {
                    if looked >= VERIFY_PAGE_ROWS || bytes >= VERIFY_PAGE_BYTES {
                        next = Some(place);
                        return ControlFlow::Break(());
                    }
                    looked += 1;
                    bytes += cost;
                    log_rows += 1;
                    log_bytes += cost;
                    found.extend(row.prev);
                    ControlFlow::Continue(())
                })?;
                found.iter().try_for_each(|pointer| values.check(rows, pointer))?;
                Ok(next)
            })?;
        }
        if log_bytes != self.state.log_bytes {
            let detail = format!("its log has {log_bytes} bytes where there should be {}", self.state.log_bytes);
            return Err(self.corrupt(detail).into());
        }
        Ok(log_rows)
    }

    /// Counts the rows of all values in the table.
    fn value_rows(&self) -> Result<u64, VerifyStop> {
        let (mut count, mut from) = (0, Some(vec![codec::VALUE]));
        while let Some(start) = from.take() {
            from = self.page(|rows| {
                let (mut looked, mut next) = (0, None);
                rows.view().scan(&start, &codec::end_of(codec::VALUE), &mut |key, _| {
                    if looked >= VERIFY_PAGE_ROWS {
                        next = Some(key.to_vec());
                        return ControlFlow::Break(());
                    }
                    looked += 1;
                    count += 1;
                    ControlFlow::Continue(())
                })?;
                Ok(next)
            })?;
        }
        Ok(count)
    }
}
