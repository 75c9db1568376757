//! Tests that the daemon can stop or be killed while plugins call it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::net::UnixListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, sleep};
use std::time::Duration;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab};
use crate::programs::wait_until;

const POOL: &str = "10.80.0.0/22";
/// Number of plugins that call at the same time.
const CALLERS: usize = 6;
/// How often the daemon is killed, unless `MARGAY_SERVE_ROUNDS` sets another number.
const ROUNDS: u32 = 20;

/// The results of all plugin calls, from all threads.
#[derive(Default)]
struct Reported {
    /// The handle that holds each address. An address is in this map from the end of the ADD that returned it to the
    /// start of its DEL.
    held: Mutex<BTreeMap<IpAddr, String>>,
    adds: AtomicUsize,
    dels: AtomicUsize,
}

impl Reported {
    /// Calls ADD and DEL, which must succeed, until the flag `over` is set; omits the DEL for every third container.
    fn call(&self, lab: &Lab, caller: usize, over: &AtomicBool) {
        for round in 0.. {
            if over.load(Ordering::SeqCst) {
                return;
            }
            let container = format!("c{caller}-{round}-{}", self.adds.load(Ordering::SeqCst));
            let address = lab.add(&container).ok().address();
            self.adds.fetch_add(1, Ordering::SeqCst);
            let before = self.held.lock().unwrap().insert(address, format!("net1.{container}"));
            assert_eq!(before, None, "{address} was given twice");
            if round % 3 != 0 {
                // Remove the address from the map of addresses in use before calling DEL: as soon as DEL has run,
                // another container may get the address.
                self.held.lock().unwrap().remove(&address);
                lab.del(&container).ok();
                self.dels.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    /// Calls the plugin from several threads while `work` runs. After `work`, the assigned addresses must be exactly
    /// the ones that an ADD returned and no DEL released.
    fn while_calling<T>(lab: &Lab, work: impl FnOnce(&Self) -> T) -> T {
        let (reported, over) = (Self::default(), AtomicBool::new(false));
        let done = thread::scope(|scope| {
            for caller in 0..CALLERS {
                let (reported, over) = (&reported, &over);
                scope.spawn(move || {
                    // Set the flag `over` even after a panic, so that the threads that call the plugin end.
                    let _over = OnDrop(over);
                    reported.call(lab, caller, over);
                });
            }
            let _over = OnDrop(&over);
            work(&reported)
        });
        let reported = reported.held.into_inner().unwrap();
        assert_eq!(lab.held(), reported);
        lab.is_in_order();
        done
    }
}

struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn daemon_end_costs_no_call_when_asked_for() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        Reported::while_calling(&lab, |reported| {
            for round in 0..6 {
                let daemon = Daemon::start(&lab);
                let before = reported.adds.load(Ordering::SeqCst);
                sleep(Duration::from_millis(200 + round * 17));
                wait_until("an ADD has ended", || reported.adds.load(Ordering::SeqCst) > before);
                let ended = daemon.end();
                assert_eq!(ended.code, Some(0), "{ended:?}");
                assert!(!lab.socket().exists(), "the socket stays");
                // The plugins run without a daemon for 50 ms.
                sleep(Duration::from_millis(50));
            }
        });
    }
}

#[test]
fn daemon_end_costs_no_call_when_killed_at_any_moment() {
    let rounds = std::env::var("MARGAY_SERVE_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        Reported::while_calling(&lab, |reported| {
            for round in 0..rounds {
                let daemon = Daemon::start(&lab);
                let before = reported.adds.load(Ordering::SeqCst);
                sleep(Duration::from_millis(fastrand::u64(1..150)));
                daemon.kill();
                // After every fourth round, the test waits before it starts the next daemon.
                if round % 4 == 0 {
                    sleep(Duration::from_millis(fastrand::u64(1..100)));
                    assert!(reported.adds.load(Ordering::SeqCst) >= before);
                }
            }
            wait_until("enough calls", || {
                reported.adds.load(Ordering::SeqCst) > 10 && reported.dels.load(Ordering::SeqCst) > 5
            });
        });
    }
}

#[test]
fn daemon_and_plugins_are_killed_by_turns() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Some(Daemon::start(&lab));
        for round in 0..12 {
            let plugins: Vec<_> = (0..6).map(|number| lab.add(&format!("c{number}")).start()).collect();
            sleep(Duration::from_millis(fastrand::u64(0..60)));
            if round % 2 == 0 {
                daemon.take().unwrap().kill();
            }
            plugins.into_iter().for_each(|plugin| _ = plugin.kill());
            if round % 4 == 0 {
                daemon = Some(Daemon::start(&lab));
            }
            let dels: Vec<_> = (0..6).map(|number| lab.del(&format!("c{number}")).start()).collect();
            dels.into_iter().for_each(|del| _ = del.end().ok());
            lab.nothing_is_held();
            daemon.get_or_insert_with(|| Daemon::start(&lab));
        }
        sleep(Duration::from_secs(1));
        lab.nothing_is_held();
        lab.is_in_order();
    }
}

#[test]
fn daemon_start_removes_leftovers_of_killed_daemons() {
    let [killed, alive, starting] = [(); 3].map(|()| Lab::with_pool(ENGINES[0], POOL));
    let systemds = Lab::with_pool(ENGINES[0], POOL);
    let listener = UnixListener::bind(systemds.socket()).unwrap();
    listener.set_nonblocking(true).unwrap();
    let daemon = Daemon::start(&alive);
    Daemon::start(&killed).kill();
    let lock = killed.socket().with_extension("lock");
    Daemon::start(&starting).end().ok();
    assert!(!killed.socket().exists() && !lock.exists());
    assert!(systemds.socket().exists() && listener.accept().is_err(), "a connection would start a daemon");
    alive.add("c").ok().by_daemon();
    daemon.end().ok();
}
