//! Tests `margay watch --cursor`: a run continues after the events of the previous run, or reports why it cannot
//! continue.

use std::fs;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::{Create, Location};
use futures::{StreamExt, stream};
use kv::{Store, StoreExt};
use nix::sys::signal::Signal;

use crate::common::TEST_TIMEOUT;
use crate::hooks::{Hook, start, start_watching, stores, wait_for};
use crate::moving::fill::{Places, assign, at, calicos, release};
use crate::store::content::with_store;
use crate::support::send_signal;

#[test]
fn cursor_repeats_no_state_when_program_is_slow() {
    let places = Places::with_etcd();
    let location = places.etcd();
    let url = places.etcd.as_ref().unwrap().url();
    // The hook program compacts etcd's whole history in its first two runs after the file `hook.ready` exists.
    let hook = Hook::new(&format!(
        "n=$(cat \"$0.n\" 2>/dev/null || echo 0)
        if [ \"$n\" -lt 2 ] && [ -e \"$0.ready\" ]; then
            echo $((n + 1)) >\"$0.n\"
            rev=$(etcdctl --endpoints {url} put /other x -w json | jq .header.revision)
            etcdctl --endpoints {url} compact \"$rev\" >/dev/null
        fi"
    ));
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    hook.catch_up(&location);
    calicos(&location);
    with_store(&location, Create::Never, async |open| {
        let newest = open.store().put("/other", "x").await.unwrap();
        open.store().compact(newest).await.unwrap();
    });
    fs::write(hook.folder.path().join("hook.ready"), "").unwrap();
    let seen = hook.folder.path().join("seen");
    fs::write(&seen, "").unwrap();
    let mut watcher = start(&hook, &location);
    wait_for(&seen, 1);
    assign(&location, "c1").unwrap();
    let until = Instant::now() + patient(TEST_TIMEOUT);
    while !fs::read_to_string(&seen).unwrap().contains("\"assigned\"") && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
    watcher.kill().unwrap();
    watcher.wait().unwrap();
    let words = hook.words();
    assert_eq!(words.iter().filter(|word| *word == "gap -").count(), 1);
    assert_eq!([words.first(), words.last()], [Some(&"gap -".to_owned()), Some(&"assigned c1".to_owned())]);
    assert_eq!(words.len(), 244, "242 addresses were in use");
}

#[test]
fn cursor_count_ends_behind_whole_revision_or_list() {
    let places = Places::new();
    let location = places.redb("a");
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    let hook = Hook::new("");
    let args = hook.args();
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--count", "1"]).collect();
    for container in ["c1", "c2"] {
        assign(&location, container).unwrap();
    }
    assert_eq!(at(&location, &args).code, 0);
    assert_eq!(hook.words(), ["gap -", "held c1", "held c2"]);
    release(&location, "c1").unwrap();
    assign(&location, "c3").unwrap();
    for expected in ["released c1", "assigned c3"] {
        assert_eq!(at(&location, &args).code, 0);
        assert_eq!(hook.words(), [expected]);
    }
}

#[test]
fn cursor_watch_is_read_while_receiver_works() {
    let places = Places::with_etcd();
    let location = places.etcd();
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    let hook = Hook::new(
        "if rm \"$0.slow\" 2>/dev/null; then : >\"$0.busy\"; while [ ! -e \"$0.go\" ]; do sleep 0.05; done; fi",
    );
    hook.catch_up(&location);
    hook.seen();
    let path = |name: &str| hook.folder.path().join(name);
    fs::write(path("hook.slow"), "").unwrap();
    let mut watcher = start_watching(&hook, &location);
    assign(&location, "c1").unwrap();
    let until = Instant::now() + patient(TEST_TIMEOUT);
    while !path("hook.busy").exists() && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    // The test makes more changes than etcd buffers for an unread watch, but fewer than `margay watch` buffers itself.
    with_store(&location, Create::Never, async |open| {
        let store = open.store();
        let puts = (0..3000).map(|number| store.put(format!("/calico/ipam/v2/handle/{number}"), vec![b'x'; 2000]));
        let done: Vec<_> = stream::iter(puts).buffer_unordered(64).collect().await;
        let newest = done.into_iter().map(Result::unwrap).max().unwrap();
        thread::sleep(Duration::from_millis(500));
        store.compact(newest).await.unwrap();
    });
    fs::write(path("hook.go"), "").unwrap();
    assign(&location, "c2").unwrap();
    wait_for(&path("seen"), 3);
    watcher.kill().unwrap();
    watcher.wait().unwrap();
    assert_eq!(hook.words(), ["assigned c1", "assigned c2"]);
}

#[test]
fn cursor_repeats_nothing_when_killed_after_list() {
    let places = Places::with_etcd();
    for location in stores(&places) {
        assign(&location, "c1").unwrap();
        let hook = Hook::new("");
        let mut watcher = start(&hook, &location);
        let until = Instant::now() + patient(Duration::from_secs(3));
        while !hook.folder.path().join("cursor").exists() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        watcher.kill().unwrap();
        watcher.wait().unwrap();
        hook.catch_up(&location);
        assert_eq!(hook.words(), ["gap -", "held c1"], "{location}");
    }
}

/// Watches a cluster while only keys that never produce an event are changed, and then compacts the cluster's history.
fn quiet(location: &Location, hook: &Hook) -> Child {
    at(location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    hook.catch_up(location);
    hook.seen();
    let watcher = start_watching(hook, location);
    with_store(location, Create::Never, async |open| {
        let mut newest = kv::Revision::UNSET;
        for _ in 0..20 {
            newest = open.store().put("/other", "x").await.unwrap();
        }
        thread::sleep(patient(Duration::from_secs(3)));
        open.store().compact(newest).await.unwrap();
    });
    watcher
}

fn send(process: &Child, which: Signal) {
    send_signal(process.id(), which).unwrap();
}

#[test]
fn cursor_moves_with_other_keys_when_watch_is_quiet() {
    let places = Places::with_etcd();
    let (location, hook) = (places.etcd(), Hook::new(""));
    let mut watcher = quiet(&location, &hook);
    send(&watcher, Signal::SIGTERM);
    assert_eq!(watcher.wait().unwrap().code(), Some(130));
    assign(&location, "c1").unwrap();
    hook.catch_up(&location);
    assert_eq!(hook.words(), ["assigned c1"]);
}

#[test]
fn cursor_has_no_gap_when_quiet_connection_breaks() {
    let mut places = Places::with_etcd();
    let (location, hook) = (places.etcd(), Hook::new(""));
    let mut watcher = quiet(&location, &hook);
    let etcd = places.etcd.as_mut().unwrap();
    etcd.stop();
    etcd.run().unwrap();
    assign(&location, "c1").unwrap();
    wait_for(&hook.folder.path().join("seen"), 2);
    watcher.kill().unwrap();
    watcher.wait().unwrap();
    assert_eq!(hook.words(), ["assigned c1"]);
}

#[test]
fn cursor_is_refused_when_of_another_store() {
    let places = Places::with_etcd();
    let stores = stores(&places);
    let hook = Hook::new("");
    assign(&stores[1], "c1").unwrap();
    hook.catch_up(&stores[1]);
    let args = hook.args();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let failure = at(&stores[2], &args).failure();
    assert!(
        failure.contains("is about another store") && failure.contains("hint: delete the cursor file"),
        "{failure}"
    );
    for location in &stores {
        let newest = with_store(location, Create::Never, async |open| open.store().put("/other", "x").await.unwrap());
        let lost = newest.get() + 2;
        fs::write(hook.folder.path().join("cursor"), format!(r#"{{"store":"","revision":{lost}}}"#)).unwrap();
        let failure = at(location, &args).failure();
        assert!(failure.contains(&format!("begins after revision {lost}")), "{location}: {failure}");
        // New events raise the store's revision above the cursor's revision. The watch must still refuse the cursor,
        // because this store reached the cursor's revision through other events than the ones that the cursor stands
        // for.
        for _ in 0..3 {
            assign(location, "c2").unwrap();
            release(location, "c2").unwrap();
        }
        let failure = at(location, &[&args[..], &["--for", "1s"]].concat()).failure();
        assert!(failure.contains("was refused before: the watch begins after revision"), "{location}: {failure}");
    }
    hook.seen();
    fs::remove_file(hook.folder.path().join("cursor")).unwrap();
    hook.catch_up(&stores[1]);
    assert_eq!(hook.words(), ["gap -", "held c1"], "a list of an earlier watch begins anew");
    assert!(at(&stores[1], &["watch", "--exec", "/no/such/hook"]).failure().contains("cannot run /no/such/hook"));
}

#[test]
fn cursor_is_refused_for_good_when_cluster_went_back() {
    let mut places = Places::with_etcd();
    let location = places.etcd();
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    let hook = Hook::new("");
    hook.catch_up(&location);
    let mut watcher = start_watching(&hook, &location);
    // etcd gets an older state with the same cluster id, as after restoring a snapshot.
    let etcd = places.etcd.as_mut().unwrap();
    etcd.stop();
    fs::remove_dir_all(etcd.data()).unwrap();
    etcd.run().unwrap();
    assert_eq!(watcher.wait().unwrap().code(), Some(1));
    with_store(&location, Create::Never, async |open| {
        for _ in 0..9 {
            open.store().put("/other", "x").await.unwrap();
        }
    });
    let args = hook.args();
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--for", "1s"]).collect();
    let refused = at(&location, &args).failure();
    assert!(refused.contains("was refused before"), "{refused}");
}

/// Returns the exit code of a process, which is killed if it does not end within 5 s.
fn ended(mut process: Child) -> Option<i32> {
    let until = Instant::now() + patient(Duration::from_secs(5));
    while process.try_wait().unwrap().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    _ = process.kill();
    process.wait().unwrap().code()
}

#[test]
fn cursor_is_refused_when_store_folder_went_back() {
    let places = Places::new();
    for location in [places.sled("a"), places.redb("b")] {
        at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
        let [older, newer] = ["older", "newer"].map(|name| places.path(name));
        let store = location.path().unwrap();
        assert!(Command::new("cp").arg("-a").args([store, &older]).status().unwrap().success());
        let hook = Hook::new("");
        assign(&location, "c1").unwrap();
        hook.catch_up(&location);
        let watcher = start_watching(&hook, &location);
        send(&watcher, Signal::SIGSTOP);
        fs::rename(store, &newer).unwrap();
        fs::rename(&older, store).unwrap();
        send(&watcher, Signal::SIGCONT);
        assert_eq!(ended(watcher), Some(1), "{location}");
        for container in ["c2", "c3", "c4"] {
            assign(&location, container).unwrap();
        }
        let args = hook.args();
        let args: Vec<&str> = args.iter().map(String::as_str).chain(["--for", "1s"]).collect();
        let refused = at(&location, &args).failure();
        assert!(refused.contains("was refused before: the watch begins after revision"), "{location}: {refused}");
        fs::remove_dir_all(&newer).unwrap();
    }
}
