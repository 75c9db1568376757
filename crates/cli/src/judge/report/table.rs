//! The report for people: a line for each case as it ends, then the ignored cases by reason, and the failures.

use std::io::Write;

use conformance::{Case, Failure, Report, Verdict, rules};

use super::{Reporter, Summary, result, rule};
use crate::error::Result;
use crate::output::printable;

/// The width of lists of names.
const WIDTH: usize = 80;

pub(super) struct Table {
    /// The width of the column of names.
    names: usize,
}

impl Table {
    pub(super) fn of(cases: &[Case]) -> Self {
        Self { names: cases.iter().map(|case| case.name().len()).max().unwrap_or_default() }
    }

    fn line(&self, name: &str, rule: &str, result: &str, time: &str, out: &mut dyn Write) -> Result<()> {
        let names = self.names;
        Ok(writeln!(out, "{name:names$}  {rule:<4}  {result:<7}  {time:>7}")?)
    }
}

impl Reporter for Table {
    fn begin(&mut self, out: &mut dyn Write) -> Result<()> {
        self.line("CASE", "RULE", "RESULT", "SECONDS", out)
    }

    fn case(&mut self, report: &Report, out: &mut dyn Write) -> Result<()> {
        let time = match report.verdict {
            Verdict::Ignored(_) => "-".to_owned(),
            _ => format!("{:.2}", report.took.as_secs_f64()),
        };
        self.line(report.name, rule(report), result(&report.verdict), &time, out)?;
        Ok(out.flush()?)
    }

    fn end(&mut self, reports: &[Report], summary: &Summary, out: &mut dyn Write, _: &mut dyn Write) -> Result<()> {
        ignored(reports, out)?;
        for report in reports {
            if let Verdict::Failed(failure) = &report.verdict {
                failed(report.name, failure, out)?;
            }
        }
        writeln!(out, "\n{summary}")?;
        Ok(out.flush()?)
    }
}

/// Lists the cases that did not run, by reason.
fn ignored(reports: &[Report], out: &mut dyn Write) -> Result<()> {
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
            if line.len() + 1 + number.len() > WIDTH - 1 {
                writeln!(out, " {line}")?;
                line.clear();
            }
            line = format!("{line} {number}");
        }
        writeln!(out, " {line}")?;
    }
    Ok(())
}

fn failed(name: &str, failure: &Failure, out: &mut dyn Write) -> Result<()> {
    let rule = failure.rule();
    let words = rules().into_iter().find(|known| known.id == rule).map(|known| known.text).unwrap_or_default();
    writeln!(out, "\n{name} failed")?;
    writeln!(out, "  rule {rule}:  {words}")?;
    for (what, text) in [("checked", failure.checked()), ("expected", failure.expected()), ("got", failure.got())] {
        writeln!(out, "  {:<9} {}", format!("{what}:"), printable(text))?;
    }
    Ok(())
}
