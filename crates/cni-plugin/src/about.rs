//! The plugin's texts about itself, for a person who calls it by hand.

use std::ffi::OsStr;

use crate::outcome::Outcome;
use crate::versions;

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

/// The answer to an option on the command line; `None` without an option that the plugin knows. Runtimes pass no
/// arguments at all.
pub fn answer_option(option: Option<&OsStr>) -> Option<Outcome> {
    let stdout = match option?.to_str()? {
        // `-v` is the option of Calico's plugins.
        "-V" | "-v" | "--version" => {
            let (version, cni) = (env!("CARGO_PKG_VERSION"), versions::SUPPORTED.join(", "));
            // `margay store upgrade` reads the last line.
            format!("margay-ipam {version}\nCNI versions: {cni}\nFormats of stores: 1, 2\n")
        }
        "-h" | "--help" => HELP.to_owned(),
        _ => return None,
    };
    Some(Outcome { exit: 0, stdout, stderr: String::new() })
}
