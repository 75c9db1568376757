//! Tests `margay export` and `margay import`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use datastore::Location;

use crate::moving::fill::{Places, assign, at, calicos, moved, ours, release};
use crate::store::content::{content, write};

fn round_trip(places: &Places, from: &Location, to: &Location) {
    let file = places.path("export.jsonl");
    let file = file.to_str().unwrap();
    let said = at(from, &["export", file, "--force"]).answer();
    assert!(said.contains("Successfully exported"), "{said}");
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    let dry = at(to, &["import", file, "--dry-run"]).answer();
    assert!(dry.starts_with("Would import"), "{dry}");
    let json = at(to, &["import", file, "-o", "json"]).json();
    let expected = moved(from);
    assert_eq!(json["keys"], expected.len(), "{json}");
    assert_eq!(json["written"], expected.len(), "{json}");
    assert_eq!(content(to), expected);
}

/// Exports a store to a file and returns the file's path.
fn exported(places: &Places, from: &Location) -> PathBuf {
    let file = places.path("export.jsonl");
    at(from, &["export", file.to_str().unwrap()]).answer();
    file
}

#[test]
fn import_works_between_all_kinds_of_store() {
    let places = Places::with_etcd();
    let (sled, redb, etcd, last) = (places.sled("a"), places.redb("b"), places.etcd(), places.sled("c"));
    calicos(&sled);
    ours(&sled, 70);
    // An export does not include a profile's key, because profiles do not belong to IPAM.
    write(&sled, [("/calico/resources/v3/projectcalico.org/profiles/x".to_owned(), b"{}".to_vec())]);
    round_trip(&places, &sled, &redb);
    assert!(content(&redb).len() < content(&sled).len());
    round_trip(&places, &redb, &etcd);
    round_trip(&places, &etcd, &last);
    assert_eq!(content(&last), moved(&sled));
    // In the imported store, addresses can be released and assigned.
    assert_eq!(release(&last, "c7").unwrap().len(), 1);
    assign(&last, "new").unwrap();
}

#[test]
fn import_is_refused_when_store_is_not_empty() {
    let places = Places::new();
    let (from, to) = (places.sled("a"), places.redb("b"));
    ours(&from, 3);
    ours(&to, 1);
    let file = exported(&places, &from);
    let before = content(&to);
    for more in [&[][..], &["--dry-run"]] {
        let args: Vec<_> = ["import", file.to_str().unwrap()].into_iter().chain(more.iter().copied()).collect();
        let said = at(&to, &args).failure();
        assert!(said.contains("is not empty: it has /calico/ipam/v2/"), "{said}");
    }
    assert_eq!(content(&to), before);
}

/// An import that was killed after it had copied everything, but before it printed its answer, reports success when it
/// is run again.
#[test]
fn import_finds_itself_done_when_repeated() {
    let places = Places::with_etcd();
    let from = places.sled("a");
    ours(&from, 5);
    let file = exported(&places, &from);
    for to in [places.sled("b"), places.redb("c"), places.etcd()] {
        let import = |more: &[&str]| at(&to, &[&["import", file.to_str().unwrap(), "-o", "json"], more].concat());
        let first = import(&[]).json();
        let before = content(&to);
        for (more, is_dry) in [(&[][..], false), (&["--dry-run"], true)] {
            let again = import(more).json();
            assert_eq!((&again["written"], &again["dry_run"]), (&0.into(), &is_dry.into()), "{again}");
            assert_eq!(again["addresses"], first["addresses"]);
        }
        assert_eq!(content(&to), before);
        assign(&to, "new").unwrap();
        let said = import(&[]).failure();
        assert!(said.contains("is not empty"), "{said}");
    }
}

#[test]
fn import_changes_nothing_when_file_is_not_whole() {
    let places = Places::new();
    let (from, to) = (places.sled("a"), places.redb("b"));
    ours(&from, 5);
    let file = exported(&places, &from);
    let name = file.to_str().unwrap();
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    let place = whole.len() / 2;
    flipped[place] ^= 1;
    let cut = whole[..whole.len() - 30].to_vec();
    for (bad, words) in [(flipped, "is damaged"), (cut, "is damaged"), (b"nonsense\n".to_vec(), "no backup")] {
        fs::write(&file, bad).unwrap();
        let said = at(&to, &["import", name]).failure();
        assert!(said.contains(words), "{said}");
        assert!(!to.path().unwrap().exists(), "something was made");
    }
}

#[test]
fn export_goes_to_stdout_and_comes_from_backup() {
    let places = Places::new();
    let (from, to) = (places.redb("a"), places.sled("b"));
    ours(&from, 5);
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    let done = command.args(["--store", &from.to_string(), "export", "-"]).env_clear().output().unwrap();
    assert!(done.status.success() && String::from_utf8_lossy(&done.stderr).contains("to stdout"), "{done:?}");
    let (file, backup) = (places.path("stdout.jsonl"), places.path("backup.jsonl"));
    fs::write(&file, &done.stdout).unwrap();
    at(&from, &["store", "backup", backup.to_str().unwrap()]).answer();
    // The export file and the backup file differ only in the first and last lines, because both have the same format.
    let rest =
        |path| fs::read_to_string(path).unwrap().split_once('\n').unwrap().1.rsplit_once("{").unwrap().0.to_owned();
    assert_eq!(rest(&file), rest(&backup));
    let done = at(&to, &["import", backup.to_str().unwrap()]);
    assert_eq!(done.code, 0, "{}", done.err);
    assert_eq!(content(&to), content(&from));
}

#[test]
fn import_renames_only_node() {
    let places = Places::with_etcd();
    let (from, to) = (places.sled("a"), places.etcd());
    ours(&from, 70);
    // The handle of a node's own prefix ends with the node's name.
    at(&from, &["pool", "create", "racks", "10.128.0.0/16", "--prefix-length", "28"]).answer();
    at(&from, &["ipam", "assign-prefix", "racks", "--node", "node1"]).answer();
    // An import does not change keys that the target store already had.
    let node = "/calico/resources/v3/projectcalico.org/nodes/worker-7";
    write(&to, [(node.to_owned(), br#"{"metadata":{"name":"worker-7"}}"#.to_vec())]);
    let file = exported(&places, &from);
    let name = file.to_str().unwrap();
    let said = at(&to, &["import", name, "--as-node", "worker-7", "--from-node", "other"]).failure();
    assert!(said.contains("no node other in the file") && said.contains("node1"), "{said}");
    let done = at(&to, &["import", name, "--as-node", "worker-7"]);
    assert_eq!(done.code, 0, "{}", done.err);
    let (before, after) = (moved(&from), content(&to));
    assert_eq!(after.len(), before.len() + 1);
    for (key, value) in &after {
        let both = format!("{}={}", String::from_utf8_lossy(key), String::from_utf8_lossy(value));
        assert!(!both.contains("node1"), "{both}");
        let old = both.replace("worker-7", "node1");
        let (key, value) = old.split_once('=').unwrap();
        if key.ends_with("nodes/node1") {
            continue;
        }
        let parse = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).ok();
        let was = before.get(key.as_bytes()).unwrap_or_else(|| panic!("{key} is new"));
        assert!(was == value.as_bytes() || parse(was) == parse(value.as_bytes()), "{key}: {value}");
    }
    let still = at(&to, &["ipam", "assign-prefix", "racks", "--node", "worker-7"]).answer();
    assert!(still.starts_with("Node worker-7 has 10.128.0.0/28 of pool racks already"), "{still}");
}

#[test]
fn import_renames_one_of_several_nodes() {
    let places = Places::new();
    let (from, to) = (places.sled("a"), places.redb("b"));
    calicos(&from);
    let file = exported(&places, &from);
    let name = file.to_str().unwrap();
    let said = at(&to, &["import", name, "--as-node", "x"]).failure();
    assert!(said.contains("several nodes") && said.contains("node1, node2, node3"), "{said}");
    let said = at(&to, &["import", name, "--as-node", "node2", "--from-node", "node1"]).failure();
    assert!(said.contains("a node node2 in the file already"), "{said}");
    assert!(!to.path().unwrap().exists());
    // With the node name `z`, the node's keys come last in the order of keys.
    let done = at(&to, &["import", name, "--as-node", "z", "--from-node", "node1"]);
    assert_eq!(done.code, 0, "{}", done.err);
    let hosts = |location, name: &str| {
        let prefix = format!("/calico/ipam/v2/host/{name}/");
        content(location).keys().filter(|key| key.starts_with(prefix.as_bytes())).count()
    };
    assert!(hosts(&from, "node1") > 0);
    assert_eq!((hosts(&to, "z"), hosts(&to, "node1")), (hosts(&from, "node1"), 0));
    assert_eq!(hosts(&to, "node2"), hosts(&from, "node2"));
    assert_eq!(content(&to).len(), moved(&from).len());
}

#[test]
fn import_writes_over_no_foreign_change() {
    let places = Places::new();
    let (from, to) = (places.sled("a"), places.redb("b"));
    ours(&from, 5);
    let file = exported(&places, &from);
    let name = file.to_str().unwrap();
    at(&to, &["import", name]);
    // Simulates an interrupted import into the target store, after which another process has written to the store.
    let mark = format!(
        r#"{{"way":"import","from":"{name}","to":"{to}","source":"{}","state":"copying","revision":1}}"#,
        fs::read_to_string(&file).unwrap().rsplit('"').nth(1).unwrap()
    );
    let handle = "/calico/ipam/v2/handle/lab.c1".to_owned();
    write(&to, [("/margay/v1/migration".to_owned(), mark.into_bytes()), (handle, b"{}".to_vec())]);
    let before = content(&to);
    let said = at(&to, &["import", name]).failure();
    assert!(said.contains("handle/lab.c1 (changed)") && said.contains("--abort"), "{said}");
    assert_eq!(content(&to), before);
    let said = at(&to, &["import", name, "--abort"]).answer();
    assert!(said.contains("Successfully removed"), "{said}");
    assert!(content(&to).is_empty());
    assert_eq!(at(&to, &["import", name]).code, 0);
    assert_eq!(content(&to), moved(&from));
}
