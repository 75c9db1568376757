//! Making a store, and looking at one before it is used.

use std::ops::ControlFlow;

use kv::{Error, ErrorKind, Operation, Result};
use uuid::Uuid;

use crate::codec::{self, FORMAT, FORMAT_WITH_LEASES, Place, State};
use crate::error::corrupt;
use crate::options::{Inspection, Retention};
use crate::rows::Rows;
use crate::table::{Table, Write};
use crate::verify::check_entries;

/// Up to how many live keys all of them are looked at when the store is opened. Engines lose rows without a word after
/// damage, and this costs a few milliseconds at the most.
const LIVE_CHECKED_AT_OPEN: u64 = 4096;

/// The facts about a store once it is open.
pub(crate) struct Opened {
    pub(crate) id: Uuid,
    pub(crate) format: u32,
    pub(crate) state: State,
    /// The bounds on history that the store has of its own.
    pub(crate) retention: Option<Retention>,
}

/// Reads the metadata and checks what can be checked quickly; an empty table becomes a new store.
///
/// # Errors
/// `UnknownFormat`, `Corrupt`, and those of the table. Nothing is written unless the table is empty and `expected` is
/// `None`.
pub(crate) fn open_table(
    table: &dyn Table,
    store: &'static str,
    expected: Option<Uuid>,
    inspection: Inspection,
    new_format: u32,
) -> Result<Opened> {
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
    if inspection == Inspection::Entries && state.live <= LIVE_CHECKED_AT_OPEN {
        check_entries(&rows, &state, store, Operation::Open)?;
    }
    let retention = if format >= FORMAT_WITH_LEASES { rows.retention()? } else { None };
    Ok(Opened { id, format, state, retention })
}

/// True if there is no row at all.
fn is_empty(rows: &Rows<'_>) -> Result<bool> {
    let mut empty = true;
    rows.view().scan(&[], &[u8::MAX], &mut |_, _| {
        empty = false;
        ControlFlow::Break(())
    })?;
    Ok(empty)
}

fn create(table: &dyn Table, store: &'static str, format: u32) -> Result<Opened> {
    let (id, state) = (Uuid::new_v4(), State::NEW);
    let encoded =
        codec::encode(codec::STATE_KEY, &state).map_err(|damage| corrupt(store, Operation::Open, damage.0))?;
    table.commit(&[
        Write::Put(codec::FORMAT_KEY.to_vec(), codec::encode_format(format)),
        Write::Put(codec::ID_KEY.to_vec(), codec::encode_id(id)),
        Write::Put(codec::STATE_KEY.to_vec(), encoded),
    ])?;
    Ok(Opened { id, format, state, retention: None })
}

/// The newest revision is in the log; it is what an engine that lost the end of its file has lost first.
fn check_newest(rows: &Rows<'_>, state: &State, store: &'static str) -> Result<()> {
    if state.revision == State::NEW.revision {
        return Ok(());
    }
    let key = codec::log_key(Place::first_of(state.revision));
    let damaged = |detail: String| corrupt(store, Operation::Open, detail);
    match rows.view().get(&key)? {
        Some(row) => codec::decode::<codec::LogRow>(&key, &row).map(drop).map_err(|damage| damaged(damage.0)),
        None => Err(damaged(format!("the newest revision, {}, is missing from the log", state.revision))),
    }
}
