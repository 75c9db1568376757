//! Tests with many concurrent plugin processes on one store.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::lab::{ENGINES, Engine, Lab};
use crate::process::{Call, Outcome};
use crate::random::Random;

const CALLERS: u64 = 32;
/// Number of attachments that each caller of the plugin adds; `make torture` sets a larger number.
const ADDS: u64 = 15;
/// Maximum number of attachments that a caller of the plugin holds at the same time.
const MOST_HELD: usize = 3;

const KILLED_CALLERS: u64 = 8;
/// Total number of plugin calls that are killed in a test.
const KILLS: u64 = 160;
/// Maximum number of attachments that a caller adds before the test has killed enough calls. Even on a fast machine, at
/// least a quarter of the kills hit a plugin call that is still running.
const MAX_ADDS: u64 = 8 * KILLS / KILLED_CALLERS;
/// Maximum delay between the start of a plugin call and its kill. A plugin call takes a few milliseconds without other
/// callers, and tens of milliseconds with this test's concurrent callers.
const KILL_WITHIN: Duration = Duration::from_millis(40);

/// The placeholder address of an attachment that has no address.
const NOWHERE: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Ensures that only one torture test runs at a time, since each of them uses the whole machine.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // Ignore a poisoned mutex: a failed test does not affect the next test.
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The holder of each address according to the plugin's results, and counts of the plugin calls.
#[derive(Debug, Default)]
struct Shared {
    held: Mutex<BTreeMap<IpAddr, String>>,
    failed: AtomicBool,
    adds: AtomicU64,
    dels: AtomicU64,
    killed: AtomicU64,
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, BTreeMap<IpAddr, String>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a newly assigned address, which must not have a holder yet.
    fn take(&self, ip: IpAddr, who: &str) {
        let before = self.held().insert(ip, who.to_owned());
        assert_eq!(before, None, "{ip} was given to {who} too");
    }

    fn give_back(&self, ip: IpAddr, who: &str) {
        assert_eq!(self.held().remove(&ip).as_deref(), Some(who), "{ip}");
    }
}

/// Stops the other caller threads when a caller thread panics.
struct Alarm<'a>(&'a Shared);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
    }
}

/// An attachment that a caller has added, with the assigned address.
#[derive(Clone, Debug)]
struct Held {
    container: String,
    interface: String,
    ip: IpAddr,
}

/// A caller of the plugin: a thread that runs one process at a time.
struct Caller<'a> {
    number: u64,
    conf: Value,
    shared: &'a Shared,
    random: Random,
    rounds: u64,
    held: Vec<Held>,
}

impl<'a> Caller<'a> {
    /// Callers alternate between a bridge network and a network of type `calico`, and all callers share one pool.
    fn new(number: u64, lab: &Lab, shared: &'a Shared) -> Self {
        let mut conf = lab.conf_of(if number.is_multiple_of(2) { "bridge" } else { "calico" });
        conf["name"] = format!("net-{}", number % 2).into();
        Self { number, conf, shared, random: Random::new(11, number), rounds: 0, held: Vec::new() }
    }

    fn call(&self, verb: &str, held: &Held) -> Call {
        Call::new(verb, &held.container, &self.conf).on(&held.interface)
    }

    /// Returns a new attachment for an ADD. Sometimes two callers of the plugin add attachments of the same container,
    /// each with another interface.
    fn next(&mut self) -> Held {
        self.rounds += 1;
        let container = if self.random.once_in(4) {
            format!("shared-{}-{}", self.number / 4 * 2 + self.number % 2, self.random.below(4))
        } else {
            format!("own-{}-{}", self.number, self.rounds)
        };
        let interface = format!("e{}-{}", self.number, self.rounds);
        Held { container, interface, ip: NOWHERE }
    }

    fn who(held: &Held) -> String {
        format!("{} {}", held.container, held.interface)
    }

    fn ok(call: &Call) -> Outcome {
        let outcome = call.run();
        assert_eq!(outcome.exit, 0, "{call:?}: {outcome:?}");
        outcome
    }

    fn add(&mut self) {
        let mut held = self.next();
        let add = self.call("ADD", &held);
        held.ip = Self::ok(&add).address();
        self.shared.take(held.ip, &Self::who(&held));
        self.shared.adds.fetch_add(1, Ordering::Relaxed);
        if self.random.once_in(5) {
            assert_eq!(Self::ok(&add).address(), held.ip, "a repeated ADD gets another result");
        }
        self.held.push(held);
    }

    fn del(&mut self, index: usize) {
        let held = self.held.swap_remove(index);
        self.shared.give_back(held.ip, &Self::who(&held));
        let del = self.call("DEL", &held);
        Self::ok(&del);
        self.shared.dels.fetch_add(1, Ordering::Relaxed);
        if self.random.once_in(8) {
            Self::ok(&del);
        }
    }

    /// Returns true while the caller has added fewer than `adds` attachments and no other caller has failed.
    fn has_more_adds(&self, adds: u64) -> bool {
        self.rounds < adds && !self.shared.failed.load(Ordering::Relaxed)
    }

    fn run(mut self) -> Vec<Held> {
        let _alarm = Alarm(self.shared);
        while self.has_more_adds(ADDS) {
            let is_full = self.held.len() >= MOST_HELD;
            if self.held.is_empty() || (!is_full && self.random.once_in(2)) {
                self.add();
            } else {
                let index = self.random.below(self.held.len() as u64);
                self.del(usize::try_from(index).unwrap());
            }
        }
        self.held
    }

    /// Like [`run`](Self::run), but kills some of the plugin calls. The effect of a killed ADD or DEL is unknown, so
    /// the caller then runs a DEL without a kill, as a runtime does.
    fn run_with_kills(mut self) -> Vec<Held> {
        let _alarm = Alarm(self.shared);
        while self.shared.killed.load(Ordering::Relaxed) < KILLS && self.has_more_adds(MAX_ADDS) {
            if self.held.is_empty() || (self.held.len() < MOST_HELD && self.random.once_in(2)) {
                let mut held = self.next();
                let add = self.call("ADD", &held);
                match self.run_or_kill(&add) {
                    Some(outcome) => {
                        held.ip = outcome.address();
                        self.shared.take(held.ip, &Self::who(&held));
                        self.held.push(held);
                    }
                    None => drop(Self::ok(&self.call("DEL", &held))),
                }
            } else {
                let index = usize::try_from(self.random.below(self.held.len() as u64)).unwrap();
                let held = self.held.swap_remove(index);
                self.shared.give_back(held.ip, &Self::who(&held));
                let del = self.call("DEL", &held);
                if self.run_or_kill(&del).is_none() {
                    Self::ok(&del);
                }
            }
        }
        self.held
    }

    /// Runs a plugin call. In half of the cases, kills the plugin process some time after its start. Returns `None` if
    /// the kill ended the process.
    fn run_or_kill(&mut self, call: &Call) -> Option<Outcome> {
        if self.random.once_in(2) {
            return Some(Self::ok(call));
        }
        let mut child = call.start(call.command());
        let micros = u64::try_from(KILL_WITHIN.as_micros()).unwrap();
        thread::sleep(Duration::from_micros(self.random.below(micros)));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        if output.status.signal().is_some() {
            self.shared.killed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let outcome = Outcome::new(output, call);
        assert_eq!(outcome.exit, 0, "{call:?}: {outcome:?}");
        Some(outcome)
    }
}

/// Runs all callers on a store, and then deletes all their attachments.
fn torture(engine: Engine, callers: u64, run: fn(Caller<'_>) -> Vec<Held>) -> Shared {
    let _alone = alone();
    let lab = Lab::with_pool(engine, "10.77.0.0/24");
    let shared = Shared::default();
    let left: Vec<(u64, Held)> = thread::scope(|scope| {
        let start = |number| {
            let caller = Caller::new(number, &lab, &shared);
            (number, scope.spawn(move || run(caller)))
        };
        let threads: Vec<_> = (0..callers).map(start).collect();
        let joined = threads.into_iter().map(|(number, thread)| (number, thread.join()));
        // Wait for all caller threads before reporting the first failure.
        let joined: Vec<_> = joined.collect();
        joined
            .into_iter()
            .flat_map(|(number, held)| held.unwrap().into_iter().map(move |held| (number, held)))
            .collect()
    });
    let books = lab.books();
    let by_books: Vec<_> = books.held.keys().copied().collect();
    let by_answers: Vec<_> = shared.held().keys().copied().collect();
    assert_eq!(by_books, by_answers, "the store and the answers differ");
    for (number, held) in left {
        let mut caller = Caller::new(number, &lab, &shared);
        caller.held.push(held);
        caller.del(0);
    }
    lab.nothing_is_left();
    assert!(shared.held().is_empty());
    shared
}

/// Runs sixteen concurrent ADDs on a store that does not exist yet; half of them are killed after some time, and
/// repeated.
fn first_adds(engine: Engine, round: u64) {
    let lab = Lab::new(engine);
    let shared = Shared::default();
    let mut conf = lab.conf_with("bridge", json!({"subnet": "10.78.0.0/24"}));
    conf["name"] = "net-0".into();
    thread::scope(|scope| {
        for number in 0..16 {
            let random = Random::new(round, number);
            let mut caller =
                Caller { number, conf: conf.clone(), shared: &shared, random, rounds: 0, held: Vec::new() };
            scope.spawn(move || {
                let mut held = Held { container: format!("c{number}"), interface: "eth0".into(), ip: NOWHERE };
                let add = caller.call("ADD", &held);
                let outcome = caller.run_or_kill(&add).unwrap_or_else(|| Caller::ok(&add));
                held.ip = outcome.address();
                caller.shared.take(held.ip, &Caller::who(&held));
            });
        }
    });
    let books = lab.books();
    assert!(books.held.keys().eq(shared.held().keys()), "{books:?}");
    assert_eq!(books.held.len(), 16);
}

/// Tests a runtime that gives up waiting and calls the plugin again while the first call is still running.
#[test]
fn same_attachment_many_times_at_once() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.79.0.0/24");
        let at_once = |call: &Call| {
            thread::scope(|scope| {
                let calls: Vec<_> = (0..8).map(|_| scope.spawn(|| Caller::ok(call).stdout)).collect();
                calls.into_iter().map(|call| call.join().unwrap()).collect::<BTreeSet<_>>()
            })
        };
        assert_eq!(at_once(&lab.add("c1")).len(), 1, "{engine:?}: all get the same answer");
        assert_eq!(lab.books().held.len(), 1);
        assert_eq!(at_once(&lab.del("c1")), [String::new()].into());
        lab.nothing_is_left();
    }
}

fn crowd(engine: Engine) {
    let shared = torture(engine, CALLERS, |caller| caller.run());
    let (adds, dels) = (shared.adds.into_inner(), shared.dels.into_inner());
    assert_eq!(adds, dels);
    assert_eq!(adds, CALLERS * ADDS, "a caller has failed");
}

fn killers(engine: Engine) {
    let shared = torture(engine, KILLED_CALLERS, |caller| caller.run_with_kills());
    let killed = shared.killed.into_inner();
    assert!(killed >= KILLS, "only {killed} calls were killed");
}

#[test]
fn crowd_on_sled() {
    crowd(Engine::SLED);
}

#[test]
fn crowd_on_redb() {
    crowd(Engine::REDB);
}

#[test]
fn killed_callers_on_sled() {
    killers(Engine::SLED);
}

#[test]
fn killed_callers_on_redb() {
    killers(Engine::REDB);
}

#[test]
fn crowd_makes_one_store() {
    let _alone = alone();
    for round in 0..12 {
        first_adds(Engine::SLED, round);
        first_adds(Engine::REDB, round);
    }
}
