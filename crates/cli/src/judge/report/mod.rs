//! The results of a run, in the requested form.

mod json;
mod junit;
mod table;

use std::fmt;
use std::io::Write;
use std::time::Duration;

use conformance::{Case, Report, Verdict};

use super::args::ReportFormat;
use crate::error::Result;
use crate::output::printable;

/// A writer of a report: some formats are written during the run, others at its end.
pub(super) trait Reporter {
    /// The run begins.
    fn begin(&mut self, _out: &mut dyn Write) -> Result<()> {
        Ok(())
    }

    /// A case is over.
    fn case(&mut self, _report: &Report, _out: &mut dyn Write) -> Result<()> {
        Ok(())
    }

    /// The run is over.
    fn end(&mut self, reports: &[Report], summary: &Summary, out: &mut dyn Write, err: &mut dyn Write) -> Result<()>;
}

/// The reporter for a format.
pub(super) fn reporter(format: ReportFormat, cases: &[Case]) -> Box<dyn Reporter> {
    match format {
        ReportFormat::Table => Box::new(table::Table::of(cases)),
        ReportFormat::Json => Box::new(json::Json),
        ReportFormat::Junit => Box::new(junit::Junit),
    }
}

/// The numbers of cases that passed, failed and were ignored, and the duration of the run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Summary {
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) ignored: usize,
    pub(super) took: Duration,
}

impl Summary {
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

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, ignored, took } = self;
        write!(f, "{passed} passed, {failed} failed, {ignored} ignored in {}", spent(*took))
    }
}

/// A duration for people: `0.4 s`, `12 s`, `2 min 5 s`.
fn spent(took: Duration) -> String {
    match took.as_secs() {
        0..10 => format!("{:.1} s", took.as_secs_f64()),
        secs @ 10..120 => format!("{secs} s"),
        secs => format!("{} min {} s", secs / 60, secs % 60),
    }
}

/// The rule of a case: the broken rule, or else the first rule that the case judges.
fn rule(report: &Report) -> &'static str {
    report.rule_broken().or(report.rules.first().copied()).unwrap_or("?")
}

/// The result of a case, in a word.
fn result(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed(_) => "failed",
        _ => "ignored",
    }
}

/// Why a case failed or did not run. A store's message may hold anything, so control characters are escaped.
fn reason(verdict: &Verdict) -> Option<String> {
    match verdict {
        Verdict::Failed(failure) => {
            Some(printable(&format!("{}: expected {}, got {}", failure.checked(), failure.expected(), failure.got())))
        }
        Verdict::Ignored(reason) => Some((*reason).to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_as_people_say_them() {
        let said = |millis| spent(Duration::from_millis(millis));
        assert_eq!(
            [0, 400, 9_940, 12_300, 119_000, 125_000].map(said),
            ["0.0 s", "0.4 s", "9.9 s", "12 s", "119 s", "2 min 5 s"]
        );
    }
}
