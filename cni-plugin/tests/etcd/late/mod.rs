//! The late ADD, round by round: an etcd stands still (SIGSTOP) while ADDs of the real plugin are on their way, the ADDs are
//! killed, the runtime's DEL comes, and etcd goes on.
//!
//! Three rounds of four are on one etcd, one is on a cluster of three, of which the member that the ADDs have asked stands
//! still: there the DEL ends with success before that member reads what it was sent. A round has one ADD or several at
//! once, on a node that has a block or none; they are killed, stand still until the end (as if nobody was told of their
//! death), or run into their time limit. Then come a DEL, two DELs at once, or the same ADD again, each repeated until it
//! succeeds. When all that was on its way has landed, nothing of the containers may be there, nor a note about them.
//!
//! `MARGAY_LATE_SEED` and `MARGAY_LATE_ROUNDS` choose other rounds and more of them; `make torture MODE=late` sets them.

mod host;
mod inside;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::lab::Lab;
use crate::random::{Random, setting};
use crate::server::Etcd;
use crate::victim::Victim;
use host::{Host, HostLocks, Settled, mark_of};
use inside::{connections, until_all_is_read};

const ROUNDS: u64 = 40;
const SEED: u64 = 20_261_122;
/// One round of so many is on the cluster.
const CLUSTER: u64 = 4;
/// From so many rounds on, every tenth has to have had a commit in flight.
const MANY: u64 = 100;
/// An etcd that is no client of itself: whoever is connected is a plugin.
const ALONE: &str = "--enable-grpc-gateway=false";
/// A cluster that notices soon that its leader is gone.
const QUICK: [&str; 3] = [ALONE, "--heartbeat-interval=30", "--election-timeout=300"];
/// After which time an ADD is not waited for any more.
const LONGEST_ADD: Duration = Duration::from_millis(500);
/// How long an ADD may take from an answer to what it sends next.
const LONGEST_STEP: Duration = Duration::from_millis(10);
/// What an ADD has of the processor at once when it is throttled.
const SLICE: Duration = Duration::from_micros(20);
/// In how many rounds without notes a leak has to show.
const UNNOTED_ROUNDS: u64 = 300;

/// How often each thing happened.
type Tally = BTreeMap<String, u64>;

fn count(tally: &mut Tally, what: impl Into<String>) {
    *tally.entry(what.into()).or_default() += 1;
}

/// How an ADD comes to the moment at which etcd is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// That is any moment in its life.
    Any,
    /// It is the moment at which its note is seen.
    Watched,
    /// It has the processor in slices, as one that shares it with many, and that is some slice on its way to its note: so
    /// it often has the answer to what it asked, and sends its commit to an etcd that stands still.
    Throttled,
}

/// What becomes of the ADDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// They are killed while etcd stands still.
    Killed,
    /// They stand still as etcd does, and are killed when it has read what they sent: their connections do not end before.
    Frozen,
    /// They give up by themselves.
    TimedOut,
}

/// What the runtime does about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Del,
    TwoDels,
    AddAgain,
}

/// When it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// While etcd stands still; on a cluster it ends then, too.
    Before,
    /// When etcd goes on.
    With,
    /// When all has landed.
    After,
}

/// Whether there are notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notes {
    Kept,
    /// They are taken away before the runtime's next call.
    Lost,
}

/// What a commit that was in flight is known by, and how often etcd's log had it when it stood still.
struct InFlight {
    mark: Vec<u8>,
    before: usize,
}

/// One etcd, and a cluster of three; how long an ADD takes; the rounds so far.
struct World {
    one: Lab,
    three: Lab,
    life: Duration,
    /// In about how many slices a throttled ADD comes to the answer before its commit, on the one and on the cluster. It is
    /// learned: fewer if the commit was noted before etcd was stopped, more if it was not noted afterwards either.
    slices: [Cell<u64>; 2],
    tally: Tally,
    /// Rounds with a commit in flight: its note was there when the ADD was dead, stood still or had given up.
    in_flight: u64,
    /// Those of them with one that was not in etcd's log then.
    to_come: u64,
}

impl World {
    fn new() -> Self {
        let one = Lab::on(vec![Etcd::start_with("http", &[ALONE.to_owned()]).unwrap()]);
        let three = Lab::on(Etcd::start_three_with(&QUICK).unwrap().into());
        let life = |number: u32| {
            let (container, begun) = (format!("measured{number}"), Instant::now());
            one.add(&container).ok();
            let life = begun.elapsed();
            one.del(&container).ok();
            life
        };
        let mut lives: Vec<Duration> = (0..15).map(life).collect();
        lives.sort_unstable();
        let life = lives[lives.len() / 2] * 5 / 4;
        Self { one, three, life, slices: [Cell::new(12), Cell::new(12)], tally: Tally::new(), in_flight: 0, to_come: 0 }
    }

    /// A moment in the life of an ADD, or a little after it.
    fn moment(&self, random: &mut Random) -> Duration {
        Duration::from_micros(random.below(u64::try_from(self.life.as_micros()).unwrap() + 1))
    }

    fn round(&mut self, round: u64, notes: Notes, random: &mut Random) -> Result<(), String> {
        let is_cluster = notes == Notes::Lost || round % CLUSTER == CLUSTER - 1;
        let fate = *random.pick(&[Fate::Killed, Fate::Killed, Fate::Frozen, Fate::Frozen, Fate::TimedOut]);
        // Who stands still keeps the lock.
        let share = fate != Fate::Frozen && random.once_in(4);
        let locks = if share { HostLocks::Shared } else { HostLocks::Apart };
        let first = usize::try_from(random.below(3)).unwrap();
        let lab = if is_cluster { &self.three } else { &self.one };
        let host = Host::new(lab, first % lab.etcds.len(), locks);
        let is_new = random.once_in(3);
        if is_new {
            host.give_back();
        }
        let several = if random.once_in(3) { 2 + random.below(3) } else { 1 };
        let containers: Vec<String> = (0..several).map(|number| format!("r{round}x{number}")).collect();
        let mut log = host.log();
        log.mark();

        let victims: Vec<Victim> = containers.iter().map(|container| host.start(container)).collect();
        let (victims, answered) = self.stop(&host, &containers, victims, fate, random);
        let unread = connections(host.stopped()).unread > 0;
        let mut in_flight: Vec<InFlight> = Vec::new();
        for note in containers.iter().flat_map(|container| host.noted(container)) {
            let mark = mark_of(&note);
            let before = log.count(&mark);
            in_flight.push(InFlight { mark, before });
        }
        self.in_flight += u64::from(!in_flight.is_empty());
        self.to_come += u64::from(in_flight.iter().any(|commit| commit.before == 0));
        let place = if is_cluster { "cluster" } else { "one etcd" };
        let tally = &mut self.tally;
        count(tally, format!("rounds on {place}"));
        if in_flight.is_empty() {
            count(tally, format!("{place}: no commit in flight ({answered} of {several} ADDs had ended well)"));
        } else {
            count(tally, format!("{place}: rounds with a commit in flight"));
            count(tally, format!("{place}: in flight, of ADDs {fate:?}"));
            if unread {
                count(tally, format!("{place}: in flight, and etcd had bytes to read when it stood still"));
            }
            if is_new {
                count(tally, format!("{place}: in flight, on a node without a block"));
            }
            if several > 1 {
                count(tally, format!("{place}: in flight, of several ADDs at once"));
            }
        }
        if notes == Notes::Lost {
            containers.iter().for_each(|container| host.lose_notes(container));
        }

        let when = *random.pick(&[When::Before, When::Before, When::With, When::After]);
        let when = if notes == Notes::Lost { When::Before } else { when };
        let then = *random.pick(&[Then::Del, Then::Del, Then::TwoDels, Then::AddAgain]);
        let then = if notes == Notes::Lost { Then::Del } else { then };
        let go_on = || host.stopped().signal(Signal::SIGCONT).unwrap();
        let mut counted = Vec::new();
        if when != When::Before {
            go_on();
        }
        if when == When::After {
            until_all_is_read(host.stopped());
            counted = in_flight.iter().map(|commit| log.count(&commit.mark)).collect();
        }
        let done: Vec<Result<Settled, String>> = thread::scope(|scope| {
            let calls = containers.iter().flat_map(|container| {
                let times = if then == Then::TwoDels { 2 } else { 1 };
                std::iter::repeat_n(container, times)
            });
            let verb = if then == Then::AddAgain { "ADD" } else { "DEL" };
            let host = &host;
            let running: Vec<_> = calls.map(|container| scope.spawn(move || host.settle(verb, container))).collect();
            if when == When::Before && !is_cluster {
                // Now and then longer than a call may take.
                let most = if random.once_in(10) { 1_300_000 } else { 20_000 };
                thread::sleep(Duration::from_micros(random.below(most)));
                go_on();
            }
            running.into_iter().map(|call| call.join().unwrap()).collect()
        });
        let done: Vec<Settled> = done.into_iter().collect::<Result<_, _>>()?;
        if when == When::Before && is_cluster {
            if random.once_in(2) {
                host.give_back();
            }
            counted = in_flight.iter().map(|commit| log.count(&commit.mark)).collect();
            go_on();
        }
        until_all_is_read(host.stopped());
        for victim in victims {
            victim.kill();
        }
        host.until_all_has_landed();

        let sent_again: usize = done.iter().map(|settled| settled.sent_again).sum();
        let failed: usize = done.iter().map(|settled| settled.failed).sum();
        for (number, commit) in in_flight.iter().enumerate() {
            let all = log.count(&commit.mark);
            let then = counted.get(number).copied().unwrap_or(0);
            let outcome = match when {
                _ if commit.before > 0 => "before etcd stood still",
                When::After if then > 0 => "after that, before the next call",
                When::Before if is_cluster && all > then => "after the next call had succeeded",
                When::Before | When::With if !is_cluster && all > sent_again => "after that, beside the next call",
                _ => "never, as far as can be told",
            };
            count(tally, format!("{place}: a commit came to etcd's log: {outcome}"));
        }
        *tally.entry("next calls that failed and were repeated".into()).or_default() += failed as u64;
        *tally.entry("next calls that sent a commit again".into()).or_default() += sent_again as u64;
        count(tally, format!("next calls: {then:?}"));

        let told = |number: usize| match then {
            Then::AddAgain => done[number].addresses.clone(),
            _ => Vec::new(),
        };
        let told: BTreeMap<String, Vec<IpAddr>> =
            containers.iter().enumerate().map(|(number, container)| (container.clone(), told(number))).collect();
        let about = || format!(" ({place}, {fate:?}, {locks:?}, {when:?}, {then:?}, new block: {is_new})");
        host.check(&told).map_err(|what| what + &about())?;
        if then == Then::AddAgain {
            for container in &containers {
                host.settle("DEL", container)?;
            }
            host.check(&containers.into_iter().map(|container| (container, Vec::new())).collect())
                .map_err(|what| what + &about())?;
        }
        Ok(())
    }

    /// Stops etcd at some moment of the ADDs, and lets the ADDs meet their fate. Returns those that stand still, and how
    /// many had ended well.
    fn stop(
        &self,
        host: &Host<'_>,
        containers: &[String],
        mut victims: Vec<Victim>,
        fate: Fate,
        random: &mut Random,
    ) -> (Vec<Victim>, usize) {
        let chosen = random.below(victims.len() as u64) as usize;
        let usual = &self.slices[usize::from(host.lab.etcds.len() > 1)];
        let pace = *random.pick(&[Pace::Any, Pace::Throttled, Pace::Throttled, Pace::Throttled, Pace::Watched]);
        if pace == Pace::Any {
            thread::sleep(self.moment(random));
        } else {
            let (container, until) = (&containers[chosen], Instant::now() + LONGEST_ADD);
            let goes_on = |victims: &mut [Victim]| !victims.iter_mut().all(Victim::is_over) && Instant::now() < until;
            while !host.is_connected() && goes_on(&mut victims) {}
            let most = usual.get() + random.below(5);
            let mut slices = 0;
            while host.noted(container).is_empty() && goes_on(&mut victims) {
                if pace == Pace::Throttled {
                    if slices >= most {
                        break;
                    }
                    victims[chosen].go_on();
                    let slice = Instant::now() + SLICE;
                    while Instant::now() < slice {}
                    victims[chosen].stop();
                    slices += 1;
                }
            }
        }
        let too_late = !host.noted(&containers[chosen]).is_empty();
        host.stopped().signal(Signal::SIGSTOP).unwrap();
        if pace == Pace::Throttled {
            victims[chosen].go_on();
            let until = Instant::now() + LONGEST_STEP;
            while host.noted(&containers[chosen]).is_empty() && Instant::now() < until {
                thread::sleep(Duration::from_micros(100));
            }
            let too_early = host.noted(&containers[chosen]).is_empty();
            usual.set((usual.get() + u64::from(too_early)).saturating_sub(u64::from(too_late)));
        }
        thread::sleep(Duration::from_micros(random.below(3_000)));
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

    fn say(&self, rounds: u64, begun: Instant) {
        let (seconds, Self { in_flight, to_come, .. }) = (begun.elapsed().as_secs_f64(), self);
        println!("{rounds} rounds in {seconds:.0} s");
        println!("{in_flight:>8}  rounds with a commit in flight, {to_come} with one that etcd's log did not have yet");
        for (what, count) in &self.tally {
            println!("{count:>8}  {what}");
        }
    }
}

/// Says which round it was if a test ends in it.
struct Saying(u64, u64);

impl Drop for Saying {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("it was round {} of MARGAY_LATE_SEED={}", self.1, self.0);
        }
    }
}

#[test]
fn a_late_add_leaves_nothing_behind() {
    let (seed, rounds) = (setting("MARGAY_LATE_SEED", SEED), setting("MARGAY_LATE_ROUNDS", ROUNDS));
    println!("MARGAY_LATE_SEED={seed} MARGAY_LATE_ROUNDS={rounds}");
    let begun = Instant::now();
    let mut world = World::new();
    for round in 0..rounds {
        let _saying = Saying(seed, round);
        if let Err(what) = world.round(round, Notes::Kept, &mut Random::new(seed, round)) {
            world.say(round, begun);
            panic!("seed {seed}, round {round}: {what}");
        }
    }
    world.say(rounds, begun);
    for lab in [&world.one, &world.three] {
        lab.nothing_is_left();
        lab.no_notes_are_left();
    }
    let [least, least_to_come] = if rounds < MANY { [1, 0] } else { [rounds / 10, rounds / 50] };
    let World { in_flight, to_come, .. } = world;
    assert!(
        in_flight >= least && to_come >= least_to_come,
        "of {rounds} rounds {in_flight} had a commit in flight, and {to_come} one that etcd's log did not have yet; to prove \
         anything it takes {least} and {least_to_come}: run it on a machine with less to do, or with another MARGAY_LATE_SEED"
    );
    println!("0 left behind");
}

/// The rounds can fail: without notes an address is lost.
#[test]
fn a_late_add_that_nobody_has_noted_is_found_out() {
    let mut world = World::new();
    for round in 0..UNNOTED_ROUNDS {
        let _saying = Saying(SEED, round);
        if let Err(what) = world.round(round, Notes::Lost, &mut Random::new(SEED, round)) {
            assert!(what.contains("LEAKED"), "{what}");
            println!("round {round}: {what}");
            return;
        }
    }
    world.say(UNNOTED_ROUNDS, Instant::now());
    panic!("in {UNNOTED_ROUNDS} rounds without notes nothing was lost: the rounds prove nothing");
}
