//! Mounts file systems for a test. Mounting needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system that a test has mounted; dropping this value unmounts it.
#[derive(Debug)]
pub struct Mount {
    at: PathBuf,
}

impl Mount {
    /// Mounts a tmpfs of the given size on a folder (needs root).
    pub fn tmpfs(at: &Path, size: &str) -> Self {
        let options = format!("size={size},mode=700");
        run("mount", &["-t", "tmpfs", "-o", &options, "margay-test", path(at)]);
        Self { at: at.to_owned() }
    }

    /// Mounts a folder read-only on itself (needs root).
    pub fn read_only(at: &Path) -> Self {
        run("mount", &["--bind", path(at), path(at)]);
        let mount = Self { at: at.to_owned() };
        mount.remount("bind,ro");
        mount
    }

    /// Remounts this file system with other mount options.
    pub fn remount(&self, options: &str) {
        run("mount", &["-o", &format!("remount,{options}"), path(&self.at)]);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", path(&self.at)]).status();
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?} failed (this test needs root): {said}");
}
