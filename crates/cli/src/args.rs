//! The command line.

#[cfg(test)]
mod book;
mod check;
mod documents;
mod explain;
mod gc;
mod history;
mod install;
mod map;
mod moving;
mod pool;
mod quarantine;
mod quota;
mod serve;
mod settings;
mod sticky;
mod store;
mod watch;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgGroup, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use datastore::Drivers;

use crate::times::duration;
pub(crate) use check::{Check, report_hint, with_report};
pub(crate) use documents::{Apply, Bridged, Change, Create, Delete, Documents, Get, Replace, Selection};
pub(crate) use explain::Explain;
pub(crate) use gc::Gc;
pub(crate) use history::History;
pub(crate) use install::Install;
pub(crate) use map::{Map, Metrics};
pub(crate) use moving::{
    AddressRange, Export, FromHostLocal, FromPodman, FromWhereabouts, Import, Migrate, Moving, TakeOver, Terms,
};
pub(crate) use pool::{AssignPrefix, Pool, PoolCreate, PoolDelete, Reservation, ReservationCreate, ReservationDelete};
pub(crate) use quarantine::{Quarantine, QuarantineRelease};
pub(crate) use quota::{Quota, QuotaDelete, QuotaSet};
pub(crate) use serve::Serve;
pub(crate) use settings::{Configure, Persistence, Split};
pub(crate) use sticky::{ListKept, Pin, Unpin};
pub(crate) use store::{Backup, Compact, CreateStore, Restore, StoreVerb, Upgrade};
pub(crate) use watch::Watch;

const EXAMPLES: &str = "\
Examples:
  margay pool create lab 10.70.0.0/24 --gateway 10.70.0.1
  margay ipam check --store redb:///var/lib/margay/ipam.redb -o json

Which store: the first of --store; --config; DATASTORE_TYPE, DATASTORE_PATH and
ETCD_ENDPOINTS in the environment, with ETCD_CA_CERT_FILE, ETCD_CERT_FILE,
ETCD_KEY_FILE, ETCD_USERNAME and ETCD_PASSWORD; the one that the networks name;
sled:///var/lib/margay/ipam.sled (engines: margay store --help). Exits 0 or 1.";

const POOL: &str = "\
Examples:
  margay pool create main 10.65.0.0/16
  margay pool list";

const RESERVATION: &str = "\
Examples:
  margay reservation create routers 10.65.0.1 10.65.0.2
  margay reservation list";

const IPAM: &str = "\
Examples:
  margay ipam show --ip 10.65.0.5
  margay ipam check";

const STORE: &str = "\
Examples:
  margay store status
  margay store backup /var/backups/margay.jsonl

Which engine: sled is the default; take redb where no daemon runs or the disk
may fill up: an ADD takes 0.61 of host-local's time on sled and 0.52 on redb
with the daemon, 2.2 and 0.60 without; on a full disk sled removed 19 of 200
containers and redb all; power cuts lost nothing on either.";

const CONFORMANCE: &str = "\
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

const COMPLETIONS: &str = "\
Examples:
  source <(margay completions bash)
  margay completions zsh > /usr/local/share/zsh/site-functions/_margay
  margay completions fish > ~/.config/fish/completions/margay.fish

`make install` and the Debian package have put them in place already.";

/// The definition of the command, whose help names these stores.
pub(crate) fn definition(drivers: &Drivers) -> clap::Command {
    let (urls, forms, local) = (drivers.urls(), drivers.url_forms(), drivers.local_names("", ""));
    let from = format!("The store to copy: {urls}");
    let judged = format!("The store to judge: memory:, {forms}");
    let listen =
        format!("Offer etcd's API in front of a store on {local}: https://HOST:PORT, http://HOST:PORT or unix:PATH");
    let restore = format!("Make a store from a backup, on {local}, whatever the backup was made from");
    let create = format!("Make an empty store on {local}");
    let with_help = |arg: Arg, name: &str, help: &str| {
        if arg.get_id() == name { arg.help(help.to_owned()) } else { arg }
    };
    // `mut_args` leaves an argument in its place; `mut_arg` moves it to the end.
    let command = Cli::command().mut_args(|arg| with_help(arg, "store", &urls));
    command.mut_subcommands(|command| match command.get_name() {
        "migrate" => command.mut_args(|arg| with_help(arg, "from", &from)),
        "conformance" => command.mut_args(|arg| with_help(arg, "url", &judged)),
        "serve" => command.mut_args(|arg| with_help(arg, "listen", &listen)),
        "store" => command.mut_subcommands(|verb| match verb.get_name() {
            "restore" => verb.about(restore.clone()),
            "create" => verb.about(create.clone()),
            _ => verb,
        }),
        _ => command,
    })
}

/// Parses the command line of a program with these stores.
///
/// # Errors
/// Wrong usage, or a wish for help.
pub(crate) fn parse(drivers: &Drivers, args: &[OsString]) -> Result<Cli, clap::Error> {
    let mut definition = definition(drivers);
    let parsed = definition.try_get_matches_from_mut(args).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| error.format(&mut definition))
}

const GLOBAL: &str = "Global options";

/// Manage the IP addresses of containers.
#[derive(Debug, Parser)]
#[command(name = "margay", version, after_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct Cli {
    /// The URL of the store
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "URL")]
    pub(crate) store: Option<String>,

    /// A calicoctl.cfg; else /etc/calico/calicoctl.cfg if it is there
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "FILE", conflicts_with = "store")]
    pub(crate) config: Option<PathBuf>,

    /// Answer as table, wide, yaml or json
    #[arg(short, long, global = true, help_heading = GLOBAL, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    #[arg(hide_possible_values = true)]
    pub(crate) output: Format,

    /// Where the networks are
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "DIR", default_value = datastore::DEFAULT_CONF_DIR)]
    pub(crate) cni_conf_dir: PathBuf,

    /// The log level, off to trace
    #[arg(short, long, global = true, help_heading = GLOBAL, value_enum, default_value_t = LogLevel::Warn, value_name = "LEVEL")]
    #[arg(hide_possible_values = true)]
    pub(crate) log_level: LogLevel,

    /// Longest wait for a store in use [default: 30s]
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "TIME", value_parser = duration)]
    pub(crate) lock_timeout: Option<Duration>,

    /// Accepted because scripts for calicoctl give it, and ignored: Margay does not compare versions
    #[arg(long = "allow-version-mismatch", global = true, hide = true)]
    _allow_version_mismatch: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

// The values say enough by themselves: a doc comment on a variant would blow up every help text.

/// How an answer is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    #[value(alias = "ps")]
    Table,
    Wide,
    #[value(alias = "yml")]
    Yaml,
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Ranges that addresses are taken from
    #[command(subcommand, visible_alias = "pools", after_help = POOL)]
    Pool(Pool),
    /// Addresses that are never handed out
    #[command(subcommand, visible_alias = "reservations", after_help = RESERVATION)]
    Reservation(Reservation),
    /// How many addresses namespaces, networks and nodes may have
    #[command(subcommand, visible_alias = "quotas", after_help = quota::QUOTA)]
    Quota(Quota),
    /// Addresses: how many there are, who has them, taking them back
    #[command(subcommand, after_help = IPAM)]
    Ipam(Ipam),
    /// Numbers for Prometheus: pools, blocks, addresses, what has leaked
    #[command(after_help = map::METRICS_HELP)]
    Metrics(Metrics),
    #[command(flatten)]
    Moving(Moving),
    #[command(flatten)]
    Documents(Documents),
    /// Take back addresses that nobody on this machine uses any more
    #[command(after_help = gc::HELP)]
    Gc(Gc),
    /// Show assignments and releases of addresses, as they happen
    #[command(after_help = watch::HELP)]
    Watch(Watch),
    /// Keep the store open for plugins and commands, with a page
    #[command(after_help = serve::HELP)]
    Serve(Serve),
    /// The store itself: its state, backups, upkeep
    #[command(subcommand, after_help = STORE)]
    Store(StoreVerb),
    /// Put Margay's plugin in the place of Calico's, and go back
    #[command(after_help = install::HELP)]
    Install(Install),
    /// Judge a store by the rules that every store has to keep
    #[command(after_help = CONFORMANCE)]
    Conformance(Conformance),
    /// Print what makes a shell complete the commands of margay
    #[command(after_help = COMPLETIONS)]
    Completions(Completions),
    /// Write a man page for each command, for packagers
    #[command(hide = true)]
    ManPages(ManPages),
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManPages {
    /// Where to
    pub(crate) folder: PathBuf,
}

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

#[derive(Debug, Subcommand)]
pub(crate) enum Ipam {
    /// Show how many addresses there are and how many are in use, or the holder of one
    #[command(after_help = "\
Examples:
  margay ipam show
  margay ipam show --show-blocks
  margay ipam show --ip 10.65.0.5
  margay ipam show --show-borrowed
  margay ipam show --show-configuration
  margay ipam show -o json | jq '.pools[] | {name, available}'")]
    Show(Show),
    /// Draw the blocks: what is in use, free, reserved, resting, borrowed
    #[command(after_help = map::MAP_HELP)]
    Map(Map),
    /// Check that everything IPAM keeps is in order, and mend what can be mended without a guess
    #[command(after_help = check::HELP)]
    Check(Check),
    /// Release addresses, whatever their holder
    #[command(after_help = "\
Examples:
  margay ipam release --ip 10.65.0.5
  margay ipam release --handle mynet.0a1b2c
  margay ipam release --container 0a1b2c --dry-run
  margay ipam release --from-report first.json second.json --dry-run

A released address can be handed out at once. Release nothing that a running container still has.")]
    Release(Release),
    /// Addresses that a probe found in use by a device outside of the store
    #[command(subcommand, after_help = quarantine::HELP)]
    Quarantine(Quarantine),
    /// Change the settings that all nodes share
    #[command(after_help = settings::CONFIGURE)]
    Configure(Configure),
    /// Divide a pool into pools of equal size
    #[command(after_help = settings::SPLIT)]
    Split(Split),
    /// Show who had an address, what a container had, or what happened on a node
    #[command(after_help = history::HELP)]
    History(History),
    /// Show from which pool and block a container on a node would get its address, or why it would get none
    #[command(after_help = explain::HELP)]
    Explain(Explain),
    /// Assign a prefix of a pool to a node, which keeps it
    #[command(after_help = pool::ASSIGN_PREFIX)]
    AssignPrefix(AssignPrefix),
    /// Keep an address for the workload of a name, for ever
    #[command(after_help = sticky::PIN_HELP)]
    Pin(Pin),
    /// Keep an address for its workload no longer
    #[command(after_help = sticky::UNPIN_HELP)]
    Unpin(Unpin),
    /// List the addresses that workloads keep, in use or waiting
    #[command(after_help = sticky::LIST_HELP)]
    List(ListKept),
}

#[derive(Debug, Args)]
pub(crate) struct Show {
    /// Show every block of every pool
    #[arg(long, conflicts_with = "ip")]
    pub(crate) show_blocks: bool,

    /// Show who has this address
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) ip: Option<IpAddr>,

    /// Show the addresses that nodes have of blocks that are not theirs
    #[arg(long, conflicts_with_all = ["ip", "show_blocks"])]
    pub(crate) show_borrowed: bool,

    /// Show the settings that all nodes share
    #[arg(long, conflicts_with_all = ["ip", "show_blocks", "show_borrowed"])]
    pub(crate) show_configuration: bool,

    /// Show when each pool will be full, if it goes on filling as in the last week
    #[arg(long, conflicts_with_all = ["ip", "show_blocks", "show_borrowed", "show_configuration"])]
    pub(crate) forecast: bool,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub(crate) struct Release {
    /// Release this address
    #[arg(long, value_name = "ADDRESS", group = "what")]
    pub(crate) ip: Option<IpAddr>,

    /// Release all addresses of this handle, as `ipam show --ip` prints it
    #[arg(long, value_name = "HANDLE", group = "what")]
    pub(crate) handle: Option<String>,

    /// Release all addresses of this container, in every network
    #[arg(long, value_name = "ID", group = "what")]
    pub(crate) container: Option<String>,

    /// Release what all these reports of `ipam check` say that nobody uses
    #[arg(long, value_name = "FILE", group = "what", num_args = 1..)]
    pub(crate) from_report: Vec<PathBuf>,

    /// Also if Calico's ClusterInformation has changed since the reports were made
    #[arg(long, requires = "from_report")]
    pub(crate) force: bool,

    /// Only say what would be released
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound_and_names_the_stores() {
        let mut definition = definition(&stores::drivers());
        definition.clone().debug_assert();
        let help = definition.render_help().to_string();
        assert!(help.contains("sled:///path, redb:///path or etcd://host:port"), "{help}");
    }
}
