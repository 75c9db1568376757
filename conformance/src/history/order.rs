//! Computes the newest revisions that clients had seen when a call began.

use kv::Revision;

use super::recorder::{Call, Stream};
use super::violation::Violation;

/// The newest revisions that any client had seen when a given call began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    /// The newest revision in an answer that arrived before the call began.
    answered: Revision,
    /// The newest revision of any watch event that had arrived when the call began.
    seen: Revision,
}

impl Floor {
    /// Returns true if the given revision is newer than every revision that clients had seen when the call began.
    pub(super) fn is_below(self, revision: Revision) -> bool {
        self.answered.max(self.seen) < revision
    }

    /// Checks that the answer to a call is not older than the revisions that clients had seen when the call began. The
    /// revision of a write must be newer than all revisions that clients had seen when the call began.
    pub(super) fn check(self, call: &Call, revision: Revision, wrote: WriteEffect) -> Result<(), Violation> {
        let (rule, known, how) = if revision < self.seen && self.answered <= revision {
            ("W14", self.seen, "a watch had shown")
        } else {
            ("S1", self.answered, "a client had been told of")
        };
        let newer = match wrote {
            WriteEffect::Something => revision > known,
            WriteEffect::Nothing => revision >= known,
        };
        if newer {
            return Ok(());
        }
        let what = format!("an answer at {revision} to a call that began after {how} {known}");
        Err(Violation::new(rule, what).showing("call", call))
    }
}

/// Says whether the answer to a call reports a change of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteEffect {
    Something,
    Nothing,
}

#[derive(Clone, Copy)]
enum Tick {
    Answered(Revision),
    Seen(Revision),
    Begins(usize),
}

/// Computes, for each recorded call, the newest revision in any answer, and the newest in any watch event, that arrived
/// before the call began.
pub(super) fn floors(calls: &[Call], streams: &[Stream], known: Revision) -> Vec<Floor> {
    let mut ticks: Vec<(u64, Tick)> = Vec::with_capacity(2 * calls.len());
    for (i, call) in calls.iter().enumerate() {
        ticks.push((call.start, Tick::Begins(i)));
        ticks.extend(call.revision().map(|revision| (call.end, Tick::Answered(revision))));
    }
    for (time, item) in streams.iter().flat_map(|stream| &stream.items) {
        ticks.extend(item.as_ref().ok().map(|batch| (*time, Tick::Seen(batch.revision))));
    }
    ticks.sort_by_key(|(time, _)| *time);
    let mut now = Floor { answered: known, seen: known };
    let mut floors = vec![now; calls.len()];
    for (_, tick) in ticks {
        match tick {
            Tick::Answered(revision) => now.answered = now.answered.max(revision),
            Tick::Seen(revision) => now.seen = now.seen.max(revision),
            Tick::Begins(call) => floors[call] = now,
        }
    }
    floors
}
