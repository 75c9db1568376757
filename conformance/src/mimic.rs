//! Runs the conformance cases as a test program, with names, filters and `--list` like any Rust test.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::case::Case;
use crate::expect::Checked;
use crate::harness::{Ability, Harness};
use crate::roles::play_role;
use crate::runner::RunOptions;
use crate::seed::{SEED, given, seed};
use crate::stage::Stage;
use crate::table::cases;

/// The environment variable with the path of a file to which the test program appends the duration of each case.
const TIMES_VARIABLE: &str = "CONFORMANCE_TIMES";

/// Runs all conformance cases on a store, as the `main` function of a test with `harness = false`.
///
/// The argument `ignored` lists the test cases that this environment cannot run. If the environment cannot run a test
/// case that is not in `ignored`, the test fails: no case may be skipped unnoticed. The test output lists an ignored
/// case as ignored, with the reason.
pub fn main(harness: impl Harness, ignored: &[&str]) -> ExitCode {
    main_knowing(harness, ignored, &[])
}

/// A test case that a store fails because of a known bug that the store's author cannot fix, for example in a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownFailure {
    /// The name of the failing test case.
    pub case: &'static str,
    /// The rule that the store breaks in this test case.
    pub rule: &'static str,
    /// A description of the bug behind a known failure, and of the versions that have it.
    pub reason: &'static str,
    /// Says how often the test case with the known failure fails.
    pub happens: FailureFrequency,
}

/// Says how often a test case with a known failure fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureFrequency {
    /// The known failure happens in every run. If the test case passes, the list of known failures is wrong and the
    /// test fails.
    Always,
    /// The known failure happens only in some runs, because it depends on timing or chance.
    Sometimes,
}

/// Like [`main`], for a store that is known to fail some test cases.
///
/// Test cases with a known failure run, too, and each of them must break exactly the listed rule. The test fails if a
/// case breaks a different rule, or passes although its failure is listed as [`FailureFrequency::Always`]. A case that
/// passes against expectation fails the test, because otherwise the list of known failures would become outdated.
pub fn main_knowing(harness: impl Harness, ignored: &[&str], known: &[KnownFailure]) -> ExitCode {
    if let Some(code) = play_role(&harness) {
        return code;
    }
    let arguments = Arguments::from_args();
    let checked = check_ignored(harness.abilities(), ignored)
        .and_then(|()| check_known(harness.abilities(), known))
        .and_then(|()| given().map(drop));
    if let Err(difference) = checked {
        say(&difference);
        return ExitCode::FAILURE;
    }
    let stage = match Stage::new(Arc::new(harness), RunOptions::new()) {
        Ok(stage) => Arc::new(stage),
        Err(error) => {
            say(&format!("no runtime for the cases: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let known_of = |case: &Case| known.iter().find(|known| known.case == case.name).copied();
    let trials = cases().into_iter().map(|case| trial(known_of(&case), case, stage.clone())).collect();
    if !arguments.list {
        say(&format!("random cases: {SEED}={} makes the same calls again", seed()));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(known: Option<KnownFailure>, case: Case, stage: Arc<Stage>) -> Trial {
    let reason = stage.ignored_because(&case);
    let trial = Trial::test(case.name, move || {
        let started = Instant::now();
        let judged = stage.judge(&case);
        note_time(&case, started.elapsed());
        verdict(judged, known).map_err(Failed::from)
    });
    match (reason, known) {
        (Some(reason), _) => trial.with_kind(reason).with_ignored_flag(true),
        (None, Some(known)) => trial.with_kind(format!("known to fail: {}", known.reason)),
        (None, None) => trial,
    }
}

/// Appends a line to the file in [`TIMES_VARIABLE`]: the duration of a case in milliseconds, a tab, the case and the
/// test program.
fn note_time(case: &Case, took: Duration) {
    let Some(path) = std::env::var_os(TIMES_VARIABLE) else { return };
    let program = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let line = format!("{}\tcase {} in {program}\n", took.as_millis(), case.name);
    let written = OpenOptions::new().create(true).append(true).open(path);
    if let Err(error) = written.and_then(|mut file| file.write_all(line.as_bytes())) {
        say(&format!("{TIMES_VARIABLE}: {error}"));
    }
}

/// Converts the result of a conformance case into a test result: the case must pass, or break the rule of its known
/// failure.
fn verdict(judged: Checked, known: Option<KnownFailure>) -> Result<(), String> {
    match (judged, known) {
        (Ok(()), None | Some(KnownFailure { happens: FailureFrequency::Sometimes, .. })) => Ok(()),
        (Ok(()), Some(known)) => Err(format!("it is known to fail ({}), but it passed", known.reason)),
        (Err(failure), Some(known)) if failure.rule() == known.rule => Ok(()),
        (Err(failure), _) => Err(failure.to_string()),
    }
}

/// Checks that each known failure names a test case that can run and that judges the listed rule.
fn check_known(abilities: &[Ability], known: &[KnownFailure]) -> Result<(), String> {
    let all = cases();
    for KnownFailure { case, rule, .. } in known {
        let runs = all.iter().find(|one| one.name == *case && one.ignored_because(abilities).is_none());
        if !runs.is_some_and(|one| one.rules.contains(rule)) {
            return Err(format!("{case} is known to break {rule}, but no case of that name runs and judges that rule"));
        }
    }
    Ok(())
}

/// Checks that the test cases that cannot run are exactly the listed ignored cases.
fn check_ignored(abilities: &[Ability], listed: &[&str]) -> Result<(), String> {
    let listed: BTreeSet<&str> = listed.iter().copied().collect();
    let all = cases();
    let ignored: BTreeSet<&str> =
        all.iter().filter(|case| case.ignored_because(abilities).is_some()).map(Case::name).collect();
    let mut lines = Vec::new();
    for case in all.iter().filter(|case| ignored.contains(case.name()) && !listed.contains(case.name())) {
        let reason = case.ignored_because(abilities).unwrap_or_default();
        lines.push(format!("{} cannot run ({reason}) and is not in the list of ignored cases", case.name()));
    }
    for name in listed.difference(&ignored) {
        lines
            .push(format!("{name} is in the list of ignored cases, but there is no case of that name that cannot run"));
    }
    if lines.is_empty() { Ok(()) } else { Err(lines.join("\n")) }
}

fn say(what: &str) {
    // If stderr is closed, the failure message is lost, but the exit status of the test program still reports the
    // failure.
    let _ = writeln!(std::io::stderr(), "{what}");
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::expect::Failure;

    /// All abilities that a test case can need. `New` comes first.
    static ALL: LazyLock<Vec<Ability>> = LazyLock::new(|| {
        let mut all: Vec<Ability> = cases().iter().flat_map(Case::needs).copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    });

    #[test]
    fn ignored_list_must_have_cases_that_cannot_run() {
        assert_eq!(check_ignored(&ALL, &[]), Ok(()));
        let missing = check_ignored(&ALL[1..], &[]).unwrap_err();
        assert!(missing.contains("R01") && missing.contains("no new stores"), "{missing}");
        let listed = missing.split(' ').next().unwrap();
        assert_eq!(check_ignored(&ALL[1..], &[listed]), Ok(()));
    }

    #[test]
    fn known_failure_must_fail_as_known() {
        let happens = FailureFrequency::Always;
        let known = KnownFailure { case: "W11_start_at_mark_delete", rule: "C4", reason: "an old server", happens };
        let chance = KnownFailure { happens: FailureFrequency::Sometimes, ..known };
        let failure = |rule: &'static str| Failure::new("something", "this", "that").or_rule(Some(rule));
        assert_eq!(verdict(Ok(()), None), Ok(()));
        assert_eq!(verdict(Err(failure("C4")), Some(known)), Ok(()));
        assert_eq!(verdict(Err(failure("C4")), Some(chance)), Ok(()));
        assert_eq!(verdict(Ok(()), Some(chance)), Ok(()));
        assert!(verdict(Err(failure("C3")), Some(chance)).is_err());
        assert!(verdict(Err(failure("C4")), None).is_err());
        assert!(verdict(Err(failure("C3")), Some(known)).is_err());
        assert!(verdict(Ok(()), Some(known)).unwrap_err().contains("an old server"));
        assert_eq!(check_known(&ALL, &[known]), Ok(()));
        assert!(check_known(&ALL, &[KnownFailure { rule: "C3", ..known }]).is_err());
        assert!(check_known(&ALL, &[KnownFailure { case: "W99_nothing", ..known }]).is_err());
    }

    #[test]
    fn ignored_list_must_not_have_cases_that_can_run() {
        let too_many = check_ignored(&ALL, &["B02_put_and_get"]).unwrap_err();
        assert!(too_many.contains("B02_put_and_get"), "{too_many}");
        assert!(check_ignored(&ALL, &["B99_nothing"]).is_err());
    }
}
