//! Stops an etcd member at a chosen moment while ADDs are querying it.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::time::clock_getcpuclockid;

use super::host::Host;
use super::plan::{Fate, Pace, Plan};
use crate::random::Random;
use crate::victim::Victim;

/// Maximum duration of an ADD in these tests.
const LONGEST_ADD: Duration = Duration::from_millis(500);
/// Maximum time of an ADD between an answer of etcd and the ADD's next request.
const LONGEST_STEP: Duration = Duration::from_millis(10);

/// The measured duration of ADDs, from which the moment for stopping etcd is calculated.
#[derive(Debug)]
pub(super) struct Timing {
    /// The measured duration of an ADD, plus a margin.
    pub(super) life: Duration,
    /// Estimated CPU time of an ADD from its start until etcd has answered the ADD's last read; after that the ADD
    /// records its pending commit. `Timing::stop` lowers the estimated CPU time after a test round that stopped etcd
    /// too late, and raises it after a round in which the ADD recorded no pending commit.
    until_answered: Cell<Duration>,
}

impl Timing {
    pub(super) fn new(life: Duration) -> Self {
        Self { life, until_answered: Cell::new(life / 2) }
    }

    fn step(&self) -> Duration {
        self.life / 64
    }

    /// Starts the ADDs of a test round, stops etcd during the ADDs, and ends the ADDs as the plan of the round says.
    /// Returns the stopped ADDs, and how many ADDs had already succeeded.
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
                wait_for(&mut victims, is_noted);
            }
            Pace::Stopped => {
                // Vary the moment at which the ADD process is stopped.
                let spread = random.below(u64::try_from((2 * self.step()).as_nanos()).unwrap());
                let ran = self.until_answered.get() + Duration::from_nanos(spread);
                let until = Instant::now() + LONGEST_ADD;
                while !victims[chosen].is_over() && has_run(&mut victims[chosen]) < ran && Instant::now() < until {}
                victims[chosen].stop();
            }
        }
        let too_late = is_noted() || victims[chosen].is_over();
        host.stopped().signal(Signal::SIGSTOP).unwrap();
        if plan.pace == Pace::Stopped {
            victims[chosen].go_on();
            let until = Instant::now() + LONGEST_STEP;
            while !is_noted() && Instant::now() < until {
                thread::sleep(Duration::from_micros(100));
            }
            let answered = self.until_answered.get();
            self.until_answered.set(match (too_late, is_noted()) {
                (true, _) => answered.saturating_sub(self.step()),
                (false, false) => answered + self.step(),
                (false, true) => answered,
            });
        }
        thread::sleep(Duration::from_micros(random.below(3_000)));
        meet(plan.fate, victims)
    }
}

fn wait_for(victims: &mut [Victim], there: impl Fn() -> bool) {
    let until = Instant::now() + LONGEST_ADD;
    while !there() && !victims.iter_mut().all(Victim::is_over) && Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Returns the processor time that a process has used.
fn has_run(victim: &mut Victim) -> Duration {
    clock_getcpuclockid(victim.pid()).and_then(|clock| clock.now()).map_or(Duration::MAX, Duration::from)
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
