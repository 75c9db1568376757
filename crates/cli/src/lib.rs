//! Implements the operator command `margay`.
//!
//! The module [`args`] parses a command line into a command of the module [`subcommands`]. The type of each subcommand
//! tells the module [`command`] whether the subcommand reads, writes or creates the store. The module [`command`] runs
//! the command: it chooses and opens the store, lets the command build an answer, and closes the store. The command's
//! answer is printed on stdout only after the store is closed. All output except the answer goes to stderr.

mod args;
mod cni;
mod command;
mod digest;
mod error;
mod follow;
mod gc;
mod hook;
mod install;
mod interrupt;
mod judge;
mod manual;
mod map;
mod output;
mod private_file;
mod serve;
mod store;
mod subcommands;
mod times;
mod transfer;
mod watch;

use std::ffi::OsString;
use std::io::{Write, stderr, stdout};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use datastore::{Drivers, Environment, process_environment};
use tracing_subscriber::filter::LevelFilter;

use crate::command::{Invocation, LogLevel};
use crate::error::CommandFailure;
use crate::subcommands::check::{report_hint, with_report};

/// Runs the examples of the documentation page `library.md` as doctests. The doctests are in this crate because this
/// crate depends on all other crates of the library.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
pub struct Library;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

/// Runs the command in `args` and returns its exit code. The exit code is 0 if the command succeeded, and 1 if the
/// command failed or the usage was wrong. The exit code is 130 if a signal interrupted the command and the command
/// ended in an orderly way.
///
/// `drivers` are the store drivers that the program supports. The first element of `args` is the program's name, as in
/// [`std::env::args_os`].
pub fn run(
    drivers: &Drivers,
    args: impl IntoIterator<Item = OsString>,
    env: &Environment<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let args = with_report(args);
    let cli = match args::parse(drivers, &args) {
        Ok(cli) => cli,
        Err(usage) => {
            let code = print_usage(&usage, out, err);
            if let Some(hint) = report_hint(&usage, &args) {
                _ = writeln!(err, "{hint}");
            }
            return code;
        }
    };
    log_to_stderr(cli.options.log_level);
    let done = Invocation { options: &cli.options, drivers, env, out, err }.carry_out(&cli.command.task());
    match done {
        Ok(code) => code,
        Err(failure) => {
            failure.print(err);
            u8::from(!failure.silent)
        }
    }
}

/// If a conformance case started this process as a child, performs the work that the case requests, and returns the
/// exit code.
fn play_role(drivers: &Drivers) -> Option<ExitCode> {
    conformance::play_role(&judge::site::JoiningHarness(drivers.clone()))
}

/// Reports a panic on stderr as a bug, and returns the exit code of the process.
fn report_panic(what: &str, err: &mut dyn Write) -> u8 {
    let failure = CommandFailure::new(format!("internal error: {what}"));
    failure
        .hint(
            "this is a bug in margay: please report it; each change to the store was made completely or not at all, so \
             you can run the command again",
        )
        .print(err);
    1
}

/// Prints requested help and the version on stdout, and errors about wrong arguments on stderr.
fn print_usage(usage: &clap::Error, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let text = usage.render();
    if usage.use_stderr() {
        _ = write!(err, "{text}");
        return 1;
    }
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => 0,
        Err(error) => {
            let failure = CommandFailure::from(error);
            failure.print(err);
            u8::from(!failure.silent)
        }
    }
}

fn log_to_stderr(level: LogLevel) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let subscriber = tracing_subscriber::fmt().with_max_level(level).with_writer(stderr).with_ansi(false).finish();
    // Setting the subscriber fails harmlessly if an earlier command in this process has already set one.
    _ = tracing::subscriber::set_global_default(subscriber);
}

/// The message of the last panic, and the source location of this panic. If a store engine panics on a damaged store,
/// the caller of the engine catches the panic and returns an ordinary error. Only a panic that reaches [`main`] is
/// reported.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// The main function of a program that supports the store kinds in `drivers`.
pub fn main(drivers: &Drivers) -> ExitCode {
    // A conformance case that needs a child process starts `margay` without arguments.
    if std::env::args_os().len() == 1
        && let Some(code) = play_role(drivers)
    {
        return code;
    }
    std::panic::set_hook(Box::new(remember_panic));
    let run = || run(drivers, std::env::args_os(), &process_environment, &mut stdout().lock(), &mut stderr());
    ExitCode::from(catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let what = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        report_panic(&what, &mut stderr())
    }))
}

fn remember_panic(panic: &PanicHookInfo<'_>) {
    let what = panic.to_string().replace('\n', " ");
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = what;
}
