//! Tests backup and export files that earlier versions of Margay wrote. Every version must be able to read files of
//! earlier versions, and must write the same rows when it exports the data again.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::Lab;

/// Returns the path of a backup or export file that an earlier version of Margay wrote.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Returns the lines of a backup or export file that contain keys: all lines except the first and the last.
fn rows(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    lines[1..lines.len() - 1].iter().map(|line| (*line).to_owned()).collect()
}

#[test]
fn golden_backup_of_each_form_is_restored_exactly() {
    for form in ["form-1.jsonl", "form-2.jsonl"] {
        for lab in Lab::each() {
            let (file, again) = (golden(form), lab.folder().join("again.jsonl"));
            lab.margay(&format!("store restore {} -o json", file.display())).json();
            lab.margay(&format!("store backup {}", again.display())).answer();
            assert_eq!(rows(&again), rows(&file), "{form}");
            let leases = |path: &Path| {
                let text = fs::read_to_string(path).unwrap();
                let header: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
                header["leases"].clone()
            };
            assert_eq!(leases(&again), leases(&file), "{form}");
        }
    }
}

#[test]
fn golden_export_is_imported_exactly() {
    for lab in Lab::each() {
        let (file, again) = (golden("form-1.jsonl"), lab.folder().join("again.jsonl"));
        lab.margay(&format!("import {} -o json", file.display())).json();
        lab.margay(&format!("export {}", again.display())).answer();
        assert_eq!(rows(&again), rows(&file));
    }
}

#[test]
fn golden_import_of_earlier_version_goes_on() {
    for lab in Lab::each() {
        let file = golden("form-1.jsonl");
        lab.margay(&format!("store restore {} -o json", golden("import-begun.jsonl").display())).json();
        let other = lab.margay(&format!("import {} --as-node other", file.display())).failure();
        assert!(other.contains("is being filled from /var/backups/ipam.jsonl already"), "{other}");
        let json = lab.margay(&format!("import {} -o json", file.display())).json();
        assert_eq!((&json["written"], &json["keys"]), (&6.into(), &8.into()), "{json}");
        let again = lab.folder().join("again.jsonl");
        lab.margay(&format!("export {}", again.display())).answer();
        assert_eq!(rows(&again), rows(&file));
    }
}
