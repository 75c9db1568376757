//! The arguments of `margay ipam check`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, ValueEnum};
use ipam_operator::inspect::Code;

use super::Format;

pub(super) const HELP: &str = "\
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
