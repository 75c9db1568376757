//! Tests stores on full disks and on read-only disks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Lab, margay};
use crate::store::content::{blocks, content, write};

/// A mounted tmpfs (needs root), which is unmounted when the value is dropped.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, size: &str) -> Self {
        fs::create_dir(at).unwrap();
        run("mount", &["-t", "tmpfs", "-o", &format!("size={size},mode=700"), "margay-test", at.to_str().unwrap()]);
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "these tests need root: {program} {args:?}: {said}");
}

#[test]
fn backup_leaves_nothing_new_when_disk_is_full() {
    for lab in Lab::each() {
        write(&lab.location, blocks(400));
        let disk = lab.folder().join("disk");
        let _mount = Mount::tmpfs(&disk, "2m");
        let file = disk.join("backup");
        fs::write(&file, "an older one").unwrap();
        for (name, force) in [("backup", " --force"), ("other", "")] {
            let error = lab.margay(&format!("store backup {}{force}", disk.join(name).display())).failure();
            assert!(error.contains("No space left") && error.contains("hint: free some disk space"), "{error}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "an older one");
        assert_eq!(fs::read_dir(&disk).unwrap().count(), 1, "nothing is left of them");
        lab.margay("store verify").answer();
    }
}

#[test]
fn restore_leaves_nothing_when_disk_is_full() {
    for lab in Lab::each() {
        write(&lab.location, blocks(400));
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let disk = lab.folder().join("disk");
        let _mount = Mount::tmpfs(&disk, "4m");
        for engine in ["sled", "redb"] {
            let target = stores::of_engine(engine, disk.join("store")).unwrap();
            let run = || margay(["--store", &target.to_string(), "store", "restore", file.to_str().unwrap()]);
            let error = run().failure();
            assert!(error.contains("space"), "{error}");
            assert_eq!(fs::read_dir(&disk).unwrap().count(), 0, "nothing is left of it");
        }
        assert_eq!(content(&lab.location).len(), 400);
    }
}

#[test]
fn read_only_file_system_is_named() {
    for lab in Lab::each() {
        write(&lab.location, blocks(3));
        let file = lab.folder().join("backup");
        lab.margay(&format!("store backup {}", file.display())).answer();
        let disk = lab.folder().join("disk");
        let mount = Mount::tmpfs(&disk, "32m");
        let target = lab.location.moved_to(disk.join("store"));
        write(&target, blocks(3));
        run("mount", &["-o", "remount,ro", mount.0.to_str().unwrap()]);
        let url = target.to_string();
        let status = margay(["--store", &url, "store", "status"]);
        assert!(status.code == 1 && status.out.contains("In use by: nobody"), "{status:?}");
        assert!(status.err.contains("read-only file system"), "{status:?}");
        for args in [&["verify"][..], &["compact"], &["restore", file.to_str().unwrap(), "--replace"]] {
            let error = margay(["--store", &url, "store"].into_iter().chain(args.iter().copied())).failure();
            assert!(error.contains("read-only file system"), "{args:?}: {error}");
        }
        let error = lab.margay(&format!("store backup {}", disk.join("backup").display())).failure();
        assert!(error.contains("Read-only file system") && error.contains("hint: "), "{error}");
    }
}
