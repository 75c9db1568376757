//! Runs tests that mount a test disk. Where no disk can be mounted, the tests are ignored, or fail in CI.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::geteuid;

use crate::disk::{Disk, Image, Syncs};

/// The kernel's device for file systems in user space (FUSE).
const DEVICE: &str = "/dev/fuse";

/// The name and the function of a test.
pub type Test = (String, Box<dyn FnOnce() + Send>);

/// Runs tests that mount disks. A test binary calls this function as its `main`.
///
/// Each test runs in its own mount namespace, which all threads and processes of the test share, so the kernel unmounts
/// the test's disks when the test's last process ends, even after a crash. If no disk can be mounted on this host, the
/// tests are listed as ignored, with the reason; if the environment variable `CI` is set, the tests fail instead.
#[must_use]
pub fn main(tests: Vec<Test>) -> ExitCode {
    let reason = cannot_mount();
    let in_ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false");
    let trial = |(name, test): Test| match reason.clone() {
        None => Trial::test(name, || {
            own_mounts().map_err(|error| format!("no mounts of its own: {error}"))?;
            test();
            Ok(())
        }),
        Some(reason) => {
            let trial = Trial::test(name, {
                let reason = reason.clone();
                || Err(reason.into())
            });
            if in_ci { trial } else { trial.with_kind(reason).with_ignored_flag(true) }
        }
    };
    libtest_mimic::run(&Arguments::from_args(), tests.into_iter().map(trial).collect()).exit_code()
}

/// Returns the reason why no disk can be mounted on this host; `None` if one can be mounted.
fn cannot_mount() -> Option<String> {
    if !geteuid().is_root() {
        return Some("mounting a disk needs root".to_owned());
    }
    if let Err(error) = OpenOptions::new().read(true).write(true).open(DEVICE) {
        return Some(format!("no {DEVICE} here: {error}"));
    }
    // A separate thread with its own mount namespace tries to mount a disk, so that the mount disappears when the
    // thread ends.
    let probed = std::thread::spawn(|| own_mounts().and_then(|()| probe())).join();
    let probed = probed.unwrap_or_else(|_| Err(io::Error::other("the probe panicked")));
    probed.err().map(|error| format!("no disk can be mounted here: {error}"))
}

/// Moves this thread, and the processes that it will start, to a new mount namespace.
fn own_mounts() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    Ok(mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?)
}

fn probe() -> io::Result<()> {
    let at = std::env::temp_dir().join(format!("margay-power-{}", std::process::id()));
    // A killed test process may have left the folder of its mount point behind.
    let _ = fs::remove_dir(&at);
    fs::create_dir(&at)?;
    let probed = mount_and_write(&at);
    fs::remove_dir(&at).and(probed)
}

fn mount_and_write(at: &Path) -> io::Result<()> {
    let _mounted = Disk::new(Image::default(), Syncs::Kept).mount(at)?;
    fs::write(at.join("file"), "x")
}
