//! How far back a store can be read.

use std::ops::ControlFlow;
use std::time::SystemTime;

use kv::{Operation, Result, Revision};

use crate::codec::Place;
use crate::error::revision;
use crate::options::{Retention, time};
use crate::rows::Rows;
use crate::store::MvccStore;

/// The oldest revision that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oldest {
    /// The revision.
    pub revision: Revision,
    /// When it was committed; `None` for that of the store without any key.
    pub time: Option<SystemTime>,
}

impl MvccStore {
    /// The oldest revision that can be read.
    ///
    /// # Errors
    /// `Corrupt`; those of the table.
    pub async fn oldest(&self) -> Result<Oldest> {
        self.inner()
            .blocking(Operation::Range, |inner, table| {
                let rows = Rows::of(table, inner.name)?;
                let state = rows.state()?;
                let oldest = state.compacted.max(1);
                let mut written = None;
                rows.log(Place::first_of(oldest), state.revision, &mut |place, row, _| {
                    written = (place.revision == oldest).then_some(row.time);
                    ControlFlow::Break(())
                })?;
                Ok(Oldest { revision: revision(oldest), time: written.and_then(time) })
            })
            .await
    }

    /// The bounds on the history that is kept.
    pub fn retention(&self) -> Retention {
        self.inner().retention
    }
}
