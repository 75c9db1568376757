//! `margay ipam check`: finds faults in IPAM's documents, and mends them.
//!
//! Each repair is one commit.

mod inspection;
mod networks;
mod print;
mod repair;
mod report;
mod routes;

use std::ffi::OsString;
use std::path::PathBuf;

use async_trait::async_trait;
use clap::error::{ContextKind, ContextValue};
use clap::{Args, ValueEnum};
use ipam_operator::inspect::{Code, Inspection, Keep};

use crate::answer::Answer;
use crate::command::OnStore;
use crate::error::{Failure, Result};
use crate::options::Format;
use crate::store::StoreAt;

pub(super) use inspection::{Inspected, inspect};
pub(super) use report::{LeakedHandle, Report, Row, guid, revision};

pub(crate) const HELP: &str = "\
Examples:
  margay ipam check
  margay ipam check --repair
  margay ipam check --repair HND-02 AFF-01 --apply
  margay ipam check --report first.json     # as calicoctl's -o first.json
  margay ipam check -o json | jq -r '.findings[] | [.code, .subject] | @tsv'

Nothing is locked, and nothing is changed without --repair --apply. No repair frees an address that is assigned.
The exit code is 0 if there is no problem, and 1 if there is one or something failed.";

/// The arguments, with `--report FILE` in the place of calicoctl's `ipam check -o FILE`. Here `-o` names the form of every answer,
/// so only what looks like a file and is no form becomes a report.
pub(crate) fn with_report(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let is_check = is_check(&args);
    let is_file = |text: &str| text.contains(['.', '/']) && Format::from_str(text, false).is_err();
    let mut at = 0;
    while is_check && at < args.len() {
        let text = args[at].to_str().unwrap_or_default();
        let next = args.get(at + 1).and_then(|next| next.to_str());
        let joined = text
            .strip_prefix("--output=")
            .or_else(|| text.strip_prefix("-o").map(|value| value.strip_prefix('=').unwrap_or(value)));
        if matches!(text, "-o" | "--output") {
            if next.is_some_and(is_file) {
                args[at] = "--report".into();
            }
            at += 1;
        } else if let Some(file) = joined.filter(|value| is_file(value)) {
            args[at] = format!("--report={file}").into();
        }
        at += 1;
    }
    args
}

/// True if these are arguments of `ipam check`.
fn is_check(args: &[OsString]) -> bool {
    let ipam = args.iter().position(|arg| arg == "ipam");
    ipam.is_some_and(|ipam| args[ipam..].iter().any(|arg| arg == "check"))
}

/// The command to type for a report, if the given form is not one of `ipam check`.
pub(crate) fn report_hint(usage: &clap::Error, args: &[OsString]) -> Option<String> {
    let text = |kind| match usage.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let is_form = text(ContextKind::InvalidArg).is_some_and(|arg| arg.starts_with("--output"));
    let value = text(ContextKind::InvalidValue).filter(|_| is_form && is_check(args))?;
    Some(format!("hint: to write a report into a file: margay ipam check --report {value}"))
}

/// The arguments of `ipam check`.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Print every address that is assigned
    #[arg(long)]
    pub(crate) show_all_ips: bool,

    /// Print every address that is held for a node that is not registered any more
    #[arg(long)]
    pub(crate) show_problem_ips: bool,

    /// Write a report for `margay ipam release --from-report`, as calicoctl does
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,

    /// Say how each finding would be mended, all or those with these codes
    #[arg(long, value_name = "CODE", num_args = 0..)]
    pub(crate) repair: Option<Vec<Code>>,

    /// Mend it
    #[arg(long, requires = "repair")]
    pub(crate) apply: bool,
}

/// Checks, mends if that is requested, and reports the remaining findings.
#[async_trait(?Send)]
impl OnStore for Check {
    fn doing(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let wants_addresses = self.show_all_ips || self.show_problem_ips || self.report.is_some();
        let keep = if wants_addresses { Keep::Addresses } else { Keep::Findings };
        let mut inspected = inspect(at, keep).await?;
        let mut repairs = Vec::new();
        if let Some(codes) = &self.repair {
            if self.apply {
                (repairs, inspected) = repair::apply(at, inspected, codes, keep).await?;
            } else {
                repairs = repair::plan(&inspected.inspection, codes);
            }
        }
        let inspection = &mut inspected.inspection;
        let (others, mut notes) = networks::overlapping(at, inspection).await;
        inspection.findings.extend(others);
        match host::all_routes() {
            Ok(all) => {
                let Inspection { pools, prefix_lengths, .. } = &*inspection;
                let found = routes::overlapping(pools, prefix_lengths, &all, routes::is_bridge);
                inspection.findings.extend(found);
            }
            Err(error) => notes.push(format!("the routes of this machine could not be read: {error}")),
        }
        inspection.findings.sort_unstable();
        if let Some(file) = &self.report {
            report::write(file, &Report::new(&inspected))?;
        }
        let answer = print::answer(self, at.location, &inspected.inspection, &repairs)?.notes(notes);
        Ok(match inspected.inspection.problems() {
            0 => answer,
            problems => answer.incomplete(found(problems, &inspected.inspection, self)),
        })
    }
}

/// The meaning of an exit code of 1, and the next step.
fn found(problems: usize, inspection: &Inspection, args: &Check) -> Failure {
    let failure = Failure::new(match problems {
        1 => "1 problem was found".to_owned(),
        _ => format!("{problems} problems were found"),
    });
    let mendable = inspection.findings.iter().filter(|finding| finding.is_problem() && finding.mendable).count();
    match (mendable, args.repair.is_some(), args.apply) {
        (0, ..) => failure.hint("none of them can be mended without a person; the column MEND says what to do"),
        (_, false, _) => {
            failure.hint(format!("what can be mended ({mendable}) is shown by: margay ipam check --repair"))
        }
        (_, true, false) => failure.hint("to mend what can be mended: margay ipam check --repair --apply"),
        (_, true, true) => failure.hint("others are at work on the store, or a repair failed; check again"),
    }
}
