//! Computes test time limits that are long enough to catch only hangs. The test time limits grow with the load of the
//! machine.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// [`patient`] extends no time limit beyond this duration, so a test that hangs fails within five minutes.
const MAX_TIMEOUT: Duration = Duration::from_secs(270);
/// Maximum factor by which [`patient`] extends a time limit.
const MAX_FACTOR: f64 = 16.0;
/// CPU time of one measurement of the machine's load. A measurement takes much more CPU time than one scheduler time
/// slice, so that other processes interrupt it on a busy machine.
const MEASURED_WORK: Duration = Duration::from_millis(40);
const MEASUREMENT_MAX_AGE: Duration = Duration::from_secs(5);
/// Number of iterations of the busy loop between two looks at the clock; the loop measures the machine's load. This
/// number of iterations takes well below a millisecond.
const STEPS_PER_PIECE: u32 = 20_000;

/// Extends a time limit by the machine's current load: at most 16 times, and up to four and a half minutes. The
/// machine's load is measured at the first call, and later at most every five seconds. A measurement of the machine's
/// load takes about 40 ms.
#[must_use]
pub fn patient(limit: Duration) -> Duration {
    limit.mul_f64(slowness()).min(MAX_TIMEOUT).max(limit)
}

/// How much slower the tests run because of other programs: a factor from 1 to 16, the larger of the last two
/// measurements.
fn slowness() -> f64 {
    static MEASURED: Mutex<Option<(Instant, f64)>> = Mutex::new(None);
    let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    match *measured {
        Some((at, factor)) if at.elapsed() < MEASUREMENT_MAX_AGE => factor,
        before => {
            let now = measure().clamp(1.0, MAX_FACTOR);
            *measured = Some((Instant::now(), now));
            before.map_or(now, |(_, factor)| factor.max(now))
        }
    }
}

/// Measures the slowdown: the time that all pieces of the busy loop took, divided by the time they would take at the
/// speed of the quickest piece.
fn measure() -> f64 {
    let begun = Instant::now();
    let (mut pieces, mut quickest) = (0_u32, Duration::MAX);
    loop {
        let piece = Instant::now();
        for step in 0..STEPS_PER_PIECE {
            black_box(step);
        }
        pieces += 1;
        quickest = quickest.min(piece.elapsed()).max(Duration::from_nanos(1));
        let alone = quickest * pieces;
        if alone >= MEASURED_WORK {
            return begun.elapsed().as_secs_f64() / alone.as_secs_f64();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_never_shrinks_and_stays_below_five_minutes() {
        let five_minutes = Duration::from_secs(300);
        for limit in [Duration::ZERO, Duration::from_millis(1), Duration::from_secs(60), Duration::from_secs(299)] {
            let longer = patient(limit);
            assert!((limit..five_minutes).contains(&longer), "{longer:?}");
        }
    }

    #[test]
    fn limit_grows_when_machine_is_busy() {
        use std::hint::spin_loop;
        use std::sync::atomic::{AtomicBool, Ordering};
        use std::thread;

        let over = AtomicBool::new(false);
        let cores = thread::available_parallelism().unwrap().get();
        let busy = thread::scope(|scope| {
            for _ in 0..4 * cores {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        spin_loop();
                    }
                });
            }
            thread::sleep(Duration::from_millis(50));
            let busy = measure();
            over.store(true, Ordering::Relaxed);
            busy
        });
        assert!(busy > 2.0, "{busy}");
    }
}
