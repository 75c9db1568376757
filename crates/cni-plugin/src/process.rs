//! Runs the plugin as a process with arguments, standard streams and an exit status. Prints the help and version texts
//! for people who run the program by hand.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::process::ExitCode;

use agent::DaemonAllocator;
use datastore::Drivers;

use crate::invocation::{self, Invocation, ProcessOutcome, ProgramKind, install_hook};
use crate::run::run;
use crate::{main_plugin, versions};

/// Runs the program, which contains the main plugin and the IPAM plugin. The argument `drivers` lists the kinds of
/// stores that the program supports. The name by which the program was started (`argv[0]`) decides which plugin runs.
pub fn main(drivers: Drivers) -> ExitCode {
    install_hook();
    let mut arguments = std::env::args_os();
    let outcome = match ProgramKind::from_argument(arguments.next().as_deref()) {
        ProgramKind::Remover => return ExitCode::from(invocation::run_remover(arguments)),
        ProgramKind::Main => {
            let arguments: Vec<_> = arguments.collect();
            main_plugin::run(&Invocation::of_this_process(drivers), &arguments, &mut io::stdin().lock())
        }
        ProgramKind::Ipam => answer_option(arguments.next().as_deref()).unwrap_or_else(|| {
            run(&Invocation::of_this_process(drivers), &mut io::stdin().lock(), &DaemonAllocator::default())
        }),
    };
    match print(&outcome) {
        Ok(()) => ExitCode::from(outcome.exit),
        // Standard output is broken, so the exit status is the only way to report the failure. If an ADD cannot print
        // its result, the assigned addresses stay assigned until the runtime's DEL.
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(outcome: &ProcessOutcome) -> io::Result<()> {
    io::stderr().lock().write_all(outcome.stderr.as_bytes())?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(outcome.stdout.as_bytes())?;
    stdout.flush()
}

const HELP: &str = "\
margay-ipam gives containers their IP addresses. Container runtimes call it, by
way of a main plugin such as bridge or macvlan whose configuration has:

  \"ipam\": { \"type\": \"margay-ipam\", ... }

Called by hand, it reads the network's configuration from standard input and
what to do from the environment: CNI_COMMAND (ADD, DEL, CHECK, GC, STATUS or
VERSION), CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME, CNI_PATH, CNI_ARGS.

Options, with which nothing is read or changed:
  -V, -v, --version  print the version, and the versions of CNI
  -h, --help         print this

Pools and addresses are managed with the command margay: margay --help
";

/// Answers a command-line option of the plugin; returns `None` if the argument is not an option of the plugin.
/// Container runtimes never pass command-line arguments to the plugin.
pub fn answer_option(option: Option<&OsStr>) -> Option<ProcessOutcome> {
    let stdout = match option?.to_str()? {
        // `-v` prints the version, as in Calico's plugins.
        "-V" | "-v" | "--version" => {
            let (version, cni) = (env!("CARGO_PKG_VERSION"), versions::SUPPORTED_VERSIONS.join(", "));
            // `margay store upgrade` parses the last line of the output of `--version`.
            format!("margay-ipam {version}\nCNI versions: {cni}\nFormats of stores: 1, 2\n")
        }
        "-h" | "--help" => HELP.to_owned(),
        _ => return None,
    };
    Some(ProcessOutcome { exit: 0, stdout, stderr: String::new() })
}
