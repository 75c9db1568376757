//! The arguments of `margay watch`.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::times::duration;

pub(super) const HELP: &str = "\
One line for each address that is given or given back, and for each block that is claimed or given up; with -o json
one JSON object a line. It ends with Ctrl-C (exit code 130), after --count lines, or after --for.

With --exec a program is run for each event, one at a time and in order, until it ends with exit code 0; with --webhook
each event is posted to a URL until the answer is a status of 200 to 299. With --cursor nothing is lost while this command is not running: it goes on where it stopped, and begins with what is
in use when there is no such file. An event may come twice, and a \"gap\" says that the store has given up history.

A store on sled or redb is opened only when something has changed, and given back at once.

Examples:
  margay watch
  margay watch --node node1 --pool main
  margay watch --list -o json | jq -r 'select(.event == \"assigned\") | .address'
  margay watch --for 10m
  margay watch --exec /usr/local/lib/margay/dns-hook --cursor /var/lib/margay/dns.cursor
  margay watch --webhook https://ipam.example/events --webhook-secret /etc/margay/hook.key --cursor /var/lib/margay/hook.cursor";

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

    /// Run this program for each event, with the event as JSON on its stdin, instead of printing lines
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) exec: Option<PathBuf>,

    /// Post each event as JSON to this URL, instead of printing lines
    #[arg(long, value_name = "URL", conflicts_with = "exec")]
    pub(crate) webhook: Option<String>,

    /// Sign what is posted with the secret in this file
    #[arg(long, value_name = "FILE", requires = "webhook")]
    pub(crate) webhook_secret: Option<PathBuf>,

    /// Give up a run or a post after this time; it counts as failed
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    pub(crate) attempt_timeout: Duration,

    /// Keep in this file which events were handled, and go on there
    #[arg(long, value_name = "FILE")]
    pub(crate) cursor: Option<PathBuf>,

    /// End after this time, such as 30s or 10m
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub(crate) time: Option<Duration>,
}
