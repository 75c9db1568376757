//! The input and the outcome of a plugin call. The input consists of the program's name, the environment and the
//! machine (but not the configuration); the outcome consists of the process's output and exit status. Every error and
//! every panic of a plugin call becomes CNI's error JSON on standard output.
//!
//! DEL starts a second process (see [`wiring::disconnect`]), which removes the container's interface and may outlive
//! the plugin.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use agent::{CniError, Result};
use datastore::Drivers;
use serde::Serialize;

use crate::env::Environment;
use crate::gojson;
use crate::identity::Host;

/// Where the plugin's log messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDestination {
    /// Log messages go to standard error and, if configured, to a file, until the process exits.
    Process,
    /// The plugin sets up no logging, because the caller (for example a test) may have set up its own.
    Untouched,
}

/// All inputs of a plugin call, except for standard input.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The drivers of the stores that this program supports.
    pub drivers: Drivers,
    /// The plugin name by which this process was started.
    pub name: PluginName,
    /// The environment variables of this plugin call.
    pub environment: Environment,
    /// The machine that this plugin call runs on.
    pub host: Host,
    /// Where log messages of this plugin call are written.
    pub logging: LogDestination,
}

/// The name by which the IPAM plugin was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginName {
    /// The name `margay-ipam`, or any name other than `calico-ipam` and `calico`.
    Margay,
    /// The name `calico-ipam` or `calico`, under which the plugin treats every network as a Calico network.
    CalicoIpam,
}

/// The kind of program that this process runs as, chosen by `argv[0]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// The main plugin, which creates containers' network interfaces.
    Main,
    /// The IPAM plugin.
    Ipam,
    /// The second process of a DEL, which removes the container's interface: see [`wiring::disconnect`].
    Remover,
}

impl ProgramKind {
    /// Chooses the kind of program by the name in `argv[0]`, which may be a path. The names of the main plugin are
    /// `margay-cni` and `calico`.
    pub fn from_argument(argument: Option<&OsStr>) -> Self {
        match argument.and_then(|argument| Path::new(argument).file_name()).and_then(OsStr::to_str) {
            Some("margay-cni" | "calico") => Self::Main,
            Some(REMOVER_NAME) => Self::Remover,
            _ => Self::Ipam,
        }
    }
}

impl PluginName {
    /// Chooses the name of the IPAM plugin by the name in `argv[0]`, which may be a path to the program.
    pub fn from_argument(argument: Option<&OsStr>) -> Self {
        let file = argument.and_then(|argument| Path::new(argument).file_name());
        let file = file.and_then(OsStr::to_str);
        if matches!(file, Some("calico-ipam" | "calico")) { Self::CalicoIpam } else { Self::Margay }
    }
}

impl Invocation {
    /// Reads this process's arguments and environment into an `Invocation`. `drivers` are the kinds of stores that the
    /// program supports.
    pub fn of_this_process(drivers: Drivers) -> Self {
        Self {
            drivers,
            name: PluginName::from_argument(std::env::args_os().next().as_deref()),
            environment: Environment::of_this_process(),
            host: Host::of_this_process(),
            logging: LogDestination::Process,
        }
    }
}

/// The output and the exit status of the plugin's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessOutcome {
    /// The exit status of the process: 0 or 1.
    pub exit: u8,
    /// The text to print to standard output: one JSON document, or nothing.
    pub stdout: String,
    /// The text to print to standard error.
    pub stderr: String,
}

impl ProcessOutcome {
    pub(crate) fn success(stdout: String) -> Self {
        Self { exit: 0, stdout, stderr: String::new() }
    }

    /// Runs a plugin call and converts its result, error or panic to the outcome of the process.
    pub(crate) fn of(call: impl FnOnce() -> Result<String>) -> Self {
        match catch_panic(call) {
            Ok(stdout) => Self::success(stdout),
            Err(error) => {
                tracing::error!(code = error.code().number(), "{error}");
                Self { exit: 1, stdout: to_json(&error), stderr: String::new() }
            }
        }
    }
}

/// Runs a plugin call and converts a panic during the call to an error.
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Asserting unwind safety is sound, because nothing that the plugin call borrowed is used again after a panic.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| Err(panic_error(&*payload)))
}

/// Renders an error for standard output as Go's CNI library does: indented by four spaces, without a `cniVersion` field
/// and without a trailing newline.
pub(crate) fn to_json(error: &CniError) -> String {
    #[derive(Serialize)]
    struct PrintedError<'a> {
        code: u32,
        msg: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        details: &'a str,
    }
    gojson::indented(&PrintedError { code: error.code().number(), msg: error.message(), details: error.details() })
}

thread_local! {
    /// The source location of the last panic of the current thread, which [`panic_error`] reports.
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Silences Rust's panic messages in the whole process. Panics are caught and reported as errors in [`run`](crate::run)
/// and in the adapter around each kind of store.
pub fn install_hook() {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string);
        // A thread-local variable cannot be used while its thread shuts down. A panic while a thread shuts down is
        // reported without the source location of the panic.
        let _ = PLACE.try_with(|last| last.replace(place));
    }));
}

fn panic_error(payload: &(dyn Any + Send)) -> CniError {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let place = PLACE.with(RefCell::take).map(|place| format!(" at {place}")).unwrap_or_default();
    CniError::internal(format!("margay-ipam stopped at an error of its own: {}{place}", text.unwrap_or("no text")))
        .with_details("it is not known whether the call was carried out, DEL is safe to repeat; please report this")
}

/// The value of `argv[0]` that makes this program the remover, the second process of a DEL.
pub(crate) const REMOVER_NAME: &str = "margay-remover";

/// Starts the remover, the helper process that removes an interface, in the network namespace of the current thread.
/// The helper's standard output is `/dev/null`, because a runtime reads the plugin's output until no process has the
/// pipe open.
pub(crate) fn start_remover(interface: &str) -> io::Result<Child> {
    let mut remover = Command::new("/proc/self/exe");
    remover.arg0(REMOVER_NAME).arg(interface).env_clear();
    remover.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// Runs the helper process that removes an interface; its only argument is the interface's name.
///
/// # Returns
/// Returns the exit status of [`wiring::remove_interface`], or 255 if the argument is missing.
pub(crate) fn run_remover(mut arguments: impl Iterator<Item = OsString>) -> u8 {
    let interface = arguments.next().and_then(|name| name.into_string().ok());
    interface.map_or(u8::MAX, |interface| wiring::remove_interface(&interface))
}

#[cfg(test)]
mod tests {
    use agent::Code;

    use super::*;

    #[test]
    fn invocation_is_printed_as_go_does() {
        let error = CniError::new(Code::InvalidConfig, "a <nil> & \"b\"\u{2028}").with_details("x\ny");
        assert_eq!(
            to_json(&error),
            "{\n    \"code\": 7,\n    \"msg\": \"a \\u003cnil\\u003e \\u0026 \\\"b\\\"\\u2028\",\n    \"details\": \"x\\ny\"\n}"
        );
        assert_eq!(to_json(&CniError::internal("m")), "{\n    \"code\": 999,\n    \"msg\": \"m\"\n}");
    }
}
