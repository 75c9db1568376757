//! What can be typed after `margay gc`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

pub(super) const HELP: &str = "\
Nothing is freed without --apply. An address that an interface in any network namespace of this machine holds
is never freed, nor is one without Margay's attributes: tunnels, load balancers, what Calico itself assigned.
Run it as root on the machine itself, not in a container.

Examples:
  margay gc --boot
  margay gc --boot --apply
  margay gc --netns --wait --apply
  margay gc --boot --netns --all-stores -o json";

/// What a collection is asked for.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("evidence").required(true).multiple(true))]
pub(crate) struct Gc {
    /// Free what this node holds from an earlier boot
    #[arg(long, group = "evidence")]
    pub(crate) boot: bool,

    /// Free what this node holds and no interface has, at two looks that are at least 60 seconds apart
    #[arg(long, group = "evidence")]
    pub(crate) netns: bool,

    /// Free it; without this, it is only shown
    #[arg(long)]
    pub(crate) apply: bool,

    /// Make both looks in one run
    #[arg(long, requires = "netns")]
    pub(crate) wait: bool,

    /// Another name that the store has for this very machine; never that of another one
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Go through every store that the CNI configuration names; one that does not exist is no error
    #[arg(long, conflicts_with = "store")]
    pub(crate) all_stores: bool,

    /// Where looks are kept until the next boot
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    pub(crate) looks: PathBuf,
}
