//! The process of a command: its arguments, its streams, its exit status.

use std::io::{stderr, stdout};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use datastore::{Drivers, process_environment};

/// The last panic and its place. A panic of an engine on a damaged store is caught where it happens and becomes an
/// ordinary error; only a panic that reaches [`main`] is reported.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// The whole program, made with these stores.
pub fn main(drivers: &Drivers) -> ExitCode {
    // Only a case of `margay conformance` starts this program with a role and without any argument.
    if std::env::args_os().len() == 1
        && let Some(code) = crate::play_role(drivers)
    {
        return code;
    }
    std::panic::set_hook(Box::new(remember));
    let run = || crate::run(drivers, std::env::args_os(), &process_environment, &mut stdout().lock(), &mut stderr());
    ExitCode::from(catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let what = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        crate::report_panic(&what, &mut stderr())
    }))
}

fn remember(panic: &PanicHookInfo<'_>) {
    let what = panic.to_string().replace('\n', " ");
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = what;
}
