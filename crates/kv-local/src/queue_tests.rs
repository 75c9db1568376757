//! Tests the queue of processes for a store's lock, with threads and with processes. The child processes run this test
//! binary, with their roles in environment variables.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;
use crate::folder;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);

fn queue() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue");
    (folder, path)
}

fn take(path: &Path, wait: Duration) -> Result<StoreLock, LockError> {
    StoreLock::take(path, wait, folder::open_or_create)
}

fn is_late(result: Result<StoreLock, LockError>) -> bool {
    matches!(result, Err(LockError::Late))
}

/// Waits until the first `count` tickets of the queue have been drawn.
fn wait_for_tickets(path: &Path, count: i64) {
    let file = folder::open(path).unwrap();
    let started = Instant::now();
    while first_free(&file, 0).unwrap() < count {
        assert!(started.elapsed() < LONG, "no ticket was drawn");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn queue_observer_sees_all_tickets_and_blocks_no_caller() {
    let (_folder, path) = queue();
    let drawn = || tickets(&folder::open(&path).unwrap()).unwrap();
    let lock = take(&path, LONG).unwrap();
    assert_eq!(drawn(), [0]);
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..5).map(|_| scope.spawn(|| take(&path, LONG).map(drop))).collect();
        wait_for_tickets(&path, 6);
        // A waiter that draws a ticket and then sees a higher one gives its ticket back and draws again, so the number
        // of tickets drawn varies.
        while drawn().len() != 6 {}
        assert_eq!(drawn()[0], 0, "the first one has the lock");
        drop(lock);
        for waiting in waiting {
            waiting.join().unwrap().unwrap();
        }
    });
    assert!(drawn().is_empty());
    take(&path, SHORT).unwrap();
}

/// A child process that queues for the store lock in a given role, and prints a line at each step of this role.
struct QueueProcess(Child, BufReader<ChildStdout>);

impl QueueProcess {
    fn start(role: &str, path: &Path) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "queue::tests::queue_gives_turn_at_once_when_caller_is_alone", "--nocapture"])
            .env("QUEUE_ROLE", role)
            .env("QUEUE_PATH", path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self(child, output)
    }

    /// Reads the next `queue:` line that the child process prints.
    fn said(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.1.read_line(&mut line).unwrap(), 0, "it ended without a word");
            if let Some((_, word)) = line.split_once("queue:") {
                return word.trim().to_owned();
            }
        }
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for QueueProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Child processes of other tests also run this test function, with their roles in `QUEUE_ROLE`.
#[test]
fn queue_gives_turn_at_once_when_caller_is_alone() {
    match env::var("QUEUE_ROLE").as_deref() {
        Ok("hold") => {
            let _lock = take(&role_path(), LONG).unwrap();
            println!("queue: have");
            thread::sleep(LONG);
        }
        Ok("hold with a child") => {
            let _lock = take(&role_path(), LONG).unwrap();
            let mut child = Command::new("sleep").arg("60").spawn().unwrap();
            println!("queue: {}", child.id());
            child.wait().unwrap();
        }
        Ok("compete") => {
            println!("queue: ready");
            let order = role_path().with_file_name("order");
            let order = File::options().create(true).append(true).open(order).unwrap();
            compete(&role_path(), &|| {
                // Creating the mark file fails if another process holds the store lock at the same time.
                let mark = role_path().with_extension("mark");
                File::create_new(&mark).expect("no other process has the lock");
                writeln!(&order, "{}", std::process::id()).unwrap();
                fs::remove_file(&mark).unwrap();
            });
            println!("queue: done");
        }
        _ => {
            let (_folder, path) = queue();
            drop(take(&path, Duration::ZERO).unwrap());
            drop(take(&path, Duration::ZERO).unwrap());
            assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        }
    }
}

fn role_path() -> PathBuf {
    env::var_os("QUEUE_PATH").unwrap().into()
}

/// Waits until the file `go` exists, and then acquires and releases the store lock repeatedly until the file `stop`
/// exists.
fn compete(path: &Path, while_locked: &dyn Fn()) {
    let flag = |name: &str| path.with_file_name(name).exists();
    while !flag("go") {
        thread::sleep(Duration::from_millis(1));
    }
    while !flag("stop") {
        let _lock = take(path, LONG).unwrap();
        while_locked();
    }
}

/// Checks that all callers get the store lock about equally often while all of them compete for it. `order` lists the
/// numbers of the callers in the order in which they got the lock.
///
/// Some callers start later or end earlier than others. Counts only acquisitions made while all callers compete: after
/// each caller has acquired the lock once, and before the first caller stops.
fn assert_fair(order: &[u32], callers: usize) {
    let mut spans = BTreeMap::new();
    for (at, caller) in order.iter().enumerate() {
        spans.entry(caller).or_insert((at, at)).1 = at;
    }
    assert_eq!(spans.len(), callers, "a caller never had the lock");
    let (begin, end) = spans.values().fold((0, order.len()), |(begin, end), span| (begin.max(span.0), end.min(span.1)));
    let mut counts: BTreeMap<_, usize> = spans.keys().map(|&caller| (caller, 0)).collect();
    for caller in order.get(begin..=end).expect("all callers compete for a while") {
        *counts.get_mut(caller).unwrap() += 1;
    }
    let (least, most) = (counts.values().min().unwrap(), counts.values().max().unwrap());
    let mean = counts.values().sum::<usize>() / callers;
    assert!(mean >= 10, "too few turns to tell: {counts:?}");
    assert!(most - least <= 3 + mean / 10, "{counts:?}");
}

#[test]
fn queue_gives_threads_fair_turns() {
    let (folder, path) = queue();
    let inside = AtomicUsize::new(0);
    let order = Mutex::new(Vec::new());
    let while_locked = |caller| {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
        order.lock().unwrap().push(caller);
        thread::sleep(Duration::from_micros(200));
        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
    };
    thread::scope(|scope| {
        for caller in 0..32 {
            let (path, while_locked) = (&path, &while_locked);
            scope.spawn(move || compete(path, &|| while_locked(caller)));
        }
        fs::write(folder.path().join("go"), "").unwrap();
        thread::sleep(Duration::from_millis(1500));
        fs::write(folder.path().join("stop"), "").unwrap();
    });
    assert_fair(&order.into_inner().unwrap(), 32);
}

#[test]
fn queue_gives_processes_fair_turns() {
    let (folder, path) = queue();
    let mut processes: Vec<_> = (0..32).map(|_| QueueProcess::start("compete", &path)).collect();
    for process in &mut processes {
        assert_eq!(process.said(), "ready");
    }
    fs::write(folder.path().join("go"), "").unwrap();
    thread::sleep(Duration::from_secs(2));
    fs::write(folder.path().join("stop"), "").unwrap();
    for process in &mut processes {
        assert_eq!(process.said(), "done");
    }
    let order = fs::read_to_string(folder.path().join("order")).unwrap();
    let order: Vec<u32> = order.lines().map(|line| line.parse().unwrap()).collect();
    assert_fair(&order, 32);
}

#[test]
fn queue_serves_in_order_of_arrival() {
    let (_folder, path) = queue();
    let lock = take(&path, LONG).unwrap();
    let served = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 1..=10 {
            scope.spawn({
                let (path, served) = (&path, &served);
                move || {
                    let _lock = take(path, LONG).unwrap();
                    served.lock().unwrap().push(n);
                }
            });
            wait_for_tickets(&path, n + 1);
        }
        drop(lock);
    });
    assert_eq!(*served.lock().unwrap(), (1..=10).collect::<Vec<_>>());
}

/// Between a process's search for a free ticket and its drawing of this ticket, other processes may draw and return
/// tickets.
#[test]
fn queue_ticket_is_returned_when_below_another() {
    let (_folder, path) = queue();
    let (ours, theirs) = (folder::open_or_create(&path).unwrap(), folder::open_or_create(&path).unwrap());
    assert!(claim(&theirs, 5).unwrap());
    assert!(!claim(&ours, 3).unwrap());
    assert!(!claim(&ours, 5).unwrap());
    assert_eq!(locked_until(&theirs, 0).unwrap(), None, "nothing is left locked");
    assert_eq!(draw(&ours).unwrap(), 6);
}

#[test]
fn queue_replaces_killed_holder_at_once() {
    let (_folder, path) = queue();
    let mut holder = QueueProcess::start("hold", &path);
    assert_eq!(holder.said(), "have");
    assert!(is_late(take(&path, SHORT)));
    thread::scope(|scope| {
        // Killing the process that holds the store lock must release the lock; otherwise the test's thread would wait
        // until its deadline.
        let waiting = scope.spawn(|| take(&path, LONG).map(drop));
        wait_for_tickets(&path, 2);
        holder.kill();
        assert!(waiting.join().unwrap().is_ok());
    });
}

#[test]
fn queue_holder_is_not_passed_when_waiter_is_killed() {
    let (_folder, path) = queue();
    let lock = take(&path, LONG).unwrap();
    let mut waiter = QueueProcess::start("hold", &path);
    wait_for_tickets(&path, 2);
    thread::scope(|scope| {
        let behind = scope.spawn(|| take(&path, Duration::from_millis(500)).is_err());
        wait_for_tickets(&path, 3);
        waiter.kill();
        assert!(behind.join().unwrap(), "the holder was passed");
    });
    drop(lock);
    take(&path, Duration::ZERO).unwrap();
}

#[test]
fn queue_place_is_freed_when_waiter_gives_up() {
    let (_folder, path) = queue();
    let lock = take(&path, LONG).unwrap();
    let started = Instant::now();
    assert!(is_late(take(&path, SHORT)));
    assert!(started.elapsed() >= SHORT);
    assert!(is_late(take(&path, Duration::ZERO)));
    let file = folder::open(&path).unwrap();
    assert_eq!(first_free(&file, 0).unwrap(), 1, "only the holder's ticket is left");
    drop(lock);
    take(&path, Duration::ZERO).unwrap();
}

#[test]
fn queue_serves_those_behind_waiter_that_gave_up() {
    let (_folder, path) = queue();
    let lock = take(&path, LONG).unwrap();
    thread::scope(|scope| {
        let impatient = scope.spawn(|| is_late(take(&path, SHORT * 3)));
        wait_for_tickets(&path, 2);
        let patient = scope.spawn(|| take(&path, LONG).is_ok());
        wait_for_tickets(&path, 3);
        assert!(impatient.join().unwrap());
        drop(lock);
        assert!(patient.join().unwrap());
    });
}

#[test]
fn queue_is_one_for_two_names_of_file() {
    let (folder, path) = queue();
    let lock = take(&path, LONG).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let detour = folder.path().join(".").join("queue");
    for other in [&link, &detour] {
        assert!(is_late(take(other, Duration::ZERO)));
    }
    drop(lock);
    drop(take(&link, Duration::ZERO).unwrap());
    drop(take(&detour, Duration::ZERO).unwrap());
}

#[test]
fn queue_turn_is_not_kept_by_program_of_holder() {
    let (_folder, path) = queue();
    let mut holder = QueueProcess::start("hold with a child", &path);
    let child = holder.said();
    holder.kill();
    let lock = take(&path, LONG);
    assert!(fs::exists(format!("/proc/{child}")).unwrap(), "the child lives on");
    Command::new("kill").arg(&child).status().unwrap();
    lock.unwrap();
}

#[test]
fn queue_of_moved_folder_does_not_count() {
    let (folder, _) = queue();
    let store = folder.path().join("store");
    let path = store.join("queue");
    fs::create_dir(&store).unwrap();
    let lock = take(&path, LONG).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let lock = take(&path, LONG).unwrap();
            assert!(is_same_file(&lock.file, &path).unwrap());
        });
        wait_for_tickets(&path, 2);
        fs::rename(&store, folder.path().join("old")).unwrap();
        fs::create_dir(&store).unwrap();
        drop(lock);
        waiting.join().unwrap();
    });
}

#[test]
fn queue_error_when_another_program_has_lock() {
    let (_folder, path) = queue();
    let file = folder::open_or_create(&path).unwrap();
    set(&file, LockMode::Write, ByteRange::ALL).unwrap();
    assert!(matches!(take(&path, SHORT), Err(LockError::Io(_))));
}

#[test]
fn queue_holder_is_named() {
    let (_folder, path) = queue();
    let lock = take(&path, LONG).unwrap();
    let mut waiter = QueueProcess::start("hold", &path);
    wait_for_tickets(&path, 2);
    assert!(find_holder(&path).unwrap().starts_with(&format!("{} (", std::process::id())));
    drop(lock);
    assert_eq!(waiter.said(), "have");
    assert!(find_holder(&path).unwrap().starts_with(&format!("{} (", waiter.0.id())));
    waiter.kill();
    assert_eq!(find_holder(&path), None);
}

#[test]
fn queue_ticket_is_only_write_lock() {
    let info = "pos:\t0\nflags:\t02100002\nlock:\t1: OFDLCK ADVISORY  READ -1 fe:00:131 0 6\n\
                lock:\t2: OFDLCK ADVISORY  WRITE -1 fe:00:131 7 7\n";
    assert_eq!(parse_ticket(info), Some(7));
    assert_eq!(parse_ticket("lock:\t1: FLOCK  ADVISORY  WRITE 99 fe:00:131 0 EOF\n"), None);
    assert_eq!(parse_ticket("pos:\t0\n"), None);
}

#[test]
fn queue_names_no_process_just_started_by_holder() {
    let folder = tempfile::tempdir().unwrap();
    let queue = folder.path().join("queue");
    fs::write(&queue, "").unwrap();
    let process = |pid: &str, byte: u64| {
        let process = folder.path().join("proc").join(pid);
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("fdinfo")).unwrap();
        std::os::unix::fs::symlink(&queue, process.join("fd/3")).unwrap();
        let info = format!("lock:\t1: OFDLCK ADVISORY  WRITE -1 fe:00:131 {byte} {byte}\n");
        fs::write(process.join("fdinfo/3"), info).unwrap();
        process
    };
    let child = process("7", 0);
    fs::write(process("8", 1).join("comm"), "waiting\n").unwrap();
    // The child's file `comm` is a FIFO: the search for the lock holder blocks on reading `comm` until the test has
    // removed the child's open queue file, as an exec would do.
    let name = child.join("comm");
    nix::unistd::mkfifo(&name, nix::sys::stat::Mode::S_IRWXU).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = File::options().write(true).open(&name).unwrap();
            fs::remove_file(child.join("fd/3")).unwrap();
            file.write_all(b"child\n").unwrap();
        });
        let found = find_holder_among(&folder.path().join("proc"), &queue);
        assert_eq!(found, None, "nor one that waits");
    });
}
