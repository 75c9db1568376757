//! The arguments of `margay ipam map` and `margay metrics`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

pub(super) const MAP_HELP: &str = "\
A pool with up to 64 blocks is drawn with a sign for each address, a larger one with a sign for each block.
Colours are for terminals, unless NO_COLOR is set.

Examples:
  margay ipam map
  margay ipam map --pool main --addresses
  margay ipam map --html blocks.html
  margay ipam map -o json | jq '.pools[].blocks[] | select(.free == 0) | .cidr'";

pub(super) const METRICS_HELP: &str = "\
Prints pools, blocks, addresses, what has leaked, and revisions in the text form of Prometheus: of a cluster's store what
this node has, which costs the same in a cluster of any size. With --file it is written to a file at once, as
node_exporter's textfile collector wants it; run it from a timer.

Examples:
  margay metrics
  margay metrics --cluster
  margay metrics --file /var/lib/prometheus/node-exporter/margay.prom";

/// The arguments of `ipam map`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("detail"))]
pub(crate) struct Map {
    /// Draw only this pool, by name or range; can be given several times
    #[arg(long, value_name = "POOL")]
    pub(crate) pool: Vec<String>,

    /// A sign for each address, however many blocks there are
    #[arg(long, group = "detail")]
    pub(crate) addresses: bool,

    /// A sign for each block, however few there are
    #[arg(long, group = "detail")]
    pub(crate) blocks: bool,

    /// How many columns to use [default: the terminal's, or 100]
    #[arg(long, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(20..))]
    pub(crate) width: Option<u16>,

    /// Write a picture to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Write a page with the picture to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

/// Where to the metrics go.
#[derive(Debug, Args)]
pub(crate) struct Metrics {
    /// Write them to this file instead, all at once
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,

    /// Another name that the store has for this very machine
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,

    /// Count the whole cluster, not only what this node has
    #[arg(long)]
    pub(crate) cluster: bool,

    /// Where it is kept in which blocks the node holds something
    #[arg(long, hide = true, value_name = "DIR", default_value = "/run/margay")]
    pub(crate) looks: PathBuf,
}
