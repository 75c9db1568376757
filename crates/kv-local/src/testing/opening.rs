//! Tests how an engine's store opens when it is missing, new, open in another process, made by another program, or so
//! damaged that it looks like a new store.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv::{Error, ErrorKind};
use tempfile::TempDir;

use super::open;
use super::{Duty, check, create, run, step};
use crate::{Create, Engine, OpenOptions, open_blocking};

/// The requirements on opening a store, each with the name of its test.
pub(crate) const DUTIES: &[(&str, Duty)] = &[
    ("store_is_named_and_not_made_when_missing", store_is_named_and_not_made_when_missing),
    ("store_stays_same_when_reopened", store_stays_same_when_reopened),
    ("store_is_exclusive_while_open", store_is_exclusive_while_open),
    ("store_of_another_engine_is_named", store_of_another_engine_is_named),
    ("store_is_found_beside_foreign_file", store_is_found_beside_foreign_file),
    ("folder_is_left_alone_when_foreign", folder_is_left_alone_when_foreign),
    ("folder_becomes_store_when_empty", folder_becomes_store_when_empty),
    ("file_in_place_of_store_is_named", file_in_place_of_store_is_named),
    ("store_is_never_made_anew_when_damaged", store_is_never_made_anew_when_damaged),
    ("identity_is_refused_when_foreign", identity_is_refused_when_foreign),
    ("identity_is_restored_when_lost", identity_is_restored_when_lost),
    ("creation_starts_again_when_unfinished", creation_starts_again_when_unfinished),
    ("creation_mark_is_removed_when_store_is_complete", creation_mark_is_removed_when_store_is_complete),
    ("store_files_are_private", store_files_are_private),
];

/// The name and the function of the test that a store with a journal does not open without the journal.
pub(crate) const JOURNAL_DUTY: (&str, Duty) =
    ("store_is_refused_without_its_journal", store_is_refused_without_its_journal);

fn refusal(engine: &dyn Engine, path: &Path) -> Error {
    for create in [Create::Never, Create::IfMissing] {
        let options = OpenOptions::default().with_create(create).with_wait(Duration::from_millis(50));
        let error = open_blocking(engine, path, &options).expect_err("it opened");
        if create == Create::IfMissing {
            return error;
        }
    }
    unreachable!()
}

fn engine_file(engine: &dyn Engine, path: &Path) -> PathBuf {
    path.join(engine.files()[0])
}

/// Creates a store with the keys of one [`step`].
fn small_store(engine: &dyn Engine, path: &Path) {
    let store = create(engine, path).unwrap();
    run(async {
        step(&store, 0).await.unwrap();
        store.close().await.unwrap();
    });
}

/// Creates a temporary folder with a [`small_store`]. Returns the temporary folder and the store's path.
fn folder_with_store(engine: &dyn Engine) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    small_store(engine, &path);
    (folder, path)
}

fn assert_whole(engine: &dyn Engine, path: &Path) {
    let store = open(engine, path).unwrap();
    run(async { check(&store, 1).await.unwrap().unwrap() });
}

fn store_is_named_and_not_made_when_missing(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("a/b/store"), folder.path().to_owned()] {
        let error = open(engine, &path).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Missing);
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "looking leaves nothing behind");
}

fn store_stays_same_when_reopened(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/store");
    let store = create(engine, &path).unwrap();
    let id = store.id();
    run(async {
        step(&store, 0).await.unwrap();
        store.close().await.unwrap();
    });
    let text = fs::read_to_string(path.join("store.id")).unwrap();
    assert_eq!(text, format!("engine {}\nformat 1\nid {id}\n", engine.name()));
    for again in [create, open] {
        let store = again(engine, &path).unwrap();
        assert_eq!(store.id(), id);
        run(store.close()).unwrap();
    }
    assert_whole(engine, &path);
}

fn store_is_exclusive_while_open(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = create(engine, &path).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for name in [&path, &link] {
        let error = refusal(engine, name);
        assert_eq!(*error.kind(), ErrorKind::Locked);
        assert!(error.to_string().contains(&format!("process {} (", std::process::id())), "{error}");
    }
    run(store.close()).unwrap();
    let store = create(engine, &link).unwrap();
    assert_eq!(*refusal(engine, &path).kind(), ErrorKind::Locked);
    drop(store);
    create(engine, &path).unwrap();
}

fn store_of_another_engine_is_named(engine: &dyn Engine) {
    let identity = format!("engine strange\nformat 1\nid {}\n", uuid());
    for (file, content, said) in [
        ("store.id", identity.as_str(), "set datastore_type to strange"),
        ("strange.db", "x", "holds strange.db and no store"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("queue"), "").unwrap();
        fs::write(path.join(file), content).unwrap();
        let error = refusal(engine, &path);
        assert_eq!(*error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(said), "{error}");
        assert!(!path.join(engine.entry()).exists());
    }
}

/// A store that has lost its file `store.id` must open even if its folder contains another program's file.
fn store_is_found_beside_foreign_file(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    small_store(engine, &path);
    fs::rename(path.join("store.id"), path.join("store.id.bak")).unwrap();
    assert_whole(engine, &path);
}

fn uuid() -> &'static str {
    "67e55044-10b1-426f-9247-bb680e5fe0c8"
}

fn folder_is_left_alone_when_foreign(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("letter.txt"), "x").unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let error = create(engine, folder.path()).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("letter.txt"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o755);
}

fn folder_becomes_store_when_empty(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(folder.path().join("lost+found")).unwrap();
    small_store(engine, folder.path());
    assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o700);
    assert_whole(engine, folder.path());
}

fn file_in_place_of_store_is_named(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "precious").unwrap();
    for path in [file.clone(), file.join("store")] {
        let error = refusal(engine, &path);
        assert_eq!(*error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("in the way"), "{error}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    // The test replaces one file of the store after another by a folder, so that opening the store fails.
    let store = folder.path().join("store");
    small_store(engine, &store);
    for name in ["queue", "store.id"] {
        let (path, kept) = (store.join(name), store.join("kept"));
        fs::rename(&path, &kept).unwrap();
        fs::create_dir(&path).unwrap();
        let kind = refusal(engine, &store).kind().clone();
        assert!(matches!(kind, ErrorKind::Io), "{name}: {kind:?}");
        fs::remove_dir(&path).unwrap();
        fs::rename(&kept, &path).unwrap();
    }
    assert_whole(engine, &store);
}

/// A store that has lost one of its files must never be mistaken for a new store, and must work again once the lost
/// file is restored.
fn store_is_never_made_anew_when_damaged(engine: &dyn Engine) {
    let (folder, path) = folder_with_store(engine);
    for name in engine.files() {
        let (file, kept) = (path.join(name), folder.path().join("kept"));
        fs::rename(&file, &kept).unwrap();
        for present in ["nothing", "an empty file", "a folder"] {
            match present {
                "an empty file" => fs::write(&file, "").unwrap(),
                "a folder" => fs::create_dir(&file).unwrap(),
                _ => {}
            }
            let error = refusal(engine, &path);
            assert_eq!(*error.kind(), ErrorKind::Corrupt, "{name}, {present}");
            assert!(error.to_string().contains("restore") && error.to_string().contains(name), "{error}");
            let _ = fs::remove_file(&file);
            let _ = fs::remove_dir(&file);
        }
        fs::rename(&kept, &file).unwrap();
        assert_whole(engine, &path);
    }
}

/// If an engine has a journal, its newest commits are only in the journal. A store that has lost its journal must be
/// refused, even if the file `head`, which records the newest revision, is lost as well.
fn store_is_refused_without_its_journal(engine: &dyn Engine) {
    let (_folder, path) = folder_with_store(engine);
    let (journal, head) = (path.join("journal"), path.join("head"));
    let (commits, newest) = (fs::read(&journal).unwrap(), fs::read(&head).unwrap());
    for gone in ["missing", "empty", "cut off"] {
        for beside in ["its head", "an empty head", "no head"] {
            match gone {
                "missing" => fs::remove_file(&journal).unwrap(),
                "empty" => fs::write(&journal, "").unwrap(),
                _ => fs::write(&journal, &commits[..commits.len() / 2]).unwrap(),
            }
            match beside {
                "its head" => fs::write(&head, &newest).unwrap(),
                "an empty head" => fs::write(&head, "").unwrap(),
                _ => fs::remove_file(&head).unwrap(),
            }
            let before = fs::read(&journal).ok();
            let error = refusal(engine, &path);
            assert_eq!(*error.kind(), ErrorKind::Corrupt, "{gone}, {beside}: {error}");
            let said = error.to_string();
            assert!(said.contains("journal") && said.contains("restore"), "{gone}, {beside}: {said}");
            assert_eq!(fs::read(&journal).ok(), before, "{gone}, {beside}: it was left as it was");
            fs::write(&journal, &commits).unwrap();
            assert_whole(engine, &path);
        }
    }
    // Losing only the file `head` must not lose any data.
    fs::remove_file(&head).unwrap();
    assert_whole(engine, &path);
}

fn identity_is_refused_when_foreign(engine: &dyn Engine) {
    let (_folder, path) = folder_with_store(engine);
    let identity = path.join("store.id");
    let good = fs::read_to_string(&identity).unwrap();
    let strange = format!("engine {}\nformat 1\nid {}\n", engine.name(), uuid());
    let later = format!("engine {}\nformat 2\nsomething else\n", engine.name());
    let cases = [
        ("", ErrorKind::Corrupt),
        ("\0\0\0\0\0\0\0\0", ErrorKind::Corrupt),
        (&good[..good.len() / 2], ErrorKind::Corrupt),
        (&strange, ErrorKind::Corrupt),
        (&later, ErrorKind::UnknownFormat { found: 2 }),
    ];
    for (text, kind) in cases {
        fs::write(&identity, text).unwrap();
        let error = refusal(engine, &path);
        assert_eq!(*error.kind(), kind, "{text:?}: {error}");
        assert!(error.detail().is_some(), "{error}");
        assert_eq!(fs::read_to_string(&identity).unwrap(), text, "it was left as it was");
    }
    fs::write(&identity, good).unwrap();
    assert_whole(engine, &path);
}

/// If the file `store.id` is lost, the id must be restored from the store's rows, and from nowhere else.
fn identity_is_restored_when_lost(engine: &dyn Engine) {
    let (_folder, path) = folder_with_store(engine);
    let identity = path.join("store.id");
    let good = fs::read_to_string(&identity).unwrap();
    fs::remove_file(&identity).unwrap();
    assert_whole(engine, &path);
    assert_eq!(fs::read_to_string(&identity).unwrap(), good);

    fs::remove_file(&identity).unwrap();
    fs::write(engine_file(engine, &path), "").unwrap();
    assert_eq!(*refusal(engine, &path).kind(), ErrorKind::Corrupt, "nothing that could tell");
    assert!(!identity.exists());
}

/// An interrupted creation leaves the creation marker and maybe some of the engine's files in the folder. A
/// half-created store is not continued: the next attempt must create the store from scratch.
fn creation_starts_again_when_unfinished(engine: &dyn Engine) {
    let folder = tempfile::tempdir().unwrap();
    for leftover in
        ["nothing", "an empty file", "garbage", "a whole table", "a table alone", "a journal cut off", "an old draft"]
    {
        let path = folder.path().join(leftover.replace(' ', "-"));
        small_store(engine, &path);
        fs::remove_file(path.join("store.id")).unwrap();
        fs::write(path.join("creating"), "").unwrap();
        match leftover {
            "nothing" => {
                let _ = fs::remove_file(path.join(engine.entry()));
                let _ = fs::remove_dir_all(path.join(engine.entry()));
            }
            "an empty file" => fs::write(engine_file(engine, &path), "").unwrap(),
            "garbage" => fs::write(engine_file(engine, &path), "garbage").unwrap(),
            "an old draft" => fs::write(path.join("store.new"), "engine x").unwrap(),
            "a table alone" => {
                for name in ["journal", "head"] {
                    let _ = fs::remove_file(path.join(name));
                }
            }
            "a journal cut off" => fs::write(path.join("journal"), "cut").unwrap(),
            _ => {}
        }
        assert_eq!(*open(engine, &path).unwrap_err().kind(), ErrorKind::Missing, "{leftover}");
        let store = create(engine, &path).unwrap();
        run(async {
            check(&store, 0).await.unwrap().unwrap();
            step(&store, 0).await.unwrap();
            store.close().await.unwrap();
        });
        assert_whole(engine, &path);
        assert!(!path.join("creating").exists() && !path.join("store.new").exists());
    }
}

/// Creating a store must end with the removal of the creation marker. If a complete store still has the marker, opening
/// it must succeed and remove the marker.
fn creation_mark_is_removed_when_store_is_complete(engine: &dyn Engine) {
    let (_folder, path) = folder_with_store(engine);
    fs::write(path.join("creating"), "").unwrap();
    assert_whole(engine, &path);
    assert!(!path.join("creating").exists());
}

/// Only the owner may access the store's files and folders, including those that are created later.
fn store_files_are_private(engine: &dyn Engine) {
    fn collect(path: &Path, found: &mut u32) {
        let metadata = fs::metadata(path).unwrap();
        let mode = metadata.permissions().mode() & 0o7777;
        assert_eq!(mode, if metadata.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
        *found += 1;
        if metadata.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                collect(&entry.unwrap().path(), found);
            }
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    for n in 0..5 {
        let store = create(engine, &path).unwrap();
        run(step(&store, n)).unwrap();
        let mut found = 0;
        collect(&path, &mut found);
        assert!(found >= 4, "queue, store.id and the engine's");
    }
}
