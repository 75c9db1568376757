//! Tests that the daemon hands the store over to other processes, and that systemd's watchdog kills a daemon that
//! hangs.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use conformance::patient;
use nix::sys::signal::Signal;
use wire::FROZEN_TIMEOUT;

use crate::daemon::{Daemon, serves_again};
use crate::lab::{ENGINES, Lab};
use crate::programs::{TEST_TIMEOUT, signal, wait_until};

const POOL: &str = "10.77.0.0/24";

#[test]
fn older_program_gets_lock_while_calls_wait() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        lab.add("before").ok().by_daemon();
        let mut waiting = Vec::new();
        for round in 0..5 {
            let begun = Instant::now();
            let started = lab.held_open(async |_| {
                assert!(begun.elapsed() < patient(Duration::from_secs(1)), "the lock came after {:?}", begun.elapsed());
                let calls: Vec<_> = (0..4).map(|number| lab.add(&format!("c{round}-{number}")).start()).collect();
                sleep(Duration::from_millis(700));
                calls
            });
            waiting.extend(started);
        }
        for call in waiting {
            let add = call.end().ok().by_daemon();
            assert!(add.took >= Duration::from_millis(600), "it waited for the lock: {add:?}");
        }
        assert_eq!(lab.held().len(), 21);
        lab.add("after").ok().by_daemon();
        daemon.runs();
    }
}

#[test]
fn older_programs_in_row_starve_no_call() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        let over = AtomicBool::new(false);
        let opened = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        lab.held();
                        opened.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            // The test keeps calling the plugin until programs that cannot use the daemon have opened the store more
            // than ten times.
            let done: Vec<_> = (0..200)
                .take_while(|number| *number < 10 || opened.load(Ordering::SeqCst) <= 10)
                .map(|number| {
                    let container = format!("c{number}");
                    (lab.add(&container).run(), lab.del(&container).run())
                })
                .collect();
            over.store(true, Ordering::SeqCst);
            for (add, del) in done {
                assert!(add.clone().ok().by_daemon().took < patient(Duration::from_secs(10)), "{add:?}");
                del.ok().by_daemon();
            }
        });
        assert!(opened.load(Ordering::SeqCst) > 10, "{opened:?}");
        daemon.runs();
        lab.nothing_is_held();
    }
}

#[test]
fn hanging_daemon_is_named() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let daemon = Daemon::start(&lab);
        daemon.signal(Signal::SIGSTOP);
        let show = lab.margay("--lock-timeout 2s ipam show").failed();
        assert!(show.err.contains(&format!("{} (margay)", daemon.pid())), "{show:?}");
        assert!(show.took < patient(Duration::from_secs(10)), "{show:?}");
        let status = lab.margay("--lock-timeout 1s store status").failed();
        assert!(status.out.contains(&daemon.pid().to_string()), "{status:?}");
        daemon.signal(Signal::SIGCONT);
        serves_again(&lab, "c1", patient(TEST_TIMEOUT / 6));
        daemon.end().ok();
    }
}

#[test]
fn hanging_daemon_spoils_nothing_when_it_resumes() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let mut daemon = Daemon::start(&lab);
        for round in 0..3 {
            let adds: Vec<_> = (0..4).map(|number| lab.add(&format!("c{round}-{number}")).start()).collect();
            sleep(Duration::from_millis(round * 7));
            daemon.signal(Signal::SIGSTOP);
            // The plugins stop waiting for the frozen daemon before the test resumes the daemon.
            sleep(FROZEN_TIMEOUT + Duration::from_millis(400));
            daemon.signal(Signal::SIGCONT);
            adds.into_iter().for_each(|add| _ = add.end().ok());
        }
        assert_eq!(lab.held().len(), 12);
        lab.is_in_order();
        for round in 0..3 {
            let dels: Vec<_> = (0..4).map(|number| lab.del(&format!("c{round}-{number}")).start()).collect();
            sleep(Duration::from_millis(round * 7));
            daemon.signal(Signal::SIGSTOP);
            sleep(FROZEN_TIMEOUT + Duration::from_millis(400));
            daemon.signal(Signal::SIGCONT);
            dels.into_iter().for_each(|del| _ = del.end().ok());
        }
        lab.nothing_is_held();
        daemon.runs();
    }
}

/// A stand-in for systemd with a watchdog timeout of 3 s.
struct Supervisor {
    path: PathBuf,
    said: Arc<Mutex<Vec<String>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

const WATCHDOG: Duration = Duration::from_secs(3);

impl Supervisor {
    fn listen(folder: &Path) -> (Self, UnixDatagram) {
        let path = folder.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let (said, over) = (Arc::default(), Arc::default());
        (Self { path, said, over, thread: None }, socket)
    }

    /// Kills the supervised process 3 s after its last notification.
    fn supervise(&mut self, socket: UnixDatagram, pid: u32) {
        let (said, over) = (Arc::clone(&self.said), Arc::clone(&self.over));
        self.thread = Some(thread::spawn(move || {
            socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let mut heard = Instant::now();
            while !over.load(Ordering::SeqCst) {
                let mut bytes = [0; 1000];
                if let Ok(read) = socket.recv(&mut bytes) {
                    let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
                    if text.contains("WATCHDOG=1") {
                        heard = Instant::now();
                    }
                    said.lock().unwrap().extend(text.lines().map(str::to_owned));
                }
                if heard.elapsed() > WATCHDOG {
                    said.lock().unwrap().push("killed".to_owned());
                    signal(pid, Signal::SIGKILL);
                    return;
                }
            }
        }));
    }

    fn count(&self, what: &str) -> usize {
        self.said.lock().unwrap().iter().filter(|line| *line == what).count()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn hanging_daemon_leaves_add_within_five_seconds() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, POOL);
        let (mut supervisor, socket) = Supervisor::listen(lab.root());
        let mut command = Command::new("sh");
        let script = "WATCHDOG_PID=$$ exec \"$0\" --store \"$1\" serve";
        command.args(["-c", script, env!("CARGO_BIN_EXE_margay"), &lab.url()]).env_clear();
        command.env("NOTIFY_SOCKET", &supervisor.path).env("WATCHDOG_USEC", "3000000").stdin(Stdio::null());
        let mut daemon = Daemon::start_as(&lab, command);
        supervisor.supervise(socket, daemon.pid());
        wait_until("it is ready", || supervisor.count("READY=1") == 1);
        lab.add("before").ok().by_daemon();
        sleep(WATCHDOG + Duration::from_secs(1));
        daemon.runs();
        assert!(supervisor.count("WATCHDOG=1") >= 2, "{:?}", supervisor.said);
        assert_eq!(supervisor.count("killed"), 0);
        daemon.signal(Signal::SIGSTOP);
        let add = lab.add("c1").ok();
        assert!(add.took < patient(Duration::from_secs(5)), "{add:?}");
        assert_eq!(supervisor.count("killed"), 1, "{:?}", supervisor.said);
        daemon.wait();
        assert_eq!(lab.held().len(), 2);
        lab.is_in_order();
        // The stand-in for systemd does not restart the killed daemon, so the test starts another daemon.
        let _daemon = Daemon::start(&lab);
        lab.add("after").ok().by_daemon();
    }
}

#[test]
fn yield_announcement_alone_costs_others_little() {
    let lab = Lab::with_pool("redb", POOL);
    let mut daemon = Daemon::start(&lab);
    // Clients announce repeatedly that they need the store, but never open the store.
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                if let Some(mut connection) = crate::daemon::connect(&lab) {
                    while !over.load(Ordering::SeqCst) && connection.ask_to_yield().is_ok() {
                        sleep(Duration::from_millis(1));
                    }
                }
            }
        });
        let adds: Vec<_> = (0..5).map(|number| lab.add(&format!("c{number}")).run()).collect();
        over.store(true, Ordering::SeqCst);
        adds.into_iter().for_each(|add| assert!(add.ok().by_daemon().took < patient(Duration::from_secs(5))));
    });
    daemon.runs();
    assert_eq!(lab.held().len(), 5);
}
