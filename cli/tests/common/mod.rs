//! Runs the command in this process, with an environment of its own.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::HashMap;
use std::ffi::OsString;

/// What a command did.
#[derive(Debug)]
pub(crate) struct Done {
    /// The exit code.
    pub(crate) code: u8,
    /// Stdout.
    pub(crate) out: String,
    /// Stderr.
    pub(crate) err: String,
}

/// A command to run.
#[derive(Debug)]
pub(crate) struct Run {
    args: Vec<OsString>,
    env: HashMap<String, String>,
}

impl Run {
    /// The command with these arguments and an empty environment.
    pub(crate) fn new<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Self {
        let args = std::iter::once("margay".into()).chain(args.into_iter().map(Into::into)).collect();
        Self { args, env: HashMap::new() }
    }

    /// With a variable in the environment.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Runs it.
    pub(crate) fn run(self) -> Done {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = cli::run(self.args, &|name| self.env.get(name).cloned(), &mut out, &mut err);
        Done { code, out: String::from_utf8_lossy(&out).into_owned(), err: String::from_utf8_lossy(&err).into_owned() }
    }
}

/// Runs the command with these arguments and an empty environment.
pub(crate) fn margay<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Done {
    Run::new(args).run()
}
