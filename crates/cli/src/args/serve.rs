//! `margay serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, value_parser};

use crate::times::{duration, interval};

pub(crate) const HELP: &str = "\
Plugins and commands find the daemon by the store, and go on without it. Other
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
    /// The store in this folder, in place of the configured one
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,

    /// Offer numbers for Prometheus and a page to look at: 127.0.0.1:PORT, or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) http: Vec<String>,

    /// A host name of the page, besides localhost
    #[arg(long, value_name = "NAME", requires = "http")]
    pub(crate) host: Vec<String>,

    /// Offer etcd's API in front of a store: https://HOST:PORT, http://HOST:PORT or unix:PATH
    #[arg(long, value_name = "URL")]
    pub(crate) listen: Vec<String>,

    /// A URL by which clients of etcd's API reach it, where that is not the one of --listen
    #[arg(long, value_name = "URL", requires = "listen")]
    pub(crate) advertise: Vec<String>,

    /// The certificate for https://, in PEM form
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) cert_file: Option<PathBuf>,

    /// The key of the certificate
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) key_file: Option<PathBuf>,

    /// The authorities whose clients may use etcd's API over https://
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) client_ca_file: Option<PathBuf>,

    /// Let every program of this machine use etcd's API at an http:// URL on loopback
    #[arg(long, requires = "listen")]
    pub(crate) insecure_loopback: bool,

    // In an example only: with so long a name the help would not fit a screen.
    /// How often a watch of etcd's API that wants it reports its progress: 10m if not given, at least 100ms
    #[arg(long, value_name = "TIME", value_parser = interval, requires = "listen", hide = true)]
    pub(crate) watch_progress_interval: Option<Duration>,

    /// Revisions to keep [with --listen: 10000]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    pub(crate) history_revisions: Option<u64>,

    /// Their greatest age [with --listen: 7d]
    #[arg(long, value_name = "AGE", value_parser = duration)]
    pub(crate) history_age: Option<Duration>,

    /// Their greatest size, in MiB [with --listen: 64]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=1_048_576))]
    pub(crate) history_mib: Option<u64>,

    /// Their least age [with --listen: 5m]
    #[arg(long, value_name = "AGE", value_parser = duration)]
    pub(crate) history_min_age: Option<Duration>,

    /// Print the name of the store's daemon, which is the instance of its systemd units, and end
    #[arg(long)]
    pub(crate) name: bool,
}
