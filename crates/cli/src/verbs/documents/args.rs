//! The arguments of `get`, `create`, `apply`, `replace` and `delete`, as after calicoctl.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use ipam_operator::documents::DocumentKind;

use crate::verbs::pool::Bridged;

const GET: &str = "\
KIND is ippool, ipreservation, node, ipamconfig, workloadendpoint (wep) or
profile, in any case, also as plural. All outputs are calicoctl's: -o ps (or
table), wide, yaml and json. Only endpoints have namespaces.

Examples:
  margay get ippools -o wide
  margay get pool main -o yaml
  margay get nodes -o json
  margay get wep -A
  margay get wep -n shop node1-k8s-web-eth0 -o yaml
  margay get profiles -o wide";

const CREATE: &str = "\
A document has Calico's form, in YAML or JSON; a file may have several.

Examples:
  margay create -f pools.yaml
  margay create -f pools.yaml --dry-run
  cat node.json | margay create -f - --skip-exists";

const APPLY: &str = "\
What is there is replaced: what the document's spec does not say gets its default.

Examples:
  margay apply -f pools.yaml
  margay get pool main -o yaml | sed s/rack-a/rack-b/ | margay apply -f -";

const REPLACE: &str = "\
Examples:
  margay replace -f pools.yaml
  margay get ippool -o json > pools.json && margay replace -f pools.json";

const DELETE: &str = "\
A pool of which addresses are in use is refused, and it is said where they are.
An endpoint is deleted whether its container runs or not: Felix then cuts the
container off. Profiles cannot be deleted.

Examples:
  margay delete ippool main
  margay delete ippool main spare --skip-not-exists
  margay delete -f pools.yaml --dry-run
  margay delete wep -n shop node1-k8s-web-eth0";

/// Documents of Calico's form, read and written as calicoctl does.
#[derive(Debug, Subcommand)]
pub(crate) enum Documents {
    /// Show pools, reservations, nodes, endpoints and more
    #[command(after_help = GET)]
    Get(Get),
    /// Make what a file describes
    #[command(after_help = CREATE)]
    Create(Create),
    /// Make what a file describes, or change it to that
    #[command(after_help = APPLY)]
    Apply(Apply),
    /// Change what is there to what a file describes
    #[command(after_help = REPLACE)]
    Replace(Replace),
    /// Delete pools, reservations, nodes, endpoints and more
    #[command(after_help = DELETE)]
    Delete(Delete),
}

/// The arguments of `get`.
#[derive(Debug, Args)]
pub(crate) struct Get {
    #[command(flatten)]
    pub(crate) which: Selection,

    /// Of documents that are named, leave out what only this store knows: the uid, the version and the time of creation
    #[arg(long)]
    pub(crate) export: bool,

    /// Files without a document are no error
    #[arg(long, requires = "filename")]
    pub(crate) skip_empty: bool,

    // Scripts for calicoctl pass these two for all kinds.
    /// The namespace of the endpoints [default: default]
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,

    /// List the endpoints of all namespaces
    #[arg(short = 'A', long, short_alias = 'a')]
    pub(crate) all_namespaces: bool,
}

/// The arguments of `create`.
#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    pub(crate) change: Change,

    /// Pass over what is there already, and count it as made
    #[arg(long)]
    pub(crate) skip_exists: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Apply {
    #[command(flatten)]
    pub(crate) change: Change,
}

#[derive(Debug, Args)]
pub(crate) struct Replace {
    #[command(flatten)]
    pub(crate) change: Change,
}

/// The arguments of `apply` and `replace`.
#[derive(Debug, Args)]
pub(crate) struct Change {
    #[command(flatten)]
    pub(crate) source: Source,

    /// Check everything and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The arguments of `delete`.
#[derive(Debug, Args)]
pub(crate) struct Delete {
    #[command(flatten)]
    pub(crate) which: Selection,

    /// The namespace of the endpoints [default: default]
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,

    /// Pass over what is not there, and count it as deleted
    #[arg(short, long)]
    pub(crate) skip_not_exists: bool,

    /// Check everything and delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    #[command(flatten)]
    pub(crate) bridged: Bridged,
}

/// Where documents are read.
#[derive(Debug, Args)]
pub(crate) struct Source {
    /// A file of documents in YAML or JSON, - for standard input, or a folder of .yaml, .yml and .json files
    #[arg(short, long, value_name = "FILE", required = true)]
    pub(crate) filename: Vec<PathBuf>,

    /// Look into folders inside a folder too
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
}

/// A kind and names, or a file that has them.
#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// The kind, such as ippool or workloadendpoint
    #[arg(value_parser = kind, required_unless_present = "filename")]
    pub(crate) kind: Option<DocumentKind>,

    /// The names
    pub(crate) name: Vec<String>,

    /// A file that names them, - for standard input, or a folder of .yaml, .yml and .json files
    #[arg(short, long, value_name = "FILE", conflicts_with = "kind")]
    pub(crate) filename: Vec<PathBuf>,

    /// Look into folders inside a folder too
    #[arg(short = 'R', long, requires = "filename")]
    pub(crate) recursive: bool,
}

/// The names of a kind that calicoctl knows.
fn kind(text: &str) -> Result<DocumentKind, String> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "ippool" | "ippools" | "ipp" | "ipps" | "pool" | "pools" => DocumentKind::Pool,
        "ipreservation" | "ipreservations" | "reservation" | "reservations" => DocumentKind::Reservation,
        "node" | "nodes" | "no" | "nos" => DocumentKind::Node,
        "ipamconfiguration" | "ipamconfigurations" | "ipamconfig" | "ipamconfigs" => DocumentKind::Settings,
        "workloadendpoint" | "workloadendpoints" | "wep" | "weps" => DocumentKind::WorkloadEndpoint,
        "profile" | "profiles" | "pro" | "pros" => DocumentKind::Profile,
        _ => {
            return Err("not ippool, ipreservation, node, ipamconfig, workloadendpoint or profile".to_owned());
        }
    })
}
