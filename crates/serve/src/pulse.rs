//! The pulse of the store: when it last finished something. It tells a busy daemon from a frozen one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The moment at which the store last finished something: a commit, a read of the lane, a hand-over.
#[derive(Debug)]
pub struct Pulse {
    started_at: Instant,
    /// The last beat, in milliseconds after the start.
    last: AtomicU64,
    /// Number of waits that are no standstill: for another process, or for an engine that is being opened.
    waits: AtomicUsize,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { started_at: Instant::now(), last: AtomicU64::new(0), waits: AtomicUsize::new(0) }
    }
}

impl Pulse {
    /// Notes that the store has finished something.
    pub fn beat(&self) {
        let now = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts the store as alive until the wait ends: another process has it, or its engine is being opened.
    pub fn wait_begins(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends a wait, with a beat.
    pub fn wait_ends(&self) {
        self.beat();
        self.waits.fetch_sub(1, Ordering::Relaxed);
    }

    /// The time for which the store has finished nothing since `received_at`, when a request arrived.
    pub fn stalled_for(&self, received_at: Instant) -> Duration {
        if self.waits.load(Ordering::Relaxed) > 0 {
            return Duration::ZERO;
        }
        let last = self.started_at + Duration::from_millis(self.last.load(Ordering::Relaxed));
        last.max(received_at).elapsed()
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn a_beat_a_wait_and_a_new_request_end_a_standstill() {
        let (pulse, long_ago) = (Pulse::default(), Instant::now());
        let stands_still = || sleep(Duration::from_millis(60));
        stands_still();
        assert!(pulse.stalled_for(long_ago) >= Duration::from_millis(60));
        assert!(pulse.stalled_for(Instant::now()) < pulse.stalled_for(long_ago), "a request that has just come");
        let before_beat = Instant::now();
        pulse.beat();
        assert!(pulse.stalled_for(long_ago) <= before_beat.elapsed() + Duration::from_millis(1));
        pulse.wait_begins();
        stands_still();
        assert_eq!(pulse.stalled_for(long_ago), Duration::ZERO);
        let before_end = Instant::now();
        pulse.wait_ends();
        assert!(pulse.stalled_for(long_ago) <= before_end.elapsed() + Duration::from_millis(1));
    }
}
