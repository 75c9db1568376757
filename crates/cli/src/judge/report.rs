//! Prints the results of a conformance run in the requested format, and shows progress on a terminal. In table format,
//! each conformance case is printed on one line as soon as it ends. The table ends with the ignored cases, grouped by
//! reason, and the failed cases. JSON and JUnit XML are formats for programs.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use conformance::{Case, Report, Verdict, rules};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde::Serialize;

use super::ReportFormat;
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;

/// Writes a report about a conformance run. Some report formats are written during the run, others at the run's end.
pub(super) trait Reporter {
    /// Called when the conformance run starts.
    fn begin(&mut self, _out: &mut dyn Write) -> CommandResult<()> {
        Ok(())
    }

    /// Called when a conformance case has ended.
    fn case(&mut self, _report: &Report, _out: &mut dyn Write) -> CommandResult<()> {
        Ok(())
    }

    /// Called when the conformance run has ended.
    fn end(
        &mut self,
        reports: &[Report],
        summary: &RunSummary,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> CommandResult<()>;
}

pub(super) fn reporter(format: ReportFormat, cases: &[Case]) -> Box<dyn Reporter> {
    match format {
        ReportFormat::Table => Box::new(TableReporter::of(cases)),
        ReportFormat::Json => Box::new(JsonReporter),
        ReportFormat::Junit => Box::new(JunitReporter),
    }
}

/// How many conformance cases passed, failed and were ignored, and how long the run took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunSummary {
    pub(super) passed: usize,
    pub(super) failed: usize,
    ignored: usize,
    pub(super) took: Duration,
}

impl RunSummary {
    pub(super) fn of(reports: &[Report], took: Duration) -> Self {
        let mut summary = Self { took, ..Self::default() };
        for report in reports {
            match report.verdict {
                Verdict::Passed => summary.passed += 1,
                Verdict::Failed(_) => summary.failed += 1,
                _ => summary.ignored += 1,
            }
        }
        summary
    }
}

impl fmt::Display for RunSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, ignored, took } = self;
        write!(f, "{passed} passed, {failed} failed, {ignored} ignored in {}", format_duration(*took))
    }
}

/// Formats a duration for people, for example as `0.4 s`, `12 s` or `2 min 5 s`.
fn format_duration(took: Duration) -> String {
    match took.as_secs() {
        0..10 => format!("{:.1} s", took.as_secs_f64()),
        secs @ 10..120 => format!("{secs} s"),
        secs => format!("{} min {} s", secs / 60, secs % 60),
    }
}

/// Returns the rule that a conformance case found broken, or else the first rule that the case tests.
fn rule(report: &Report) -> &'static str {
    report.rule_broken().or(report.rules.first().copied()).unwrap_or("?")
}

fn result(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed(_) => "failed",
        _ => "ignored",
    }
}

/// Returns why a conformance case failed or was ignored. Escapes control characters, since a store's error message may
/// contain any character.
fn reason(verdict: &Verdict) -> Option<String> {
    match verdict {
        Verdict::Failed(failure) => {
            Some(printable(&format!("{}: expected {}, got {}", failure.checked(), failure.expected(), failure.got())))
        }
        Verdict::Ignored(reason) => Some((*reason).to_owned()),
        _ => None,
    }
}

/// Maximum width of a table line with numbers of conformance cases, in columns.
const TABLE_WIDTH: usize = 80;

struct TableReporter {
    /// The width of the table column with the names of the conformance cases, in characters.
    names: usize,
}

impl TableReporter {
    fn of(cases: &[Case]) -> Self {
        Self { names: cases.iter().map(|case| case.name().len()).max().unwrap_or_default() }
    }

    fn line(&self, name: &str, rule: &str, result: &str, time: &str, out: &mut dyn Write) -> CommandResult<()> {
        let names = self.names;
        Ok(writeln!(out, "{name:names$}  {rule:<4}  {result:<7}  {time:>7}")?)
    }
}

impl Reporter for TableReporter {
    fn begin(&mut self, out: &mut dyn Write) -> CommandResult<()> {
        self.line("CASE", "RULE", "RESULT", "SECONDS", out)
    }

    fn case(&mut self, report: &Report, out: &mut dyn Write) -> CommandResult<()> {
        let time = match report.verdict {
            Verdict::Ignored(_) => "-".to_owned(),
            _ => format!("{:.2}", report.took.as_secs_f64()),
        };
        self.line(report.name, rule(report), result(&report.verdict), &time, out)?;
        Ok(out.flush()?)
    }

    fn end(
        &mut self,
        reports: &[Report],
        summary: &RunSummary,
        out: &mut dyn Write,
        _: &mut dyn Write,
    ) -> CommandResult<()> {
        print_ignored(reports, out)?;
        for report in reports {
            if let Verdict::Failed(failure) = &report.verdict {
                print_failure(report.name, failure, out)?;
            }
        }
        writeln!(out, "\n{summary}")?;
        Ok(out.flush()?)
    }
}

/// Prints the ignored conformance cases, grouped by reason.
fn print_ignored(reports: &[Report], out: &mut dyn Write) -> CommandResult<()> {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for report in reports {
        let Verdict::Ignored(reason) = report.verdict else { continue };
        let number = report.name.split('_').next().unwrap_or(report.name);
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, numbers)) => numbers.push(number),
            None => reasons.push((reason, vec![number])),
        }
    }
    for (reason, numbers) in reasons {
        writeln!(out, "\nignored, since {reason}:")?;
        let mut line = String::new();
        for number in numbers {
            if line.len() + 1 + number.len() > TABLE_WIDTH - 1 {
                writeln!(out, " {line}")?;
                line.clear();
            }
            line = format!("{line} {number}");
        }
        writeln!(out, " {line}")?;
    }
    Ok(())
}

fn print_failure(name: &str, failure: &conformance::Failure, out: &mut dyn Write) -> CommandResult<()> {
    let rule = failure.rule();
    let words = rules().into_iter().find(|known| known.id == rule).map(|known| known.text).unwrap_or_default();
    writeln!(out, "\n{name} failed")?;
    writeln!(out, "  rule {rule}:  {words}")?;
    for (what, text) in [("checked", failure.checked()), ("expected", failure.expected()), ("got", failure.got())] {
        writeln!(out, "  {:<9} {}", format!("{what}:"), printable(text))?;
    }
    Ok(())
}

/// Prints a JSON or JUnit report to standard output, and a summary for people to standard error.
fn print_document(document: &str, summary: &RunSummary, out: &mut dyn Write, err: &mut dyn Write) -> CommandResult<()> {
    writeln!(out, "{document}")?;
    out.flush()?;
    _ = writeln!(err, "{summary}");
    Ok(())
}

struct JsonReporter;

#[derive(Serialize)]
struct RunJson<'a> {
    cases: Vec<CaseJson<'a>>,
}

#[derive(Serialize)]
struct CaseJson<'a> {
    name: &'a str,
    /// The rule that the conformance case found broken, or else the first rule that the case tests.
    rule: &'a str,
    /// The result of the conformance case, which is `passed`, `failed` or `ignored`.
    result: &'a str,
    reason: Option<String>,
    seconds: f64,
}

impl Reporter for JsonReporter {
    fn end(
        &mut self,
        reports: &[Report],
        summary: &RunSummary,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> CommandResult<()> {
        let cases = reports.iter().map(|report| CaseJson {
            name: report.name,
            rule: rule(report),
            result: result(&report.verdict),
            reason: reason(&report.verdict),
            seconds: (report.took.as_secs_f64() * 1000.0).round() / 1000.0,
        });
        let json = serde_json::to_string_pretty(&RunJson { cases: cases.collect() })
            .map_err(|error| CommandFailure::new(format!("JSON: {error}")))?;
        print_document(&json, summary, out, err)
    }
}

struct JunitReporter;

impl Reporter for JunitReporter {
    fn end(
        &mut self,
        reports: &[Report],
        summary: &RunSummary,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> CommandResult<()> {
        let mut suite = TestSuite::new("conformance");
        suite.add_test_cases(reports.iter().map(junit_case)).set_time(summary.took);
        let mut run = quick_junit::Report::new("margay conformance");
        run.add_test_suite(suite).set_time(summary.took);
        let xml = run.to_string().map_err(|error| CommandFailure::new(format!("JUnit: {error}")))?;
        print_document(xml.trim_end(), summary, out, err)
    }
}

fn junit_case(report: &Report) -> TestCase {
    let status = match &report.verdict {
        Verdict::Passed => TestCaseStatus::success(),
        Verdict::Failed(failure) => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            let text: Vec<String> = failure.to_string().lines().map(printable).collect();
            status
                .set_type(rule(report))
                .set_message(reason(&report.verdict).unwrap_or_default())
                .set_description(text.join("\n"));
            status
        }
        other => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(reason(other).unwrap_or_default());
            status
        }
    };
    let mut case = TestCase::new(report.name, status);
    case.set_classname(format!("conformance.{:?}", report.group)).set_time(report.took);
    case
}

/// A progress bar of the conformance run on stderr; hidden if stderr is not a terminal.
#[derive(Debug)]
pub(super) struct CaseProgress {
    bar: ProgressBar,
    failed: std::cell::Cell<usize>,
}

impl CaseProgress {
    pub(super) fn new(cases: usize) -> Self {
        let target =
            if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(cases as u64), target);
        let template = "{pos}/{len} [{bar:24}] {prefix}{wide_msg} {elapsed}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, failed: std::cell::Cell::new(0) }
    }

    pub(super) fn show_case(&self, case: &'static str) {
        self.bar.set_message(case);
    }

    pub(super) fn count(&self, report: &Report) {
        if matches!(report.verdict, Verdict::Failed(_)) {
            self.failed.set(self.failed.get() + 1);
            self.bar.set_prefix(format!("{} failed, ", self.failed.get()));
        }
        self.bar.inc(1);
    }

    /// Runs `work` while the progress bar is hidden.
    pub(super) fn run_suspended<T>(&self, work: impl FnOnce() -> T) -> T {
        self.bar.suspend(work)
    }

    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_printed_for_people() {
        let said = |millis| format_duration(Duration::from_millis(millis));
        assert_eq!(
            [0, 400, 9_940, 12_300, 119_000, 125_000].map(said),
            ["0.0 s", "0.4 s", "9.9 s", "12 s", "119 s", "2 min 5 s"]
        );
    }
}
