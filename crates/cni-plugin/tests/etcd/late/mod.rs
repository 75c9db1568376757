//! Tests in random rounds what happens if an ADD's commit reaches etcd late. An etcd is stopped (SIGSTOP) while ADDs of
//! the real plugin are running. While etcd is stopped, the ADDs are killed and the runtime sends DEL; etcd continues
//! after the DEL.
//!
//! Three of four test rounds run on a single etcd. Every fourth test round runs on a cluster of three etcd members, and
//! stops the member that the ADDs have queried. On the three-member cluster, the DEL succeeds before the stopped member
//! reads the requests of the ADDs. In a test round, one or several concurrent ADDs run on a node that may or may not
//! have a block. The ADDs are killed; or they are stopped until the end of the round, so that their connections stay
//! open; or they time out. After the ADDs, the runtime sends one DEL, two concurrent DELs, or the ADD again, and
//! retries each call until it succeeds. After all late commits have arrived, the store must contain nothing of a
//! deleted container, and no pending commit may remain.
//!
//! `MARGAY_LATE_SEED` sets the random seed and `MARGAY_LATE_ROUNDS` the number of rounds; `make torture MODE=late` sets
//! both variables.

mod held;
mod host;
mod inside;
mod plan;
mod stop;
mod tally;

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::lab::Lab;
use crate::random::{Random, setting};
use crate::server::Etcd;
use host::{Host, Settled, mark_of};
use inside::{Log, connections, until_all_is_read};
use plan::{Next, Place, Plan, When};
use stop::Timing;
use tally::{Commit, Tally};

const ROUNDS: u64 = 40;
const SEED: u64 = 20_261_122;
/// Prevents etcd from connecting to itself, so that every counted connection comes from a plugin.
const ALONE: &str = "--enable-grpc-gateway=false";
/// Makes a cluster detect the loss of its leader quickly.
const QUICK: [&str; 3] = [ALONE, "--heartbeat-interval=30", "--election-timeout=300"];
/// Number of ADDs that are run to estimate the duration of an ADD.
const MEASURED: usize = 15;

/// One or several etcd members, their write-ahead logs, and the measured duration of ADDs on these members.
struct Site {
    lab: Lab,
    logs: Vec<Log>,
    timing: Timing,
}

impl Site {
    fn new(etcds: Vec<Etcd>) -> Self {
        let lab = Lab::on(etcds);
        let life = |number: usize| {
            let (container, begun) = (format!("measured{number}"), Instant::now());
            lab.add(&container).ok();
            let life = begun.elapsed();
            lab.del(&container).ok();
            life
        };
        let mut lives: Vec<Duration> = (0..MEASURED).map(life).collect();
        lives.sort_unstable();
        let logs = lab.etcds.iter().map(Log::of).collect();
        Self { logs, timing: Timing::new(lives[MEASURED / 2] * 5 / 4), lab }
    }
}

/// The two test clusters (one etcd, and three members), and the counts of all test rounds so far.
struct World {
    one: Site,
    three: Site,
    tally: Tally,
}

impl World {
    fn new() -> Self {
        let one = Site::new(vec![Etcd::start_with("http", &[ALONE.to_owned()]).unwrap()]);
        let three = Site::new(Etcd::start_three_with(&QUICK).unwrap().into());
        Self { one, three, tally: Tally::default() }
    }

    fn round(&mut self, plan: &Plan, random: &mut Random) -> Result<(), String> {
        let site = match plan.place {
            Place::One => &mut self.one,
            Place::Cluster => &mut self.three,
        };
        site.logs.iter_mut().for_each(Log::mark);
        let host = Host::new(&site.lab, plan.first, plan.locks);
        if plan.new_block {
            host.give_back();
        }
        let (standing, ended_well) = site.timing.stop(&host, plan, random);
        let unread = connections(host.stopped()).unread;
        let log = &site.logs[host.other_place()];
        let notes = plan.containers.iter().flat_map(|container| host.noted(container));
        let marks = notes.map(|note| mark_of(&note));
        let mut commits: Vec<Commit> =
            marks.map(|mark| Commit { before: log.count(&mark), between: None, mark }).collect();
        self.tally.stopped(plan, &commits, ended_well, unread);
        let next = next_calls(&host, plan, &mut commits, log, random)?;
        until_all_is_read(host.stopped());
        for victim in standing {
            victim.kill();
        }
        host.until_all_has_landed();
        self.tally.landed(plan, &commits, &next, log);
        check(&host, plan, &next)
    }
}

/// Makes the plugin calls that a runtime makes after the ADDs, and resumes the stopped etcd, in the order given by the
/// plan of the test round.
fn next_calls(
    host: &Host<'_>,
    plan: &Plan,
    commits: &mut [Commit],
    log: &Log,
    random: &mut Random,
) -> Result<Vec<Settled>, String> {
    let mut scan = || commits.iter_mut().for_each(|commit| commit.between = Some(log.count(&commit.mark)));
    let go_on = || host.stopped().signal(Signal::SIGCONT).unwrap();
    if plan.when != When::Before {
        go_on();
    }
    if plan.when == When::After {
        until_all_is_read(host.stopped());
        scan();
    }
    let done: Vec<Result<Settled, String>> = thread::scope(|scope| {
        let (verb, times) = match plan.next {
            Next::Del => ("DEL", 1),
            Next::TwoDels => ("DEL", 2),
            Next::AddAgain => ("ADD", 1),
        };
        let calls = plan.containers.iter().flat_map(|container| std::iter::repeat_n(container, times));
        let calls: Vec<_> = calls.map(|container| scope.spawn(move || host.settle(verb, container))).collect();
        if plan.when == When::Before && plan.place == Place::One {
            // The pause before etcd continues is sometimes longer than the time limit of a plugin call.
            let most = if random.once_in(10) { 1_300_000 } else { 20_000 };
            thread::sleep(Duration::from_micros(random.below(most)));
            go_on();
        }
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    let done = done.into_iter().collect::<Result<_, _>>()?;
    if plan.when == When::Before && plan.place == Place::Cluster {
        if plan.gives_back {
            host.give_back();
        }
        scan();
        go_on();
    }
    Ok(done)
}

/// Checks that after a repeated ADD each container holds exactly the addresses in the ADD's result, and after a DEL no
/// address.
fn check(host: &Host<'_>, plan: &Plan, next: &[Settled]) -> Result<(), String> {
    let about = |what: String| format!("{what}\n{plan:?}");
    let nothing: BTreeMap<_, _> = plan.containers.iter().map(|container| (container.as_str(), Vec::new())).collect();
    if plan.next == Next::AddAgain {
        let reported =
            plan.containers.iter().zip(next).map(|(name, settled)| (name.as_str(), settled.addresses.clone()));
        host.check(&reported.collect()).map_err(about)?;
        for container in &plan.containers {
            host.settle("DEL", container)?;
        }
    }
    host.check(&nothing).map_err(about)
}

/// When a test panics, prints the seed and the number of the round.
struct Saying(u64, u64);

impl Drop for Saying {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("it was round {} of MARGAY_LATE_SEED={}", self.1, self.0);
        }
    }
}

#[test]
fn late_add_leaves_nothing_behind() {
    let (seed, rounds) = (setting("MARGAY_LATE_SEED", SEED), setting("MARGAY_LATE_ROUNDS", ROUNDS));
    println!("MARGAY_LATE_SEED={seed} MARGAY_LATE_ROUNDS={rounds}");
    let begun = Instant::now();
    let mut world = World::new();
    for round in 0..rounds {
        let _saying = Saying(seed, round);
        let mut random = Random::new(seed, round);
        if let Err(what) = world.round(&Plan::draw(round, &mut random), &mut random) {
            world.tally.print();
            panic!("seed {seed}, round {round}: {what}");
        }
    }
    println!("{rounds} rounds in {:.0} s", begun.elapsed().as_secs_f64());
    world.tally.print();
    for Site { lab, .. } in [&world.one, &world.three] {
        lab.nothing_is_left();
        lab.no_notes_are_left();
    }
    world.tally.proves_something(rounds);
    println!("0 left behind");
}
