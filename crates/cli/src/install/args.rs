//! The arguments of `margay install`.

use std::io;
use std::path::{self, PathBuf};

use clap::{ArgGroup, Args};

pub(crate) const HELP: &str = "\
calico-node puts its own back when it starts, unless told not to, once:
  kubectl -n kube-system set env daemonset/calico-node -c install-cni \\
    UPDATE_CNI_BINARIES=false

Examples:
  margay install --beside-calico --dry-run
  margay install --beside-calico
  margay install --beside-calico --main-plugin
  margay install --undo

Exit code 0: a CNI call runs Margay's plugin now (--undo: the other); else 1.";

/// The arguments of `install`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("task").required(true))]
pub(crate) struct Install {
    /// Put Margay's plugin where this node looks for calico-ipam
    #[arg(long, group = "task")]
    pub(crate) beside_calico: bool,

    /// Put back what was there before
    #[arg(long, group = "task")]
    pub(crate) undo: bool,

    /// Say which calico-ipam and calico a CNI call on this node runs now
    #[arg(long, group = "task")]
    pub(crate) status: bool,

    /// Second step: the main plugin calico, too [with --undo: it alone]
    #[arg(long, conflicts_with_all = ["status", "plugin"])]
    pub(crate) main_plugin: bool,

    /// Only say what would be changed
    #[arg(long, conflicts_with = "status")]
    pub(crate) dry_run: bool,

    /// A folder in which the runtime looks for plugins; all in its order
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) cni_bin_dir: Vec<PathBuf>,

    /// Leave Calico's file, and install where the runtime looks first
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) own_folder: Option<PathBuf>,

    /// The plugin to install [default: margay-ipam where plugins are]
    #[arg(long, value_name = "FILE", requires = "beside_calico")]
    pub(crate) plugin: Option<PathBuf>,

    /// containerd's settings
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    pub(crate) containerd_config: PathBuf,

    /// CRI-O's settings, and those in FILE.d
    #[arg(long, value_name = "FILE", default_value = "/etc/crio/crio.conf")]
    pub(crate) crio_config: PathBuf,
}

/// A runtime does not work where the command was called.
fn absolute(text: &str) -> io::Result<PathBuf> {
    path::absolute(text)
}
