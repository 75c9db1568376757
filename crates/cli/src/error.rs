//! The failure of a command, in words for a person.

use std::fmt::Display;
use std::io;

/// A result of a command.
pub(crate) type Result<T, E = CommandFailure> = std::result::Result<T, E>;

/// A command that failed: the fault, and the advice if there is any.
#[derive(Debug)]
pub(crate) struct CommandFailure {
    message: String,
    hint: Option<String>,
    /// True if the reader of stdout went away, which is not reported.
    pub(crate) silent: bool,
}

impl CommandFailure {
    /// A failure without advice.
    pub(crate) fn new(message: impl Display) -> Self {
        Self { message: message.to_string(), hint: None, silent: false }
    }

    /// Adds advice.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The fault, without the advice.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Prints the fault and the advice on stderr. An error of stderr is ignored: nobody could read of it.
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
    /// An error of stdout; errors of files and stores are converted where they happen.
    fn from(error: io::Error) -> Self {
        let silent = error.kind() == io::ErrorKind::BrokenPipe;
        Self { silent, ..Self::new(format!("cannot write the answer: {error}")) }
    }
}
