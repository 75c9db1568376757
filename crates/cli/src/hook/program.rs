//! A program that is run for each event, with the event on its stdin.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::GLANCE;
use crate::error::{Failure, Result};
use crate::interrupt::Interrupt;

/// The time that a run has after SIGTERM until SIGKILL.
const GRACE: Duration = Duration::from_secs(1);

/// The program.
#[derive(Debug)]
pub(super) struct Program {
    path: PathBuf,
    /// A run that takes longer is killed and counts as failed.
    timeout: Duration,
}

impl Program {
    /// # Errors
    /// There is no such program.
    pub(super) fn new(path: &Path, timeout: Duration) -> Result<Self> {
        // A relative path is one of this folder, not of PATH.
        let path = fs::canonicalize(path).map_err(|error| {
            Failure::new(format!("cannot run {}: {error}", path.display())).hint("give the path of a program")
        })?;
        Ok(Self { path, timeout })
    }

    /// The program's path.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Runs the program, which must end with exit code 0. Its processes have a group of their own, which ends with a run that
    /// is given up.
    pub(super) fn run(&self, json: &str, interrupt: &Interrupt) -> std::result::Result<(), String> {
        let mut command = Command::new(&self.path);
        let mut child = command.stdin(Stdio::piped()).process_group(0).spawn().map_err(|error| error.to_string())?;
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| writeln!(stdin, "{json}"));
        match written {
            // A program need not read all of it.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                end(&mut child);
                return Err(error.to_string());
            }
            _ => {}
        }
        let until = Instant::now() + self.timeout;
        loop {
            match child.try_wait().map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(reason(status)),
                None if interrupt.came() || Instant::now() >= until => {
                    end(&mut child);
                    return Err(format!("it ran for more than {} s, and was killed", self.timeout.as_secs()));
                }
                None => std::thread::sleep(GLANCE),
            }
        }
    }
}

fn reason(status: ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}

/// Ends a run and all processes of its group: with SIGTERM, and after a while with SIGKILL. Returns when its first process
/// has ended.
fn end(child: &mut Child) {
    let Ok(group) = i32::try_from(child.id()).map(Pid::from_raw) else { return };
    _ = killpg(group, Signal::SIGTERM);
    let until = Instant::now() + GRACE;
    loop {
        // The group has its first process until that was waited for.
        _ = child.try_wait();
        // A run that has become another user's cannot be signalled, and has not ended for that.
        if killpg(group, None) == Err(Errno::ESRCH) {
            return;
        }
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(GLANCE);
    }
    _ = killpg(group, Signal::SIGKILL);
    _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn program(folder: &Path, script: &str) -> Program {
        let path = folder.join("hook");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Program::new(&path, Duration::from_millis(500)).unwrap()
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_one_that_reads_nothing_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::listen().unwrap();
        assert_eq!(
            program(folder.path(), "exec sleep 60").run("x", &interrupt).unwrap_err(),
            "it ran for more than 0 s, and was killed"
        );
        assert_eq!(program(folder.path(), "exit 0").run(&"x".repeat(1 << 20), &interrupt), Ok(()));
        assert!(program(folder.path(), "kill -9 $$").run("x", &interrupt).unwrap_err().contains("signal: 9"));
        assert!(Program::new(&folder.path().join("none"), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_run_that_is_given_up_ends_with_its_children_and_may_clean_up() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::listen().unwrap();
        let path = |name: &str| folder.path().join(name);
        let [late, clean] = ["late", "clean"].map(path);
        let script =
            format!("(sleep 0.8; : >{}) & trap ': >{}; exit 0' TERM; sleep 60 & wait", late.display(), clean.display());
        let hook = program(folder.path(), &script);
        assert!(hook.run("x", &interrupt).is_err());
        assert!(clean.exists(), "the run was not asked to end");
        std::thread::sleep(Duration::from_millis(600));
        assert!(!late.exists(), "a child has outlived its run");
        fs::remove_file(&clean).unwrap();
        // A signal comes.
        interrupt.flag().store(true, std::sync::atomic::Ordering::SeqCst);
        let ready = format!("trap ': >{}; exit 0' TERM; sleep 60 & wait", clean.display());
        let hook = Program { timeout: Duration::from_secs(60), ..program(folder.path(), &ready) };
        assert!(hook.run("x", &interrupt).is_err());
    }
}
