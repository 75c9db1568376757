//! Tests `margay store restore`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use datastore::Location;

use crate::common::{Done, Lab, margay};
use crate::store::content::{beside, content, folder, id, odd_rows, other, write};

fn restore(location: &Location, file: &Path, more: &[&str]) -> Done {
    let (url, file) = (location.to_string(), file.display().to_string());
    margay(["--store", &url, "store", "restore", &file].into_iter().chain(more.iter().copied()))
}

#[test]
fn restore_moves_store_between_engines() {
    for lab in Lab::each() {
        write(&lab.location, odd_rows());
        lab.margay("pool create main 10.65.0.0/24").answer();
        let ip = lab.assign("net1", "c1");
        let (there, back) = (lab.folder().join("there"), lab.folder().join("back"));
        lab.margay(&format!("store backup {}", there.display())).answer();
        let moved = other(&lab);
        let done = restore(&moved, &there, &[]);
        assert_eq!(done.code, 0, "{}", done.err);
        assert!(done.err.contains("will be assigned again"), "{}", done.err);
        assert_eq!(content(&moved), content(&lab.location));
        assert_ne!(id(&moved), id(&lab.location), "it is another store");
        assert!(beside(&moved).is_empty(), "{:?}", beside(&moved));

        let url = moved.to_string();
        margay(["--store", &url, "store", "backup", back.to_str().unwrap()]).answer();
        let text =
            |file: &Path| fs::read_to_string(file).unwrap().lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
        let (there_rows, back_rows) = (text(&there), text(&back));
        assert_eq!(there_rows[..there_rows.len() - 1], back_rows[..back_rows.len() - 1], "byte for byte");
        let done = restore(&lab.location, &back, &["--replace"]);
        assert_eq!(done.code, 0, "{}", done.err);
        assert!(lab.margay(&format!("ipam show --ip {ip}")).answer().contains("Handle ID: net1.c1"));
        assert_ne!(lab.assign("net1", "c2"), ip);
    }
}

#[test]
fn restore_replaces_store_with_keys_only_when_told() {
    for lab in Lab::each() {
        write(&lab.location, odd_rows());
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let before = content(&lab.location);
        write(&lab.location, [("later".to_owned(), b"1".to_vec())]);
        let (old, old_id) = (content(&lab.location), id(&lab.location));
        let refused = restore(&lab.location, &file, &[]).failure();
        assert!(refused.contains("it has 6 keys\nhint: use --replace"), "{refused}");
        assert_eq!((content(&lab.location), id(&lab.location)), (old.clone(), old_id.clone()));
        assert!(beside(&lab.location).is_empty());

        for number in 1..=2 {
            let done = restore(&lab.location, &file, &["--replace", "-o", "json"]);
            let aside = beside(&lab.location).pop().unwrap();
            assert_eq!(aside, folder(&lab.location).with_extension(format!("replaced-{number}")));
            assert!(done.err.contains(&format!("what was there is in {} now", aside.display())), "{}", done.err);
            assert_eq!(done.json()["replaced"], aside.to_str().unwrap());
            assert_eq!(content(&lab.location), before);
        }
        let first = folder(&lab.location).with_extension("replaced-1");
        let first = lab.location.moved_to(first);
        assert_eq!((content(&first), id(&first)), (old, old_id), "the old store is as it was");
    }
}

#[test]
fn restore_replaces_and_keeps_damaged_store() {
    for lab in Lab::each() {
        write(&lab.location, odd_rows());
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let before = content(&lab.location);
        fs::write(folder(&lab.location).join("store.id"), "garbage").unwrap();
        fs::remove_file(folder(&lab.location).join("queue")).unwrap();
        let refused = restore(&lab.location, &file, &[]).failure();
        assert!(refused.contains("damaged") && refused.contains("--replace"), "{refused}");
        assert_eq!(restore(&lab.location, &file, &["--replace"]).code, 0);
        assert_eq!(content(&lab.location), before);
        let aside = folder(&lab.location).with_extension("replaced-1");
        assert_eq!(fs::read_to_string(aside.join("store.id")).unwrap(), "garbage");
    }
}

#[test]
fn restore_fills_empty_store_or_folder() {
    for lab in Lab::each() {
        write(&lab.location, odd_rows());
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let before = content(&lab.location);

        let empty = other(&lab);
        write(&empty, []);
        assert_eq!(restore(&empty, &file, &[]).code, 0);
        assert_eq!(content(&empty), before);

        let bare = stores::of_engine("redb", lab.folder().join("bare")).unwrap();
        fs::create_dir(folder(&bare)).unwrap();
        assert_eq!(restore(&bare, &file, &[]).code, 0);
        assert_eq!(content(&bare), before);

        // Leaves the store's files as a process leaves them that is killed while it creates the store.
        let unfinished = stores::of_engine("sled", lab.folder().join("unfinished")).unwrap();
        fs::create_dir(folder(&unfinished)).unwrap();
        for name in ["queue", "creating"] {
            fs::write(folder(&unfinished).join(name), "").unwrap();
        }
        assert_eq!(restore(&unfinished, &file, &[]).code, 0);
        assert_eq!(content(&unfinished), before);
    }
}

#[test]
fn restore_leaves_folder_alone_when_it_is_no_store() {
    let [lab, _] = Lab::each();
    write(&lab.location, odd_rows());
    let file = lab.folder().join("backup");
    lab.margay(&format!("store backup {}", file.display())).answer();
    let precious = lab.folder().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("letter"), "dear").unwrap();
    for more in [&[][..], &["--replace"]] {
        let refused = restore(&stores::of_engine("redb", &precious).unwrap(), &file, more).failure();
        assert!(refused.contains("holds letter and no store"), "{refused}");
        assert_eq!(fs::read_to_string(precious.join("letter")).unwrap(), "dear");
    }
    let names: Vec<_> = fs::read_dir(lab.folder()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    let refused = restore(&stores::of_engine("redb", &file).unwrap(), &file, &[]).failure();
    assert!(refused.contains("is in the way"), "{refused}");
}

#[test]
fn restore_keeps_link_to_store() {
    for lab in Lab::each() {
        write(&lab.location, odd_rows());
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let link = lab.folder().join("link");
        symlink(folder(&lab.location), &link).unwrap();
        let linked = lab.location.moved_to(&link);
        assert_eq!(restore(&linked, &file, &["--replace"]).code, 0);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(beside(&lab.location).len(), 1);
        assert_eq!(content(&linked), content(&lab.location));
    }
}
