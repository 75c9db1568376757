//! Raises the priority of the thread that opens a sled database.
//!
//! When sled 0.34 reads its log, it starts seven threads that spin on a lock (`sled::lazy::Lazy`) until the last of
//! them has started. On a machine with two cores, sled's spinning threads take CPU time from the thread that opens the
//! database. If the opening thread has a higher priority, opening an existing store takes 5.0 ms instead of 8.4 ms, and
//! 9 ms of CPU time instead of 14 ms.
#![expect(unsafe_code, reason = "no safe crate wraps these two system calls, and musl's own functions refuse them")]

use libc::{SYS_sched_getattr, SYS_sched_setattr, c_long, syscall};

/// The nice value of the highest normal priority. Under a real-time policy, a test process hung, because sled's
/// spinning threads never yield.
const HIGHEST_NICE: i32 = -20;

/// Scheduling flag: threads that the calling thread starts do not inherit its priority but get the default priority.
const RESET_ON_FORK: u64 = libc::SCHED_FLAG_RESET_ON_FORK as u64;

/// The first version of the kernel's `struct sched_attr`, which every kernel since Linux 3.14 accepts.
#[repr(C)]
#[derive(Clone, Debug, Default, PartialEq)]
struct SchedAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const ATTRIBUTES_BYTES: u32 = 48;
const _: () = assert!(size_of::<SchedAttributes>() == ATTRIBUTES_BYTES as usize);

impl SchedAttributes {
    /// Returns the scheduling attributes of the calling thread; `None` if the kernel refuses the request.
    fn current() -> Option<Self> {
        let mut attributes = Self::default();
        // SAFETY: the kernel writes at most `ATTRIBUTES_BYTES` bytes to the attributes.
        let code: c_long = unsafe { syscall(SYS_sched_getattr, 0, &raw mut attributes, ATTRIBUTES_BYTES, 0) };
        (code == 0).then_some(attributes)
    }

    /// Sets the scheduling attributes of the calling thread; returns false if the kernel refuses the change.
    fn set(&self) -> bool {
        // SAFETY: the kernel reads at most `size` bytes from the attributes, and `size` is the size of the structure.
        let code: c_long = unsafe { syscall(SYS_sched_setattr, 0, &raw const *self, 0) };
        code == 0
    }
}

/// A guard that raises the priority of the calling thread, and restores the previous priority on drop.
#[derive(Debug)]
pub(crate) struct PriorityGuard {
    /// The scheduling attributes that the thread had before; `None` if the priority was not changed.
    before: Option<SchedAttributes>,
}

impl PriorityGuard {
    /// Raises the priority of the calling thread, but not of the threads that it starts. The thread's priority is not
    /// changed if its priority or scheduling policy is not the default, or if the process lacks CAP_SYS_NICE.
    pub(crate) fn raise() -> Self {
        let before = SchedAttributes::current().filter(|current| {
            let usual = SchedAttributes { size: current.size, runtime: current.runtime, ..SchedAttributes::default() };
            *current == usual
                && SchedAttributes { size: ATTRIBUTES_BYTES, nice: HIGHEST_NICE, flags: RESET_ON_FORK, ..usual }.set()
        });
        Self { before }
    }
}

impl Drop for PriorityGuard {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // Restoring the lower priority cannot fail, because the kernel has just granted the higher priority.
            before.set();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn nice() -> i32 {
        SchedAttributes::current().unwrap().nice
    }

    #[test]
    fn priority_lasts_until_drop_and_is_not_inherited() {
        // The test thread may not run at the default priority, so set the default priority first.
        assert!(
            SchedAttributes { size: ATTRIBUTES_BYTES, ..SchedAttributes::default() }.set(),
            "the test needs CAP_SYS_NICE"
        );
        let before = SchedAttributes::current().unwrap();
        let raised = PriorityGuard::raise();
        assert_eq!(nice(), HIGHEST_NICE);
        assert_eq!(thread::spawn(nice).join().unwrap(), 0);
        drop(raised);
        assert_eq!(SchedAttributes::current().unwrap(), before);
    }

    #[test]
    fn priority_given_to_process_stays() {
        let of_a_thread = thread::spawn(|| {
            assert!(SchedAttributes { nice: 5, ..SchedAttributes::current().unwrap() }.set());
            let _raised = PriorityGuard::raise();
            nice()
        });
        assert_eq!(of_a_thread.join().unwrap(), 5);
    }
}
