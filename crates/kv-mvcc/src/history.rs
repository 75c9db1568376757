//! The history that a store keeps: how far back it can be read, what takes up its room, and its bounds.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, SystemTime};

use kv::{Operation, Outcome, Purpose, Result, Revision};

use crate::codec::{self, Kept, Place, State};
use crate::error::{corrupt, guarded, revision};
use crate::options::{Retention, micros, time};
use crate::rows::Rows;
use crate::store::{Inner, MvccStore};
use crate::table::{Table, Write};

/// The most groups of keys with a name.
const GROUPS: usize = 1024;

/// The oldest revision that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oldest {
    /// The revision.
    pub revision: Revision,
    /// When it was committed; `None` for that of the store without any key.
    pub time: Option<SystemTime>,
}

/// The share of a group of keys in the history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// How often its keys were changed.
    pub changes: u64,
    /// The bytes of these changes and of the values that they superseded.
    pub bytes: u64,
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

    /// The share of each group of keys in the history. `group` is the group of a key; once there are 1,024 groups, keys
    /// of further ones count for the group without a name.
    ///
    /// # Errors
    /// `Corrupt`; those of the table.
    pub async fn history_shares(
        &self,
        group: impl Fn(&[u8]) -> Vec<u8> + Send + 'static,
    ) -> Result<BTreeMap<Vec<u8>, Share>> {
        self.inner()
            .blocking(Operation::Range, move |inner, table| {
                let rows = Rows::of(table, inner.name)?;
                let state = rows.state()?;
                let mut shares = BTreeMap::<_, Share>::new();
                rows.log(state.swept, state.revision, &mut |_, row, cost| {
                    let mut name = group(&row.key);
                    if shares.len() >= GROUPS && !shares.contains_key(&name) {
                        name = Vec::new();
                    }
                    let share = shares.entry(name).or_default();
                    share.changes += 1;
                    share.bytes += cost;
                    ControlFlow::Continue(())
                })?;
                Ok(shares)
            })
            .await
    }

    /// The bounds on the history that is kept.
    pub fn retention(&self) -> Retention {
        self.inner().retention()
    }

    /// Gives the store bounds on its history, durably: every program that opens it from now on goes by these, whatever its
    /// [`Options::retention`](crate::Options::retention) says.
    ///
    /// # Errors
    /// `Unsupported` for a store of an older format; those of a commit.
    pub async fn set_retention(&self, retention: Retention) -> Result<()> {
        self.check_format_for("bounds of its own")?;
        self.inner().change(Operation::Txn, move |inner, table| inner.set_retention(table, retention)).await
    }
}

impl Inner {
    fn set_retention(&self, table: &dyn Table, retention: Retention) -> Result<()> {
        self.ensure_writable(table, Operation::Txn, Purpose::Any)?;
        let staged = guarded(self.name, Operation::Txn, || {
            let row = codec::encode(codec::RETENTION_KEY, &Kept::from(retention))
                .map_err(|damage| corrupt(self.name, Operation::Txn, damage.0))?;
            Ok((Rows::of(table, self.name)?.state()?, row))
        });
        let (old, row) = staged.map_err(|error| error.with_outcome(Outcome::NotApplied))?;
        let new = State { other_changes: old.other_changes + 1, ..old };
        self.commit(table, Purpose::Any, vec![Write::Put(codec::RETENTION_KEY.to_vec(), row)], &old, new)?;
        self.go_by(retention);
        Ok(())
    }
}

impl From<Retention> for Kept {
    fn from(Retention { revisions, age, bytes, min_age }: Retention) -> Self {
        Self { revisions, age: age.map(micros), bytes, min_age: min_age.map(micros) }
    }
}

impl From<Kept> for Retention {
    fn from(Kept { revisions, age, bytes, min_age }: Kept) -> Self {
        let duration = Duration::from_micros;
        Self { revisions, age: age.map(duration), bytes, min_age: min_age.map(duration) }
    }
}
