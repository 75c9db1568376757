//! The arguments of `ipam configure` and `ipam split`.

use clap::{ArgGroup, Args, ValueEnum};
use ipnet::IpNet;

pub(super) const CONFIGURE: &str = "\
Examples:
  margay ipam configure --strictaffinity=true
  margay ipam configure --strictaffinity=true --max-blocks-per-host=4
  margay ipam configure --ip-cooldown-seconds=60 --dry-run

See what is set with: margay ipam show --show-configuration";

pub(super) const SPLIT: &str = "\
Blocks and addresses stay where they are, and containers may come and go
meanwhile. The parts are named split-NAME-0, split-NAME-1, ...; networks that
name the pool have to name the parts from then on. A split that was broken off
goes on when it is asked for again.

Examples:
  margay ipam split 2 --name main --dry-run
  margay ipam split 4 --cidr 10.65.0.0/16";

/// Settings that all nodes share.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("setting").required(true).multiple(true))]
pub(crate) struct Configure {
    /// Whether a node takes addresses of its own blocks only
    #[arg(long, value_name = "true|false", group = "setting")]
    pub(crate) strictaffinity: Option<bool>,

    /// How many blocks a node may have, up to 1000000; 0 for the default, 20
    #[arg(long, value_name = "N", group = "setting", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub(crate) max_blocks_per_host: Option<u32>,

    /// Whether a KubeVirt machine keeps its addresses
    #[arg(long, value_enum, group = "setting", value_name = "Enabled|Disabled")]
    pub(crate) kubevirt_ip_persistence: Option<Persistence>,

    /// How many seconds a released address is in cooldown before it can be assigned again, up to 5000
    #[arg(long, value_name = "N", group = "setting", value_parser = clap::value_parser!(u32).range(..=5_000))]
    pub(crate) ip_cooldown_seconds: Option<u32>,

    /// Check everything and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Whether a machine keeps its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum Persistence {
    Enabled,
    Disabled,
}

/// The arguments of `ipam split`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("pool").required(true))]
pub(crate) struct Split {
    /// Into how many parts: a power of two
    pub(crate) number: u32,

    /// The pool's range
    #[arg(long, group = "pool")]
    pub(crate) cidr: Option<IpNet>,

    /// The pool's name
    #[arg(long, group = "pool")]
    pub(crate) name: Option<String>,

    /// Check everything and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}
