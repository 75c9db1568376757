//! Tests `margay store verify`, `compact` and `upgrade`.

use std::fs;
use std::path::{Path, PathBuf};

use datastore::Location;

use crate::common::{Lab, margay};
use crate::store::content::{blocks, content, folder, write};

#[test]
fn verify_passes_when_store_is_whole() {
    for lab in Lab::each() {
        write(&lab.location, blocks(50));
        let text = lab.margay("store verify").answer();
        assert!(text.ends_with("is whole: 50 keys, 50 changes in its history, 782.31 KiB of values\n"), "{text}");
        let json = lab.margay("store verify -o json").json();
        assert_eq!((&json["whole"], &json["keys"]), (&true.into(), &50.into()));
    }
}

fn files(path: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path, found) } else { found.push(path) }
    }
}

/// Changes one byte in every copy of a value in the store's files.
fn damage(location: &Location, needle: &[u8]) {
    let mut found = Vec::new();
    files(folder(location), &mut found);
    let mut changed = 0;
    for path in found {
        let mut bytes = fs::read(&path).unwrap();
        let places: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(needle)).collect();
        for at in &places {
            bytes[*at] ^= 1;
        }
        changed += places.len();
        fs::write(&path, bytes).unwrap();
    }
    assert!(changed > 0, "the value is nowhere in the files");
}

#[test]
fn verify_finds_damage_to_one_value() {
    for lab in Lab::each() {
        write(&lab.location, [("a".to_owned(), b"needle in the hay".to_vec()), ("b".to_owned(), b"hay".to_vec())]);
        damage(&lab.location, b"needle");
        let error = lab.margay("store verify").failure();
        assert!(error.contains("the store is damaged") || error.contains("the store's revision went back"), "{error}");
        assert!(error.contains("restore FILE --replace"), "it says what to do: {error}");
    }
}

#[test]
fn compact_gives_up_history_and_nothing_else() {
    for lab in Lab::each() {
        for _ in 0..4 {
            write(&lab.location, blocks(200));
        }
        let before = content(&lab.location);
        let kept = lab.margay("store compact --keep 3 -o json");
        assert_eq!(kept.code, 0, "{}", kept.err);
        let kept: serde_json::Value = serde_json::from_str(&kept.out).unwrap();
        let status = lab.margay("store status -o json").json();
        assert_eq!(status["history"]["revisions"], 3);
        assert_eq!(kept["after"]["oldest_revision"], status["oldest_revision"]);

        let done = lab.margay("store compact");
        assert_eq!(done.code, 0, "{}", done.err);
        assert!(done.out.starts_with(&format!("Successfully compacted {}\n", lab.location)), "{}", done.out);
        let after = lab.margay("store status -o json").json();
        assert_eq!((&after["oldest_revision"], &after["keys"]), (&after["revision"], &200.into()));
        assert_eq!(content(&lab.location), before);
        if lab.location.facts().name == "redb" {
            assert_eq!(done.err, "");
            let bytes = |json: &serde_json::Value| json["bytes"].as_u64().unwrap();
            let history = kept["before"]["log_bytes"].as_u64().unwrap();
            assert!(bytes(&after) + history / 2 < bytes(&kept["before"]), "{kept} {after}");
        } else {
            assert!(done.err.starts_with("note: this engine keeps the room in its files"), "{}", done.err);
        }
        let again = lab.margay("store compact");
        assert_eq!(again.code, 0, "there is nothing to give up: {}", again.err);
        lab.margay("store verify").answer();
        write(&lab.location, blocks(10));
        assert_eq!(lab.margay("store compact --keep 0").code, 1);
    }
}

#[test]
fn verbs_all_refuse_folder_of_newer_format() {
    for lab in Lab::each() {
        write(&lab.location, blocks(1));
        let identity = folder(&lab.location).join("store.id");
        let text = fs::read_to_string(&identity).unwrap();
        fs::write(&identity, text.replace("format 1", "format 2")).unwrap();
        for verb in ["store upgrade", "store verify", "store compact", "store backup /tmp/never-written-by-margay"] {
            let newer = lab.margay(verb).failure();
            assert!(newer.contains("format 2") && newer.contains("a newer margay made it"), "{verb}: {newer}");
        }
        assert!(!Path::new("/tmp/never-written-by-margay").exists());
    }
}

#[test]
fn verbs_all_name_missing_store() {
    for lab in Lab::each() {
        let file = lab.folder().join("backup");
        for verb in ["verify", "compact", "upgrade", &format!("backup {}", file.display())] {
            let error = lab.margay(&format!("store {verb}")).failure();
            assert!(error.contains("there is no store at") && error.contains("hint: "), "{verb}: {error}");
        }
        assert!(!lab.exists() && !file.exists());
        assert!(!lab.folder().join("backup.partial").exists());
    }
}

#[test]
fn verbs_all_have_help_with_examples() {
    for verb in ["status", "verify", "backup", "restore", "compact", "upgrade", "create"] {
        let help = margay(["store", verb, "--help"]);
        assert_eq!(help.code, 0);
        assert!(help.out.contains("Examples:\n  margay store "), "{verb}: {}", help.out);
    }
}
