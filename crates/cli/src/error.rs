//! Defines the error type of commands: a failure with a message and a hint for people.

use std::fmt::Display;
use std::io;

/// The result of a command or of a step of a command.
pub(crate) type CommandResult<T> = Result<T, CommandFailure>;

/// A failed command: an error message, and a hint if there is one.
#[derive(Debug)]
pub(crate) struct CommandFailure {
    message: String,
    hint: Option<String>,
    /// True if the failure must not be printed, because the reader of stdout has closed the pipe.
    pub(crate) silent: bool,
}

impl CommandFailure {
    pub(crate) fn new(message: impl Display) -> Self {
        Self { message: message.to_string(), hint: None, silent: false }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Prints the message and the hint on stderr. Errors when writing to stderr are ignored: there is nowhere else to
    /// report them.
    pub(crate) fn print(&self, err: &mut dyn io::Write) {
        if self.silent {
            return;
        }
        _ = writeln!(err, "error: {}", self.message);
        if let Some(hint) = &self.hint {
            _ = writeln!(err, "hint: {hint}");
        }
    }
}

impl From<kv::Error> for CommandFailure {
    fn from(error: kv::Error) -> Self {
        Self::new(error)
    }
}

impl From<ipam_core::Error> for CommandFailure {
    fn from(error: ipam_core::Error) -> Self {
        Self::new(error)
    }
}

impl From<io::Error> for CommandFailure {
    /// Converts an I/O error while writing the answer to stdout into a command failure. Errors of files and stores are
    /// converted by the code that accesses them.
    fn from(error: io::Error) -> Self {
        let silent = error.kind() == io::ErrorKind::BrokenPipe;
        Self { silent, ..Self::new(format!("cannot write the answer: {error}")) }
    }
}
