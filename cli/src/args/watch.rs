//! The arguments of `margay watch`.

use std::num::NonZeroU64;
use std::time::Duration;

use clap::Args;

use crate::times::duration;

pub(super) const HELP: &str = "\
One line for each address that is given or given back, and for each block that is claimed or given up; with -o json
one JSON object a line. It ends with Ctrl-C (exit code 130), after --count lines, or after --for.

A store on sled or redb is opened only when something has changed, and given back at once.

Examples:
  margay watch
  margay watch --node node1 --pool main
  margay watch --list -o json | jq -r 'select(.event == \"assigned\") | .address'
  margay watch --for 10m";

/// The arguments of `watch`.
#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Only what concerns this node
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Only what is in this pool
    #[arg(long, value_name = "NAME")]
    pub(crate) pool: Option<String>,

    /// First list what is in use now
    #[arg(long)]
    pub(crate) list: bool,

    /// End after so many lines
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<NonZeroU64>,

    /// End after this time, such as 30s or 10m
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub(crate) time: Option<Duration>,
}
