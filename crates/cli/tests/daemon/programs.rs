//! Runs Margay's programs, each with a time limit.

use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use conformance::patient;
use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::process;
use testkit::server::send_signal;

/// Time limit for one program on a quiet machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The id of a user who owns no files.
pub(crate) const STRANGER: u32 = 65_534;

/// Returns the command `margay` with the given arguments and an empty environment.
pub(crate) fn margay<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    command.args(args).env_clear().current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns the path of a program of an earlier Margay version.
pub(crate) fn earlier(program: &str) -> PathBuf {
    // The script `scripts/build-earlier` puts the programs of an earlier version in the folder `earlier`, beside the
    // build profile's folder.
    let path = Path::new(env!("CARGO_BIN_EXE_margay")).ancestors().nth(2).unwrap().join("earlier").join(program);
    assert!(path.exists(), "{} is missing: scripts/build-earlier", path.display());
    path
}

/// Returns the given command with its program replaced by `program`, which may be of another version.
pub(crate) fn of_version(program: &Path, command: Command) -> Command {
    let mut of_version = Command::new(program);
    of_version.args(command.get_args()).env_clear().current_dir("/");
    of_version.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    of_version
}

/// Sends a signal to a process, and after SIGSTOP waits until the process has stopped.
pub(crate) fn signal(pid: u32, signal: Signal) {
    send_signal(pid, signal).unwrap();
}

/// The result of a process that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// The exit code; `None` if a signal ended the process.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
    /// The time from the start of the process to its end.
    pub(crate) took: Duration,
}

impl Ended {
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Checks that the program failed with exit code 1 and did not panic.
    #[track_caller]
    pub(crate) fn failed(self) -> Self {
        assert_eq!(self.code, Some(1), "{self:?}");
        assert!(!self.out.contains("panicked") && !self.err.contains("panicked"), "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the addresses in the result of a successful ADD.
    #[track_caller]
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let json = self.json();
        let ips = json["ips"].as_array().unwrap_or_else(|| panic!("no addresses: {self:?}"));
        ips.iter().map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap()).collect()
    }

    /// Returns the only address in the result of a successful ADD.
    #[track_caller]
    pub(crate) fn address(&self) -> IpAddr {
        let addresses = self.addresses();
        assert_eq!(addresses.len(), 1, "{self:?}");
        addresses[0]
    }

    /// Checks in the plugin's log that a daemon carried out the call; the check is valid only if a daemon was running.
    #[track_caller]
    pub(crate) fn by_daemon(self) -> Self {
        // An earlier version of the plugin logs "going on without it" when the plugin opens the store itself.
        let alone =
            ["opening the store directly", "going on without it", "has another store", "leaves it to the plugin"];
        assert!(!alone.iter().any(|words| self.err.contains(words)), "not by the daemon: {self:?}");
        self
    }

    /// Checks that the plugin opened the store itself and logged a reason that contains `words`.
    #[track_caller]
    pub(crate) fn alone(self, words: &str) -> Self {
        assert!(self.err.contains(words), "{words:?} is not said: {self:?}");
        self
    }
}

/// A running process, which is killed when the [`Running`] is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    child: Option<Child>,
    what: String,
    begun: Instant,
}

impl Running {
    pub(crate) fn start(mut command: Command, input: &str) -> Self {
        let what = format!("{:?}", command.get_program());
        let begun = Instant::now();
        let child = process::start(&mut command, input.as_bytes());
        Self { child: Some(child), what, begun }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub(crate) fn is_over(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Kills the process, and returns whether it was still running.
    pub(crate) fn kill(mut self) -> bool {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap().signal().is_some()
    }

    /// Waits until the process has ended, and returns the process's result.
    #[track_caller]
    pub(crate) fn end(self) -> Ended {
        self.end_within(patient(TEST_TIMEOUT))
    }

    /// Waits until the process has ended, for at most the time `limit`.
    #[track_caller]
    pub(crate) fn end_within(mut self, limit: Duration) -> Ended {
        let child = self.child.take().unwrap();
        let begun = self.begun;
        let output = process::end_within(child, limit);
        let took = begun.elapsed();
        let output = output.unwrap_or_else(|| panic!("{} has not ended after {limit:?}", self.what));
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ended { code: output.status.code(), out: text(output.stdout), err: text(output.stderr), took }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[track_caller]
pub(crate) fn run(command: Command) -> Ended {
    Running::start(command, "").end()
}

/// A call of the plugin, which may end in any way, even by a signal.
#[derive(Clone, Debug)]
pub(crate) struct Call(process::Call);

impl Call {
    /// Creates a plugin call for the interface `eth0` with the environment that a runtime sets.
    pub(crate) fn new(verb: &str, container: &str, conf: &Value) -> Self {
        Self(process::Call::new(verb, container, conf))
    }

    pub(crate) fn args(self, args: &str) -> Self {
        Self(self.0.with("CNI_ARGS", args))
    }

    /// Runs another program for this CNI call, instead of the plugin built from this version.
    pub(crate) fn of(self, program: PathBuf) -> Self {
        Self(self.0.by(program))
    }

    /// Sets the user id under which the plugin is run.
    pub(crate) fn by(self, uid: u32) -> Self {
        Self(self.0.as_user(uid))
    }

    pub(crate) fn start(&self) -> Running {
        Running::start(self.0.command(), self.0.conf())
    }

    #[track_caller]
    pub(crate) fn run(&self) -> Ended {
        self.start().end()
    }

    /// Runs the plugin call and checks that it succeeded.
    #[track_caller]
    pub(crate) fn ok(&self) -> Ended {
        self.run().ok()
    }
}

#[track_caller]
pub(crate) fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    process::wait_until(what, TEST_TIMEOUT, is_so);
}
