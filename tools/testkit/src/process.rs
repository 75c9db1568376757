//! Calls of the plugin, with an end to every wait.

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

/// How long a call may take on a quiet machine, also in a crowd. Nothing here needs more than a small part of it.
const PATIENCE: Duration = Duration::from_secs(20);

/// The texts that a panic leaves behind, which no user should ever see.
const PANIC_TEXTS: [&str; 4] = ["panicked", "unwrap", "src/", "RUST_BACKTRACE"];

/// One call of the plugin: an environment and a configuration.
#[derive(Clone, Debug)]
pub struct Call {
    program: PathBuf,
    environment: Vec<(String, String)>,
    conf: String,
    uid: Option<u32>,
}

impl Call {
    /// A call for the interface `eth0`, in the environment that a runtime sets and no other.
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

    /// With a variable set, or set to something else.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Without a variable.
    pub fn without(mut self, name: &str) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self
    }

    /// For this interface.
    pub fn on(self, interface: &str) -> Self {
        self.with("CNI_IFNAME", interface)
    }

    /// By another program, such as another plugin.
    pub fn by(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// As this user, in the group of the same number.
    pub fn as_user(mut self, uid: u32) -> Self {
        self.uid = Some(uid);
        self
    }

    /// The configuration that the plugin reads.
    pub fn conf(&self) -> &str {
        &self.conf
    }

    /// The command, ready to be run.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        self.prepare(&mut command);
        command
    }

    /// The same as the last words of another command, such as a shell that changes something first.
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

    /// Starts a command that was made for this call, and gives it its configuration.
    pub fn start(&self, mut command: Command) -> Child {
        start(&mut command, self.conf.as_bytes())
    }

    /// Runs to the end.
    pub fn run(&self) -> Outcome {
        self.run_as(self.command())
    }

    /// Runs a command that was made for this call to its end.
    pub fn run_as(&self, command: Command) -> Outcome {
        self.wait(self.start(command))
    }

    /// Waits for the end of a process that was started for this call.
    pub fn wait(&self, child: Child) -> Outcome {
        let limit = patient(PATIENCE);
        let output = end_within(child, limit).unwrap_or_else(|| panic!("{self:?} had no answer after {limit:?}"));
        Outcome::new(output, self)
    }

    /// Runs to the end, which must be success.
    pub fn ok(&self) -> Outcome {
        let outcome = self.run();
        assert_eq!(outcome.exit, 0, "{self:?}: {outcome:?}");
        outcome
    }
}

/// Starts a program and gives it its input, if its standard input is a pipe.
pub fn start(command: &mut Command, input: &[u8]) -> Child {
    let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot run {:?}: {error}", command.get_program()));
    if let Some(mut stdin) = child.stdin.take() {
        // It fits in the pipe, so this does not wait; the program may end without reading it.
        let _ = stdin.write_all(input);
    }
    child
}

/// Waits for the end of a process and returns its output. `None`: it had not ended after this time, and was killed.
pub fn end_within(child: Child, limit: Duration) -> Option<Output> {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    let (done, output) = mpsc::channel();
    let waiting = thread::spawn(move || done.send(child.wait_with_output()));
    let ended = output.recv_timeout(limit);
    if ended.is_err() {
        // It was not waited for to the end, so the number is still its own.
        let _ = kill(pid, Signal::SIGKILL);
    }
    let _ = waiting.join();
    ended.ok().map(|output| output.unwrap())
}

/// Waits until a condition holds. Fails after `limit`, which is longer on a busy machine (see [`patient`]).
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + patient(limit);
    while !is_so() {
        assert!(Instant::now() < end, "after {limit:?} still not: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// How a call ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub exit: i32,
    pub stdout: String,
    pub stderr: String,
}

/// An error as a runtime reads it.
#[derive(Clone, Debug)]
pub struct Refusal {
    pub code: u64,
    /// The problem, and after it the remedy.
    pub text: String,
}

impl Outcome {
    /// The outcome of a call that has ended. It must not show a panic.
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

    /// The result on standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error on standard output: the call must have failed as CNI wants it, with a message.
    pub fn refusal(&self) -> Refusal {
        assert_eq!(self.exit, 1, "{self:?}");
        let json = self.json();
        let message = json["msg"].as_str().unwrap_or_default();
        assert!(!message.is_empty(), "no message: {self:?}");
        let details = json["details"].as_str().unwrap_or_default();
        Refusal { code: json["code"].as_u64().unwrap(), text: format!("{message}\n{details}") }
    }

    /// The addresses of a result of CNI 0.3.0 or later, with their prefix lengths.
    pub fn cidrs(&self) -> Vec<String> {
        let json = self.json();
        let ips = json["ips"].as_array().unwrap_or_else(|| panic!("no ips: {self:?}"));
        ips.iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect()
    }

    /// The addresses of such a result, bare.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let bare = |cidr: &String| cidr.split('/').next().unwrap().parse().unwrap();
        self.cidrs().iter().map(bare).collect()
    }

    /// Its one address.
    pub fn address(&self) -> IpAddr {
        let addresses = self.addresses();
        assert_eq!(addresses.len(), 1, "{self:?}");
        addresses[0]
    }
}

impl Refusal {
    /// Checks that the error says all of this.
    #[track_caller]
    pub fn says(&self, texts: &[&str]) -> &Self {
        for text in texts {
            assert!(self.text.contains(text), "{text:?} is not said: {self:?}");
        }
        self
    }
}
