//! Tests commands on unusable stores: each command reports what is wrong and does not change the store.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use datastore::Create;

use crate::common::{Done, TEST_TIMEOUT};
use crate::conditions::commands::{COMMANDS, Command, Kind};
use crate::conditions::ground::{Ground, done, for_each, process, run};
use crate::copy::copy_program;

/// Checks that a command fails, and that the error message names the store, the fault and a remedy.
fn tells(command: &Command, done: &Done, store: &str, what: &str) {
    let (words, err) = (command.words(), &done.err);
    assert_eq!(done.code, 1, "{words}: {}{err}", done.out);
    assert!(done.out.is_empty() || command.name == "store status", "{words}: {}", done.out);
    let error = err.lines().find(|line| line.starts_with("error: "));
    assert!(error.is_some_and(|line| line.contains(store) && line.contains(what)), "{words}: {err}");
    assert!(err.lines().any(|line| line.starts_with("hint: ")), "{words}: {err}");
    assert!(!err.contains("panic") && !err.contains("internal error") && err.lines().count() <= 3, "{words}: {err}");
}

/// Returns whether the command refused to run because it does not support this kind of store.
fn is_refused(done: &Done) -> bool {
    done.code == 1 && done.err.contains("is not for etcd") && done.err.contains("\nhint: ")
}

#[test]
fn store_is_missing_or_empty_folder() {
    for ground in Ground::each() {
        for_each(COMMANDS, |at, command| {
            for (name, is_there) in [("missing", false), ("empty", true)] {
                let store = ground.beside(&format!("{name}{at}"));
                let path = store.path().unwrap();
                if is_there {
                    fs::create_dir(path).unwrap();
                }
                let done = run(&ground.args(command, &store, at));
                if matches!(command.kind, Kind::Makes | Kind::Fills) {
                    assert_eq!(done.code, 0, "{}: {}", command.words(), done.err);
                    continue;
                }
                if command.name == "gc" {
                    // `gc` also runs when a machine starts, even if the store does not exist yet.
                    assert_eq!(done.code, 0, "{}", done.err);
                    assert!(done.out.starts_with(&format!("there is no store at {store}")), "{}{}", done.out, done.err);
                    continue;
                }
                tells(command, &done, &store.to_string(), "there is no store at");
                assert!(done.err.contains(&format!("margay --store {store} pool create")), "{}", done.err);
                let left = path.is_dir() && fs::read_dir(path).unwrap().next().is_none();
                assert_eq!((path.exists(), left), (is_there, is_there), "{}", command.words());
            }
        });
    }
}

#[test]
fn store_is_in_use_by_another_process() {
    for ground in Ground::each() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let store = &ground.lab.location;
        let held = runtime.block_on(datastore::open(store, &Create::Never.with_wait(TEST_TIMEOUT))).unwrap();
        for_each(COMMANDS, |at, command| {
            let mut args = ground.args(command, store, at);
            args.extend(["--lock-timeout".to_owned(), "1s".to_owned()]);
            let done = run(&args);
            tells(command, &done, &store.to_string(), "the store is in use by another process: waited 1s for its turn");
            // The error message never names a process that is itself waiting for the store. The message need not name
            // the lock holder, which cannot always be determined in time.
            assert!(!done.err.contains("(margay) has it"), "{}", done.err);
            assert!(done.err.contains("--lock-timeout"), "{}", done.err);
        });
        runtime.block_on(held.close()).unwrap();
    }
}

#[test]
fn store_cluster_is_unreachable() {
    let [ground, _] = Ground::each();
    let store = stores::at("etcd://127.0.0.1:1").unwrap();
    for_each(COMMANDS, |at, command| {
        let done = run(&ground.args(command, &store, at));
        if !is_refused(&done) {
            tells(command, &done, "127.0.0.1:1", "no connection");
            assert!(done.err.contains("hint: check etcd at this address with"), "{}", done.err);
        }
    });
}

#[test]
fn store_format_is_newer() {
    for ground in Ground::each() {
        let identity = ground.folder().join("store.id");
        let newer = fs::read_to_string(&identity).unwrap().replace("format 1", "format 9");
        fs::write(&identity, &newer).unwrap();
        for_each(COMMANDS, |at, command| {
            let done = run(&ground.args(command, &ground.lab.location, at));
            tells(command, &done, &ground.lab.location.to_string(), "the store has format 9");
        });
        assert_eq!(fs::read_to_string(&identity).unwrap(), newer);
    }
}

/// Shell script that runs a program while a folder is mounted read-only.
const READ_ONLY: &str = r#"mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@""#;

#[test]
fn store_file_system_is_not_writable() {
    for ground in Ground::each() {
        let folder = ground.folder().display().to_string();
        for_each(COMMANDS, |at, command| {
            let before = ["unshare", "--mount", "sh", "-c", READ_ONLY, &folder];
            let args = ground.args(command, &ground.lab.location, at);
            let done = done(process(&before, env!("CARGO_BIN_EXE_margay"), &args));
            assert!(!done.err.contains("mount:"), "this test needs root: {}", done.err);
            tells(command, &done, &ground.lab.location.to_string(), "is on a read-only file system");
        });
    }
}

fn allow(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn store_belongs_to_another_user() {
    for ground in Ground::each() {
        let program = ground.path("margay");
        copy_program(env!("CARGO_BIN_EXE_margay"), &program);
        allow(ground.lab.folder(), 0o777);
        for file in ["report.json", "backup", "export"] {
            allow(&ground.path(file), 0o644);
        }
        for_each(COMMANDS, |at, command| {
            let before = ["setpriv", "--reuid", "65534", "--clear-groups"];
            let args = ground.args(command, &ground.lab.location, at);
            let done = done(process(&before, program.to_str().unwrap(), &args));
            assert!(!done.err.contains("setpriv:"), "this test needs root: {}", done.err);
            tells(command, &done, &ground.lab.location.to_string(), "no permission for");
        });
    }
}

/// If root uses a store of another user and the engine recreates the store's files, the owner must keep access to the
/// files.
#[test]
fn store_stays_with_owner_when_root_used_it() {
    const OWNER: u32 = 65534;
    for engine in ["sled", "redb"] {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("margay");
        copy_program(env!("CARGO_BIN_EXE_margay"), &program);
        allow(folder.path(), 0o755);
        let home = folder.path().join("home");
        fs::create_dir(&home).unwrap();
        chown(&home, Some(OWNER), Some(OWNER)).unwrap();
        let url = format!("{engine}://{}", home.join("store").display());
        let run = |by: &[&str], args: &str| {
            let args: Vec<_> = ["--store", &url].into_iter().chain(args.split(' ')).map(Into::into).collect();
            let done = done(process(by, program.to_str().unwrap(), &args));
            assert_eq!(done.code, 0, "{engine}: {args:?}: {}", done.err);
        };
        let owner = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
        run(&owner, "pool create p 10.0.0.0/24 --manual");
        // The store's folder has a hard link and a symbolic link to a file elsewhere that belongs to root.
        let others = folder.path().join("others");
        fs::write(&others, "").unwrap();
        fs::hard_link(&others, home.join("store/link")).unwrap();
        symlink(&others, home.join("store/symlink")).unwrap();
        for file in ["head", "ballast"] {
            fs::remove_file(home.join("store").join(file)).unwrap();
        }
        for round in 0..20 {
            run(&[], &format!("pool create p{round} 10.1.{round}.0/24 --manual"));
        }
        assert_eq!(fs::metadata(&others).unwrap().uid(), 0);
        fs::remove_file(home.join("store/link")).unwrap();
        fs::remove_file(home.join("store/symlink")).unwrap();
        run(&owner, "pool create q 10.2.0.0/24 --manual");
        run(&owner, "ipam check");
    }
}
