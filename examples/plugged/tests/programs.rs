//! Tests Margay's programs on a plugged store: an example store that one line in [`plugged::drivers`] compiles in.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/tested.rs"]
#[allow(dead_code, reason = "shared with the other test programs")]
mod tested;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use tested::{plugged_store, programs};
use testkit::server;

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn url(&self, engine: &str, name: &str) -> String {
        format!("{engine}://{}", self.path(name).display())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(programs().join(program));
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
    }

    /// Runs the command `margay` on a store and returns its standard output; panics if the command fails.
    #[track_caller]
    fn margay(&self, store: &str, args: &[&str]) -> String {
        said(&self.command("margay").args(["--store", store]).args(args).output().unwrap())
    }

    /// Calls the IPAM plugin on the test store with the given name.
    #[track_caller]
    fn plugin(&self, verb: &str, container: &str, name: &str) -> String {
        let conf = json!({
            "cniVersion": "1.0.0", "name": "lab", "type": "bridge", "nodename": "one", "log_level": "error",
            "datastore_type": engine(), "datastore_path": self.path(name), "ipam": {"type": "margay-ipam"},
        });
        let mut child = self
            .command("margay-ipam")
            .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", container), ("CNI_IFNAME", "eth0")])
            .envs([("CNI_NETNS", "/proc/1/ns/net"), ("CNI_PATH", "/nowhere")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
        said(&child.wait_with_output().unwrap())
    }

    /// Creates a store with a pool of which two addresses are in use, and returns the store's URL.
    fn fill(&self, name: &str) -> String {
        let store = self.url(engine(), name);
        self.margay(&store, &["pool", "create", "lab", "10.88.0.0/16"]);
        for container in ["a", "b", "c"] {
            let added: Value = serde_json::from_str(&self.plugin("ADD", container, name)).unwrap();
            assert!(added["ips"][0]["address"].as_str().unwrap().starts_with("10.88."), "{added}");
        }
        self.plugin("DEL", "b", name);
        store
    }

    fn in_use(&self, store: &str) -> Value {
        let shown: Value = serde_json::from_str(&self.margay(store, &["ipam", "show", "-o", "json"])).unwrap();
        shown["pools"][0]["in_use"].clone()
    }
}

fn engine() -> &'static str {
    plugged_store().0
}

#[track_caller]
fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{:?}: {out}{err}", output.status);
    out
}

/// A running daemon; dropping a `Daemon` kills its process.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn help_and_errors_list_engine() {
    let place = Place::new();
    let refused = place.command("margay").args(["--store", "mysql:///a", "pool", "list"]).output().unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("sled:///path, redb:///path,") && text.contains(&format!("{}:///path", engine())), "{text}");
    let missing = place.command("margay").args(["--store", "/srv/x", "pool", "list"]).output().unwrap();
    let text = String::from_utf8(missing.stderr).unwrap();
    assert!(text.contains("did you mean sled:///srv/x, redb:///srv/x"), "{text}");
    assert!(text.contains(&format!("{}:///srv/x", engine())), "{text}");
}

#[test]
fn lab_works_on_engine() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for daemon in ["0", "1"] {
        let lab = Command::new("scripts/lab")
            .arg(engine())
            .current_dir(&root)
            .env("PROGRAMS", programs())
            .env("SERVE", daemon)
            .output()
            .unwrap();
        let out = said(&lab);
        assert!(out.contains(&format!("lab: done, everything worked (bridge, {})", engine())), "{out}");
    }
}

#[test]
fn stores_move_to_and_from_engine() {
    let place = Place::new();
    let etcd = server::Etcd::start().unwrap();
    let first = place.fill("first");
    let kept = place.in_use(&first);
    assert_eq!(kept, "2");
    let etcd = etcd.url().replace("http:", "etcd:");
    let [sled, redb, last] = [place.url("sled", "s"), place.url("redb", "r"), place.url(engine(), "last")];
    for pair in [&first, &sled, &redb, &etcd, &last].windows(2) {
        for how in [&[][..], &["--finish"]] {
            let done = place.command("margay").args(["migrate", pair[0], pair[1]]).args(how).output().unwrap();
            let done = said(&done);
            assert!(done.contains("Successfully"), "{done}");
        }
        assert_eq!(place.in_use(pair[1]), kept, "{}", pair[1]);
    }
    place.margay(&last, &["ipam", "check"]);
    place.plugin("DEL", "a", "last");
    assert_eq!(place.in_use(&last), "1");
}

#[test]
fn backup_is_restored_to_engine_and_others() {
    let place = Place::new();
    let store = place.fill("store");
    let file = place.path("backup");
    let file = file.to_str().unwrap();
    place.margay(&store, &["store", "backup", file]);
    assert!(fs::read_to_string(file).unwrap().starts_with(r#"{"margay_backup":"#));
    for engine in [engine(), "sled", "redb"] {
        let restored = place.url(engine, &format!("restored-{engine}"));
        place.margay(&restored, &["store", "restore", file]);
        assert_eq!(place.in_use(&restored), place.in_use(&store), "{engine}");
        place.margay(&restored, &["store", "verify"]);
        place.margay(&restored, &["store", "compact"]);
    }
    let status: Value = serde_json::from_str(&place.margay(&store, &["store", "status", "-o", "json"])).unwrap();
    assert_eq!(status["engine"], engine());
}

/// Returns the address after the word `after` in a line that the daemon printed.
fn offered(line: &str, after: &str) -> String {
    let at = line.find(after).unwrap_or_else(|| panic!("no {after:?} in {line:?}")) + after.len();
    line[at..].split([',', ' ', '/']).next().unwrap().trim().to_owned()
}

#[test]
fn daemon_offers_page_and_etcd_api() {
    let place = Place::new();
    let store = place.url(engine(), "served");
    place.margay(&store, &["store", "create", "--format", "2"]);
    place.margay(&store, &["pool", "create", "lab", "10.88.0.0/16"]);
    let api = server::dead_address().unwrap();
    let mut child = place
        .command("margay")
        .args(["--store", &store, "serve", "--http", "127.0.0.1:0", "--insecure-loopback"])
        .args(["--listen", &format!("http://{api}")])
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let daemon = Daemon(child);
    let line = lines.by_ref().map(Result::unwrap).find(|line| line.contains("page at")).unwrap();
    std::thread::spawn(move || lines.for_each(drop));
    let page: SocketAddr = offered(&line, "page at http://").parse().unwrap();
    let mut stream = TcpStream::connect(page).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let numbers = std::io::read_to_string(stream).unwrap();
    assert!(numbers.contains("margay_"), "{numbers}");
    for container in ["a", "b"] {
        place.plugin("ADD", container, "served");
    }
    assert_eq!(place.in_use(&format!("etcd://{api}")), "2", "as etcd's clients see it");
    let judged =
        place.command("margay").args(["conformance", &format!("etcd://{api}"), "--case", "T0"]).output().unwrap();
    assert!(said(&judged).contains("0 failed"));
    drop(daemon);
}

#[test]
fn conformance_suite_passes_by_url() {
    let place = Place::new();
    let judged = place.command("margay").args(["conformance", &place.url(engine(), "judged")]).output().unwrap();
    let out = said(&judged);
    assert!(out.contains("0 failed"), "{out}");
}

#[test]
fn torture_finds_nothing() {
    let place = Place::new();
    let ops = std::env::var("MARGAY_TORTURE_OPS").unwrap_or_else(|_| "2000".to_owned());
    for mode in [["--mode", "in-process", "--ops", &ops], ["--mode", "processes", "--ops", "300"]] {
        let run = place.command("torture").args(["run", "--store", engine()]).args(mode).output().unwrap();
        let out = said(&run);
        assert!(out.contains("0 violations"), "{out}");
    }
}

#[test]
fn files_of_unknown_engine_are_left_alone() {
    let place = Place::new();
    let store = place.fill("store");
    fs::remove_file(place.path("store").join("store.id")).unwrap();
    let as_sled = store.replace(&format!("{}:", engine()), "sled:");
    let refused = place.command("margay").args(["--store", &as_sled, "pool", "list"]).output().unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains(&format!("holds a {0} store: set datastore_type to {0}", engine())), "{text}");
    assert!(!place.path("store").join("sled").exists());
    assert_eq!(place.in_use(&store), "2", "it is there as before");
}
