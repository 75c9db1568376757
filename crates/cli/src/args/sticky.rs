//! The verbs of addresses that workloads keep.

use std::net::IpAddr;

use clap::Args;

pub(crate) const PIN_HELP: &str = "\
Examples:
  margay ipam pin 10.65.0.5 shop/web-0
  margay ipam pin 10.65.0.5 printer --network lan
  margay ipam pin 10.65.0.5 shop/web-0 --dry-run

NAME is what ipam.sticky of the network makes of the workload: NAMESPACE/POD, the container's name, or the value of a label
or an annotation. An address in use stays with its holder, and waits for the workload after its release, in the same network.
A pin holds until margay ipam unpin.";
pub(crate) const UNPIN_HELP: &str = "\
Examples:
  margay ipam unpin 10.65.0.5
  margay ipam unpin 10.65.0.5 --dry-run

A container that has the address keeps it. An address that waits for its workload is free afterwards.";
pub(crate) const LIST_HELP: &str = "\
Examples:
  margay ipam list
  margay ipam list --pinned
  margay ipam list -o json | jq -r '.addresses[] | select(.until) | .ip'";

/// The arguments of `ipam pin`.
#[derive(Debug, Args)]
pub(crate) struct Pin {
    /// The address
    #[arg(value_name = "ADDRESS")]
    pub(crate) ip: IpAddr,

    /// The workload's name
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    /// The workload gets the address in this network only [default: where it has it, or in any]
    #[arg(long, value_name = "NETWORK")]
    pub(crate) network: Option<String>,

    /// Only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The arguments of `ipam unpin`.
#[derive(Debug, Args)]
pub(crate) struct Unpin {
    /// The address
    #[arg(value_name = "ADDRESS")]
    pub(crate) ip: IpAddr,

    /// Only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The arguments of `ipam list`.
#[derive(Debug, Args)]
pub(crate) struct ListKept {
    /// Only those that no other workload ever gets
    #[arg(long)]
    pub(crate) pinned: bool,
}
