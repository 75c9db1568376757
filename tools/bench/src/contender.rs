//! A program that is run repeatedly, and the state that it works on.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::report::Times;
use crate::{Outcome, Programs};

/// One of the compared programs.
#[derive(Clone, Debug)]
pub(crate) enum Contender {
    /// A process that does nothing.
    Empty { program: PathBuf },
    /// A process that opens a sled store, commits to it and closes it.
    Sled { program: PathBuf, store: PathBuf },
    /// A process that connects to etcd and commits.
    Etcd { name: &'static str, program: PathBuf, url: String },
    /// An IPAM plugin. [`PER_CONTAINER`] in its configuration becomes the container's id.
    Plugin { name: &'static str, program: PathBuf, netconf: String },
}

/// The placeholder for the container's id in a configuration.
pub(crate) const PER_CONTAINER: &str = "@CONTAINER@";

/// The pool that every plugin allocates from.
pub(crate) const POOL: &str = "10.0.0.0/12";

impl Contender {
    /// Debian's host-local with its files under `folder`.
    pub(crate) fn host_local(programs: &Programs, folder: &Path) -> Self {
        let data = folder.join("host-local");
        let netconf = format!(
            r#"{{"cniVersion":"1.0.0","name":"bench","type":"bridge","ipam":{{"type":"host-local","dataDir":"{}","ranges":[[{{"subnet":"{POOL}"}}]]}}}}"#,
            data.display()
        );
        Self::Plugin { name: "host-local", program: programs.host_local.clone(), netconf }
    }

    /// Margay's plugin on an embedded store under `folder`.
    pub(crate) fn margay(programs: &Programs, folder: &Path, name: &'static str, engine: &str) -> Self {
        let store = folder.join(format!("ipam.{engine}"));
        let netconf = format!(
            r#"{{"cniVersion":"1.0.0","name":"bench","type":"bridge","nodename":"node1","datastore_type":"{engine}","datastore_path":"{}","ipam":{{"type":"margay-ipam","subnet":"{POOL}"}}}}"#,
            store.display()
        );
        Self::Plugin { name, program: programs.plugin.clone(), netconf }
    }

    /// This contender with another build of the plugin.
    pub(crate) fn with_plugin(&self, name: &'static str, plugin: &Path) -> Self {
        match self {
            Self::Plugin { netconf, .. } => Self::Plugin { name, program: plugin.to_owned(), netconf: netconf.clone() },
            other => other.clone(),
        }
    }

    /// True if each container has its own node, so that every ADD is the node's first.
    pub(crate) fn is_per_container(&self) -> bool {
        self.as_plugin().is_some_and(|(_, netconf)| netconf.contains(PER_CONTAINER))
    }

    /// The name in the report.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Empty { .. } => "an empty process",
            Self::Sled { .. } => "bare sled: open, commit, close",
            Self::Etcd { name, .. } | Self::Plugin { name, .. } => name,
        }
    }

    /// Measures one run: an ADD of container `id` for plugins.
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

    /// Measures the DEL of container `id`, for plugins.
    pub(crate) fn del(&self, id: &str) -> Outcome<Option<Duration>> {
        match self {
            Self::Plugin { program, netconf, .. } => {
                run(plugin(program, "DEL", id), &netconf.replace(PER_CONTAINER, id)).map(Some)
            }
            Self::Empty { .. } | Self::Sled { .. } | Self::Etcd { .. } => Ok(None),
        }
    }

    /// The program and the configuration, for plugins.
    pub(crate) fn as_plugin(&self) -> Option<(&Path, &str)> {
        match self {
            Self::Plugin { program, netconf, .. } => Some((program, netconf)),
            Self::Empty { .. } | Self::Sled { .. } | Self::Etcd { .. } => None,
        }
    }
}

/// Runs all contenders in turns, and returns the times of their ADDs and DELs.
pub(crate) fn in_turns(contenders: &[Contender], rounds: u32) -> Outcome<(Vec<Times>, Vec<Times>)> {
    let mut adds = vec![Times::default(); contenders.len()];
    let mut dels = adds.clone();
    for round in 0..rounds as usize {
        for turn in 0..contenders.len() {
            // Every other round runs backwards, so that no contender always follows the same one and pays for its
            // syncs.
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

/// A command that runs a plugin in the environment of a container runtime.
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

/// Runs a program to its end and returns the duration. Fails unless it succeeds.
pub(crate) fn run(mut command: Command, input: &str) -> Outcome<Duration> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input may have ended already.
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

/// Copies a folder with its contents.
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
