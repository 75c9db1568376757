//! Starts child processes of the conformance suite: each child runs the suite's own executable and plays a role.
//!
//! A test case starts a child process, reads its output line by line, and finally ends the child process. The child
//! process reads its role, its arguments and the address of the store from its environment. The child process opens the
//! store and runs the function of its role.

mod child;

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::block_in_place;

use crate::expect::{Checked, Failure, within};
use crate::rules;

pub(crate) use child::{RoleJob, say};

/// The environment variable with the role of a child process and the role's arguments, separated by spaces.
pub(crate) const ROLE_VARIABLE: &str = "CONFORMANCE_ROLE";
/// The environment variable with the address of the store for a child process.
const ADDRESS_VARIABLE: &str = "CONFORMANCE_ADDRESS";
/// The first word of the output line of a child process that failed.
pub(crate) const FAILED_PREFIX: &str = "failed ";
/// The first word of the output line of a child process whose store breaks a rule. After the word `breaks`, the child's
/// output line contains the broken rule and the fault.
pub(crate) const BREAKS_PREFIX: &str = "breaks ";
/// The environment variable with the path of a folder that a child process may use.
const FOLDER_VARIABLE: &str = "CONFORMANCE_FOLDER";

/// Creates the command that runs this program as a child process with a role.
pub(crate) fn command(role: &str, arguments: &[u64], address: &str) -> Checked<Command> {
    let program = env::current_exe().map_err(|error| broken("finding this program", &error))?;
    let mut command = Command::new(program);
    let words: Vec<String> = std::iter::once(role.to_owned()).chain(arguments.iter().map(u64::to_string)).collect();
    command.env(ROLE_VARIABLE, words.join(" ")).env(ADDRESS_VARIABLE, address);
    Ok(command)
}

/// Makes a command that runs `inner` through the wrapper command `outer`, for example `strace`.
pub(crate) fn command_under(mut outer: Command, inner: &Command) -> Command {
    outer.arg(inner.get_program()).envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    outer
}

pub(crate) fn with_folder(mut command: Command, folder: &Path) -> Command {
    command.env(FOLDER_VARIABLE, folder);
    command
}

/// A running child process that plays a role; dropping a `Process` kills the child process.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    lines: UnboundedReceiver<String>,
    stdin: Option<ChildStdin>,
    started: Instant,
    patience: Duration,
}

impl Process {
    /// Starts the child process; `patience` is the time limit for each line that it prints.
    pub(crate) fn start(mut command: Command, patience: Duration) -> Checked<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let started = Instant::now();
        let mut child = block_in_place(|| command.spawn()).map_err(|error| broken("starting a process", &error))?;
        let (tell, lines) = unbounded_channel();
        let stdout = child.stdout.take();
        let stdin = child.stdin.take();
        // The thread that reads the child's output drains the pipe, so the child never blocks because the pipe is full;
        // the thread ends with the child.
        thread::spawn(move || {
            let said = stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines().map_while(Result::ok));
            for line in said {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines, stdin, started, patience })
    }

    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Changes the time limit for each line that the child process prints.
    pub(crate) fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Takes the standard input of the child process, which is closed when the returned `ChildStdin` is dropped.
    pub(crate) fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.stdin.take()
    }

    /// Reads the next line that the child process prints; `None` if the child process has ended.
    pub(crate) async fn line(&mut self) -> Checked<Option<String>> {
        let line = within(self.patience, "what another process says", self.lines.recv()).await?;
        let said = line.as_deref().unwrap_or_default();
        if let Some(why) = said.strip_prefix(FAILED_PREFIX) {
            return Err(Failure::new("another process", "no error", why));
        }
        if let Some((rule, how)) = said.strip_prefix(BREAKS_PREFIX).and_then(|said| said.split_once(' ')) {
            return Err(Failure::new("another process", "what the rules say", how).or_rule(rules::number_of(rule)));
        }
        Ok(line)
    }

    /// Reads the next line that the child process prints, which must begin with `word`, and returns the rest of the
    /// line.
    pub(crate) async fn say(&mut self, word: &str) -> Checked<String> {
        let line = self.line().await?;
        let rest = line.as_deref().and_then(|line| line.strip_prefix(word)).map(|rest| rest.trim().to_owned());
        rest.ok_or_else(|| {
            Failure::new("what another process says", word, line.unwrap_or_else(|| "nothing: it ended".to_owned()))
        })
    }

    /// Kills the child process with `SIGKILL`, and returns its unread output lines.
    pub(crate) async fn kill(mut self) -> Checked<Vec<String>> {
        self.child.kill().map_err(|error| broken("killing a process", &error))?;
        block_in_place(|| self.child.wait()).map_err(|error| broken("waiting for a killed process", &error))?;
        self.rest().await
    }

    /// Waits for the child process to end without an error, and returns its unread output lines.
    pub(crate) async fn end(mut self) -> Checked<Vec<String>> {
        let lines = self.rest().await?;
        let status = block_in_place(|| self.child.wait()).map_err(|error| broken("waiting for a process", &error))?;
        if status.success() {
            return Ok(lines);
        }
        Err(Failure::new("the end of another process", "success", describe(status, &lines)))
    }

    /// Reads the output lines of the child process until it ends.
    async fn rest(&mut self) -> Checked<Vec<String>> {
        let mut lines = Vec::new();
        while let Some(line) = self.line().await? {
            lines.push(line);
        }
        Ok(lines)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ignore errors of killing the child process, because it may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn describe(status: ExitStatus, lines: &[String]) -> String {
    format!("{status}, after saying {:?}", lines.last().map_or("", String::as_str))
}

/// Sleeps for the given time with a precision of some microseconds, so that random kills are spread evenly.
pub(crate) async fn moment(length: Duration) {
    let started = Instant::now();
    while started.elapsed() < length {
        tokio::task::yield_now().await;
    }
}

pub(crate) fn number(said: &str) -> Checked<u64> {
    said.trim().parse().map_err(|_| Failure::new("what another process says", "a number", said))
}

pub(crate) fn temporary_folder() -> Checked<tempfile::TempDir> {
    tempfile::tempdir().map_err(|error| broken("a temporary folder", &error))
}

/// Reports an error of the operating system as a failure of the test case.
#[track_caller]
pub(crate) fn broken(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format!("the environment: {what}"), "success", error.to_string())
}
