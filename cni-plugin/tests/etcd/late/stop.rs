//! Stopping an etcd at some moment of the ADDs that have asked it.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::host::Host;
use super::plan::{Fate, Pace, Plan};
use crate::random::Random;
use crate::victim::Victim;

/// After which time an ADD is not waited for any more.
const LONGEST_ADD: Duration = Duration::from_millis(500);
/// How long an ADD may take from an answer to what it sends next.
const LONGEST_STEP: Duration = Duration::from_millis(10);
/// What an ADD has of the processor at once when it is throttled.
const SLICE: Duration = Duration::from_micros(20);
/// How many slices it has at the most above what is usual, so that not always the same moment is met.
const SPREAD: u64 = 5;

/// How long ADDs take, to meet them on their way.
#[derive(Debug)]
pub(super) struct Timing {
    /// The whole of an ADD, and a little more.
    pub(super) life: Duration,
    /// In about how many slices a throttled one comes to the answer before its commit. It is learned: fewer if the commit
    /// was noted before etcd was stopped, more if it was not noted afterwards either.
    slices: Cell<u64>,
}

impl Timing {
    pub(super) fn new(life: Duration) -> Self {
        Self { life, slices: Cell::new(12) }
    }

    /// Starts the ADDs, stops etcd, and lets the ADDs meet their fate. Returns those that stand still, and how many had
    /// ended well.
    pub(super) fn stop(&self, host: &Host<'_>, plan: &Plan, random: &mut Random) -> (Vec<Victim>, usize) {
        let mut victims: Vec<Victim> = plan.containers.iter().map(|container| host.start(container)).collect();
        let chosen = usize::try_from(random.below(victims.len() as u64)).unwrap();
        let is_noted = || !host.noted(&plan.containers[chosen]).is_empty();
        match plan.pace {
            Pace::Any => {
                let micros = u64::try_from(self.life.as_micros()).unwrap();
                thread::sleep(Duration::from_micros(random.below(micros + 1)));
            }
            Pace::Watched => {
                wait_for(&mut victims, || host.is_connected());
                wait_for(&mut victims, is_noted);
            }
            Pace::Throttled => {
                wait_for(&mut victims, || host.is_connected());
                let most = self.slices.get() + random.below(SPREAD);
                let mut slices = 0;
                while slices < most && !is_noted() && !victims[chosen].is_over() {
                    victims[chosen].go_on();
                    let end = Instant::now() + SLICE;
                    while Instant::now() < end {}
                    victims[chosen].stop();
                    slices += 1;
                }
            }
        }
        let too_late = is_noted();
        host.stopped().signal(Signal::SIGSTOP).unwrap();
        if plan.pace == Pace::Throttled {
            victims[chosen].go_on();
            let until = Instant::now() + LONGEST_STEP;
            while !is_noted() && Instant::now() < until {
                thread::sleep(Duration::from_micros(100));
            }
            let too_early = !is_noted();
            self.slices.set((self.slices.get() + u64::from(too_early)).saturating_sub(u64::from(too_late)));
        }
        thread::sleep(Duration::from_micros(random.below(3_000)));
        meet(plan.fate, victims)
    }
}

/// Waits for something, but not longer than an ADD can take.
fn wait_for(victims: &mut [Victim], there: impl Fn() -> bool) {
    let until = Instant::now() + LONGEST_ADD;
    while !there() && !victims.iter_mut().all(Victim::is_over) && Instant::now() < until {
        std::hint::spin_loop();
    }
}

fn meet(fate: Fate, mut victims: Vec<Victim>) -> (Vec<Victim>, usize) {
    match fate {
        Fate::Killed => {}
        Fate::Frozen => {
            for victim in &mut victims {
                victim.stop();
            }
            return (victims, 0);
        }
        Fate::TimedOut => {
            while !victims.iter_mut().all(Victim::is_over) {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    let ended = victims.into_iter().filter_map(Victim::kill);
    (Vec::new(), ended.filter(|outcome| outcome.exit == 0).count())
}
