//! Defines the roles of child processes, and plays the role that a parent process requests.

use std::env;
use std::process::ExitCode;

use futures::future::BoxFuture;

use crate::expect::Failure;
use crate::groups::{crash, crash_compacting, damage, disk, processes};
use crate::harness::{BoxError, Harness};
use crate::process::{BREAKS_PREFIX, FAILED_PREFIX, ROLE_VARIABLE, RoleJob, say};

type RoleFunction = for<'a> fn(RoleJob<'a>) -> BoxFuture<'a, Result<(), BoxError>>;

const ROLES: &[(&str, RoleFunction)] = &[
    ("write", |job| Box::pin(crash::write(job))),
    ("write_many", |job| Box::pin(crash::write_many(job))),
    ("observe", |job| Box::pin(crash::observe(job))),
    ("open", |job| Box::pin(crash::open(job))),
    ("compact", |job| Box::pin(crash_compacting::compact(job))),
    ("compact_deletions", |job| Box::pin(crash_compacting::compact_deletions(job))),
    ("fill", |job| Box::pin(disk::fill(job))),
    ("examine", |job| Box::pin(damage::examine(job))),
    ("try", |job| Box::pin(processes::try_to_join(job))),
    ("count", |job| Box::pin(processes::count(job))),
    ("turns", |job| Box::pin(processes::take_turns(job))),
    ("spawn_role", |job| Box::pin(processes::spawn_role(job))),
    ("linger", |job| Box::pin(processes::linger(job))),
];

/// If a conformance case has started this process, plays the requested role and returns the exit status.
///
/// Conformance cases with several processes run their own executable as child processes. A program that uses
/// [`main`](crate::main()) need not call `play_role`, because `main` calls it. If a program calls [`run`](crate::run())
/// with a harness that lists [`Processes`](crate::Ability::Processes), the program must call `play_role` before
/// anything else. If `play_role` returns an exit status, the program must exit with that status.
pub fn play_role(harness: &impl Harness) -> Option<ExitCode> {
    let words = env::var(ROLE_VARIABLE).ok()?;
    let done = play(harness, &words);
    if let Err(error) = &done {
        // If printing fails, the conformance case still learns of the failure from the exit status of this child
        // process.
        let _ = say(match error.downcast_ref::<Failure>() {
            Some(failure) => format!("{BREAKS_PREFIX}{} {}", failure.rule(), one_line(&failure.to_string())),
            None => format!("{FAILED_PREFIX}{}", one_line(&error.to_string())),
        });
    }
    Some(if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn play(harness: &dyn Harness, words: &str) -> Result<(), BoxError> {
    let (name, arguments) = words.split_once(' ').unwrap_or((words, ""));
    let play = ROLES.iter().find(|(role, _)| *role == name).ok_or_else(|| format!("there is no role {name}"))?.1;
    let arguments = arguments.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(play(RoleJob::of_this_process(harness, arguments)?));
    runtime.shutdown_background();
    result
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}
