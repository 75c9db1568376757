//! Tests `margay conformance` on missing, empty, filled and unusable stores of all kinds.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Lab, TEST_TIMEOUT, margay};
use conformance::patient;
use datastore::{Create, Location, OpenStore};
use kv::{Kv, Range, StoreExt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Opens a store, creates it if necessary, and runs `work`.
fn with_store<T>(location: &Location, work: impl AsyncFnOnce(&OpenStore) -> T) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let open = datastore::open(location, &Create::IfMissing.with_wait(TEST_TIMEOUT)).await.unwrap();
        let done = work(&open).await;
        open.close().await.unwrap();
        done
    })
}

fn keys(location: &Location) -> Vec<Kv> {
    with_store(location, async |open| open.store().list(Range::All).await.unwrap().kvs)
}

/// Runs `margay conformance` on a store with further arguments, which are separated by spaces.
fn judge(location: &Location, args: &str) -> crate::common::Done {
    let words = args.split(' ').filter(|word| !word.is_empty()).map(str::to_owned);
    margay(["conformance".to_owned(), location.to_string()].into_iter().chain(words))
}

#[test]
fn conformance_table_has_line_for_each_case_and_summary() {
    let run = margay(["conformance", "memory:", "--case", "R"]);
    assert_eq!((run.code, run.err.as_str()), (0, "store: memory:\nnote: each case gets a new store\n"), "{}", run.out);
    let lines: Vec<&str> = run.out.lines().collect();
    assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), ["CASE", "RULE", "RESULT", "SECONDS"]);
    assert!(lines[1].starts_with("R01_fresh_store") && lines[1].contains(" R1 ") && lines[1].contains(" passed "));
    let reopens = lines.iter().find(|line| line.starts_with("R10_")).unwrap();
    assert!(reopens.contains(" ignored "), "{reopens}");
    assert!(run.out.contains("\nignored, since this environment cannot open a store again:\n  R10"), "{}", run.out);
    let summary = lines.last().unwrap();
    assert!(summary.contains(" passed, 0 failed, ") && summary.contains(" ignored in "), "{summary}");
    assert!(lines.iter().all(|line| line.len() <= 80), "{}", run.out);
}

#[test]
fn conformance_json_has_name_rule_result_and_reason() {
    for format in [["--report", "json"], ["-o", "json"]] {
        let run = margay(["conformance", "memory:", "--case", "R"].into_iter().chain(format)).json();
        let cases = run["cases"].as_array().unwrap();
        let fields: Vec<&String> = cases[0].as_object().unwrap().keys().collect();
        assert_eq!(fields, ["name", "reason", "result", "rule", "seconds"]);
        let reopened = cases.iter().find(|case| case["name"] == "R10_revision_after_reopen").unwrap();
        assert_eq!((&reopened["rule"], &reopened["result"]), (&"R7".into(), &"ignored".into()));
        assert_eq!(reopened["reason"], "this environment cannot open a store again");
    }
    let passed = margay(["conformance", "memory:", "--case", "B01", "--report", "json"]).json();
    assert_eq!((&passed["cases"][0]["result"], &passed["cases"][0]["reason"]), (&"passed".into(), &().into()));
}

#[test]
fn conformance_junit_wins_over_general_output() {
    let run = margay(["conformance", "memory:", "--case", "R0", "--report", "junit", "-o", "json"]);
    assert_eq!(run.code, 0);
    assert!(run.out.starts_with("<?xml "), "{}", run.out);
    assert!(run.out.contains("<testcase name=\"R01_fresh_store\" classname=\"conformance.Revisions\""), "{}", run.out);
    assert!(run.err.ends_with(" s\n") && run.err.contains(" passed, 0 failed, 0 ignored in "), "{}", run.err);
}

#[test]
fn conformance_store_is_made_and_removed_when_missing() {
    for lab in Lab::each() {
        fs::create_dir(lab.folder().join("some")).unwrap();
        let run = judge(&lab.location, "--case B");
        assert_eq!(run.code, 0, "{}{}", run.out, run.err);
        assert!(run.err.contains("there is no store yet"), "{}", run.err);
        assert!(run.out.contains(" passed, 0 failed, 0 ignored in "), "{}", run.out);
        assert_eq!(fs::read_dir(lab.folder().join("some")).unwrap().count(), 0);
    }
}

#[test]
fn conformance_keeps_empty_folder() {
    for lab in Lab::each() {
        let path = lab.location.path().unwrap();
        fs::create_dir_all(path).unwrap();
        assert_eq!(judge(&lab.location, "--case R10").code, 0);
        assert_eq!(fs::read_dir(path).unwrap().count(), 0);
    }
}

#[test]
fn conformance_runs_only_shared_cases_beside_foreign_keys() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        lab.assign("net1", "c1");
        let before = keys(&lab.location);
        assert!(!before.is_empty());
        let run = judge(&lab.location, "--case H0");
        assert_eq!(run.code, 0, "{}{}", run.out, run.err);
        assert!(run.err.contains("note: it holds keys: only cases that can share it run, below /margay-conformance/"));
        assert!(
            run.out.contains("\nignored, since it needs a store that no other client uses:\n  H04 "),
            "{}",
            run.out
        );
        assert!(run.out.contains("\n5 passed, 0 failed, "), "{}", run.out);
        assert_eq!(keys(&lab.location), before);
        let nothing = judge(&lab.location, "--case H07");
        assert_eq!(nothing.code, 1, "a run in which nothing ran must not look well: {}", nothing.out);
        assert!(nothing.err.ends_with("error: no case could run on this store\n"), "{}", nothing.err);
    }
}

#[test]
fn conformance_runs_all_cases_when_store_has_no_keys() {
    for lab in Lab::each() {
        assert_eq!(keys(&lab.location), []);
        let run = judge(&lab.location, "--case 0");
        assert_eq!(run.code, 0, "{}{}", run.out, run.err);
        assert!(run.err.contains("note: it holds no key: "), "{}", run.err);
        assert!(run.out.contains("\nignored, since this environment has no new stores:\n  R01\n"), "{}", run.out);
        assert_eq!(keys(&lab.location), []);
    }
}

#[test]
fn conformance_erases_only_when_place_was_typed_out() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        let before = keys(&lab.location);
        let path = lab.location.path().unwrap().display().to_string();
        for wrong in ["yes", "localhost", &path[1..], &lab.location.to_string()] {
            let said = judge(&lab.location, &format!("--case H0 --erase-everything {wrong}")).failure();
            assert!(said.contains("nothing was deleted\nhint: "), "{said}");
            assert!(said.ends_with(&format!("use: --erase-everything {path}\n")), "{said}");
            assert_eq!(keys(&lab.location), before);
        }
        let run = judge(&lab.location, &format!("--case H0 --erase-everything {path}"));
        assert_eq!(run.code, 0, "{}{}", run.out, run.err);
        assert!(run.out.contains("\n9 passed, 0 failed, 0 ignored in "), "{}", run.out);
        assert_eq!(keys(&lab.location), []);
    }
    let said = margay(["conformance", "memory:", "--erase-everything", "memory"]).failure();
    assert!(said.starts_with("error: memory: has nothing to erase\n"), "{said}");
}

/// Checks that `margay conformance` refuses to run with one error line and at most one hint, and returns its stderr.
fn refused(location: &str, args: &[&str]) -> String {
    let started = Instant::now();
    let run = margay(["conformance", location].iter().chain(args).copied());
    assert_eq!((run.code, run.out.as_str()), (1, ""), "{location}: {}", run.err);
    let lines: Vec<&str> = run.err.lines().collect();
    assert!(lines[0].starts_with("error: ") && lines.len() <= 2, "{location}: {}", run.err);
    assert!(lines.get(1).is_none_or(|hint| hint.starts_with("hint: ")), "{location}: {}", run.err);
    assert!(!run.err.contains("hunter2"), "{location}: {}", run.err);
    assert!(started.elapsed() < patient(TEST_TIMEOUT), "{location}: {:?}", started.elapsed());
    run.err
}

#[test]
fn conformance_refuses_bad_urls_and_filters() {
    let cases: [(&str, &[&str], &str); 9] = [
        ("postgres://x/y", &[], "postgres:// is not a kind of store\nhint: use a store URL of one of these forms: "),
        ("/var/lib/x", &[], "did you mean sled:///var/lib/x or redb:///var/lib/x?"),
        ("sled://relative/path", &[], "write the URL with three slashes"),
        ("etcd://root:hunter2@a:2379", &[], "has a user or a password in it\nhint: remove user and password"),
        ("sled://root:hunter2@a/b", &[], "has a user or a password in it"),
        ("etcd://", &[], "no etcd endpoints"),
        ("memory:", &["--case", "Q99"], "no case has \"Q99\" in its name\nhint: use part of a case name, such as"),
        (
            "memory:",
            &["--store", "sled:///x"],
            "without --store\nhint: name the store as an argument: margay conformance sled:///path",
        ),
        ("sled:///no/such/folder/store", &[], "create the parent folder first"),
    ];
    for (url, args, expected) in cases {
        let said = refused(url, args);
        assert!(said.contains(expected), "{url}: {said}");
    }
}

#[test]
fn conformance_refuses_missing_url_as_wrong_usage() {
    let run = margay(["conformance"]);
    assert_eq!(run.code, 1);
    assert!(run.err.contains("<URL>"), "{}", run.err);
    let help = margay(["conformance", "--help"]);
    assert!(
        help.out.contains("--erase-everything <HOST>") && help.out.contains("Examples:\n  margay "),
        "{}",
        help.out
    );
}

#[test]
fn conformance_leaves_folder_alone_when_it_is_no_store() {
    for lab in Lab::each() {
        let url = lab.location.to_string();
        let path = lab.location.path().unwrap();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "a file").unwrap();
        refused(&url, &[]);
        assert_eq!(fs::read_to_string(path).unwrap(), "a file");
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
        fs::write(path.join("notes.txt"), "notes").unwrap();
        refused(&url, &[]);
        assert_eq!(fs::read_dir(path).unwrap().count(), 1);
    }
}

#[test]
fn conformance_leaves_store_alone_when_format_is_newer() {
    for lab in Lab::each() {
        assert_eq!(keys(&lab.location), []);
        let identity = lab.location.path().unwrap().join("store.id");
        let engine = lab.location.to_string().split(':').next().unwrap().to_owned();
        let later = format!("engine {engine}\nformat 2\nsomething else\n");
        fs::write(&identity, &later).unwrap();
        let said = refused(&lab.location.to_string(), &[]);
        assert!(said.contains("has format 2") && said.contains("a newer margay made it"), "{said}");
        assert_eq!(fs::read_to_string(&identity).unwrap(), later);
    }
}

#[test]
fn conformance_waits_then_refuses_when_store_is_in_use() {
    for lab in Lab::each() {
        let url = lab.location.to_string();
        let said = with_store(&lab.location, async |_| {
            std::thread::scope(|scope| scope.spawn(|| refused(&url, &[])).join().unwrap())
        });
        assert!(said.contains("the store is in use by another process"), "{said}");
        assert!(said.contains("\nhint: end the program that has the store open"), "{said}");
    }
}

/// Starts `margay conformance` as a process, and returns the process and its stdout.
fn start(location: &Location) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_margay"))
        .args(["conformance", &location.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    (child, out)
}

/// Sends a signal to `margay conformance` after some cases have run, and returns its exit code, stdout and stderr.
fn interrupted(location: &Location, signal: Signal) -> (Option<i32>, String, String) {
    let (mut child, mut out) = start(location);
    let mut text = String::new();
    while !text.contains("B03_") {
        assert!(out.read_line(&mut text).unwrap() > 0, "it ended too soon: {text}");
    }
    kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
    out.read_to_string(&mut text).unwrap();
    let end = Instant::now() + patient(Duration::from_secs(60));
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < end, "it goes on: {text}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (status.code(), text, err)
}

fn assert_interrupted(done: &(Option<i32>, String, String)) {
    let (code, out, err) = done;
    assert_eq!(*code, Some(130), "{out}{err}");
    assert!(out.contains("\nignored, since the run was stopped:\n"), "{out}");
    assert!(err.ends_with("error: the run was interrupted\n"), "{err}");
}

#[test]
fn conformance_removes_its_stores_when_interrupted() {
    for lab in Lab::each() {
        fs::create_dir(lab.folder().join("some")).unwrap();
        assert_interrupted(&interrupted(&lab.location, Signal::SIGINT));
        assert!(!Path::new(lab.location.path().unwrap()).exists());
    }
}

#[test]
fn conformance_leaves_nothing_beside_others_when_interrupted() {
    for lab in Lab::each() {
        lab.margay("pool create main 10.65.0.0/24").answer();
        let before = keys(&lab.location);
        assert_interrupted(&interrupted(&lab.location, Signal::SIGTERM));
        assert_eq!(keys(&lab.location), before);
    }
}
