//! Defines the arguments of the commands `get`, `create`, `apply`, `replace` and `delete`, which follow calicoctl's
//! arguments. Determines which namespaces the arguments select. For document kinds without namespaces, the selected
//! namespace is ignored.
//!
//! The files with documents are read before the store is opened, because a user may be typing a document on stdin.

mod change;
mod get;

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use clap::{Args, Subcommand};
use ipam_operator::Operator;
use ipam_operator::documents::{DEFAULT_NAMESPACE, DocumentKind, Manifest, Namespaces, WriteMode};
use kv::Deadline;

pub(crate) use self::change::parse_values;
use self::change::{DeleteDocuments, FolderDepth, WriteDocuments};
use self::get::DocumentForm;
use super::pool::BridgedPoolArgs;
use crate::command::{CommandAnswer, OpenStoreCommand, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;
use crate::store::{StoreAccess, StoreUse};

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
An existing document is replaced: fields that the new spec lacks get their defaults.

Examples:
  margay apply -f pools.yaml
  margay get pool main -o yaml | sed s/rack-a/rack-b/ | margay apply -f -";

const REPLACE: &str = "\
Examples:
  margay replace -f pools.yaml
  margay get ippool -o json > pools.json && margay replace -f pools.json";

const DELETE: &str = "\
A pool with addresses in use is refused; the error says where they are.
An endpoint is deleted whether its container runs or not: Felix then cuts the
container off. Profiles cannot be deleted.

Examples:
  margay delete ippool main
  margay delete ippool main spare --skip-not-exists
  margay delete -f pools.yaml --dry-run
  margay delete wep -n shop node1-k8s-web-eth0";

/// Documents of Calico's form, read and written as calicoctl does.
#[derive(Debug, Subcommand)]
pub(crate) enum DocumentsSubcommand {
    /// Show pools, reservations, nodes, endpoints and more
    #[command(after_help = GET)]
    Get(Get),
    /// Create resources, such as pools and nodes, from a file
    #[command(after_help = CREATE)]
    Create(Create),
    /// Create or change resources so that they match a file
    #[command(after_help = APPLY)]
    Apply(Apply),
    /// Change existing resources so that they match a file
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
    which: DocumentSelection,

    /// Leave out the UID, version and creation time of resources requested by name
    #[arg(long)]
    export: bool,

    /// Succeed even if the files contain no resource
    #[arg(long, requires = "filename")]
    skip_empty: bool,

    // `--namespace` and `--all-namespaces` are accepted for every document kind, because scripts for calicoctl pass
    // them for all kinds.
    /// Namespace of the workload endpoints [default: default]
    #[arg(short, long)]
    namespace: Option<String>,

    /// List the workload endpoints of all namespaces
    #[arg(short = 'A', long, short_alias = 'a')]
    all_namespaces: bool,
}

/// The arguments of `create`.
#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    change: WriteArgs,

    /// Skip resources that exist already, and count these resources as created
    #[arg(long)]
    skip_exists: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Apply {
    #[command(flatten)]
    change: WriteArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Replace {
    #[command(flatten)]
    change: WriteArgs,
}

/// The arguments of `apply` and `replace`.
#[derive(Debug, Args)]
pub(crate) struct WriteArgs {
    #[command(flatten)]
    pub(crate) source: DocumentFiles,

    /// Dry run: do all checks, but write nothing to the store
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// The arguments of `delete`.
#[derive(Debug, Args)]
pub(crate) struct Delete {
    #[command(flatten)]
    pub(crate) which: DocumentSelection,

    /// Namespace of the workload endpoints [default: default]
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,

    /// Skip resources that do not exist, and count these resources as deleted
    #[arg(short, long)]
    pub(crate) skip_not_exists: bool,

    /// Dry run: do all checks, but delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    #[command(flatten)]
    pub(crate) bridged: BridgedPoolArgs,
}

/// The files that a command reads.
#[derive(Debug, Args)]
pub(crate) struct DocumentFiles {
    /// File of resources in YAML or JSON, - for stdin, or a folder of .yaml, .yml and .json files
    #[arg(short, long, value_name = "FILE", required = true)]
    filename: Vec<PathBuf>,

    /// Also read the subfolders of a folder
    #[arg(short = 'R', long)]
    recursive: bool,
}

/// A kind and names, or a file that has them.
#[derive(Debug, Args)]
pub(crate) struct DocumentSelection {
    /// Kind of resource, such as ippool or workloadendpoint
    #[arg(value_parser = kind, required_unless_present = "filename")]
    kind: Option<DocumentKind>,

    /// The names
    name: Vec<String>,

    /// File that names the resources, - for stdin, or a folder of .yaml, .yml and .json files
    #[arg(short, long, value_name = "FILE", conflicts_with = "kind")]
    filename: Vec<PathBuf>,

    /// Also read the subfolders of a folder
    #[arg(short = 'R', long, requires = "filename")]
    recursive: bool,
}

/// Parses a document kind from any of calicoctl's names for the kind.
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

/// Time limit of a command on documents, counted from the moment when the store is open. Deleting a pool document may
/// take long, because it needs one commit for each block of the pool.
const DOCUMENTS_TIMEOUT: Duration = Duration::from_secs(600);

#[async_trait(?Send)]
impl StoreCommand for Get {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let (which, scope) = (&self.which, NamespaceScope::by_get(self)?);
        let what = match which.kind {
            Some(kind) if which.name.is_empty() => ShownDocuments::All(kind),
            kind => {
                let manifests = match kind {
                    None if self.skip_empty => place_in_namespace(
                        change::read_any_documents(&which.filename, folder_depth(which.recursive))?,
                        &scope,
                    )?,
                    _ => read_selected(which, &scope)?,
                };
                // As in calicoctl, `--export` applies only to documents that are named on the command line, not to
                // documents from a file.
                let form = if self.export && kind.is_some() { DocumentForm::Export } else { DocumentForm::Stored };
                let name = |one: &Manifest| (one.kind(), one.name().to_owned());
                ShownDocuments::Named(manifests.iter().map(name).collect(), form)
            }
        };
        at.carry_out(&ShowDocuments { what, scope }).await
    }
}

struct ShowDocuments<'a> {
    what: ShownDocuments,
    scope: NamespaceScope<'a>,
}

enum ShownDocuments {
    All(DocumentKind),
    Named(Vec<(DocumentKind, String)>, DocumentForm),
}

#[async_trait(?Send)]
impl OpenStoreCommand for ShowDocuments<'_> {
    fn store_use(&self) -> StoreUse {
        StoreUse::Read
    }

    fn timeout_after_open(&self) -> Duration {
        DOCUMENTS_TIMEOUT
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        match &self.what {
            ShownDocuments::All(kind) => get::get_all(operator, *kind, &self.scope, deadline).await,
            ShownDocuments::Named(names, form) => get::get_named(operator, names, *form, &self.scope, deadline).await,
        }
    }
}

#[async_trait(?Send)]
impl StoreCommand for Create {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let writing = WriteDocuments::of(WriteMode::Create, &self.change, at)?;
        at.carry_out(&writing.skipping(self.skip_exists)).await
    }
}

#[async_trait(?Send)]
impl StoreCommand for Apply {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        at.carry_out(&WriteDocuments::of(WriteMode::Apply, &self.change, at)?).await
    }
}

#[async_trait(?Send)]
impl StoreCommand for Replace {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        at.carry_out(&WriteDocuments::of(WriteMode::Replace, &self.change, at)?).await
    }
}

#[async_trait(?Send)]
impl StoreCommand for Delete {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        if self.which.kind.is_some() && self.which.name.is_empty() {
            return Err(CommandFailure::new("resource name must be specified")
                .hint("name the resource to delete, such as: margay delete ippool main"));
        }
        let manifests = read_selected(&self.which, &NamespaceScope::by_delete(self))?;
        at.carry_out(&DeleteDocuments { args: self, manifests }).await
    }
}

/// Returns the documents that the command line selects, either by kind and name or from files.
fn read_selected(which: &DocumentSelection, scope: &NamespaceScope<'_>) -> CommandResult<Vec<Manifest>> {
    match which.kind {
        Some(kind) => which.name.iter().map(|name| scope.named(kind, name)).collect(),
        None => place_in_namespace(change::read_documents(&which.filename, folder_depth(which.recursive))?, scope),
    }
}

/// Places documents from files into the namespace that the command line selects.
fn place_in_namespace(manifests: Vec<Manifest>, scope: &NamespaceScope<'_>) -> CommandResult<Vec<Manifest>> {
    manifests.into_iter().map(|manifest| scope.of_file(manifest)).collect()
}

fn folder_depth(recursive: bool) -> FolderDepth {
    if recursive { FolderDepth::All } else { FolderDepth::Files }
}

/// The namespaces that the options `--namespace` and `--all-namespaces` select.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NamespaceScope<'a> {
    /// Neither `--namespace` nor `--all-namespaces` was given.
    Default,
    One(&'a str),
    All,
}

impl<'a> NamespaceScope<'a> {
    /// Returns the namespaces that a `get` command selects.
    ///
    /// # Errors
    /// Both `--namespace` and `--all-namespaces` are given, and the document kind has namespaces.
    fn by_get(get: &'a Get) -> CommandResult<Self> {
        let is_namespaced = get.which.kind.is_some_and(DocumentKind::is_namespaced);
        match &get.namespace {
            Some(_) if get.all_namespaces && is_namespaced => {
                Err(CommandFailure::new("cannot use both --namespace and --all-namespaces flags at the same time")
                    .hint("use either --namespace or --all-namespaces"))
            }
            _ if get.all_namespaces => Ok(Self::All),
            namespace => Ok(Self::by(namespace.as_deref())),
        }
    }

    /// Returns the namespaces that a `delete` command selects.
    fn by_delete(delete: &'a Delete) -> Self {
        Self::by(delete.namespace.as_deref())
    }

    fn by(namespace: Option<&'a str>) -> Self {
        namespace.map_or(Self::Default, Self::One)
    }

    /// True if `--namespace` or `--all-namespaces` was given.
    fn is_explicit(&self) -> bool {
        *self != Self::Default
    }

    /// Returns the namespaces whose documents a `get` command lists.
    fn listed(&self) -> Namespaces {
        match self {
            Self::All => Namespaces::All,
            Self::One(namespace) => Namespaces::One((*namespace).to_owned()),
            Self::Default => Namespaces::One(DEFAULT_NAMESPACE.to_owned()),
        }
    }

    /// Returns the document of the given kind and name in the selected namespace.
    ///
    /// # Errors
    /// All namespaces are selected, so the name does not identify a single document.
    fn named(&self, kind: DocumentKind, name: &str) -> CommandResult<Manifest> {
        match self {
            Self::All if kind.is_namespaced() => Err(single_resource_failure()),
            Self::One(namespace) => Ok(Manifest::named(kind, kind.full_name(namespace, name))),
            Self::All | Self::Default => Ok(Manifest::named(kind, kind.full_name(DEFAULT_NAMESPACE, name))),
        }
    }

    /// Checks the namespace of a document that was read from a file against the command line, and returns the document
    /// with its namespace.
    ///
    /// # Errors
    /// All namespaces are selected for a kind with namespaces, or the file names a different namespace than the command
    /// line.
    fn of_file(&self, manifest: Manifest) -> CommandResult<Manifest> {
        match self {
            Self::All if manifest.kind().is_namespaced() => Err(single_resource_failure()),
            Self::One(namespace) => manifest.within(namespace).map_err(|error| {
                CommandFailure::new(printable(&error.to_string()))
                    .hint("the file names a namespace other than --namespace; leave out --namespace")
            }),
            Self::All | Self::Default => Ok(manifest),
        }
    }
}

fn single_resource_failure() -> CommandFailure {
    CommandFailure::new("cannot use --all-namespace flag for getting a single resource")
        .hint("name the namespace of the resource: -n NAMESPACE")
}
