//! The IPAM plugin and the main CNI plugin of Margay, built with the plugged example stores.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_plugin::main(plugged::drivers())
}
