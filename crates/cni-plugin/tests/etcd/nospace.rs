//! Tests a cluster under churn until it reaches etcd's quota. When etcd is full, ADDs fail with advice, DELs are
//! repeated as by a container runtime, and an operator runs the commands in the advice.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::net::IpAddr;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;

use crate::lab::Lab;
use crate::process::Outcome;
use crate::server::Etcd;

/// The space quota of the test's etcd, in bytes. All containers of a test round together write about as many bytes as
/// this quota.
const QUOTA_BYTES: usize = 8 << 20;
/// Number of callers that start and end containers at the same time.
const CALLERS: usize = 4;
/// Maximum number of containers per caller.
const MAX_CONTAINERS: usize = 12;
/// Time limit for filling etcd up to its space quota, and for making room again.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The addresses of containers whose ADD has succeeded and whose DEL has not begun.
#[derive(Default)]
struct Ledger(Mutex<BTreeMap<IpAddr, String>>);

impl Ledger {
    fn assigned(&self, address: IpAddr, container: &str) {
        let other = self.0.lock().unwrap().insert(address, container.to_owned());
        assert_eq!(other, None, "{address} was given to {container}, too");
    }

    fn ending(&self, container: &str) {
        self.0.lock().unwrap().retain(|_, holder| holder != container);
    }
}

/// A caller that starts and ends containers until etcd's space quota is reached, with the outcomes of its plugin calls.
struct Caller<'a> {
    lab: &'a Lab,
    ledger: &'a Ledger,
    number: usize,
    /// Containers that have an address.
    running: Vec<String>,
    /// Containers for which the caller must send DEL until it succeeds, as a container runtime does.
    ending: Vec<String>,
    started: usize,
    refused: usize,
}

impl Caller<'_> {
    /// Starts a container, or ends the oldest one if the caller has [`MAX_CONTAINERS`] containers.
    fn step(&mut self) {
        self.end_all();
        if self.running.len() >= MAX_CONTAINERS {
            let oldest = self.running.remove(0);
            self.end(oldest);
            return;
        }
        self.started += 1;
        let container = format!("{:032x}{:032x}", self.number, self.started);
        let outcome = self.lab.add(&container).run();
        if outcome.exit == 0 {
            self.ledger.assigned(outcome.address(), &container);
            self.running.push(container);
        } else {
            self.judge(&outcome);
            self.ending.push(container);
        }
    }

    fn end(&mut self, container: String) {
        self.ledger.ending(&container);
        self.ending.push(container);
        self.end_all();
    }

    fn end_all(&mut self) {
        for container in std::mem::take(&mut self.ending) {
            let outcome = self.lab.del(&container).run();
            if outcome.exit != 0 {
                self.judge(&outcome);
                self.ending.push(container);
            }
        }
    }

    /// Checks that a failed call's error names the three etcdctl commands that free space (compact, defrag, alarm
    /// disarm).
    fn judge(&mut self, outcome: &Outcome) {
        let refusal = outcome.refusal();
        for part in ["no space left", "etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"] {
            assert!(refusal.text.contains(part), "{refusal:?}");
        }
        self.refused += 1;
    }
}

/// Runs the commands that the error of a full etcd names, as an operator types them.
fn make_room(etcd: &Etcd) {
    let etcdctl = |words: &str| {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &etcd.url()]).args(words.split(' '));
        let output = command.output().unwrap_or_else(|error| panic!("etcdctl (Debian: etcd-client): {error}"));
        assert!(output.status.success(), "etcdctl {words}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let status = etcdctl("endpoint status -w json");
    let revision = status.split("\"revision\":").nth(1).unwrap().split([',', '}']).next().unwrap();
    etcdctl(&format!("compact {revision} --physical=true"));
    etcdctl("defrag --cluster");
    etcdctl("alarm disarm");
}

#[test]
fn nospace_is_left_without_a_lost_address() {
    let rounds = env::var("MARGAY_NOSPACE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2);
    let quota = format!("--quota-backend-bytes={QUOTA_BYTES}");
    let lab = Lab::on(vec![Etcd::start_with("http", &[quota]).unwrap()]);
    let ledger = Ledger::default();
    let mut callers: Vec<Caller<'_>> = (0..CALLERS)
        .map(|number| Caller {
            lab: &lab,
            ledger: &ledger,
            number,
            running: Vec::new(),
            ending: Vec::new(),
            started: 0,
            refused: 0,
        })
        .collect();
    for round in 0..rounds {
        let (is_over, refused) = (AtomicBool::new(false), AtomicUsize::new(0));
        let until = Instant::now() + patient(TEST_TIMEOUT);
        thread::scope(|scope| {
            for caller in &mut callers {
                let (is_over, refused) = (&is_over, &refused);
                scope.spawn(move || {
                    let before = caller.refused;
                    while !is_over.load(Ordering::Relaxed) {
                        caller.step();
                        refused.fetch_add(usize::from(caller.refused > before), Ordering::Relaxed);
                        assert!(Instant::now() < until, "the quota was not used up and left in time");
                    }
                });
            }
            // All callers keep sending ADDs and DELs for a while to an etcd that refuses every write.
            while refused.load(Ordering::Relaxed) < 8 * CALLERS && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            make_room(&lab.etcds[0]);
            thread::sleep(Duration::from_millis(500));
            is_over.store(true, Ordering::Relaxed);
        });
        let refused: usize = callers.iter().map(|caller| caller.refused).sum();
        println!("round {round}: {refused} calls were refused by now");
        for caller in &mut callers {
            caller.end_all();
            assert_eq!(caller.ending, [""; 0], "a DEL fails although etcd has room");
        }
        let stored: BTreeSet<IpAddr> = lab.books().held.into_keys().collect();
        let known: BTreeSet<IpAddr> = ledger.0.lock().unwrap().keys().copied().collect();
        assert_eq!(stored, known, "an address was lost or leaked");
    }
    assert!(callers.iter().all(|caller| caller.refused > 0), "the quota was not used up");
    for caller in &mut callers {
        while !caller.running.is_empty() {
            let container = caller.running.remove(0);
            caller.end(container);
        }
    }
    lab.nothing_is_left();
    lab.no_notes_are_left();
}
