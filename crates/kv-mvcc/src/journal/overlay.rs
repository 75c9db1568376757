//! Rows over those of a table.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::sync::Arc;

use kv::Result;

use super::ROW;
use crate::merge::Merge;
use crate::table::{View, Visit, Write};

/// The changes of rows since the table was written: their value, or `None` if they were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Overlay(BTreeMap<Vec<u8>, Option<Vec<u8>>>);

impl Overlay {
    pub(super) fn apply(&mut self, writes: &[Write]) {
        writes.iter().for_each(|write| self.set(write.key(), write.value()));
    }

    pub(super) fn set(&mut self, key: &[u8], value: Option<&[u8]>) {
        let value = value.map(<[u8]>::to_vec);
        match self.0.get_mut(key) {
            Some(row) => *row = value,
            None => drop(self.0.insert(key.to_vec(), value)),
        }
    }

    /// The writes that bring the table up to date, and these writes with them, ascending.
    pub(super) fn with(&self, writes: &[Write]) -> Vec<Write> {
        if self.0.is_empty() {
            // A large commit passes the journal by, and a list is sorted in a fraction of the time that filling a map takes.
            let mut writes = writes.to_vec();
            writes.sort_unstable_by(|one, other| one.key().cmp(other.key()));
            return writes;
        }
        let mut all = self.clone();
        all.apply(writes);
        all.into_writes()
    }

    /// The writes that bring the table up to date.
    pub(super) fn into_writes(self) -> Vec<Write> {
        let write = |(key, value)| match value {
            Some(value) => Write::Put(key, value),
            None => Write::Delete(key),
        };
        self.0.into_iter().map(write).collect()
    }

    /// The rows between `from` and `to`, to be merged into a scan of the table; `from` must not be behind `to`.
    fn between<'a>(
        &'a self,
        from: &[u8],
        to: &[u8],
    ) -> Merge<impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)> + use<'a>> {
        let range = self.0.range::<[u8], _>((Bound::Included(from), Bound::Excluded(to)));
        Merge::new(range.map(|(key, value)| (key.as_slice(), value.as_deref())))
    }
}

/// A view of a table through an overlay.
pub(super) struct Over<'t> {
    pub(super) table: Box<dyn View + 't>,
    pub(super) overlay: Arc<Overlay>,
}

impl View for Over<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.overlay.0.get(key) {
            Some(value) => Ok(value.clone()),
            None => self.table.get(key),
        }
    }

    fn scan(&self, from: &[u8], to: &[u8], visit: Visit<'_>) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let mut over = self.overlay.between(from, to);
        let mut flow = ControlFlow::Continue(());
        self.table.scan(from, to, &mut |key, value| {
            flow = over.before(Some(key), visit);
            let below = (key != ROW).then_some(value);
            if flow.is_continue()
                && let Some(value) = over.instead_of(key).unwrap_or(below)
            {
                flow = visit(key, value);
            }
            flow
        })?;
        if flow.is_continue() {
            let _ = over.before(None, visit);
        }
        Ok(())
    }
}
