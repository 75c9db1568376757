//! The main plugin `margay-cni`, which also runs under the name `calico`, connects containers to a routed network, as
//! Calico's main plugin does.
//!
//! The main plugin creates a pair of interfaces for the container, calls the IPAM plugin, and stores a
//! WorkloadEndpoint. If the IPAM plugin is part of this program, it runs in the same process and uses the same open
//! store.

mod add;
mod check;
mod conf;
mod del;
mod ipam;
mod pod;
mod setup;

use std::ffi::OsString;
use std::io::Read;
use std::net::IpAddr;
use std::time::Duration;

use agent::{CniError, Code, Result};

use crate::env::{CniCall, CniVerb};
use crate::gojson::quoted;
use crate::invocation::{Invocation, PluginName, ProcessOutcome};
use crate::netconf::check_name;
use crate::result::AddResult;
use crate::run::read;
use crate::versions;
use setup::MainContext;

/// Decodes a network configuration as the main plugin's ADD does, for use by the fuzzers.
pub(crate) fn check_conf(text: &[u8]) -> Result<()> {
    let conf = conf::MainConf::decode(&check_name(text)?)?;
    conf.device()?;
    conf.mtu().map(drop)
}

/// Parses an IPAM plugin's result and returns its addresses, for use by the fuzzers.
pub(crate) fn addresses_of_result(text: &[u8]) -> Result<Vec<IpAddr>> {
    AddResult::parse(text).map(|result| result.addresses())
}

/// Time limit for creating or checking a container's interface.
const WIRING_TIMEOUT: Duration = Duration::from_secs(20);

const USAGE: &str = "\
Usage: margay-cni [-v | -t | -h]
Container runtimes call it without options: the network's configuration comes on standard
input, and what to do in the environment (CNI_COMMAND, CNI_CONTAINERID, ...).

  -v, --version  print the version, and the versions of CNI
  -t             read a configuration on standard input, and test its datastore for 2 s
  -h, --help     print this
";

/// Runs the main plugin; reads its configuration from `stdin`, and returns its output instead of printing it. The slice
/// `arguments` contains the command-line arguments after the program's name. As in Calico's program, options are only
/// recognized before the first argument that is not an option. The first argument that is not an option and all later
/// arguments are ignored.
pub fn run(invocation: &Invocation, arguments: &[OsString], stdin: &mut dyn Read) -> ProcessOutcome {
    let is_called = invocation.environment.get("CNI_COMMAND").is_some();
    let first = arguments.first().map(|argument| argument.to_string_lossy()).unwrap_or_default();
    match first.as_ref() {
        "-v" | "-V" | "--version" => {
            let versions = versions::SUPPORTED_VERSIONS.join(", ");
            let stdout = format!("margay-cni {}\nCNI versions: {versions}\n", env!("CARGO_PKG_VERSION"));
            return ProcessOutcome::success(stdout);
        }
        "-h" | "--help" => return ProcessOutcome::success(USAGE.to_owned()),
        "-t" => return ProcessOutcome::of(|| check::test_datastore(invocation, stdin)),
        option if option.starts_with('-') && !matches!(option, "-" | "--") => {
            // For an unknown option, print the usage and exit with status 2, as Calico's program does. Keep the exit
            // status 2 for an unknown option, because callers of the program may rely on it.
            if is_called && invocation.name == PluginName::Margay {
                let message = format!("the plugin has no option {}", quoted(option));
                return ProcessOutcome::of(|| Err(CniError::new(Code::InvalidEnvironment, message)));
            }
            return ProcessOutcome { exit: 2, stdout: String::new(), stderr: USAGE.to_owned() };
        }
        _ => {}
    }
    if !is_called {
        let versions = versions::SUPPORTED_VERSIONS.join(", ");
        let version = env!("CARGO_PKG_VERSION");
        let stderr = format!("Margay CNI plugin {version}\nCNI protocol versions supported: {versions}\n");
        return ProcessOutcome { exit: 0, stdout: String::new(), stderr };
    }
    ProcessOutcome::of(|| carry_out(invocation, stdin))
}

fn wiring_error(error: wiring::Error) -> CniError {
    CniError::internal(error.to_string())
}

fn carry_out(invocation: &Invocation, stdin: &mut dyn Read) -> Result<String> {
    let call = CniCall::from_environment(&invocation.environment)?;
    if call.verb == CniVerb::Version {
        return Ok(versions::version_reply());
    }
    let text = read(stdin)?;
    let json = check_name(&text)?;
    versions::of_call(&call, &json)?;
    let verb = call.verb;
    let setup = MainContext::new(invocation, call, json, text)?;
    match verb {
        CniVerb::Add => add::add(&setup),
        CniVerb::Del => del::del(&setup),
        CniVerb::Check => check::check(&setup),
        CniVerb::Gc => del::gc(&setup),
        CniVerb::Status => check::status(&setup),
        CniVerb::Unknown | CniVerb::Version => Err(setup.call.unknown()),
    }
}
