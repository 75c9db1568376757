//! What can be typed after `margay ipam check`.

use std::path::PathBuf;

use clap::Args;
use ipam_core::inspect::Code;

pub(super) const HELP: &str = "\
Examples:
  margay ipam check
  margay ipam check --repair
  margay ipam check --repair HND-02 AFF-01 --apply
  margay ipam check --report first.json
  margay ipam check -o json | jq -r '.findings[] | [.code, .subject] | @tsv'

Nothing is locked, and nothing is changed without --repair --apply. No repair frees an address that is given out.
The exit code is 0 if there is no problem, and 1 if there is one or something failed.";

/// What is to be looked at, and what is to be done about it.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Print every address that is given out
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
