//! The arguments of `ipam quarantine`.

use std::net::IpAddr;

use clap::{Args, Subcommand};

pub(super) const HELP: &str = "\
Examples:
  margay ipam quarantine list
  margay ipam quarantine release 10.65.0.5";

#[derive(Debug, Subcommand)]
pub(crate) enum Quarantine {
    /// List the addresses that devices outside of the store have, with the time and the reason
    #[command(
        visible_alias = "ls",
        after_help = "Examples:\n  margay ipam quarantine list\n  margay ipam quarantine list -o json"
    )]
    List,
    /// Let an address be handed out again
    #[command(after_help = "\
Examples:
  margay ipam quarantine release 10.65.0.5
  margay ipam quarantine release 10.65.0.5 --dry-run

A network with a probe asks the wire once more before it hands the address out.")]
    Release(QuarantineRelease),
}

#[derive(Debug, Args)]
pub(crate) struct QuarantineRelease {
    /// The address
    pub(crate) address: IpAddr,

    /// Only say what would be released
    #[arg(long)]
    pub(crate) dry_run: bool,
}
