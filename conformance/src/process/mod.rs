//! Other processes: this program, run once more with a role to play.
//!
//! A case starts one, reads what it says line by line, and ends it. The process learns its role, its arguments and the
//! store's address from its environment, joins the store, and does what the role's function says.

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

/// Names the role, then its arguments, parted by spaces.
pub(crate) const ROLE_VARIABLE: &str = "CONFORMANCE_ROLE";
/// Names the store.
const ADDRESS_VARIABLE: &str = "CONFORMANCE_ADDRESS";
/// The first word of a process that cannot go on.
pub(crate) const FAILED_PREFIX: &str = "failed ";
/// The first word of a process whose store breaks a rule; the rule and the fault follow.
pub(crate) const BREAKS_PREFIX: &str = "breaks ";
/// Names a folder that the role needs.
const FOLDER_VARIABLE: &str = "CONFORMANCE_FOLDER";

/// This program as another process, not started yet.
pub(crate) fn command(role: &str, arguments: &[u64], address: &str) -> Checked<Command> {
    let program = env::current_exe().map_err(|error| broken("finding this program", &error))?;
    let mut command = Command::new(program);
    let words: Vec<String> = std::iter::once(role.to_owned()).chain(arguments.iter().map(u64::to_string)).collect();
    command.env(ROLE_VARIABLE, words.join(" ")).env(ADDRESS_VARIABLE, address);
    Ok(command)
}

/// A command that runs this program under the one that `outer` begins, which gets the path as its last argument.
pub(crate) fn command_under(mut outer: Command, inner: &Command) -> Command {
    outer.arg(inner.get_program()).envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    outer
}

/// The same command, with a folder that the role needs.
pub(crate) fn with_folder(mut command: Command, folder: &Path) -> Command {
    command.env(FOLDER_VARIABLE, folder);
    command
}

/// A process that plays a role. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    lines: UnboundedReceiver<String>,
    stdin: Option<ChildStdin>,
    started: Instant,
    patience: Duration,
}

impl Process {
    /// Starts it.
    pub(crate) fn start(mut command: Command, patience: Duration) -> Checked<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let started = Instant::now();
        let mut child = block_in_place(|| command.spawn()).map_err(|error| broken("starting a process", &error))?;
        let (tell, lines) = unbounded_channel();
        let stdout = child.stdout.take();
        let stdin = child.stdin.take();
        // It ends with the process, and drains the pipe so that the process never waits for us.
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

    /// How long ago it was started.
    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// The same process; each of its lines may take so long.
    pub(crate) fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Its standard input; it sees the end of it when this is dropped.
    pub(crate) fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.stdin.take()
    }

    /// The next line that it says; `None` when it has ended.
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

    /// The text after `word` in the next line, which has to begin with it.
    pub(crate) async fn say(&mut self, word: &str) -> Checked<String> {
        let line = self.line().await?;
        let rest = line.as_deref().and_then(|line| line.strip_prefix(word)).map(|rest| rest.trim().to_owned());
        rest.ok_or_else(|| {
            Failure::new("what another process says", word, line.unwrap_or_else(|| "nothing: it ended".to_owned()))
        })
    }

    /// Kills it without a warning, and returns its lines that nobody has read.
    pub(crate) async fn kill(mut self) -> Checked<Vec<String>> {
        self.child.kill().map_err(|error| broken("killing a process", &error))?;
        block_in_place(|| self.child.wait()).map_err(|error| broken("waiting for a killed process", &error))?;
        self.rest().await
    }

    /// Waits until it has ended by itself, without an error, and returns its lines.
    pub(crate) async fn end(mut self) -> Checked<Vec<String>> {
        let lines = self.rest().await?;
        let status = block_in_place(|| self.child.wait()).map_err(|error| broken("waiting for a process", &error))?;
        if status.success() {
            return Ok(lines);
        }
        Err(Failure::new("the end of another process", "success", describe(status, &lines)))
    }

    /// All lines to the end of it.
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
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn describe(status: ExitStatus, lines: &[String]) -> String {
    format!("{status}, after saying {:?}", lines.last().map_or("", String::as_str))
}

/// Waits for so long, to within some microseconds: for moments that are meant to be any moment.
pub(crate) async fn moment(length: Duration) {
    let started = Instant::now();
    while started.elapsed() < length {
        tokio::task::yield_now().await;
    }
}

/// The number in the words of a process.
pub(crate) fn number(said: &str) -> Checked<u64> {
    said.trim().parse().map_err(|_| Failure::new("what another process says", "a number", said))
}

/// A folder for one case.
pub(crate) fn temporary_folder() -> Checked<tempfile::TempDir> {
    tempfile::tempdir().map_err(|error| broken("a temporary folder", &error))
}

/// The failure of a case because the system refused something to the suite.
#[track_caller]
pub(crate) fn broken(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format!("the environment: {what}"), "success", error.to_string())
}
