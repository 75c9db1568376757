//! Describes the two plugins of Calico that Margay's plugin replaces. This module also runs a plugin file, to ask for
//! its version and to check whether it could assign addresses.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use datastore::{CalicoNetwork, Environment};
use serde_json::Value;

use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;

/// Which of Calico's two plugins Margay's plugin replaces. Margay's plugin acts as `calico-ipam` or as `calico`,
/// depending on the file name by which it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `calico-ipam`, which the main plugin calls to assign addresses.
    Ipam,
    /// `calico`, which a container runtime calls to connect a container to the network.
    Main,
}

impl Role {
    /// Returns the name by which the plugin is called, which is also the plugin's file name.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Ipam => "calico-ipam",
            Self::Main => "calico",
        }
    }

    /// Returns the name that Margay's plugin prints with `-v` when it is called by the name of this Calico plugin.
    fn own_name(self) -> &'static str {
        match self {
            Self::Ipam => "margay-ipam",
            Self::Main => "margay-cni",
        }
    }

    /// Returns the name of the subfolder in which the files for undoing an installation are kept.
    pub(crate) fn state_folder_name(self) -> &'static str {
        match self {
            Self::Ipam => ".margay",
            Self::Main => ".margay-main",
        }
    }

    /// Returns the `margay` command that replaces this Calico plugin with Margay's.
    pub(crate) fn install(self) -> &'static str {
        match self {
            Self::Ipam => "margay install --beside-calico",
            Self::Main => "margay install --beside-calico --main-plugin",
        }
    }

    /// Returns the `margay` command that restores this plugin of Calico.
    pub(crate) fn undo(self) -> &'static str {
        match self {
            Self::Ipam => "margay install --undo",
            Self::Main => "margay install --undo --main-plugin",
        }
    }

    /// Returns the end of the error message "Margay's plugin could ..." about a network that the plugin cannot serve.
    pub(crate) fn would(self) -> &'static str {
        match self {
            Self::Ipam => "give no address",
            Self::Main => "wire no container",
        }
    }
}

/// Time limit of running a program and reading its answer.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(15);

/// Maximum number of attempts to start a program while another process still has the program's file open for writing.
const MAX_START_ATTEMPTS: u32 = 40;

/// Maximum number of failed STATUS checks before a store counts as unusable, and the pause between two checks.
const MAX_STORE_CHECKS: u32 = 3;
const STORE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The environment variables with an etcd login that `margay install` passes from its own environment to a plugin. A
/// network configuration cannot contain the etcd login.
const LOGIN_VARIABLES: [&str; 4] = ["ETCD_USERNAME", "ETCD_PASSWORD", "CALICO_ETCD_USERNAME", "CALICO_ETCD_PASSWORD"];

/// Which program a plugin file contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PluginProgram {
    /// Margay's plugin, with the plugin's version.
    Margay(String),
    /// A program that is not Margay's plugin, with the version line that it prints, if any.
    Other(Option<String>),
    /// A plugin file that cannot be run, with the reason.
    Broken(String),
}

impl fmt::Display for PluginProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Margay(version) => write!(f, "Margay {version}"),
            Self::Other(Some(version)) => write!(f, "not Margay: {version}"),
            Self::Other(None) => f.write_str("not Margay"),
            Self::Broken(why) => write!(f, "cannot be run: {why}"),
        }
    }
}

impl PluginProgram {
    /// Runs a plugin file with `-v`, under the plugin name of `role`, and parses the version that it prints (Calico's
    /// plugins accept `-v` as well).
    pub(crate) fn ask(file: &Path, role: Role) -> Self {
        let mut command = Command::new(file);
        command.arg0(role.program()).arg("-v").env_clear();
        match run_program(command, b"") {
            Err(error) => Self::Broken(error.to_string()),
            Ok(answer) => {
                let line = printable(answer.stdout.lines().next().unwrap_or_default().trim());
                match line.strip_prefix(role.own_name()).and_then(|rest| rest.strip_prefix(' ')) {
                    Some(version) if answer.success => Self::Margay(version.to_owned()),
                    _ => Self::Other(Some(line.chars().take(80).collect()).filter(|line: &String| !line.is_empty())),
                }
            }
        }
    }

    /// True if Margay's plugin in `file` can read stores of the store format `format`. Returns `None` if `file` is not
    /// Margay's plugin.
    pub(crate) fn reads_format(file: &Path, format: u32) -> Option<bool> {
        let mut command = Command::new(file);
        command.arg0(Role::Ipam.program()).arg("-v").env_clear();
        let answer = run_program(command, b"").ok()?;
        let mut lines = answer.stdout.lines();
        lines.next().filter(|line| answer.success && line.starts_with(Role::Ipam.own_name()))?;
        let formats = lines.find_map(|line| line.strip_prefix("Formats of stores: "));
        // Plugins that are older than store format 2 do not print the formats that they read; they read only format 1.
        Some(formats.is_some_and(|formats| formats.split(", ").any(|one| one.parse() == Ok(format))))
    }

    pub(crate) fn is_ours(&self) -> bool {
        matches!(self, Self::Margay(_))
    }

    pub(crate) fn version(&self) -> Option<&str> {
        match self {
            Self::Margay(version) => Some(version),
            Self::Other(version) => version.as_deref(),
            Self::Broken(_) => None,
        }
    }
}

/// Checks whether Margay's plugin could carry out an ADD on the network `network`. To check a plugin, `margay install`
/// calls it with the CNI verb STATUS, which changes nothing and takes at most one second. A failed STATUS is repeated,
/// since an etcd cluster may just be electing a leader.
///
/// # Errors
/// The plugin's own error, which may contain names of configuration fields and paths, but no secrets.
pub(crate) fn check_store(
    plugin: &Path,
    role: Role,
    network: &CalicoNetwork,
    path: &str,
    env: &Environment<'_>,
) -> CommandResult<()> {
    let mut why = String::new();
    for attempt in 0..MAX_STORE_CHECKS {
        if attempt > 0 {
            thread::sleep(STORE_CHECK_INTERVAL);
        }
        match ask_status(plugin, role, network, path, env) {
            Ok(()) => return Ok(()),
            Err(reason) => why = reason,
        }
    }
    let would = role.would();
    Err(CommandFailure::new(format!("Margay's plugin could {would} with {}: {why}", network.file.display())).hint(
        "look up the error in docs/errors.md; if ETCD_USERNAME and ETCD_PASSWORD are set in the container runtime's \
         environment, set them for this command, too; nothing was changed",
    ))
}

fn ask_status(
    plugin: &Path,
    role: Role,
    network: &CalicoNetwork,
    path: &str,
    env: &Environment<'_>,
) -> Result<(), String> {
    let mut conf = network.conf.clone();
    // The CNI verb STATUS needs CNI version 1.1.0. Overriding the CNI version of the network configuration does not
    // affect which store the plugin uses.
    conf.insert("cniVersion".to_owned(), "1.1.0".into());
    let mut command = Command::new(plugin);
    command.arg0(role.program()).env_clear().env("CNI_COMMAND", "STATUS").env("CNI_PATH", path);
    for name in LOGIN_VARIABLES {
        if let Some(value) = env(name) {
            command.env(name, value);
        }
    }
    let answer = run_program(command, Value::Object(conf).to_string().as_bytes()).map_err(|error| error.to_string())?;
    if answer.success {
        return Ok(());
    }
    let error: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
    let text = |member: &str| error.get(member).and_then(Value::as_str).map(printable).filter(|text| !text.is_empty());
    let why = [text("msg"), text("details")].into_iter().flatten().collect::<Vec<_>>().join("; ");
    Err(if why.is_empty() { "it fails without saying why".to_owned() } else { why })
}

/// The standard output of a program, and whether the program succeeded.
#[derive(Debug)]
pub(super) struct ProgramOutput {
    pub(super) success: bool,
    pub(super) stdout: String,
}

/// Runs a program with `stdin` as its standard input, and discards the program's standard error.
///
/// # Errors
/// The program cannot be started, or does not end within [`PROGRAM_TIMEOUT`].
pub(crate) fn run_program(mut command: Command, stdin: &[u8]) -> io::Result<ProgramOutput> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = start(&mut command)?;
    let (Some(mut input), Some(mut output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("no pipes"));
    };
    let stdin = stdin.to_vec();
    // Separate threads read and write the pipes, so that a program that stops reading or writing blocks this function
    // for at most `PROGRAM_TIMEOUT`.
    let writer = thread::spawn(move || input.write_all(&stdin));
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        output.read_to_end(&mut bytes).map(|_| bytes)
    });
    let status = wait(&mut child)?;
    _ = writer.join();
    let bytes = reader.join().unwrap_or_else(|_| Ok(Vec::new()))?;
    Ok(ProgramOutput { success: status.success(), stdout: String::from_utf8_lossy(&bytes).into_owned() })
}

fn start(command: &mut Command) -> io::Result<Child> {
    for _ in 0..MAX_START_ATTEMPTS {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => thread::sleep(Duration::from_millis(50)),
            started => return started,
        }
    }
    command.spawn()
}

fn wait(child: &mut Child) -> io::Result<ExitStatus> {
    let until = Instant::now() + PROGRAM_TIMEOUT;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > until {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer within {} s", PROGRAM_TIMEOUT.as_secs()),
            ));
        }
        thread::sleep(Duration::from_millis(2));
    }
}
