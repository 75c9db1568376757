//! Runs a daemon for a store, for the command `margay serve`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ::serve::api;
use ::serve::life::{self, Options};
use clap::{Args, value_parser};
use datastore::maintenance::Retention;
use datastore::{Location, served};

use crate::command::{Invocation, StandaloneCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::times::{parse_duration, parse_interval};

pub(crate) const HELP: &str = "\
Plugins and commands find the daemon by the store, and work without it. Other
processes that want the store's files get them at once.

Examples:
  margay serve
  margay serve --http 127.0.0.1:9099
  margay serve --folder /srv/lab/ipam.redb
  margay serve --listen http://127.0.0.1:2379 --insecure-loopback
  margay serve --listen unix:/run/lab.sock --watch-progress-interval 1m
  margay serve --name
  systemctl enable --now margay-serve@$(margay serve --name).socket";

/// The arguments of `margay serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Serve the store in this folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,

    /// Serve Prometheus metrics and a status page at 127.0.0.1:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) http: Vec<String>,

    /// Also accept HTTP requests to this host name
    #[arg(long, value_name = "NAME", requires = "http")]
    pub(crate) host: Vec<String>,

    /// Serve etcd's API at this URL: https://HOST:PORT, http://HOST:PORT or unix:PATH
    #[arg(long, value_name = "URL")]
    pub(crate) listen: Vec<String>,

    /// URL to announce to etcd clients that cannot use the --listen URL
    #[arg(long, value_name = "URL", requires = "listen")]
    pub(crate) advertise: Vec<String>,

    /// PEM file with the server certificate for --listen
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) cert_file: Option<PathBuf>,

    /// PEM file with the private key of --cert-file
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) key_file: Option<PathBuf>,

    /// PEM file with CA certificates; https:// clients need a certificate signed by one of these CAs
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) client_ca_file: Option<PathBuf>,

    /// Allow --listen http:// on loopback; then any local program can read and change the store
    #[arg(long, requires = "listen")]
    pub(crate) insecure_loopback: bool,

    // `--watch-progress-interval` is hidden from the list of options, because its long name would widen the help beyond
    // a screen; an example in the help shows it.
    /// Interval of progress notifications for etcd watches that request them [default: 10m; at least 100ms]
    #[arg(long, value_name = "TIME", value_parser = parse_interval, requires = "listen", hide = true)]
    pub(crate) watch_progress_interval: Option<Duration>,

    /// Keep at most N revisions of the store's history [default with --listen: 10000]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    pub(crate) history_revisions: Option<u64>,

    /// Delete store history older than AGE [default with --listen: 7d]
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    pub(crate) history_age: Option<Duration>,

    /// History limit in MiB [default with --listen: 64]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=1_048_576))]
    pub(crate) history_mib: Option<u64>,

    /// Keep revisions younger than AGE, despite --history-revisions [default with --listen: 5m]
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    pub(crate) history_min_age: Option<Duration>,

    /// Print the store's systemd instance name, and exit
    #[arg(long)]
    pub(crate) name: bool,
}

impl StandaloneCommand for Serve {
    /// Runs the daemon until a signal ends it.
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let location = match &self.folder {
            Some(folder) if invocation.options.store.is_none() => in_folder(invocation, folder)?,
            _ => invocation.choose()?.location,
        };
        if self.name {
            let name = served::instance(&location);
            let name = name.ok_or_else(|| CommandFailure::new(format!("{location} has no daemon")))?;
            writeln!(invocation.out, "{name}")?;
            return Ok(0);
        }
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        // The daemon only does short reads and commits, so a few threads suffice. More threads would cost memory,
        // because each thread has its own heap: in total 30 MiB in a test with eight callers and watches.
        let runtime = builder.worker_threads(2).max_blocking_threads(4).enable_all().build();
        let runtime = runtime.map_err(|error| CommandFailure::new(format!("cannot start: {error}")))?;
        let defaults = Retention::WITH_CLIENTS;
        let bounds = Retention {
            revisions: self.history_revisions.or(defaults.revisions),
            age: self.history_age.or(defaults.age),
            bytes: self.history_mib.map(|mib| mib << 20).or(defaults.bytes),
            min_age: self.history_min_age.or(defaults.min_age),
        };
        let is_bounded = self.history_revisions.or(self.history_mib).is_some()
            || self.history_age.or(self.history_min_age).is_some();
        if is_bounded && location.path().is_none() {
            return Err(CommandFailure::new(format!(
                "the options --history-... take a store on {}; {location} is none",
                invocation.drivers.local_names("", "")
            )));
        }
        let options = Options {
            location,
            http: self.http.clone(),
            hosts: self.host.clone(),
            api: api::ApiOptions {
                listen: self.listen.clone(),
                advertise: self.advertise.clone(),
                cert: self.cert_file.clone(),
                key: self.key_file.clone(),
                client_ca: self.client_ca_file.clone(),
                insecure_loopback: self.insecure_loopback,
                watch_progress_interval: self.watch_progress_interval,
            },
            history: if is_bounded || !self.listen.is_empty() { Some(bounds) } else { None },
            history_required: is_bounded,
            node: host::node_name(""),
            boot: host::boot_id().as_deref().and_then(host::short_boot),
        };
        let served = runtime.block_on(life::run(options, |said| _ = writeln!(invocation.err, "{said}")));
        runtime.shutdown_background();
        served.map(|()| 0).map_err(|refusal| CommandFailure::new(refusal.to_string()))
    }
}

fn in_folder(invocation: &Invocation<'_>, folder: &Path) -> CommandResult<Location> {
    if !folder.is_absolute() {
        return Err(CommandFailure::new(format!("{} is not an absolute path", folder.display())));
    }
    invocation.drivers.in_folder(folder).map_err(|error| invocation.explain(&error))
}
