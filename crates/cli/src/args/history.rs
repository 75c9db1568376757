//! The arguments of `margay ipam history`.

use clap::Args;

use crate::times::Since;

pub(super) const HELP: &str = "\
The first line says how far back the store can be read; what is older is gone. On etcd no times are kept: those
shown are what the nodes recorded, and a release has none.

Examples:
  margay ipam history 10.65.0.5
  margay ipam history mynet.0a1b2c
  margay ipam history node1 --since 2h
  margay ipam history 10.65.0.5 --since 2026-11-21T10:00:00Z -o json";

/// The arguments of `ipam history`.
#[derive(Debug, Args)]
pub(crate) struct History {
    /// An address, a handle, a container's id, or a node
    #[arg(value_name = "ADDRESS|HANDLE|NODE")]
    pub(crate) subject: String,

    /// Leave out what happened before this time, or longer ago than this: 90s, 15m, 2h, 3d
    #[arg(long, value_name = "TIME|DURATION")]
    pub(crate) since: Option<Since>,
}
