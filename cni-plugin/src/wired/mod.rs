//! The main plugin `margay-cni`, which also runs under the name `calico`: it wires a container into a routed network, as Calico's
//! main plugin does.
//!
//! The plugin makes a pair of interfaces, calls the IPAM plugin, and stores a WorkloadEndpoint. Where the IPAM plugin is this
//! very program, it runs in this process on the same store.

mod add;
mod answer;
mod check;
mod conf;
mod container;
mod del;
mod gc;
mod interfaces;
mod ipam;
mod ipam_result;
mod mesos;
mod names;
mod ongoing;
mod outgoing;
mod pod;
pub mod remover;
mod setup;
mod status;
mod test_flag;

use std::ffi::OsString;
use std::io::Read;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::env::{Call, Verb};
use crate::error::{CniError, Code, Result};
use crate::gojson::quoted;
use crate::invocation::{Invocation, Name};
use crate::netconf::check_name;
use crate::panics;
use crate::run::{Outcome, read};
use crate::versions;

use self::setup::Setup;

/// Reads a configuration as ADD does, for the fuzzers.
pub(crate) fn check_conf(text: &[u8]) -> Result<()> {
    let conf = conf::Conf::decode(&check_name(text)?)?;
    conf.device()?;
    conf.mtu().map(drop)
}

/// The addresses of an IPAM plugin's result, for the fuzzers.
pub(crate) fn addresses_of_result(text: &[u8]) -> Result<Vec<IpAddr>> {
    ipam_result::IpamResult::parse(text).map(|result| result.addresses())
}

/// How long the wiring of a container may take.
const WIRING: Duration = Duration::from_secs(20);

const USAGE: &str = "\
Usage: margay-cni [-v | -t | -h]
Container runtimes call it without options: the network's configuration comes on standard
input, and what to do in the environment (CNI_COMMAND, CNI_CONTAINERID, ...).

  -v, --version  print the version, and the versions of CNI
  -t             read a configuration on standard input, and test its datastore for 2 s
  -h, --help     print this
";

/// The whole main plugin but for process input and output. `arguments` are those after the program's name: as in Calico's
/// program options come first, and whatever follows the first one that is none is ignored.
pub fn run(invocation: &Invocation, arguments: &[OsString], stdin: &mut dyn Read) -> Outcome {
    let is_called = invocation.environment.get("CNI_COMMAND").is_some();
    let first = arguments.first().map(|argument| argument.to_string_lossy()).unwrap_or_default();
    match first.as_ref() {
        "-v" | "-V" | "--version" => {
            let versions = versions::SUPPORTED.join(", ");
            let stdout = format!("margay-cni {}\nCNI versions: {versions}\n", env!("CARGO_PKG_VERSION"));
            return Outcome { exit: 0, stdout, stderr: String::new() };
        }
        "-h" | "--help" => return Outcome { exit: 0, stdout: USAGE.to_owned(), stderr: String::new() },
        "-t" => return guarded(|| test_flag::test(invocation, stdin)),
        option if option.starts_with('-') && !matches!(option, "-" | "--") => {
            // Calico's program prints its usage and exits with 2, which its callers may know.
            if is_called && invocation.name == Name::Margay {
                let message = format!("the plugin has no option {}", quoted(option));
                return guarded(|| Err(CniError::new(Code::InvalidEnvironment, message)));
            }
            return Outcome { exit: 2, stdout: String::new(), stderr: USAGE.to_owned() };
        }
        _ => {}
    }
    if !is_called {
        let versions = versions::SUPPORTED.join(", ");
        let version = env!("CARGO_PKG_VERSION");
        let stderr = format!("Margay CNI plugin {version}\nCNI protocol versions supported: {versions}\n");
        return Outcome { exit: 0, stdout: String::new(), stderr };
    }
    guarded(|| carry_out(invocation, stdin))
}

impl From<wiring::Error> for CniError {
    fn from(error: wiring::Error) -> Self {
        Self::internal(error.to_string())
    }
}

/// The outcome of a call; every error, a panic included, becomes CNI's error JSON.
fn guarded(call: impl FnOnce() -> Result<String>) -> Outcome {
    // Nothing that was borrowed here is used again after a panic.
    let done = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| Err(panics::error(&*payload)));
    match done {
        Ok(stdout) => Outcome { exit: 0, stdout, stderr: String::new() },
        Err(error) => {
            tracing::error!(code = error.code().number(), "{error}");
            Outcome { exit: 1, stdout: error.to_json(), stderr: String::new() }
        }
    }
}

fn carry_out(invocation: &Invocation, stdin: &mut dyn Read) -> Result<String> {
    let call = Call::from_environment(&invocation.environment)?;
    if call.verb == Verb::Version {
        return Ok(versions::version_reply());
    }
    let text = read(stdin)?;
    let json = check_name(&text)?;
    let version = versions::configured(&json);
    match call.verb {
        Verb::Add => {
            versions::check_supported(version?)?;
            add::add(&Setup::new(invocation, call, json, text)?)
        }
        Verb::Del => {
            versions::check_supported(version?)?;
            del::del(&Setup::new(invocation, call, json, text)?)
        }
        Verb::Check => {
            versions::check_verb("CHECK", "0.4.0", version?)?;
            check::check(&Setup::new(invocation, call, json, text)?)
        }
        Verb::Gc => {
            versions::check_verb("GC", "1.1.0", version?)?;
            gc::gc(&Setup::new(invocation, call, json, text)?)
        }
        Verb::Status => {
            versions::check_verb("STATUS", "1.1.0", version?)?;
            status::status(&Setup::new(invocation, call, json, text)?)
        }
        Verb::Unknown | Verb::Version => {
            Err(CniError::new(Code::InvalidEnvironment, format!("unknown CNI_COMMAND: {}", call.command)))
        }
    }
}
