//! Tests `margay ipam history` and `margay watch` on embedded stores.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;

use crate::common::{Lab, Run, TEST_TIMEOUT};
use ipam_core::assign::{HandleRequest, RequestedAddresses};
use ipam_core::model::Owner;
use kv::{Deadline, Range, Store, StoreExt};
use serde_json::{Value, json};

/// Returns the given fields of each event in a history report as text, separated by spaces.
fn reported(report: &Value, members: &[&str]) -> Vec<String> {
    let events = report["events"].as_array().unwrap();
    let member = |event: &Value, name: &&str| event[*name].as_str().unwrap_or("-").to_owned();
    events.iter().map(|event| members.iter().map(|name| member(event, name)).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn history_follows_address_between_holders() {
    for lab in Lab::each() {
        lab.margay("pool create tiny 10.88.0.0/31 --block-size 31").answer();
        let address = lab.assign("net", "c1");
        lab.margay("ipam release --container c1").answer();
        let other = lab.assign("net", "c2");
        assert_ne!(other, address, "the address released last was given first");
        assert_eq!(lab.assign("net", "c3"), address);

        let report = lab.margay(&format!("ipam history {address} -o json")).json();
        let events = reported(&report, &["event", "container", "interface", "node", "block"]);
        let expected = ["assigned c1", "released c1", "assigned c3"];
        assert_eq!(events, expected.map(|what| format!("{what} eth0 node1 10.88.0.0/31")), "{report}");
        // An embedded store records when each change happened, and the recorded times never decrease.
        let times = reported(&report, &["time"]);
        assert!(times.is_sorted() && times.iter().all(|time| time.ends_with('Z')), "{times:?}");
        assert_eq!(report["oldest_revision"], json!(1));

        for (subject, expected) in [
            ("net.c1", "assigned,released"),
            ("c2", "assigned"),
            ("node1", "claimed,assigned,released,assigned,assigned"),
            ("host:node1", "claimed"),
        ] {
            let report = lab.margay(&format!("ipam history {subject} -o json")).json();
            assert_eq!(reported(&report, &["event"]).join(","), expected, "{subject}: {report}");
        }

        let text = lab.margay(&format!("ipam history {address}")).answer();
        assert!(text.starts_with("the store can be read back to revision 1\n"), "{text}");
        let titles = text.lines().nth(2).unwrap();
        assert!(titles.contains("TIME (UTC)") && titles.contains("LOCAL TIME"), "{text}");
        assert!(text.contains("| net.c1 eth0 | node1 | 10.88.0.0/31 |"), "{text}");
        let nothing = lab.margay("ipam history 10.88.0.77").answer();
        assert!(nothing.ends_with("\nsince then nothing is known of 10.88.0.77\n"), "{nothing}");
    }
}

#[test]
fn history_says_oldest_revision_when_compacted() {
    for lab in Lab::each() {
        lab.margay("pool create tiny 10.88.0.0/30 --block-size 30").answer();
        let (address, other) = (lab.assign("net", "c1"), lab.assign("net", "c2"));
        assert_eq!(lab.margay("store compact").code, 0);
        lab.margay("ipam release --container c1").answer();
        let report = lab.margay(&format!("ipam history {address} -o json")).json();
        assert_eq!(reported(&report, &["event", "handle"]), ["held net.c1", "released net.c1"], "{report}");
        let oldest = report["oldest_revision"].as_i64().unwrap();
        assert!(oldest > 1 && report["oldest_time"].is_string(), "{report}");
        let text = lab.margay(&format!("ipam history {other}")).answer();
        assert!(text.starts_with(&format!("the store can be read back to revision {oldest}, of 2")), "{text}");
        assert!(text.contains("| held  | "), "{text}");
    }
}

#[test]
fn history_since_keeps_what_was_still_so() {
    for lab in Lab::each() {
        lab.margay("pool create tiny 10.88.0.0/31 --block-size 31").answer();
        let (address, other) = (lab.assign("net", "c1"), lab.assign("net", "c2"));
        lab.margay("ipam release --container c1").answer();
        let events = |subject: &str, since: &str| {
            let report = lab.margay(&format!("ipam history {subject} --since {since} -o json")).json();
            reported(&report, &["event"])
        };
        assert_eq!(events(&address, "1h"), ["assigned", "released"]);
        assert_eq!(events(&address, "2000-01-01T00:00:00Z"), ["assigned", "released"]);
        // Events before the start of the requested period are shown only if they still describe the current state.
        assert_eq!(events(&address, "2999-01-01"), Vec::<String>::new());
        assert_eq!(events(&other, "2999-01-01"), ["assigned"]);
        assert_eq!(events("node1", "2999-01-01"), ["claimed", "assigned"]);
        let wrong = lab.margay("ipam history node1 --since yesterday").failure();
        assert!(wrong.contains("15m"), "{wrong}");
    }
}

#[test]
fn history_shows_times_of_machine_too() {
    let [lab, _] = Lab::each();
    lab.margay("pool create tiny 10.88.0.0/31 --block-size 31").answer();
    let address = lab.assign("net", "c1");
    let location = lab.location.to_string();
    let run = Command::new(env!("CARGO_BIN_EXE_margay"))
        .args(["--store", &location, "ipam", "history", &address])
        .env("TZ", "IST-5:30")
        .output()
        .unwrap();
    let text = String::from_utf8(run.stdout).unwrap();
    let row = text.lines().find(|line| line.contains("assigned")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    let time = |text: &str| -> time::OffsetDateTime {
        let text = text.replace(' ', "T").replace("TIST", "+05:30");
        time::OffsetDateTime::parse(&text, &time::format_description::well_known::Rfc3339).unwrap()
    };
    assert!(cells[3].ends_with("IST"), "{row}");
    assert_eq!(time(cells[2]), time(cells[3]), "{row}");
}

#[test]
fn history_names_missing_store() {
    for lab in Lab::each() {
        for args in ["ipam history node1", "watch --for 1s", "watch --pool a"] {
            let failure = lab.margay(args).failure();
            assert!(failure.contains("there is no store at") && failure.contains("pool create"), "{args}: {failure}");
            assert!(!lab.exists());
        }
    }
}

/// A running `margay watch` that has printed that it is watching.
struct Watching {
    child: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    notes: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Watching {
    fn start(lab: &Lab, args: &[&str]) -> Self {
        let location = lab.location.to_string();
        let mut child = Command::new(env!("CARGO_BIN_EXE_margay"))
            .args(["--store", &location, "watch"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut notes = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = notes.next().unwrap().unwrap();
        assert!(first.starts_with(&format!("note: watching {location} from revision ")), "{first}");
        Self { child, lines, notes }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn json(&mut self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    /// Waits until `margay watch` has ended, and returns its exit code and the rest of its stdout.
    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let rest = self.lines.map(Result::unwrap).collect();
        (self.child.wait().unwrap().code(), rest)
    }
}

#[test]
fn watch_tells_events_and_ends_after_count() {
    for lab in Lab::each() {
        lab.margay("pool create tiny 10.88.0.0/30 --block-size 30").answer();
        let before = lab.assign("net", "before");
        let mut watch = Watching::start(&lab, &["--count", "4"]);
        let address = lab.assign("net", "c1");
        let line = watch.line();
        assert!(line.contains(&format!("  assigned  {address} ")) && line.ends_with("net.c1 eth0  on node1"), "{line}");
        lab.margay("ipam release --container c1").answer();
        let line = watch.line();
        assert!(line.contains(&format!("  released  {address} ")), "{line}");
        let again = lab.assign("net", "c2");
        lab.margay(&format!("ipam release --ip {before}")).answer();
        let (code, rest) = watch.end();
        assert_eq!((code, rest.len()), (Some(0), 2), "{rest:?}");
        assert!(rest[0].contains(&again) && rest[1].contains(&before), "{rest:?}");
    }
}

#[test]
fn watch_can_list_first_and_filter_by_node_or_pool() {
    for lab in Lab::each() {
        lab.margay("pool create a 10.88.0.0/30 --block-size 30").answer();
        let held = lab.assign("net", "c1");
        let listed = lab.margay("watch --list --count 2 -o json").out;
        let words: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(words.iter().map(|line| &line["event"]).eq(["owned", "held"]), "{listed}");
        lab.margay("pool create b 10.89.0.0/30 --block-size 30 --manual").answer();
        let none = lab.margay("watch --list --pool b --for 0s -o json");
        assert_eq!((none.code, none.out.as_str()), (0, ""));
        let some = lab.margay("watch --list --pool a --node node1 --for 0s");
        assert_eq!((some.code, some.out.lines().count()), (0, 2), "what there is at the beginning is told in any case");
        let none = lab.margay("watch --list --node node2 --for 0s -o json");
        assert_eq!((none.code, none.out.as_str()), (0, ""));

        let mut watch =
            Watching::start(&lab, &["--list", "--node", "node2", "--pool", "a", "-o", "json", "--count", "1"]);
        let assign = |owner: &str, handle: &str| {
            let request = HandleRequest::new(
                handle,
                Owner::host(owner),
                RequestedAddresses::these(["10.88.0.3".parse().unwrap()]),
            )
            .with_attributes([("node".to_owned(), owner.to_owned())].into());
            lab.with_ipam(async |ipam| ipam.assign_to_handle(&request, Deadline::after(TEST_TIMEOUT)).await.unwrap());
        };
        assign("node1", "other");
        lab.margay("ipam release --handle other").answer();
        assign("node1", "mine");
        lab.margay("ipam release --handle mine").answer();
        lab.with_ipam(async |ipam| {
            // The test rewrites the block so that another node holds the address, as can happen in a cluster.
            let key = ipam_core::model::keys::block("10.88.0.0/30".parse().unwrap());
            let value = ipam.store().get(key.clone()).await.unwrap().unwrap().value;
            let text = String::from_utf8(value.as_bytes().to_vec())
                .unwrap()
                .replace("\"node\":\"node1\"", "\"node\":\"node2\"");
            ipam.store().put(key, text).await.unwrap();
        });
        let event = watch.json();
        assert_eq!(
            (&event["event"], &event["address"], &event["node"]),
            (&json!("moved"), &json!(held), &json!("node2"))
        );
        assert_eq!(watch.end(), (Some(0), vec![]));
        let failure = lab.margay("watch --pool none").failure();
        assert!(failure.contains("there is no pool none") && failure.contains("margay pool list"), "{failure}");
    }
}

#[test]
fn watch_tells_gap_and_lists_anew_when_history_is_gone() {
    for lab in Lab::each() {
        lab.margay("pool create tiny 10.88.0.0/30 --block-size 30").answer();
        let mut watch = Watching::start(&lab, &["-o", "json"]);
        // This process keeps the store open during the assignments, the release and the compaction, so the watch cannot
        // read the store between them.
        let address = lab.with_ipam(async |ipam| {
            let assign = |handle: &str| {
                let request = HandleRequest::new(handle, Owner::host("node1"), RequestedAddresses::any(1, 0));
                async move { ipam.assign_to_handle(&request, Deadline::after(TEST_TIMEOUT)).await.unwrap()[0].ip }
            };
            assign("gone").await;
            ipam.release_by_handle("gone", Deadline::after(TEST_TIMEOUT)).await.unwrap();
            let address = assign("stays").await;
            let revision = ipam.store().list(Range::All).await.unwrap().revision;
            ipam.store().compact(revision).await.unwrap();
            address.to_string()
        });
        let gap = watch.json();
        assert_eq!(gap["event"], "gap", "{gap}");
        assert!(gap["after_revision"].as_i64() < gap["up_to_revision"].as_i64(), "{gap}");
        assert_eq!(watch.json()["event"], "owned");
        let held = watch.json();
        assert_eq!(
            (&held["event"], &held["address"], &held["handle"]),
            (&json!("held"), &json!(address), &json!("stays"))
        );
        assert!(watch.notes.next().unwrap().unwrap().contains("was given up by the store"));
        lab.margay("ipam release --handle stays").answer();
        assert_eq!(watch.json()["event"], "released");
        let pid = nix::unistd::Pid::from_raw(i32::try_from(watch.child.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
        assert_eq!(watch.end(), (Some(130), vec![]));
    }
}

#[test]
fn watch_delays_no_writer() {
    const ROUNDS: usize = 40;
    for lab in Lab::each() {
        lab.margay("pool create tiny 10.88.0.0/29 --block-size 29").answer();
        let mut watch = Watching::start(&lab, &["-o", "json"]);
        thread::scope(|scope| {
            for caller in 0..4 {
                let lab = &lab;
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        lab.assign("net", &format!("c{caller}"));
                        lab.margay(&format!("ipam release --container c{caller}")).answer();
                    }
                });
            }
        });
        // The watch prints each change once and in order.
        let mut holders = std::collections::BTreeMap::new();
        let mut reported = 0;
        while reported < 4 * ROUNDS * 2 {
            let event = watch.json();
            let Some(address) = event["address"].as_str() else { continue };
            match event["event"].as_str().unwrap() {
                "assigned" => assert_eq!(holders.insert(address.to_owned(), event["handle"].clone()), None, "{event}"),
                "released" => assert_eq!(holders.remove(address), Some(event["handle"].clone()), "{event}"),
                other => panic!("{other}"),
            }
            reported += 1;
        }
        assert!(holders.is_empty(), "{holders:?}");
        watch.child.kill().unwrap();
        watch.child.wait().unwrap();
    }
}

#[test]
fn history_help_fits_screen_and_has_examples() {
    for args in ["ipam history --help", "ipam explain --help", "watch --help"] {
        let help = Run::new(args.split(' ')).run().answer();
        assert!(help.contains("Examples:") && help.lines().count() <= 50, "{args}: {help}");
    }
}
