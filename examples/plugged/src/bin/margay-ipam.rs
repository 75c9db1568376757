//! Both CNI plugins of Margay, built with the plugged stores.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_plugin::main(plugged::drivers())
}
