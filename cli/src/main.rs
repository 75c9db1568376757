//! The command `margay`.

use std::io::{stderr, stdout};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

/// The last panic and its place. A panic of an engine on a damaged store is caught where it happens and becomes an
/// ordinary error; only a panic that reaches `main` is reported.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

fn main() -> ExitCode {
    // Only a case of `margay conformance` starts this program with a role and without any argument.
    if std::env::args_os().len() == 1
        && let Some(code) = cli::play_role()
    {
        return code;
    }
    std::panic::set_hook(Box::new(remember));
    let run = || cli::run(std::env::args_os(), &datastore::process_environment, &mut stdout().lock(), &mut stderr());
    ExitCode::from(catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let what = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        cli::report_panic(&what, &mut stderr())
    }))
}

fn remember(panic: &PanicHookInfo<'_>) {
    let what = panic.to_string().replace('\n', " ");
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = what;
}
