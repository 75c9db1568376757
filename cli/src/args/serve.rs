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

    /// Print the name of the store's daemon, which is the instance of its systemd units, and end
    #[arg(long)]
    pub(crate) name: bool,
}
