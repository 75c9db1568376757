//! Runs calls of the plugin as processes. Every wait for a plugin process has a time limit.

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

/// Maximum duration of a plugin call, with other plugin calls running but no other load on the machine. A plugin call
/// normally takes only a small part of `TEST_TIMEOUT`.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Strings that a panic leaves in the output and that no user should see.
const PANIC_TEXTS: [&str; 4] = ["panicked", "unwrap", "src/", "RUST_BACKTRACE"];

/// One call of the plugin, with environment variables and a network configuration.
#[derive(Clone, Debug)]
pub struct Call {
    program: PathBuf,
    environment: Vec<(String, String)>,
    conf: String,
    uid: Option<u32>,
}

impl Call {
    /// Creates a plugin call for the interface `eth0`, with only those environment variables that a container runtime
    /// sets.
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

    /// Sets an environment variable for the plugin call.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Removes an environment variable of the plugin call.
    pub fn without(mut self, name: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self
    }

    /// Sets the container interface of the plugin call (`CNI_IFNAME`).
    pub fn on(self, interface: &str) -> Self {
        self.with("CNI_IFNAME", interface)
    }

    /// Sets the program that the call runs, for example another plugin.
    pub fn by(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// Makes the plugin run as the user `uid`, in the group with the same number.
    pub fn as_user(mut self, uid: u32) -> Self {
        self.uid = Some(uid);
        self
    }

    /// Returns the network configuration that the plugin reads.
    pub fn conf(&self) -> &str {
        &self.conf
    }

    /// Returns the command that makes this plugin call.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        self.prepare(&mut command);
        command
    }

    /// Returns a command that runs `wrapper`, for example a shell that changes its limits, with the command of this
    /// plugin call as its last arguments.
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

    /// Starts a command that makes this plugin call, and writes the network configuration to its standard input.
    pub fn start(&self, mut command: Command) -> Child {
        start(&mut command, self.conf.as_bytes())
    }

    /// Makes the plugin call, and waits until it ends.
    pub fn run(&self) -> Outcome {
        self.run_as(self.command())
    }

    /// Makes the plugin call with the given command, and waits until it ends.
    pub fn run_as(&self, command: Command) -> Outcome {
        self.wait(self.start(command))
    }

    /// Waits until a process that makes this plugin call has ended.
    pub fn wait(&self, child: Child) -> Outcome {
        let limit = patient(TEST_TIMEOUT);
        let output = end_within(child, limit).unwrap_or_else(|| panic!("{self:?} had no answer after {limit:?}"));
        Outcome::new(output, self)
    }

    /// Makes the plugin call, and waits until it ends. Panics if the plugin call fails.
    pub fn ok(&self) -> Outcome {
        let outcome = self.run();
        assert_eq!(outcome.exit, 0, "{self:?}: {outcome:?}");
        outcome
    }
}

/// Starts a program, and writes `input` to its standard input if that is a pipe.
pub fn start(command: &mut Command, input: &[u8]) -> Child {
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot run {:?}: {error}", command.get_program()));
    if let Some(mut stdin) = child.stdin.take() {
        // The input fits into the pipe, so the write never blocks. The write fails if the program exits without reading
        // its input.
        let _ = stdin.write_all(input);
    }
    child
}

/// Waits until a process has ended, and returns its output. If the process is still running after `limit`, kills it and
/// returns `None`.
pub fn end_within(child: Child, limit: Duration) -> Option<Output> {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    let (done, output) = mpsc::channel();
    let waiting = thread::spawn(move || done.send(child.wait_with_output()));
    let ended = output.recv_timeout(limit);
    if ended.is_err() {
        // The process has not been reaped yet, so its id still belongs to it.
        let _ = kill(pid, Signal::SIGKILL);
    }
    let _ = waiting.join();
    ended.ok().map(|output| output.unwrap())
}

/// Waits until the condition `is_so` holds; panics after `limit`, which is longer on a busy machine (see [`patient`]).
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + patient(limit);
    while !is_so() {
        assert!(Instant::now() < end, "after {limit:?} still not: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The exit status and the output of a plugin call.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub exit: i32,
    pub stdout: String,
    pub stderr: String,
}

/// A CNI error, decoded as a container runtime decodes it.
#[derive(Clone, Debug)]
pub struct Refusal {
    pub code: u64,
    /// The message of the CNI error, followed by a line with its details.
    pub text: String,
}

impl Outcome {
    /// Returns the outcome of a plugin call that has ended. Panics if the output of the call shows that the plugin
    /// panicked.
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

    /// Returns the JSON result that the call printed on standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the CNI error that the call printed on standard output. Panics unless the plugin call failed with a CNI
    /// error that has a message.
    pub fn refusal(&self) -> Refusal {
        assert_eq!(self.exit, 1, "{self:?}");
        let json = self.json();
        let message = json["msg"].as_str().unwrap_or_default();
        assert!(!message.is_empty(), "no message: {self:?}");
        let details = json["details"].as_str().unwrap_or_default();
        Refusal { code: json["code"].as_u64().unwrap(), text: format!("{message}\n{details}") }
    }

    /// Returns the addresses, with prefix lengths, in a result of CNI 0.3.0 or later.
    pub fn cidrs(&self) -> Vec<String> {
        let json = self.json();
        let ips = json["ips"].as_array().unwrap_or_else(|| panic!("no ips: {self:?}"));
        ips.iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the addresses, without prefix lengths, in a result of CNI 0.3.0 or later.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let bare = |cidr: &String| cidr.split('/').next().unwrap().parse().unwrap();
        self.cidrs().iter().map(bare).collect()
    }

    /// Returns the address in the result of the call; panics unless there is exactly one.
    pub fn address(&self) -> IpAddr {
        let addresses = self.addresses();
        assert_eq!(addresses.len(), 1, "{self:?}");
        addresses[0]
    }
}

impl Refusal {
    /// Checks that the error of the call contains all of the strings in `texts`.
    #[track_caller]
    pub fn says(&self, texts: &[&str]) -> &Self {
        for text in texts {
            assert!(self.text.contains(text), "{text:?} is not said: {self:?}");
        }
        self
    }
}
