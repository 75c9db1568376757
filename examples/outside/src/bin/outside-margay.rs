//! The program `margay`, built with the stores of [`outside::drivers`].

fn main() -> std::process::ExitCode {
    cli::main(&outside::drivers())
}
