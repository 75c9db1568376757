//! Defines the command line of `margay`, and maps each parsed subcommand to the code that runs the subcommand.

use std::ffi::OsString;

use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};
use datastore::Drivers;

use crate::command::GlobalOptions;
use crate::command::Task::{self, OnOpenStore, OnStore, Standalone};
use crate::gc::Gc;
use crate::install::Install;
use crate::judge::Conformance;
use crate::manual::{Completions, ManPages};
use crate::serve::Serve;
use crate::subcommands::check::{self, Check};
use crate::subcommands::cluster::{self, ClusterSubcommand};
use crate::subcommands::documents::DocumentsSubcommand;
use crate::subcommands::etcd::{self, EtcdSubcommand};
use crate::subcommands::explain::{self, Explain};
use crate::subcommands::history::{self, ShowHistory};
use crate::subcommands::map::{self, Map};
use crate::subcommands::metrics::{self, Metrics};
use crate::subcommands::moving::{Import, MovingSubcommand, TakeOverSubcommand};
use crate::subcommands::node::{self, NodeSubcommand};
use crate::subcommands::pool::{self, AssignPrefix, PoolSubcommand};
use crate::subcommands::quarantine::{self, QuarantineSubcommand};
use crate::subcommands::quota::{self, QuotaSubcommand};
use crate::subcommands::release::Release;
use crate::subcommands::reservation::{self, ReservationSubcommand};
use crate::subcommands::settings::{self, Configure, Split};
use crate::subcommands::show;
use crate::subcommands::show::Show;
use crate::subcommands::sticky::{self, ListStickyAddresses, Pin, Unpin};
use crate::subcommands::store::{self, StoreSubcommand};
use crate::watch::Watch;
use crate::{gc, install, judge, manual, serve, watch};

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

/// Returns the clap definition of `margay`. The help texts list the URL forms of the store kinds in `drivers`.
pub(crate) fn definition(drivers: &Drivers) -> clap::Command {
    let (urls, forms, local) = (drivers.urls(), drivers.url_forms(), drivers.local_names("", ""));
    let from = format!("URL of the store to copy: {urls}");
    let judged = format!("URL of the store to test: memory:, {forms}");
    let addresses = "https://HOST:PORT, http://HOST:PORT or unix:PATH";
    let listen = format!("Serve etcd's API ({local} only) at this URL: {addresses}");
    let restore = format!("Create a store on {local} from a backup");
    let create = format!("Create an empty store on {local}");
    let with_help = |arg: Arg, name: &str, help: &str| {
        if arg.get_id() == name { arg.help(help.to_owned()) } else { arg }
    };
    // clap's `mut_args` keeps the position of an argument in the help; `mut_arg` would move the argument to the end.
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

/// Parses the command line of a program that supports the store kinds in `drivers`.
///
/// # Errors
/// The arguments are invalid, or request the help text or the version; clap reports such a request as an error.
pub(crate) fn parse(drivers: &Drivers, args: &[OsString]) -> Result<Cli, clap::Error> {
    let mut definition = definition(drivers);
    let parsed = definition.try_get_matches_from_mut(args).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| error.format(&mut definition))
}

/// Manage the IP addresses of containers.
#[derive(Debug, Parser)]
#[command(name = "margay", version, after_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) options: GlobalOptions,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Set up a cluster without Calico
    #[command(subcommand, after_help = cluster::CLUSTER)]
    Cluster(ClusterSubcommand),
    /// Register this machine as a node of a cluster without Calico
    #[command(subcommand, after_help = node::NODE)]
    Node(NodeSubcommand),
    /// Manage pools, from which addresses are assigned
    #[command(subcommand, visible_alias = "pools", after_help = POOL)]
    Pool(PoolSubcommand),
    /// Manage addresses that are never assigned
    #[command(subcommand, visible_alias = "reservations", after_help = RESERVATION)]
    Reservation(ReservationSubcommand),
    /// Limit addresses per namespace, network or node
    #[command(subcommand, visible_alias = "quotas", after_help = quota::QUOTA)]
    Quota(QuotaSubcommand),
    /// Show, explain and release addresses, and check IPAM's data
    #[command(subcommand, after_help = IPAM)]
    Ipam(IpamSubcommand),
    /// Print Prometheus metrics of pools, blocks and leaked addresses
    #[command(after_help = metrics::HELP)]
    Metrics(Metrics),
    #[command(flatten)]
    Moving(MovingSubcommand),
    #[command(flatten)]
    Documents(DocumentsSubcommand),
    /// Release addresses that nothing on this machine uses any more
    #[command(after_help = gc::HELP)]
    Gc(Gc),
    /// Show assignments and releases of addresses, as they happen
    #[command(after_help = watch::HELP)]
    Watch(Watch),
    /// Run the daemon that keeps the store open and serves a status page
    #[command(after_help = serve::HELP)]
    Serve(Serve),
    /// Show, back up, restore and maintain the store
    #[command(subcommand, after_help = STORE)]
    Store(StoreSubcommand),
    /// Show how full an etcd cluster is, and delete its old history
    #[command(subcommand, after_help = etcd::HELP)]
    Etcd(EtcdSubcommand),
    /// Replace Calico's plugins with Margay's, or restore Calico's
    #[command(after_help = install::HELP)]
    Install(Install),
    /// Run the conformance tests on a store
    #[command(after_help = judge::HELP)]
    Conformance(Conformance),
    /// Print the completion script for a shell
    #[command(after_help = manual::COMPLETIONS)]
    Completions(Completions),
    /// Write a man page for each command, for packagers
    #[command(hide = true)]
    ManPages(ManPages),
}

#[derive(Debug, Subcommand)]
pub(crate) enum IpamSubcommand {
    /// Show how many addresses are in use, or what uses an address
    #[command(after_help = "\
Examples:
  margay ipam show
  margay ipam show --show-blocks
  margay ipam show --ip 10.65.0.5
  margay ipam show --show-borrowed
  margay ipam show --show-configuration
  margay ipam show -o json | jq '.pools[] | {name, available}'")]
    Show(Show),
    /// Draw a map that shows which addresses are in use, free, reserved, in cooldown or borrowed
    #[command(after_help = map::HELP)]
    Map(Map),
    /// Check IPAM's data for problems, and repair what can be repaired safely
    #[command(after_help = check::HELP)]
    Check(Check),
    /// Release one address, all addresses of a handle or a container, or the addresses that margay ipam check
    /// reported as unused
    #[command(after_help = "\
Examples:
  margay ipam release --ip 10.65.0.5
  margay ipam release --handle mynet.0a1b2c
  margay ipam release --container 0a1b2c --dry-run
  margay ipam release --from-report first.json second.json --dry-run

A released address can be handed out at once. Release nothing that a running container still has.")]
    Release(Release),
    /// List or release addresses that a probe found in use by other devices
    #[command(subcommand, after_help = quarantine::HELP)]
    Quarantine(QuarantineSubcommand),
    /// Change the IPAM settings of all nodes
    #[command(after_help = settings::CONFIGURE)]
    Configure(Configure),
    /// Divide a pool into pools of equal size
    #[command(after_help = settings::SPLIT)]
    Split(Split),
    /// Show past assignments of an address, a handle, a container or a node
    #[command(after_help = history::HELP)]
    History(ShowHistory),
    /// Explain which pool and block a new container's address would come from
    #[command(after_help = explain::HELP)]
    Explain(Explain),
    /// Reserve a prefix of a pool for one node until you release the prefix
    #[command(after_help = pool::ASSIGN_PREFIX)]
    AssignPrefix(AssignPrefix),
    /// Reserve an address for one workload, until `margay ipam unpin` removes the reservation
    #[command(after_help = sticky::PIN_HELP)]
    Pin(Pin),
    /// Undo margay ipam pin: stop reserving an address for a workload
    #[command(after_help = sticky::UNPIN_HELP)]
    Unpin(Unpin),
    /// List sticky addresses, in use or reserved until their workload returns
    #[command(after_help = sticky::LIST_HELP)]
    List(ListStickyAddresses),
}

impl Command {
    /// Returns the parsed subcommand as a [`Task`], whose variant says how the subcommand accesses stores.
    pub(crate) fn task(&self) -> Task<'_> {
        match self {
            Self::Cluster(ClusterSubcommand::Init(init)) => OnStore(init),
            Self::Node(NodeSubcommand::Register(register)) => OnStore(register),
            Self::Pool(PoolSubcommand::Create(create)) if create.auto.is_some() => OnStore(create),
            Self::Pool(PoolSubcommand::Create(create)) => OnOpenStore(create),
            Self::Pool(PoolSubcommand::List) => OnOpenStore(&pool::ListPools),
            Self::Pool(PoolSubcommand::Delete(delete)) => OnOpenStore(delete),
            Self::Reservation(ReservationSubcommand::Create(create)) => OnOpenStore(create),
            Self::Reservation(ReservationSubcommand::List) => OnOpenStore(&reservation::ListReservations),
            Self::Reservation(ReservationSubcommand::Delete(delete)) => OnOpenStore(delete),
            Self::Quota(QuotaSubcommand::Set(set)) => OnOpenStore(set),
            Self::Quota(QuotaSubcommand::List) => OnOpenStore(&quota::ListQuotas),
            Self::Quota(QuotaSubcommand::Delete(delete)) => OnOpenStore(delete),
            Self::Ipam(ipam) => ipam.task(),
            Self::Metrics(metrics) => OnStore(metrics),
            Self::Moving(MovingSubcommand::Export(export)) => OnStore(export),
            Self::Moving(MovingSubcommand::Import(Import { of: Some(of), .. })) => match of {
                TakeOverSubcommand::HostLocal(from) => Standalone(from),
                TakeOverSubcommand::Podman(from) => Standalone(from),
                TakeOverSubcommand::Whereabouts(from) => Standalone(from),
            },
            Self::Moving(MovingSubcommand::Import(import)) => OnStore(import),
            Self::Moving(MovingSubcommand::Migrate(migrate)) => Standalone(migrate),
            Self::Documents(documents) => match documents {
                DocumentsSubcommand::Get(get) => OnStore(get),
                DocumentsSubcommand::Create(create) => OnStore(create),
                DocumentsSubcommand::Apply(apply) => OnStore(apply),
                DocumentsSubcommand::Replace(replace) => OnStore(replace),
                DocumentsSubcommand::Delete(delete) => OnStore(delete),
            },
            Self::Gc(gc) => Standalone(gc),
            Self::Watch(watch) => Standalone(watch),
            Self::Serve(serve) => Standalone(serve),
            Self::Store(verb) => match verb {
                StoreSubcommand::Status => OnStore(&store::Status),
                StoreSubcommand::Verify => OnStore(&store::Verify),
                StoreSubcommand::Backup(backup) => OnStore(backup),
                StoreSubcommand::Restore(restore) => OnStore(restore),
                StoreSubcommand::Compact(compact) => OnStore(compact),
                StoreSubcommand::Upgrade(upgrade) => OnStore(upgrade),
                StoreSubcommand::Create(create) => OnStore(create),
            },
            Self::Etcd(EtcdSubcommand::Status(status)) => Standalone(status),
            Self::Etcd(EtcdSubcommand::Compact(compact)) => Standalone(compact),
            Self::Etcd(EtcdSubcommand::Plan(plan)) => Standalone(plan),
            Self::Install(install) => Standalone(install),
            Self::Conformance(conformance) => Standalone(conformance),
            Self::Completions(completions) => Standalone(completions),
            Self::ManPages(pages) => Standalone(pages),
        }
    }
}

impl IpamSubcommand {
    fn task(&self) -> Task<'_> {
        match self {
            Self::Show(Show { forecast: true, .. }) => OnStore(&show::ShowForecast),
            Self::Show(show) => OnOpenStore(show),
            Self::Map(map) => OnOpenStore(map),
            Self::Check(check) => OnStore(check),
            Self::Release(release @ Release { from_report, .. }) if !from_report.is_empty() => OnStore(release),
            Self::Release(release) => OnOpenStore(release),
            Self::Quarantine(QuarantineSubcommand::List) => OnOpenStore(&quarantine::ListQuarantine),
            Self::Quarantine(QuarantineSubcommand::Release(release)) => OnOpenStore(release),
            Self::Configure(configure) => OnOpenStore(configure),
            Self::Split(split) => OnOpenStore(split),
            Self::History(history) => OnStore(history),
            Self::Explain(explain) => OnOpenStore(explain),
            Self::AssignPrefix(assign) => OnOpenStore(assign),
            Self::Pin(pin) => OnOpenStore(pin),
            Self::Unpin(unpin) => OnOpenStore(unpin),
            Self::List(list) => OnOpenStore(list),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn args_definition_is_sound_and_names_stores() {
        let mut definition = definition(&stores::drivers());
        definition.clone().debug_assert();
        let help = definition.render_help().to_string();
        assert!(help.contains("sled:///path, redb:///path or etcd://host:port"), "{help}");
    }

    #[test]
    fn args_parse_every_command_of_book() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
        let pages = std::fs::read_dir(docs).unwrap().map(|page| page.unwrap().path());
        let pages = pages.filter(|page| page.extension().is_some_and(|kind| kind == "md"));
        let mut found = 0;
        for page in pages {
            for line in std::fs::read_to_string(&page).unwrap().lines() {
                let typed = ["# margay ", "$ margay "].iter().find_map(|prompt| line.strip_prefix(prompt));
                let Some(typed) = typed.filter(|typed| !typed.contains("...")) else { continue };
                let words = words(typed.split(" #").next().unwrap_or(typed));
                let parsed = Cli::try_parse_from(std::iter::once("margay".to_owned()).chain(words));
                let is_right = match &parsed {
                    Ok(_) => true,
                    // Some command lines in the user manual are examples of what margay refuses, so they need not
                    // parse. A command that the manual shows as refused may fail to parse only because of an argument's
                    // value, never because of an unknown argument.
                    Err(error) => matches!(
                        error.kind(),
                        clap::error::ErrorKind::DisplayHelp
                            | clap::error::ErrorKind::DisplayVersion
                            | clap::error::ErrorKind::ValueValidation
                    ),
                };
                assert!(is_right, "{}: {line}: {}", page.display(), parsed.unwrap_err());
                found += 1;
            }
        }
        assert!(found > 60, "only {found} commands were found");
    }

    #[test]
    fn args_parse_what_systemd_units_call() {
        let units = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd");
        let mut calls = Vec::new();
        for folder in [units, concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd/user")] {
            for unit in std::fs::read_dir(folder).unwrap() {
                let path = unit.unwrap().path();
                let text = if path.is_file() { std::fs::read_to_string(path).unwrap() } else { String::new() };
                calls.extend(text.lines().filter_map(|line| line.strip_prefix("ExecStart=")).map(words));
            }
        }
        assert_eq!(calls.len(), 5, "{calls:?}");
        for mut call in calls {
            // In a systemd unit, `$MARGAY_SERVE` holds extra options that the administrator may set; it is empty by
            // default.
            call.retain(|word| word != "$MARGAY_SERVE");
            Cli::try_parse_from(&call).unwrap_or_else(|error| panic!("{call:?}: {error}"));
        }
    }

    /// Splits a line into words as a shell does, up to the first pipe or redirection.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for sign in line.chars() {
            match (sign, quote) {
                (sign, Some(open)) if sign == open => quote = None,
                (sign, Some(_)) => word.get_or_insert_default().push(sign),
                ('\'' | '"', None) => {
                    quote = Some(sign);
                    word.get_or_insert_default();
                }
                ('|' | '>' | '<' | ';' | '&', None) => break,
                (' ', None) => words.extend(word.take()),
                (sign, None) => word.get_or_insert_default().push(sign),
            }
        }
        words.extend(word);
        words
    }
}
