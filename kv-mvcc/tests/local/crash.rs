//! Processes that are killed, and a disk that is full.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use kv::{Compare, ErrorKind, Op, Outcome, Store, StoreExt, Txn};
use kv_mvcc::local::Engine;

use super::{check, create, open, process, role, role_path, run, step};

const ROUNDS: u32 = 50;
const LONG: Duration = Duration::from_secs(60);

/// A killed writer leaves everything that it was told is done, and at most one transaction more, whole.
///
/// `test` is the name of the test that calls this; the processes that are killed are that test again.
pub fn what_was_acknowledged_survives_a_kill(engine: &dyn Engine, test: &str) {
    if role().as_deref() == Some("write") {
        return write(engine);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let mut steps = 0;
    // How long it takes to the first acknowledgement, to spread the early kills over.
    let mut start = Duration::from_millis(10);
    for round in 0..ROUNDS {
        let spawned = Instant::now();
        let mut child = process(test, "write", &path)
            .env("STORE_STEPS", steps.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let done = acknowledgements(child.stdout.take().unwrap());
        if round % 2 == 0 {
            let mut last = done.recv_timeout(LONG).unwrap();
            start = spawned.elapsed();
            for _ in 0..round % 9 {
                last = done.recv_timeout(LONG).unwrap();
            }
            steps = last + 1;
            // Somewhere in the next transaction.
            thread::sleep(Duration::from_micros(u64::from(round * 37 % 1500)));
        } else {
            thread::sleep(start * round / ROUNDS);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        steps = done.iter().last().map_or(steps, |last| last + 1);
        steps = look(engine, &path, steps);
    }
    assert!(steps >= u64::from(ROUNDS), "{steps} steps");
}

/// The numbers of the steps that a process says are done, as they come, to its end.
fn acknowledgements(output: ChildStdout) -> Receiver<u64> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        for done in lines.filter_map(|line| line.strip_prefix("done ")?.parse().ok()) {
            if sender.send(done).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Checks that the store holds `acknowledged` steps or one more, and gives how many it holds.
fn look(engine: &dyn Engine, path: &Path, acknowledged: u64) -> u64 {
    let store = match open(engine, path) {
        Ok(store) => store,
        // Killed before there was a store.
        Err(error) if *error.kind() == ErrorKind::Missing && acknowledged == 0 => return 0,
        Err(error) => panic!("{error}"),
    };
    run(async {
        for steps in [acknowledged, acknowledged + 1] {
            if check(&store, steps).await.unwrap().is_ok() {
                let revision = u64::try_from(store.status().revision.get()).unwrap();
                assert_eq!(revision, 1 + steps, "one revision for each transaction");
                store.verify().await.unwrap();
                store.close().await.unwrap();
                return steps;
            }
        }
        panic!("after {acknowledged} steps: {:?}", check(&store, acknowledged).await);
    })
}

fn write(engine: &dyn Engine) {
    let first: u64 = std::env::var("STORE_STEPS").unwrap().parse().unwrap();
    let store = create(engine, &role_path()).unwrap();
    run(async {
        for n in first.. {
            step(&store, n).await.unwrap();
            println!("done {n}");
        }
    });
}

/// Processes that each open, count one up and close, as plugins do, miss no count and all come through.
pub fn processes_take_turns_and_count_together(engine: &dyn Engine, test: &str) {
    const PROCESSES: u64 = 8;
    const TURNS: u64 = 40;
    if role().as_deref() == Some("count") {
        for _ in 0..TURNS {
            run(count(engine, &role_path()));
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let children: Vec<_> = (0..PROCESSES)
        .map(|_| process(test, "count", &path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let store = open(engine, &path).unwrap();
    let counter = run(store.get("counter")).unwrap().unwrap();
    assert_eq!(counter.value.as_bytes(), (PROCESSES * TURNS).to_be_bytes());
    assert_eq!(counter.version, i64::try_from(PROCESSES * TURNS).unwrap());
}

async fn count(engine: &dyn Engine, path: &Path) {
    let store = create(engine, path).unwrap();
    let (compare, number) = match store.get("counter").await.unwrap() {
        Some(kv) => {
            let number = u64::from_be_bytes(kv.value.as_bytes().try_into().unwrap());
            (Compare::unchanged("counter", kv.mod_revision), number)
        }
        None => (Compare::absent("counter"), 0),
    };
    let put = Op::put("counter", (number + 1).to_be_bytes().to_vec());
    let response = store.txn(Txn::new().with_compares([compare]).with_success([put])).await.unwrap();
    assert!(response.succeeded, "nobody else has the store");
    store.close().await.unwrap();
}

/// However early the making of a store is killed, the next try succeeds.
pub fn a_killed_creation_is_made_good(engine: &dyn Engine, test: &str) {
    if role().as_deref() == Some("create") {
        drop(create(engine, &role_path()).unwrap());
        println!("made");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // How long it takes when it is left alone, to spread the kills over.
    let started = Instant::now();
    assert!(process(test, "create", &folder.path().join("whole")).stdout(Stdio::null()).status().unwrap().success());
    let whole = started.elapsed();
    let mut unfinished = 0;
    for round in 0..ROUNDS {
        let path = folder.path().join(format!("store{round}"));
        let mut child = process(test, "create", &path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(whole * round / ROUNDS);
        child.kill().unwrap();
        child.wait().unwrap();
        unfinished += u32::from(path.join("creating").exists());
        let store = create(engine, &path).unwrap();
        assert!(!path.join("creating").exists());
        run(async {
            step(&store, 0).await.unwrap();
            store.close().await.unwrap();
        });
        assert_eq!(look(engine, &path, 1), 1);
    }
    assert!(unfinished > 0, "none was caught in the act");
}

/// A full disk (here: a limit on the size of files) is an error that says so and leaves the outcome open; what was
/// acknowledged is there, and once there is room all is well.
pub fn a_full_disk_loses_nothing(engine: &dyn Engine, test: &str) {
    if role().as_deref() == Some("fill") {
        return fill(engine);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let command = process(test, "fill", &path);
    // Without the signal, writing beyond the limit is an error. The limit is in blocks of 512 or 1024 bytes.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 3000; exec \"$0\" \"$@\""]).arg(command.get_program());
    limited.args(command.get_args());
    for (name, value) in command.get_envs() {
        limited.env(name, value.unwrap());
    }
    let mut child = limited.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    child.wait().unwrap();
    let full = text.lines().find_map(|line| line.strip_prefix("full ")).unwrap_or_else(|| panic!("{text}"));
    let steps = look(engine, &path, full.parse().unwrap());
    let store = open(engine, &path).unwrap();
    run(async {
        step(&store, steps).await.unwrap();
        store.close().await.unwrap();
    });
    assert_eq!(look(engine, &path, steps + 1), steps + 1);
}

fn fill(engine: &dyn Engine) {
    let store = create(engine, &role_path()).unwrap();
    run(async {
        for n in 0.. {
            match step(&store, n).await {
                Ok(()) => {}
                Err(error) => {
                    // With an outcome that was looked up it may also be known.
                    assert!(matches!(error.kind(), ErrorKind::NoSpace), "{error}");
                    assert!(error.to_string().contains("free some space"), "{error}");
                    if error.outcome() == Outcome::NotApplied {
                        check(&store, n).await.unwrap().unwrap();
                    }
                    println!("full {n}");
                    return;
                }
            }
        }
    });
}

/// The store's files and folders are its owner's alone, also those that came later.
pub fn everything_is_private(engine: &dyn Engine) {
    use std::os::unix::fs::PermissionsExt;

    fn look(path: &Path, found: &mut u32) {
        let metadata = fs::metadata(path).unwrap();
        let mode = metadata.permissions().mode() & 0o7777;
        assert_eq!(mode, if metadata.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
        *found += 1;
        if metadata.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                look(&entry.unwrap().path(), found);
            }
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    for n in 0..5 {
        let store = create(engine, &path).unwrap();
        run(step(&store, n)).unwrap();
        let mut found = 0;
        look(&path, &mut found);
        assert!(found >= 4, "queue, store.id and the engine's");
    }
}
