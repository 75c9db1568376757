//! Kills plugin calls with SIGKILL at random moments, in rounds.
//!
//! Each round kills one or several plugin calls: an ADD or a DEL on a store whose history has its maximum length (so
//! that each commit also removes old revisions), the ADD that creates the store, or callers that wait in the queue
//! behind a stopped lock holder. After each round, it must be possible to open the store, which must contain every
//! address that an ADD has returned, and no address twice. Each killed plugin call must have happened completely or not
//! at all, and the store's blocks, handles and affinities must agree. After a round's checks, each killed call is
//! finished with a DEL or a repeated ADD, as a container runtime would do.
//!
//! The environment variables `MARGAY_CRASH_SEED` and `MARGAY_CRASH_ROUNDS` choose the seed and the number of rounds;
//! `make torture MODE=kill` sets both of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use datastore::Create;
use kv::{ErrorKind, Range, RangeRequest, Revision, StoreExt};
use serde_json::{Value, json};

use crate::lab::{Engine, Lab};
use crate::process::{Call, Outcome};
use crate::random::{Random, setting};
use crate::victim::{Phase, Victim, head};

pub const SEED: u64 = 20_261_121;
/// The number of rounds in a cycle of the test. In each cycle of five rounds, one round creates a store, and one round
/// tests the queue for the store lock.
const KINDS: u64 = 5;
/// Maximum number of revisions in the store's history.
const FULL_LOG: usize = 10_000;
/// Maximum number of containers that have addresses at the same time.
const MOST_HELD: usize = 100;
/// Number of plugin calls whose durations are measured before the test.
const MEASURED: usize = 24;
/// Maximum number of attempts to stop a call while it has the store open.
const ATTEMPTS: usize = 200;

/// Returns a network configuration with which each container gets one IPv4 and one IPv6 address.
fn network() -> Value {
    json!({ "ranges": [[{ "subnet": "10.66.0.0/24" }], [{ "subnet": "fd66::/120" }]] })
}

/// The number of events of each kind, by the kind's name.
type Tally = BTreeMap<String, u64>;

fn count(tally: &mut Tally, what: impl Into<String>) {
    *tally.entry(what.into()).or_default() += 1;
}

/// The measured durations of calls of one kind, shortest first.
pub struct Life(Vec<Duration>);

impl Life {
    pub fn of(mut calls: Vec<Duration>) -> Self {
        calls.sort_unstable();
        Self(calls)
    }

    /// Draws a random moment, as the time since the start of a plugin call. Half of the drawn moments are uniform
    /// between 0 and the longest measured duration of a call. The moments of the other half are uniform between 0 and
    /// the median duration of a call, because a few calls take very long on a busy machine.
    pub fn moment(&self, random: &mut Random) -> Duration {
        let most = if random.once_in(2) { self.0.last() } else { self.0.get(self.0.len() / 2) };
        let micros = u64::try_from(most.unwrap().as_micros()).unwrap();
        Duration::from_micros(random.below(micros + 1))
    }
}

/// Runs a plugin call until it ends. Returns the call's outcome and duration.
pub fn measured(call: &Call) -> (Outcome, Duration) {
    let begun = Instant::now();
    (call.ok(), begun.elapsed())
}

/// A store, and the addresses that each container's ADD has returned.
pub struct World {
    pub lab: Lab,
    conf: Value,
    pub held: BTreeMap<String, BTreeSet<IpAddr>>,
    next: u64,
}

impl World {
    /// Creates a `World` whose store does not exist yet.
    pub fn new(engine: Engine) -> Self {
        let lab = Lab::new(engine);
        let conf = lab.conf_with("bridge", network());
        Self { lab, conf, held: BTreeMap::new(), next: 0 }
    }

    /// Creates a `World` whose store has a history of the maximum length. Returns the `World`, and the durations of
    /// ADDs and DELs on its store.
    pub fn with_full_log(engine: Engine) -> (Self, Life) {
        let mut world = Self::new(engine);
        world.add();
        world.lab.with_ipam(Create::Never, async |ipam, _| {
            let mut puts = tokio::task::JoinSet::new();
            for number in 0..FULL_LOG {
                let store = std::sync::Arc::clone(ipam.store());
                puts.spawn(async move { store.put("/filler", number.to_string()).await });
            }
            for put in puts.join_all().await {
                put.unwrap();
            }
        });
        assert!(world.trimmed_to() > 1, "the log is not full");
        let mut lives = Vec::new();
        for _ in 0..MEASURED / 2 {
            let container = world.name();
            for verb in ["ADD", "DEL"] {
                lives.push(measured(&world.call(verb, &container)).1);
            }
        }
        (world, Life::of(lives))
    }

    /// Returns the oldest readable revision of the store.
    fn trimmed_to(&self) -> i64 {
        self.lab.with_ipam(Create::Never, async |ipam, _| {
            let read = RangeRequest::new(Range::All).with_at(Revision::new(1));
            match ipam.store().range(read).await.map_err(|error| error.kind().clone()) {
                Ok(_) => 1,
                Err(ErrorKind::Compacted { compact_revision }) => compact_revision.get(),
                Err(kind) => panic!("{kind:?}"),
            }
        })
    }

    pub fn call(&self, verb: &str, container: &str) -> Call {
        Call::new(verb, container, &self.conf)
    }

    fn name(&mut self) -> String {
        self.next += 1;
        format!("c{}", self.next)
    }

    pub fn start(&self, verb: &str, container: &str) -> Victim {
        Victim::start(self.call(verb, container), &self.lab.store)
    }

    /// Runs an ADD to completion, without killing it.
    pub fn add(&mut self) {
        let container = self.name();
        let outcome = self.call("ADD", &container).ok();
        self.reported(container, &outcome).unwrap();
    }

    /// Records the result of an ADD. Fails if a container other than `container` has one of the returned addresses.
    fn reported(&mut self, container: String, outcome: &Outcome) -> Result<(), String> {
        let addresses: BTreeSet<IpAddr> = outcome.addresses().into_iter().collect();
        if addresses.len() != 2 {
            return Err(format!("{container} was told {addresses:?}"));
        }
        match self.held.iter().find(|(_, theirs)| !theirs.is_disjoint(&addresses)) {
            Some((other, _)) => Err(format!("{container} was told {addresses:?}, and {other} has them")),
            None => {
                self.held.insert(container, addresses);
                Ok(())
            }
        }
    }

    /// Opens the store, and compares its addresses with those that ADDs have returned. A container in `unsure` must
    /// have either all of its listed addresses or none. If the expected addresses are `None`, the container must have
    /// either two addresses or none. Returns the addresses that the containers in `unsure` have in the store.
    pub fn check(
        &self,
        unsure: &BTreeMap<String, Option<BTreeSet<IpAddr>>>,
    ) -> Result<BTreeMap<String, BTreeSet<IpAddr>>, String> {
        let mut recorded: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
        for (ip, handle) in self.lab.books().held {
            let container = handle.strip_prefix("net1.").unwrap().to_owned();
            recorded.entry(container).or_default().insert(ip);
        }
        let mut found = BTreeMap::new();
        for (container, before) in unsure {
            let has = recorded.remove(container).unwrap_or_default();
            let is_whole = before.as_ref().map_or(has.len() == 2, |before| has == *before);
            if !has.is_empty() && !is_whole {
                return Err(format!("{container} was killed, and is there with a part of it: {has:?} of {before:?}"));
            }
            found.insert(container.clone(), has);
        }
        if recorded == self.held {
            return Ok(found);
        }
        Err(format!("acknowledged is\n{:?}\nand recorded is\n{recorded:?}", self.held))
    }

    pub fn check_all(&self) -> Result<(), String> {
        self.check(&BTreeMap::new()).map(drop)
    }

    /// Finishes a killed ADD as a container runtime does: with a DEL, or with another ADD.
    fn settle(&mut self, container: String, has: &BTreeSet<IpAddr>, random: &mut Random) -> Result<(), String> {
        if random.once_in(2) {
            self.call("DEL", &container).ok();
            return Ok(());
        }
        let again = self.call("ADD", &container).ok();
        let reported: BTreeSet<IpAddr> = again.addresses().into_iter().collect();
        if !has.is_empty() && reported != *has {
            return Err(format!("{container} has {has:?}, and was told {reported:?} when it asked again"));
        }
        self.reported(container, &again)
    }

    fn alone(&mut self, life: &Life, random: &mut Random, tally: &mut Tally) -> Result<(), String> {
        let is_add = self.held.is_empty() || (self.held.len() < MOST_HELD && random.once_in(2));
        let verb = if is_add { "ADD" } else { "DEL" };
        let container =
            if is_add { self.name() } else { random.pick(&self.held.keys().cloned().collect::<Vec<_>>()).clone() };
        // After its DEL has begun, a container may lose its addresses at any time.
        let before = self.held.remove(&container);
        let mut victim = self.start(verb, &container);
        thread::sleep(life.moment(random));
        if random.once_in(2) {
            count(tally, format!("stopped and looked at: {}", victim.stop().name()));
        }
        let Some(outcome) = victim.kill() else {
            let found = self.check(&[(container.clone(), before)].into())?;
            let has = &found[&container];
            let outcome = if is_add == has.is_empty() { "nothing had happened" } else { "all had happened" };
            count(tally, format!("{verb} killed: {outcome}"));
            if is_add {
                self.settle(container, has, random)?;
            } else {
                self.call("DEL", &container).ok();
            }
            return self.check_all();
        };
        count(tally, format!("{verb} ended before the kill"));
        assert_eq!(outcome.exit, 0, "{outcome:?}");
        if is_add {
            self.reported(container, &outcome)?;
        }
        self.check_all()
    }

    /// Starts ADDs until one of them is stopped while it has the store open, and returns this ADD. An ADD that does not
    /// have the store open when it is stopped is resumed and runs to completion.
    pub fn holder(&mut self, life: &Life, random: &mut Random) -> Result<(String, Victim, Phase), String> {
        for _ in 0..ATTEMPTS {
            let container = self.name();
            let mut victim = self.start("ADD", &container);
            thread::sleep(life.moment(random));
            let phase = victim.stop();
            if phase.is_inside() {
                return Ok((container, victim, phase));
            }
            victim.go_on();
            let outcome = victim.end();
            self.reported(container.clone(), &outcome)?;
            self.call("DEL", &container).ok();
            self.held.remove(&container);
        }
        Err(format!("in {ATTEMPTS} attempts no call was stopped while it had the store"))
    }

    /// Checks that no call in the queue has opened the store, ended, or changed the store.
    pub fn check_waiters_outside(&self, waiters: &mut [(String, Victim)], before: &[u8]) -> Result<(), String> {
        for (container, waiter) in waiters {
            if waiter.is_over() || waiter.scan().is_inside() {
                return Err(format!("{container} is at the store, which another has"));
            }
        }
        if head(&self.lab.store) == before { Ok(()) } else { Err("a waiting call has committed".into()) }
    }

    /// Runs a round in which calls queue for the store lock: the call that has the store open is stopped, and some
    /// waiting calls are killed. At the end of a round with a queue, the stopped call is resumed in half of the rounds
    /// and killed in the other half.
    fn queue(&mut self, round: u64, life: &Life, random: &mut Random, tally: &mut Tally) -> Result<(), String> {
        let (first, mut holder, phase) = self.holder(life, random)?;
        count(tally, format!("holder stands still: {}", phase.name()));
        let before = head(&self.lab.store);
        let mut waiters: Vec<(String, Victim)> = Vec::new();
        for _ in 0..3 + random.below(3) {
            let container = self.name();
            let waiter = self.start("ADD", &container);
            waiters.push((container, waiter));
        }
        let mut killed = Vec::new();
        while waiters.len() > 1 && (killed.is_empty() || random.once_in(2)) {
            thread::sleep(life.moment(random));
            let index = usize::try_from(random.below(waiters.len() as u64)).unwrap();
            let (container, mut waiter) = waiters.remove(index);
            count(tally, format!("waiter killed: {}", waiter.stop().name()));
            if waiter.kill().is_some() {
                return Err(format!("{container} was answered while another had the store"));
            }
            killed.push(container);
            self.check_waiters_outside(&mut waiters, &before)?;
        }
        let mut unsure: BTreeMap<String, Option<BTreeSet<IpAddr>>> = BTreeMap::new();
        if (round / KINDS).is_multiple_of(2) {
            count(tally, "holder killed");
            if holder.kill().is_some() {
                return Err(format!("{first} was answered while it stood still"));
            }
            unsure.insert(first.clone(), None);
        } else {
            count(tally, "holder went on");
            holder.go_on();
            let outcome = holder.end();
            self.reported(first.clone(), &outcome)?;
        }
        for (container, waiter) in waiters {
            let outcome = waiter.end();
            self.reported(container, &outcome)?;
        }
        // A killed call that never opened the store must have left the store unchanged.
        let found = self.check(&unsure)?;
        if let Some(has) = found.get(&first) {
            self.settle(first, has, random)?;
        }
        for container in killed {
            self.settle(container, &BTreeSet::new(), random)?;
        }
        self.check_all()?;
        self.thin_out()
    }

    fn thin_out(&mut self) -> Result<(), String> {
        while self.held.len() > MOST_HELD {
            let Some((container, _)) = self.held.pop_first() else { break };
            self.call("DEL", &container).ok();
        }
        self.check_all()
    }
}

/// Runs a round that begins without a store: calls that would create the store are killed, and the last call is not
/// killed.
fn making(engine: Engine, life: &Life, random: &mut Random, tally: &mut Tally) -> Result<(), String> {
    let mut world = World::new(engine);
    let mut unsure = BTreeMap::new();
    for _ in 0..1 + random.below(3) {
        let container = world.name();
        let mut victim = world.start("ADD", &container);
        thread::sleep(life.moment(random));
        let phase = victim.stop();
        match victim.kill() {
            Some(outcome) => world.reported(container, &outcome)?,
            None => {
                count(tally, format!("first ADD killed: {}", phase.name()));
                unsure.insert(container, None);
            }
        }
    }
    world.add();
    for (container, has) in world.check(&unsure)? {
        world.settle(container, &has, random)?;
    }
    world.check_all()?;
    for container in std::mem::take(&mut world.held).into_keys() {
        world.call("DEL", &container).ok();
    }
    world.lab.nothing_is_left();
    Ok(())
}

/// Measures the duration of an ADD that creates the store.
fn life_of_making(engine: Engine) -> Life {
    let life = |_| {
        let world = World::new(engine);
        measured(&world.call("ADD", "c")).1
    };
    Life::of((0..MEASURED).map(life).collect())
}

/// Runs `MARGAY_CRASH_ROUNDS` rounds, or `usual` rounds if this variable is not set. If at least `usual` rounds are
/// run, every kind of event must happen at least once.
pub fn rounds(engine: Engine, usual: u64) {
    let (seed, rounds) = (setting("MARGAY_CRASH_SEED", SEED), setting("MARGAY_CRASH_ROUNDS", usual));
    println!("{engine:?}: MARGAY_CRASH_SEED={seed} MARGAY_CRASH_ROUNDS={rounds}");
    let (mut world, life) = World::with_full_log(engine);
    let (first, life_of_making, mut tally) = (world.trimmed_to(), life_of_making(engine), Tally::new());
    for round in 0..rounds {
        let mut random = Random::new(seed, round);
        let done = match round % KINDS {
            3 => making(engine, &life_of_making, &mut random, &mut tally),
            4 => world.queue(round, &life, &mut random, &mut tally),
            _ => world.alone(&life, &mut random, &mut tally),
        };
        if let Err(what) = done {
            panic!("{engine:?}, seed {seed}, round {round}: {what}");
        }
    }
    let trimmed = world.trimmed_to() - first;
    println!("{engine:?}: {rounds} rounds, {trimmed} revisions trimmed meanwhile");
    for (what, count) in &tally {
        println!("{count:>8}  {what}");
    }
    assert!(trimmed > 0, "no commit has trimmed the log");
    let happened = |what: &str| tally.keys().any(|key| key.starts_with(what));
    // A run with fewer rounds than the parameter `usual` may miss some kinds of events.
    if rounds >= usual {
        assert!(happened("ADD killed") || happened("DEL killed"), "no call was killed");
        for what in ["first ADD killed", "waiter killed", "holder killed", "holder went on"] {
            assert!(happened(what), "no {what} in {rounds} rounds");
        }
    }
    for container in std::mem::take(&mut world.held).into_keys() {
        world.call("DEL", &container).ok();
    }
    world.lab.nothing_is_left();
}
