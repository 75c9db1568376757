//! Both plugins with one more store.

fn main() -> std::process::ExitCode {
    cni_plugin::main(outside::drivers())
}
