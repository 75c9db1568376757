//! Tests `margay store backup`, and how restores handle damaged backups.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use crate::common::Lab;
use crate::store::content::{content, folder, odd_rows, other, write};

#[test]
fn backup_is_private_readable_file() {
    for lab in Lab::each() {
        write(&lab.location, [("/calico/ipam/v2/config".to_owned(), b"{\"strictAffinity\":false}".to_vec())]);
        let file = lab.folder().join("backup.jsonl");
        let json = lab.margay(&format!("store backup {} -o json", file.display())).json();
        assert_eq!((&json["revision"], &json["keys"]), (&2.into(), &1.into()));
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(json["bytes"], text.len());
        assert!(lines[0].starts_with("{\"margay_backup\":1,"), "{text}");
        assert_eq!(lines[1], r#"{"key":"/calico/ipam/v2/config","value":"{\"strictAffinity\":false}"}"#);
        assert_eq!(lines.len(), 3);
        // The `sha256sum` command line of the book computes the checksum that is stored in the backup file.
        let by_hand = std::process::Command::new("sh")
            .args(["-c", &format!("head -n -1 {} | sha256sum | cut -d' ' -f1", file.display())])
            .output()
            .unwrap();
        let sum = String::from_utf8(by_hand.stdout).unwrap();
        assert_eq!(lines[2], format!("{{\"keys\":1,\"sha256\":\"{}\"}}", sum.trim()));
        assert_eq!(fs::read_dir(lab.folder()).unwrap().count(), 2, "the store and the backup, no more");
    }
}

#[test]
fn backup_overwrites_file_only_by_force() {
    let [lab, _] = Lab::each();
    write(&lab.location, odd_rows());
    let file = lab.folder().join("backup");
    fs::write(&file, "mine").unwrap();
    let refused = lab.margay(&format!("store backup {}", file.display())).failure();
    assert!(refused.contains("exists already\nhint: ") && refused.contains("--force"), "{refused}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    lab.margay(&format!("store backup --force {}", file.display())).answer();
    assert!(fs::read_to_string(&file).unwrap().starts_with("{\"margay_backup\":1,"));
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);

    let link = lab.folder().join("link");
    symlink(&file, &link).unwrap();
    for odd in [link.as_path(), lab.folder(), std::path::Path::new("/dev/null"), std::path::Path::new("/")] {
        let refused = lab.margay(&format!("store backup --force {}", odd.display())).failure();
        assert!(refused.contains("is no regular file\nhint: "), "{refused}");
    }
    let nowhere = lab.margay(&format!("store backup {}/no/folder", lab.folder().display())).failure();
    assert!(nowhere.contains("cannot write") && nowhere.contains("create the folder first"), "{nowhere}");
}

/// The test changes one bit of each byte of a backup, and cuts the backup at every length.
#[test]
fn backup_is_refused_before_any_write_when_damaged() {
    let [lab, _] = Lab::each();
    let rows = odd_rows().into_iter().filter(|(_, value)| value.len() < 1000);
    write(&lab.location, rows);
    let file = lab.folder().join("backup");
    lab.margay(&format!("store backup {}", file.display())).answer();
    let good = fs::read(&file).unwrap();
    let target = other(&lab);
    let restore =
        || crate::common::margay(["--store", &target.to_string(), "store", "restore", file.to_str().unwrap()]);
    let refused = |what: &str| {
        let error = restore().failure();
        assert!(error.contains("\nhint: "), "{what}: {error}");
        assert!(!target.path().unwrap().parent().unwrap().exists(), "{what}: something was made");
        error
    };
    // The test changes one bit of each byte in turn, and uses a different bit position for the next byte. A unit test
    // of the backup reader flips every bit without starting processes.
    for (at, bit) in (0..good.len()).zip((0..8).cycle()) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << bit;
        fs::write(&file, bytes).unwrap();
        refused(&format!("byte {at}, bit {bit}"));
    }
    for length in 0..good.len() {
        fs::write(&file, &good[..length]).unwrap();
        refused(&format!("length {length}"));
    }
    fs::write(&file, [&good[..], b"{}\n"].concat()).unwrap();
    assert!(refused("more").contains("something comes after its end"));
    let lines: Vec<_> = good.split_inclusive(|byte| *byte == b'\n').collect();
    fs::write(&file, [lines[0], lines[2], lines[1]].concat()).unwrap();
    assert!(refused("order").contains("line 3 is out of order"));
    let newer = String::from_utf8_lossy(lines[0]).replace("\"margay_backup\":1", "\"margay_backup\":3");
    fs::write(&file, [newer.as_bytes(), b"what comes then is not known\n"].concat()).unwrap();
    let error = refused("newer");
    assert!(
        error.contains("has format 3, and this version knows up to 2") && error.contains("a newer version"),
        "{error}"
    );
    for (text, words) in
        [("", "is no backup"), ("hello\n", "is no backup"), ("{\"margay_backup\":1}\n", "its first line")]
    {
        fs::write(&file, text).unwrap();
        assert!(refused(text).contains(words), "{text}");
    }
    fs::remove_file(&file).unwrap();
    assert!(refused("gone").contains("cannot read"));

    fs::write(&file, &good).unwrap();
    assert_eq!(restore().code, 0, "the good one is still good");
    assert_eq!(content(&target), content(&lab.location));
}

#[test]
fn backup_of_empty_store_works() {
    for lab in Lab::each() {
        write(&lab.location, []);
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let target = other(&lab);
        let done = crate::common::margay(["--store", &target.to_string(), "store", "restore", file.to_str().unwrap()]);
        assert_eq!(done.code, 0, "{}", done.err);
        assert!(content(&target).is_empty());
    }
}

#[test]
fn backup_is_refused_when_store_is_damaged() {
    for lab in Lab::each() {
        write(&lab.location, odd_rows());
        let path = folder(&lab.location);
        let engine = if path.join("sled").exists() { path.join("sled/db") } else { path.join("db.redb") };
        fs::write(engine, "").unwrap();
        let file = lab.folder().join("backup");
        let error = lab.margay(&format!("store backup {}", file.display())).failure();
        assert!(error.contains("damaged") && error.contains("restore"), "{error}");
        assert!(!file.exists() && !lab.folder().join("backup.partial").exists());
    }
}
