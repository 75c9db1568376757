//! How long calls take, to interrupt them at any moment.

use std::time::{Duration, Instant};

use crate::process::{Call, Outcome};
use crate::random::Random;

/// How long calls of one kind take, shortest first.
pub(crate) struct Life(Vec<Duration>);

impl Life {
    pub(crate) fn of(mut calls: Vec<Duration>) -> Self {
        calls.sort_unstable();
        Self(calls)
    }

    /// A moment in the life of such a call: half of them anywhere up to the longest, the others up to the median, since a
    /// few calls take very long on a busy machine.
    pub(crate) fn moment(&self, random: &mut Random) -> Duration {
        let most = if random.once_in(2) { self.0.last() } else { self.0.get(self.0.len() / 2) };
        let micros = u64::try_from(most.unwrap().as_micros()).unwrap();
        Duration::from_micros(random.below(micros + 1))
    }
}

/// Runs a call to its end and says how long that took.
pub(crate) fn measured(call: &Call) -> (Outcome, Duration) {
    let begun = Instant::now();
    (call.ok(), begun.elapsed())
}
