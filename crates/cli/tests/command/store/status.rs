//! Tests `margay store status`.

use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use datastore::Create;
use serde_json::json;

use crate::common::{Lab, margay};
use crate::store::content::{folder, id, with_store, write};

#[test]
fn status_shows_store_when_unused() {
    for lab in Lab::each() {
        write(&lab.location, [("a".to_owned(), b"1".to_vec())]);
        write(&lab.location, [("a".to_owned(), b"2".to_vec()), ("b".to_owned(), b"3".to_vec())]);
        thread::sleep(Duration::from_millis(1100));
        let status = lab.margay("store status -o json").json();
        assert!(status["history"]["age_seconds"].as_u64().unwrap() >= 1, "of the first change: {status}");
        let engine = lab.location.facts().name;
        assert_eq!((&status["engine"], &status["format"]), (&json!(engine), &json!(1)));
        assert_eq!((&status["id"], &status["store"]), (&json!(id(&lab.location)), &json!(lab.location.to_string())));
        assert_eq!((&status["keys"], &status["revision"]), (&json!(2), &json!(3)));
        assert_eq!((&status["oldest_revision"], &status["oldest_time"]), (&json!(1), &json!(null)));
        assert_eq!((&status["holder"], &status["waiting"]), (&json!(null), &json!(0)));
        assert_eq!(status["history"]["revisions"], 3);
        assert_eq!(status["history"]["max_revisions"], 10_000);
        assert!(status["time"].as_str().unwrap().ends_with('Z'), "{status}");
        let files = |folder: &std::path::Path| {
            fn walk(path: &std::path::Path) -> u64 {
                let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
                entries.map(|e| if e.path().is_dir() { walk(&e.path()) } else { e.metadata().unwrap().len() }).sum()
            }
            walk(folder)
        };
        // Opening the store may have changed the size of a sled file.
        let bytes = status["bytes"].as_u64().unwrap();
        assert!(bytes > 0 && bytes.abs_diff(files(folder(&lab.location))) < 1 << 20, "{status}");

        let text = lab.margay("store status").answer();
        for line in [
            "Keys:      2\n",
            "Newest:    revision 3, 20",
            "Oldest:    revision 1\n",
            "In use by: nobody\n",
            "Waiting:   0\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(text.contains(&format!("Engine:    {engine}, format 1\n")), "{text}");
        assert!(text.contains("3 of 10,000 revisions; ") && text.contains(" of 16.00 MiB; "), "{text}");
    }
}

#[test]
fn status_shows_store_from_outside_when_in_use() {
    for lab in Lab::each() {
        write(&lab.location, [("a".to_owned(), b"1".to_vec())]);
        let url = lab.location.to_string();
        let (held, seen) = (mpsc::channel(), mpsc::channel::<()>());
        thread::scope(|scope| {
            let (holder, location) = ((held.0, seen.1), &lab.location);
            scope.spawn(move || {
                with_store(location, Create::Never, async |_| {
                    holder.0.send(()).unwrap();
                    // A failed test drops the channel's sender, which ends the thread that keeps the store open.
                    let _ = holder.1.recv();
                });
            });
            let seen = seen.0;
            held.1.recv().unwrap();
            let waiting: Vec<_> =
                (0..3).map(|_| scope.spawn(|| with_store(&lab.location, Create::Never, async |_| ()))).collect();
            // Each of the test's three threads joins the queue for the store lock at its own time, so poll until the
            // queue has three entries.
            let status = loop {
                let status = margay(["--store", &url, "store", "status", "-o", "json"]);
                let found: serde_json::Value = serde_json::from_str(&status.out).unwrap();
                if found["waiting"] == 3 {
                    break status;
                }
            };
            assert_eq!(status.code, 1, "the answer is not whole");
            let found: serde_json::Value = serde_json::from_str(&status.out).unwrap();
            let holder = found["holder"].as_str().unwrap();
            assert!(holder.starts_with(&format!("{} (", std::process::id())), "{holder}");
            assert_eq!((&found["format"], found.get("keys")), (&json!(null), None), "only the lock holder knows");
            assert!(found["bytes"].as_u64().unwrap() > 0);
            assert!(status.err.contains("in use by another process: waited 2s"), "{}", status.err);
            assert!(status.err.contains("hint: "), "{}", status.err);
            let text = margay(["--store", &url, "store", "status"]);
            assert!(text.code == 1 && text.out.contains("Waiting:   3\n"), "{}{}", text.out, text.err);
            drop(seen);
            for waiting in waiting {
                waiting.join().unwrap();
            }
        });
        assert_eq!(lab.margay("store status -o json").json()["keys"], 1);
    }
}

#[test]
fn status_shows_what_can_be_seen_when_open_fails() {
    for lab in Lab::each() {
        let missing = lab.margay("store status").failure();
        assert!(missing.contains("there is no store at") && missing.contains("pool create"), "{missing}");
        assert!(!lab.exists(), "looking makes nothing");

        write(&lab.location, [("a".to_owned(), b"1".to_vec())]);
        let identity = folder(&lab.location).join("store.id");
        let text = fs::read_to_string(&identity).unwrap();
        fs::write(&identity, text.replace("format 1", "format 2")).unwrap();
        let newer = lab.margay("store status");
        assert!(newer.code == 1 && newer.out.contains(", format 2\n"), "{newer:?}");
        assert!(newer.err.contains("a newer margay made it"), "{newer:?}");

        fs::write(&identity, "garbage").unwrap();
        let damaged = lab.margay("store status");
        assert!(damaged.code == 1 && damaged.out.contains("Engine:    unknown, format unknown\n"), "{damaged:?}");
        assert!(damaged.err.contains("store.id cannot be read") && damaged.err.contains("--replace"), "{damaged:?}");
    }
}
