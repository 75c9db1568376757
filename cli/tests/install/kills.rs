//! Killed after any system call that changes a file.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::tree::{Tree, files};

/// Everything that could change a file, or what it is called; those that a machine does not have are passed over.
const CALLS: &str = "?link,linkat,?rename,?renameat,renameat2,?mkdir,mkdirat,?unlink,unlinkat,?rmdir,fsync,fdatasync,write,\
                     copy_file_range,sendfile,?chmod,fchmod,fchmodat,openat";

/// Runs `margay install` and kills it after the call of this number. True if it was killed.
fn killed(tree: &Tree, args: &[&str], number: usize) -> bool {
    let output = Command::new("strace")
        .args(["-qq", "-o", "/dev/null", "-e", &format!("trace={CALLS}")])
        .args(["-e", &format!("inject={CALLS}:signal=SIGKILL:when={number}")])
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

#[test]
fn an_installation_that_was_killed_anywhere_is_finished_or_undone() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    let mut unfinished = 0;
    for number in 1.. {
        let was_killed = killed(&tree, &["--beside-calico"], number);
        // There is a program at any time.
        let version = tree.version();
        assert!(version == "v3.28.0" || version.starts_with("margay-ipam "), "{version}");
        let status = tree.install(&["--status"]);
        assert_eq!(status.code == Some(0), version.starts_with("margay-ipam "), "{}{}", status.out, status.err);
        unfinished += usize::from(status.err.contains("was interrupted"));
        if number % 2 == 0 || !was_killed {
            tree.install(&["--beside-calico"]).ok();
            assert!(tree.version().starts_with("margay-ipam "));
        }
        tree.install(&["--undo"]).ok();
        assert_eq!(files(&tree.bin()), before, "killed after call {number}");
        if !was_killed {
            assert!(number > 20 && unfinished > 3, "it was killed at {number} places, and {unfinished} times within");
            return;
        }
    }
}

#[test]
fn an_undo_that_was_killed_anywhere_is_finished() {
    let tree = Tree::new();
    let before = files(&tree.bin());
    for number in 1.. {
        tree.install(&["--beside-calico"]).ok();
        let was_killed = killed(&tree, &["--undo"], number);
        let version = tree.version();
        assert!(version == "v3.28.0" || version.starts_with("margay-ipam "), "{version}");
        tree.install(&["--undo"]).ok();
        assert_eq!(files(&tree.bin()), before, "killed after call {number}");
        if !was_killed {
            assert!(number > 10, "it was killed at {number} places only");
            return;
        }
    }
}
