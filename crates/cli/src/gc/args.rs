//! The arguments of `margay gc`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

pub(crate) const HELP: &str = "\
Without --apply it only shows. Never freed are addresses that an interface of
this machine has, and those whose network namespace is there. A container's
workload endpoint goes with its addresses. Run it as root, where the container
runtime runs.

Examples:
  margay gc --boot --apply
  margay gc --netns --wait --apply
  crictl pods -o json | margay gc --attachments -
  kubectl get nodes -o name | margay gc --gone --nodes -
  margay gc --node old-name --move-to new-name --apply
  margay gc --node dead --free --apply";

/// The arguments of `gc`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("evidence").required(true).multiple(true))]
pub(crate) struct Gc {
    /// Free what this node holds from an earlier boot
    #[arg(long, group = "evidence")]
    pub(crate) boot: bool,

    /// Free what two scans, 60 s apart, find unused
    #[arg(long, group = "evidence")]
    pub(crate) netns: bool,

    /// Free what these lists of runtimes lack (-: stdin)
    #[arg(long, group = "evidence", value_name = "FILE", conflicts_with_all = ["boot", "netns"])]
    pub(crate) attachments: Vec<PathBuf>,

    /// Free what nodes hold that are not registered
    #[arg(long, group = "evidence", conflicts_with_all = ["boot", "netns", "attachments", "node", "all_stores", "local_stores"])]
    pub(crate) gone: bool,

    /// With --gone: spare these nodes, too (-: stdin)
    #[arg(long, value_name = "FILE", requires = "gone")]
    pub(crate) nodes: Option<PathBuf>,

    /// Free all that the node NAME holds, gone for good
    #[arg(long, group = "evidence", requires = "node", conflicts_with_all = ["boot", "netns", "attachments", "gone", "all_stores", "local_stores"])]
    pub(crate) free: bool,

    /// Make what node NAME holds NEW's; no address changes
    #[arg(long, group = "evidence", requires = "node", value_name = "NEW", conflicts_with_all = ["boot", "netns", "attachments", "gone", "free", "all_stores", "local_stores"])]
    pub(crate) move_to: Option<String>,

    /// Do it; without this, it is only shown
    #[arg(long)]
    pub(crate) apply: bool,

    /// Take an empty list as such, instead of refusing it
    #[arg(long)]
    pub(crate) empty: bool,

    /// Make both scans in one run
    #[arg(long, requires = "netns")]
    pub(crate) wait: bool,

    /// The node for --free and --move-to; else another name of this very machine
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Go through every store that the CNI configuration names; one that does not exist is no error
    #[arg(long, conflicts_with = "store")]
    pub(crate) all_stores: bool,

    /// The same, but leave out those of clusters
    #[arg(long, conflicts_with_all = ["store", "all_stores"])]
    pub(crate) local_stores: bool,

    /// Read all blocks of a cluster, not only those that concern this node
    #[arg(long)]
    pub(crate) all_blocks: bool,

    /// Where scans are kept until the next boot
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    pub(crate) looks: PathBuf,
}
