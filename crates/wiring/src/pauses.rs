//! Waiting for something that the kernel does by itself.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Pauses between looks. They begin short, so that the usual case loses little, and double up to a longest one.
pub(crate) struct Pauses {
    next: Duration,
    longest: Duration,
    until: Instant,
}

impl Pauses {
    /// Pauses that are over after `patience`, or when the deadline comes.
    pub(crate) fn new(first: Duration, longest: Duration, patience: Duration, deadline: Instant) -> Self {
        let now = Instant::now();
        let until = now.checked_add(patience).map_or(deadline, |end| end.min(deadline));
        Self { next: first, longest, until }
    }

    /// Makes a pause; `false` if the time is over.
    pub(crate) fn pause(&mut self) -> bool {
        let left = self.until.saturating_duration_since(Instant::now());
        sleep(self.next.min(left));
        self.next = self.next.saturating_mul(2).min(self.longest);
        !left.is_zero()
    }
}
