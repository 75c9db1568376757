//! The arguments of `margay watch`.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::times::duration;

pub(super) const HELP: &str = "\
One line for each address that is assigned or released, and each block that is
claimed or released; with -o json one object a line. It ends with Ctrl-C (130).

With --cursor no event is lost while this command is not running. An event may
come twice, and a \"gap\" says that the store has given up history.

Examples:
  margay watch --node node1 --pool main --for 10m
  margay watch --list -o json | jq -r 'select(.event == \"assigned\") | .address'
  margay watch --exec ./dns-hook --cursor /var/lib/margay/dns.cursor
  margay watch --webhook https://ipam.example/events --webhook-secret hook.key";

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

    /// Run this program for each event, which it gets as JSON on stdin
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) exec: Option<PathBuf>,

    /// Post each event as JSON to this URL, until it answers with 200 to 299
    #[arg(long, value_name = "URL", conflicts_with = "exec")]
    pub(crate) webhook: Option<String>,

    /// Sign what is posted with the secret in this file
    #[arg(long, value_name = "FILE", requires = "webhook")]
    pub(crate) webhook_secret: Option<PathBuf>,

    /// Repeat a run or a post that takes longer
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    pub(crate) attempt_timeout: Duration,

    /// Keep in this file which events were handled, and go on there
    #[arg(long, value_name = "FILE")]
    pub(crate) cursor: Option<PathBuf>,

    /// End after this time, such as 30s or 10m
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub(crate) time: Option<Duration>,
}
