//! The report for build servers.

use std::io::Write;

use conformance::{Report, Verdict};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::{Reporter, Summary, reason, rule};
use crate::error::{Failure, Result};
use crate::output::printable;

pub(super) struct Junit;

impl Reporter for Junit {
    fn end(&mut self, reports: &[Report], summary: &Summary, out: &mut dyn Write, err: &mut dyn Write) -> Result<()> {
        let mut suite = TestSuite::new("conformance");
        suite.add_test_cases(reports.iter().map(case)).set_time(summary.took);
        let mut run = quick_junit::Report::new("margay conformance");
        run.add_test_suite(suite).set_time(summary.took);
        let xml = run.to_string().map_err(|error| Failure::new(format!("JUnit: {error}")))?;
        writeln!(out, "{}", xml.trim_end())?;
        out.flush()?;
        _ = writeln!(err, "{summary}");
        Ok(())
    }
}

fn case(report: &Report) -> TestCase {
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
