//! The IPAM plugin and the main CNI plugin of Margay, built with the stores of [`outside::drivers`].

fn main() -> std::process::ExitCode {
    cni_plugin::main(outside::drivers())
}
