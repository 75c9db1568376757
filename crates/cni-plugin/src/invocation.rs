//! A call from outside: the facts that are known before its configuration (the name of the program, the environment, the machine), and
//! its outcome (what the process prints, and its exit status). Every error, a panic included, becomes CNI's error JSON.
//!
//! A DEL has a second process, which removes the container's interface and may end after the plugin: see [`wiring::disconnect`].

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

/// The destination of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDestination {
    /// To standard error and, if configured, to a file, for the rest of the process.
    Process,
    /// Nowhere, or to a place that the caller has arranged.
    Untouched,
}

/// All that a call of the plugin depends on, apart from standard input.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The stores that the program is made with.
    pub drivers: Drivers,
    /// Whether the plugin runs under the name `calico-ipam`.
    pub name: PluginName,
    /// The environment.
    pub environment: Environment,
    /// The machine.
    pub host: Host,
    /// The destination of the log.
    pub logging: LogDestination,
}

/// The name that the plugin runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginName {
    /// Its own, or any that is not `calico-ipam`.
    Margay,
    /// `calico-ipam` or `calico`: every network is treated as one of Calico's.
    CalicoIpam,
}

/// The plugin that the program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// The main plugin, which wires containers.
    Main,
    /// The IPAM plugin.
    Ipam,
    /// The second process of a DEL: see [`wiring::disconnect`].
    Remover,
}

impl ProgramKind {
    /// From the first argument of a process, which may be a path: `margay-cni` and `calico` are the main plugin.
    pub fn from_argument(argument: Option<&OsStr>) -> Self {
        match argument.and_then(|argument| Path::new(argument).file_name()).and_then(OsStr::to_str) {
            Some("margay-cni" | "calico") => Self::Main,
            Some(REMOVER_NAME) => Self::Remover,
            _ => Self::Ipam,
        }
    }
}

impl PluginName {
    /// From the first argument of a process, which may be a path.
    pub fn from_argument(argument: Option<&OsStr>) -> Self {
        let file = argument.and_then(|argument| Path::new(argument).file_name());
        let file = file.and_then(OsStr::to_str);
        if matches!(file, Some("calico-ipam" | "calico")) { Self::CalicoIpam } else { Self::Margay }
    }
}

impl Invocation {
    /// The invocation of this process, of a program that is made with these stores.
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

/// The output of the process, and its exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessOutcome {
    /// The exit status: 0 or 1.
    pub exit: u8,
    /// For standard output: one JSON document, or nothing.
    pub stdout: String,
    /// For standard error.
    pub stderr: String,
}

impl ProcessOutcome {
    /// Success, with a text for standard output.
    pub(crate) fn success(stdout: String) -> Self {
        Self { exit: 0, stdout, stderr: String::new() }
    }

    /// The outcome of a call.
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

/// Makes a panic an error like any other.
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Nothing that was borrowed here is used again after a panic.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| Err(panic_error(&*payload)))
}

/// An error for standard output: indented by four, without `cniVersion` and without a newline at the end, as Go's CNI library
/// prints it.
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
    /// Where the last panic of this thread was, for [`error`].
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics silent in the whole process. The code that catches one reports it: [`run`](crate::run) in its error, a
/// store's adapter in its own.
pub fn install_hook() {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string);
        // A thread that is being torn down has no such variable any more; then the place is not reported.
        let _ = PLACE.try_with(|last| last.replace(place));
    }));
}

/// The error for a panic that was caught.
fn panic_error(payload: &(dyn Any + Send)) -> CniError {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let place = PLACE.with(RefCell::take).map(|place| format!(" at {place}")).unwrap_or_default();
    CniError::internal(format!("margay-ipam stopped at an error of its own: {}{place}", text.unwrap_or("no text")))
        .with_details("it is not known whether the call was carried out, DEL is safe to repeat; please report this")
}

/// The name by which the program knows what it is.
pub(crate) const REMOVER_NAME: &str = "margay-remover";

/// Starts the process, in the network namespace of this thread. It has none of the plugin's input and output: a runtime reads
/// the plugin's output to its end.
pub(crate) fn start_remover(interface: &str) -> io::Result<Child> {
    let mut remover = Command::new("/proc/self/exe");
    remover.arg0(REMOVER_NAME).arg(interface).env_clear();
    remover.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// The whole process. Its argument is the interface.
///
/// # Returns
/// The exit status: see [`wiring::remove_interface`]. 255 without a name.
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
