//! The main plugin `margay-cni`, which also runs under the name `calico`: it wires a container into a routed network, as Calico's
//! main plugin does.
//!
//! The plugin makes a pair of interfaces, calls the IPAM plugin, and stores a WorkloadEndpoint. Where the IPAM plugin is this
//! very program, it runs in this process on the same store.

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

use crate::env::{Call, Verb};
use crate::gojson::quoted;
use crate::invocation::{Invocation, Name, Outcome};
use crate::netconf::check_name;
use crate::result::AddResult;
use crate::run::read;
use crate::versions;
use setup::Setup;

/// Reads a configuration as ADD does, for the fuzzers.
pub(crate) fn check_conf(text: &[u8]) -> Result<()> {
    let conf = conf::Conf::decode(&check_name(text)?)?;
    conf.device()?;
    conf.mtu().map(drop)
}

/// The addresses of an IPAM plugin's result, for the fuzzers.
pub(crate) fn addresses_of_result(text: &[u8]) -> Result<Vec<IpAddr>> {
    AddResult::parse(text).map(|result| result.addresses())
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
            return Outcome::said(stdout);
        }
        "-h" | "--help" => return Outcome::said(USAGE.to_owned()),
        "-t" => return Outcome::of(|| check::test_datastore(invocation, stdin)),
        option if option.starts_with('-') && !matches!(option, "-" | "--") => {
            // Calico's program prints its usage and exits with 2, which its callers may know.
            if is_called && invocation.name == Name::Margay {
                let message = format!("the plugin has no option {}", quoted(option));
                return Outcome::of(|| Err(CniError::new(Code::InvalidEnvironment, message)));
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
    Outcome::of(|| carry_out(invocation, stdin))
}

/// An error of the wiring as the runtime gets it.
fn told(error: wiring::Error) -> CniError {
    CniError::internal(error.to_string())
}

fn carry_out(invocation: &Invocation, stdin: &mut dyn Read) -> Result<String> {
    let call = Call::from_environment(&invocation.environment)?;
    if call.verb == Verb::Version {
        return Ok(versions::version_reply());
    }
    let text = read(stdin)?;
    let json = check_name(&text)?;
    versions::of_call(&call, &json)?;
    let verb = call.verb;
    let setup = Setup::new(invocation, call, json, text)?;
    match verb {
        Verb::Add => add::add(&setup),
        Verb::Del => del::del(&setup),
        Verb::Check => check::check(&setup),
        Verb::Gc => del::gc(&setup),
        Verb::Status => check::status(&setup),
        Verb::Unknown | Verb::Version => Err(setup.call.unknown()),
    }
}
