//! What can be typed after `margay install`.

use std::io;
use std::path::{self, PathBuf};

use clap::{ArgGroup, Args};

pub(super) const HELP: &str = "\
Without --own-folder, Calico's calico-ipam is kept beside and Margay's takes its
place, at one moment: at no time is there none. calico-node puts its own back when
it starts anew, unless it was told not to, once for the cluster:
  kubectl -n kube-system set env daemonset/calico-node -c install-cni UPDATE_CNI_BINARIES=false

Where the runtime looks is asked of containerd or CRI-O's files; or name it with --cni-bin-dir.

Examples:
  margay install --beside-calico --dry-run
  margay install --beside-calico
  margay install --status
  margay install --undo

The exit code is 0 if a CNI call runs Margay's calico-ipam now (--undo: what was there), else 1.";

/// What an installation is asked for.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("task").required(true))]
pub(crate) struct Install {
    /// Put Margay's plugin where this node looks for calico-ipam; again after it was overwritten, and after an upgrade
    #[arg(long, group = "task")]
    pub(crate) beside_calico: bool,

    /// Put back what was there before
    #[arg(long, group = "task")]
    pub(crate) undo: bool,

    /// Say which calico-ipam a CNI call on this node runs now
    #[arg(long, group = "task")]
    pub(crate) status: bool,

    /// Only say what would be changed
    #[arg(long, conflicts_with = "status")]
    pub(crate) dry_run: bool,

    /// A folder in which the runtime looks for plugins; several in the order in which it does
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) cni_bin_dir: Vec<PathBuf>,

    /// Leave Calico's file as it is, and install into this folder, which the runtime looks in first
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) own_folder: Option<PathBuf>,

    /// The plugin to install [default: margay-ipam where plugins are]
    #[arg(long, value_name = "FILE", requires = "beside_calico")]
    pub(crate) plugin: Option<PathBuf>,

    /// The configuration of containerd
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    pub(crate) containerd_config: PathBuf,

    /// The configuration of CRI-O; its parts in a folder of that name with .d are read as well
    #[arg(long, value_name = "FILE", default_value = "/etc/crio/crio.conf")]
    pub(crate) crio_config: PathBuf,
}

/// A runtime does not work where the command was called.
fn absolute(text: &str) -> io::Result<PathBuf> {
    path::absolute(text)
}
