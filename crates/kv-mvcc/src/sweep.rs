//! Giving up history: which revisions have expired, and taking their rows away, a few with each commit.

use std::ops::ControlFlow;
use std::time::Duration;

use kv::Result;

use crate::codec::{self, LogRow, Place, State};
use crate::options::{Retention, micros};
use crate::rows::Rows;
use crate::table::Write;

/// How many rows a commit takes away at least, if there is something to take.
const MIN_ROWS: usize = 32;
/// How many rows it takes away for each one that it writes.
const ROWS_PER_WRITE: usize = 4;
/// The most rows that one commit takes away.
pub(crate) const MAX_ROWS: usize = 1024;
/// How far the clock may be from the newest revision, and one revision from the next, before ages say nothing.
const CLOCK_TRUST: Duration = Duration::from_secs(24 * 60 * 60);

/// How many rows a commit that writes this many takes away.
pub(crate) fn budget(writes: usize) -> usize {
    writes.saturating_mul(ROWS_PER_WRITE).clamp(MIN_ROWS, MAX_ROWS)
}

/// The history that has expired. Only the mark and the rows decide what can be read; the bounds only move the mark.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    revisions: Option<u64>,
    bytes: Option<u64>,
    /// Rows from before this time have expired; in microseconds since 1970.
    expired_before: Option<u64>,
    /// Rows from this time on do not expire by the number of revisions.
    counted_before: Option<u64>,
}

impl Bounds {
    /// Nothing but what is below the mark already.
    pub(crate) const MARK_ONLY: Self =
        Self { revisions: None, bytes: None, expired_before: None, counted_before: None };

    /// Those of `retention` at the time `now`, when the newest revision is from `newest`; both in microseconds.
    pub(crate) fn at(retention: &Retention, now: u64, newest: u64) -> Self {
        let trusted = now.abs_diff(newest) <= micros(CLOCK_TRUST);
        let expired_before = retention.age.filter(|_| trusted).map(|age| now.saturating_sub(micros(age)));
        let counted_before = retention.min_age.map(|age| now.saturating_sub(micros(age)));
        Self { revisions: retention.revisions, bytes: retention.bytes, expired_before, counted_before }
    }

    fn has_expired(&self, state: &State, revision: u64, row: &LogRow) -> bool {
        self.bytes.is_some_and(|bytes| state.log_bytes > bytes)
            || self.expired_before.is_some_and(|time| row.time < time)
            || (revision < self.first_counted(state) && self.counted_before.is_some_and(|time| row.time < time))
    }

    /// The oldest revision that the bound on their number keeps; the newest one can always be read.
    fn first_counted(&self, state: &State) -> u64 {
        self.revisions.map_or(0, |most| (state.revision + 1).saturating_sub(most.max(1)))
    }

    /// The same without the bound on age, if nothing is known of the age of what has expired by it.
    ///
    /// Between two revisions that lie far apart either nobody came, or the clock has jumped. A jump makes everything
    /// before it look old, so it must not be given up until time has passed beyond the gap: ages count where the oldest
    /// revision that is kept follows the newest one that is not without such a gap.
    fn with_known_ages(self, rows: &Rows<'_>, swept: Place, newest: u64) -> Result<Self> {
        let Some(time) = self.expired_before else { return Ok(self) };
        let unaged = Self { expired_before: None, ..self };
        let (mut expired, mut kept) = ((swept.revision, rows.time_of(swept, newest)?), None);
        if expired.1 >= time {
            return Ok(unaged);
        }
        let mut end = newest + 1;
        while end - expired.0 > 1 {
            let middle = expired.0 + (end - expired.0) / 2;
            let found = rows.time_of(Place::first_of(middle), newest)?;
            if found < time {
                expired = (middle, found);
            } else {
                (end, kept) = (middle, Some(found));
            }
        }
        // With nothing to keep but the newest, that is within a day of the clock.
        let gap = kept.map_or(0, |kept| kept.saturating_sub(expired.1));
        Ok(if gap > micros(CLOCK_TRUST) { unaged } else { self })
    }

    /// True if the log has to be looked at.
    fn concern(&self, state: &State) -> bool {
        state.swept.revision < state.compacted
            || self.expired_before.is_some()
            || self.bytes.is_some_and(|bytes| state.log_bytes > bytes)
            || state.swept.revision < self.first_counted(state)
    }
}

/// Moves the mark over what has expired and takes away rows below it, `budget` of them or a few more. `state` is where
/// the store will stand with this commit; `rows` show it at revision `newest`, which was committed before.
///
/// # Errors
/// Those of reading the log.
pub(crate) fn sweep(
    rows: &Rows<'_>,
    newest: u64,
    bounds: &Bounds,
    budget: usize,
    state: &mut State,
    writes: &mut Vec<Write>,
) -> Result<()> {
    if bounds.counted_before.is_none() {
        state.compacted = state.compacted.max(bounds.first_counted(state));
    }
    if !bounds.concern(state) || state.swept.revision > newest {
        return Ok(());
    }
    let bounds = bounds.with_known_ages(rows, state.swept.max(Place::first_of(2)), newest)?;
    let end = writes.len() + budget;
    rows.log(state.swept, newest, &mut |place, row, cost| {
        if writes.len() >= end {
            return ControlFlow::Break(());
        }
        if place.revision >= state.compacted {
            // The newest revision stays, so that the log always shows where the store stands.
            if place.revision >= state.revision || !bounds.has_expired(state, place.revision, &row) {
                state.swept = place;
                return ControlFlow::Break(());
            }
            state.compacted = place.revision + 1;
        }
        writes.push(Write::Delete(codec::log_key(place)));
        if let Some(prev) = &row.prev {
            writes.extend((0..prev.chunks()).map(|chunk| Write::Delete(codec::value_key(prev.place, chunk))));
        }
        state.log_bytes = state.log_bytes.saturating_sub(cost);
        state.swept = place.next();
        ControlFlow::Continue(())
    })
}
