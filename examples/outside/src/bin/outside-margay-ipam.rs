//! Both CNI plugins of Margay, built with the stores of [`outside::drivers`].

fn main() -> std::process::ExitCode {
    cni_plugin::main(outside::drivers())
}
