//! The report for programs.

use std::io::Write;

use conformance::Report;
use serde::Serialize;

use super::{Reporter, Summary, reason, result, rule};
use crate::error::{Failure, Result};

pub(super) struct Json;

#[derive(Serialize)]
struct Run<'a> {
    cases: Vec<Case<'a>>,
}

#[derive(Serialize)]
struct Case<'a> {
    name: &'a str,
    /// The rule that was broken, or else the first that the case judges.
    rule: &'a str,
    /// `passed`, `failed` or `ignored`.
    result: &'a str,
    /// Why it failed or was ignored.
    reason: Option<String>,
    /// The duration of the case.
    seconds: f64,
}

impl Reporter for Json {
    fn end(&mut self, reports: &[Report], summary: &Summary, out: &mut dyn Write, err: &mut dyn Write) -> Result<()> {
        let cases = reports.iter().map(|report| Case {
            name: report.name,
            rule: rule(report),
            result: result(&report.verdict),
            reason: reason(&report.verdict),
            seconds: (report.took.as_secs_f64() * 1000.0).round() / 1000.0,
        });
        let json = serde_json::to_string_pretty(&Run { cases: cases.collect() })
            .map_err(|error| Failure::new(format!("JSON: {error}")))?;
        writeln!(out, "{json}")?;
        out.flush()?;
        _ = writeln!(err, "{summary}");
        Ok(())
    }
}
