//! Tests that a command killed at any moment leaves an intact store, and that running the command again completes its
//! work.

use std::thread;
use std::time::Instant;

use datastore::Location;

use crate::common::margay;
use crate::conditions::commands::{COMMANDS, Command, Kind};
use crate::conditions::ground::{Ground, content, copy, process, run};

/// Number of times that each command is killed on each engine.
const ROUNDS: u32 = 4;

/// Commands for which other test files contain the kill tests, each with the name of the file.
const ELSEWHERE: &[(&str, &str)] = &[
    ("import", "moving/kill.rs, with more in it, and on etcd"),
    ("migrate", "moving/kill.rs"),
    ("store backup", "store/kill.rs: the file is there in full or not at all"),
    ("ipam check", "check/kill.rs, with damage to repair"),
    ("gc", "it frees as `ipam release` does"),
];

/// Restores the store of a command to the state before the command's first run.
fn restore_ground(ground: &Ground, command: &Command, place: &Location) {
    match command.kind {
        Kind::Fills => _ = std::fs::remove_dir_all(ground.path("empty")),
        _ => copy(&ground.path("kept"), place.path().unwrap()),
    }
}

fn check(ground: &Ground, command: &Command, place: &Location) {
    let url = place.to_string();
    for verb in [&["ipam", "check"][..], &["store", "verify"]] {
        let done = margay(["--store", &url, "--cni-conf-dir", "/nowhere"].iter().chain(verb));
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{}: {}{}", command.words(), done.out, done.err);
    }
    assert!(ground.path("kept").exists());
}

#[test]
fn killed_command_is_finished_by_next() {
    thread::scope(|scope| {
        for ground in Ground::each() {
            scope.spawn(move || kill_all(&ground));
        }
    });
}

fn kill_all(ground: &Ground) {
    copy(ground.folder(), &ground.path("kept"));
    let changing = COMMANDS.iter().filter(|one| one.kind != Kind::Reads);
    let (mut killed, mut rounds) = (0, 0);
    for command in changing.filter(|one| !ELSEWHERE.iter().any(|(name, _)| *name == one.name)) {
        let place = ground.place_for(command);
        let args = ground.args(command, &place, 0);
        restore_ground(ground, command, &place);
        let began = Instant::now();
        let done = run(&args);
        let whole = began.elapsed();
        assert_eq!(done.code, 0, "{}: {}", command.words(), done.err);
        let (_, wanted) = content(&place);
        for round in 0..ROUNDS {
            restore_ground(ground, command, &place);
            let mut child = process(&[], env!("CARGO_BIN_EXE_margay"), &args).spawn().unwrap();
            // Each test round kills the command at a different point of its measured duration.
            thread::sleep(whole.mul_f64((f64::from(round) + fastrand::f64()) / f64::from(ROUNDS)));
            child.kill().unwrap();
            killed += u32::from(!child.wait().unwrap().success());
            rounds += 1;
            let again = run(&args);
            assert!(!again.err.contains("damaged"), "{}: {}", command.words(), again.err);
            check(ground, command, &place);
            assert_eq!(content(&place).1, wanted, "{}, round {round}: {}", command.words(), again.err);
        }
    }
    assert!(killed > rounds / 3, "only {killed} of {rounds} were killed in time");
}
