//! Runs calls of the plugin. Every wait for a call has a time limit.

use std::ffi::OsStr;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use conformance::patient;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::programs::plugin;

/// Maximum duration of a call on a quiet machine, even beside other calls. A call needs only a small part of this time.
const PATIENCE: Duration = Duration::from_secs(20);

/// Texts that a panic leaves in the output and that no user should see.
const PANIC_TEXTS: [&str; 4] = ["panicked", "unwrap", "src/", "RUST_BACKTRACE"];

/// One call of the plugin, with its environment and its configuration.
#[derive(Clone, Debug)]
pub struct Call {
    program: PathBuf,
    environment: Vec<(String, String)>,
    conf: String,
    uid: Option<u32>,
}

impl Call {
    /// Creates a call for the interface `eth0`, with only the environment variables that a runtime sets.
    pub fn new(verb: &str, container: &str, conf: &Value) -> Self {
        let variables = [
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", container),
            ("CNI_NETNS", "/run/netns/no-such-namespace"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let environment = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { program: plugin(), environment, conf: conf.to_string(), uid: None }
    }

    /// Sets an environment variable of the call.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Removes an environment variable of the call.
    pub fn without(mut self, name: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self
    }

    /// Sets the container interface of the call.
    pub fn on(self, interface: &str) -> Self {
        self.with("CNI_IFNAME", interface)
    }

    /// Runs the call with another program, such as another plugin.
    pub fn by(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// Runs the call's program as the given user, in the group of the same number.
    pub fn as_user(mut self, uid: u32) -> Self {
        self.uid = Some(uid);
        self
    }

    /// Returns the configuration that the plugin reads.
    pub fn conf(&self) -> &str {
        &self.conf
    }

    /// Returns the call's command, ready to be run.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        self.prepare(&mut command);
        command
    }

    /// Returns the call's command as the last arguments of another command, such as a shell that first changes its
    /// limits.
    pub fn command_through(&self, wrapper: &[&str]) -> Command {
        let mut words = wrapper.iter().map(OsStr::new).chain([self.program.as_os_str()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words);
        self.prepare(&mut command);
        command
    }

    fn prepare(&self, command: &mut Command) {
        command.env_clear().envs(self.environment.iter().cloned()).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(uid) = self.uid {
            command.uid(uid).gid(uid);
        }
    }

    /// Starts a command of this call and writes the configuration to the command's standard input.
    pub fn start(&self, mut command: Command) -> Child {
        start(&mut command, self.conf.as_bytes())
    }

    /// Runs the plugin call to its end.
    pub fn run(&self) -> Outcome {
        self.run_as(self.command())
    }

    /// Runs a command of this call to its end.
    pub fn run_as(&self, command: Command) -> Outcome {
        self.wait(self.start(command))
    }

    /// Waits for the end of a process of this call.
    pub fn wait(&self, child: Child) -> Outcome {
        let limit = patient(PATIENCE);
        let output = end_within(child, limit).unwrap_or_else(|| panic!("{self:?} had no answer after {limit:?}"));
        Outcome::new(output, self)
    }

    /// Runs the call to its end. Panics if the call fails.
    pub fn ok(&self) -> Outcome {
        let outcome = self.run();
        assert_eq!(outcome.exit, 0, "{self:?}: {outcome:?}");
        outcome
    }
}

/// Starts a program and writes its input, if the program's standard input is a pipe.
pub fn start(command: &mut Command, input: &[u8]) -> Child {
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot run {:?}: {error}", command.get_program()));
    if let Some(mut stdin) = child.stdin.take() {
        // The input fits in the pipe, so writing does not block. The program may end without reading its input.
        let _ = stdin.write_all(input);
    }
    child
}

/// Waits for the end of a process and returns its output. If the process still runs after `limit`, kills the process
/// and returns `None`.
pub fn end_within(child: Child, limit: Duration) -> Option<Output> {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    let (done, output) = mpsc::channel();
    let waiting = thread::spawn(move || done.send(child.wait_with_output()));
    let ended = output.recv_timeout(limit);
    if ended.is_err() {
        // The process was not reaped yet, so no other process has this process id.
        let _ = kill(pid, Signal::SIGKILL);
    }
    let _ = waiting.join();
    ended.ok().map(|output| output.unwrap())
}

/// Waits until a condition holds. Panics after `limit`. The limit is extended on a busy machine (see [`patient`]).
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + patient(limit);
    while !is_so() {
        assert!(Instant::now() < end, "after {limit:?} still not: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The exit code and output of a call.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub exit: i32,
    pub stdout: String,
    pub stderr: String,
}

/// A CNI error as a runtime reads it.
#[derive(Clone, Debug)]
pub struct Refusal {
    pub code: u64,
    /// The error message, with the details on the next line.
    pub text: String,
}

impl Outcome {
    /// Returns the outcome of a call that has ended. Panics if the call's output shows a panic.
    pub fn new(output: Output, call: &Call) -> Self {
        let signal = output.status.signal();
        let outcome = Self {
            exit: output.status.code().unwrap_or_else(|| panic!("{call:?} was ended by signal {signal:?}")),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        assert!(matches!(outcome.exit, 0 | 1), "{call:?}: {outcome:?}");
        for text in PANIC_TEXTS {
            let said = outcome.stdout.contains(text) || outcome.stderr.contains(text);
            assert!(!said, "{call:?} says {text:?}: {outcome:?}");
        }
        outcome
    }

    /// Returns the call's result on standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the CNI error on standard output. Panics unless the call failed with a CNI error that has a message.
    pub fn refusal(&self) -> Refusal {
        assert_eq!(self.exit, 1, "{self:?}");
        let json = self.json();
        let message = json["msg"].as_str().unwrap_or_default();
        assert!(!message.is_empty(), "no message: {self:?}");
        let details = json["details"].as_str().unwrap_or_default();
        Refusal { code: json["code"].as_u64().unwrap(), text: format!("{message}\n{details}") }
    }

    /// Returns the addresses of a result of CNI 0.3.0 or later, with their prefix lengths.
    pub fn cidrs(&self) -> Vec<String> {
        let json = self.json();
        let ips = json["ips"].as_array().unwrap_or_else(|| panic!("no ips: {self:?}"));
        ips.iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the addresses of a result of CNI 0.3.0 or later, without prefix lengths.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let bare = |cidr: &String| cidr.split('/').next().unwrap().parse().unwrap();
        self.cidrs().iter().map(bare).collect()
    }

    /// Returns the only address of the result.
    pub fn address(&self) -> IpAddr {
        let addresses = self.addresses();
        assert_eq!(addresses.len(), 1, "{self:?}");
        addresses[0]
    }
}

impl Refusal {
    /// Checks that the call's error contains all the given texts.
    #[track_caller]
    pub fn says(&self, texts: &[&str]) -> &Self {
        for text in texts {
            assert!(self.text.contains(text), "{text:?} is not said: {self:?}");
        }
        self
    }
}
