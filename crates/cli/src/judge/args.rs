//! The arguments of `margay conformance`.

use clap::{Args, ValueEnum};

use crate::options::Format;

pub(crate) const HELP: &str = "\
What happens to the store:
  there is none yet    each case gets a new one, and all are removed
  it holds no key      all cases run in it, and it is emptied after each
  it holds any key     only cases that can share a store run, in a prefix of
                       their own, without compacting; the prefix is deleted

Examples:
  margay conformance memory:
  margay conformance redb:///tmp/judged --case W
  margay conformance etcd://10.0.0.1:2379 --report junit > conformance.xml
  margay conformance etcd://10.0.0.1:2379 --erase-everything 10.0.0.1:2379

The exit code is 0 if nothing failed, 1 if something did or nothing could run,
and 130 if the run was interrupted. What was written is removed in any case.";

/// The arguments of `conformance`.
#[derive(Debug, Args)]
pub(crate) struct Conformance {
    /// The store to judge
    #[arg(value_name = "URL")]
    pub(crate) url: String,

    /// Run only the cases with this in their name, such as W, H07 or compaction
    #[arg(long, value_name = "FILTER")]
    pub(crate) case: Option<String>,

    /// table, json or junit [default: as --output says]
    #[arg(long, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) report: Option<ReportFormat>,

    /// Delete every key in the store, so that all cases can run; HOST is where it is, as in the URL: hosts and ports, or
    /// the path
    #[arg(long, value_name = "HOST")]
    pub(crate) erase_everything: Option<String>,
}

/// How a report is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportFormat {
    Table,
    Json,
    Junit,
}

impl Conformance {
    /// The form of the report: what was asked for by name, or else the form of every answer.
    pub(crate) fn report_as(&self, output: Format) -> ReportFormat {
        self.report.unwrap_or(match output {
            Format::Table | Format::Wide => ReportFormat::Table,
            // JSON is YAML too.
            Format::Json | Format::Yaml => ReportFormat::Json,
        })
    }
}
