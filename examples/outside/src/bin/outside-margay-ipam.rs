//! Both plugins with one more store.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_plugin::main(outside::drivers())
}
