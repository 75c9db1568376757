//! Runs the compared programs again and again, each on its own store.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::report::Times;
use crate::{Outcome, Programs};

/// A compared program, and the store that it uses.
#[derive(Clone, Debug)]
pub(crate) enum Contender {
    /// A process that does nothing and exits.
    Empty { program: PathBuf },
    /// A process that opens a sled store, commits once and closes the store.
    Sled { program: PathBuf, store: PathBuf },
    /// A process that connects to etcd and commits one transaction.
    Etcd { name: &'static str, program: PathBuf, url: String },
    /// A process of an IPAM plugin. [`PER_CONTAINER`] in the plugin's network configuration is replaced with the
    /// container's id.
    Plugin { name: &'static str, program: PathBuf, netconf: String },
}

/// Placeholder for the container's id in a network configuration.
pub(crate) const PER_CONTAINER: &str = "@CONTAINER@";

/// The pool from which every compared plugin assigns addresses.
pub(crate) const POOL: &str = "10.0.0.0/12";

impl Contender {
    /// Returns Debian's host-local, which keeps its files under `folder`, as a contender.
    pub(crate) fn host_local(programs: &Programs, folder: &Path) -> Self {
        let data = folder.join("host-local");
        let netconf = format!(
            r#"{{"cniVersion":"1.0.0","name":"bench","type":"bridge","ipam":{{"type":"host-local","dataDir":"{}","ranges":[[{{"subnet":"{POOL}"}}]]}}}}"#,
            data.display()
        );
        Self::Plugin { name: "host-local", program: programs.host_local.clone(), netconf }
    }

    /// Returns Margay's plugin with an embedded store under `folder` as a contender.
    pub(crate) fn margay(programs: &Programs, folder: &Path, name: &'static str, engine: &str) -> Self {
        let store = folder.join(format!("ipam.{engine}"));
        let netconf = format!(
            r#"{{"cniVersion":"1.0.0","name":"bench","type":"bridge","nodename":"node1","datastore_type":"{engine}","datastore_path":"{}","ipam":{{"type":"margay-ipam","subnet":"{POOL}"}}}}"#,
            store.display()
        );
        Self::Plugin { name, program: programs.plugin.clone(), netconf }
    }

    /// Returns a copy of this contender that runs another build of the plugin.
    pub(crate) fn with_plugin(&self, name: &'static str, plugin: &Path) -> Self {
        match self {
            Self::Plugin { netconf, .. } => Self::Plugin { name, program: plugin.to_owned(), netconf: netconf.clone() },
            other => other.clone(),
        }
    }

    /// True if each container has its own node, so that every ADD is the first ADD of a node.
    pub(crate) fn is_per_container(&self) -> bool {
        self.as_plugin().is_some_and(|(_, netconf)| netconf.contains(PER_CONTAINER))
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Empty { .. } => "an empty process",
            Self::Sled { .. } => "bare sled: open, commit, close",
            Self::Etcd { name, .. } | Self::Plugin { name, .. } => name,
        }
    }

    /// Measures one run of the contender; for a plugin, an ADD of the container `id`.
    pub(crate) fn add(&self, id: &str) -> Outcome<Duration> {
        match self {
            Self::Empty { program } => run(Command::new(program), ""),
            Self::Sled { program, store } => {
                let mut command = Command::new(program);
                command.arg(store).arg(id);
                run(command, "")
            }
            Self::Etcd { program, url, .. } => {
                let mut command = Command::new(program);
                command.args([url, id]);
                run(command, "")
            }
            Self::Plugin { program, netconf, .. } => {
                run(plugin(program, "ADD", id), &netconf.replace(PER_CONTAINER, id))
            }
        }
    }

    /// Measures the duration of a DEL of the container `id`. Returns `None` if the contender is not a plugin.
    pub(crate) fn del(&self, id: &str) -> Outcome<Option<Duration>> {
        match self {
            Self::Plugin { program, netconf, .. } => {
                run(plugin(program, "DEL", id), &netconf.replace(PER_CONTAINER, id)).map(Some)
            }
            Self::Empty { .. } | Self::Sled { .. } | Self::Etcd { .. } => Ok(None),
        }
    }

    /// Returns the program and the network configuration of a contender that is a plugin; `None` for other contenders.
    pub(crate) fn as_plugin(&self) -> Option<(&Path, &str)> {
        match self {
            Self::Plugin { program, netconf, .. } => Some((program, netconf)),
            Self::Empty { .. } | Self::Sled { .. } | Self::Etcd { .. } => None,
        }
    }
}

/// Runs all contenders in turns, and returns the durations of each contender's ADDs and DELs.
pub(crate) fn in_turns(contenders: &[Contender], rounds: u32) -> Outcome<(Vec<Times>, Vec<Times>)> {
    let mut adds = vec![Times::default(); contenders.len()];
    let mut dels = adds.clone();
    for round in 0..rounds as usize {
        for turn in 0..contenders.len() {
            // Every second round runs the contenders in reverse order. In a fixed order, each contender would always
            // pay for the syncs of the same predecessor.
            let turn = if round.is_multiple_of(2) { turn } else { contenders.len() - 1 - turn };
            let who = (turn + round) % contenders.len();
            let id = format!("c{round}");
            adds[who].push(contenders[who].add(&id)?);
            if let Some(time) = contenders[who].del(&id)? {
                dels[who].push(time);
            }
        }
    }
    Ok((adds, dels))
}

/// Creates a command that runs a plugin with the environment variables that a container runtime sets.
pub(crate) fn plugin(program: &Path, verb: &str, id: &str) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs([
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", id),
        ("CNI_NETNS", "/run/netns/none"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/usr/lib/cni"),
    ]);
    command
}

/// Runs a program until it ends, and returns how long it ran; an error if its exit status is not success.
pub(crate) fn run(mut command: Command, input: &str) -> Outcome<Duration> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its standard input may have ended already, so this write may fail.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    let elapsed = start.elapsed();
    if output.status.success() {
        return Ok(elapsed);
    }
    let said =
        String::from_utf8_lossy(if output.stdout.is_empty() { &output.stderr } else { &output.stdout }).into_owned();
    Err(format!("{command:?} failed: {said}").into())
}

pub(crate) fn copy_folder(from: &Path, to: &Path) -> Outcome<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
