//! Tests `margay install` with a kill at each system call that changes a file.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::install::tree::{Tree, files};

/// All system calls that change a file or a file's name; `?` marks calls that some machines lack. `openat` is omitted,
/// because a kill at `openat` has the same result as a kill at the first call that changes the opened file.
const CALLS: [&str; 17] = [
    "?link",
    "linkat",
    "?rename",
    "?renameat",
    "renameat2",
    "?mkdir",
    "mkdirat",
    "?unlink",
    "unlinkat",
    "?rmdir",
    "fsync",
    "write",
    "copy_file_range",
    "sendfile",
    "?chmod",
    "fchmod",
    "fchmodat",
];

/// Runs `margay install`, kills it just before the `number`-th system call with this name, and returns whether it was
/// killed.
fn killed(tree: &Tree, args: &[&str], call: &str, number: usize) -> bool {
    let output = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "-e", &format!("trace={call}")])
        .args(["-e", &format!("inject={call}:signal=SIGKILL:when={number}")])
        .arg(env!("CARGO_BIN_EXE_margay"))
        .args(tree.args(args))
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output()
        .unwrap_or_else(|error| panic!("{error} (this test needs strace)"));
    let killed = output.status.signal() == Some(9);
    assert!(killed || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    killed
}

/// Runs `margay install` with these arguments once for each call of a system call in [`CALLS`], and kills it at this
/// call. The function `before` prepares each run of `margay install`, and `after` checks the files after the kill.
/// Returns how often `margay install` was killed.
fn kill_everywhere(tree: &Tree, args: &[&str], before: impl Fn(), mut after: impl FnMut(&str)) -> usize {
    let mut places = 0;
    for call in CALLS {
        for number in 1.. {
            before();
            if !killed(tree, args, call, number) {
                after(&format!("not killed at {call}"));
                break;
            }
            places += 1;
            // Whenever `margay install` is killed, the plugin's path has a working program.
            let version = if args.contains(&"--main-plugin") { tree.main_version() } else { tree.version() };
            assert!(version == "v3.28.0" || version.starts_with("margay-"), "{version}");
            after(&format!("killed at {call} {number}"));
        }
    }
    places
}

#[test]
fn install_is_finished_or_undone_when_killed_anywhere() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    let (mut unfinished, mut repeat) = (0, false);
    let places = kill_everywhere(
        &tree,
        &["--beside-calico"],
        || (),
        |place| {
            let status = tree.install(&["--status"]);
            assert_eq!(status.code == Some(0), tree.version().starts_with("margay-ipam "), "{place}: {}", status.err);
            unfinished += usize::from(status.err.contains("was interrupted"));
            // After every second kill, the test repeats the installation before it undoes the installation.
            repeat = !repeat;
            if repeat {
                tree.install(&["--beside-calico"]).ok();
                assert!(tree.version().starts_with("margay-ipam "), "{place}");
            }
            tree.install(&["--undo"]).ok();
            assert_eq!(files(&tree.bin()), before, "{place}");
        },
    );
    assert!(places > 12 && unfinished > 8, "{places} places, {unfinished} of them within");
}

#[test]
fn undo_is_finished_when_killed_anywhere() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    let install = || {
        tree.install(&["--beside-calico"]).ok();
    };
    let places = kill_everywhere(&tree, &["--undo"], install, |place| {
        tree.install(&["--undo"]).ok();
        assert_eq!(files(&tree.bin()), before, "{place}");
    });
    assert!(places > 6, "{places} places");
}

#[test]
fn main_plugin_install_is_finished_when_killed_anywhere() {
    let tree = Tree::with_main_plugin();
    tree.install(&["--beside-calico"]).ok();
    let before = files(&tree.bin());
    let (mut unfinished, mut repeat) = (0, false);
    let places = kill_everywhere(
        &tree,
        &["--beside-calico", "--main-plugin"],
        || (),
        |place| {
            let status = tree.install(&["--status"]);
            unfinished += usize::from(status.err.contains("was interrupted"));
            repeat = !repeat;
            if repeat {
                tree.install(&["--beside-calico", "--main-plugin"]).ok();
                assert!(tree.main_version().starts_with("margay-cni "), "{place}");
            }
            tree.install(&["--undo", "--main-plugin"]).ok();
            assert_eq!(files(&tree.bin()), before, "{place}");
        },
    );
    assert!(places > 10 && unfinished > 6, "{places} places, {unfinished} of them within");
}

#[test]
fn main_plugin_undo_is_finished_when_killed_anywhere() {
    let tree = Tree::with_main_plugin();
    let before = files(&tree.bin());
    let install = || {
        tree.install(&["--beside-calico"]).ok();
        tree.install(&["--beside-calico", "--main-plugin"]).ok();
    };
    let places = kill_everywhere(&tree, &["--undo"], install, |place| {
        tree.install(&["--undo"]).ok();
        assert_eq!(files(&tree.bin()), before, "{place}");
    });
    assert!(places > 12, "{places} places");
}
