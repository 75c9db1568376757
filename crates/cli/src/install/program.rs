//! The plugins of Calico that Margay's program replaces, and running a plugin's file: to learn its version, and whether
//! it could assign addresses.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use datastore::{CalicoNetwork, Environment};
use serde_json::Value;

use crate::error::{CommandFailure, Result};
use crate::output::printable;

/// One of Calico's two plugins. Margay's program is either of them, by the name under which it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `calico-ipam`, which the main plugin calls for addresses.
    Ipam,
    /// `calico`, which a runtime calls to wire a container.
    Main,
}

impl Role {
    /// The name under which it is called, and the name of its file.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Ipam => "calico-ipam",
            Self::Main => "calico",
        }
    }

    /// The name of Margay's program for itself when it is called by that name.
    fn own_name(self) -> &'static str {
        match self {
            Self::Ipam => "margay-ipam",
            Self::Main => "margay-cni",
        }
    }

    /// The folder beside the plugins with the files for going back.
    pub(crate) fn state_folder_name(self) -> &'static str {
        match self {
            Self::Ipam => ".margay",
            Self::Main => ".margay-main",
        }
    }

    /// The command that puts Margay's program in its place.
    pub(crate) fn install(self) -> &'static str {
        match self {
            Self::Ipam => "margay install --beside-calico",
            Self::Main => "margay install --beside-calico --main-plugin",
        }
    }

    /// The command that goes back.
    pub(crate) fn undo(self) -> &'static str {
        match self {
            Self::Ipam => "margay install --undo",
            Self::Main => "margay install --undo --main-plugin",
        }
    }

    /// The words after "could" in the failure of Margay's plugin on a network that it cannot serve.
    pub(crate) fn would(self) -> &'static str {
        match self {
            Self::Ipam => "give no address",
            Self::Main => "wire no container",
        }
    }
}

/// The longest time for a program to answer.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(15);

/// The number of attempts to run a file that another process is just writing.
const MAX_START_ATTEMPTS: u32 = 40;

/// The number of times that the store is checked, and the pause in between.
const MAX_STORE_CHECKS: u32 = 3;
const STORE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The login in a runtime's environment: a network's configuration has no place for it.
const LOGIN_VARIABLES: [&str; 4] = ["ETCD_USERNAME", "ETCD_PASSWORD", "CALICO_ETCD_USERNAME", "CALICO_ETCD_PASSWORD"];

/// The identity of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PluginProgram {
    /// Margay's plugin, in this version.
    Margay(String),
    /// Another program, with the version if it reports one.
    Other(Option<String>),
    /// A file that cannot be run, for this reason.
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
    /// Runs a file in a role with `-v`, an option that Calico's plugins have too, and reads its version.
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

    /// True if Margay's plugin reads stores of a format; `None` for a program that is not Margay's.
    pub(crate) fn reads_format(file: &Path, format: u32) -> Option<bool> {
        let mut command = Command::new(file);
        command.arg0(Role::Ipam.program()).arg("-v").env_clear();
        let answer = run_program(command, b"").ok()?;
        let mut lines = answer.stdout.lines();
        lines.next().filter(|line| answer.success && line.starts_with(Role::Ipam.own_name()))?;
        let formats = lines.find_map(|line| line.strip_prefix("Formats of stores: "));
        // A plugin from before the second format lists no formats; it reads only the first one.
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

/// Checks whether Margay's plugin could carry out an ADD on this network in a role, by the verb STATUS, which changes
/// nothing. STATUS takes a second at most. It is repeated if it fails: a cluster may just be electing its leader.
///
/// # Errors
/// The fault that the plugin reports. It names members and paths, and no secret.
pub(crate) fn check_store(
    plugin: &Path,
    role: Role,
    network: &CalicoNetwork,
    path: &str,
    env: &Environment<'_>,
) -> Result<()> {
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
        "nothing was changed; see docs/errors.md for the text, and set ETCD_USERNAME and ETCD_PASSWORD here if the runtime \
         has them",
    ))
}

fn ask_status(
    plugin: &Path,
    role: Role,
    network: &CalicoNetwork,
    path: &str,
    env: &Environment<'_>,
) -> std::result::Result<(), String> {
    let mut conf = network.conf.clone();
    // STATUS came with this version; the network's own version makes no difference to the store.
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

/// The answer of a program.
#[derive(Debug)]
pub(super) struct ProgramOutput {
    pub(super) success: bool,
    pub(super) stdout: String,
}

/// Runs a program with this on its standard input; its standard error is ignored.
///
/// # Errors
/// If it cannot be started, or does not end in time.
pub(crate) fn run_program(mut command: Command, stdin: &[u8]) -> io::Result<ProgramOutput> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = start(&mut command)?;
    let (Some(mut input), Some(mut output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("no pipes"));
    };
    let stdin = stdin.to_vec();
    // Threads read and write: a program that reads or writes nothing must not block longer than `PROGRAM_TIMEOUT`.
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
