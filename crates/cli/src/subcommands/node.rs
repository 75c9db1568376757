//! Registers this machine as a node of a cluster in which Calico's node agent does not run, for the command `margay
//! node`.

use std::fs::{self, DirBuilder, File};
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use clap::{Args, Subcommand};
use host::NodeNames;
use ipam_core::model::{Labels, NodeFacts, check_name};
use ipam_operator::Operator;
use ipam_operator::documents::WriteOutcome;
use kv::Deadline;
use serde_json::json;

use crate::command::{CommandAnswer, OpenStoreCommand, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::{printable, write_whole_file};
use crate::store::{StoreAccess, StoreUse};

pub(crate) const NODE: &str = "\
Examples:
  margay node register
  margay delete node node1";

#[derive(Debug, Subcommand)]
pub(crate) enum NodeSubcommand {
    /// Register this machine as a node: its Node document, and the file with the node's name
    #[command(after_help = "\
The plugins of this machine read the node's name in the file. Labels and fields
that other programs wrote stay. Where Calico runs, its node agent does this.

Examples:
  margay node register
  margay node register --node node1 --address 192.0.2.10 --label rack=a
  margay node register --kubernetes --dry-run

Remove a node with: margay delete node NAME")]
    Register(NodeRegister),
}

#[derive(Debug, Args)]
pub(crate) struct NodeRegister {
    /// The node's name [default: the name in the file, else the host name in lower case]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,

    /// Address of the node; may be given several times
    #[arg(long = "address", value_name = "IP")]
    addresses: Vec<IpAddr>,

    /// Label of the node, which pools can select; may be given several times
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Record that the node has the same name in Kubernetes
    #[arg(long)]
    kubernetes: bool,

    /// File that gets the node's name
    #[arg(long, value_name = "FILE", default_value = host::NODENAME_FILE)]
    nodename_file: PathBuf,

    /// Dry run: do all checks, but write nothing
    #[arg(long)]
    dry_run: bool,
}

/// Parses a label of the form `NAME=VALUE`.
fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("not a label such as rack=a".to_owned()),
    }
}

#[async_trait(?Send)]
impl StoreCommand for NodeRegister {
    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let name = self.name()?;
        let facts = NodeFacts {
            addresses: self.addresses.clone(),
            labels: self.labels.iter().cloned().collect::<Labels>(),
            kubernetes_name: self.kubernetes.then(|| name.clone()),
        };
        let is_cluster = at.location.is_shared();
        at.carry_out(&RegisterNode { name, facts, is_cluster, args: self }).await
    }
}

impl NodeRegister {
    /// Returns the name under which to register the node: the name that the plugins of this machine use.
    ///
    /// # Errors
    /// The file has another node's name, or the name is not allowed in the name of a Node document.
    fn name(&self) -> CommandResult<String> {
        let file = self.nodename_file.as_path();
        let given = self.node.as_deref().unwrap_or_default();
        let name = NodeNames { given, file, former: "", hostname: &host::hostname() }.choose();
        let in_file = NodeNames { given: "", file, former: "", hostname: "" }.choose();
        if !in_file.is_empty() && in_file != name {
            let text = format!("{} names the node {}, not {name}", file.display(), printable(&in_file));
            return Err(CommandFailure::new(text).hint(format!(
                "to register this machine as {}, leave out --node; if it is a copy of that machine, or was renamed, \
                 end its containers, delete the file, and give the command again",
                printable(&in_file)
            )));
        }
        check_name(&name).map_err(|reason| {
            CommandFailure::new(format!("{name:?} cannot be the name of a node: {reason}"))
                .hint("name the node with --node, and set nodename in the network's configuration to the same name")
        })?;
        Ok(name)
    }

    /// True if the plugins, Calico's included, already read this name in the file. Calico reads a line break as part of
    /// the name.
    fn is_in_file(&self, name: &str) -> bool {
        fs::read(&self.nodename_file).is_ok_and(|bytes| bytes == name.as_bytes())
    }

    /// Writes the file with the node's name: without a line break, and readable for all users, as Calico's node agent
    /// does.
    fn write_file(&self, name: &str) -> CommandResult<()> {
        let file = &self.nodename_file;
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let made = DirBuilder::new().recursive(true).mode(0o755).create(folder);
        made.map_err(|error| {
            CommandFailure::new(format!("cannot create {}: {error}", folder.display())).hint(
                "run the command with sudo, or name another file with --nodename-file, and nodename_file in the \
                 network's configuration",
            )
        })?;
        write_whole_file(file, name)?;
        // A crash of the machine must not undo the renaming of the new file.
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(CommandFailure::new)
    }
}

struct RegisterNode<'a> {
    name: String,
    facts: NodeFacts,
    is_cluster: bool,
    args: &'a NodeRegister,
}

#[async_trait(?Send)]
impl OpenStoreCommand for RegisterNode<'_> {
    fn store_use(&self) -> StoreUse {
        StoreUse::Write
    }

    fn dry_run(&self) -> bool {
        self.args.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        let name = &self.name;
        let cluster = operator.cluster_information().await?;
        let written = operator.register_node(name, &self.facts, deadline).await?;
        // The file comes last: an ADD needs both, and fails with a better message without the file.
        let has_file = self.args.is_in_file(name);
        if !has_file && !self.args.dry_run {
            self.args.write_file(name)?;
        }
        let (state, text) = match written {
            WriteOutcome::Created => ("created", format!("Successfully registered node {name}")),
            WriteOutcome::Changed => ("changed", format!("Successfully changed node {name}")),
            WriteOutcome::Unchanged => ("exists", format!("Exists: node {name}")),
        };
        let file = printable(&self.args.nodename_file.display().to_string());
        let (file_state, file_text) = match has_file {
            true => ("exists", format!("Exists: {file}")),
            false => ("written", format!("Successfully written {file}")),
        };
        let json = json!({ "node": name, "state": state, "nodename_file": { "path": file, "state": file_state } });
        let answer = CommandAnswer::new(format!("{text}\n{file_text}"), &json)?;
        Ok(match cluster {
            None if self.is_cluster => {
                answer.note("the cluster is not set up yet; set it up with: margay cluster init --pool CIDR")
            }
            _ => answer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_names_and_values() {
        assert_eq!(label("rack=a=b"), Ok(("rack".to_owned(), "a=b".to_owned())));
        assert_eq!(label("rack="), Ok(("rack".to_owned(), String::new())));
        assert!(label("rack").is_err() && label("=a").is_err());
    }
}
