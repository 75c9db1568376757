//! The arguments of `margay ipam explain`.

use clap::{ArgGroup, Args};

pub(super) const HELP: &str = "\
It goes through an assignment as the plugin does, up to the commit, and writes nothing. The exit code is 0 also where
the answer is that a container would get no address.

Examples:
  margay ipam explain --node node1
  margay ipam explain --node node1 --pool main --pool 10.70.0.0/24
  margay ipam explain --node node1 -6 --namespace shop --namespace-label tier=web";

/// For whom an assignment is gone through.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("family"))]
pub(crate) struct Explain {
    /// The node on which the container would start
    #[arg(long, value_name = "NAME")]
    pub(crate) node: String,

    /// A pool that the network names, by name or range; can be given several times
    #[arg(long = "pool", value_name = "POOL")]
    pub(crate) pools: Vec<String>,

    /// For an IPv4 address, which is the default unless the pools are of IPv6
    #[arg(short = '4', group = "family")]
    pub(crate) v4: bool,

    /// For an IPv6 address
    #[arg(short = '6', group = "family")]
    pub(crate) v6: bool,

    /// The namespace of the pod; it has the two labels that every namespace has of its name
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,

    /// A further label of the namespace; can be given several times
    #[arg(long = "namespace-label", value_name = "NAME=VALUE", requires = "namespace")]
    pub(crate) namespace_labels: Vec<String>,
}
