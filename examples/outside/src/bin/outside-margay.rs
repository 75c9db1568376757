//! The command `margay` with one more store.

fn main() -> std::process::ExitCode {
    cli::main(&outside::drivers())
}
