//! Tests that `margay watch --exec` loses no event when it is stopped or killed.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::{Create, Location};
use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::model::Owner;
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Store, StoreExt};
use ring::hmac::{self, HMAC_SHA256, Key};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::TEST_TIMEOUT;
use crate::copy::copy_program;
use crate::moving::fill::{Places, assign, at, release};
use crate::store::content::{with_store, write};

/// A hook program that appends the events it receives to a file, and the folder of this file and of the cursor.
pub(crate) struct Hook {
    pub(crate) folder: TempDir,
    program: PathBuf,
}

impl Hook {
    /// Creates a hook program that first runs the shell code `before`.
    pub(crate) fn new(before: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hook");
        let seen = folder.path().join("seen");
        fs::write(&program, format!("#!/bin/sh\n{before}\ncat >>{}\n", seen.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&seen, "").unwrap();
        Self { folder, program }
    }

    pub(crate) fn args(&self) -> Vec<String> {
        let cursor = self.folder.path().join("cursor");
        let [program, cursor] = [&self.program, &cursor].map(|path| path.display().to_string());
        ["watch", "--exec", &program, "--cursor", &cursor].map(str::to_owned).into()
    }

    /// Runs `margay watch`, repeatedly if the hook program fails, until no more events are left.
    pub(crate) fn catch_up(&self, location: &Location) -> String {
        let args = self.args();
        let args: Vec<&str> = args.iter().map(String::as_str).chain(["--for", "1s"]).collect();
        for _ in 0..20 {
            let done = at(location, &args);
            if done.code == 0 {
                assert_eq!(done.out, "");
                return done.err;
            }
            assert!(done.err.contains("the time is over"), "{}", done.err);
        }
        panic!("the program does not succeed");
    }

    /// Returns the events that the hook program has received since the previous call of this function.
    pub(crate) fn seen(&self) -> Vec<Value> {
        let path = self.folder.path().join("seen");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, "").unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the address events and history gaps that the hook program has received since the previous call, in a
    /// short form.
    pub(crate) fn words(&self) -> Vec<String> {
        let word = |event: &Value| {
            let text = |name: &str| event[name].as_str().unwrap_or("-").to_owned();
            format!("{} {}", text("event"), text("container"))
        };
        self.seen().iter().filter(|event| event.get("address").is_some() || event["event"] == "gap").map(word).collect()
    }
}

pub(crate) fn stores(places: &Places) -> Vec<Location> {
    let stores = vec![places.etcd(), places.sled("a"), places.redb("b")];
    let node = ("/calico/resources/v3/projectcalico.org/nodes/node1", br#"{"metadata":{"name":"node1"}}"#.to_vec());
    write(&stores[0], [(node.0.to_owned(), node.1)]);
    for location in &stores {
        at(location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    }
    stores
}

#[test]
fn hook_program_goes_on_where_it_stopped() {
    let places = Places::with_etcd();
    for location in stores(&places) {
        let hook = Hook::new("");
        assign(&location, "c1").unwrap();
        hook.catch_up(&location);
        assert_eq!(hook.words(), ["gap -", "held c1"], "{location}: the first run begins with what is in use");
        assign(&location, "c2").unwrap();
        release(&location, "c1").unwrap();
        hook.catch_up(&location);
        assert_eq!(hook.words(), ["assigned c2", "released c1"], "{location}");
        hook.catch_up(&location);
        assert!(hook.seen().is_empty(), "{location}");
        // The cursor also advances over changes of keys that produce no event.
        let cursor = hook.folder.path().join("cursor");
        let before = fs::read_to_string(&cursor).unwrap();
        at(&location, &["pool", "create", "other", "10.98.0.0/24"]).answer();
        assign(&location, "c3").unwrap();
        hook.catch_up(&location);
        assert_ne!(fs::read_to_string(&cursor).unwrap(), before);
        hook.seen();
    }
}

#[test]
fn hook_gets_gap_and_state_when_history_is_gone() {
    let places = Places::with_etcd();
    for location in stores(&places) {
        let hook = Hook::new("");
        for container in ["c1", "c2"] {
            assign(&location, container).unwrap();
        }
        hook.catch_up(&location);
        hook.seen();
        release(&location, "c1").unwrap();
        assign(&location, "c3").unwrap();
        with_store(&location, Create::Never, async |open| {
            let newest = open.store().list(kv::Range::All).await.unwrap().revision;
            open.store().compact(newest).await.unwrap();
        });
        let notes = hook.catch_up(&location);
        let words = hook.words();
        assert_eq!(words[0], "gap -", "{location}: {words:?}");
        let held: BTreeSet<&str> = words[1..].iter().map(String::as_str).collect();
        assert_eq!(held, BTreeSet::from(["held c2", "held c3"]), "{location}");
        assert!(notes.contains("was given up by the store"), "{notes}");
    }
}

pub(crate) fn start(hook: &Hook, location: &Location) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &location.to_string()]).args(hook.args()).stderr(Stdio::null()).stdin(Stdio::null());
    command.spawn().unwrap()
}

/// Starts a watch with the hook program, and waits until the watch has started.
pub(crate) fn start_watching(hook: &Hook, location: &Location) -> Child {
    let notes = hook.folder.path().join("notes");
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &location.to_string()]).args(hook.args()).stdin(Stdio::null());
    let watcher = command.stderr(fs::File::create(&notes).unwrap()).spawn().unwrap();
    let until = Instant::now() + patient(TEST_TIMEOUT);
    while !fs::read_to_string(&notes).unwrap().contains("watching") {
        assert!(Instant::now() < until, "it does not watch: {}", fs::read_to_string(&notes).unwrap());
        thread::sleep(Duration::from_millis(2));
    }
    watcher
}

/// Waits until a file has the given number of lines, or the time limit has passed.
pub(crate) fn wait_for(path: &Path, lines: usize) {
    let until = Instant::now() + patient(TEST_TIMEOUT);
    while fs::read_to_string(path).unwrap().lines().count() < lines && Instant::now() < until {
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn hook_loses_no_event_when_killed() {
    const ROUNDS: usize = 6;
    let places = Places::with_etcd();
    for location in stores(&places) {
        // Every seventh run of the hook program fails.
        let hook = Hook::new(
            "n=$(cat \"$0.n\" 2>/dev/null || echo 0); echo $((n + 1)) >\"$0.n\"; [ $((n % 7)) -ne 5 ] || exit 1",
        );
        hook.catch_up(&location);
        assert_eq!(hook.words(), ["gap -"]);
        let seen = hook.folder.path().join("seen");
        let mut lines = fs::read_to_string(&seen).unwrap().lines().count();
        for round in 0..ROUNDS {
            let mut watcher = start(&hook, &location);
            assign(&location, &format!("a{round}")).unwrap();
            assign(&location, &format!("b{round}")).unwrap();
            release(&location, &format!("a{round}")).unwrap();
            // Each round makes three events, and kills the watch once it has delivered none, one or two of them.
            lines += round % 3;
            wait_for(&seen, lines);
            watcher.kill().unwrap();
            watcher.wait().unwrap();
            lines = fs::read_to_string(&seen).unwrap().lines().count();
        }
        // The hook program of a killed watch may still write events.
        thread::sleep(Duration::from_millis(200));
        hook.catch_up(&location);
        let mut once = BTreeSet::new();
        let words: Vec<String> = hook.words().into_iter().filter(|word| once.insert(word.clone())).collect();
        let expected: Vec<String> = (0..ROUNDS)
            .flat_map(|round| {
                [format!("assigned a{round}"), format!("assigned b{round}"), format!("released a{round}")]
            })
            .collect();
        assert_eq!(words, expected, "{location}: in order, and each at least once");
    }
}

#[test]
fn hook_example_keeps_hosts_file() {
    let places = Places::new();
    let location = places.redb("a");
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    let hosts = places.path("hosts");
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/dnsmasq/dns-hook");
    let mut hook = Hook::new("");
    let script = format!("#!/bin/sh\nHOSTS={} RELOAD=: exec {}\n", hosts.display(), example.display());
    hook.program = hook.folder.path().join("wrapped");
    fs::write(&hook.program, script).unwrap();
    fs::set_permissions(&hook.program, fs::Permissions::from_mode(0o755)).unwrap();

    let lines = || {
        let mut lines: Vec<String> = fs::read_to_string(&hosts).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let first = assign(&location, "Web_1").unwrap();
    hook.catch_up(&location);
    assert_eq!(lines(), [format!("{first} web-1.lab.margay.internal")]);
    let second = assign(&location, "c2").unwrap();
    release(&location, "Web_1").unwrap();
    hook.catch_up(&location);
    assert_eq!(lines(), [format!("{second} c2.lab.margay.internal")]);
    // Two kinds of addresses get no DNS name: that of a container whose id is too long for a DNS label, and that of a
    // node.
    let id = "3f0c".repeat(16);
    let long = assign(&location, &id).unwrap();
    with_store(&location, Create::Never, async |open| {
        let request = HandleRequest::new("tunnel", Owner::host("node1"), RequestedAddresses::any(1, 0));
        let ipam = Ipam::new(open.store(), Nodes::FirstSeen);
        ipam.assign_to_handle(&request, Deadline::after(TEST_TIMEOUT)).await.unwrap();
    });
    hook.catch_up(&location);
    assert_eq!(
        lines(),
        [format!("{second} c2.lab.margay.internal"), format!("{long} 3f0c3f0c3f0c.lab.margay.internal")]
    );
    release(&location, &id).unwrap();
    // After a gap in the history, the hook program removes the DNS names of released addresses.
    release(&location, "c2").unwrap();
    let third = assign(&location, "c3").unwrap();
    at(&location, &["store", "compact"]).answer();
    hook.catch_up(&location);
    assert_eq!(lines(), [format!("{third} c3.lab.margay.internal")]);
}

/// The signature and the body of each HTTP request that a test's webhook has received.
type Requests = Arc<Mutex<Vec<(String, String)>>>;

/// Starts an HTTP server that answers with the given HTTP statuses and then with 204, and returns its address and the
/// received requests.
fn server(statuses: &'static [u16]) -> (String, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (seen, mut statuses) = (Requests::default(), statuses.iter());
    let requests = Arc::clone(&seen);
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = BufReader::new(connection.unwrap());
            let (mut length, mut signature) = (0, String::new());
            loop {
                let mut line = String::new();
                if connection.read_line(&mut line).unwrap_or_default() <= 2 {
                    break;
                }
                let (name, value) = line.trim_end().split_once(": ").unwrap_or_default();
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => length = value.parse().unwrap(),
                    "margay-signature" => signature = value.to_owned(),
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            connection.read_exact(&mut body).unwrap();
            requests.lock().unwrap().push((signature, String::from_utf8(body).unwrap()));
            let status = statuses.next().unwrap_or(&204);
            let answer =
                format!("HTTP/1.1 {status} X\r\nlocation: /x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            _ = connection.get_mut().write_all(answer.as_bytes());
        }
    });
    (address, seen)
}

#[test]
fn hook_webhook_gets_signed_events_until_accepted() {
    let places = Places::new();
    let location = places.redb("a");
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    let (secret, cursor) = (places.path("secret"), places.path("cursor"));
    fs::write(&secret, "open sesame\n").unwrap();
    let (address, seen) = server(&[500, 503, 302]);
    let url = format!("http://bob:hidden@{address}/events?token=hidden");
    let args = ["watch", "--webhook", &url, "--webhook-secret", secret.to_str().unwrap()];
    let args = [&args[..], &["--cursor", cursor.to_str().unwrap(), "--for", "1s"]].concat();
    assign(&location, "c1").unwrap();
    let late = at(&location, &args);
    assert_eq!(late.code, 1, "{}", late.err);
    assert!(late.err.contains("the time is over, and not all events were handled"), "{}", late.err);
    let done = at(&location, &[&args[..args.len() - 1], &["10s"]].concat());
    assert_eq!(done.code, 0, "{}", done.err);
    assert!(done.err.contains(&format!("http://{address}/events failed for a gap up to revision ")), "{}", done.err);
    for words in ["its answer is 503", "trying again in 1 s", "its answer is 302", "trying again in 2 s"] {
        assert!(done.err.contains(words), "{words}: {}", done.err);
    }
    assert!(!done.err.contains("hidden") && !done.err.contains("sesame"), "{}", done.err);
    let requests = std::mem::take(&mut *seen.lock().unwrap());
    let kinds: Vec<String> = requests
        .iter()
        .map(|(_, body)| serde_json::from_str::<Value>(body).unwrap()["event"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds, ["gap", "gap", "gap", "gap", "owned", "held"], "in order, and again until it was taken");
    for (signature, body) in &requests {
        let code = hmac::sign(&Key::new(HMAC_SHA256, b"open sesame"), body.as_bytes());
        let expected: String = code.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(*signature, format!("sha256={expected}"));
    }
    assert_eq!(at(&location, &args).code, 0);
    assert!(seen.lock().unwrap().is_empty(), "all was taken before");

    for (args, expected) in [
        (&["watch", "--webhook", "ftp://h/"][..], "begins with neither http:// nor https://"),
        (&["watch", "--webhook", "http://h/", "--webhook-secret", "/no/such"], "the secret /no/such cannot be read"),
        (&["watch", "--cursor", "/x"], "--cursor needs --exec or --webhook"),
    ] {
        let failure = at(&location, args).failure();
        assert!(failure.contains(expected), "{failure}");
    }
}

#[test]
fn hook_run_is_waited_for_when_it_changed_user() {
    const STRANGER: u32 = 65_534;
    let places = Places::new();
    let location = places.redb("a");
    at(&location, &["pool", "create", "lab", "10.99.0.0/24"]).answer();
    // As with sudo, the watch has no permission to signal the hook's process.
    let (privileged, runs) = (places.path("privileged"), places.path("runs"));
    let [shown, lines] = [&privileged, &runs].map(|path| path.display().to_string());
    let hook = Hook::new(&format!(
        "exec {shown} --reuid 0 --clear-groups sh -c 'echo begin >>{lines}; sleep 3; echo end >>{lines}'"
    ));
    for folder in [places.folder.path(), hook.folder.path()] {
        let owner = STRANGER.to_string();
        assert!(Command::new("chown").args(["-R", &owner]).arg(folder).status().unwrap().success(), "needs root");
    }
    copy_program("/usr/bin/setpriv", &privileged);
    fs::set_permissions(&privileged, fs::Permissions::from_mode(0o4755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &location.to_string()]).args(hook.args());
    command.args(["--attempt-timeout", "1s", "--for", "2s"]).uid(STRANGER).gid(STRANGER).current_dir("/");
    // The hook's process inherits stdout; with a pipe, the test would also wait for this process to end, and not only
    // for `margay watch`.
    let done = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert_eq!(done.code(), Some(1));
    let lines = fs::read_to_string(&runs).unwrap_or_default();
    assert!(!lines.is_empty() && lines.replace("begin\nend\n", "").is_empty(), "a run goes on: {lines:?}");
}
