//! Tests that commands print the same output with a daemon and without a daemon.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use nix::sys::signal::Signal;
use serde_json::json;
use wire::{Frame, FrameKind, Hello};

use crate::daemon::{Daemon, serves_again};
use crate::fake::{Fake, hello};
use crate::lab::{ENGINES, Lab};
use crate::programs::{Ended, Running, TEST_TIMEOUT, margay, run, signal, wait_until};

const POOL: &str = "10.81.0.0/24";

/// Returns the exit code, stdout and stderr of a command; the command's duration is left out.
fn said(ended: Ended) -> (Option<i32>, String, String) {
    (ended.code, ended.out, ended.err)
}

fn furnished(engine: &'static str) -> Lab {
    let lab = Lab::with_pool(engine, POOL);
    for number in 0..5 {
        lab.add(&format!("c{number}")).ok();
    }
    lab.del("c3").ok();
    lab.margay("reservation create routers 10.81.0.1 10.81.0.2").ok();
    lab
}

#[test]
fn commands_that_read_say_same_with_daemon() {
    for engine in ENGINES {
        let lab = furnished(engine);
        let address = lab.held().keys().next().unwrap().to_string();
        let commands = [
            "ipam show".to_owned(),
            "ipam show --show-blocks -o json".to_owned(),
            "ipam show --show-configuration".to_owned(),
            "ipam show --show-borrowed".to_owned(),
            "ipam show --forecast".to_owned(),
            format!("ipam show --ip {address}"),
            format!("ipam show --ip {address} -o yaml"),
            "ipam show --ip 10.81.0.200".to_owned(),
            "ipam show --ip 192.0.2.1".to_owned(),
            "ipam check".to_owned(),
            "ipam check -o json --show-all-ips".to_owned(),
            "ipam check --repair".to_owned(),
            format!("ipam history --ip {address}"),
            "ipam history --node node-1 -o json".to_owned(),
            "ipam map".to_owned(),
            "ipam explain --node node-1".to_owned(),
            "pool list".to_owned(),
            "pool list -o yaml".to_owned(),
            "pool create lab 10.99.0.0/24".to_owned(),
            "pool delete none".to_owned(),
            "reservation list".to_owned(),
            "gc --boot".to_owned(),
            "gc --netns".to_owned(),
            "store verify".to_owned(),
            "store upgrade --dry-run".to_owned(),
            "store restore /none".to_owned(),
        ];
        let without: Vec<_> = commands.iter().map(|command| said(lab.margay(command))).collect();
        let mut daemon = Daemon::start(&lab);
        for (command, without) in commands.iter().zip(without) {
            assert_eq!(said(lab.margay(command)), without, "{engine}: {command}");
        }
        daemon.runs();
        lab.add("after").ok().by_daemon();
    }
}

#[test]
fn commands_that_write_do_same_with_daemon() {
    for engine in ENGINES {
        let labs = [furnished(engine), furnished(engine)];
        let mut daemon = Daemon::start(&labs[1]);
        let commands = [
            "pool create six fd81::/112",
            "pool create sub 10.82.0.0/24 --gateway 10.82.0.1",
            "pool list",
            "reservation create more 10.81.0.9",
            "reservation delete routers",
            "reservation list",
            "ipam configure --help",
            "ipam release --ip 10.81.0.250",
            "gc --free --node node-1 --apply",
            "ipam show",
            "pool delete six",
            "pool delete sub",
            "store compact",
            "store verify",
            "ipam check",
        ];
        for command in commands {
            let [without, beside] = [0, 1].map(|at| labs[at].margay(command));
            let plain = |ended: Ended, lab: &Lab| {
                let (code, out, err) = said(ended);
                (code, out.replace(&lab.url(), "STORE"), err.replace(&lab.url(), "STORE"))
            };
            let [without, beside] = [plain(without, &labs[0]), plain(beside, &labs[1])];
            if command == "store compact" || command == "store verify" {
                // The output of some commands contains sizes, which can differ with and without a daemon.
                assert_eq!(beside.0, without.0, "{engine}: {command}: {beside:?}");
            } else {
                assert_eq!(beside, without, "{engine}: {command}");
            }
        }
        daemon.runs();
        assert_eq!(labs[0].held(), labs[1].held());
        labs[1].add("after").ok().by_daemon();
    }
}

#[test]
fn command_status_names_daemon() {
    for engine in ENGINES {
        let lab = furnished(engine);
        let daemon = Daemon::start(&lab);
        let status = lab.margay("store status -o json").ok();
        assert!(status.out.contains(&format!("{} (margay)", daemon.pid())), "{status:?}");
        daemon.end().ok();
        let status = lab.margay("store status").ok();
        assert!(status.out.contains("nobody"), "{status:?}");
    }
}

#[test]
fn commands_back_up_replace_and_move_store_of_daemon() {
    for engine in ENGINES {
        let lab = furnished(engine);
        let mut daemon = Daemon::start(&lab);
        let before = lab.held();
        let backup = lab.root().join("backup");
        lab.margay(&format!("store backup {}", backup.display())).ok();
        lab.add("lost").ok().by_daemon();
        lab.margay(&format!("store restore --replace {}", backup.display())).ok();
        assert_eq!(lab.held(), before);
        serves_again(&lab, "again", TEST_TIMEOUT / 6);
        // Migrate the store from sled to redb, or from redb to sled.
        let other = match engine {
            "sled" => format!("redb://{}", lab.root().join("moved").display()),
            _ => format!("sled://{}", lab.root().join("moved").display()),
        };
        run(margay(["migrate", &lab.url(), &other])).ok();
        lab.add("meanwhile").ok().by_daemon();
        run(margay(["migrate", &lab.url(), &other])).ok();
        run(margay(["migrate", &lab.url(), &other, "--finish"])).ok();
        let moved = run(margay(["--store", &other, "ipam", "show", "-o", "json"])).ok();
        let here = lab.margay("ipam show -o json").ok();
        assert_eq!(moved.json()["pools"], here.json()["pools"]);
        daemon.runs();
    }
}

#[test]
fn command_moves_store_into_one_of_daemon() {
    for engine in ENGINES {
        let lab = furnished(engine);
        let target = Lab::new(engine);
        // The target store of the migration has no keys yet.
        let mut daemon = Daemon::start(&target);
        run(margay(["migrate", &lab.url(), &target.url()])).ok();
        let refused = target.add("early").run().failed();
        assert!(!refused.out.contains("daemon"), "{refused:?}");
        run(margay(["migrate", &lab.url(), &target.url(), "--finish"])).ok();
        target.add("c9").ok().by_daemon();
        assert_eq!(target.held().len(), lab.held().len() + 1);
        daemon.runs();
        target.is_in_order();
    }
}

#[test]
fn watch_sees_what_goes_through_daemon() {
    for engine in ENGINES {
        let lab = furnished(engine);
        let daemon = Daemon::start(&lab);
        let mut command: Command =
            margay(["--store", &lab.url(), "watch", "--count", "4", "--for", "50s", "-o", "json"]);
        let notes = lab.root().join("notes");
        command.stdout(Stdio::piped()).stderr(fs::File::create(&notes).unwrap());
        let watch = Running::start(command, "");
        wait_until("the watch begins", || fs::read_to_string(&notes).unwrap().contains("watching"));
        let add = lab.add("seen").ok().by_daemon();
        lab.del("seen").ok().by_daemon();
        lab.held();
        // The watch continues after the daemon is killed.
        daemon.kill();
        let alone = lab.add("alone").ok();
        let _daemon = Daemon::start(&lab);
        let again = lab.add("again").ok().by_daemon();
        let watched = watch.end().ok();
        let lines: Vec<serde_json::Value> =
            watched.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let seen: Vec<_> = lines.iter().map(|line| (line["event"].clone(), line["address"].clone())).collect();
        let expected = [("assigned", &add), ("released", &add), ("assigned", &alone), ("assigned", &again)];
        let expected: Vec<_> =
            expected.iter().map(|(event, of)| (json!(event), json!(of.address().to_string()))).collect();
        assert_eq!(seen, expected, "{watched:?}");
    }
}

#[test]
fn watch_goes_on_without_daemon_and_beside_other_version() {
    let lab = furnished("redb");
    let daemon = Daemon::start(&lab);
    let lines = lab.root().join("lines");
    let mut command = margay(["--store", &lab.url(), "watch", "--count", "4", "--for", "10s", "-o", "json"]);
    let notes = lab.root().join("notes");
    command.stdout(fs::File::create(&lines).unwrap()).stderr(fs::File::create(&notes).unwrap());
    let watch = Running::start(command, "");
    let seen = |count: usize| {
        let until = Instant::now() + patient(TEST_TIMEOUT / 10);
        while fs::read_to_string(&lines).unwrap().lines().count() < count && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        let lines = fs::read_to_string(&lines).unwrap();
        assert_eq!(lines.lines().count(), count, "{lines}");
    };
    wait_until("the watch begins", || fs::read_to_string(&notes).unwrap().contains("watching"));
    lab.add("first").ok().by_daemon();
    seen(1);
    daemon.kill();
    thread::sleep(Duration::from_millis(500));
    lab.add("alone").ok();
    seen(2);
    let folder = lab.store.clone();
    let upgraded = Fake::listen(&lab.socket(), move |mut stream| {
        let hello = Hello { program: "99.0.0".to_owned(), ..hello(&folder) };
        let _ = stream.write_all(&Frame::new(FrameKind::Hello, &hello).unwrap().to_bytes());
    });
    lab.add("beside").ok();
    seen(3);
    drop(upgraded);
    let mut daemon = Daemon::start(&lab);
    lab.add("again").ok().by_daemon();
    watch.end().ok();
    seen(4);
    daemon.runs();
    let notes = fs::read_to_string(&notes).unwrap();
    assert!(notes.lines().count() < 4, "{notes}");
}

#[test]
fn cursor_is_of_store_behind_daemon() {
    let lab = furnished("redb");
    let _daemon = Daemon::start(&lab);
    let backup = lab.root().join("backup");
    lab.margay(&format!("store backup {}", backup.display())).ok();
    let cursor = lab.root().join("cursor");
    let watch = format!("watch --exec /bin/cat --cursor {} --for 1s", cursor.display());
    lab.add("lost").ok().by_daemon();
    lab.margay(&watch).ok();
    lab.margay(&format!("store restore --replace {}", backup.display())).ok();
    for number in 0..9 {
        lab.add(&format!("n{number}")).ok();
    }
    let refused = lab.margay(&watch).failed();
    assert!(refused.err.contains("is about another store") && refused.out.is_empty(), "{refused:?}");
    fs::remove_file(&cursor).unwrap();
    let anew = lab.margay(&watch).ok();
    assert!(anew.out.starts_with(r#"{"event":"gap","after_revision":0,"#), "{anew:?}");
}

#[test]
fn cursor_is_refused_when_next_daemon_has_older_state() {
    let lab = furnished("redb");
    let path = |name: &str| lab.root().join(name);
    assert!(Command::new("cp").arg("-a").args([&lab.store, &path("older")]).status().unwrap().success());
    let daemon = Daemon::start(&lab);
    let mut command = margay(["--store", &lab.url(), "watch", "--for", "4s", "-o", "json"]);
    command.stdout(fs::File::create(path("lines")).unwrap()).stderr(fs::File::create(path("notes")).unwrap());
    let watch = Running::start(command, "");
    let has = |name: &str, text: &str| fs::read_to_string(path(name)).unwrap().contains(text);
    wait_until("the watch begins", || has("notes", "watching"));
    lab.add("lost").ok().by_daemon();
    wait_until("the event is printed", || has("lines", "assigned"));
    signal(watch.pid(), Signal::SIGSTOP);
    daemon.kill();
    fs::rename(&lab.store, path("newer")).unwrap();
    fs::rename(path("older"), &lab.store).unwrap();
    let _daemon = Daemon::start(&lab);
    signal(watch.pid(), Signal::SIGCONT);
    watch.end().failed();
    assert!(has("notes", "the watch begins after revision"), "{}", fs::read_to_string(path("notes")).unwrap());
}
