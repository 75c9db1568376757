//! Tests `margay gc --attachments`.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::common::container::Container;
use crate::common::{Done, Lab};
use crate::gone::{attachment, give, give_dated, held, list, pool, release, revision};

/// Container ids as long as the ids of containerd, CRI-O and podman.
const ONE: &str = "1111111111113c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5";
const TWO: &str = "2222222222223c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5";

fn write(lab: &Lab, text: &str) -> PathBuf {
    let path = lab.folder().join("list");
    fs::write(&path, text).unwrap();
    path
}

/// Runs `gc` with a list of attachments, as the test's node.
fn gc(lab: &Lab, file: &std::path::Path, more: &str) -> Done {
    lab.margay(format!("gc --node node1 --attachments {} {more}", file.display()).trim_end())
}

#[test]
fn list_in_every_form_frees_what_it_lacks() {
    for (number, lab) in Lab::each().iter().enumerate() {
        let at = &lab.location;
        pool(lab, &format!("198.18.{}.0/24", 90 + number));
        let one = give(at, "node1", ONE);
        let cache = lab.folder().join("results");
        fs::create_dir(&cache).unwrap();
        let cached = json!({"kind": "cniCacheV1", "containerId": ONE, "config": "e30=", "ifName": "eth0",
            "networkName": "net", "result": {"cniVersion": "1.0.0"}});
        fs::write(cache.join(format!("net-{ONE}-eth0")), cached.to_string()).unwrap();
        let cni = json!([{"containerID": ONE, "ifname": "eth0"}]);
        let podman = json!([{"Id": ONE, "Names": ["web"], "Exited": true}]);
        for (name, text) in [
            ("CNI's array", cni.to_string()),
            ("a network's configuration", json!({"name": "net", "cni.dev/valid-attachments": cni}).to_string()),
            ("crictl", json!({"items": [{"id": ONE, "state": "SANDBOX_READY"}]}).to_string()),
            ("podman", podman.to_string()),
            ("ids", format!("{ONE}\n")),
            ("short ids", format!("{}\n", &ONE[..12])),
            ("libcni's folder", String::new()),
        ] {
            let file = if text.is_empty() { cache.clone() } else { write(lab, &text) };
            let two = give(at, "node1", TWO);
            let before = revision(at);
            let shown = gc(lab, &file, "").answer();
            assert!(shown.contains(&format!("| {two} ")) && shown.contains("| not in the list "), "{name}: {shown}");
            assert!(
                shown.contains("would free 1 address; do it with --apply\nleft: 1 in the list\n"),
                "{name}: {shown}"
            );
            assert_eq!(revision(at), before, "{name}: a dry run changes nothing");
            let done = gc(lab, &file, "--apply -o json").json();
            assert_eq!(list(&done, "freed"), [two].into(), "{name}");
            assert_eq!(done["stores"][0]["candidates"][0]["reason"], "not_listed", "{name}");
            assert_eq!(held(at, "node1"), [one.clone()].into(), "{name}");
        }
    }
}

#[test]
fn list_spares_young_live_and_other_networks() {
    let [_, lab] = Lab::each();
    let at = &lab.location;
    pool(&lab, "198.18.94.0/24");
    let [old, live, known] = ["old", "live", "known"].map(|name| give(at, "node1", name));
    let young = give_dated(at, attachment("node1", "young"), 30);
    let _containers = [&live, &known].map(|address| Container::with(address));
    let file = write(&lab, "known\n");

    let shown = gc(&lab, &file, "-o json").json();
    assert_eq!(list(&shown, "candidates"), [old.clone()].into());
    let left = &shown["stores"][0]["left"];
    assert_eq!((&left["live"], &left["live_unlisted"], &left["young"]), (&json!(2), &json!(1), &json!(1)), "{shown}");
    // A list of attachments says nothing about addresses that were assigned after the list was made.
    File::open(&file).unwrap().set_modified(SystemTime::now() - Duration::from_secs(2 * 3600)).unwrap();
    let done = gc(&lab, &file, "--apply -o json").json();
    assert_eq!((list(&done, "freed").len(), &done["stores"][0]["left"]["young"]), (0, &json!(2)), "{done}");
    let other = write(&lab, r#"{"name":"other","cni.dev/valid-attachments":[]}"#);
    let done = gc(&lab, &other, "--empty --apply -o json").json();
    assert_eq!((list(&done, "freed").len(), &done["stores"][0]["left"]["of_other_networks"]), (0, &json!(2)), "{done}");
    assert_eq!(held(at, "node1"), [&old, &young, &live, &known].map(Clone::clone).into());

    // The list of attachments contains ids that `gc` cannot match, such as pod container ids instead of sandbox ids.
    let said = gc(&lab, &write(&lab, &format!("{TWO}\n")), "--apply").failure();
    assert!(said.contains("of what is in use on this machine (2) nothing is in the list"), "{said}");
    assert!(said.contains("(crictl pods, not crictl ps); with several"), "{said}");
    assert_eq!(list(&gc(&lab, &write(&lab, "known\n"), "--apply -o json").json(), "freed"), [old].into());
}

#[test]
fn list_is_refused_when_empty_or_wrong_unless_meant() {
    let [lab, _] = Lab::each();
    let at = &lab.location;
    pool(&lab, "198.18.92.0/24");
    give(at, "node1", ONE);
    let before = revision(at);
    let empty_folder = lab.folder().join("empty");
    fs::create_dir(&empty_folder).unwrap();
    for text in ["", "\n", "[]", r#"{"items":[]}"#, "folder"] {
        let file = if text == "folder" { empty_folder.clone() } else { write(&lab, text) };
        let said = gc(&lab, &file, "--apply").failure();
        assert!(
            said.contains("nothing was freed") && said.contains("it is empty") && said.contains("--empty"),
            "{said}"
        );
    }
    for (text, words) in [
        ("CONTAINER ID  IMAGE\n", "line 1: \"CONTAINER ID  IMAGE\" is no container's id"),
        (r#"{"containers":[]}"#, "crictl pods -o json lists those"),
        ("[{", "it is no JSON"),
        (r#"[{"Id":"a"},{}]"#, "element 2"),
    ] {
        let said = gc(&lab, &write(&lab, text), "--apply").failure();
        assert!(said.contains(words) && said.contains("hint: pass the output of crictl pods"), "{said}");
    }
    fs::write(empty_folder.join("net-a-eth0"), r#"{"cniVersion":"1.0.0"}"#).unwrap();
    let said = gc(&lab, &empty_folder, "--apply").failure();
    assert!(said.contains("net-a-eth0: its kind is not cniCacheV1"), "{said}");
    assert!(gc(&lab, "/nowhere".as_ref(), "").failure().contains("cannot read /nowhere"));
    assert!(gc(&lab, "/nowhere".as_ref(), "--boot").failure().contains("cannot be used with"));
    assert_eq!(revision(at), before);
    assert_eq!(list(&gc(&lab, &write(&lab, "[]"), "--empty --apply -o json").json(), "freed").len(), 1);
}

#[test]
fn list_comes_through_pipe_and_several_add_up() {
    let [_, lab] = Lab::each();
    let at = &lab.location;
    pool(&lab, "198.18.93.0/24");
    let [one, two, three] = ["one", "two", "three"].map(|name| give(at, "node1", name));
    let file = write(&lab, "two\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(["--store", &at.to_string(), "gc", "--node", "node1", "--apply", "-o", "json", "--attachments", "-"]);
    command.arg("--attachments").arg(&file).env_clear();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(br#"[{"Id":"one"}]"#).unwrap();
    let done = child.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(list(&report, "freed"), [three].into());
    assert_eq!(held(at, "node1"), [one.clone(), two].into());
    assert_eq!(release(at, "node1", "one"), [one]);
}
