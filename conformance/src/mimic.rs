//! The cases as a test program: names, filters and `--list` as in any Rust test.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};

use crate::case::Case;
use crate::harness::{Ability, Harness};
use crate::runner::{Options, Stage};
use crate::table::cases;

/// Judges a store by all cases, as the `main` of a test with `harness = false`.
///
/// `ignored` names the cases that this environment cannot run. If it cannot run others than these, the test fails: a case
/// that did not run must not go unnoticed. An ignored case is shown as such, with the reason.
pub fn main(harness: impl Harness, ignored: &[&str]) -> ExitCode {
    let arguments = Arguments::from_args();
    if let Err(difference) = check_ignored(harness.abilities(), ignored) {
        complain(&difference);
        return ExitCode::FAILURE;
    }
    let stage = match Stage::new(Arc::new(harness), Options::new()) {
        Ok(stage) => Arc::new(stage),
        Err(error) => {
            complain(&format!("no runtime for the cases: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let trials = cases().into_iter().map(|case| trial(case, stage.clone())).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(case: Case, stage: Arc<Stage>) -> Trial {
    let reason = case.ignored_because(stage.abilities());
    let trial = Trial::test(case.name, move || stage.judge(&case).map_err(|failure| Failed::from(failure.to_string())));
    match reason {
        Some(reason) => trial.with_kind(reason).with_ignored_flag(true),
        None => trial,
    }
}

/// The cases that cannot run are exactly the listed ones.
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

fn complain(what: &str) {
    // Nothing more can be done if even stderr is closed; the exit code says it all the same.
    let _ = writeln!(std::io::stderr(), "{what}");
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Ability; 4] = [Ability::New, Ability::Reopen, Ability::Close, Ability::Measure];

    #[test]
    fn what_cannot_run_has_to_be_listed() {
        assert_eq!(check_ignored(&ALL, &[]), Ok(()));
        let missing = check_ignored(&ALL[1..], &[]).unwrap_err();
        assert!(missing.contains("R01") && missing.contains("no new stores"), "{missing}");
        let listed = missing.split(' ').next().unwrap();
        assert_eq!(check_ignored(&ALL[1..], &[listed]), Ok(()));
    }

    #[test]
    fn what_can_run_must_not_be_listed() {
        let too_many = check_ignored(&ALL, &["B02_put_and_get"]).unwrap_err();
        assert!(too_many.contains("B02_put_and_get"), "{too_many}");
        assert!(check_ignored(&ALL, &["B99_nothing"]).is_err());
    }
}
