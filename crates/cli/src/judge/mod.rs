//! `margay conformance`: tests the rules of `crates/kv/SEMANTICS.md` on a store and reports the result of each case.

pub(crate) mod args;
mod plan;
mod progress;
mod report;
pub(crate) mod site;

use std::io::Write;
use std::time::Instant;

use conformance::{Harness, Options, Run};
use datastore::{Location, Place};

use self::args::{Conformance, ReportFormat};
use self::plan::Plan;
use self::progress::Progress;
use self::report::{Summary, reporter};
use crate::command::{Call, Standalone, runtime};
use crate::error::{Failure, Result};
use crate::interrupt::{INTERRUPTED, Interrupt};

impl Standalone for Conformance {
    /// Judges a store; the exit code is 0 if nothing failed.
    fn run(&self, call: &mut Call<'_>) -> Result<u8> {
        if call.options.store.is_some() {
            return Err(Failure::new("the store to judge is named without --store")
                .hint("write it as: margay conformance sled:///path"));
        }
        let location = locate(self, call)?;
        check_filter(self)?;
        let runtime = runtime()?;
        let interrupt = Interrupt::listen()?;
        let plan = runtime.block_on(Plan::of(&location, self))?;
        _ = writeln!(call.err, "store: {location}\nnote: {plan}");
        let mut options = Options::new().with_stop(interrupt.flag());
        if let Some(filter) = &self.case {
            options = options.with_filter(filter);
        }
        let judged = judge(plan.harness(), &options, self.report_as(call.options.output), call.out, call.err);
        // The stores are cleared up whatever the outcome.
        let cleared = runtime.block_on(plan.clear_up());
        let code = judged?;
        match cleared {
            Ok(()) if interrupt.came() => {
                _ = writeln!(call.err, "error: the run was interrupted");
                Ok(INTERRUPTED)
            }
            Ok(()) => Ok(code),
            Err(error) => Err(Failure::new(format!("the run is over, but not all of it could be removed: {error}"))),
        }
    }
}

fn locate(args: &Conformance, call: &Call<'_>) -> Result<Location> {
    let location = call.drivers.parse(&args.url).map_err(|error| call.explain(&error))?;
    match location.place() {
        Place::Memory => Ok(location),
        _ => Ok(call.locate(Some(&args.url))?.location),
    }
}

/// Refuses a filter that no case matches.
fn check_filter(args: &Conformance) -> Result<()> {
    let Some(filter) = &args.case else { return Ok(()) };
    if conformance::cases().iter().any(|case| case.name().contains(filter.as_str())) {
        return Ok(());
    }
    Err(Failure::new(format!("no case has {filter:?} in its name"))
        .hint("names are such as B01_get_missing_key; W stands for all about watches; without --case all run"))
}

/// Runs the cases, reports them, and returns the exit code.
fn judge(
    harness: impl Harness,
    options: &Options,
    format: ReportFormat,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<u8> {
    let mut run = Run::new(harness, options).map_err(|error| Failure::new(format!("cannot start: {error}")))?;
    let started = Instant::now();
    let mut reporter = reporter(format, run.cases());
    let progress = Progress::new(run.len());
    let mut reports = Vec::with_capacity(run.len());
    progress.aside(|| reporter.begin(out))?;
    while let Some(case) = run.cases().first() {
        progress.working_on(case.name());
        let Some(report) = run.next() else { break };
        progress.aside(|| reporter.case(&report, out))?;
        progress.done(&report);
        reports.push(report);
    }
    progress.over();
    let summary = Summary::of(&reports, started.elapsed());
    reporter.end(&reports, &summary, out, err)?;
    if summary.passed + summary.failed == 0 {
        _ = writeln!(err, "error: no case could run on this store");
        return Ok(1);
    }
    Ok(u8::from(summary.failed > 0))
}

#[cfg(test)]
mod tests {
    use conformance::broken;

    use super::site::NewStores;
    use super::*;

    /// The report on the stores in memory, broken by ignoring compares, and the exit code.
    fn of_a_broken_store(format: ReportFormat) -> (u8, String) {
        let broken = broken::broken().into_iter().find(|broken| broken.name() == "ignores compares").unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let options = Options::new().with_filter("T0");
        let code =
            judge(broken.around(NewStores::Memory(stores::drivers().memory())), &options, format, &mut out, &mut err)
                .unwrap();
        (code, String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_broken_store_is_exit_1_and_what_failed_comes_last() {
        let (code, text) = of_a_broken_store(ReportFormat::Table);
        assert_eq!(code, 1);
        let (lines, rest) = text.split_once("\n\n").unwrap();
        assert!(lines.lines().any(|line| line.split_whitespace().take(3).eq([
            "T09_all_compares_count",
            "T1",
            "failed"
        ])));
        let one = "T09_all_compares_count failed\n  rule T1:  All compares must hold; no compares hold.";
        assert!(rest.contains(one), "{text}");
        assert!(rest.contains("\n  expected: Failure\n  got:      Success\n"), "{text}");
        assert!(rest.trim_end().lines().last().unwrap().contains(" passed, "), "{text}");
    }

    #[test]
    fn json_says_expected_and_got() {
        let (code, text) = of_a_broken_store(ReportFormat::Json);
        assert_eq!(code, 1);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let cases = json["cases"].as_array().unwrap();
        let failed = cases.iter().find(|case| case["name"] == "T09_all_compares_count").unwrap();
        assert_eq!((&failed["rule"], &failed["result"]), (&"T1".into(), &"failed".into()));
        assert!(failed["reason"].as_str().unwrap().contains("expected Failure, got Success"), "{failed}");
    }

    #[test]
    fn junit_has_a_failure_with_the_rule() {
        let (code, text) = of_a_broken_store(ReportFormat::Junit);
        assert_eq!(code, 1);
        assert!(text.starts_with("<?xml ") && text.contains("<testsuite name=\"conformance\""), "{text}");
        assert!(text.contains("type=\"T1\">breaks rule T1: All compares must hold"), "{text}");
    }
}
