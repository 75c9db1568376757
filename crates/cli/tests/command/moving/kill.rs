//! Tests that imports and migrations can be killed at any moment and run again.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use datastore::Location;

use crate::moving::fill::{Places, assign, calicos};
use crate::store::content::{Content, blocks, content, write};

const ROUNDS: u32 = 12;
const BLOCKS: usize = 600;

fn start(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(args).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a `margay` command repeatedly, and kills it a little later each time, until a run is complete. After each kill,
/// the function `on_kill` checks the stores. Returns how often the command was killed.
fn kill_until_done(args: &[&str], whole: Duration, on_kill: impl Fn()) -> u32 {
    for round in 1.. {
        let mut child = start(args);
        thread::sleep(whole.mul_f64(f64::from(round) / f64::from(ROUNDS)));
        child.kill().unwrap();
        let done = child.wait_with_output().unwrap();
        if done.status.success() {
            return round - 1;
        }
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!said.contains("error"), "{said}");
        on_kill();
    }
    0
}

/// Checks that a store that is only partly filled by an import or migration refuses to assign addresses. A store
/// without an import lock must be empty or have all documents of the import or migration.
fn refuses(to: &Location, all: &Content) {
    if to.path().is_some_and(|path| !path.join("store.id").exists()) {
        return;
    }
    let keys = content(to);
    if keys.contains_key(&b"/margay/v1/migration"[..]) {
        let said = assign(to, "early").unwrap_err().to_string();
        assert!(said.contains("not finished"), "{said}");
    } else {
        assert!(keys.is_empty() || keys == *all, "{} keys of {} without a mark", keys.len(), all.len());
    }
}

fn measure(args: &[&str]) -> Duration {
    let began = Instant::now();
    let done = start(args).wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    began.elapsed()
}

#[test]
fn migration_goes_on_where_it_was_killed() {
    let places = Places::with_etcd();
    let from = places.sled("from");
    calicos(&from);
    write(&from, blocks(BLOCKS));
    let expected = content(&from);
    let url = from.to_string();
    let trial = places.redb("trial").to_string();
    let whole = measure(&["migrate", &url, &trial]);
    for to in [places.redb("to"), places.etcd()] {
        let target = to.to_string();
        let killed = kill_until_done(&["migrate", &url, &target], whole, || refuses(&to, &expected));
        assert!(killed > 2, "killed {killed} times only");
        assert_eq!(measure(&["migrate", &url, &target, "--finish"]).as_secs() / 60, 0);
        let moved = content(&to);
        assert!(moved == expected, "{} keys of {}", moved.len(), expected.len());
    }
}

#[test]
fn import_goes_on_where_it_was_killed() {
    let places = Places::new();
    let from = places.redb("from");
    calicos(&from);
    write(&from, blocks(BLOCKS));
    let expected = content(&from);
    let file = places.path("export");
    let file = file.to_str().unwrap();
    measure(&["--store", &from.to_string(), "export", file]);
    let trial = places.sled("trial").to_string();
    let whole = measure(&["--store", &trial, "import", file]);
    for to in [places.sled("to"), places.redb("other")] {
        let target = to.to_string();
        let killed = kill_until_done(&["--store", &target, "import", file], whole, || refuses(&to, &expected));
        assert!(killed > 2, "killed {killed} times only");
        let moved = content(&to);
        assert!(moved == expected, "{} keys of {}", moved.len(), expected.len());
    }
}
