//! `margay serve`.

use std::path::PathBuf;

use clap::Args;

pub(crate) const HELP: &str = "\
Plugins and commands find the daemon by the store, and go on without it when it is
not there. Other processes that want the store's files get them at once.

Examples:
  margay serve
  margay serve --http 127.0.0.1:9099
  margay serve --folder /srv/lab/ipam.redb
  margay serve --listen http://127.0.0.1:2379 --insecure-loopback
  margay serve --name
  systemctl enable --now margay-serve@$(margay serve --name).socket";

/// The arguments of `margay serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// The store in this folder, whichever engine it has, in place of the one that the configuration names
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,

    /// Offer numbers for Prometheus and a page to look at: 127.0.0.1:PORT, or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) http: Vec<String>,

    /// A host name by which the page may be reached, besides localhost
    #[arg(long, value_name = "NAME", requires = "http")]
    pub(crate) host: Vec<String>,

    /// Offer etcd's API in front of a store on sled or redb: https://HOST:PORT, http://HOST:PORT or unix:PATH
    #[arg(long, value_name = "URL")]
    pub(crate) listen: Vec<String>,

    /// A URL by which clients of etcd's API reach it, where that is not the one of --listen
    #[arg(long, value_name = "URL", requires = "listen")]
    pub(crate) advertise: Vec<String>,

    /// The certificate for https://, in PEM form; it is read again when it changes
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

    /// Print the name of the store's daemon, which is the instance of its systemd units, and end
    #[arg(long)]
    pub(crate) name: bool,
}
